"""Causal convolution of each feature over the tokens of a document.

    y_t = Σ_j w_j ⊙ x_{t−j} + b,    j = 0 … K − 1

x_{t−j} is the input j tokens earlier in the same document, or 0 if the document begins later than
that. Padding takes no position.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int, PRNGKeyArray, Shaped

from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.symbolic import at_most
from jaxformer.functional.trees import Weights


class TokenOrder(NamedTuple):
    """The order of a pass in which the tokens of each batch element precede its padding.

    Attributes:
        positions: int [length] or [batch, length], the position in its document of each token, in
            that order.
        is_token: bool [batch, length], in that order, False for padding; None: there is no padding.
        order: int [batch, length], the index of each token in the pass; None: the order is that of
            the pass.
    """

    positions: Int[Array, "*batch length"]
    is_token: Bool[Array, "batch length"] | None = None
    order: Int[Array, "batch length"] | None = None

    @classmethod
    def of(cls, tokens: TokenInfo) -> "TokenOrder":
        """Returns the order of the tokens of a pass."""
        positions = jnp.asarray(tokens.position_ids())
        if tokens.segments is None:
            return cls(positions)
        is_token = tokens.segments != 0
        if at_most(tokens.length, 1):
            return cls(positions, is_token)
        order = jnp.argsort(~is_token, axis=1, stable=True)
        return cls(_take(positions, order), _take(is_token, order), order)

    def compact(self, x: Shaped[Array, "batch length *dim"]) -> Shaped[Array, "batch length *dim"]:
        """Reorders x so that tokens precede padding."""
        return x if self.order is None else _take(x, self.order)

    def restore(self, x: Shaped[Array, "batch length *dim"]) -> Shaped[Array, "batch length *dim"]:
        """Restores the order of the pass: the inverse of `compact`."""
        return x if self.order is None else _take(x, jnp.argsort(self.order, axis=1))


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
) -> tuple[Float[Array, "batch length dim"], Float[Array, "batch earlier dim"] | None]:
    """Computes the convolution of the module, in float32.

    Args:
        weights: filter [kernel_size, dim], whose last row is w_0, and optionally bias.
        x: the inputs.
        order: the order of the tokens.
        past: the last kernel_size − 1 inputs before x, the newest last. Those of an earlier
            document are not read. None: all documents begin in x.

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
    if order.is_token is not None:
        y = jnp.where(order.is_token[..., None], y, 0)
    newest = None if past is None else _newest(inputs, earlier, order).astype(past.dtype)
    return order.restore(y.astype(x.dtype)), newest


def init_past(
    batch_size: int, kernel_size: int, dim: int, dtype: DTypeLike
) -> Float[Array, "batch earlier dim"]:
    """Returns the inputs before the first token, which no token reads."""
    return jnp.zeros((batch_size, kernel_size - 1, dim), dtype)


def _newest(
    inputs: Float[Array, "batch all_tokens dim"], num: int, order: TokenOrder
) -> Float[Array, "batch num dim"]:
    """Returns the last `num` inputs before the padding at the end of each row."""
    if order.is_token is None:
        return inputs[:, inputs.shape[1] - num :]
    count = order.is_token.sum(axis=1, keepdims=True)
    return _take(inputs, count + jnp.arange(num, dtype=jnp.int32))


def _take(
    x: Shaped[Array, "batch length *dim"], index: Int[Array, "batch taken"]
) -> Shaped[Array, "batch taken *dim"]:
    """Returns x[b, index[b, t]] for each batch element b."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)
