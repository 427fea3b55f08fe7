"""Every view accepts layers of any kind, or says which layer lacks what the view needs."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.functional import (
    Attention,
    Convolution,
    LayerNorm,
    Lstm,
    Plain,
    Recurrent,
    Residual,
)
from jaxformer.interpret import explain
from jaxformer.interpret.atlas import head_atlas
from jaxformer.interpret.attention import attention_maps
from jaxformer.interpret.attribution import attribute, input_gradients, state_norms
from jaxformer.interpret.edges import patch_edges
from jaxformer.interpret.encoded_text import EncodedText
from jaxformer.interpret.graph import Edge, Node
from jaxformer.interpret.lens import jacobian_lens, logit_lens, train_tuned_lens
from jaxformer.interpret.patching import LogitDifference
from tests.errors import error_of
from tests.properties import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")
LENGTH = 6
METRIC = LogitDifference(1, 2)
DIM = tiny.SIZES["embed_dim"]


def own(*mixers):
    """Returns a decoder whose layers have these sub-layers in place of attention."""
    model = tiny.build(num_layers=len(mixers))
    layers = model.architecture.stack.layers
    layers = [
        layer if mixer is None else (Residual(mixer, LayerNorm()), *layer[1:])
        for mixer, layer in zip(mixers, layers, strict=True)
    ]
    return replace(model, layers=tuple(layers))


def own_widths():
    """Returns a decoder whose layers have different widths and no residual stream."""
    model = tiny.build()
    layers = (
        (Plain(Recurrent(Lstm(), 6)),),
        (Plain(Recurrent(Lstm(), DIM)),),
    )
    return replace(model, layers=layers)


MODELS = {
    "short convolutions": lambda: tiny.build(layer_types="short_convolution"),
    "gated delta": lambda: tiny.build(layer_types="gated_delta"),
    "every second layer": lambda: tiny.build(layer_types=("short_convolution", "attention")),
    "parallel": lambda: tiny.build(parallel_block="separate_norms"),
    "parallel with one norm": lambda: tiny.build(parallel_block="shared_norm"),
    "experts": lambda: tiny.build(num_experts=3),
    "mixed experts": lambda: tiny.build(num_experts=(0, 3)),
    "gates and sinks": lambda: tiny.build(attention_gate=True, attention_sinks=True),
    "no residual": lambda: tiny.build(residual=False),
    "lstm": lambda: tiny.build(jf.RecurrentConfig, hidden_dim=6, tie_embeddings=False),
    "cnn": lambda: tiny.build(jf.ConvolutionalConfig),
    "own lstm": lambda: own(Recurrent(Lstm(), DIM), Recurrent(Lstm(), DIM)),
    "own mixture": lambda: own(None, Recurrent(Lstm(), DIM), None, Convolution((-1, 0))),
    "own heads": lambda: own(None, Attention(2, 2, 4)),
    "own widths": own_widths,
}
EDGE = Edge(Node("head", 0, 0), Node("query", 1, 0))
VIEWS = {
    "lens": lambda model, variables, tokens: logit_lens(model, variables, tokens),
    "tuned lens": lambda model, variables, tokens: train_tuned_lens(model, variables, [tokens]),
    "Jacobian lens": lambda model, variables, tokens: jacobian_lens(model, variables, tokens),
    "parts": lambda model, variables, tokens: attribute(model, variables, tokens, tokens[:, 0]),
    "gradients": lambda *given: input_gradients(*given, given[2][:, 0]),
    "states": state_norms,
    "atlas": head_atlas,
    "edges": lambda model, variables, tokens: (
        patch_edges(model, variables, tokens, tokens[::-1], METRIC, [EDGE]).effects
    ),
    "maps": lambda *given: attention_maps(*given[:2], EncodedText(given[2][0].tolist())).weights,
    "page": lambda *given: len(explain(*given[:2], given[2][0].tolist()).html),
}
NO_HEADS = "without 'attention' heads; it must be a Transformer with attention in every"
NO_STREAM = "a lens needs a residual stream, but layer 0 of this model has no residual"
NO_PARTS = "without attention layers; attribution requires a Transformer"
LACKING = "has no heads of 'attention', and layer {} has 4; all layers must have the same number"
MIXED = "layers 0 and 1 of the model have weights of different shapes; all layers must have equal"
OWN = "has user-defined layers; {} requires layers built from a config"
EDGES, PARTS = OWN.format("path patching"), OWN.format("attribution")
NO_MAPS = "attention is 'self'; the model is a {}, which has no attention"
WITHOUT_STREAM = dict.fromkeys(("lens", "tuned lens", "Jacobian lens"), NO_STREAM)
WITHOUT_HEADS = {"parts": NO_PARTS, "atlas": NO_HEADS, "edges": NO_HEADS}
REFUSED = {
    "short convolutions": WITHOUT_HEADS | {"maps": NO_MAPS.format("Decoder")},
    "gated delta": WITHOUT_HEADS | {"maps": NO_MAPS.format("Decoder")},
    "every second layer": {"parts": MIXED}
    | dict.fromkeys(("atlas", "edges"), f"layer 0 of the model {LACKING.format(1)}"),
    "mixed experts": {"parts": MIXED, "edges": MIXED},
    "gates and sinks": {"edges": "attention_gate is True; path patching requires attention"},
    "no residual": WITHOUT_STREAM
    | {"edges": "residual is False; path patching requires residual connections"},
    "lstm": WITHOUT_STREAM
    | WITHOUT_HEADS
    | {
        "maps": NO_MAPS.format("Recurrent"),
        "edges": "a Recurrent; path patching requires a Decoder",
    },
    "cnn": WITHOUT_HEADS
    | {"maps": NO_MAPS.format("Convolutional"), "edges": "path patching requires a Decoder"},
    "own lstm": WITHOUT_HEADS | {"maps": NO_MAPS.format("Decoder"), "edges": EDGES},
    "own mixture": {
        "parts": PARTS,
        "edges": EDGES,
        "atlas": f"layer 1 of the model {LACKING.format(0)}",
    },
    "own heads": {
        "parts": PARTS,
        "edges": EDGES,
        "atlas": "layer 1 of the model has 2 heads of 'attention', and layer 0 has 4",
        "maps": "attention.weights has different shapes in different layers",
        "page": "attention.weights has different shapes in different layers",
    },
    "own widths": WITHOUT_STREAM
    | WITHOUT_HEADS
    | {
        "maps": NO_MAPS.format("Decoder"),
        "edges": EDGES,
        "states": "recurrent.cell has different shapes in different layers",
    },
}


@cache
def setup(name):
    model = MODELS[name]()
    return model, tiny.weights(model, 0), tiny.tokens(0, 2, LENGTH)


@pytest.mark.parametrize("name", REFUSED)
def test_error_of_interpret_functions_states_what_a_custom_layer_lacks(name):
    for view, message in REFUSED[name].items():
        assert message in error_of(VIEWS[view], *setup(name))


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", MODELS)
def test_interpret_functions_give_finite_results_on_custom_layers(name, view):
    if view in REFUSED.get(name, {}):
        return
    found = jax.tree.leaves(VIEWS[view](*setup(name)))
    if view == "atlas":  # a score is NaN if it applies to no token of the text
        found = [x for x in found if not np.isnan(x).all()]
    assert found and all(np.isfinite(x).all() for x in found)
