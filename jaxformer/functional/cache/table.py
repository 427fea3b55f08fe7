"""Tables of the tokens in the slots of a cache, and ring buffers of slots."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.cache.slots import overwrite, write_token_info
from jaxformer.functional.positions import DocumentCursor


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ring:
    """Range of the tokens that a ring buffer of slots holds.

    The tokens of a batch element are numbered 0, 1, 2, … across its documents, without padding.
    Token n is stored in slot `n % num_slots`; padding is not stored. The ring buffer holds the
    tokens from `oldest` to `next_token - 1`. Tokens before `oldest` have been overwritten. Dropping
    newer tokens does not restore overwritten tokens.

    Attributes:
        next_token: int [batch], the number of the next token of each batch element.
        oldest: int [batch], the number of the oldest token that the ring buffer holds.
        reach: the window size, which is the number of tokens that a query attends to, itself
            included.
    """

    # The arrays have the type `Any`, because JAX also fills these fields with placeholders.
    next_token: Any
    oldest: Any
    reach: int = field(metadata={"static": True})

    @classmethod
    def start(cls, batch_size: int, reach: int) -> "Ring":
        """Returns the `Ring` of an empty ring buffer."""
        return cls(jnp.zeros(batch_size, jnp.int32), jnp.zeros(batch_size, jnp.int32), reach)

    def append(
        self, is_real: Bool[Array, "batch new"], num_slots: int
    ) -> tuple["Ring", Int[Array, "batch new"]]:
        """Assigns slots to new tokens, and numbers the tokens.

        Args:
            is_real: False for padding.
            num_slots: the number of slots of the ring buffer.

        Returns:
            (ring, written): the `Ring` with the new tokens, and the slot of each new token. The
            slot `num_slots`, which does not exist, is given to padding and to tokens that a later
            new token would overwrite.
        """
        counts = jnp.cumsum(is_real, axis=1, dtype=jnp.int32)
        numbers = self.next_token[:, None] + counts - 1
        next_token = self.next_token + is_real.sum(axis=1, dtype=jnp.int32)
        oldest = jnp.maximum(self.oldest, next_token - num_slots)
        ring = replace(self, next_token=next_token, oldest=oldest)
        is_kept = is_real & (numbers >= next_token[:, None] - num_slots)
        return ring, jnp.where(is_kept, numbers % num_slots, num_slots)

    def longest_rewind(self, position: Int[Array, " batch"]) -> Int[Array, " batch"]:
        """Returns the number of tokens that each batch element can drop.

        A batch element can drop tokens as long as the ring buffer contains the whole window of its
        next token.

        Args:
            position: the number of tokens in the current document of each batch element.
        """
        has_whole_document = self.next_token - position >= self.oldest
        spare = self.next_token - self.oldest - (self.reach - 1)
        return jnp.where(has_whole_document, position, spare)

    def rewind(self, lengths: Int[Array, " batch"]) -> "Ring":
        """Drops the last `lengths[i]` tokens of batch element i."""
        return replace(self, next_token=self.next_token - lengths)


class TableView(NamedTuple):
    """Contents of a cache table in one forward pass, for all layers that share the table.

    Attributes:
        tokens: positions and documents of the tokens in the slots, the new tokens included.
        written: the slots of the new tokens; see `cache.slots.write_token_info`.
        earlier: the contents of the slots before this pass if the new tokens overwrite tokens that
            they attend to; otherwise None. If `earlier` is not None, the queries attend to
            `earlier` followed by the new tokens, instead of `tokens`.
    """

    tokens: TokenInfo
    written: Int[Array, "*tokens"]
    earlier: TokenInfo | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenTable:
    """Positions and documents of the tokens in the slots of a cache.

    Attributes:
        positions: int [batch, slots].
        documents: int [batch, slots], 1, 2, …; 0 for an empty slot or padding.
        ring: the range of the tokens in the ring buffer; None if slots are never reused.
    """

    # The arrays have the type `Any`, because JAX also fills these fields with placeholders.
    positions: Any
    documents: Any
    ring: Ring | None = None

    @classmethod
    def empty(cls, batch_size: int, num_slots: int, reach: int | None) -> "TokenTable":
        """Returns a table of empty slots, which are a ring buffer if `reach` is not None."""
        positions, documents = (jnp.zeros((batch_size, num_slots), jnp.int32) for _ in range(2))
        return cls(positions, documents, None if reach is None else Ring.start(batch_size, reach))

    @property
    def num_slots(self) -> int:
        """Number of slots per batch element."""
        return self.positions.shape[1]

    def append(self, tokens: TokenInfo, used: Int[Array, ""]) -> tuple["TokenTable", TableView]:
        """Adds the new tokens to the table.

        Args:
            tokens: the positions and documents of the new tokens.
            used: the number of slots in use.
        """
        ring, written, earlier = self.ring, used, None
        if ring is not None:
            # If the ring buffer has fewer slots than its window, `Cache.live_prefix` truncated it.
            # All tokens fit into the remaining slots, so no token is overwritten.
            overwrites = tokens.length > self.num_slots - ring.reach + 1
            if overwrites and self.num_slots >= ring.reach:
                earlier = TokenInfo(self.num_slots, self.positions, self.documents)
            ring, written = ring.append(tokens.segment_ids != 0, self.num_slots)
        table = TokenTable(
            write_token_info(self.positions, tokens.positions, written),
            write_token_info(self.documents, tokens.segment_ids, written),
            ring,
        )
        held = TokenInfo(self.num_slots, table.positions, table.documents)
        return table, TableView(held, written, earlier)

    def part(self, num_slots: int | None) -> "TokenTable":
        """Returns the table of the first `num_slots` slots; None selects all slots."""
        return replace(
            self, positions=self.positions[:, :num_slots], documents=self.documents[:, :num_slots]
        )

    def merge(self, part: "TokenTable") -> "TokenTable":
        """Replaces the first slots of this table by `part`."""
        return replace(
            part,
            positions=overwrite(self.positions, part.positions),
            documents=overwrite(self.documents, part.documents),
        )

    def grow(self, num_slots: int) -> "TokenTable":
        """Appends empty slots, so that the table has `num_slots` slots."""
        widths = ((0, 0), (0, num_slots - self.num_slots))
        positions, documents = (jnp.pad(x, widths) for x in (self.positions, self.documents))
        return replace(self, positions=positions, documents=documents)

    def longest_rewind(self, position: Int[Array, " batch"]) -> Int[Array, " batch"]:
        """Returns how many tokens each batch element can drop, at most `position`."""
        return position if self.ring is None else self.ring.longest_rewind(position)

    def rewind(
        self,
        lengths: Int[Array, " batch"],
        remaining: Int[Array, " batch"],
        cursor: DocumentCursor,
    ) -> "TokenTable":
        """Drops the last lengths[i] tokens of batch element i.

        Args:
            lengths: the number of tokens to drop.
            remaining: the number of tokens of the current document that are not dropped.
            cursor: the number of the current document of each batch element; see `DocumentCursor`.
        """
        is_current = self.documents == cursor.document[:, None]
        forgotten = is_current & (self.positions >= remaining[:, None])
        return replace(
            self,
            documents=jnp.where(forgotten, 0, self.documents),
            ring=None if self.ring is None else self.ring.rewind(lengths),
        )
