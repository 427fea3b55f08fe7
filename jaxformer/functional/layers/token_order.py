"""The order in which the tokens of a batch element precede its padding.

A convolution counts distances in tokens of a document, and padding may stand between these. Its
input is therefore put in this order, and its output put back.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.symbolic import at_most


class TokenOrder(NamedTuple):
    """The order in which the tokens of a pass precede the padding of their batch element.

    Attributes:
        positions: int [length] or [batch, length], the position in its document of each token, in
            this order.
        documents: int [batch, length], the document of each token, in this order, and then 0 for
            padding; None: there is one document without padding.
        index: int [batch, length], the place in the pass of each token of this order; None: the
            order is that of the pass.
        inverse: int [batch, length], the place in this order of each token of the pass; None as for
            `index`.
    """

    positions: Int[Array, "*batch length"]
    documents: Int[Array, "batch length"] | None = None
    index: Int[Array, "batch length"] | None = None
    inverse: Int[Array, "batch length"] | None = None

    @classmethod
    def of(cls, tokens: TokenInfo) -> "TokenOrder":
        """Returns the order of the tokens of a pass."""
        positions, documents = jnp.asarray(tokens.position_ids()), tokens.segments
        if documents is None or at_most(tokens.length, 1):
            return cls(positions, documents)
        index = jnp.argsort(documents == 0, axis=1, stable=True)
        inverse = jnp.argsort(index, axis=1)
        return cls(_take(positions, index), _take(documents, index), index, inverse)

    def compact(self, x: Shaped[Array, "batch length *dim"]) -> Shaped[Array, "batch length *dim"]:
        """Returns x in this order."""
        return x if self.index is None else _take(x, self.index)

    def restore(self, x: Shaped[Array, "batch length *dim"]) -> Shaped[Array, "batch length *dim"]:
        """Returns x in the order of the pass, the inverse of `compact`."""
        return x if self.inverse is None else _take(x, self.inverse)

    def newest(
        self, x: Shaped[Array, "batch all_tokens dim"], num: int, *, after_each: bool = False
    ) -> Shaped[Array, "batch *length num dim"]:
        """Returns the last `num` tokens of earlier tokens and those of the pass, in this order.

        Args:
            x: values of `num` earlier tokens, and then those of the pass and its padding.
            num: the number of earlier tokens.
            after_each: whether to return them after each token of the pass, in its order.
        """
        if after_each:
            return self._newest_after_each(x, num)
        if self.documents is None:
            return x[:, x.shape[1] - num :]
        if self.index is None:  # at most one token: a choice is faster than a lookup
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
