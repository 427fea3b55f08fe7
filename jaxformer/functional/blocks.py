"""The Transformer block, and the stack of blocks.

    pre:     h = x + Attention(Norm(x))           y = h + FeedForward(Norm(h))
    post:    h = Norm(x + Attention(x))           y = Norm(h + FeedForward(h))
    output:  h = x + Norm(Attention(x))           y = h + Norm(FeedForward(h))
    both:    h = x + Norm(Attention(Norm(x)))     y = h + Norm(FeedForward(Norm(h)))

In a parallel block y = h + FeedForward(Norm(x)). Without residual and norm it is the half-built
decoder of lecture 10. A block that reads a source has cross-attention between the two sub-layers
(lecture 13 §4).

`config` below is any value with the fields of models.config, its sizes resolved. What the queries
attend to is an argument, a `Context`. The code of a block is therefore the same for complete
sequences and for a cache, in every implementation of attention.

Reference:
    Notes, lecture 11 §3; OLMo 2 2024; Gemma 2 2024.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.attention.attend import Context, KeysValues, attend
from jaxformer.functional.attention.heads import merge_heads, split_heads
from jaxformer.functional.dropout import dropout
from jaxformer.functional.family import Weights
from jaxformer.functional.layers.feedforward import feed_forward
from jaxformer.functional.layers.norms import normalize
from jaxformer.functional.linear.affine import fuse_linear, linear
from jaxformer.functional.positions import rotary
from jaxformer.functional.taps import NO_TAP, Tap
from jaxformer.functional.trees import split_key

BLOCK_POINTS = (
    "block.input",
    "attention.input",
    "attention.query",
    "attention.key",
    "attention.value",
    "attention.weights",
    "attention.heads",
    "attention.output",
    "block.middle",
    "feedforward.hidden",
    "feedforward.output",
    "block.output",
)
CROSS_BLOCK_POINTS = (
    *BLOCK_POINTS[: BLOCK_POINTS.index("block.middle") + 1],
    "cross_attention.input",
    "cross_attention.query",
    "cross_attention.weights",
    "cross_attention.heads",
    "cross_attention.output",
    "block.crossed",
    *BLOCK_POINTS[BLOCK_POINTS.index("block.middle") + 1 :],
)


class Tokens(NamedTuple):
    """The tokens that self-attention attends to, and keys and values of earlier ones, if cached."""

    context: Context
    cached: KeysValues | None = None


class Source(NamedTuple):
    """The source that cross-attention attends to, with its keys and values."""

    context: Context
    keys_values: KeysValues


def block(
    weights: Weights,
    x: Float[Array, "*batch length dim"],
    config: Any,
    tokens: Tokens,
    source: Source | None = None,
    dropout_key: PRNGKeyArray | None = None,
    tap: Tap = NO_TAP,
) -> tuple[Float[Array, "*batch length dim"], KeysValues | None]:
    """Computes one Transformer block.

    Args:
        weights: as `init_block` or, with a source, `init_cross_block` creates them.
        x: the residual stream.
        config: the `resolved` config of a Transformer, or a value with its fields.
        tokens: what self-attention attends to.
        source: what cross-attention attends to; None: there is no cross-attention.
        dropout_key: a random key, for training.
        tap: see `functional.taps`.

    Returns:
        The residual stream after the block, and the keys and values with those of these tokens.

    Raises:
        ValueError: a size or a part of the weights does not fit.
        TypeError: an argument has another type.
    """
    keys = split_key(dropout_key, 3)
    x = tap("block.input", x)
    normed = norm_before(weights, "attention", x, config)
    a, layer_cache = self_attention(weights["attention"], normed, config, tokens, tap)
    h = tap("block.middle", add_residual(weights, "attention", x, a, config, keys[0]))
    if source is not None:
        normed = norm_before(weights, "cross_attention", h, config)
        c = cross_attention(weights["cross_attention"], normed, config, source, tap)
        h = tap("block.crossed", add_residual(weights, "cross_attention", h, c, config, keys[1]))
    name = "attention" if config.parallel == "one_norm" else "feedforward"
    normed = norm_before(weights, name, h if config.parallel == "no" else x, config)
    activation, twice = config.activation, config.output_activation
    f = feed_forward(weights["feedforward"], normed, activation, twice, tap)
    return tap(
        "block.output", add_residual(weights, "feedforward", h, f, config, keys[2])
    ), layer_cache


def norm_before(
    weights: Weights, name: str, x: Float[Array, "*batch dim"], config: Any
) -> Float[Array, "*batch dim"]:
    """Computes Norm(x) for the input of a sub-layer, or returns x if the norm is elsewhere."""
    is_before = config.norm_position in ("pre", "both")
    if not is_before or (name == "attention" and not config.first_attention_norm):
        return x
    return normalize(weights[f"{name}_norm"], x, config)


def add_residual(
    weights: Weights,
    name: str,
    x: Float[Array, "*batch dim"],
    y: Float[Array, "*batch dim"],
    config: Any,
    dropout_key: PRNGKeyArray | None = None,
) -> Float[Array, "*batch dim"]:
    """Adds the output y of a sub-layer to its residual x, with dropout and norms.

    With norm_position "output" and "both" it is x + Norm(y), with "post" Norm(x + y), with "pre"
    x + y. Without residuals it is the same without x.
    """
    if config.norm_position in ("output", "both"):
        norm = f"{name}_output_norm" if config.norm_position == "both" else f"{name}_norm"
        y = normalize(weights[norm], y, config)
    y = dropout(dropout_key, y, config.dropout)
    y = x + y if config.residual else y
    return normalize(weights[f"{name}_norm"], y, config) if config.norm_position == "post" else y


def self_attention(
    weights: Weights,
    x: Float[Array, "*batch length dim"],
    config: Any,
    tokens: Tokens,
    tap: Tap = NO_TAP,
) -> tuple[Float[Array, "*batch length dim"], KeysValues | None]:
    """Computes softmax(q kᵀ/√d) v for each head, concatenates the heads and applies W_O.

    Reference:
        Notes, lecture 11 §4.
    """
    context = tokens.context
    x = tap("attention.input", x)
    query, key, value = queries_keys_values(weights, x, context, config)
    query, key = tap("attention.query", query), tap("attention.key", key)
    value = tap("attention.value", value)
    (keys, values), layer_cache = context.store(key, value, tokens.cached, tap)
    heads = tap("attention.heads", attend(query, keys, values, context, tap))
    return tap("attention.output", linear(weights["output"], merge_heads(heads))), layer_cache


def queries_keys_values(
    weights: Weights, x: Float[Array, "*batch length dim"], context: Context, config: Any
) -> tuple[Array, Array, Array]:
    """Computes queries, keys and values, each [*batch, heads or kv_heads, length, head_dim].

    Queries and keys are normalized and rotated, if the config asks for it.
    """
    query, key, value = project(weights, x, config)
    query = rotate(query_key_norm(weights, "query_norm", query, config), context, config)
    key = rotate(query_key_norm(weights, "key_norm", key, config), context, config)
    return query, key, value


def project(weights: Weights, x: Float[Array, "*batch length dim"], config: Any) -> list[Array]:
    """Computes x W_Q, x W_K and x W_V, each [*batch, heads or kv_heads, length, head_dim]."""
    num_heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    if "query_key_value" in weights:
        ends = [config.head_dim * sum(num_heads[:side]) for side in (1, 2)]
        projected = jnp.split(linear(weights["query_key_value"], x), ends, axis=-1)
    else:
        projected = [linear(weights[name], x) for name in ("query", "key", "value")]
    return [split_heads(y, num) for y, num in zip(projected, num_heads, strict=True)]


def fuse_query_key_value(weights: Weights) -> Weights:
    """Fuses the maps to query, key and value of a block, so that one product replaces three.

    Returns the weights unchanged if the maps are fused already or cannot be.
    """
    attention, names = weights["attention"], ("query", "key", "value")
    if "query_key_value" in attention:
        return weights
    fused = fuse_linear([attention[name] for name in names])
    if fused is None:
        return weights
    rest = {name: x for name, x in attention.items() if name not in names}
    return {**weights, "attention": {**rest, "query_key_value": fused}}


def query_key_norm(
    weights: Weights, name: str, x: Float[Array, "*batch heads length head_dim"], config: Any
) -> Float[Array, "*batch heads length head_dim"]:
    """Normalizes queries or keys [*batch, heads, length, head_dim] if the config asks for it."""
    if config.query_key_norm == "none":
        return x
    if config.query_key_norm == "head":
        return normalize(weights[name], x, config)
    return split_heads(normalize(weights[name], merge_heads(x), config), x.shape[-3])


def rotate(
    x: Float[Array, "*batch heads length head_dim"], context: Context, config: Any
) -> Float[Array, "*batch heads length head_dim"]:
    """Rotates queries or keys by their positions, if the config has rotary positions."""
    if config.positions != "rotary":
        return x
    positions = (
        jnp.arange(x.shape[-2], dtype=jnp.int32) if context.positions is None else context.positions
    )
    return rotary(
        x,
        positions,
        config.rotary_base,
        fraction=config.rotary_fraction,
        interleaved=config.rotary_interleaved,
        scaling=config.rotary_scaling,
    )


def cross_attention(
    weights: Weights,
    x: Float[Array, "*batch length dim"],
    config: Any,
    source: Source,
    tap: Tap = NO_TAP,
) -> Float[Array, "*batch length dim"]:
    """Computes attention of queries from x to the keys and values of a source.

    Reference:
        Notes, lecture 13 §4.
    """
    query = split_heads(linear(weights["query"], tap("cross_attention.input", x)), config.num_heads)
    query = tap("cross_attention.query", query)
    heads = attend(query, *source.keys_values, source.context, tap)
    heads = merge_heads(tap("cross_attention.heads", heads))
    return tap("cross_attention.output", linear(weights["output"], heads))


def cross_keys_values(
    weights: Weights, encoded: Float[Array, "*batch source dim"], config: Any
) -> KeysValues:
    """Computes keys and values [*batch, kv_heads, source, head_dim] from encoded sources."""
    key, value = (linear(weights[name], encoded) for name in ("key", "value"))
    return split_heads(key, config.num_kv_heads), split_heads(value, config.num_kv_heads)
