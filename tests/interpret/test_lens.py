"""Lenses: what each state predicts, and the maps that translate it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.interpret.lens import (
    Translators,
    jacobian_lens,
    logit_lens,
    no_translators,
    train_tuned_lens,
)
from tests.properties import tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODELS = {
    "decoder": {},
    "gemma": {"norm_position": "sandwich", "norm": "rms_one_plus", "logits_softcap": 3.0},
    "post-norm": {"norm_position": "post"},
    "encoder": {"kind": jf.EncoderConfig, "transform": True},
    "encoder-decoder": {"kind": jf.EncoderDecoderConfig, "output_scale": 0.4},
    "gated delta": {"layer_types": "gated_delta"},
    "cnn": {"kind": jf.ConvolutionalConfig},
}
VOCAB = tiny.SIZES["vocab_size"]


def read(model, seed):
    """Returns (variables, tokens [2, 12], the keyword arguments of the source)."""
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (2, 12))
    source = {"source": tokens[:, ::-1]} if model.config.reads_source else {}
    return tiny.weights(model, seed), tokens, source


@pytest.mark.parametrize("name", mostly_slow(MODELS, "gemma", slow=["cnn"]))
@given(seed=st.integers(0, 999))
def test_logit_lens_of_the_last_layer_equals_the_logits(name, seed):
    model = tiny.build(**MODELS[name])
    variables, tokens, source = read(model, seed)
    found = logit_lens(model, variables, tokens, top_k=VOCAB, **source)
    shares = jax.nn.softmax(tiny.apply(model)(variables, tokens, **source))
    probabilities = np.take_along_axis(np.asarray(shares), np.asarray(found.tokens[-1]), -1)
    np.testing.assert_allclose(found.probabilities[-1], probabilities, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.divergence[-1], 0, atol=1e-5)
    np.testing.assert_allclose(found.probabilities.sum(-1), 1, rtol=1e-5)
    entropy = -(found.probabilities * jnp.log(found.probabilities)).sum(-1)
    np.testing.assert_allclose(found.entropy, entropy, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@given(seed=st.integers(0, 999), layer=st.integers(0, 2))
def test_logit_lens_of_layer_i_equals_model_with_only_layers_up_to_i(seed, layer):
    """The lens of layer i equals a model that has only the layers up to i."""
    model, short = tiny.build(), tiny.build(num_layers=max(layer, 1))
    variables, tokens, _ = read(model, seed)
    found = logit_lens(model, variables, tokens, top_k=3)
    params = dict(variables["params"])
    params["blocks"] = jax.tree.map(lambda x: x[: max(layer, 1)], params["blocks"])
    patch = {}
    if layer == 0:  # a layer that adds nothing
        seen = jf.inspect(model, variables, tokens, capture=("embedding",))
        patch = {
            "block.output": jf.Patch(np.ones((1, 1, 1, 1), bool), seen.captured["embedding"][None])
        }
    logits = jf.inspect(short, {"params": params}, tokens, patch=patch).logits
    best, ids = jax.lax.top_k(jax.nn.softmax(logits), 3)
    np.testing.assert_allclose(found.probabilities[layer], best, rtol=1e-4, atol=1e-6)
    close = np.isclose(best[..., :-1], best[..., 1:], rtol=1e-4).any()
    assert close or (found.tokens[layer] == ids).all()


def test_logit_lens_applies_affine_translators_to_hidden_states():
    model = tiny.build()
    variables, tokens, _ = read(model, 0)
    rng = np.random.default_rng(0)
    translators = Translators(rng.normal(size=(3, 8, 8)) / 8, rng.normal(size=(3, 8)))
    found = logit_lens(model, variables, tokens, translators=translators)
    seen = jf.inspect(model, variables, tokens, capture=("block.output",))
    state = np.asarray(seen.captured["block.output"])[0]
    state = state + state @ translators.kernel[1] + translators.bias[1]
    last = {"block.output": jf.Patch(np.array([0, 1], bool)[:, None, None, None], state[None])}
    logits = jf.inspect(model, variables, tokens, patch=last).logits
    best, _ = jax.lax.top_k(jax.nn.softmax(logits), 5)
    np.testing.assert_allclose(found.probabilities[1], best, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(["decoder", "encoder-decoder"], "decoder"))
def test_jacobian_lens_equals_finite_differences(name):
    """In float64 terms: the mean change of all last states for a small change at one position."""
    model = tiny.build(**MODELS[name])
    variables, tokens, source = read(model, 3)
    found = jacobian_lens(model, variables, tokens, **source).kernel + jnp.eye(8)
    np.testing.assert_allclose(found[-1], jnp.eye(8), atol=1e-5)
    seen = jf.inspect(model, variables, tokens, capture=("block.output",), **source)
    state = np.asarray(seen.captured["block.output"])[0]
    first = np.array([1, 0], bool)[:, None, None, None]

    def last(state):
        patch = {"block.output": jf.Patch(first, state[None])}
        seen = jf.inspect(
            model, variables, tokens, capture=("block.output",), patch=patch, **source
        )
        return np.asarray(seen.captured["block.output"], np.float64)[-1]

    for feature in (0, 5):
        slopes = []
        for position in range(12):
            step = np.zeros_like(state)
            step[:, position, feature] = 1e-2
            slopes.append((last(state + step) - last(state - step)).sum(1) / 2e-2)
        np.testing.assert_allclose(found[1, feature], np.mean(slopes, (0, 1)), rtol=2e-2, atol=1e-2)


@pytest.mark.slow
def test_a_tuned_lens_has_lower_divergence_than_a_logit_lens():
    model = tiny.build()
    variables, _, _ = read(model, 1)
    rng = np.random.default_rng(1)
    losses = []
    batches = (rng.integers(0, VOCAB, (8, 12)) for _ in range(150))
    tuned = train_tuned_lens(
        model, variables, batches, 1e-2, on_step=lambda number, loss: losses.append(loss)
    )
    assert (losses[-1][:-1] < 0.6 * losses[0][:-1]).all() and losses[-1][-1] < 1e-5
    new = rng.integers(0, VOCAB, (8, 12))
    plain, better = (
        logit_lens(model, variables, new, translators=x).divergence.mean((1, 2))
        for x in (no_translators(model), tuned)
    )
    assert (better[:-1] < 0.7 * plain[:-1]).all()


def test_logit_lens_and_tuned_lens_reject_invalid_arguments():
    model = tiny.build()
    variables, tokens, _ = read(model, 0)
    small = Translators(np.zeros((2, 8, 8)), np.zeros((2, 8)))
    for given_arguments, message in (
        ({"top_k": 0}, "top_k is 0; it must be a whole number of at least 1"),
        ({"top_k": 14}, r"top_k is 14; it must be in 1 … vocab_size \(13\)"),
        (
            {"translators": small},
            r"shape \(2, 8, 8\); for this model, it must be \(3, 8, 8\)",
        ),
        ({"source": [[1]]}, "source is not accepted"),
    ):
        with pytest.raises(ValueError, match=message):
            logit_lens(model, variables, tokens, **given_arguments)
    for tokens in (np.zeros((2, 0), int), np.zeros((2, 17), int), np.full((2, 12), 13)):
        with pytest.raises(ValueError, match="tokens"):
            logit_lens(model, variables, tokens)
    lstm = tiny.build(jf.RecurrentConfig)
    with pytest.raises(ValueError, match="model is a Recurrent; a lens needs"):
        logit_lens(lstm, tiny.weights(lstm, 0), np.ones((2, 12), int))
    pair = tiny.build(jf.EncoderDecoderConfig)
    with pytest.raises(ValueError, match="reads a source text"):
        train_tuned_lens(pair, tiny.weights(pair, 0), [])
