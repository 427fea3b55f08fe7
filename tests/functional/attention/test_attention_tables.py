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
def test_any_table_is_its_formula(kv_heads, implementation, seed, table):
    """Any bool array can be the mask. Consecutive query heads share a key head."""
    table[:, ::5] = False  # some queries have no visible key
    check(None, implementation, random_inputs(seed, kv_heads), jnp.asarray(table), table)


@given(seed=tiny.seeds, table=arrays(bool, (2, LENGTH, LENGTH), elements=st.booleans()))
def test_a_table_combines_with_a_rule(seed, table):
    """DenseMask & Causal allows a key only if both do, also over several query blocks."""
    inputs, causal = random_inputs(seed, 2), rules.visible([1] * LENGTH)
    found = under_table_and_causal()(*map(jnp.asarray, (*inputs[:3], table)))
    for row in range(2):
        wanted = oracle.attention(*(x[row] for x in inputs[:3]), table[row] & causal)
        tiny.close(found[row], wanted)


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
    segments=tiny.segment_batches(),
    table=arrays(bool, (2, HEADS, LENGTH, LENGTH), elements=st.booleans()),
)
def test_a_table_may_have_an_axis_of_heads(mask_heads, implementation, seed, segments, table):
    """[batch, heads or 1, queries, keys], as in torch and Flax, with padding masked as well."""
    inputs, table = random_inputs(seed, 2), table[:, :mask_heads]
    places = TokenInfo(LENGTH, None, jnp.asarray(segments))
    found = np.asarray(by_head(implementation)(*map(jnp.asarray, (*inputs[:3], table)), places))
    assert found.shape == (2, HEADS, LENGTH, VALUE_DIM)
    for row, ids in enumerate(segments):
        for head in range(HEADS):
            seen = table[row, head % mask_heads] & (ids != 0)
            query, key, value = (x[row, [head // (HEADS // x.shape[1])]] for x in inputs[:3])
            wanted = oracle.attention(query, key, value, seen)
            tiny.close(found[row, [head]][:, ids != 0], wanted[:, ids != 0])


@cache
def by_head(implementation):
    def run(query, key, value, table, places):
        both = {"query_info": places, "key_info": places}
        return attend(query, key, value, table, implementation=implementation, **both)

    return jax.jit(run)


def test_a_mask_with_the_wrong_number_of_heads_is_rejected():
    query, key, value, _ = map(jnp.asarray, random_inputs(0, 2))
    with pytest.raises(ValueError, match=r"mask is \(2, 3, 12, 12\); .* 1 or 4, the query's"):
        unwrap(attend)(query, key, value, jnp.ones((2, 3, LENGTH, LENGTH), bool))
