"""An edge patch is that of a NumPy model in float64, which shares no code with the package."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings

import jaxformer as jf
from jaxformer.interpret.edges import INPUTS, HeadEdge, patch_edges
from jaxformer.interpret.patching import LogitDifference
from tests.properties import oracle, tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
LENGTH, LAYERS, RIGHT, WRONG_TOKEN = 4, 3, 1, 2
METRIC = LogitDifference(RIGHT, WRONG_TOKEN)
few = settings(max_examples=max(3, settings().max_examples // 5))
EDGES = [
    HeadEdge(0, 1, 1, 2, "query"),
    HeadEdge(0, 3, 2, 1, "query"),
    HeadEdge(1, 0, 2, 3, "query"),
    HeadEdge(0, 2, 2, 1, "key"),
    HeadEdge(0, 0, 1, 0, "value"),
    HeadEdge(1, 3, 2, 1, "value"),
]


@cache
def build():
    return tiny.build(num_layers=LAYERS)


def run(params, tokens, config, edit=lambda layer, name, value, residual: value):
    """Runs a pre-norm decoder; `edit` changes queries, keys and values [heads, length, d].

    Returns (metric, residual stream before each layer, values of the heads of each layer).
    """
    params, residuals, outputs = oracle.float64(params), [], []
    x = params["embedding"]["tokens"][tokens] + params["embedding"]["positions"][: len(tokens)]
    seen = np.tril(np.ones((len(tokens), len(tokens)), bool))
    for layer in range(config.num_layers):
        block = take(params["blocks"], layer)
        attention = block["attention"]
        residuals.append(x)
        sides = [edit(layer, name, project(block, name, x, config), x) for name in INPUTS]
        z = oracle.attention(*sides, seen)
        outputs.append(z)
        x = x + oracle.linear(attention["output"], z.transpose(1, 0, 2).reshape(len(x), -1))
        normed = oracle.layer_norm(x, **block["feedforward_norm"])
        x = x + oracle.feed_forward(block["feedforward"], normed, config.activation)
    x = oracle.layer_norm(x, **params["final_norm"])
    logits = x[-1] @ params["embedding"]["tokens"].T
    return logits[RIGHT] - logits[WRONG_TOKEN], residuals, outputs


def take(tree, layer):
    return {name: take(x, layer) if isinstance(x, dict) else x[layer] for name, x in tree.items()}


def project(block, name, x, config):
    """Returns the queries, keys or values [heads, length, d] of a layer's input."""
    normed = oracle.layer_norm(x, **block["attention_norm"])
    projected = oracle.linear(block["attention"][name], normed)
    return projected.reshape(len(x), -1, config.head_dim).transpose(1, 0, 2)


def effect(params, clean, corrupted, config, edge):
    """Returns the effect of an edge by three runs of the NumPy model."""
    _, _, of_clean = run(params, clean, config)
    base, residuals, of_corrupted = run(params, corrupted, config)
    block = take(oracle.float64(params)["blocks"], edge.sender_layer)
    rows = slice(edge.sender_head * config.head_dim, (edge.sender_head + 1) * config.head_dim)
    kernel = block["attention"]["output"]["kernel"][rows]
    values = (z[edge.sender_layer][edge.sender_head] for z in (of_clean, of_corrupted))
    z_clean, z_corrupted = values
    changed = residuals[edge.receiver_layer] + (z_clean - z_corrupted) @ kernel

    def edit(layer, name, value, residual):
        if (layer, name) != (edge.receiver_layer, edge.receiver_input):
            return value
        np.testing.assert_allclose(residual, residuals[layer])  # earlier layers are unchanged
        receiver = take(oracle.float64(params)["blocks"], layer)
        value = value.copy()
        value[edge.receiver_head] = project(receiver, name, changed, config)[edge.receiver_head]
        return value

    return run(params, corrupted, config, edit)[0] - base


@pytest.mark.slow
@few
@given(seed=tiny.seeds)
def test_path_patching_effects_equal_a_numpy_implementation(seed):
    model = build()
    variables = tiny.weights(model, seed)
    clean, corrupted = tiny.tokens(seed, LENGTH), tiny.tokens(seed + 1, LENGTH)
    found = patch_edges(model, variables, clean[None], corrupted[None], METRIC, EDGES, chunk=3)
    wanted = [effect(variables["params"], clean, corrupted, model.config, edge) for edge in EDGES]
    tiny.close(found.effects, wanted, 3e-5)
    tiny.close(found.clean, run(variables["params"], clean, model.config)[0], 3e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(INPUTS, "key"))
def test_patching_all_paths_from_a_head_equals_patching_the_head(name):
    """With weights 0 in the feed-forward layers, one sending head is all that changes x.

    The patched input is then that of a run whose sender is patched, which `inspect` computes.
    """
    model = tiny.build(num_layers=2, positions="rotary", norm="rms", query_key_norm="head")
    variables = tiny.weights(model, 4)
    params = {**variables["params"]}
    feedforward = {
        part: {leaf: 0 * x for leaf, x in leaves.items()}
        for part, leaves in params["blocks"]["feedforward"].items()
    }
    params["blocks"] = {**params["blocks"], "feedforward": feedforward}
    variables = {"params": params}
    clean, corrupted = tiny.tokens(4, 1, LENGTH), tiny.tokens(5, 1, LENGTH)
    edge = HeadEdge(0, 1, 1, 1, name)
    found = patch_edges(model, variables, clean, corrupted, METRIC, [edge])

    def inspect(tokens, patch=None):
        capture = ("attention.heads", f"attention.{name}")
        return jf.inspect(model, variables, tokens, capture=capture, patch=patch)

    heads = inspect(clean).captured["attention.heads"]
    where = np.zeros((2, 1, 4, 1, 1), bool)
    where[0, 0, 1] = True
    sent = inspect(corrupted, {"attention.heads": jf.Patch(where, heads)})
    value = sent.captured[f"attention.{name}"]
    where = np.zeros((2, 1, value.shape[2], 1, 1), bool)
    where[1, 0, 1] = True
    logits = inspect(corrupted, {f"attention.{name}": jf.Patch(where, value)}).logits[0, -1]
    base = inspect(corrupted).logits[0, -1]
    wanted = (logits - base)[RIGHT] - (logits - base)[WRONG_TOKEN]
    tiny.close(found.effects, [wanted])


@pytest.mark.slow
def test_path_patching_of_equal_texts_reports_progress_and_zero_effects():
    model, calls = build(), []
    tokens = tiny.tokens(0, 1, LENGTH)
    found = patch_edges(
        model,
        tiny.weights(model, 0),
        tokens,
        tokens,
        METRIC,
        EDGES,
        chunk=3,
        on_progress=lambda *given: calls.append(given),
    )
    assert calls == [(3, 6), (4, 6), (6, 6)]
    assert abs(found.effects).max() < 1e-5


WRONG = {
    "norm_position is 'post'; path patching requires 'pre'": ({"norm_position": "post"}, EDGES),
    "norm_position is 'sandwich'; path patching requires 'pre'": (
        {"norm_position": "sandwich"},
        EDGES,
    ),
    "residual is False; path patching requires residual connections": ({"residual": False}, EDGES),
    "model is a Recurrent; path patching requires a Decoder": ({"kind": jf.RecurrentConfig}, EDGES),
    "receiver_input is 'output'; it must be one of query, key, value": (
        {},
        [HeadEdge(0, 0, 1, 0, "output")],
    ),
    "receiver_head is 2; for this model it must be from 0 to 1": (
        {},
        [HeadEdge(0, 0, 1, 2, "key")],
    ),
    "sender_head is 4; for this model": ({}, [HeadEdge(0, 4, 1, 0, "key")]),
    "sender_layer is -1; it must be a whole number of at least 0": (
        {},
        [HeadEdge(-1, 0, 1, 0, "key")],
    ),
    "sender_layer is 1 and receiver_layer is 1; receiver_layer must be larger": (
        {},
        [HeadEdge(1, 0, 1, 0, "key")],
    ),
    "must have the fields sender_layer, sender_head": ({}, [(0, 1)]),
}


@pytest.mark.parametrize("message", WRONG)
def test_path_patching_refuses_models_without_attention(message):
    options, edges = WRONG[message]
    model = tiny.build(**options)
    tokens = tiny.tokens(0, 1, LENGTH)
    with pytest.raises(ValueError, match=message):
        patch_edges(model, tiny.weights(model, 0), tokens, tokens, METRIC, edges)
