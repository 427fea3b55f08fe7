"""Edge attribution patching computes the derivative of the metric along each edge."""

import numpy as np
import pytest
from hypothesis import given, settings

from jaxformer.interpret import (
    Edge,
    Node,
    attribute_edges,
    attribution_sweep,
    model_edges,
    patch_edges,
)
from tests.errors import error_of
from tests.interpret import numpy_graph
from tests.interpret.test_edges import BLOCKS, LENGTH, METRIC, few
from tests.properties import tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
STEP = 1e-4
MODELS = {
    "gpt2": {},
    "llama": {"positions": "rotary", "norm": "rms", "query_key_norm": "head"},
    "norm of all heads": {"norm": "rms", "query_key_norm": "all"},
    "parallel": {"parallel_block": "separate_norms"},
    "parallel with one norm": {"parallel_block": "shared_norm"},
    "sinks": {"attention_sinks": True},
    "experts": {"num_experts": 3},
    "windows": {"window": (2, None), "positions": "alibi"},
}


def setup(options, seed, batch=2):
    model = tiny.build(num_layers=2, **options)
    texts = tiny.tokens(seed, batch, LENGTH), tiny.tokens(seed + 1, batch, LENGTH)
    return model, tiny.weights(model, seed), *texts


@pytest.mark.parametrize("block", mostly_slow(BLOCKS, "none", slow=BLOCKS))
@few
@given(seed=tiny.seeds)
def test_attributed_edges_equal_finite_differences_of_a_numpy_model(block, seed):
    """In the reference, one receiver reads s_corrupted ± 10⁻⁴ (s_clean − s_corrupted)."""
    model, variables, clean, corrupted = setup({"parallel_block": block}, seed, batch=1)
    found = attribute_edges(model, variables, clean, corrupted, METRIC)
    assert found.edges == model_edges(model)
    params, config = variables["params"], model.config
    _, of_clean = numpy_graph.run(params, clean[0], config)
    _, of_corrupted = numpy_graph.run(params, corrupted[0], config)
    # The last edge ends at the logits.
    chosen = [-1, *np.random.default_rng(seed).permutation(len(found.edges))[:5]]
    for number in chosen:
        measured = []
        for sign in (1, -1):
            moved = {s: x + sign * STEP * (of_clean[s] - x) for s, x in of_corrupted.items()}
            edge = found.edges[number]
            metric, _ = numpy_graph.run(
                params, corrupted[0], config, moved, lambda *pair, edge=edge: pair == edge
            )
            measured.append(metric)
        slope = (measured[0] - measured[1]) / (2 * STEP)
        np.testing.assert_allclose(found.effects[number], slope, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@settings(few, max_examples=3)
@given(seed=tiny.seeds)
def test_attributions_of_all_edges_of_a_sender_add_up_to_the_attribution_of_its_output(name, seed):
    """The derivative along the output of a sender is the sum over all receivers that read it."""
    given_ = setup(MODELS[name], seed)
    found = attribute_edges(*given_, METRIC)
    totals = {}
    for edge, effect in zip(found.edges, found.effects, strict=True):
        totals[edge.sender] = totals.get(edge.sender, 0.0) + effect
    points = {"head": "attention.heads", "feedforward": "feedforward.output"}
    for kind, point in points.items():
        axes = ("layer", "head") if kind == "head" else ("layer",)
        nodes = attribution_sweep(*given_, METRIC, point, axes=axes).effects
        sums = np.zeros(nodes.shape)
        for node, total in totals.items():
            if node.name == kind:
                sums[tuple(x for x in node[1:] if x is not None)] = total
        tiny.close(sums, nodes, 3e-5)
    embedding = attribution_sweep(*given_, METRIC, "embedding", axes=()).effects
    tiny.close(totals[Node("embedding")], embedding, 3e-5)


@pytest.mark.slow
def test_edge_attribution_is_exact_where_the_metric_is_linear():
    """Without a final norm, the logits are a linear function of the residual stream."""
    given_ = setup({"norm": "none"}, 0)
    edges = [edge for edge in model_edges(given_[0]) if edge.receiver == Node("logits")]
    found, exact = (f(*given_, METRIC, edges) for f in (attribute_edges, patch_edges))
    tiny.close(found.effects, exact.effects)
    assert (found.clean, found.corrupted, found.edges) == exact[1:]
    np.testing.assert_allclose(found.effects.sum(), found.clean - found.corrupted, atol=1e-4)


@pytest.mark.slow
def test_edge_attribution_between_equal_texts_has_no_effect():
    model, variables, clean, _ = setup({}, 0)
    assert not attribute_edges(model, variables, clean, clean, METRIC).effects.any()


def test_error_of_edge_attribution_names_the_invalid_edge():
    given_ = setup({}, 0)
    edges = [Edge(Node("head", 1, 0), Node("query", 1, 0))]
    message = error_of(lambda: attribute_edges(*given_, METRIC, edges))
    assert message.startswith("edges[0] is head 1.0 → query 1.0; the receiver must read")
