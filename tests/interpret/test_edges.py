"""Path patching equals a NumPy model in float64, which shares no code with the package."""

import numpy as np
import pytest
from hypothesis import given, settings

import jaxformer as jf
from jaxformer.interpret import Edge, EdgeSweep, Node, model_edges, patch_edges
from jaxformer.interpret.graph import INPUTS
from jaxformer.interpret.patching import LogitDifference
from tests.errors import error_of
from tests.interpret import numpy_graph
from tests.properties import tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
LENGTH = 4
METRIC = LogitDifference(numpy_graph.RIGHT, numpy_graph.WRONG)
few = settings(max_examples=max(3, settings().max_examples // 5))
BLOCKS = ("none", "separate_norms", "shared_norm")


def numpy_effect(params, clean, corrupted, config, edge):
    """Returns the effect of an edge: only its receiver reads the sender's clean summand."""
    _, of_clean = numpy_graph.run(params, clean, config)
    base, _ = numpy_graph.run(params, corrupted, config)
    patched = numpy_graph.run(params, corrupted, config, of_clean, lambda *pair: pair == edge)
    return patched[0] - base


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
@few
@given(seed=tiny.seeds)
def test_path_patching_effects_equal_a_numpy_implementation(block, seed):
    model = tiny.build(num_layers=3, parallel_block=block)
    variables = tiny.weights(model, seed)
    clean, corrupted = tiny.tokens(seed, LENGTH), tiny.tokens(seed + 1, LENGTH)
    edges = model_edges(model)
    edges = [edges[i] for i in np.random.default_rng(seed).permutation(len(edges))[:12]]
    edges += [
        Edge(Node("head", 0, 3), Node("value", 2, 1)),
        Edge(Node("embedding"), Node("logits")),
    ]
    found = patch_edges(model, variables, clean[None], corrupted[None], METRIC, edges, chunk=4)
    params = variables["params"]
    wanted = [numpy_effect(params, clean, corrupted, model.config, edge) for edge in edges]
    tiny.close(found.effects, wanted, 3e-5)
    tiny.close(found.clean, numpy_graph.run(params, clean, model.config)[0], 3e-5)
    assert found.edges == tuple(edges)


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
    edge = Edge(Node("head", 0, 1), Node(name, 1, 1))
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
    difference = logits - inspect(corrupted).logits[0, -1]
    tiny.close(found.effects, [difference[METRIC.right] - difference[METRIC.wrong]])


@pytest.mark.slow
def test_path_patching_of_equal_texts_reports_progress_and_zero_effects():
    model, calls = tiny.build(), []
    tokens = tiny.tokens(0, 1, LENGTH)
    sender = Node("head", 0, 0)
    names = ("query", "value", "value", "value", "value", "query")
    edges = [Edge(sender, Node(name, 1, n % 2)) for n, name in enumerate(names)]
    found = patch_edges(
        model,
        tiny.weights(model, 0),
        tokens,
        tokens,
        METRIC,
        edges,
        chunk=3,
        on_progress=lambda *given: calls.append(given),
    )
    assert calls == [(2, 6), (5, 6), (6, 6)]
    assert abs(found.effects).max() < 1e-5


def test_strongest_edges_have_the_largest_absolute_effects():
    edges = tuple(Edge(Node("head", 0, n), Node("logits")) for n in range(4))
    sweep = EdgeSweep(np.array([0.5, -2.0, 0.0, 1.0]), 1.0, 0.0, edges)
    assert sweep.strongest(3) == (edges[1], edges[3], edges[0])
    assert sweep.strongest(0) == ()
    assert "count is 5; it must be at most 4" in error_of(sweep.strongest, 5)
    assert "count is -1" in error_of(sweep.strongest, -1)


def test_error_of_path_patching_names_the_invalid_argument():
    model = tiny.build()
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 1, LENGTH)
    edge = Edge(Node("head", 0, 0), Node("key", 1, 2))
    call = lambda edges, chunk: patch_edges(  # noqa: E731
        model, variables, tokens, tokens, METRIC, edges, chunk=chunk
    )
    assert error_of(call, [edge], 1).startswith("edges[0] is Edge(sender=")
    assert error_of(call, [], 0).startswith("chunk is 0")
