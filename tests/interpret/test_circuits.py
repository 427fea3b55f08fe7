"""Circuits equal a NumPy model in float64, path patching, and patches of whole nodes."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jaxformer as jf
from jaxformer.functional.inputs import Inputs
from jaxformer.interpret import (
    LogitDifference,
    LogProbability,
    Node,
    edges_between,
    evaluate_circuits,
    model_edges,
    patch_edges,
)
from jaxformer.interpret.circuits import CircuitSweep, run_circuits
from jaxformer.interpret.graph import model_graph
from jaxformer.interpret.sweep import Sweep
from tests.errors import error_of
from tests.interpret import numpy_graph
from tests.interpret.test_edge_attribution import MODELS, setup
from tests.interpret.test_edges import BLOCKS, LENGTH, METRIC, few
from tests.properties import tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")


def draw(edges, seed):
    """Draws a random fraction of the edges as a circuit."""
    rng = np.random.default_rng(seed)
    chosen = rng.uniform(size=len(edges)) < rng.uniform()
    return {edge for edge, is_inside in zip(edges, chosen, strict=True) if is_inside}


@pytest.mark.parametrize("block", mostly_slow(BLOCKS, "none", slow=BLOCKS))
@few
@given(seed=tiny.seeds)
def test_metric_of_a_circuit_equals_a_numpy_implementation(block, seed):
    model, variables, clean, corrupted = setup({"parallel_block": block}, seed, batch=1)
    edges, params, config = model_edges(model), variables["params"], model.config
    circuits = [draw(edges, seed + n) for n in range(3)]
    found = evaluate_circuits(model, variables, clean, corrupted, METRIC, circuits, chunk=4)
    _, of_corrupted = numpy_graph.run(params, corrupted[0], config)

    def metric(reads_other):
        return numpy_graph.run(params, clean[0], config, of_corrupted, reads_other)[0]

    tiny.close(found.metrics, [metric(lambda *e, c=c: e not in c) for c in circuits], 3e-5)
    tiny.close(found.complements, [metric(lambda *e, c=c: e in c) for c in circuits], 3e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@settings(few, max_examples=3)
@given(seed=tiny.seeds)
def test_circuit_of_all_edges_has_the_clean_metric_and_empty_circuit_the_corrupted_metric(
    name, seed
):
    given_ = setup(MODELS[name], seed)
    found = evaluate_circuits(*given_, METRIC, [model_edges(given_[0]), []], chunk=4)
    both = [found.clean, found.corrupted]
    tiny.close(found.metrics, both)
    tiny.close(found.complements, both[::-1])
    if abs(found.clean - found.corrupted) > 0.1:
        np.testing.assert_allclose(found.faithfulness, [1, 0], atol=1e-4)
        np.testing.assert_allclose(found.completeness, [0, 1], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_circuit_of_all_edges_but_one_equals_clean_run_with_that_edge_patched(name):
    model, variables, clean, corrupted = setup(MODELS[name], 3)
    edges = model_edges(model)[::3]
    circuits = [[edge] for edge in edges]
    found = evaluate_circuits(model, variables, clean, corrupted, METRIC, circuits)
    patched = patch_edges(model, variables, corrupted, clean, METRIC, edges)
    tiny.close(found.complements, patched.corrupted + patched.effects)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@settings(few, max_examples=3)
@given(seed=tiny.seeds)
def test_circuit_of_nodes_equals_patching_corrupted_outputs_of_all_other_nodes(name, seed):
    """The reference patches the outputs of the other nodes in the run on the clean text."""
    model, variables, clean, corrupted = setup(MODELS[name], seed)
    nodes = model_graph(model).senders[1:]
    is_inside = np.random.default_rng(seed).uniform(size=len(nodes)) < 0.5
    circuit = edges_between(model, [n for n, x in zip(nodes, is_inside, strict=True) if x])
    found = evaluate_circuits(model, variables, clean, corrupted, METRIC, [circuit], chunk=2)
    outside = ~is_inside.reshape(2, -1)
    points = ("attention.heads", "feedforward.output")
    values = jf.inspect(model, variables, corrupted, capture=points).captured
    where = (outside[:, None, :-1, None, None], outside[:, -1, None, None, None])
    patch = {
        point: jf.Patch(mask, values[point]) for point, mask in zip(points, where, strict=True)
    }
    logits = jf.inspect(model, variables, clean, patch=patch).logits[:, -1]
    tiny.close(found.metrics, [METRIC(logits)], 3e-5)


@pytest.mark.slow
def test_padding_and_packed_documents_do_not_change_the_metric_of_a_circuit():
    """The metric reads one document; the other document and the padding do not change it."""
    model, variables, clean, corrupted = setup(MODELS["llama"], 1, batch=1)
    circuits = [draw(model_edges(model), 5)]
    others = tiny.tokens(9, 1, 3)
    ids = np.array([[1, 1, 1, *[2] * LENGTH, 0]])
    packed = [
        Inputs(np.concatenate([others, x, others[:, :1]], axis=1), ids) for x in (clean, corrupted)
    ]
    alone = evaluate_circuits(model, variables, clean, corrupted, METRIC, circuits)
    metric = LogitDifference(METRIC.right, METRIC.wrong, LENGTH + 2)
    found = evaluate_circuits(model, variables, *packed, metric, circuits)
    tiny.close(found.metrics, alone.metrics)
    tiny.close(found.complements, alone.complements)


@pytest.mark.slow
def test_circuits_report_progress_and_compile_one_program_for_all_metrics_and_texts():
    model, variables, clean, corrupted = setup({}, 0)
    edges, calls, sizes = model_edges(model), [], []
    for token in (1, 2):
        circuits = [edges[:token], edges[3:], edges[::2]]
        metric, texts = LogProbability(token), (clean, corrupted)[::-token]
        given_ = (model, variables, texts[0], corrupted, metric, circuits)
        evaluate_circuits(*given_, chunk=4, on_progress=lambda *x: calls.append(x))
        sizes.append(run_circuits._cache_size())
    assert calls == [(2, 3), (3, 3)] * 2
    assert sizes[0] == sizes[1]


@pytest.mark.slow
def test_metric_of_a_circuit_may_be_a_function_of_all_logits():
    model, variables, clean, corrupted = setup({}, 0)
    circuits = [draw(model_edges(model), 1)]
    found = [
        evaluate_circuits(model, variables, clean, corrupted, metric, circuits)
        for metric in (METRIC, lambda x: jnp.mean(x[:, -1, METRIC.right] - x[:, -1, METRIC.wrong]))
    ]
    tiny.close(found[0].metrics, found[1].metrics)


def test_faithfulness_and_completeness_are_fractions_of_clean_minus_corrupted():
    found = CircuitSweep(np.array([3.0, 1.0]), np.array([1.5, 2.0]), 5.0, 1.0)
    np.testing.assert_array_equal(found.faithfulness, [0.5, 0.0])
    np.testing.assert_array_equal(found.completeness, [0.125, 0.25])


def test_fractions_are_nan_without_a_warning_if_clean_equals_corrupted():
    circuits = CircuitSweep(np.array([3.0, 1.0]), np.array([1.5, 1.0]), 1.0, 1.0)
    sweep = Sweep(np.array([2.0, 0.0]), 1.0, 1.0, ("layer",))
    for found in (circuits.faithfulness, circuits.completeness, sweep.recovered):
        assert np.isnan(found).all()


def test_error_of_evaluating_circuits_names_the_circuit_and_the_edge():
    given_ = setup({}, 0)
    edges = model_edges(given_[0])
    wrong = [edges[:2], [edges[0], (Node("head", 1, 0), Node("query", 0, 0))]]
    message = error_of(lambda: evaluate_circuits(*given_, METRIC, wrong))
    assert message.startswith("circuits[1][1] is head 1.0 → query 0.0; the receiver must read")
    message = error_of(lambda: evaluate_circuits(*given_, METRIC, [edges], chunk=0))
    assert message.startswith("chunk is 0")
