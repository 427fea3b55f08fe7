"""Score modifiers: caps, ALiBi, T5's relative bias and its gradient."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.functional import Causal, Packed, TokenInfo
from jaxformer.functional import dot_product_attention as attend
from jaxformer.functional.attention import blockwise, long_sequences
from jaxformer.functional.attention.scores import (
    Alibi,
    DenseBias,
    RelativeBias,
    Scores,
    alibi_slopes,
    relative_buckets,
)
from jaxformer.models.config import DecoderConfig, EncoderConfig
from jaxformer.verify import rules
from tests.functional.attention.test_attention import HEADS, random_inputs
from tests.properties import oracle, tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_blocks")
LENGTH, BUCKETS, FAR = 14, 6, 7
CONFIGS = {
    "relative": DecoderConfig(
        positions="relative", relative_buckets=BUCKETS, relative_distance=FAR, num_heads=HEADS
    ),
    "relative, both ways": EncoderConfig(
        positions="relative", relative_buckets=BUCKETS, relative_distance=FAR, num_heads=HEADS
    ),
    "alibi": DecoderConfig(positions="alibi", num_heads=HEADS),
}


def scores_of(config, table, cap):
    if config.positions == "alibi":
        return Scores(0.3, cap, Alibi(HEADS))
    return Scores(0.3, cap, RelativeBias(table, FAR, config.bidirectional))


def set_sequence_length(kind, monkeypatch):
    """Selects "short" sequences (unrolled tiles) or "long" ones (a loop over tiles)."""
    if kind == "long":
        monkeypatch.setattr(blockwise, "_LARGEST_TILE", 0)
        monkeypatch.setattr(long_sequences, "_LOOP_QUERIES", 5)
        monkeypatch.setattr(long_sequences, "_LOOP_KEYS", 4)


@pytest.mark.parametrize(
    "kind, sequence_length",
    mostly_slow(
        product(CONFIGS, ("short", "long")),
        ("relative", "short"),
        slow=[("relative, both ways", "long")],
    ),
)
def test_attention_with_softcap_and_position_bias_equals_formula(
    kind, sequence_length, monkeypatch
):
    """Values equal float64 loops. Tiled gradients equal those of the explicit formula.

    The gradients are for queries, keys, values and the bias table. Documents are packed, so
    positions restart.
    """
    set_sequence_length(sequence_length, monkeypatch)
    config = CONFIGS[kind]

    def run(implementation, query, key, value, cotangent, table, segment_ids, positions):
        info = TokenInfo(LENGTH, positions, segment_ids)

        def output(query, key, value, table):
            told = {"query_info": info, "key_info": info, "implementation": implementation}
            scores = scores_of(config, table, 1.5)
            return attend(query, key, value, Causal() & Packed(), scores=scores, **told)

        y, pull_back = jax.vjp(output, query, key, value, table)
        return y, pull_back(cotangent)

    compiled = jax.jit(run, static_argnums=0)

    @given(seed=tiny.seeds, segment_ids=tiny.segment_batches(2, length=LENGTH))
    def holds(seed, segment_ids):
        inputs = random_inputs(seed, 2, LENGTH)
        table = np.float32(np.random.default_rng(seed).normal(size=(BUCKETS, HEADS)))
        read = [rules.read(ids) for ids in segment_ids]
        documents, positions = (np.stack(side) for side in zip(*read, strict=True))
        given_all = (*inputs, table, jnp.asarray(documents), jnp.asarray(positions))
        plain, tiled = (compiled(how, *given_all) for how in ("explicit", "blockwise"))
        for index, ids in enumerate(segment_ids):
            params = {"relative_bias": {"table": np.float64(table)}}
            bias = oracle.scores_bias(params, positions[index], config)
            seen = rules.visible(ids)
            own = (x[index] for x in inputs[:3])
            tiny.close(plain[0][index], oracle.attention(*own, seen, 0.3, 1.5, bias), 1e-5)
        tiny.all_close(tiled, plain, 2e-5)

    holds()


@given(
    buckets=st.sampled_from([4, 6, 8, 32]),
    far=st.integers(17, 200),
    both=st.booleans(),
)
def test_relative_position_buckets_equal_those_of_t5(buckets, far, both):
    """Every offset falls into the bucket of T5's formula."""
    config = (EncoderConfig if both else DecoderConfig)(
        positions="relative", relative_buckets=buckets, relative_distance=far
    )
    found = relative_buckets(buckets, far, both)
    expected = np.array([oracle.relative_bucket(x, config) for x in range(-far, far + 1)])
    # Where the formula gives a whole number, rounding determines the bucket.
    assert (found != expected).sum() <= 4 and np.abs(found - expected).max() <= 1


def test_alibi_slopes_equal_those_of_the_paper():
    """Eight heads have 1/2, 1/4, …; twelve have those of eight and every second one of sixteen.

    Reference: Press et al. 2022.
    """
    assert alibi_slopes(8) == [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(12) == alibi_slopes(8) + alibi_slopes(16)[0:8:2]


@pytest.mark.slow
@given(seed=tiny.seeds)
def test_masks_and_biases_with_a_head_axis_apply_to_each_head_separately(seed):
    """Dense arrays with a head axis give the result of each head alone."""
    rng = np.random.default_rng(seed)
    query, key, value, _ = map(jnp.asarray, random_inputs(seed, HEADS, 6))
    mask, bias = rng.random((2, HEADS, 6, 6)) < 0.7, np.float32(rng.normal(size=(2, HEADS, 6, 6)))
    whole = attend(
        query, key, value, jnp.asarray(mask), scores=Scores(bias=DenseBias(jnp.asarray(bias)))
    )
    for index in range(2):
        for head in range(HEADS):
            own = (x[index, head : head + 1] for x in (query, key, value))
            alone = oracle.attention(*own, mask[index, head], bias=bias[index, head : head + 1])
            tiny.close(whole[index, head : head + 1], alone)
