"""Gradients by the vectors of tokens and sizes of states, for every kind of model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.functional.taps import Patch
from jaxformer.interpret.attribution import (
    EMBEDDING,
    SOURCE_EMBEDDING,
    input_gradients,
    state_norms,
)
from tests.errors import error_of
from tests.properties import tiny
from tests.slow import mostly_rare

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODELS = {
    "decoder": {},
    "capped": {"logits_cap": 2.0, "norm_position": "post"},
    "encoder": {"kind": jf.EncoderConfig, "transform": True},
    "rnn": {"kind": jf.RecurrentConfig, "cell": "rnn"},
    "lstm": {"kind": jf.RecurrentConfig},
    "cnn": {"kind": jf.ConvolutionalConfig, "kernel_size": 3, "activation": "gelu"},
    "encoder-decoder": {"kind": jf.EncoderDecoderConfig, "activation": "gelu"},
    "lstm encoder-decoder": {"kind": jf.RecurrentEncoderDecoderConfig},
}
ids = st.lists(st.integers(0, tiny.SIZES["vocab_size"] - 1), min_size=24, max_size=24)


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_rare(MODELS, "lstm"))
@given(tokens=ids, seed=st.integers(0, 99), position=st.integers(-12, 11))
def test_a_gradient_predicts_a_small_change_of_the_logit(name, tokens, seed, position):
    """(f(x + εu) − f(x − εu)) / 2ε = ∇f · u for a random direction u of all vectors."""
    model = tiny.build(**MODELS[name])
    variables = tiny.weights(model, seed)
    tokens = np.array(tokens).reshape(2, 12)
    source = tokens[:, ::-1] if model.config.reads_source else None
    target = tokens[:, 0]
    found = input_gradients(model, variables, tokens, target, position, source)
    parts = {EMBEDDING: found.tokens}
    if source is not None:
        parts[SOURCE_EMBEDDING] = found.source
    rng, step = np.random.default_rng(seed), 3e-3
    directions = {x: rng.normal(size=part.vectors.shape) for x, part in parts.items()}

    def logit(sign):
        patch = {
            x: Patch(True, part.vectors + sign * step * directions[x].astype(np.float32))
            for x, part in parts.items()
        }
        seen = jf.inspect(model, variables, tokens, source=source, patch=patch)
        return np.asarray(seen.logits)[[0, 1], position, target]

    np.testing.assert_allclose(logit(0), found.logit, rtol=1e-4, atol=1e-5)
    expected = sum(
        (np.asarray(part.gradient) * directions[x]).sum((1, 2)) for x, part in parts.items()
    )
    scale = sum(np.linalg.norm(part.gradient, axis=(1, 2)) for part in parts.values())
    error = np.abs((logit(1) - logit(-1)) / (2 * step) - expected)
    assert (error <= 0.05 * scale + 0.02).all(), (error, scale)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decoder", "lstm", "cnn"])
def test_later_tokens_have_no_gradient(name):
    model = tiny.build(**MODELS[name])
    tokens = tiny.tokens(0, 2, 12)
    found = input_gradients(model, tiny.weights(model, 0), tokens, tokens[:, 3], 6)
    norms = np.asarray(found.tokens.norms)
    assert (norms[:, 7:] == 0).all() and (norms[:, 5:7] > 0).all()
    gradient = np.asarray(found.tokens.gradient)
    np.testing.assert_allclose(norms, np.sqrt((gradient**2).sum(-1)), rtol=1e-5)
    products = (gradient * np.asarray(found.tokens.vectors)).sum(-1)
    np.testing.assert_allclose(found.tokens.products, products, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name, points",
    [
        ("decoder", ["block.output"]),
        ("rnn", ["block.output", "recurrent.hidden"]),
        ("lstm", ["block.output", "recurrent.hidden", "recurrent.cell"]),
    ],
)
def test_norms_are_those_of_the_captured_states(name, points):
    model = tiny.build(**MODELS[name])
    variables, tokens = tiny.weights(model, 0), tiny.tokens(1, 2, 12)
    found = state_norms(model, variables, tokens)
    assert sorted(found) == sorted(points)
    captured = jf.inspect(model, variables, tokens, capture=points).captured
    for point in points:
        expected = np.sqrt((np.asarray(captured[point], np.float64) ** 2).sum(-1))
        np.testing.assert_allclose(found[point], expected, rtol=1e-5)


def test_wrong_arguments_are_named():
    model = tiny.build(**MODELS["lstm"])
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 2, 12)

    def of(*arguments):
        return error_of(input_gradients, model, variables, *arguments)

    assert "target is (2, 12); it must be (2,)" in of(tokens, tokens)
    assert "ids are 0 … 12" in of(tokens, [1, 13])
    assert "position is 12; the texts have 12 tokens" in of(tokens, [1, 1], 12)
    assert "each text needs at least one token" in of(tokens[:, :0], [1, 1])
    assert "source was given, but a Recurrent reads none" in of(tokens, [1, 1], -1, [[1], [1]])
