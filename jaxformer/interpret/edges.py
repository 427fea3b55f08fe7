"""Path patching: the effect of a direct path (an edge) through the residual stream.

`graph` lists the senders, the receivers and the edges of a decoder. Patching an edge changes the
forward pass on the corrupted text in three steps:

1. Compute x' = x_r + s_clean − s_corrupted at all positions. Here x_r is the residual stream that
   the receiver reads, and s is the sender's summand of this residual stream. The summand of head h
   is W_O^h z with its value z at the hook point "attention.heads".
2. Compute the receiver's value from x': its queries, keys or values, the output of the feed-forward
   layer, or the logits.
3. Compute all later values as usual.

All earlier values, and all other receivers that read x_r, are the same as without the patch. The
edge thus excludes paths from the sender to the receiver through other heads or through feed-forward
layers. Conmy et al. define edges in the same way, because they treat each feed-forward layer as a
node of the graph. Wang et al. instead recompute the feed-forward layers between the sender and the
receiver.

All functions for edges and circuits work in the same direction as `sweep.patch_sweep`: they start
from the run on the corrupted text, and restore values of the clean text.

Reference:
    Wang et al. 2022, "Interpretability in the Wild", §3.1 (path patching); Conmy et al. 2023,
    "Towards Automated Circuit Discovery".
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.functional.hooks import Hooks, Patch
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.trees import Weights
from jaxformer.interpret.graph import INPUTS, Edge, Graph, model_graph
from jaxformer.interpret.patching import (
    AnyMetric,
    Metric,
    checked_metric,
    checked_pair,
    is_at,
    measure,
    run_metric,
)
from jaxformer.interpret.streams import (
    POINTS,
    STREAM_POINTS,
    Stream,
    read_stream,
    receiver_value,
    sender_differences,
    stream_tokens,
)
from jaxformer.interpret.summary import summary
from jaxformer.models.check import AnyArray
from jaxformer.models.config.check import whole_number
from jaxformer.models.language_model import LanguageModel, Variables


class EdgeSweep(NamedTuple):
    """Effects of edges on a metric, from `patch_edges` or `attribute_edges`.

    Attributes:
        effects: for each edge, the metric on the corrupted text with the patch minus the metric
            without it.
        clean: the metric on the clean text, without a patch.
        corrupted: the metric on the corrupted text, without a patch.
        edges: the edges.
    """

    effects: Float[np.ndarray, " edges"]
    clean: float
    corrupted: float
    edges: tuple[Edge, ...]

    def __repr__(self) -> str:
        """See `summary`."""
        return summary(self)

    def strongest(self, count: int) -> tuple[Edge, ...]:
        """Returns the `count` edges with the largest absolute effects, in descending order.

        Raises:
            ValueError: `count` is negative or exceeds the number of edges.
        """
        if whole_number("count", count, 0) > len(self.edges):
            raise ValueError(
                f"count is {count}; it must be at most {len(self.edges)}, the number of edges"
            )
        return tuple(
            self.edges[i] for i in np.argsort(-np.abs(self.effects), kind="stable")[:count]
        )


class EdgeState(NamedTuple):
    """Arguments that are equal for all edges.

    Attributes:
        weights: the model's parameters.
        inputs: the corrupted text, as input of the model.
        metric: the metric.
        stream: the residual stream of the corrupted text.
        differences: the senders' summands on the clean text minus those on the corrupted text, in
            the order of `Graph.senders`.
    """

    weights: Weights
    inputs: Inputs
    metric: Metric
    stream: Stream
    differences: Float[Array, "senders batch length dim"]


class Comparison(NamedTuple):
    """The checked arguments of a function for edges, and its runs without patches.

    Attributes:
        graph: the graph of the model.
        state: the arguments that are equal for all edges.
        values: values of the corrupted run, by the hook points in `POINTS`.
        clean: the metric on the clean text.
        corrupted: the metric on the corrupted text.
    """

    graph: Graph
    state: EdgeState
    values: dict[str, Array]
    clean: Float[Array, ""]
    corrupted: Float[Array, ""]


def patch_edges(
    model: LanguageModel,
    variables: Variables,
    clean: AnyArray | Inputs,
    corrupted: AnyArray | Inputs,
    metric: AnyMetric,
    edges: Sequence[Edge],
    *,
    chunk: int = 32,
    on_progress: Callable[[int, int], Any] | None = None,
) -> EdgeSweep:
    """Measures the effect of patching each edge on a metric of the corrupted text.

    Args:
        model: a decoder whose blocks have norm_position "pre" and residuals.
        variables: the model's variables.
        clean: int [batch, length], or `functional.inputs.Inputs`.
        corrupted: the corrupted text, of the same type and shape as `clean`.
        metric: a function of the logits; see `sweep.patch_sweep`.
        edges: the edges, each of which is patched in its own forward pass; see `model_edges`.
        chunk: the maximum number of forward passes at the same time. Memory is proportional to
            `chunk`.
        on_progress: called with (number of measured edges, total number of edges).

    Raises:
        ValueError: An argument is invalid, or the model's residual stream is not the sum of the
            outputs of its parts.
    """
    chunk = whole_number("chunk", chunk, 1)
    indices = model_graph(model).indices("edges", edges)
    found = compare(model, variables, clean, corrupted, metric)
    receivers = [found.graph.receivers[r] for r in indices[:, 0]]
    effects, done = np.zeros(len(edges), np.float32), 0
    for name in POINTS:
        chosen = np.array([i for i, node in enumerate(receivers) if node.name == name], int)
        for first in range(0, len(chosen), chunk):
            some = chosen[first : first + chunk]
            numbers = np.array(
                [(indices[i, 1], receivers[i].layer or 0, receivers[i].head or 0) for i in some],
                np.int32,
            )
            padded = np.pad(numbers, ((0, chunk - len(some)), (0, 0)), mode="edge")
            effects[some] = run_edges(model, name, found.state, padded)[: len(some)]
            done += len(some)
            if on_progress is not None:
                on_progress(done, len(edges))
    given = tuple(Edge(found.graph.senders[s], found.graph.receivers[r]) for r, s in indices)
    base = np.float32(found.corrupted)
    return EdgeSweep(effects - base, float(found.clean), float(base), given)


def compare(
    model: LanguageModel,
    variables: Variables,
    clean: AnyArray | Inputs,
    corrupted: AnyArray | Inputs,
    metric: AnyMetric,
) -> Comparison:
    """Checks the arguments of a function for edges, and runs the model on both texts.

    Raises:
        ValueError: An argument is invalid, or the model's residual stream is not the sum of the
            outputs of its parts.
    """
    graph = model_graph(model)
    model.check(variables)
    read, changed = checked_pair(clean, corrupted, model.config)
    measured = checked_metric(metric, changed, model.config.vocab_size)
    weights = variables["params"]
    hooks = Hooks(tuple(dict.fromkeys((*STREAM_POINTS, *POINTS.values()))))
    clean_metric, of_clean = measure(model, weights, read, measured, hooks)
    base, of_corrupted = measure(model, weights, changed, measured, hooks)
    streams = [read_stream(graph, captured) for captured in (of_clean, of_corrupted)]
    differences = sender_differences(model, weights, *streams)
    state = EdgeState(weights, changed, measured, streams[1], differences)
    values: dict[str, Array] = {point: of_corrupted[point] for point in POINTS.values()}
    return Comparison(graph, state, values, clean_metric, base)


@partial(jax.jit, static_argnames=("model", "name"))
def run_edges(
    model: LanguageModel, name: str, state: EdgeState, edges: Int[Array, "edges 3"]
) -> Float[Array, " edges"]:
    """Computes the metric on the corrupted text once per edge, with this edge patched.

    Args:
        model: the model.
        name: the name that all receivers of `edges` have, a key of `POINTS`.
        state: the arguments that are equal for all edges.
        edges: the index of the sender, and the layer and the head of the receiver; 0 for a receiver
            without a layer or head.
    """
    tokens = stream_tokens(model, state.weights, state.inputs)
    is_inside = POINTS[name] in model.layer_hook_points

    def patched(edge: Int[Array, "3"]) -> Float[Array, ""]:
        sender, layer, head = edge
        residual = state.stream.read_by(name)[layer] + state.differences[sender]
        value = receiver_value(model, state.weights, tokens, name, layer, residual)
        where: Any = True
        if name in INPUTS:
            where = is_at(head, value.shape[-3])[:, None, None]
        if is_inside:
            here = is_at(layer, model.config.num_layers)
            where, value = here.reshape(-1, *[1] * value.ndim) & where, value[None]
        hooks = Hooks(patch={POINTS[name]: Patch(where, value)})
        return run_metric(model, state.weights, state.inputs, state.metric, hooks)[0]

    return jax.vmap(patched)(jnp.asarray(edges))
