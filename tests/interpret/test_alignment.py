"""Distributed alignment search recovers a planted subspace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.interpret import (
    AlignmentSettings,
    InterchangePairs,
    InterchangeSite,
    interchange_accuracy,
    train_alignment,
)
from jaxformer.interpret.alignment import _rotation, _split
from tests.errors import error_of
from tests.properties import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")
DIM, VALUES = tiny.SIZES["embed_dim"], 3
SITE = InterchangeSite(0, (0,))
FILLER = VALUES * VALUES  # the id of the last token, whose vector is 0


def planted(seed):
    """Returns (model, variables, basis of variable a [2, dim]) with two planted variables.

    Token a · VALUES + b has the vector code(a) A + code(b) B, where A and B are orthogonal planes.
    Layer 1 adds the mean of all positions to the last token, from which the head predicts the token
    with the nearest vector. All other weights are 0.
    """
    model = tiny.build(
        num_layers=2,
        num_heads=1,
        num_kv_heads=1,
        head_dim=DIM,
        norm="none",
        positions="none",
        tie_embeddings=False,
        use_bias=False,
    )
    basis = np.linalg.qr(np.random.default_rng(seed).normal(size=(DIM, DIM)))[0]
    angles = 2 * np.pi * np.arange(VALUES) / VALUES
    codes = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    vectors = np.zeros((tiny.SIZES["vocab_size"], DIM))
    first, second = np.divmod(np.arange(FILLER), VALUES)
    vectors[:FILLER] = codes[first] @ basis[:2] + codes[second] @ basis[2:4]
    params = jax.tree.map(np.zeros_like, tiny.weights(model, 0)["params"])
    params["embedding"]["tokens"] += vectors
    params["head"]["kernel"] += 4 * vectors.T
    for name in ("value", "output"):
        params["blocks"]["attention"][name]["kernel"][1] += np.eye(DIM)
    return model, {"params": jax.tree.map(jnp.asarray, params)}, basis[:2]


def planted_pairs(seed, count):
    """Returns pairs whose answer combines variable a of the source with variable b of the base."""
    rng = np.random.default_rng(seed)
    base, source = rng.integers(0, FILLER, (2, count))
    answers = source // VALUES * VALUES + base % VALUES
    texts = (np.stack([x, np.full(count, FILLER)], axis=1) for x in (base, source))
    return InterchangePairs(*texts, answers)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_alignment_recovers_the_subspace_of_a_planted_variable(seed):
    model, variables, plane = planted(seed)
    pairs = planted_pairs(seed, 120)
    assert interchange_accuracy(model, variables, pairs, plane, SITE) == 1
    options = AlignmentSettings(learning_rate=0.05, seed=seed)
    found = train_alignment(model, variables, pairs, SITE, 2, options)
    assert found.accuracy == 1 and found.initial_accuracy < 0.8
    assert found.losses[-10:].mean() < 0.4 * found.losses[:10].mean()
    cosines = np.linalg.svd(plane @ np.asarray(found.rotation, np.float64).T)[1]
    assert cosines.min() > 0.99, cosines
    other = planted_pairs(seed + 7, 50)
    assert interchange_accuracy(model, variables, other, found.rotation, SITE) == 1


@given(seed=tiny.seeds, dim=st.sampled_from([1, 5]), data=st.data())
def test_alignment_rotation_is_an_orthonormal_basis(seed, dim, data):
    size = data.draw(st.integers(1, dim))
    free = np.random.default_rng(seed).normal(size=(dim, size))
    found = np.asarray(_rotation(jnp.asarray(free, jnp.float32)), np.float64)
    tiny.close(found @ found.T, np.eye(size), 1e-5)
    tiny.close(found.T @ found, free @ np.linalg.pinv(free), 1e-3)


@given(seed=tiny.seeds, count=st.integers(2, 60), held_out=st.floats(0.1, 0.9))
def test_no_held_out_pair_is_used_for_training(seed, count, held_out):
    if not 0 < round(held_out * count) < count:
        return
    tested, trained = _split(count, held_out, np.random.default_rng(seed))
    assert len(tested) == round(held_out * count)
    assert sorted([*tested, *trained]) == list(range(count))


@pytest.mark.slow
def test_alignment_measures_accuracy_on_held_out_pairs():
    """The held-out pairs have wrong answers, so the accuracy must be 0."""
    model, variables, _ = planted(0)
    pairs, options = planted_pairs(0, 60), AlignmentSettings(steps=60, learning_rate=0.05)
    tested, _ = _split(60, options.held_out, np.random.default_rng(options.seed))
    answers = pairs.answers.copy()
    answers[tested] = FILLER
    found = train_alignment(model, variables, pairs._replace(answers=answers), SITE, 2, options)
    assert found.accuracy == 0 and found.losses[-1] < found.losses[0]


def test_alignment_rejects_invalid_sizes_and_settings():
    model, variables, _ = planted(0)
    arguments = (model, variables, planted_pairs(0, 2), SITE)
    assert "size is 9; it must be at most 8" in error_of(train_alignment, *arguments, 9)
    assert "size is 0; it must be" in error_of(train_alignment, *arguments, 0)
    assert "so 0 of 2 pairs are held out" in error_of(
        train_alignment, *arguments, 2, AlignmentSettings(held_out=0.1)
    )
    for settings, message in (
        ({"steps": 0}, "steps is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"held_out": 1.0}, "held_out is 1.0"),
        ({"held_out": 0.0}, "held_out is 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            AlignmentSettings(**settings)
