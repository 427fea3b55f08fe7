"""Convolutions over the tokens of a document.

    y_t = act(Σ_k x_{t + offsets[k]} W_k + b)

A causal kernel of size K and dilation d has the offsets −(K − 1)d, …, −d, 0. A kernel with an
offset above 0, such as the kernel with the offsets (−1, 0, 1) in lecture 11, also reads later
tokens. A model with such a kernel is not autoregressive.

Distances count the tokens of a document and ignore padding (see `token_order`). Before the first
and after the last token of a document, x is zero.

Reference:
    Notes, lecture 11 §8.
"""

from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from jaxformer.functional.arguments import check_maps, checks_arguments, whole_number
from jaxformer.functional.attention.masks import Mask, Visible
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.layers.feedforward import Activation, activate, activation_power
from jaxformer.functional.layers.sublayer import At, Initial, Output, Start, SubLayer
from jaxformer.functional.layers.token_order import TokenOrder
from jaxformer.functional.linear.affine import init_linear, linear
from jaxformer.functional.symbolic import at_most
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights


def causal_offsets(kernel_size: int, dilation: int = 1) -> tuple[int, ...]:
    """Returns the positions that a causal kernel reads, relative to the output position."""
    return tuple(dilation * (k + 1 - kernel_size) for k in range(kernel_size))


def convolution(
    weights: Weights,
    x: Float[Array, "batch all_tokens in_dim"],
    offsets: tuple[int, ...],
    positions: Int[Array, "batch length"] | None = None,
    first: int = 0,
) -> Float[Array, "batch length out_dim"]:
    """Computes y_t = Σ_k x_{t + offsets[k]} W_k + b for t = first … all_tokens − 1.

    Outside the sequence and in other documents, x counts as 0.

    Args:
        weights: the kernel [len(offsets) · in_dim, out_dim], with W_0 first, and the bias.
        x: the inputs of `first` earlier tokens, followed by the inputs of the tokens whose outputs
            are computed.
        offsets: the positions that the kernel reads, relative to t.
        positions: the position of each token in its document, with 0 for the padding after the
            tokens; None for one document.
        first: the first output position t.
    """
    read = []
    for offset in offsets:
        inputs = _shifted(x, offset, first)
        if positions is not None:
            is_in_document = positions >= -offset
            if offset > 0:
                # If the later token belongs to another document, its position is not the position
                # of the current token plus `offset`.
                is_in_document = _shifted(positions, offset, 0) == positions + offset
            inputs = jnp.where(is_in_document[..., None], inputs, 0)
        read.append(inputs)
    return linear(weights, jnp.concatenate(read, axis=-1))


def _check_causal(weights: Any, x: Float[Any, "*batch length in_dim"], **_: object) -> None:
    check_maps("weights", {"convolution": weights}, {"convolution": (None, None)})
    rows, dim = weights["kernel"].shape[0], x.shape[-1]
    if rows % dim:
        raise ValueError(
            f"weights['kernel'] has {rows} rows; their number must be a multiple of the {dim} "
            "features of x"
        )


@checks_arguments(_check_causal)
def causal_convolution(
    weights: Weights, x: Float[Array, "*batch length in_dim"], *, dilation: int = 1
) -> Float[Array, "*batch length out_dim"]:
    """Computes y_t = Σ_k x_{t − d (K − 1 − k)} W_k + b, where x is 0 before the first token.

    Args:
        weights: the kernel [K · in_dim, out_dim] and an optional bias. The kernel begins with W_0,
            which multiplies the earliest token.
        x: the inputs.
        dilation: the distance d between the tokens that the kernel reads.

    Raises:
        ValueError: The kernel does not fit x.

    Reference:
        Notes, lecture 11 §8.
    """
    whole_number("dilation", dilation, 1)
    offsets = causal_offsets(weights["kernel"].shape[0] // x.shape[-1], dilation)
    y = convolution(weights, x.reshape(-1, *x.shape[-2:]), offsets)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _shifted(
    x: Shaped[Array, "batch length *dim"], offset: int, first: int
) -> Shaped[Array, "batch computed *dim"]:
    """Returns x_{t + offset} for t = first … length − 1, with zeros outside the sequence."""
    length = x.shape[1]
    if at_most(length, abs(offset)):
        return jnp.zeros_like(x[:, first:])
    edges = [(0, 0)] * x.ndim
    edges[1] = (max(-offset - first, 0), max(offset, 0))
    begin = first + offset + edges[1][0]
    return jax.lax.slice_in_dim(jnp.pad(x, edges), begin, begin + length - first, axis=1)


@dataclass(frozen=True)
class Offsets(Mask):
    """Mask of a convolution: a query at position t reads the keys at t + o for o in `offsets`."""

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
    """Convolution over tokens with an activation.

    Attributes:
        offsets: the positions that the kernel reads, relative to the output position.
        activation: the name of the activation, or an elementwise function.
    """

    name: ClassVar[str] = "convolution"
    hook_points: ClassVar[tuple[str, ...]] = ("convolution.output",)

    offsets: tuple[int, ...]
    activation: Activation = "relu"

    def rule(self) -> Mask:
        """See `SubLayer`."""
        return Offsets(self.offsets)

    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """Returns W from N(0, 1 / (K · dim · input_stddev²)), scaled by the activation's gain."""
        fan_in = len(self.offsets) * dim
        gain = initial.gain(activation_power(self.activation))
        stddev = gain / (fan_in**0.5 * initial.input_stddev)
        return init_linear(key, fan_in, dim, stddev=stddev)

    def init_state(self, weights: Weights, start: Start) -> Float[Array, "batch reach dim"]:
        """Returns zeros for the last inputs that the kernel reads."""
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
        return Output(activate(at.hook("convolution.output", y), self.activation), state)
