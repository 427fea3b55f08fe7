"""An output depends on exactly those inputs that the mask rule, composed over layers, allows.

Each test compares the whole model, from embeddings to logits, with `rules.composed`, either by its
Jacobian or by changing one input at a time.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxformer.functional.attention.masks import DenseMask
from jaxformer.functional.inputs import Inputs, Run
from jaxformer.functional.layers.attention import Attention
from jaxformer.functional.stack import run_stack
from jaxformer.functional.tokens import Tokens
from jaxformer.verify import rules
from tests.properties import tiny
from tests.properties.witness import by_jacobian, changed, exactly, jacobian, one_number, within
from tests.slow import mostly_slow

MASKS = {
    "causal": {},
    "self": {"window": 1},
    "window": {"window": (3, None), "positions": "alibi", "norm": "rms"},
    "prefix": {"prefix": 3, "positions": "sinusoidal"},
    "prefix+window": {"prefix": 3, "window": (4, 2), "norm_position": "post"},
    "gpt-oss": {
        "window": (3, None),
        "positions": "rotary",
        "norm": "rms",
        "activation": "clipped_swiglu",
        "num_experts": 4,
        "router_bias": True,
        "attention_sinks": True,
    },
}
BATCH = 2


@pytest.mark.parametrize(
    "mask, attention, layers, remat, dtype",
    mostly_slow(
        product(
            ("causal", "window", "prefix", "prefix+window", "gpt-oss"),
            ("explicit", "blockwise"),
            ("scan", "unrolled"),
            ("none", "full"),
            ("float32", "bfloat16"),
        ),
        ("causal", "explicit", "scan", "full", "bfloat16"),
        slow=[
            ("window", "blockwise", "unrolled", "none", "bfloat16"),
            ("prefix", "explicit", "unrolled", "full", "float32"),
            ("prefix+window", "blockwise", "scan", "none", "float32"),
            ("gpt-oss", "blockwise", "unrolled", "full", "float32"),
        ],
    ),
)
@tiny.many
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH))
def test_nonzero_jacobian_entries_match_masks_composed_over_layers(
    mask, attention, layers, remat, dtype, seed, segment_ids
):
    """∂ output i / ∂ input j ≠ 0 exactly where the composed rule has a path from j to i."""
    model = tiny.build(attention=attention, layers=layers, remat=remat, dtype=dtype, **MASKS[mask])
    x = tiny.embeddings(seed, BATCH, tiny.LENGTH, model.config.embed_dim)
    found = jacobian(model)(tiny.weights(model, seed), x, jnp.asarray(segment_ids), None)
    exactly(found, rules.model_rule(model.config, segment_ids))


@pytest.mark.parametrize(
    "mask, attention, layers, dtype",
    mostly_slow(
        (
            ("causal", "explicit", "scan", "bfloat16"),
            ("self", "blockwise", "unrolled", "float32"),
            ("window", "blockwise", "scan", "float32"),
            ("prefix", "explicit", "unrolled", "float32"),
            ("prefix+window", "blockwise", "scan", "bfloat16"),
        ),
        ("causal", "explicit", "scan", "bfloat16"),
        ("window", "blockwise", "scan", "float32"),
    ),
)
@tiny.many
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH))
def test_changing_an_input_changes_only_the_outputs_that_depend_on_it(
    mask, attention, layers, dtype, seed, segment_ids
):
    """Changing input j changes the outputs that have a path from j; the rest is bitwise equal."""
    model = tiny.build(attention=attention, layers=layers, dtype=dtype, **MASKS[mask])
    config = model.config
    x = tiny.embeddings(seed, BATCH, tiny.LENGTH, config.embed_dim)
    other = tiny.embeddings(seed + 1, config.embed_dim)
    found = changed(model)(tiny.weights(model, seed), x, jnp.asarray(segment_ids), other)
    # In bfloat16, rounding may hide a small change.
    compare = within if dtype == "bfloat16" else exactly
    compare(found, rules.model_rule(config, segment_ids)[:, :, 0])


@pytest.mark.slow
@pytest.mark.parametrize("mask", mostly_slow(MASKS, "window", "prefix+window"))
@tiny.many
@given(seed=tiny.seeds)
def test_skipping_masked_key_blocks_does_not_change_dependencies(mask, seed):
    """Without segment ids, positions are static, and masked key blocks are skipped in tracing."""
    model = tiny.build(attention="blockwise", **MASKS[mask])
    x = tiny.embeddings(seed, BATCH, tiny.LENGTH, model.config.embed_dim)
    found = jacobian(model)(tiny.weights(model, seed), x, None, None)
    segment_ids = np.ones((BATCH, tiny.LENGTH), int)
    exactly(found, rules.model_rule(model.config, segment_ids))


@pytest.mark.slow
@tiny.many
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH))
def test_dependencies_without_residual_connections_equal_composed_masks(seed, segment_ids):
    """With residual=False the masks alone compose, without the diagonal (lecture 10's decoder)."""
    model = tiny.build(**{**MASKS["window"], "residual": False, "norm": "none"})
    x = tiny.embeddings(seed, BATCH, tiny.LENGTH, model.config.embed_dim)
    found = jacobian(model)(tiny.weights(model, seed), x, jnp.asarray(segment_ids), None)
    exactly(found, rules.model_rule(model.config, segment_ids))


@pytest.mark.slow
@tiny.many
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH))
def test_capturing_attention_weights_or_using_dropout_adds_no_dependencies(seed, segment_ids):
    """Capturing attention weights leaves the dependencies unchanged; dropout adds none."""
    x = tiny.embeddings(seed, BATCH, tiny.LENGTH, tiny.SIZES["embed_dim"])
    model = tiny.build(**MASKS["window"])
    rule, variables = rules.model_rule(model.config, segment_ids), tiny.weights(model, seed)
    segment_ids, key = jnp.asarray(segment_ids), jax.random.key(seed)
    found = jacobian(model, capture=("attention.weights",))(variables, x, segment_ids, None)
    exactly(found, rule)
    model = tiny.build(dropout=0.3, **MASKS["window"])
    found = jacobian(model, dropout=True)(variables, x, segment_ids, key)
    within(found, rule)


@dataclass(frozen=True)
class Tabled(Attention):
    """Self-attention with a mask that is an array, which may be traced."""

    table: Any = field(default=None, compare=False)

    @classmethod
    def of(cls, attention, table):
        return cls(**vars(attention), table=table)

    def context(self, tokens, shared):
        return replace(super().context(tokens, shared), mask=DenseMask(self.table))


@cache
def jacobian_through_tables(attention, layers):
    """Compiles the blocks alone with an arbitrary mask table. Returns (model, function)."""
    model = tiny.build(attention=attention, layers=layers)

    def run(blocks, x, table):
        def with_table(layer):
            return (replace(layer[0], sublayer=Tabled.of(layer[0].sublayer, table)), *layer[1:])

        stack = model.architecture.stack
        stack = replace(stack, layers=tuple(map(with_table, stack.layers)))
        tokens = Tokens.from_sequences(Inputs(x), Run(model.execution))

        def output(x):
            return one_number(run_stack(stack, {"blocks": blocks}, x, tokens).hidden)

        return by_jacobian(output, x)

    return model, jax.jit(run)


@pytest.mark.slow
@pytest.mark.parametrize("attention, layers", [("explicit", "unrolled"), ("blockwise", "scan")])
@tiny.many
@given(seed=tiny.seeds, table=arrays(bool, (7, 7), elements=st.booleans()))
def test_dependencies_through_all_layers_equal_boolean_product_of_their_masks(
    attention, layers, seed, table
):
    """Holds for tables without the diagonal and with fully masked queries."""
    model, run = jacobian_through_tables(attention, layers)
    x = tiny.embeddings(seed, 1, 7, model.config.embed_dim)
    blocks = tiny.weights(model, seed)["params"]["blocks"]
    found = run(blocks, x, jnp.asarray(table)[None])[0, :, 0]
    paths = rules.composed([table] * model.config.num_layers, np.ones(7, bool))
    exactly(found, paths)
