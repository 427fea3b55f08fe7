"""An interchange swaps coordinates of a rotated activation, in inspect and in generation."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.interpret import (
    InterchangePairs,
    InterchangeSite,
    LogitDifference,
    interchange,
    interchange_accuracy,
    interchange_patch,
    patch_sweep,
)
from tests.errors import error_of
from tests.properties import tiny
from tests.slow import mostly_rare

pytestmark = pytest.mark.usefixtures("quick_compilation")
DIM, LENGTH, LAYERS = tiny.SIZES["embed_dim"], 6, 3
few = settings(max_examples=5)


def orthogonal(seed, dim=DIM):
    """Returns a random orthogonal matrix [dim, dim] in float64."""
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(dim, dim)))[0]


@cache
def build(**options):
    return tiny.build(num_layers=LAYERS, **options)


def values_of(model, variables, tokens, site):
    captured = jf.inspect(model, variables, tokens, capture=(site.point,)).captured
    return captured[site.point][site.layer][:, list(site.positions)]


@given(seed=tiny.seeds, dim=st.sampled_from([1, 5]), data=st.data())
def test_interchange_swaps_the_first_coordinates_of_the_rotated_values(seed, dim, data):
    """R is the first k rows of an orthogonal matrix; in its basis, only k coordinates change."""
    k, basis = data.draw(st.integers(0, dim)), orthogonal(seed, dim)
    x, source = np.random.default_rng(seed + 1).normal(size=(2, 3, dim))
    rotated = x @ basis.T
    rotated[:, :k] = (source @ basis.T)[:, :k]
    arguments = (jnp.asarray(y, jnp.float32) for y in (x, source, basis[:k]))
    tiny.close(interchange(*arguments), rotated @ basis)


@pytest.mark.slow
@pytest.mark.parametrize("layers", mostly_rare(["scan", "unrolled"], "scan"))
@few
@given(seed=tiny.seeds, layer=st.integers(0, LAYERS - 1), k=st.integers(0, DIM))
def test_interchange_patch_equals_patching_the_values_of_the_formula(layers, seed, layer, k):
    model = build(layers=layers)
    variables, site = tiny.weights(model, seed), InterchangeSite(layer, (4, 1))
    tokens, source = tiny.tokens(seed, 2, LENGTH), tiny.tokens(seed + 1, 2, LENGTH)
    x, s = (np.asarray(values_of(model, variables, t, site)) for t in (tokens, source))
    rotation = orthogonal(seed)[:k]
    where, new = np.zeros((LAYERS, 1, 2, 1), bool), np.zeros((LAYERS, 2, 2, DIM))
    where[layer] = True
    new[layer] = x + (s - x) @ rotation.T @ rotation
    wanted = {site.point: jf.Patch(where, new, positions=jnp.array(site.positions))}
    found = interchange_patch(s, rotation, site)
    logits = [jf.inspect(model, variables, tokens, patch=p).logits for p in (found, wanted)]
    tiny.close(*logits)


@pytest.mark.slow
@few
@given(seed=tiny.seeds, layer=st.integers(0, LAYERS - 1), position=st.integers(0, LENGTH - 1))
def test_interchange_of_the_whole_space_has_the_effect_of_patch_sweep(seed, layer, position):
    model, metric = build(), LogitDifference(1, 2)
    variables, site = tiny.weights(model, seed), InterchangeSite(layer, (position,))
    clean, corrupted = tiny.tokens(seed, 1, LENGTH), tiny.tokens(seed + 1, 1, LENGTH)
    sweep = patch_sweep(model, variables, clean, corrupted, metric, site.point)
    source = values_of(model, variables, clean, site)
    patch = interchange_patch(source, orthogonal(seed), site)
    logits = jf.inspect(model, variables, corrupted, patch=patch).logits[:, -1]
    tiny.close(metric(logits) - sweep.corrupted, sweep.effects[layer, position], 1e-4)


def test_interchange_of_an_empty_subspace_does_not_change_the_logits():
    model = build()
    variables, site = tiny.weights(model, 0), InterchangeSite(1, (2,))
    tokens = tiny.tokens(0, 2, LENGTH)
    patch = interchange_patch(np.ones((2, 1, DIM)), np.zeros((0, DIM)), site)
    logits = [jf.inspect(model, variables, tokens, patch=p).logits for p in ({}, patch)]
    np.testing.assert_array_equal(*logits)


@pytest.mark.slow
def test_tokens_generated_with_an_interchange_equal_the_predictions_of_one_uncached_pass():
    """Position 7 is a generated token, which the model reads in a cached step of one token."""
    model = build()
    variables, site = tiny.weights(model, 3), InterchangeSite(LAYERS - 1, (1, 7))
    source = np.random.default_rng(0).normal(size=(2, 2, DIM)) * 3
    patch = interchange_patch(source, orthogonal(3)[:5], site)
    prompts, greedy = tiny.tokens(3, 2, LENGTH), jf.Sampler(temperature=0.0)
    out = jf.generate(model, variables, prompts, max_new_tokens=4, sampler=greedy, patch=patch)
    text = np.concatenate([prompts, out.tokens], axis=1)
    logits = jf.inspect(model, variables, text, patch=patch).logits
    np.testing.assert_array_equal(logits[:, LENGTH - 1 : -1].argmax(-1), out.tokens)
    plain = jf.generate(model, variables, prompts, max_new_tokens=4, sampler=greedy)
    assert (np.asarray(out.tokens) != plain.tokens).any()


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, pytest.param(32, marks=pytest.mark.slow)])
def test_interchange_accuracy_is_the_fraction_of_predicted_answers(size):
    model = build()
    # The last position decides the prediction, so a wrong layer or value changes the count.
    site = InterchangeSite(1, (0, LENGTH - 1), "block.middle")
    variables, rotation = tiny.weights(model, 5), orthogonal(5)[:7]
    base, source = tiny.tokens(5, 19, LENGTH), tiny.tokens(6, 19, LENGTH)
    patch = interchange_patch(values_of(model, variables, source, site), rotation, site)
    logits = jf.inspect(model, variables, base, patch=patch).logits
    answers = np.array(logits[:, -1].argmax(-1))
    answers[:2] = (answers[:2] + 1) % 13
    pairs = InterchangePairs(base, source, answers)
    found = interchange_accuracy(model, variables, pairs, rotation, site, size)
    assert found == pytest.approx(17 / 19)


def test_interchange_refuses_invalid_sites_pairs_and_rotations():
    model, rotation = build(), orthogonal(0)[:2]
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 2, LENGTH)

    def message_of(site=(0, (1,)), rotation=rotation, model=model, **changed):
        pairs = InterchangePairs(tokens, tokens, tokens[:, 0])._replace(**changed)
        weights = variables if model is build() else tiny.weights(model, 0)
        place = InterchangeSite(*site)
        return error_of(interchange_accuracy, model, weights, pairs, rotation, place)

    assert "layer is 3; the layers with the hook point" in message_of((3, (1,)))
    assert "positions are (6,); they must be below 6" in message_of((0, (6,)))
    assert "positions are (); they must be one or more different positions" in message_of((0, ()))
    assert "positions are (1, 1)" in message_of((0, (1, 1)))
    assert "positions are 1; they must be a tuple" in message_of((0, 1))
    assert "positions is -1; it must be" in message_of((0, (-1,)))
    assert "point is 'attention.heads'; it must be" in message_of((0, (1,), "attention.heads"))
    assert "point is 'embedding'; it must be" in message_of((0, (1,), "embedding"))
    assert "rotation has shape (2, 7); it must be [k, 8]" in message_of(rotation=rotation[:, :7])
    assert "the rows of rotation must be orthonormal" in message_of(rotation=2 * rotation)
    assert "source has shape (2, 5)" in message_of(source=tokens[:, :5])
    assert "ids are 0 … 12" in message_of(answers=np.array([1, 13]))
    assert "only models without a source" in message_of(model=tiny.build(jf.EncoderDecoderConfig))
    assert "it must be [batch, 2 (positions), dim]" in error_of(
        interchange_patch, np.ones((2, 1, DIM)), rotation, InterchangeSite(0, (1, 2))
    )
