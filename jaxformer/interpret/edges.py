"""Edge patching: the effect of one head on another through the direct path between them.

In a pre-norm decoder the residual stream before layer r is a sum: x_r is the embedding plus the
outputs of the heads and feed-forward layers of earlier layers. Head h of layer l adds W_O^h z: z is
its value at the point "attention.heads", and W_O^h are its rows of the output projection. An edge
leads from this sender to the queries, keys or values of a receiving head in a later layer r.
In the run on the corrupted text, patching it means to compute

    x' = x_r + W_O^h (z_clean − z_corrupted)           at all positions
    q' = query of the receiving head, from Norm(x')

and to replace the receiver's query by q', or likewise its key or value. All other inputs of layer r
and all earlier layers are those of the corrupted run. Layer r and the layers after it are computed
from q'. The edge thus excludes paths from the sender to the receiver through other heads or through
feed-forward layers. This is the edge of Conmy et al., who treat feed-forward layers as nodes. Wang
et al. recompute the feed-forward layers between sender and receiver.

Reference:
    Wang et al. 2022, "Interpretability in the Wild", §3.1 (path patching); Conmy et al. 2023,
    "Towards Automated Circuit Discovery"; Elhage et al. 2021 (the residual stream as a sum).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.functional.attention.heads import merge_heads
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.layers.layer import Layer
from jaxformer.functional.layers.sublayer import with_contexts
from jaxformer.functional.linear.affine import linear
from jaxformer.functional.taps import Hooks, Patch
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights
from jaxformer.interpret.layers import (
    by_layer,
    mixed_layers,
    project,
    transformer_config,
    weights_of_layer,
)
from jaxformer.interpret.patching import (
    Metric,
    checked_metric,
    checked_pair,
    is_at,
    measure,
    metric_of,
)
from jaxformer.models.check import AnyArray
from jaxformer.models.config.check import whole_number
from jaxformer.models.config.transformer import TransformerConfig
from jaxformer.models.kinds import Decoder
from jaxformer.models.language_model import LanguageModel, Variables

INPUTS = ("query", "key", "value")


class HeadEdge(NamedTuple):
    """A direct path from the output of a head to an input of a head in a later layer.

    Attributes:
        sender_layer: layer of the sending head.
        sender_head: index of the sending head.
        receiver_layer: layer of the receiving head.
        receiver_head: index of the receiving head; for "key" and "value", that of the key/value
            head.
        receiver_input: "query", "key" or "value".
    """

    sender_layer: int
    sender_head: int
    receiver_layer: int
    receiver_head: int
    receiver_input: str


class EdgeSweep(NamedTuple):
    """Result of `patch_edges`.

    Attributes:
        effects: float32 [edges], the metric of the patched corrupted run minus that of the
            corrupted run.
        clean: the metric on the clean text.
        corrupted: the metric on the corrupted text.
    """

    effects: Float[np.ndarray, " edges"]
    clean: float
    corrupted: float


class EdgeState(NamedTuple):
    """What all runs read.

    Attributes:
        weights: the model's parameters.
        inputs: the corrupted text.
        metric: the metric.
        residual: the input of each layer in the corrupted run.
        differences: the outputs of the heads in the clean run minus those in the corrupted run.
    """

    weights: Weights
    inputs: Inputs
    metric: Metric
    residual: Float[Array, "layers batch length dim"]
    differences: Float[Array, "layers batch heads length d"]


def patch_edges(
    model: LanguageModel,
    variables: Variables,
    clean: AnyArray | Inputs,
    corrupted: AnyArray | Inputs,
    metric: Metric,
    edges: Sequence[HeadEdge],
    *,
    chunk: int = 32,
    on_progress: Callable[[int, int], Any] | None = None,
) -> EdgeSweep:
    """Measures the effect of every edge on a metric of the corrupted text; see the module.

    Args:
        model: a decoder whose blocks have norm_position "pre" and residuals.
        variables: its variables.
        clean: int [batch, length], or `functional.inputs.Inputs`.
        corrupted: the same, of the same shape.
        metric: a number computed from the logits at one position, such as `LogitDifference`.
        edges: the edges to patch one by one.
        chunk: the most runs that are computed together. Memory is proportional to it.
        on_progress: called with (number of measured edges, number of all edges).

    Raises:
        ValueError: an argument is not accepted, or the model's heads do not write to a sum.
    """
    check_is_sum(model)
    model.check(variables)
    chunk = whole_number("chunk", chunk, 1)
    read, changed = checked_pair(clean, corrupted, model.config)
    metric = checked_metric(metric, changed, model.config.vocab_size)
    edges = [checked_edge(edge, transformer_config(model)) for edge in edges]
    weights = variables["params"]
    hooks = Hooks(("block.input", "attention.heads"))
    clean_metric, of_clean = measure(model, weights, read, metric, hooks)
    base, of_corrupted = measure(model, weights, changed, metric, hooks)
    differences = of_clean["attention.heads"] - of_corrupted["attention.heads"]
    state = EdgeState(weights, changed, metric, of_corrupted["block.input"], differences)
    effects, done = np.zeros(len(edges), np.float32), 0
    for name in INPUTS:
        chosen = np.array([i for i, edge in enumerate(edges) if edge.receiver_input == name], int)
        for first in range(0, len(chosen), chunk):
            some = chosen[first : first + chunk]
            numbers = np.array([edges[i][:4] for i in some], np.int32)
            numbers = np.pad(numbers, ((0, chunk - len(some)), (0, 0)), mode="edge")
            effects[some] = run_edges(model, name, state, numbers)[: len(some)]
            done += len(some)
            if on_progress is not None:
                on_progress(done, len(edges))
    return EdgeSweep(effects - np.float32(base), float(clean_metric), float(base))


@partial(jax.jit, static_argnames=("model", "name"))
def run_edges(
    model: LanguageModel, name: str, state: EdgeState, edges: Int[Array, "edges 4"]
) -> Float[Array, " edges"]:
    """Computes the metric with each edge patched; all edges lead to the input `name`."""

    def patched(edge: Int[Array, "4"]) -> Float[Array, ""]:
        sender_layer, sender_head, layer, head = edge
        residual = state.residual[layer] + sent(model, state, sender_layer, sender_head)
        value = receiver_input(model, state, layer, name, residual)
        here = is_at(layer, model.config.num_layers)[:, None, None, None, None]
        where = here & is_at(head, value.shape[-3])[:, None, None]
        hooks = Hooks(patch={f"attention.{name}": Patch(where, value[None])})
        return metric_of(model, state.weights, state.inputs, state.metric, hooks)[0]

    return jax.vmap(patched)(jnp.asarray(edges))


def sent(
    model: LanguageModel, state: EdgeState, layer: Int[Array, ""], head: Int[Array, ""]
) -> Float[Array, "batch length dim"]:
    """Computes W_O^h (z_clean − z_corrupted), the difference that one head makes."""
    output = weights_of_layer(state.weights, layer)["attention"]["output"]
    mine = is_at(head, transformer_config(model).num_heads)[:, None, None]
    difference = merge_heads(jnp.where(mine, state.differences[layer], 0))
    return linear({"kernel": output["kernel"]}, difference)  # the bias cancels


def receiver_input(
    model: LanguageModel,
    state: EdgeState,
    layer: Int[Array, ""],
    name: str,
    residual: Float[Array, "batch length dim"],
) -> Float[Array, "batch heads length d"]:
    """Computes the queries, keys or values of a layer from its input."""
    stack = model.architecture.stack
    tokens = Tokens.of_sequences(state.inputs, model.run())
    tokens = with_contexts(stack.sublayers, tokens, state.weights)

    def run(layer: Layer, block: Weights, x: Float[Array, "batch length dim"]) -> Array:
        return project(layer, tokens, block, x)[INPUTS.index(name)]

    return by_layer(stack, state.weights, run, layer, residual)


def check_is_sum(model: LanguageModel) -> None:
    """Raises ValueError unless each head of the model adds its output to a residual stream."""
    if type(model) is not Decoder:
        raise ValueError(f"model is a {type(model).__name__}; edges are those of a Decoder")
    if model.layers is not None:
        raise ValueError("model has its own layers; edges need those of a config")
    if (reason := mixed_layers(model)) is not None:
        raise ValueError(reason)
    if model.config.norm_position != "pre":
        raise ValueError(
            f"norm_position is {model.config.norm_position!r}; edges need 'pre': a norm of the "
            "attention's output or of the sum is not linear, so a head has no share of its own in "
            "the residual stream"
        )
    if not model.config.residual:
        raise ValueError(
            "residual is False; edges need residuals: without them, no direct path leads past a "
            "layer"
        )


def checked_edge(edge: HeadEdge, config: TransformerConfig) -> HeadEdge:
    """Returns the edge with Python integers.

    Raises:
        ValueError: a layer, head or input does not exist, or the receiver is not after the sender.
    """
    if len(edge) != len(HeadEdge._fields):
        raise ValueError(f"edge {edge!r} must have the fields {', '.join(HeadEdge._fields)}")
    edge = HeadEdge(*edge)
    if edge.receiver_input not in INPUTS:
        raise ValueError(
            f"receiver_input is {edge.receiver_input!r}; it must be one of {', '.join(INPUTS)}"
        )
    of_keys = edge.receiver_input != "query"
    sizes = {
        "sender_layer": config.num_layers,
        "sender_head": config.num_heads,
        "receiver_layer": config.num_layers,
        "receiver_head": config.sizes.num_kv_heads if of_keys else config.num_heads,
    }
    for name, size in sizes.items():
        if whole_number(name, getattr(edge, name), 0) >= size:
            raise ValueError(
                f"{name} is {getattr(edge, name)}; for this model it must be from 0 to {size - 1}"
            )
    if edge.sender_layer >= edge.receiver_layer:
        raise ValueError(
            f"sender_layer is {edge.sender_layer} and receiver_layer {edge.receiver_layer}; the "
            "receiver must be in a later layer"
        )
    return edge
