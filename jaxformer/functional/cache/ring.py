"""Bookkeeping of a ring, a cache that reuses its slots: which tokens the slots still hold."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ring:
    """Numbers of the tokens that a ring holds.

    The real tokens of a row have the numbers 0, 1, 2, … across its documents, and token `n` is in
    slot `n % slots`. Padding has no number and no slot. All tokens from `oldest` to `next_token -
    1` are intact. Later tokens have overwritten the older ones, even if a rewind has dropped these
    later tokens since.

    Attributes:
        next_token: int [batch], the number of the next token of each row.
        oldest: int [batch], the number of the oldest intact token of each row.
        reach: how many tokens one token sees, itself included.
    """

    next_token: Any  # not annotated with arrays: JAX also fills the fields with placeholders
    oldest: Any
    reach: int = field(metadata={"static": True})

    @classmethod
    def start(cls, batch_size: int, reach: int) -> "Ring":
        """Returns the ring of rows without tokens."""
        return cls(jnp.zeros(batch_size, jnp.int32), jnp.zeros(batch_size, jnp.int32), reach)

    def append(
        self, is_real: Bool[Array, "batch new"], slots: int
    ) -> tuple["Ring", Int[Array, "batch new"]]:
        """Assigns slots to new tokens.

        Args:
            is_real: False for padding.
            slots: number of slots of the ring.

        Returns:
            (ring, written): the ring with the tokens, and the slot of each token. The slot of
            padding, and of a token that a later one of these overwrites, is `slots`, which does not
            exist.
        """
        counts = jnp.cumsum(is_real, axis=1, dtype=jnp.int32)
        numbers = self.next_token[:, None] + counts - 1
        next_token = self.next_token + is_real.sum(axis=1, dtype=jnp.int32)
        oldest = jnp.maximum(self.oldest, next_token - slots)
        ring = replace(self, next_token=next_token, oldest=oldest)
        is_kept = is_real & (numbers >= next_token[:, None] - slots)
        return ring, jnp.where(is_kept, numbers % slots, slots)

    def longest_rewind(self, position: Int[Array, " batch"]) -> Int[Array, " batch"]:
        """Returns how many tokens each row can drop such that the next token sees its full window.

        Args:
            position: number of tokens of each row's current document.
        """
        has_whole_document = self.next_token - position >= self.oldest
        spare = self.next_token - self.oldest - (self.reach - 1)
        return jnp.where(has_whole_document, position, spare)

    def rewind(self, lengths: Int[Array, " batch"]) -> "Ring":
        """Drops the last `lengths[i]` tokens of row i."""
        return replace(self, next_token=self.next_token - lengths)
