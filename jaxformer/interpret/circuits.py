"""Circuits: the metric of a model if only a set of edges carries the values of the clean text.

A circuit is a set of edges (see `graph`). Running a circuit means one forward pass in which each
receiver r reads

    x_r = x_r,corrupted + Σ_s in the circuit (s − s_corrupted)

Here s is the sender's summand of the residual stream in the same pass. The summand of the
embedding is its value on the clean text. Edges in the circuit thus carry the values of the current
pass, and all other edges carry the values of the run on the corrupted text. Without edges, the pass
equals the run on the corrupted text. With all edges, the pass equals the run on the clean text.

For a metric m and a circuit C, whose complement contains all other edges:

    faithfulness(C) = (m(C) − m(corrupted)) / (m(clean) − m(corrupted))
    completeness(C) = faithfulness(complement of C)

A faithful circuit has a faithfulness near 1. A complete circuit has a completeness near 0, because
the other edges cannot replace the circuit. Both definitions are from Marks et al. Wang et al.
instead use absolute differences of metrics, and test completeness for many subsets of the circuit.

The complement of a single edge has the metric that `edges.patch_edges` measures for this edge with
the two texts exchanged. In both cases, the model runs on the clean text, and one receiver reads the
corrupted summand of one sender.

Reference:
    Conmy et al. 2023, "Towards Automated Circuit Discovery"; Marks et al. 2024, "Sparse Feature
    Circuits"; Wang et al. 2022, "Interpretability in the Wild", §4.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.functional.hooks import Hooks, Patch
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.layers.layer import Layer
from jaxformer.functional.layers.sublayer import At
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights
from jaxformer.interpret.edges import EdgeState, compare
from jaxformer.interpret.graph import INPUTS, LAYER_RECEIVERS, Edge, Graph, model_graph
from jaxformer.interpret.layers import by_layer, self_attention_layer
from jaxformer.interpret.patching import AnyMetric, fraction_of_gap, metric_of_hidden
from jaxformer.interpret.streams import (
    POINTS,
    Stream,
    head_outputs,
    layer_values,
    stream_tokens,
)
from jaxformer.interpret.summary import summary
from jaxformer.models.check import AnyArray
from jaxformer.models.config.check import whole_number
from jaxformer.models.language_model import LanguageModel, Variables


class CircuitSweep(NamedTuple):
    """Result of `evaluate_circuits`.

    Attributes:
        metrics: for each circuit, the metric if only the circuit's edges carry clean values.
        complements: for each circuit, the metric if only the other edges carry clean values.
        clean: the metric on the clean text.
        corrupted: the metric on the corrupted text.
    """

    metrics: Float[np.ndarray, " circuits"]
    complements: Float[np.ndarray, " circuits"]
    clean: float
    corrupted: float

    def __repr__(self) -> str:
        """See `summary`."""
        return summary(self)

    @property
    def faithfulness(self) -> Float[np.ndarray, " circuits"]:
        """Fraction of `clean` − `corrupted` that each circuit restores; NaN if both are equal."""
        return fraction_of_gap(self.metrics - self.corrupted, self.clean, self.corrupted)

    @property
    def completeness(self) -> Float[np.ndarray, " circuits"]:
        """The faithfulness of each complement; 0 if the other edges restore nothing."""
        return fraction_of_gap(self.complements - self.corrupted, self.clean, self.corrupted)


def evaluate_circuits(
    model: LanguageModel,
    variables: Variables,
    clean: AnyArray | Inputs,
    corrupted: AnyArray | Inputs,
    metric: AnyMetric,
    circuits: Sequence[Iterable[Edge]],
    *,
    chunk: int = 8,
    on_progress: Callable[[int, int], Any] | None = None,
) -> CircuitSweep:
    """Measures the faithfulness and the completeness of circuits.

    Each circuit and each complement is one forward pass. Each receiver has its own residual stream,
    so a pass takes several times as long as a usual forward pass.

    Args:
        model: a decoder whose blocks have norm_position "pre" and residuals.
        variables: the model's variables.
        clean: the clean text: int [batch, length], or `functional.inputs.Inputs`.
        corrupted: the corrupted text, of the same type and shape as `clean`.
        metric: a function of the logits; see `sweep.patch_sweep`.
        circuits: the circuits, each a set of edges. `EdgeSweep.strongest` and `edges_between`
            return circuits.
        chunk: the maximum number of forward passes at the same time. Memory is proportional to
            `chunk` times the number of senders.
        on_progress: called with (number of measured circuits, total number of circuits).

    Raises:
        ValueError: An argument is invalid, or the model's residual stream is not the sum of the
            outputs of its parts.
    """
    chunk = whole_number("chunk", chunk, 1)
    graph = model_graph(model)
    inside = [graph.mask(f"circuits[{n}]", circuit) for n, circuit in enumerate(circuits)]
    found = compare(model, variables, clean, corrupted, metric)
    masks = [mask for circuit in inside for mask in (circuit, graph.exists & ~circuit)]
    metrics = np.zeros(len(masks), np.float32)
    for first in range(0, len(masks), chunk):
        some = np.stack(masks[first : first + chunk])
        padded = np.pad(some, ((0, chunk - len(some)), (0, 0), (0, 0)), mode="edge")
        metrics[first : first + chunk] = run_circuits(model, graph, found.state, padded)[
            : len(some)
        ]
        if on_progress is not None:
            on_progress((first + len(some)) // 2, len(inside))
    return CircuitSweep(metrics[::2], metrics[1::2], float(found.clean), float(found.corrupted))


@partial(jax.jit, static_argnames=("model", "graph"))
def run_circuits(
    model: LanguageModel,
    graph: Graph,
    state: EdgeState,
    circuits: Bool[Array | np.ndarray, "circuits receivers senders"],
) -> Float[Array, " circuits"]:
    """Computes the metric once per circuit.

    Args:
        model: the model.
        graph: the graph of the model.
        state: the arguments that are equal for all circuits.
        circuits: which edges each circuit contains.
    """
    tokens, stack = stream_tokens(model, state.weights, state.inputs), model.architecture.stack
    ends = np.cumsum(graph.counts)

    def circuit_metric(circuit: Bool[Array, "receivers senders"]) -> Float[Array, ""]:
        masks = circuit[:-1].reshape(graph.num_layers, -1, len(graph.senders))

        def add_layer(
            index: Int[Array, ""], differences: Float[Array, "senders batch length dim"]
        ) -> Float[Array, "senders batch length dim"]:
            parts = jnp.split(masks[index], ends[:-1])
            run = partial(layer_differences, graph, tokens)
            edges = dict(zip(LAYER_RECEIVERS, parts, strict=True))
            return by_layer(
                stack, state.weights, run, index, index, state.stream, edges, differences
            )

        embedding = state.differences[:1].astype(jnp.float32)
        rest = jnp.zeros((len(graph.senders) - 1, *embedding.shape[1:]), jnp.float32)
        differences = jnp.concatenate([embedding, rest])
        differences = jax.lax.fori_loop(0, graph.num_layers, add_layer, differences)
        residual = read_residuals(state.stream.output[0], circuit[-1:], differences)[0]
        hidden = model.architecture.finish(state.weights, residual)
        return metric_of_hidden(model, state.weights, state.metric, hidden)

    return jax.vmap(circuit_metric)(jnp.asarray(circuits))


def layer_differences(
    graph: Graph,
    tokens: Tokens,
    layer: Layer,
    weights: Weights,
    index: Int[Array, ""],
    stream: Stream,
    edges: dict[str, Bool[Array, "layer_receivers senders"]],
    differences: Float[Array, "senders batch length dim"],
) -> Float[Array, "senders batch length dim"]:
    """Runs one layer of a circuit, and writes the summands of this layer into `differences`.

    Args:
        graph: the graph of the model.
        tokens: see `streams.stream_tokens`.
        layer: the layer.
        weights: the weights of the layer.
        index: the index of the layer.
        stream: the residual stream of the corrupted text.
        edges: for each name in `LAYER_RECEIVERS`, which senders each receiver reads.
        differences: the summands of the circuit's run minus those of the corrupted run; 0 for this
            layer and later layers.
    """

    def values(name: str) -> Float[Array, "batch *heads length d"]:
        residuals = read_residuals(stream.read_by(name)[index], edges[name], differences)
        return layer_values(tokens, name, layer, weights, residuals)

    first = 1 + index * (graph.num_heads + 1)
    patch = {POINTS[name]: Patch(True, values(name)) for name in INPUTS}
    heads = run_attention(tokens, layer, weights, stream.attention_input[index], patch)
    written = head_outputs(weights, heads - stream.heads[index]).astype(differences.dtype)
    differences = jax.lax.dynamic_update_slice_in_dim(differences, written, first, axis=0)
    written = (values("feedforward") - stream.feedforward[index]).astype(differences.dtype)
    return differences.at[first + graph.num_heads].set(written)


def read_residuals(
    corrupted: Float[Array, "batch length dim"],
    edges: Bool[Array, "receivers senders"],
    differences: Float[Array, "senders batch length dim"],
) -> Float[Array, "receivers batch length dim"]:
    """Computes the residual stream x_r that each receiver reads; see the module docstring."""
    added = jnp.einsum(
        "rs,sbtd->rbtd",
        edges.astype(differences.dtype),
        differences,
        precision=jax.lax.Precision.HIGHEST,
    )
    return (corrupted + added).astype(corrupted.dtype)


def run_attention(
    tokens: Tokens,
    layer: Layer,
    weights: Weights,
    residual: Float[Array, "batch length dim"],
    patch: dict[str, Patch],
) -> Float[Array, "batch heads length d"]:
    """Computes the values of all heads from patched queries, keys and values.

    Args:
        tokens: see `streams.stream_tokens`.
        layer: the layer.
        weights: the weights of the layer.
        residual: any input of the attention. The result does not depend on its values, because the
            patch replaces all queries, keys and values.
        patch: the new queries, keys and values.
    """
    attention = self_attention_layer(layer)
    hook = tokens.hook(Hooks(("attention.heads",), patch))
    attention(weights["attention"], residual, At(tokens.contexts[attention], hook=hook))
    return hook.captured["attention.heads"]
