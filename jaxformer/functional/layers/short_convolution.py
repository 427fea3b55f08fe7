"""Gated short convolution, which LFM2 uses between its attention layers.

    (B, C, v) = x W_in
    y = (C ⊙ convolution(B ⊙ v)) W_out

The convolution is causal and depthwise: each feature is convolved separately over the tokens of a
document.

    y_t = Σ_j w_j ⊙ x_{t−j} + b,    j = 0 … K − 1

Here x_{t−j} is the input j tokens earlier in the same document, or 0 before the start of the
document. Padding is skipped. The cache of a layer holds the last K − 1 inputs B ⊙ v.

Reference:
    LFM2 technical report, 2025 (arXiv:2511.23404), §2.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, PRNGKeyArray

from jaxformer.functional.attention.masks import Causal, Mask, Packed, Window
from jaxformer.functional.hooks import NO_HOOK, HookFunction
from jaxformer.functional.layers.sublayer import (
    At,
    Initial,
    Output,
    Start,
    SubLayer,
    WeightAxis,
    axes_of_linear,
)
from jaxformer.functional.layers.token_order import TokenOrder
from jaxformer.functional.linear.affine import init_linear, linear
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights


def init_causal_convolution(
    key: PRNGKeyArray, kernel_size: int, dim: int, *, use_bias: bool, stddev: float
) -> dict[str, Float[Array, "..."]]:
    """Returns w ~ N(0, stddev²) [kernel_size, dim], whose last row is w_0, and b = 0 [dim]."""
    weights = {"filter": stddev * jax.random.normal(key, (kernel_size, dim), jnp.float32)}
    return weights | ({"bias": jnp.zeros(dim, jnp.float32)} if use_bias else {})


def causal_convolution(
    weights: Weights,
    x: Float[Array, "batch length dim"],
    order: TokenOrder,
    past: Float[Array, "batch earlier dim"] | None = None,
    *,
    keeps_states: bool = False,
) -> tuple[Float[Array, "batch length dim"], Float[Array, "batch *length earlier dim"] | None]:
    """Computes the convolution y_t = Σ_j w_j ⊙ x_{t−j} + b of this module in float32.

    Args:
        weights: filter [kernel_size, dim], whose last row is w_0, and optionally bias.
        x: the inputs.
        order: the order of the tokens.
        past: the last kernel_size − 1 inputs before x, the newest last; None if no document begins
            before x. Inputs of earlier documents are ignored.
        keeps_states: whether to return the last inputs after each token.

    Returns:
        The outputs, in the dtype of x and 0 at padding, and the last kernel_size − 1 inputs.
    """
    rows = weights["filter"].astype(jnp.float32)
    earlier, length = len(rows) - 1, x.shape[1]
    x = order.compact(x)
    before = jnp.zeros_like(x, shape=(x.shape[0], earlier, x.shape[2])) if past is None else past
    inputs = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    y = jnp.zeros(x.shape, jnp.float32)
    for distance in range(len(rows)):
        begin = earlier - distance
        read = jax.lax.slice_in_dim(inputs, begin, begin + length, axis=1).astype(jnp.float32)
        in_document = (order.positions >= distance)[..., None]
        y += jnp.where(in_document, read, 0) * rows[begin]
    y = y + weights["bias"] if "bias" in weights else y
    if order.documents is not None:
        y = jnp.where((order.documents != 0)[..., None], y, 0)
    newest = None
    if past is not None:
        newest = order.newest(inputs, earlier, after_each=keeps_states).astype(past.dtype)
    return order.restore(y.astype(x.dtype)), newest


def init_past(
    batch_size: int, kernel_size: int, dim: int, dtype: DTypeLike
) -> Float[Array, "batch earlier dim"]:
    """Returns zeros for the kernel_size − 1 inputs before the first token."""
    return jnp.zeros((batch_size, kernel_size - 1, dim), dtype)


_MAPS = ("input_gate", "output_gate", "value")


def short_convolution(
    weights: Weights,
    x: Float[Array, "batch length dim"],
    order: TokenOrder,
    past: Float[Array, "batch earlier dim"] | None = None,
    hook: HookFunction = NO_HOOK,
    *,
    keeps_states: bool = False,
) -> tuple[Float[Array, "batch length dim"], Float[Array, "batch *length earlier dim"] | None]:
    """Computes the gated short convolution y = (C ⊙ convolution(B ⊙ v)) W_out.

    Args:
        weights: the linear layers input_gate (to B), output_gate (to C), value (to v) and output,
            and the weights of the convolution.
        x: the input.
        order: the order of the tokens.
        past: the last kernel_size − 1 inputs of the convolution before x; see `causal_convolution`.
        hook: see `functional.hooks`.
        keeps_states: whether to return the last inputs after each token.

    Returns:
        The output, and the last kernel_size − 1 inputs of the convolution.
    """
    before, after, value = (linear(weights[name], x) for name in _MAPS)
    gated = hook("short_convolution.gated", before * value)
    y, past = causal_convolution(
        weights["convolution"], gated, order, past, keeps_states=keeps_states
    )
    y = after * hook("short_convolution.convolved", y)
    return hook("short_convolution.output", linear(weights["output"], y)), past


@dataclass(frozen=True)
class ShortConvolution(SubLayer):
    """Gated short convolution, a sub-layer that replaces self-attention.

    Attributes:
        kernel_size: the number of tokens that the convolution reads per output.
        use_bias: whether the linear layers and the convolution have biases.
    """

    name: ClassVar[str] = "short_convolution"
    hook_points: ClassVar[tuple[str, ...]] = tuple(
        f"short_convolution.{x}" for x in ("gated", "convolved", "output")
    )

    kernel_size: int = 3
    use_bias: bool = False

    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """See `SubLayer`. The initial filter preserves the variance of its input."""
        output_key, convolution_key, *keys = jax.random.split(key, 2 + len(_MAPS))
        reading = initial.reading(dim) / initial.input_stddev
        maps = {
            name: init_linear(map_key, dim, dim, use_bias=self.use_bias, stddev=reading)
            for name, map_key in zip(_MAPS, keys, strict=True)
        }
        convolution = init_causal_convolution(
            convolution_key,
            self.kernel_size,
            dim,
            use_bias=self.use_bias,
            stddev=self.kernel_size**-0.5,
        )
        writing = initial.writing(dim)
        output = init_linear(output_key, dim, dim, use_bias=self.use_bias, stddev=writing)
        return {**maps, "convolution": convolution, "output": output}

    def init_state(self, weights: Weights, start: Start) -> Float[Array, "batch earlier dim"]:
        """Returns zeros for the last inputs of the convolution."""
        return init_past(start.batch_size, self.kernel_size, start.dim, start.dtype)

    def rule(self) -> Mask:
        """See `SubLayer`."""
        return Causal() & Window(self.kernel_size) & Packed()

    def weight_axes(self) -> dict[str, tuple[WeightAxis, ...]]:
        """See `SubLayer`."""
        maps = axes_of_linear("dim", "hidden", *_MAPS) | axes_of_linear("hidden", "dim", "output")
        return maps | {
            "convolution/filter": (None, "hidden"),
            "convolution/bias": ("hidden",),
        }

    def context(self, tokens: Tokens, shared: Weights) -> TokenOrder:
        """Returns an order of the tokens that moves padding to the end."""
        return TokenOrder.of(tokens.new)

    def __call__(self, weights: Weights, x: Float[Array, "batch length dim"], at: At) -> Output:
        """See `short_convolution`."""
        keeps = {"keeps_states": at.keeps_states}
        return Output(*short_convolution(weights, x, at.context, at.state, at.hook, **keeps))
