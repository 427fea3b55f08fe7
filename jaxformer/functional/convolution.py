"""Convolutional language models as pure functions of their weights.

    causal:   y_t = W [x_{t−(K−1)d}, …, x_{t−d}, x_t] + b
    centred:  y_t = W [x_{t−⌊K/2⌋d}, …, x_t, …, x_{t+⌊K/2⌋d}] + b      (seeds: lecture 11 §8)

with K the kernel's size and d the dilation. The centred one sees what is to come: it is not
autoregressive, and is here as the counter-example that taking its forward edges away repairs.

Distance is counted in tokens of a document: padding takes no place, and beyond a document's first
(or last) token stand zeros. So rows are compacted first, tokens before padding, then convolved.
"""

from dataclasses import dataclass
from typing import Any

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
from jaxformer.functional.layers import REMAT, Forward, split_key, stack
from jaxformer.functional.linear import init_linear, linear
from jaxformer.functional.norms import init_norm, normalizer
from jaxformer.functional.positions import (
    DocumentCursor,
    continued_segments,
    document_positions,
)
from jaxformer.functional.taps import NO_HOOKS, Hooks, Tap

__all__ = [
    "forward",
    "head",
    "initializers",
    "layer_points",
    "logits",
    "points",
    "prepare",
    "start",
]
LAYER_POINTS = ("block.input", "convolution.output", "block.output")


def points(config) -> tuple[str, ...]:
    """The names at which a pass can be looked into."""
    return ("embedding", *LAYER_POINTS, "final_norm")


def layer_points(config) -> tuple[str, ...]:
    """Those of them that every layer has."""
    return LAYER_POINTS


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


def forward(
    weights,
    tokens,
    config,
    execution,
    *,
    cache: "ConvolutionCache | None" = None,
    segments=None,
    dropout_key=None,
    hooks: Hooks = NO_HOOKS,
) -> Forward:
    """x + act(Convolution(Norm(x))), layer by layer: tokens [batch, length] to the last layer's
    values [batch, length, dim].

    cache: what was read before; None: whole rows. segments: as elsewhere, 1, 1, 2, 2, … for
    documents packed into a row, 0 for padding.
    """
    num_layers = config.num_layers
    row = Row.of(tokens, segments, cache)
    keys = split_key(dropout_key, num_layers + 1)
    x = embed_tokens(weights["embedding"], tokens, config.dtype)
    tap = Tap(hooks, row.positions, row.documents)
    x = row.compact(tap("embedding", without_padding(x, row.segments)))
    x = dropout(keys[0], x, config.dropout)

    def layer(weights, x, past, offsets, key, hooks):
        tap = Tap(hooks, row.positions, row.documents)
        x = row.tapped(tap, "block.input", x)
        y = normalizer(config.norm, config.norm_epsilon)(weights["norm"], x)
        y, past = row.convolved(weights["convolution"], y, past, offsets)
        y = activate(row.tapped(tap, "convolution.output", y), config.activation)
        y = dropout(key, y, config.dropout)
        x = row.tapped(tap, "block.output", x + y if config.residual else y)
        return x, past, tap.captured

    run = REMAT[execution.remat](layer, static_argnums=3)
    inputs, captured = [], []
    for i, own_hooks in enumerate(hooks.of(LAYER_POINTS).of_layers(num_layers)):
        own, offsets = weights["layers"][f"layer_{i}"], layer_offsets(config)[i]
        past = None if cache is None else cache.inputs[i]
        x, past, seen = run(own, x, past, offsets, keys[i + 1], own_hooks)
        inputs.append(past)
        captured.append(seen)
    if "final_norm" in weights:
        x = normalizer(config.norm, config.norm_epsilon)(weights["final_norm"], x)
    x = tap("final_norm", row.spread(x))
    if cache is not None:
        cache = row.cache_after(inputs)
    return Forward(x, {**tap.captured, **stack(captured)}, cache)


def _tokens_first(documents):
    """The order in which a row's tokens come first and its padding last."""
    return jnp.argsort(documents == 0, axis=1, stable=True)


def _take(x, index):
    """x[b, index[b, t]] along the row."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)


@dataclass(frozen=True)
class Row:
    """The tokens of a pass, and how a convolution finds those of a document side by side.

    segments, documents, positions: [batch, length] in the order of the row (documents None: one,
    without padding); order: the one in which tokens come before padding; cache: what was read
    before; cursor: how far each row has been read.
    """

    segments: Int[Array, "batch length"] | None
    documents: Int[Array, "batch length"] | None
    positions: Int[Array, "*batch length"]
    order: Int[Array, "batch length"] | None
    cache: Any  # a ConvolutionCache, or None
    cursor: DocumentCursor | None

    @classmethod
    def of(cls, tokens, segments, cache) -> "Row":
        if segments is None and cache is None:
            return cls(None, None, jnp.arange(tokens.shape[1]), None, None, None)
        cursor = DocumentCursor.begin(len(tokens)) if cache is None else cache.cursor
        segments = continued_segments(segments, cursor, tokens.shape[:2])
        documents, positions, cursor = document_positions(segments, cursor)
        return cls(segments, documents, positions, _tokens_first(documents), cache, cursor)

    def compact(self, x):
        """Tokens first, then padding."""
        return x if self.order is None else _take(x, self.order)

    def spread(self, x):
        """Back in the order of the row."""
        return x if self.order is None else _take(x, jnp.argsort(self.order, axis=1))

    def tapped(self, tap: Tap, name: str, x):
        """What tap makes of x, which is compact; what is tapped is in the order of the row."""
        is_asked = name in tap.hooks.capture or name in tap.hooks.patch
        return self.compact(tap(name, self.spread(x))) if is_asked else x

    def convolved(self, weights, x, past, offsets):
        """(The convolution of x, the last inputs that the next tokens need)."""
        documents = None if self.documents is None else self.compact(self.documents)
        if self.cache is None:
            return convolution(weights, x, offsets, documents), None
        reach, before = past.shape[1], self.cache.documents
        row = jnp.concatenate([past, x], axis=1)
        all_documents = jnp.concatenate([before[:, before.shape[1] - reach :], documents], axis=1)
        return convolution(weights, row, offsets, all_documents, first=reach), self.newest(
            row, reach
        )

    def newest(self, x, reach: int):
        """The last `reach` before the padding that ends a compact row."""
        count = (self.documents != 0).sum(axis=1, keepdims=True)
        return _take(x, count + jnp.arange(reach))

    def cache_after(self, inputs) -> "ConvolutionCache":
        before = self.cache.documents
        documents = jnp.concatenate([before, self.compact(self.documents)], axis=1)
        documents = self.newest(documents, before.shape[1])
        length = self.cache.length + self.documents.shape[1]
        return ConvolutionCache(tuple(inputs), documents, self.cursor, length)


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
