"""Sinusoids, rotary embeddings and positions within documents equal float64 loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.functional import rotary, sinusoidal_positions
from jaxformer.functional.positions import DocumentCursor, document_positions, rotary_frequencies
from jaxformer.models.config import RotaryScaling
from jaxformer.verify import rules
from tests.properties import oracle, tiny
from tests.slow import mostly_slow


def test_sinusoidal_positions_equal_hand_computed_values():
    """p[t] = sin t, cos t, sin t/100, cos t/100 for dim 4: sines and cosines alternate."""
    table = sinusoidal_positions(jnp.arange(3), 4)
    expected = [[np.sin(t), np.cos(t), np.sin(t / 100), np.cos(t / 100)] for t in range(3)]
    tiny.close(table, expected, 1e-6)


@given(positions=st.lists(st.integers(0, 10_000), min_size=5, max_size=5))
def test_sinusoids_equal_their_formula_at_large_positions(positions):
    """At positions up to 10,000 the float32 phase is accurate to 1e-3."""
    table = sinusoidal_positions(jnp.array(positions), 8)
    tiny.close(table, oracle.sinusoids(positions, 8), 1e-3)


@given(
    seed=tiny.seeds,
    positions=st.lists(st.integers(0, 8192), min_size=5, max_size=5),
    base=st.sampled_from([100.0, 10_000.0, 500_000.0]),
)
def test_rotary_embedding_rotates_pairs_of_features_as_complex_numbers(seed, positions, base):
    """(x[i], x[i + d/2]) is multiplied by e^{i t / base^(2i/d)}, up to position 8192."""
    x = tiny.embeddings(seed, 2, 5, 8)
    turned = rotary(x, jnp.array(positions), base)
    tiny.close(turned, oracle.rotary(np.asarray(x), positions, base), 2e-3)
    near = [position % 7 for position in positions]
    tiny.close(rotary(x, jnp.array(near), base), oracle.rotary(np.asarray(x), near, base), 1e-5)


@given(seed=tiny.seeds, one=st.integers(0, 50), other=st.integers(0, 50), shift=st.integers(0, 50))
def test_rotary_scores_depend_on_distance_alone(seed, one, other, shift):
    """⟨R_s q, R_t k⟩ = ⟨R_{s+c} q, R_{t+c} k⟩, and a rotation preserves lengths."""
    query, key = tiny.embeddings(seed, 2, 1, 1, 8)
    here, there = (
        (rotary(query, jnp.array([one + by])) * rotary(key, jnp.array([other + by]))).sum()
        for by in (0, shift)
    )
    tiny.close(here, there)
    tiny.close(jnp.linalg.norm(rotary(query, jnp.array([one]))), jnp.linalg.norm(query))


@pytest.mark.parametrize("position", [256, 4096, 8190])
def test_rotary_in_bfloat16_distinguishes_neighbouring_positions(position):
    """The phase is float32: each result is within one rounding of the float64 rotation."""
    x = tiny.embeddings(0, 1, 1, 64).astype(jnp.bfloat16)
    turned = [rotary(x, jnp.array([position + step])) for step in (0, 1)]
    assert turned[0].dtype == jnp.bfloat16 and (turned[0] != turned[1]).any()
    for step, y in enumerate(turned):
        expected = oracle.rotary(np.asarray(x, np.float64), [position + step])
        tiny.close(y, expected, 2**-8)


@given(seed=tiny.seeds, positions=st.lists(st.integers(0, 50), min_size=5, max_size=5))
@pytest.mark.parametrize("fraction", mostly_slow([0.25, 0.5, 1.0], 0.5, slow=[0.25]))
def test_partial_and_interleaved_rotary_are_rotations(fraction, seed, positions):
    """`fraction` rotates only the first features and leaves the rest bitwise equal.

    `interleaved` pairs neighbours: it equals the halves layout with the features permuted.
    """
    x, dim = tiny.embeddings(seed, 2, 5, 16), int(16 * fraction)
    order = np.arange(dim).reshape(2, -1).T.ravel()  # features 2i, 2i + 1 come from i, i + d/2
    halves = rotary(x, jnp.array(positions), fraction=fraction)
    neighbours = rotary(
        x.at[..., :dim].set(x[..., order]),
        jnp.array(positions),
        fraction=fraction,
        interleaved=True,
    )
    tiny.close(halves[..., :dim], oracle.rotary(np.asarray(x)[..., :dim], positions), 1e-5)
    tiny.close(neighbours[..., :dim], halves[..., order], 1e-6)
    for turned in (halves, neighbours):
        np.testing.assert_array_equal(turned[..., dim:], x[..., dim:])


SCALINGS = {
    "linear": RotaryScaling("linear", 4.0),
    "llama3": RotaryScaling("llama3", 8.0, original_length=512),
    "yarn": RotaryScaling("yarn", 4.0, original_length=512),
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_rotary_scaling_slows_low_frequencies_and_keeps_high_ones(kind):
    """Linear scaling divides all frequencies by the factor.

    "llama3" and "yarn" keep the highest frequency and divide the lowest by the factor. The ratio
    never rises in between.
    """
    scaling = SCALINGS[kind]
    plain, _ = rotary_frequencies(64, 10_000.0)
    scaled, factor = rotary_frequencies(64, 10_000.0, scaling)
    share = scaled / plain
    np.testing.assert_allclose(share[-1], 1 / scaling.factor, rtol=1e-6)
    np.testing.assert_allclose(share[0], 1 / scaling.factor if kind == "linear" else 1.0, rtol=1e-6)
    assert (np.diff(share) <= 1e-7).all() and (kind == "linear" or len(set(share)) > 2)
    assert (factor > 1.0) == (kind == "yarn")


def test_rotary_scaling_thresholds_equal_llama3_and_yarn_definitions():
    """llama3 counts wavelengths in the original length; yarn ramps over the pair index."""
    plain, _ = rotary_frequencies(64, 10_000.0)
    scaled, _ = rotary_frequencies(64, 10_000.0, SCALINGS["llama3"])
    waves = 512 * plain / (2 * np.pi)
    np.testing.assert_allclose(scaled[waves > 4] / plain[waves > 4], 1.0, rtol=1e-6)
    np.testing.assert_allclose(scaled[waves < 1] / plain[waves < 1], 1 / 8, rtol=1e-6)
    middle = (waves > 1) & (waves < 4)
    assert middle.any()
    mixed = ((waves - 1) / 3 + (1 - (waves - 1) / 3) / 8)[middle]
    np.testing.assert_allclose((scaled / plain)[middle], mixed, rtol=1e-5)
    scaled, factor = rotary_frequencies(64, 10_000.0, SCALINGS["yarn"])
    first, last = (np.searchsorted(-512 * plain / (2 * np.pi), -turns) for turns in (32, 1))
    np.testing.assert_allclose(scaled[: first - 1] / plain[: first - 1], 1.0, rtol=1e-6)
    np.testing.assert_allclose(scaled[last:] / plain[last:], 1 / 4, rtol=1e-6)
    np.testing.assert_allclose(factor, 0.1 * np.log(4.0) + 1.0)
    longer = rotary(jnp.ones((1, 1, 64)), jnp.zeros(1, int), scaling=SCALINGS["yarn"])
    np.testing.assert_allclose(longer, factor, rtol=1e-6)


def test_sinusoidal_and_rotary_positions_reject_an_odd_number_of_features():
    """Sinusoids and rotations pair the features, so their number must be even."""
    with pytest.raises(ValueError, match="dim is 5"):
        sinusoidal_positions(jnp.arange(3), 5)
    with pytest.raises(ValueError, match="x has head_dim 5"):
        rotary(jnp.ones((1, 3, 5)), jnp.arange(3))
    with pytest.raises(ValueError, match=r"head_dim 12, .*fraction \(0.25\) rotates 3"):
        rotary(jnp.ones((1, 3, 12)), jnp.arange(3), fraction=0.25)


read = jax.jit(document_positions)


@given(segment_ids=tiny.segment_batches(3, ids=(1, 2, 7, -1)))
def test_document_numbers_and_positions_equal_a_loop_over_segment_ids(segment_ids):
    """A document is a maximal run of one nonzero id. A repeated id starts a new document."""
    documents, positions, _ = read(segment_ids, DocumentCursor.begin(3))
    for index, ids in enumerate(segment_ids):
        expected = rules.read(ids)
        np.testing.assert_array_equal(documents[index], expected[0])
        np.testing.assert_array_equal(positions[index], expected[1])


@given(segment_ids=tiny.segment_batches(2), cuts=st.sets(st.sampled_from([4, 8])))
def test_document_positions_continue_across_chunks(segment_ids, cuts):
    """Chunks that pass on the cursor give the same documents and positions as one call."""
    whole = read(segment_ids, DocumentCursor.begin(2))
    cursor, parts = DocumentCursor.begin(2), []
    for part in np.split(segment_ids, sorted(cuts), axis=1):
        documents, positions, cursor = read(part, cursor)
        parts.append((documents, positions))
    for side, expected in zip(zip(*parts, strict=True), whole, strict=False):
        np.testing.assert_array_equal(np.concatenate(side, axis=1), expected)
    jax.tree.map(np.testing.assert_array_equal, cursor, whole[2])
