"""Path patching: the effect of one attention head on a later head through the residual stream.

In a pre-norm decoder, the residual stream x_r before layer r is the sum of the embedding and the
outputs of all heads and feed-forward layers before layer r. Head h of layer l adds W_O^h z to x_r.
Here z is the head's value at the hook point "attention.heads", and W_O^h is the part of the output
projection that belongs to this head. An edge connects this head, the sender, with the queries, keys
or values of a head in a later layer r, the receiver.

Patching an edge changes the forward pass on the corrupted text in three steps:

1. Compute x' = x_r + W_O^h (z_clean − z_corrupted) at all positions.
2. Compute the receiver's queries (or keys, or values) from Norm(x'), and use them in layer r.
3. Compute the remaining values of layer r and all later layers as usual.

All earlier layers, and all other queries, keys and values of layer r, have the same values as
without the patch. The edge thus excludes paths from the sender to the receiver through other heads
or through feed-forward layers. Conmy et al. define edges in the same way, because they treat each
feed-forward layer as a node of the graph. Wang et al. instead recompute the feed-forward layers
between the sender and the receiver.

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
from jaxformer.functional.hooks import Hooks, Patch
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.layers.layer import Layer
from jaxformer.functional.layers.sublayer import with_contexts
from jaxformer.functional.linear.affine import linear
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights
from jaxformer.interpret.layers import (
    by_layer,
    heads_shape,
    mixed_layers,
    project,
    transformer_config,
    weights_of_layer,
)
from jaxformer.interpret.patching import (
    AnyMetric,
    Metric,
    checked_metric,
    checked_pair,
    is_at,
    measure,
    run_metric,
)
from jaxformer.interpret.summary import summary
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
        receiver_head: index of the receiving head; for "key" and "value", index of the key/value
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
        effects: for each edge, the metric on the corrupted text with the patch minus the metric
            without it.
        clean: the metric on the clean text, without a patch.
        corrupted: the metric on the corrupted text, without a patch.
    """

    effects: Float[np.ndarray, " edges"]
    clean: float
    corrupted: float

    def __repr__(self) -> str:
        """See `summary`."""
        return summary(self)


class EdgeState(NamedTuple):
    """Arguments of `run_edges` that are equal for all edges.

    Attributes:
        weights: the model's parameters.
        inputs: the corrupted text, as input of the model.
        metric: the metric.
        residual: the input of each layer on the corrupted text.
        differences: the outputs of the heads on the clean text minus their outputs on the
            corrupted text.
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
    metric: AnyMetric,
    edges: Sequence[HeadEdge],
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
        edges: the edges, each of which is patched in its own forward pass.
        chunk: the maximum number of forward passes at the same time. Memory is proportional to
            `chunk`.
        on_progress: called with (number of measured edges, total number of edges).

    Raises:
        ValueError: An argument is invalid or the heads do not add to a residual stream.
    """
    check_is_sum(model)
    model.check(variables)
    chunk = whole_number("chunk", chunk, 1)
    read, changed = checked_pair(clean, corrupted, model.config)
    measured = checked_metric(metric, changed, model.config.vocab_size)
    edges = [checked_edge(edge, transformer_config(model)) for edge in edges]
    weights = variables["params"]
    hooks = Hooks(("block.input", "attention.heads"))
    clean_metric, of_clean = measure(model, weights, read, measured, hooks)
    base, of_corrupted = measure(model, weights, changed, measured, hooks)
    differences = of_clean["attention.heads"] - of_corrupted["attention.heads"]
    state = EdgeState(weights, changed, measured, of_corrupted["block.input"], differences)
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
    """Computes the metric on the corrupted text once per edge, with this edge patched.

    Args:
        model: the model.
        name: the `receiver_input` of all edges, "query", "key" or "value".
        state: the arguments that are equal for all edges.
        edges: the first four fields of each `HeadEdge`.
    """

    def patched(edge: Int[Array, "4"]) -> Float[Array, ""]:
        sender_layer, sender_head, layer, head = edge
        residual = state.residual[layer] + sent(model, state, sender_layer, sender_head)
        value = receiver_input(model, state, layer, name, residual)
        here = is_at(layer, model.config.num_layers)[:, None, None, None, None]
        where = here & is_at(head, value.shape[-3])[:, None, None]
        hooks = Hooks(patch={f"attention.{name}": Patch(where, value[None])})
        return run_metric(model, state.weights, state.inputs, state.metric, hooks)[0]

    return jax.vmap(patched)(jnp.asarray(edges))


def sent(
    model: LanguageModel, state: EdgeState, layer: Int[Array, ""], head: Int[Array, ""]
) -> Float[Array, "batch length dim"]:
    """Computes W_O^h (z_clean − z_corrupted), the change of one head's contribution."""
    output = weights_of_layer(state.weights, layer)["attention"]["output"]
    mine = is_at(head, transformer_config(model).num_heads)[:, None, None]
    difference = merge_heads(jnp.where(mine, state.differences[layer], 0))
    # The bias cancels in the difference.
    return linear({"kernel": output["kernel"]}, difference)


def receiver_input(
    model: LanguageModel,
    state: EdgeState,
    layer: Int[Array, ""],
    name: str,
    residual: Float[Array, "batch length dim"],
) -> Float[Array, "batch heads length d"]:
    """Computes the queries, keys or values of a layer from the layer's input."""
    stack = model.architecture.stack
    tokens = Tokens.from_sequences(state.inputs, model.run())
    tokens = with_contexts(stack.sublayers, tokens, state.weights)

    def run(layer: Layer, block: Weights, x: Float[Array, "batch length dim"]) -> Array:
        return project(layer, tokens, block, x)[INPUTS.index(name)]

    return by_layer(stack, state.weights, run, layer, residual)


def check_is_sum(model: LanguageModel) -> None:
    """Raises ValueError unless each head of the model adds its output to a residual stream."""
    if type(model) is not Decoder:
        raise ValueError(f"model is a {type(model).__name__}; path patching requires a Decoder")
    if model.layers is not None:
        raise ValueError(
            "model has user-defined layers; path patching requires layers built from a config"
        )
    heads_shape(model, "attention")
    if (reason := mixed_layers(model)) is not None:
        raise ValueError(reason)
    if model.config.norm_position != "pre":
        raise ValueError(
            f"norm_position is {model.config.norm_position!r}; path patching requires 'pre', "
            "because with other norms the residual stream is not the sum of the heads' outputs"
        )
    if not model.config.residual:
        raise ValueError("residual is False; path patching requires residual connections")


def checked_edge(edge: HeadEdge, config: TransformerConfig) -> HeadEdge:
    """Checks an edge and converts its indices to Python integers.

    Raises:
        ValueError: A layer, head or input does not exist, or receiver_layer is not larger than
            sender_layer.
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
            f"sender_layer is {edge.sender_layer} and receiver_layer is {edge.receiver_layer}; "
            "receiver_layer must be larger than sender_layer"
        )
    return edge
