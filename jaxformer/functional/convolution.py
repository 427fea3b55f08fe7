"""Convolutional language models as pure functions of their weights.

    causal:   y_t = W [x_{t−(K−1)d}, …, x_{t−d}, x_t] + b
    centred:  y_t = W [x_{t−⌊K/2⌋d}, …, x_t, …, x_{t+⌊K/2⌋d}] + b      (seeds: lecture 11 §8)

with K the kernel's size and d the dilation. The centred one sees what is to come: it is not
autoregressive, and is here as the counter-example that taking its forward edges away repairs.

Distance is counted in tokens of a document: padding takes no place, and beyond a document's first
(or last) token stand zeros. So rows are compacted first, tokens before padding, then convolved.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.functional.cache import FixedSizeState
from jaxformer.functional.dropout import dropout
from jaxformer.functional.embedding import (
    embed_tokens,
    head,
    init_embedding,
    logits,
    prepare,
    with_head,
    without_padding,
)
from jaxformer.functional.feedforward import activate
from jaxformer.functional.linear import init_linear, linear
from jaxformer.functional.norms import init_norm, normalizer
from jaxformer.functional.positions import DocumentCursor, continued_segments, document_positions

__all__ = ["advance", "head", "hidden_states", "initializers", "logits", "prepare", "start"]


def convolution(
    weights,
    x: Float[Array, "batch length in_dim"],
    offsets: tuple[int, ...],
    documents: Int[Array, "batch length"] | None = None,
    first: int = 0,
) -> Float[Array, "batch computed out_dim"]:
    """y_t = Σ_k x_{t + offsets[k]} W_k + b for t = first … length − 1, x being 0 outside the row
    and in another document.

    weights: kernel [len(offsets) · in_dim, out_dim], W_0 first, and bias; documents: 0 is padding.
    """
    taps = []
    for offset in offsets:
        tap = _shifted(x, offset, first)
        if documents is not None:
            here = documents[:, first:]
            same = _shifted(documents, offset, first) == here
            tap = jnp.where((same & (here != 0))[..., None], tap, 0)
        taps.append(tap)
    return linear(weights, jnp.concatenate(taps, axis=-1))


def _shifted(x, offset: int, first: int):
    """x_{t + offset} for t = first … length − 1, zeros where there is none."""
    length = x.shape[1]
    if abs(offset) >= length:
        return jnp.zeros_like(x[:, first:])
    edges = [(0, 0)] * x.ndim
    edges[1] = (max(-offset - first, 0), max(offset, 0))
    begin = first + offset + edges[1][0]
    return jax.lax.slice_in_dim(jnp.pad(x, edges), begin, begin + length - first, axis=1)


def kernel_offsets(kernel_size: int, dilation: int, causal: bool) -> tuple[int, ...]:
    """Where a kernel looks, relative to the position that it computes."""
    first = -(kernel_size - 1) if causal else -(kernel_size // 2)
    return tuple(dilation * (first + k) for k in range(kernel_size))


def layer_offsets(config) -> list[tuple[int, ...]]:
    """The offsets of each layer: with dilation_growth 2 the dilations are 1, 2, 4, …"""
    return [
        kernel_offsets(config.kernel_size, config.dilation_growth**layer, config.causal)
        for layer in range(config.num_layers)
    ]


# ---- the language model


def initializers(config) -> dict:
    """The weights by name, each as a pure initialiser of one key."""
    dim = config.embed_dim
    parts = {
        "embedding": lambda key: init_embedding(key, config.vocab_size, dim),
        "layers": lambda key: init_layers(key, config),
    }
    if config.norm != "none":
        parts["final_norm"] = lambda key: init_norm(config.norm, dim)
    return with_head(parts, config, dim)


def init_layers(key, config):
    """layer_0, layer_1, …, each a norm and a convolution, W ~ N(0, 1 / (K · dim))."""
    fan_in = config.kernel_size * config.embed_dim
    keys = jax.random.split(key, config.num_layers)
    return {
        f"layer_{i}": {
            "norm": init_norm(config.norm, config.embed_dim),
            "convolution": init_linear(keys[i], fan_in, config.embed_dim, stddev=fan_in**-0.5),
        }
        for i in range(config.num_layers)
    }


def run_layers(weights, x, config, convolve, dropout_key=None):
    """x + act(Convolution(Norm(x))), layer by layer; convolve(layer, weights, x) → y."""
    normalize = normalizer(config.norm, config.norm_epsilon)
    num = config.num_layers
    keys = [None] * (num + 1) if dropout_key is None else jax.random.split(dropout_key, num + 1)
    x = dropout(keys[0], x, config.dropout)
    for layer in range(num):
        own = weights["layers"][f"layer_{layer}"]
        y = convolve(layer, own["convolution"], normalize(own["norm"], x))
        y = dropout(keys[layer + 1], activate(y, config.activation), config.dropout)
        x = x + y if config.residual else y
    return normalize(weights["final_norm"], x) if "final_norm" in weights else x


def hidden_states(weights, tokens, config, execution, *, segments=None, dropout_key=None):
    """Whole rows to the last layer's values [batch, length, dim]; segments as elsewhere:
    1, 1, 2, 2, … for documents packed into a row, 0 for padding."""
    x = without_padding(embed_tokens(weights["embedding"], tokens, config.dtype), segments)
    documents = order = None
    if segments is not None:
        documents, _, _ = document_positions(segments, DocumentCursor.begin(len(segments)))
        order = _tokens_first(documents)
        x, documents = _take(x, order), _take(documents, order)
    offsets = layer_offsets(config)

    def convolve(layer, weights, x):
        return convolution(weights, x, offsets[layer], documents)

    x = run_layers(weights, x, config, convolve, dropout_key)
    return x if order is None else _take(x, jnp.argsort(order, axis=1))


def _tokens_first(documents):
    """The order in which a row's tokens come first and its padding last."""
    return jnp.argsort(documents == 0, axis=1, stable=True)


def _take(x, index):
    """x[b, index[b, t]] along the row."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)


# ---- token by token


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ConvolutionCache(FixedSizeState):
    """inputs: per layer the last tokens that its kernel reaches back to [batch, reach, dim];
    documents: theirs, for the layer that reaches furthest, int [batch, reach]; cursor: how far
    each row has been read; length: tokens read, padding counted, int []. It has no end."""

    inputs: tuple[Array, ...]
    documents: Array
    cursor: DocumentCursor
    length: Array


def start(config, batch_size: int, capacity: int) -> ConvolutionCache:
    """Nothing read yet; the capacity costs nothing."""
    reaches = [-min(offsets) for offsets in layer_offsets(config)]
    return ConvolutionCache(
        tuple(jnp.zeros((batch_size, reach, config.embed_dim), config.dtype) for reach in reaches),
        jnp.zeros((batch_size, max(reaches)), jnp.int32),
        DocumentCursor.begin(batch_size),
        jnp.int32(0),
    )


def advance(weights, tokens, cache: ConvolutionCache, config, *, segments=None):
    """Read the next tokens [batch, new]; returns (their hidden states, the cache after them)."""
    segments = continued_segments(segments, cache.cursor, tokens.shape[:2])
    new, _, cursor = document_positions(segments, cache.cursor)
    x = without_padding(embed_tokens(weights["embedding"], tokens, config.dtype), segments)
    order = _tokens_first(new)
    x, new = _take(x, order), _take(new, order)
    count = (new != 0).sum(axis=1, keepdims=True)
    offsets, inputs = layer_offsets(config), []

    def joined(old, new):
        return jnp.concatenate([old, new], axis=1)

    def newest(x, reach):
        """The last `reach` before the padding that now ends the row."""
        return _take(x, count + jnp.arange(reach))

    def convolve(layer, weights, x):
        reach = cache.inputs[layer].shape[1]
        row = joined(cache.inputs[layer], x)
        known = joined(cache.documents[:, cache.documents.shape[1] - reach :], new)
        inputs.append(newest(row, reach))
        return convolution(weights, row, offsets[layer], known, first=reach)

    x = run_layers(weights, x, config, convolve)
    documents = newest(joined(cache.documents, new), cache.documents.shape[1])
    length = cache.length + tokens.shape[1]
    cache = ConvolutionCache(tuple(inputs), documents, cursor, length)
    return _take(x, jnp.argsort(order, axis=1)), cache
