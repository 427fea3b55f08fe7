"""Convolution of documents in rows: its formula, the order of tokens, and the cache."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxformer.functional.cache.fixed_size_state import FixedSizeState
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.linear.affine import linear
from jaxformer.functional.positions import DocumentCursor, continued_segments, document_positions
from jaxformer.functional.symbolic import at_most
from jaxformer.functional.taps import Tap
from jaxformer.functional.trees import Weights


def convolution(
    weights: Weights,
    x: Float[Array, "batch length in_dim"],
    offsets: tuple[int, ...],
    documents: Int[Array, "batch length"] | None = None,
    first: int = 0,
) -> Float[Array, "batch computed out_dim"]:
    """Computes y_t = Σ_k x_{t + offsets[k]} W_k + b for t = first … length − 1.

    x is 0 outside of the row and in another document.

    Args:
        weights: kernel [len(offsets) · in_dim, out_dim], W_0 first, and bias.
        x: the input.
        offsets: the positions that the kernel reads, relative to t.
        documents: the document of each position, 0 for padding; None: one document.
        first: the first t of the output.
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


def _shifted(
    x: Shaped[Array, "batch length *dim"], offset: int, first: int
) -> Shaped[Array, "batch computed *dim"]:
    """Returns x_{t + offset} for t = first … length − 1, with zeros outside of the layout."""
    length = x.shape[1]
    if at_most(length, abs(offset)):
        return jnp.zeros_like(x[:, first:])
    edges = [(0, 0)] * x.ndim
    edges[1] = (max(-offset - first, 0), max(offset, 0))
    begin = first + offset + edges[1][0]
    return jax.lax.slice_in_dim(jnp.pad(x, edges), begin, begin + length - first, axis=1)


def _tokens_first(documents: Int[Array, "batch length"]) -> Int[Array, "batch length"]:
    """Returns the order in which the tokens of a row precede its padding."""
    return jnp.argsort(documents == 0, axis=1, stable=True)


def _take(
    x: Shaped[Array, "batch length *dim"], index: Int[Array, "batch taken"]
) -> Shaped[Array, "batch taken *dim"]:
    """Returns x[b, index[b, t]] for each batch element b."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)


@dataclass(frozen=True)
class Layout:
    """Tokens of a pass, and their compact order, in which the tokens of a document are adjacent.

    Attributes:
        segments: [batch, length], in the order of the row; None: no padding and one document.
        documents: [batch, length], in the order of the row; None: one document without padding.
        positions: [batch, length] or [length], in the order of the layout.
        order: the order in which tokens precede padding; None: that of the layout.
        cache: the cache before the tokens, or None.
        cursor: how far each row has been read after the tokens.
    """

    segments: Int[Array, "batch length"] | None
    documents: Int[Array, "batch length"] | None
    positions: Int[Array, "*batch length"]
    order: Int[Array, "batch length"] | None
    cache: Any  # a ConvolutionCache, or None
    cursor: DocumentCursor | None

    @classmethod
    def of(cls, inputs: Inputs, cache: "ConvolutionCache | None") -> "Layout":
        """Returns the `Layout` of complete sequences or, with a cache, of the next tokens."""
        tokens, segments = inputs.tokens, inputs.segments
        if segments is None and cache is None:
            return cls(None, None, jnp.arange(tokens.shape[1], dtype=jnp.int32), None, None, None)
        cursor = DocumentCursor.begin(tokens.shape[0]) if cache is None else cache.cursor
        segments = continued_segments(segments, cursor, tokens.shape[:2])
        documents, positions, cursor = document_positions(segments, cursor)
        return cls(segments, documents, positions, _tokens_first(documents), cache, cursor)

    def compact(self, x: Shaped[Array, "batch length *dim"]) -> Shaped[Array, "batch length *dim"]:
        """Reorders x so that tokens precede padding."""
        return x if self.order is None else _take(x, self.order)

    def in_order(self, x: Shaped[Array, "batch length *dim"]) -> Shaped[Array, "batch length *dim"]:
        """Restores the order of the row, the inverse of `compact`."""
        return x if self.order is None else _take(x, jnp.argsort(self.order, axis=1))

    def tapped(
        self, tap: Tap, name: str, x: Float[Array, "batch length dim"]
    ) -> Float[Array, "batch length dim"]:
        """Applies `tap` to the compact x, in the order of the layout."""
        if not tap.has(name):
            return tap.placement.place(name, x)
        return self.compact(tap(name, self.in_order(x)))

    def convolved(
        self,
        weights: Weights,
        x: Float[Array, "batch length dim"],
        past: Float[Array, "batch reach dim"] | None,
        offsets: tuple[int, ...],
    ) -> tuple[Float[Array, "batch length out_dim"], Float[Array, "batch reach dim"] | None]:
        """Returns (the convolution of x, the last inputs, which the next tokens need)."""
        documents = None if self.documents is None else self.compact(self.documents)
        if self.cache is None or past is None or documents is None:
            return convolution(weights, x, offsets, documents), None
        reach, before = past.shape[1], self.cache.documents
        row = jnp.concatenate([past, x], axis=1)
        all_documents = jnp.concatenate([before[:, before.shape[1] - reach :], documents], axis=1)
        y = convolution(weights, row, offsets, all_documents, first=reach)
        return y, _newest(row, reach, documents)

    def cache_after(self, inputs: list[Any]) -> "ConvolutionCache | None":
        """Returns the cache after the tokens, or None for complete sequences.

        Args:
            inputs: the last inputs of each layer.
        """
        if self.cache is None or self.documents is None or self.cursor is None:
            return None
        before, new = self.cache.documents, self.compact(self.documents)
        documents = _newest(jnp.concatenate([before, new], axis=1), before.shape[1], new)
        length = self.cache.length + new.shape[1]
        return ConvolutionCache(self.cursor, length, tuple(inputs), documents)


def _newest(
    x: Shaped[Array, "batch all_tokens *dim"], reach: int, documents: Int[Array, "batch length"]
) -> Shaped[Array, "batch reach *dim"]:
    """Returns the last `reach` entries before the padding at the end of compact rows."""
    count = (documents != 0).sum(axis=1, keepdims=True)
    return _take(x, count + jnp.arange(reach, dtype=jnp.int32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ConvolutionCache(FixedSizeState):
    """Cache of a convolutional model, with no limit on the number of tokens.

    Attributes:
        inputs: [batch, reach, dim] for each layer, the last tokens that its kernel reaches back to.
        documents: int [batch, reach], the documents of the inputs of the layer with the largest
            reach.
    """

    inputs: tuple[Array, ...]
    documents: Array
