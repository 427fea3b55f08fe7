"""The contributions of hidden units add up to the contribution of their feed-forward layer."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.interpret import NeuronAttribution, attribute, attribute_neurons
from tests.errors import error_of
from tests.interpret.test_attribution import MODELS, ids, read
from tests.properties import oracle, tiny
from tests.slow import mostly_rare, mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_rare(MODELS, "gemma", "encoder-decoder"))
@given(tokens=ids, seed=st.integers(0, 99), position=st.integers(-12, 11))
def test_unit_attributions_add_up_to_the_feedforward_attribution(name, tokens, seed, position):
    model = tiny.build(**MODELS[name])
    variables = tiny.weights(model, seed)
    tokens, source = read(model, tokens)
    arguments = (model, variables, tokens, tokens[:, 0], position, source)
    tiny.close(attribute_neurons(*arguments).total, attribute(*arguments).feedforward)


FORMULAS = {
    "layer norm": {},
    "sandwich": {"norm": "rms", "norm_position": "sandwich", "activation": "swiglu"},
}


@pytest.mark.parametrize("name", mostly_slow(FORMULAS, "layer norm"))
@given(tokens=ids, seed=st.integers(0, 99), layer=st.integers(0, 1), position=st.integers(0, 11))
def test_unit_attribution_equals_projected_unit_output(name, tokens, seed, layer, position):
    """The contribution is (γ ⊙ v / s) · u: output v of the unit, final norm s, unembedding u."""
    model = tiny.build(**FORMULAS[name])
    variables, tokens = tiny.weights(model, seed), np.array(tokens).reshape(2, 12)
    target = tokens[:, 1]
    found = attribute_neurons(model, variables, tokens, target, position)
    points = ("feedforward.hidden", "feedforward.output", "block.output")
    captured = jf.inspect(model, variables, tokens, capture=points).captured
    hidden, output, stream = (
        np.asarray(captured[name][at], np.float64)[:, position]
        for name, at in zip(points, (layer, layer, -1), strict=True)
    )
    params = oracle.float64(variables["params"])
    block = jax.tree.map(lambda x: x[layer], params["blocks"])
    vectors = hidden[..., None] * block["feedforward"]["down"]["kernel"]  # [batch, units, dim]
    bias = np.broadcast_to(block["feedforward"]["down"]["bias"], (2, 1, vectors.shape[-1]))
    written = np.concatenate([vectors, bias], axis=1)
    if name == "sandwich":
        written = rescaled(written, output, block["feedforward_output_norm"], centers=False)
    normed = rescaled(written, stream, params["final_norm"], centers=name == "layer norm")
    wanted = np.einsum("bud,bd->bu", normed, params["embedding"]["tokens"][target])
    tiny.close(found.units[:, layer], wanted[:, :-1])
    tiny.close(found.bias[:, layer], wanted[:, -1])
    tiny.close(found.activations[:, layer], hidden)


def rescaled(x, at, weights, *, centers):
    """Returns what x adds to the norm of `at`, without the norm's bias."""
    if centers:
        x, at = (y - y.mean(-1, keepdims=True) for y in (x, at))
    scale = np.sqrt((at**2).mean(-1) + 1e-5)
    return weights["scale"] * x / scale[:, None, None]


@given(seed=tiny.seeds, k=st.sampled_from([1, 5, 24]))
def test_top_units_are_those_with_the_largest_absolute_contributions(seed, k):
    units = np.asarray(tiny.embeddings(seed, 2, 2, 12))
    top = NeuronAttribution(units, units[..., 0], units).top(k)
    for row in range(2):
        wanted = sorted(units[row].ravel(), key=abs, reverse=True)[:k]
        np.testing.assert_array_equal(top.contribution[row], wanted)
        np.testing.assert_array_equal(units[row, top.layer[row], top.unit[row]], wanted)


def test_neuron_attribution_rejects_layers_whose_output_is_not_a_sum_over_hidden_units():
    tokens = tiny.tokens(0, 2, 12)

    def message_of(**options):
        model = tiny.build(**options)
        return error_of(attribute_neurons, model, tiny.weights(model, 0), tokens, tokens[:, 0])

    assert "its feed-forward layers have experts" in message_of(num_experts=4)
    assert "output_activation is True" in message_of(output_activation=True)
    assert "without attention layers" in message_of(kind=jf.RecurrentConfig)
    model = tiny.build()
    found = attribute_neurons(model, tiny.weights(model, 0), tokens, tokens[:, 0])
    assert "k is 25; it must be at most 24" in error_of(found.top, 25)
    assert "k is 0; it must be a whole number of at least 1" in error_of(found.top, 0)
