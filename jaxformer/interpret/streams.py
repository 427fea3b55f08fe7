"""Functions of the residual stream: the summands of senders and the values of receivers.

`graph` lists the senders and the receivers of a pre-norm decoder. The summand of head h is W_O^h z,
where z is the value of the head at the hook point "attention.heads".
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.functional.attention.heads import merge_heads
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.layers.layer import Layer, list_sublayers
from jaxformer.functional.layers.sublayer import At, with_contexts
from jaxformer.functional.linear.affine import linear
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights
from jaxformer.interpret.graph import INPUTS, Graph
from jaxformer.interpret.layers import by_layer, project
from jaxformer.interpret.patching import is_at
from jaxformer.models.language_model import LanguageModel

# The hook point of the value that each kind of receiver computes.
POINTS: dict[str, str] = {name: f"attention.{name}" for name in INPUTS}
POINTS |= {"feedforward": "feedforward.output", "logits": "final_norm"}
# The hook points from which `read_stream` takes its values.
STREAM_POINTS = ("block.input", "block.middle", "block.output", "attention.heads")
STREAM_POINTS += ("feedforward.output",)


class Stream(NamedTuple):
    """The residual stream of a text, and the outputs that are added to it.

    Attributes:
        attention_input: the residual stream that the queries, keys and values of each layer read.
        feedforward_input: the residual stream that each feed-forward layer reads.
        output: the residual stream that the logits read; the first axis has size 1.
        heads: the values of the heads, before the output projection.
        feedforward: the outputs of the feed-forward layers.
    """

    attention_input: Float[Array, "layers batch length dim"]
    feedforward_input: Float[Array, "layers batch length dim"]
    output: Float[Array, "1 batch length dim"]
    heads: Float[Array, "layers batch heads length d"]
    feedforward: Float[Array, "layers batch length dim"]

    def read_by(self, name: str) -> Float[Array, "layers batch length dim"]:
        """Returns the residual stream that the receivers with this name read."""
        others = {"feedforward": self.feedforward_input, "logits": self.output}
        return others.get(name, self.attention_input)


def read_stream(graph: Graph, captured: Mapping[str, Array]) -> Stream:
    """Returns the residual stream of a text from its captured values; see `STREAM_POINTS`."""
    return Stream(
        captured["block.input"],
        captured["block.input" if graph.is_parallel else "block.middle"],
        captured["block.output"][-1:],
        captured["attention.heads"],
        captured["feedforward.output"],
    )


@partial(jax.jit, static_argnames="model")
def sender_differences(
    model: LanguageModel, weights: Weights, first: Stream, second: Stream
) -> Float[Array, "senders batch length dim"]:
    """Computes the senders' summands on the first text minus the summands on the second text."""
    embedding, feedforward, heads = (
        x - y
        for x, y in (
            (first.attention_input[:1], second.attention_input[:1]),
            (first.feedforward[:, None], second.feedforward[:, None]),
            (first.heads, second.heads),
        )
    )
    written = jax.lax.map(lambda x: head_outputs(*x), (weights["blocks"], heads))
    layers = jnp.concatenate([written, feedforward], axis=1)
    return jnp.concatenate([embedding, layers.reshape(-1, *layers.shape[2:])])


def head_outputs(
    weights: Weights, values: Float[Array, "batch heads length d"]
) -> Float[Array, "heads batch length dim"]:
    """Computes W_O^h z for each head, without the bias, which cancels in differences.

    Args:
        weights: the weights of the layer.
        values: the values z of the heads, before the output projection.
    """
    kernel = {"kernel": weights["attention"]["output"]["kernel"]}

    def output(head: Int[Array, ""]) -> Float[Array, "batch length dim"]:
        only = is_at(head, values.shape[1])[:, None, None]
        return linear(kernel, merge_heads(jnp.where(only, values, 0)))

    return jax.vmap(output)(jnp.arange(values.shape[1], dtype=jnp.int32))


def stream_tokens(model: LanguageModel, weights: Weights, inputs: Inputs) -> Tokens:
    """Returns the tokens of a text, with a context for each sub-layer.

    The result is the same for the clean and the corrupted text, because `Tokens` does not contain
    token ids.
    """
    tokens = Tokens.from_sequences(inputs, model.run())
    return with_contexts(model.architecture.stack.sublayers, tokens, weights)


def receiver_value(
    model: LanguageModel,
    weights: Weights,
    tokens: Tokens,
    name: str,
    layer: Int[Array, ""],
    residual: Float[Array, "batch length dim"],
) -> Float[Array, "batch *heads length d"]:
    """Computes the value of a layer's receivers at their hook point, from the residual stream.

    Args:
        model: the model.
        weights: the model's parameters.
        tokens: see `stream_tokens`.
        name: a key of `POINTS`.
        layer: the index of the layer; not used for "logits".
        residual: the residual stream that the receivers read.
    """
    stack = model.architecture.stack
    if name == "logits":
        return stack.finish(weights, residual)
    return by_layer(stack, weights, partial(layer_value, tokens, name), layer, residual)


def layer_value(
    tokens: Tokens,
    name: str,
    layer: Layer,
    weights: Weights,
    residual: Float[Array, "batch length dim"],
) -> Float[Array, "batch *heads length d"]:
    """Computes the queries, keys or values of a layer, or the output of its feed-forward layer."""
    if name in INPUTS:
        return project(layer, tokens, weights, residual)[INPUTS.index(name)]
    feedforward = list_sublayers(layer)[-1]
    normed = layer[-1].sublayer_input(feedforward, weights, residual)
    at = At(tokens.contexts[feedforward])
    return feedforward(weights["feedforward"], normed, at).x


def layer_values(
    tokens: Tokens,
    name: str,
    layer: Layer,
    weights: Weights,
    residuals: Float[Array, "receivers batch length dim"],
) -> Float[Array, "batch *heads length d"]:
    """Computes `layer_value` for receivers that each read their own residual stream.

    Args:
        tokens: see `stream_tokens`.
        name: one of `graph.LAYER_RECEIVERS`.
        layer: the layer.
        weights: the weights of the layer.
        residuals: the residual stream that each receiver with this name reads. For "feedforward",
            the first axis has size 1.
    """
    values = jax.vmap(partial(layer_value, tokens, name, layer, weights))(residuals)
    if name == "feedforward":
        return values[0]
    # Call n reads the residual stream of receiver n, but computes all heads. Keep only head n.
    return jnp.stack([values[n, :, n] for n in range(len(residuals))], axis=1)
