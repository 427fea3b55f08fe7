"""Reordering of tokens so that padding comes last.

A convolution counts distances in tokens, but padding may be between the tokens. The input of a
convolution is therefore reordered, and the output is restored to the original order.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.symbolic import at_most


class TokenOrder(NamedTuple):
    """New order of the tokens of a forward pass: padding is moved to the end of each batch element.

    Attributes:
        positions: int [length] or [batch, length], for each token in the new order, the position of
            the token in its document.
        documents: int [batch, length], the document of each token in the new order, and 0 for
            padding; None for one document without padding.
        index: int [batch, length], the original index of each token of the new order; None if the
            order is unchanged.
        inverse: int [batch, length], the new index of each token of the original order; None if the
            order is unchanged.
    """

    positions: Int[Array, "*batch length"]
    documents: Int[Array, "batch length"] | None = None
    index: Int[Array, "batch length"] | None = None
    inverse: Int[Array, "batch length"] | None = None

    @classmethod
    def of(cls, tokens: TokenInfo) -> "TokenOrder":
        """Returns the new order of the tokens of a forward pass."""
        positions, documents = jnp.asarray(tokens.position_ids()), tokens.segment_ids
        if documents is None or at_most(tokens.length, 1):
            return cls(positions, documents)
        index = jnp.argsort(documents == 0, axis=1, stable=True)
        inverse = jnp.argsort(index, axis=1)
        return cls(_take(positions, index), _take(documents, index), index, inverse)

    def compact(self, x: Shaped[Array, "batch length *dim"]) -> Shaped[Array, "batch length *dim"]:
        """Reorders x so that padding comes last."""
        return x if self.index is None else _take(x, self.index)

    def restore(self, x: Shaped[Array, "batch length *dim"]) -> Shaped[Array, "batch length *dim"]:
        """Restores the original order of x; the inverse of `compact`."""
        return x if self.inverse is None else _take(x, self.inverse)

    def newest(
        self, x: Shaped[Array, "batch all_tokens dim"], num: int, *, after_each: bool = False
    ) -> Shaped[Array, "batch *length num dim"]:
        """Returns the values of the last `num` tokens, including tokens before the pass.

        Args:
            x: the values of `num` earlier tokens, followed by the values of this pass in the order
                of `compact`.
            num: the number of earlier tokens, and of returned values.
            after_each: if True, returns the last `num` values up to each token of the pass, for the
                tokens in their original order.
        """
        if after_each:
            return self._newest_after_each(x, num)
        if self.documents is None:
            return x[:, x.shape[1] - num :]
        if self.index is None:  # For at most one token, `where` is faster than a lookup.
            is_token = (self.documents != 0).any(axis=1)
            return jnp.where(is_token[:, None, None], x[:, x.shape[1] - num :], x[:, :num])
        count = (self.documents != 0).sum(axis=1, keepdims=True)
        return _take(x, count + jnp.arange(num, dtype=jnp.int32))

    def _newest_after_each(
        self, x: Shaped[Array, "batch all_tokens dim"], num: int
    ) -> Shaped[Array, "batch length num dim"]:
        length = x.shape[1] - num
        count = jnp.arange(1, length + 1, dtype=jnp.int32)[None]
        if self.documents is not None:
            count = self.restore(self.documents != 0).cumsum(axis=1, dtype=jnp.int32)
        count = jnp.broadcast_to(count, (x.shape[0], length))
        index = count[..., None] + jnp.arange(num, dtype=jnp.int32)
        return _take(x, index.reshape(x.shape[0], -1)).reshape(-1, length, num, *x.shape[2:])


def _take(
    x: Shaped[Array, "batch length *dim"], index: Int[Array, "batch taken"]
) -> Shaped[Array, "batch taken *dim"]:
    """Returns x[b, index[b, t]] for each batch element b."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)
