"""Convolutional language models as pure functions of their weights.

    causal:   y_t = W [x_{t−(K−1)d}, …, x_{t−d}, x_t] + b
    centred:  y_t = W [x_{t−⌊K/2⌋d}, …, x_t, …, x_{t+⌊K/2⌋d}] + b

K is the size of the kernel and d the dilation. The centred kernel also reads later tokens, so it is
not autoregressive. It is a counter-example: without its forward edges it becomes the causal one.

Distances count the tokens of a document: padding takes no position, and there are zeros before the
first token of a document and after the last. Rows are therefore compacted, tokens before padding,
and then convolved.

Reference:
    Notes, lecture 11 §8.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from jaxformer.functional.cache import FixedSizeState
from jaxformer.functional.dropout import dropout
from jaxformer.functional.embedding import (
    embed_tokens,
    init_embedding,
    prepare,
    with_head,
    without_padding,
)
from jaxformer.functional.family import CacheSize, Family, Weights
from jaxformer.functional.feedforward import activate, activation_power
from jaxformer.functional.initial import embedding_stddev
from jaxformer.functional.inputs import Forward, Inputs, Run
from jaxformer.functional.layers import REMAT, split_key, stack
from jaxformer.functional.linear import init_linear, linear
from jaxformer.functional.norms import init_norm, normalize
from jaxformer.functional.positions import (
    DocumentCursor,
    continued_segments,
    document_positions,
)
from jaxformer.functional.taps import Hooks, Tap

LAYER_POINTS = ("block.input", "convolution.output", "block.output")


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
    if abs(offset) >= length:
        return jnp.zeros_like(x[:, first:])
    edges = [(0, 0)] * x.ndim
    edges[1] = (max(-offset - first, 0), max(offset, 0))
    begin = first + offset + edges[1][0]
    return jax.lax.slice_in_dim(jnp.pad(x, edges), begin, begin + length - first, axis=1)


def kernel_offsets(kernel_size: int, dilation: int, causal: bool) -> tuple[int, ...]:
    """Returns the positions that a kernel reads, relative to the position that it computes."""
    first = -(kernel_size - 1) if causal else -(kernel_size // 2)
    return tuple(dilation * (first + k) for k in range(kernel_size))


def layer_offsets(config: Any) -> list[tuple[int, ...]]:
    """Returns the offsets of each layer, whose dilation is dilation_growth to the power layer."""
    return [
        kernel_offsets(config.kernel_size, config.dilation_growth**layer, config.causal)
        for layer in range(config.num_layers)
    ]


# ---- the language model


def initializers(config: Any) -> dict:
    """Returns {name: initializer}, each a pure function of a key."""
    dim = config.embed_dim
    parts = {
        "embedding": lambda key: init_embedding(
            key, config.vocab_size, dim, stddev=embedding_stddev(config)
        ),
        "layers": lambda key: init_layers(key, config),
    }
    if config.norm != "none":
        parts["final_norm"] = lambda key: init_norm(config.norm, dim)
    return with_head(parts, config, dim)


def init_layers(key: PRNGKeyArray, config: Any) -> Weights:
    """Returns layer_0, layer_1, …: each a norm and a convolution, W ~ N(0, 1 / (K · dim)).

    Without a residual W is larger, to compensate for the activation and in layer_0 for small
    embeddings.
    """
    fan_in = config.kernel_size * config.embed_dim
    stddevs = [fan_in**-0.5] * config.num_layers
    if not config.residual:
        stddevs = [(activation_power(config.activation) * fan_in) ** -0.5] * config.num_layers
        stddevs[0] /= embedding_stddev(config) if config.norm == "none" else 1.0
    keys = jax.random.split(key, config.num_layers)
    return {
        f"layer_{i}": {
            "norm": init_norm(config.norm, config.embed_dim),
            "convolution": init_linear(keys[i], fan_in, config.embed_dim, stddev=stddevs[i]),
        }
        for i in range(config.num_layers)
    }


def forward(
    weights: Weights, inputs: Inputs, config: Any, run: Run, cache: "ConvolutionCache | None" = None
) -> Forward:
    """Computes x + act(Convolution(Norm(x))) layer by layer, starting from token vectors.

    Args:
        weights: those of `initializers`.
        inputs: the tokens.
        config: a ConvolutionalConfig, or a value with its fields.
        run: how the pass runs.
        cache: the inputs of earlier tokens; None: the tokens are complete sequences.

    Returns:
        A `Forward` with hidden states [batch, length, dim].
    """
    num_layers, layout = config.num_layers, Layout.of(inputs, cache)
    keys = split_key(run.dropout_key, num_layers + 1)
    x = embed_tokens(weights["embedding"], inputs.tokens, config.dtype, run.placement)
    tap = Tap(run.hooks, layout.positions, layout.documents, run.placement)
    x = layout.compact(tap("embedding", without_padding(x, layout.segments)))
    x = dropout(keys[0], x, config.dropout)

    def layer(
        weights: Weights,
        x: Float[Array, "batch length dim"],
        past: Float[Array, "batch reach dim"] | None,
        offsets: tuple[int, ...],
        key: PRNGKeyArray | None,
        hooks: Hooks,
    ) -> tuple[
        Float[Array, "batch length dim"], Float[Array, "batch reach dim"] | None, dict[str, Array]
    ]:
        tap = Tap(hooks, layout.positions, layout.documents, run.placement)
        x = layout.tapped(tap, "block.input", x)
        y = normalize(weights["norm"], x, config)
        y, past = layout.convolved(weights["convolution"], y, past, offsets)
        y = activate(layout.tapped(tap, "convolution.output", y), config.activation)
        y = dropout(key, y, config.dropout)
        x = layout.tapped(tap, "block.output", x + y if config.residual else y)
        return x, past, tap.captured

    layer = REMAT[run.execution.remat](layer, static_argnums=3)
    last_inputs, captured = [], []
    for i, hooks in enumerate(run.hooks.of(LAYER_POINTS).of_layers(num_layers)):
        layer_weights, offsets = weights["layers"][f"layer_{i}"], layer_offsets(config)[i]
        past = None if cache is None else cache.inputs[i]
        x, past, layer_captured = layer(layer_weights, x, past, offsets, keys[i + 1], hooks)
        last_inputs.append(past)
        captured.append(layer_captured)
    if "final_norm" in weights:
        x = normalize(weights["final_norm"], x, config)
    x = tap("final_norm", layout.in_order(x))
    return Forward(x, {**tap.captured, **stack(captured)}, layout.cache_after(last_inputs))


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
            return cls(None, None, jnp.arange(tokens.shape[1]), None, None, None)
        cursor = DocumentCursor.begin(len(tokens)) if cache is None else cache.cursor
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
    return _take(x, count + jnp.arange(reach))


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


def start(
    weights: Weights, source: Inputs | None, config: Any, run: Run, size: CacheSize
) -> tuple[ConvolutionCache, dict]:
    """Returns the cache before the first token; its size does not depend on the capacity."""
    reaches, rows = [-min(offsets) for offsets in layer_offsets(config)], size.batch_size
    cache = ConvolutionCache(
        DocumentCursor.begin(rows),
        jnp.int32(0),
        tuple(jnp.zeros((rows, reach, config.embed_dim), config.dtype) for reach in reaches),
        jnp.zeros((rows, max(reaches)), jnp.int32),
    )
    return cache, {}


CONVOLUTIONAL = Family(
    initializers,
    forward,
    points=lambda config: ("embedding", *LAYER_POINTS, "final_norm"),
    layer_points=lambda config: LAYER_POINTS,
    start=start,
    prepare=prepare,
)
