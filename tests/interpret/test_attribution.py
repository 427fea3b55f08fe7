"""The parts of a logit add up; a gradient predicts a small change of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.functional.hooks import Patch
from jaxformer.functional.layers.norms import NORMS
from jaxformer.interpret.attribution import (
    EMBEDDING,
    SOURCE_EMBEDDING,
    _fixed_norm,
    attribute,
    input_gradients,
    state_norms,
)
from jaxformer.models.builders.parts import build_norm
from tests.errors import error_of
from tests.properties import tiny
from tests.slow import mostly_rare

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODELS = {
    "decoder": {},
    "llama": {"positions": "rotary", "norm": "rms", "activation": "swiglu"},
    "post-norm": {"norm_position": "post", "embedding_norm": True},
    "output norm": {"norm_position": "post_sublayer", "norm": "rms"},
    "gemma": {"norm_position": "sandwich", "norm": "rms_one_plus", "logits_softcap": 3.0},
    "parallel": {"parallel_block": "separate_norms", "head_bias": True, "tie_embeddings": False},
    "without norm": {"norm": "none", "residual": False, "num_layers": 1},
    "encoder": {"kind": jf.EncoderConfig, "transform": False},
    "encoder-decoder": {"kind": jf.EncoderDecoderConfig, "output_scale": 0.4},
    "post-norm encoder-decoder": {"kind": jf.EncoderDecoderConfig, "norm_position": "post"},
}
ids = st.lists(st.integers(0, tiny.SIZES["vocab_size"] - 1), min_size=24, max_size=24)


def read(model, tokens):
    """Returns (tokens [2, 12], source or None) from 24 ids."""
    tokens = np.array(tokens).reshape(2, 12)
    return tokens, tokens[:, ::-1] if model.config.reads_source else None


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_rare(MODELS, "gemma"))
@given(tokens=ids, seed=st.integers(0, 99), position=st.integers(-12, 11))
def test_logit_attributions_add_up_to_the_logit(name, tokens, seed, position):
    model = tiny.build(**MODELS[name])
    variables = tiny.weights(model, seed)
    tokens, source = read(model, tokens)
    target = tokens[:, 0]
    found = attribute(model, variables, tokens, target, position, source)
    uncapped = found.logit
    logits = tiny.apply(model)(variables, tokens, **({} if source is None else {"source": source}))
    if (cap := model.config.logits_softcap) is not None:
        uncapped = cap * np.tanh(uncapped / cap)
    np.testing.assert_allclose(uncapped, logits[[0, 1], position, target], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.total, found.logit, rtol=1e-4, atol=1e-4)


@given(tokens=ids, seed=st.integers(0, 99), layer=st.integers(0, 1), h=st.integers(0, 3))
def test_head_attribution_in_model_without_norms_equals_projected_output(tokens, seed, layer, h):
    """In a model without norms, the part is o_h W_O[h] u for the head's output o_h."""
    model = tiny.build(norm="none")
    variables, tokens = tiny.weights(model, seed), np.array(tokens).reshape(2, 12)
    found = attribute(model, variables, tokens, tokens[:, 1], 7)
    seen = jf.inspect(model, variables, tokens, capture=("attention.heads",))
    params = jax.tree.map(np.asarray, variables["params"])
    kernel = params["blocks"]["attention"]["output"]["kernel"][layer].reshape(4, 4, 8)[h]
    unembedding = params["embedding"]["tokens"][tokens[:, 1]]
    heads = np.asarray(seen.captured["attention.heads"])[layer, :, h, 7]
    wanted = np.einsum("bd,de,be->b", heads, kernel, unembedding)
    np.testing.assert_allclose(found.heads[:, layer, h], wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("norm", NORMS)
def test_norm_with_fixed_statistics_is_an_affine_function(norm):
    """The derivative in the direction x is the norm of x without its bias."""
    x = tiny.embeddings(0, 5, 8)[0] * 3 + 1
    config = jf.DecoderConfig(norm=norm)
    value = build_norm(config.resolved)
    weights = {} if value is None else value.init(8)
    weights = jax.tree.map(lambda w: w + jnp.linspace(-0.5, 0.5, w.size), weights)
    wanted = x if value is None else value(weights, x)
    found, derivative = jax.jvp(lambda x: _fixed_norm(weights, x, config), (x,), (x,))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(derivative, found - weights.get("bias", 0), rtol=1e-5, atol=1e-5)


def test_attribution_refuses_unsupported_models():
    tokens = np.ones((2, 12), int)
    lstm = tiny.build(jf.RecurrentConfig)
    with pytest.raises(ValueError, match="model is a Recurrent without attention layers"):
        attribute(lstm, tiny.weights(lstm, 0), tokens, tokens[:, 0])
    bert = tiny.build(jf.EncoderConfig, transform=True)
    with pytest.raises(ValueError, match="BERT's transform"):
        attribute(bert, tiny.weights(bert, 0), tokens, tokens[:, 0])
    model = tiny.build()
    variables = tiny.weights(model, 0)
    for target, position, message in (
        (tokens, -1, r"target has shape \(2, 12\); it must be \(2,\)"),
        ([1, 13], -1, r"target is \[ 1 13\]; ids are 0 … 12"),
        ([1, 1], 12, "position is 12; it must be in -12 … 11"),
        ([1, 1], -13, "position is -13; it must be a whole number of at least -12"),
    ):
        with pytest.raises(ValueError, match=message):
            attribute(model, variables, tokens, target, position)
    with pytest.raises(ValueError, match="id 13"):
        attribute(model, variables, tokens * 13, tokens[:, 0])


# ---- gradients by the vectors of tokens, and sizes of states, for every kind of model

KINDS = {
    "decoder": {},
    "capped": {"logits_softcap": 2.0, "norm_position": "post"},
    "encoder": {"kind": jf.EncoderConfig, "transform": True},
    "rnn": {"kind": jf.RecurrentConfig, "cell": "rnn"},
    "lstm": {"kind": jf.RecurrentConfig},
    "cnn": {"kind": jf.ConvolutionalConfig, "kernel_size": 3, "activation": "gelu"},
    "encoder-decoder": {"kind": jf.EncoderDecoderConfig, "activation": "gelu"},
    "lstm encoder-decoder": {"kind": jf.RecurrentEncoderDecoderConfig},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_rare(KINDS, "lstm"))
@given(tokens=ids, seed=st.integers(0, 99), position=st.integers(-12, 11))
def test_gradient_attributions_predict_small_changes_of_the_logit(name, tokens, seed, position):
    """(f(x + εu) − f(x − εu)) / 2ε = ∇f · u for a random direction u of all vectors."""
    model = tiny.build(**KINDS[name])
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
def test_input_gradient_is_zero_for_tokens_after_the_prediction(name):
    model = tiny.build(**KINDS[name])
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
def test_residual_state_norms_equal_norms_of_captured_values(name, points):
    model = tiny.build(**KINDS[name])
    variables, tokens = tiny.weights(model, 0), tiny.tokens(1, 2, 12)
    found = state_norms(model, variables, tokens)
    assert sorted(found) == sorted(points)
    captured = jf.inspect(model, variables, tokens, capture=points).captured
    for point in points:
        expected = np.sqrt((np.asarray(captured[point], np.float64) ** 2).sum(-1))
        np.testing.assert_allclose(found[point], expected, rtol=1e-5)


def test_error_of_computing_input_gradients_names_the_invalid_argument():
    model = tiny.build(**KINDS["lstm"])
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 2, 12)

    def of(*arguments):
        return error_of(input_gradients, model, variables, *arguments)

    assert "target has shape (2, 12); it must be (2,)" in of(tokens, tokens)
    assert "ids are 0 … 12" in of(tokens, [1, 13])
    assert "position is 12; it must be in -12 … 11" in of(tokens, [1, 1], 12)
    assert "each text needs at least one token" in of(tokens[:, :0], [1, 1])
    assert "source is not accepted, because Recurrent does not have an encoder" in of(
        tokens, [1, 1], -1, [[1], [1]]
    )
