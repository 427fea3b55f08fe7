"""Edge attribution patching: the effects of all edges from one backward pass.

Path patching (`edges.patch_edges`) runs the model once for each edge. Edge attribution patching
replaces these runs by a linear approximation around the corrupted run:

    effect ≈ Σ (s_clean − s_corrupted) · ∂metric/∂x_r

Here s is the sender's summand of the residual stream. The gradient is the derivative with respect
to a copy of the residual stream that only this receiver reads. The copy is the input of the norm
before the queries, keys or values of one head, before the feed-forward layer, or before the logits.
The sum runs over batch elements, positions and features.

The approximation is exact if the metric is a linear function of the residual stream that the
receiver reads. It is poor if the receiver is saturated, for example if a head attends to one token
only.

Reference:
    Syed et al. 2023, "Attribution Patching Outperforms Automated Circuit Discovery"; Nanda 2023,
    "Attribution patching".
"""

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.functional.inputs import Inputs
from jaxformer.functional.layers.layer import Layer
from jaxformer.functional.trees import Weights
from jaxformer.interpret.attribution_patching import metric_gradients
from jaxformer.interpret.edges import EdgeState, EdgeSweep, compare
from jaxformer.interpret.graph import LAYER_RECEIVERS, Edge, Graph, model_graph
from jaxformer.interpret.layers import by_layer
from jaxformer.interpret.patching import AnyMetric
from jaxformer.interpret.streams import POINTS, layer_values, stream_tokens
from jaxformer.models.check import AnyArray
from jaxformer.models.language_model import LanguageModel, Variables


def attribute_edges(
    model: LanguageModel,
    variables: Variables,
    clean: AnyArray | Inputs,
    corrupted: AnyArray | Inputs,
    metric: AnyMetric,
    edges: Sequence[Edge] | None = None,
) -> EdgeSweep:
    """Approximates `patch_edges` with one forward pass for each text and one backward pass.

    Memory is proportional to the number of senders times the size of the residual stream.

    Args:
        model: a decoder whose blocks have norm_position "pre" and residuals.
        variables: the model's variables.
        clean: the clean text; see `patch_edges`.
        corrupted: the corrupted text, of the same type and shape as `clean`.
        metric: a function of the logits; see `sweep.patch_sweep`.
        edges: the edges; defaults to all edges of the model (see `model_edges`).

    Returns:
        The approximate effects, and the metrics of the two texts, which are exact.

    Raises:
        ValueError: An argument is invalid, or the model's residual stream is not the sum of the
            outputs of its parts.
    """
    graph = model_graph(model)
    indices = np.argwhere(graph.exists) if edges is None else graph.indices("edges", edges)
    found = compare(model, variables, clean, corrupted, metric)
    state = found.state
    slopes = metric_gradients(model, state.weights, state.inputs, state.metric, found.values)
    scores = np.asarray(edge_scores(model, graph, state, slopes), np.float32)
    return EdgeSweep(
        scores[tuple(indices.T)],
        float(found.clean),
        float(found.corrupted),
        tuple(Edge(graph.senders[s], graph.receivers[r]) for r, s in indices),
    )


@partial(jax.jit, static_argnames=("model", "graph"))
def edge_scores(
    model: LanguageModel, graph: Graph, state: EdgeState, slopes: Mapping[str, Array]
) -> Float[Array, "receivers senders"]:
    """Computes the score of every pair of a receiver and a sender, whether or not an edge exists.

    Args:
        model: the model.
        graph: the graph of the model.
        state: the arguments that are equal for all edges.
        slopes: the gradient of the metric with respect to the receivers' values, by hook point.
    """
    tokens, stack = stream_tokens(model, state.weights, state.inputs), model.architecture.stack

    def products(gradient: Float[Array, "receivers batch length dim"]) -> Array:
        return jnp.einsum(
            "rbtd,sbtd->rs",
            gradient,
            state.differences,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    def layer_scores(
        layer: Layer, weights: Weights, index: Int[Array, ""]
    ) -> Float[Array, "layer_receivers senders"]:
        scores = []
        for name, count in zip(LAYER_RECEIVERS, graph.counts, strict=True):
            residual = state.stream.read_by(name)[index]
            residuals = jnp.broadcast_to(residual, (count, *residual.shape))
            values = partial(layer_values, tokens, name, layer, weights)
            (gradient,) = jax.vjp(values, residuals)[1](slopes[POINTS[name]][index])
            scores.append(products(gradient))
        return jnp.concatenate(scores)

    layers = jnp.arange(graph.num_layers, dtype=jnp.int32)
    found = jax.lax.map(lambda n: by_layer(stack, state.weights, layer_scores, n, n), layers)
    finish = partial(stack.finish, state.weights)
    (gradient,) = jax.vjp(finish, state.stream.output[0])[1](slopes[POINTS["logits"]])
    return jnp.concatenate([found.reshape(-1, found.shape[-1]), products(gradient[None])])
