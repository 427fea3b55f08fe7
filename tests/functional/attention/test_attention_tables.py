"""Attention with a mask array: shared by all heads, per head, and combined with a rule."""

from functools import cache
from inspect import unwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxformer.functional import Causal, TokenInfo
from jaxformer.functional import dot_product_attention as attend
from jaxformer.functional.attention.masks import DenseMask
from jaxformer.verify import rules
from tests.functional.attention.test_attention import (
    HEADS,
    IMPLEMENTATIONS,
    LENGTH,
    VALUE_DIM,
    check,
    random_inputs,
)
from tests.properties import oracle, tiny

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_blocks")


@pytest.mark.parametrize("kv_heads, implementation", [(1, "blockwise"), (2, "explicit")])
@given(seed=tiny.seeds, table=arrays(bool, (2, LENGTH, LENGTH), elements=st.booleans()))
def test_attention_with_mask_array_equals_formula(kv_heads, implementation, seed, table):
    """Any bool array can be the mask. Consecutive query heads share a key head."""
    table[:, ::5] = False  # some queries have no visible key
    check(None, implementation, random_inputs(seed, kv_heads), jnp.asarray(table), table)


@given(seed=tiny.seeds, table=arrays(bool, (2, LENGTH, LENGTH), elements=st.booleans()))
def test_mask_array_combines_with_a_causal_mask(seed, table):
    """DenseMask & Causal allows a key only if both do, also over several query blocks."""
    inputs, causal = random_inputs(seed, 2), rules.visible([1] * LENGTH)
    found = under_table_and_causal()(*map(jnp.asarray, (*inputs[:3], table)))
    for index in range(2):
        wanted = oracle.attention(*(x[index] for x in inputs[:3]), table[index] & causal)
        tiny.close(found[index], wanted)


@cache
def under_table_and_causal():
    def run(query, key, value, table):
        mask = DenseMask(table) & Causal()
        return attend(query, key, value, mask, implementation="blockwise")

    return jax.jit(run)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mask_heads", [1, HEADS])
@given(
    seed=tiny.seeds,
    segment_ids=tiny.segment_batches(),
    table=arrays(bool, (2, HEADS, LENGTH, LENGTH), elements=st.booleans()),
)
def test_mask_array_may_have_a_head_axis(mask_heads, implementation, seed, segment_ids, table):
    """[batch, heads or 1, queries, keys], as in torch and Flax, with padding masked as well."""
    inputs, table = random_inputs(seed, 2), table[:, :mask_heads]
    places = TokenInfo(LENGTH, None, jnp.asarray(segment_ids))
    found = np.asarray(by_head(implementation)(*map(jnp.asarray, (*inputs[:3], table)), places))
    assert found.shape == (2, HEADS, LENGTH, VALUE_DIM)
    for index, ids in enumerate(segment_ids):
        for head in range(HEADS):
            seen = table[index, head % mask_heads] & (ids != 0)
            query, key, value = (x[index, [head // (HEADS // x.shape[1])]] for x in inputs[:3])
            wanted = oracle.attention(query, key, value, seen)
            tiny.close(found[index, [head]][:, ids != 0], wanted[:, ids != 0])


@cache
def by_head(implementation):
    def run(query, key, value, table, places):
        both = {"query_info": places, "key_info": places}
        return attend(query, key, value, table, implementation=implementation, **both)

    return jax.jit(run)


def test_mask_with_wrong_number_of_heads_is_rejected():
    query, key, value, _ = map(jnp.asarray, random_inputs(0, 2))
    with pytest.raises(ValueError, match=r"mask has shape .*; its axis of heads must be 1 or 4"):
        unwrap(attend)(query, key, value, jnp.ones((2, 3, LENGTH, LENGTH), bool))
