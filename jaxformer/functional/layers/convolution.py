"""Convolutions over the tokens of a document.

    y_t = act(Σ_k x_{t + offsets[k]} W_k + b)

    causal offsets:   −(K − 1)d, …, −d, 0
    centred offsets:  −⌊K/2⌋d, …, 0, …, ⌊K/2⌋d

K is the size of the kernel and d the dilation. The centred kernel also reads later tokens, so it is
not autoregressive. It is a counter-example: without its forward edges it becomes the causal one.

Distances count the tokens of a document: padding takes no position, and there are zeros before the
first token of a document and after the last (see `token_order`).

Reference:
    Notes, lecture 11 §8.
"""

from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from jaxformer.functional.attention.masks import Mask, Visible
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.layers.feedforward import activate, activation_power
from jaxformer.functional.layers.sublayer import At, Initial, Output, Start, SubLayer
from jaxformer.functional.layers.token_order import TokenOrder
from jaxformer.functional.linear.affine import init_linear, linear
from jaxformer.functional.symbolic import at_most
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights


def causal_offsets(kernel_size: int, dilation: int = 1) -> tuple[int, ...]:
    """Returns the positions that a causal kernel reads, relative to that which it computes."""
    return tuple(dilation * (k + 1 - kernel_size) for k in range(kernel_size))


def centred_offsets(kernel_size: int, dilation: int = 1) -> tuple[int, ...]:
    """Returns the positions that a centred kernel reads, relative to that which it computes."""
    return tuple(dilation * (k - kernel_size // 2) for k in range(kernel_size))


def convolution(
    weights: Weights,
    x: Float[Array, "batch all_tokens in_dim"],
    offsets: tuple[int, ...],
    positions: Int[Array, "batch length"] | None = None,
    first: int = 0,
) -> Float[Array, "batch length out_dim"]:
    """Computes y_t = Σ_k x_{t + offsets[k]} W_k + b for t = first … all_tokens − 1.

    x is 0 outside of the row and in another document.

    Args:
        weights: kernel [len(offsets) · in_dim, out_dim], W_0 first, and bias.
        x: the input: `first` earlier tokens, and then those of the outputs.
        offsets: the positions that the kernel reads, relative to t.
        positions: the position in its document of each token t, and 0 for padding, which follows
            the tokens; None: there is one document.
        first: the first t of the output.
    """
    read = []
    for offset in offsets:
        inputs = _shifted(x, offset, first)
        if positions is not None:
            is_in_document = positions >= -offset
            if offset > 0:  # positions count on within a document only
                is_in_document = _shifted(positions, offset, 0) == positions + offset
            inputs = jnp.where(is_in_document[..., None], inputs, 0)
        read.append(inputs)
    return linear(weights, jnp.concatenate(read, axis=-1))


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


@dataclass(frozen=True)
class Offsets(Mask):
    """A query at t sees the keys at t + o, for o in `offsets`."""

    offsets: tuple[int, ...]

    def __call__(self, query: TokenInfo, key: TokenInfo) -> Visible:
        """See `Mask`."""
        distance = key.position_ids()[..., None, :] - query.position_ids()[..., :, None]
        return reduce(or_, (distance == offset for offset in self.offsets))

    def key_range(self, start: int, stop: int, length: int) -> tuple[int, int]:
        """See `Mask`."""
        first, last = min(self.offsets), max(self.offsets)
        return max(0, start + first), min(length, max(0, stop + last))


@dataclass(frozen=True)
class Convolution(SubLayer):
    """A convolution and its activation.

    Attributes:
        offsets: the positions that the kernel reads, relative to that which it computes.
        activation: the activation.
    """

    name: ClassVar[str] = "convolution"
    points: ClassVar[tuple[str, ...]] = ("convolution.output",)

    offsets: tuple[int, ...]
    activation: str = "relu"

    def rule(self) -> Mask:
        """See `SubLayer`."""
        return Offsets(self.offsets)

    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """Returns W ~ N(0, 1 / (K · dim)); without a residual see `Initial`."""
        fan_in = len(self.offsets) * dim
        stddev = fan_in**-0.5
        if initial.num_layers is None:
            stddev = initial.writing(fan_in, activation_power(self.activation))
            stddev /= initial.input_stddev
        return init_linear(key, fan_in, dim, stddev=stddev)

    def init_state(self, weights: Weights, start: Start) -> Float[Array, "batch reach dim"]:
        """Returns the last inputs, as far as the kernel reaches back."""
        reach = max(0, -min(self.offsets))
        return jnp.zeros((start.batch_size, reach, start.dim), start.dtype)

    def context(self, tokens: Tokens, shared: Weights) -> TokenOrder:
        """Returns the order of the tokens."""
        return TokenOrder.of(tokens.new)

    def __call__(self, weights: Weights, x: Float[Array, "*batch length dim"], at: At) -> Output:
        """See `convolution`."""
        order, state, first = at.context, at.state, 0
        x = order.compact(x)
        if state is not None:
            first = state.shape[1]
            x = jnp.concatenate([state, x], axis=1)
            state = order.newest(x, first, after_each=at.keeps_states)
        positions = None if order.documents is None else order.positions
        y = order.restore(convolution(weights, x, self.offsets, positions, first))
        return Output(activate(at.tap("convolution.output", y), self.activation), state)
