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
from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.architecture import CacheSize, Initializers
from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.convolution_rows import ConvolutionCache, Layout
from jaxformer.functional.dropout import dropout
from jaxformer.functional.embedding import (
    embed_tokens,
    embedding_stddev,
    head_of,
    init_embedding,
    prepare,
    without_padding,
)
from jaxformer.functional.inputs import Forward, Inputs, Run
from jaxformer.functional.layers.feedforward import activate, activation_power
from jaxformer.functional.layers.norms import norm_of
from jaxformer.functional.linear.affine import init_linear
from jaxformer.functional.positions import DocumentCursor
from jaxformer.functional.taps import Hooks, Tap
from jaxformer.functional.trees import REMAT, Weights, split_key, stack_trees

LAYER_POINTS = ("block.input", "convolution.output", "block.output")


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
            key,
            config.vocab_size,
            dim,
            stddev=_token_stddev(config),
        ),
        "layers": lambda key: init_layers(key, config),
    }
    if (norm := norm_of(config)) is not None:
        parts["final_norm"] = lambda key: norm.init(dim)
    return parts | head_of(config, dim).initializers()


def _token_stddev(config: Any) -> float:
    passes_on = not config.residual and config.norm == "none"
    return embedding_stddev(config.embed_dim, passes_on=passes_on)


def init_layers(key: PRNGKeyArray, config: Any) -> Weights:
    """Returns layer_0, layer_1, …: each a norm and a convolution, W ~ N(0, 1 / (K · dim)).

    Without a residual W is larger, to compensate for the activation and in layer_0 for small
    embeddings.
    """
    fan_in = config.kernel_size * config.embed_dim
    stddevs = [fan_in**-0.5] * config.num_layers
    if not config.residual:
        stddevs = [(activation_power(config.activation) * fan_in) ** -0.5] * config.num_layers
        stddevs[0] /= _token_stddev(config) if config.norm == "none" else 1.0
    keys, norm = jax.random.split(key, config.num_layers), norm_of(config)
    norms = {} if norm is None else {"norm": norm.init(config.embed_dim)}
    return {
        f"layer_{i}": {
            **norms,
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
    num_layers, layout, norm = config.num_layers, Layout.of(inputs, cache), norm_of(config)
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
        y = x if norm is None else norm(weights["norm"], x)
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
    x = x if norm is None else norm(weights["final_norm"], x)
    x = tap("final_norm", layout.in_order(x))
    return Forward(x, {**tap.captured, **stack_trees(captured)}, layout.cache_after(last_inputs))


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


@dataclass(frozen=True)
class ConvolutionalModel:
    """The `Architecture` of a convolutional language model.

    Attributes:
        config: the resolved config.
    """

    config: Any

    @property
    def masks(self) -> tuple[Mask, ...]:
        """See `Architecture`."""
        return ()

    @property
    def generates(self) -> bool:
        """See `Architecture`."""
        return True

    @property
    def initializers(self) -> Initializers:
        """See `Architecture`."""
        return initializers(self.config)

    @property
    def points(self) -> tuple[str, ...]:
        """See `Architecture`."""
        return ("embedding", *LAYER_POINTS, "final_norm")

    @property
    def layer_points(self) -> tuple[str, ...]:
        """See `Architecture`."""
        return LAYER_POINTS

    def forward(self, weights: Weights, inputs: Inputs, run: Run, cache: Any = None) -> Forward:
        """See `Architecture`."""
        return forward(weights, inputs, self.config, run, cache)

    def finish(self, weights: Weights, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        """See `Architecture`."""
        return x if (norm := norm_of(self.config)) is None else norm(weights["final_norm"], x)

    def start(
        self, weights: Weights, source: Inputs | None, run: Run, size: CacheSize
    ) -> tuple[Any, dict[str, Array]]:
        """See `Architecture`."""
        return start(weights, source, self.config, run, size)

    def prepare(self, weights: Weights, parts: int = 1) -> Weights:
        """See `Architecture`."""
        return prepare(weights, self.config.dtype, parts)
