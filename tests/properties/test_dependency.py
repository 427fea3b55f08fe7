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
        ("window", "blockwise", "unrolled", "none", "bfloat16"),
        ("prefix", "explicit", "unrolled", "full", "float32"),
        ("prefix+window", "blockwise", "scan", "none", "float32"),
        ("gpt-oss", "blockwise", "unrolled", "full", "float32"),
    ),
)
@tiny.many
@given(seed=tiny.seeds, segments=tiny.segment_batches(BATCH))
def test_jacobian_is_the_composed_rule(mask, attention, layers, remat, dtype, seed, segments):
    """∂ output i / ∂ input j ≠ 0 exactly where the composed rule has a path from j to i."""
    model = tiny.build(attention=attention, layers=layers, remat=remat, dtype=dtype, **MASKS[mask])
    x = tiny.embeddings(seed, BATCH, tiny.LENGTH, model.config.embed_dim)
    found = jacobian(model)(tiny.weights(model, seed), x, jnp.asarray(segments), None)
    exactly(found, rules.of(model.config, segments))


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
@given(seed=tiny.seeds, segments=tiny.segment_batches(BATCH))
def test_another_input_changes_the_composed_rule(mask, attention, layers, dtype, seed, segments):
    """Changing input j changes the outputs that have a path from j; the rest is bitwise equal."""
    model = tiny.build(attention=attention, layers=layers, dtype=dtype, **MASKS[mask])
    config = model.config
    x = tiny.embeddings(seed, BATCH, tiny.LENGTH, config.embed_dim)
    other = tiny.embeddings(seed + 1, config.embed_dim)
    found = changed(model)(tiny.weights(model, seed), x, jnp.asarray(segments), other)
    # In bfloat16, rounding may hide a small change.
    compare = within if dtype == "bfloat16" else exactly
    compare(found, rules.of(config, segments)[:, :, 0])


@pytest.mark.slow
@pytest.mark.parametrize("mask", mostly_slow(MASKS, "window", "prefix+window"))
@tiny.many
@given(seed=tiny.seeds)
def test_a_row_of_one_document_skips_blocks_and_keeps_the_rule(mask, seed):
    """Without segments, positions are static, and masked key blocks are skipped while tracing."""
    model = tiny.build(attention="blockwise", **MASKS[mask])
    x = tiny.embeddings(seed, BATCH, tiny.LENGTH, model.config.embed_dim)
    found = jacobian(model)(tiny.weights(model, seed), x, None, None)
    segments = np.ones((BATCH, tiny.LENGTH), int)
    exactly(found, rules.of(model.config, segments))


@tiny.many
@given(seed=tiny.seeds, segments=tiny.segment_batches(BATCH))
def test_without_the_residual_only_what_is_seen_counts(seed, segments):
    """With residual=False the masks alone compose, without the diagonal (lecture 10's decoder)."""
    model = tiny.build(**{**MASKS["window"], "residual": False, "norm": "none"})
    x = tiny.embeddings(seed, BATCH, tiny.LENGTH, model.config.embed_dim)
    found = jacobian(model)(tiny.weights(model, seed), x, jnp.asarray(segments), None)
    exactly(found, rules.of(model.config, segments))


@pytest.mark.slow
@tiny.many
@given(seed=tiny.seeds, segments=tiny.segment_batches(BATCH))
def test_options_keep_the_mask(seed, segments):
    """Capturing attention weights leaves the dependencies unchanged; dropout adds none."""
    x = tiny.embeddings(seed, BATCH, tiny.LENGTH, tiny.SIZES["embed_dim"])
    model = tiny.build(**MASKS["window"])
    rule, variables = rules.of(model.config, segments), tiny.weights(model, seed)
    segments, key = jnp.asarray(segments), jax.random.key(seed)
    found = jacobian(model, capture=("attention.weights",))(variables, x, segments, None)
    exactly(found, rule)
    model = tiny.build(dropout=0.3, **MASKS["window"])
    found = jacobian(model, dropout=True)(variables, x, segments, key)
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
        tokens = Tokens.of_sequences(Inputs(x), Run(model.execution))

        def output(x):
            return one_number(run_stack(stack, {"blocks": blocks}, x, tokens).hidden)

        return by_jacobian(output, x)

    return model, jax.jit(run)


@pytest.mark.slow
@pytest.mark.parametrize("attention, layers", [("explicit", "unrolled"), ("blockwise", "scan")])
@tiny.many
@given(seed=tiny.seeds, table=arrays(bool, (7, 7), elements=st.booleans()))
def test_any_table_composes_and_the_residual_adds_the_diagonal(attention, layers, seed, table):
    """Holds for tables without the diagonal and with fully masked queries."""
    model, run = jacobian_through_tables(attention, layers)
    x = tiny.embeddings(seed, 1, 7, model.config.embed_dim)
    blocks = tiny.weights(model, seed)["params"]["blocks"]
    found = run(blocks, x, jnp.asarray(table)[None])[0, :, 0]
    paths = rules.composed([table] * model.config.num_layers, np.ones(7, bool))
    exactly(found, paths)
