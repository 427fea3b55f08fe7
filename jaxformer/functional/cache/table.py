"""Which tokens the slots of a cache hold; a ring reuses its slots."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.cache.slots import overwrite, write_rows
from jaxformer.functional.positions import DocumentCursor


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


class SlotView(NamedTuple):
    """The slots of some layers in a pass.

    Attributes:
        slots: the tokens in the slots, with those of the pass.
        written: the slots of the tokens of the pass; see `cache.slots.write_rows`.
        earlier: the slots before the pass, if its tokens overwrite some that they attend to. They
            then attend to these slots followed by themselves. None: they attend to `slots`.
    """

    slots: TokenInfo
    written: Int[Array, "*tokens"]
    earlier: TokenInfo | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotTable:
    """Positions and documents of the tokens in slots; document 0 is an empty slot, or padding.

    Attributes:
        positions: int [batch, slots].
        documents: int [batch, slots].
        ring: which tokens the slots still hold, if slots are reused; None if they are not.
    """

    positions: Any  # not annotated as arrays: JAX also fills the fields with placeholders
    documents: Any
    ring: Ring | None = None

    @classmethod
    def empty(cls, rows: int, slots: int, reach: int | None) -> "SlotTable":
        """Returns a table of empty slots, which is a ring if `reach` is not None."""
        positions, documents = (jnp.zeros((rows, slots), jnp.int32) for _ in range(2))
        return cls(positions, documents, None if reach is None else Ring.start(rows, reach))

    @property
    def slots(self) -> int:
        """Number of slots of a row."""
        return self.positions.shape[1]

    def append(self, tokens: TokenInfo, used: Int[Array, ""]) -> tuple["SlotTable", SlotView]:
        """Marks slots as those of the next tokens.

        Args:
            tokens: their positions and documents.
            used: the number of slots used so far.
        """
        ring, written, earlier = self.ring, used, None
        if ring is not None:
            # A ring with fewer slots than its window is the start of one: see `Cache.live_prefix`.
            # It has reused no slot, and all its tokens fit.
            overwrites = tokens.length > self.slots - ring.reach + 1
            if overwrites and self.slots >= ring.reach:
                earlier = TokenInfo(self.slots, self.positions, self.documents)
            ring, written = ring.append(tokens.segments != 0, self.slots)
        table = SlotTable(
            write_rows(self.positions, tokens.positions, written),
            write_rows(self.documents, tokens.segments, written),
            ring,
        )
        slots = TokenInfo(self.slots, table.positions, table.documents)
        return table, SlotView(slots, written, earlier)

    def part(self, slots: int | None) -> "SlotTable":
        """Returns the table of the first `slots` slots; None: all."""
        return replace(
            self, positions=self.positions[:, :slots], documents=self.documents[:, :slots]
        )

    def merge(self, part: "SlotTable") -> "SlotTable":
        """Returns `part` followed by the remaining slots of this table."""
        return replace(
            part,
            positions=overwrite(self.positions, part.positions),
            documents=overwrite(self.documents, part.documents),
        )

    def grow(self, slots: int) -> "SlotTable":
        """Returns the table with empty slots appended, so that it has `slots` of them."""
        widths = ((0, 0), (0, slots - self.slots))
        positions, documents = (jnp.pad(x, widths) for x in (self.positions, self.documents))
        return replace(self, positions=positions, documents=documents)

    def longest_rewind(self, position: Int[Array, " batch"]) -> Int[Array, " batch"]:
        """Returns how many tokens each row can drop, of `position` in its current document."""
        return position if self.ring is None else self.ring.longest_rewind(position)

    def rewind(
        self,
        lengths: Int[Array, " batch"],
        remaining: Int[Array, " batch"],
        cursor: DocumentCursor,
    ) -> "SlotTable":
        """Drops the last lengths[i] tokens of row i, so that `remaining` of its document stay."""
        is_current = self.documents == cursor.document[:, None]
        forgotten = is_current & (self.positions >= remaining[:, None])
        return replace(
            self,
            documents=jnp.where(forgotten, 0, self.documents),
            ring=None if self.ring is None else self.ring.rewind(lengths),
        )
