"""Sinusoids, rotations and counting within documents, against loops in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.functional import rotary, sinusoidal_positions
from jaxformer.functional.positions import DocumentCursor, document_positions
from jaxformer.verify import rules
from tests.properties import oracle, tiny


def test_sinusoids_by_hand():
    """p[t] = sin t, cos t, sin t/100, cos t/100 for dim 4: sine and cosine alternate."""
    table = sinusoidal_positions(jnp.arange(3), 4)
    expected = [[np.sin(t), np.cos(t), np.sin(t / 100), np.cos(t / 100)] for t in range(3)]
    tiny.close(table, expected, 1e-6)


@given(positions=st.lists(st.integers(0, 10_000), min_size=5, max_size=5))
def test_sinusoids_are_their_formula_far_out(positions):
    """At positions up to 10,000 the float32 phase is good to 1e-3."""
    table = sinusoidal_positions(jnp.array(positions), 8)
    tiny.close(table, oracle.sinusoids(positions, 8), 1e-3)


@given(
    seed=tiny.seeds,
    positions=st.lists(st.integers(0, 8192), min_size=5, max_size=5),
    base=st.sampled_from([100.0, 10_000.0, 500_000.0]),
)
def test_rotary_is_a_complex_rotation_of_halves(seed, positions, base):
    """(x[i], x[i + d/2]) times e^{i t / base^(2i/d)}, in the halves layout, at 8192 too."""
    x = tiny.embeddings(seed, 2, 5, 8)
    turned = rotary(x, jnp.array(positions), base)
    tiny.close(turned, oracle.rotary(np.asarray(x), positions, base), 2e-3)
    near = [position % 7 for position in positions]
    tiny.close(rotary(x, jnp.array(near), base), oracle.rotary(np.asarray(x), near, base), 1e-5)


@given(seed=tiny.seeds, one=st.integers(0, 50), other=st.integers(0, 50), shift=st.integers(0, 50))
def test_rotary_scores_depend_on_distance_alone(seed, one, other, shift):
    """⟨R_s q, R_t k⟩ = ⟨R_{s+c} q, R_{t+c} k⟩, and a rotation keeps lengths."""
    query, key = tiny.embeddings(seed, 2, 1, 1, 8)
    here, there = (
        (rotary(query, jnp.array([one + by])) * rotary(key, jnp.array([other + by]))).sum()
        for by in (0, shift)
    )
    tiny.close(here, there)
    tiny.close(jnp.linalg.norm(rotary(query, jnp.array([one]))), jnp.linalg.norm(query))


@pytest.mark.parametrize("position", [256, 4096, 8190])
def test_rotary_in_bfloat16_still_tells_neighbours_apart(position):
    """The phase is float32: neighbours differ, each within one rounding of the float64 rotation."""
    x = tiny.embeddings(0, 1, 1, 64).astype(jnp.bfloat16)
    turned = [rotary(x, jnp.array([position + step])) for step in (0, 1)]
    assert turned[0].dtype == jnp.bfloat16 and (turned[0] != turned[1]).any()
    for step, y in enumerate(turned):
        expected = oracle.rotary(np.asarray(x, np.float64), [position + step])
        tiny.close(y, expected, 2**-8)


def test_an_odd_width_is_refused():
    """Pairs need an even width."""
    with pytest.raises(ValueError, match="dim is 5"):
        sinusoidal_positions(jnp.arange(3), 5)
    with pytest.raises(ValueError, match="head_dim is 5"):
        rotary(jnp.ones((1, 3, 5)), jnp.arange(3))


read = jax.jit(document_positions)


@given(segments=tiny.segment_batches(3, ids=(1, 2, 7, -1)))
def test_documents_and_positions_are_counted_as_by_a_loop(segments):
    """A maximal run of one id is a document, padding left out; an id that returns begins anew."""
    documents, positions, _ = read(segments, DocumentCursor.begin(3))
    for row, ids in enumerate(segments):
        expected = rules.read(ids)
        np.testing.assert_array_equal(documents[row], expected[0])
        np.testing.assert_array_equal(positions[row], expected[1])


@given(segments=tiny.segment_batches(2), cuts=st.sets(st.sampled_from([4, 8])))
def test_reading_goes_on_where_it_stopped(segments, cuts):
    """Cut into chunks, each told what the last one left: the same documents and positions."""
    whole = read(segments, DocumentCursor.begin(2))
    cursor, parts = DocumentCursor.begin(2), []
    for part in np.split(segments, sorted(cuts), axis=1):
        documents, positions, cursor = read(part, cursor)
        parts.append((documents, positions))
    for side, expected in zip(zip(*parts, strict=True), whole, strict=False):
        np.testing.assert_array_equal(np.concatenate(side, axis=1), expected)
    jax.tree.map(np.testing.assert_array_equal, cursor, whole[2])
