"""Gated short convolution, the sub-layer of LFM2 between those with attention.

    (B, C, v) = x W_in
    y = (C ⊙ convolution(B ⊙ v)) W_out

The convolution is causal and depthwise; see `causal_convolution`. A layer
keeps its last kernel_size − 1 inputs B ⊙ v, whatever the length of the text.

Reference:
    LFM2 technical report, 2025 (arXiv:2511.23404), §2.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.attention.masks import Causal, Mask, Packed, Window
from jaxformer.functional.layers.causal_convolution import (
    causal_convolution,
    init_causal_convolution,
    init_past,
)
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
from jaxformer.functional.taps import NO_TAP, TapFunction
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights

_MAPS = ("input_gate", "output_gate", "value")


def short_convolution(
    weights: Weights,
    x: Float[Array, "batch length dim"],
    order: TokenOrder,
    past: Float[Array, "batch earlier dim"] | None = None,
    tap: TapFunction = NO_TAP,
    *,
    keeps_states: bool = False,
) -> tuple[Float[Array, "batch length dim"], Float[Array, "batch *length earlier dim"] | None]:
    """Computes the formula of the module.

    Args:
        weights: the maps input_gate (to B), output_gate (to C), value (to v) and output, and the
            convolution.
        x: the input.
        order: the order of the tokens.
        past: the last kernel_size − 1 inputs of the convolution before x; see `causal_convolution`.
        tap: see `functional.taps`.
        keeps_states: whether to return the last inputs after each token.

    Returns:
        The output, and the last kernel_size − 1 inputs of the convolution.
    """
    before, after, value = (linear(weights[name], x) for name in _MAPS)
    gated = tap("short_convolution.gated", before * value)
    y, past = causal_convolution(
        weights["convolution"], gated, order, past, keeps_states=keeps_states
    )
    y = after * tap("short_convolution.convolved", y)
    return tap("short_convolution.output", linear(weights["output"], y)), past


@dataclass(frozen=True)
class ShortConvolution(SubLayer):
    """A gated short convolution in the place of self-attention.

    Attributes:
        kernel_size: the number of tokens that one token reads, itself included.
        use_bias: whether the maps and the convolution have biases.
    """

    name: ClassVar[str] = "short_convolution"
    points: ClassVar[tuple[str, ...]] = tuple(
        f"short_convolution.{x}" for x in ("gated", "convolved", "output")
    )

    kernel_size: int = 3
    use_bias: bool = False

    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """See `SubLayer`. The filter preserves the variance of its input."""
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
        """Returns the inputs of the convolution before the first token."""
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
        """Returns the order of the tokens."""
        return TokenOrder.of(tokens.new)

    def __call__(self, weights: Weights, x: Float[Array, "batch length dim"], at: At) -> Output:
        """See `short_convolution`."""
        keeps = {"keeps_states": at.keeps_states}
        return Output(*short_convolution(weights, x, at.context, at.state, at.tap, **keeps))
