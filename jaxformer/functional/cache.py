"""The keys and values of earlier positions: an explicit value, handed in and handed back.

One array for keys and one for values per layer, heads before slots, allocated once. Each slot
remembers the position and the document of its token (document 0: empty, or padding), so rows of
different lengths, several new tokens at once and packed documents are one case.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxformer.functional.masks import TokenInfo
from jaxformer.functional.positions import DocumentCursor, document_positions
from jaxformer.functional.slots import by_head, overwrite, without_single_axes, write_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """keys, values: per layer [batch, kv_heads, slots, head_dim]; positions, documents: int
    [batch, slots]; cursor: how far each row has been read; length: tokens read, padding counted,
    int [].

    A ring, where slots are used again and padding takes none, has next_slot: int [batch], the real
    tokens that each row has read; and reach: how many tokens back, itself counted, one may look.
    is_prefix: what `live_prefix` gives is told from the whole.
    """

    keys: Any  # fields are not annotated with arrays: JAX fills them with other things in passing
    values: Any
    positions: Any
    documents: Any
    cursor: Any
    length: Any
    next_slot: Any = None
    reach: int | None = field(default=None, metadata={"static": True})
    is_prefix: bool = field(default=False, metadata={"static": True})

    @property
    def slots(self) -> int:
        return self.positions.shape[1]

    @property
    def capacity(self) -> int | None:
        """Most tokens of a row; None: there is no end."""
        return self.slots if self.reach is None else None

    @property
    def layers(self) -> list:
        """What each layer keeps."""
        return list(zip(self.keys, self.values, strict=True))

    def append(self, segments: Int[Array, "batch new"]):
        """Read `segments` on from where the cache stopped and mark the slots of these tokens.

        Returns (the cache, its keys and values still to be written; the new tokens; what the slots
        hold; where keys and values are to be written: see `write_slots`).
        """
        documents, positions, cursor = document_positions(segments, self.cursor)
        written, next_slot = self.length, self.next_slot
        if self.reach is not None:
            new = segments.shape[1]
            if new > self.slots - self.reach + 1:
                raise ValueError(
                    f"tokens are {new} a row; a ring of {self.slots} slots and a window of "
                    f"{self.reach} takes at most {self.slots - self.reach + 1} at once"
                )
            is_real = documents != 0
            order = next_slot[:, None] + jnp.cumsum(is_real, axis=1) - 1
            written = jnp.where(is_real, order % self.slots, self.slots)  # padding: none
            next_slot = next_slot + is_real.sum(axis=1)
        cache = replace(
            self,
            positions=write_rows(self.positions, positions, written),
            documents=write_rows(self.documents, documents, written),
            cursor=cursor,
            length=self.length + segments.shape[1],
            next_slot=next_slot,
        )
        held = TokenInfo(self.slots, cache.positions, cache.documents)
        return cache, TokenInfo(segments.shape[1], positions, documents), held, written

    def with_layers(self, layers) -> "Cache":
        keys, values = zip(*layers, strict=True)
        return replace(self, keys=keys, values=values)

    def live_prefix(self, slots: int | None) -> "Cache":
        """The first `slots` slots alone (None: all), as a loop of many steps wants them.

        Steps that attend to a prefix cost what is live, whatever the capacity; `merge_prefix` puts
        it back. What is in empty slots is zeroed here, once for many steps: 0 × NaN is NaN. Axes of
        size 1 are left out: with them XLA:CPU copies the whole cache at each step (12 layers of 768
        slots, batch 1: 50 ms a step against 9).
        """
        if self.is_prefix and slots in (None, self.slots):
            return self
        used = self.documents[:, None, :slots, None] != 0

        def packed(x):
            x = jnp.where(used, by_head(x, len(used))[:, :, :slots], 0)
            return without_single_axes(x)

        return replace(
            self,
            keys=tuple(map(packed, self.keys)),
            values=tuple(map(packed, self.values)),
            positions=self.positions[:, :slots],
            documents=self.documents[:, :slots],
            is_prefix=True,
        )

    def merge_prefix(self, prefix: "Cache") -> "Cache":
        """This cache with its first slots, and all else that a step changes, from `prefix`."""
        if self.is_prefix and prefix.slots == self.slots:
            return prefix

        def merged(x, start_of_x):
            return overwrite(x, start_of_x.reshape(*x.shape[:-2], *start_of_x.shape[-2:]))

        return replace(
            prefix,
            keys=tuple(map(merged, self.keys, prefix.keys)),
            values=tuple(map(merged, self.values, prefix.values)),
            positions=overwrite(self.positions, prefix.positions),
            documents=overwrite(self.documents, prefix.documents),
            is_prefix=self.is_prefix,
        )

    def gather_rows(self, rows: Int[Array, " new_batch"]) -> "Cache":
        """Row i goes on from what row rows[i] has read; there may be more or fewer rows."""
        batch_size = len(self.positions)

        def gathered(x):
            x = by_head(x, batch_size)[rows]
            return without_single_axes(x) if self.is_prefix else x

        each_row = (self.positions, self.documents, self.cursor, self.next_slot)
        positions, documents, cursor, next_slot = jax.tree.map(lambda x: x[rows], each_row)
        return replace(
            self,
            keys=tuple(map(gathered, self.keys)),
            values=tuple(map(gathered, self.values)),
            positions=positions,
            documents=documents,
            cursor=cursor,
            next_slot=next_slot,
        )

    def rewind(self, lengths) -> "Cache":
        """Forget the last lengths[i] tokens of row i, all of the document that it is in.

        lengths: int [batch], or one for all rows. The slots after the last token that is left in
        any row are free again. Outside jit, ValueError for more tokens than the document has, or
        than a ring has kept; inside, the row's later logits are NaN.
        """
        lengths = jnp.broadcast_to(jnp.asarray(lengths), self.cursor.position.shape)
        kept = self.cursor.position - lengths
        torn = (lengths < 0) | (kept < 0)
        if self.reach is not None:
            torn |= (lengths > self.slots - self.reach + 1) & (self.next_slot > self.slots)
        if not isinstance(torn, jax.core.Tracer) and torn.any():
            row = int(torn.argmax())
            raise ValueError(
                f"lengths[{row}] is {lengths[row]}; row {row} can be rewound by 0 … "
                f"{self._most(row)} tokens"
            )
        is_current = self.documents == self.cursor.document[:, None]
        forgotten = is_current & (self.positions >= kept[:, None])
        documents = jnp.where(forgotten, 0, self.documents)
        length, next_slot = self.length, self.next_slot
        if self.reach is None:
            used = (documents != 0).any(axis=0)
            length = jnp.where(used, jnp.arange(1, self.slots + 1), 0).max()
        else:
            next_slot = next_slot - lengths
        cursor = self.cursor._replace(position=jnp.where(torn, _NOWHERE, kept))
        return replace(self, documents=documents, cursor=cursor, length=length, next_slot=next_slot)

    def _most(self, row: int) -> int:
        """Tokens by which a row can be rewound."""
        most = int(self.cursor.position[row])
        if self.reach is not None and self.next_slot[row] > self.slots:
            most = min(most, self.slots - self.reach + 1)
        return most


_NOWHERE = -(2**30)  # a position of which no token has logits


class FixedSizeState:
    """The part of a cache's interface that concerns slots, for a cache without any: a state of one
    size. Subclasses are frozen dataclasses whose arrays have a row each (`length` apart)."""

    capacity = None
    reach = None

    def live_prefix(self, slots: None):
        return self

    def merge_prefix(self, prefix):
        return prefix

    def gather_rows(self, rows):
        return jax.tree.map(lambda x: x[rows] if x.ndim else x, self)

    def rewind(self, lengths):
        raise ValueError(
            f"a {type(self).__name__} is a state of one size, which has forgotten what it was "
            "before its last token; keep the cache from before instead of rewinding"
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SourceCache:
    """A decoder's own cache and, beside it, what it has of its sources.

    cross_keys_values: what each layer looks up there, (keys, values) [sources, kv_heads, source
    length, head_dim] (None: nothing); source_segments: int [sources, source length], 0 for padding
    (None: there is none); initial: the states, a row each, from which documents begin (None: they
    have none). Each source serves as many rows in turn as come to its share.
    """

    self_cache: Any
    cross_keys_values: Any
    source_segments: Any
    initial: Any = None

    @property
    def cursor(self) -> DocumentCursor:
        return self.self_cache.cursor

    @property
    def length(self) -> Array:
        return self.self_cache.length

    @property
    def capacity(self) -> int | None:
        return self.self_cache.capacity

    @property
    def reach(self) -> int | None:
        return self.self_cache.reach

    def live_prefix(self, slots: int | None) -> "SourceCache":
        return replace(self, self_cache=self.self_cache.live_prefix(slots))

    def merge_prefix(self, prefix: "SourceCache") -> "SourceCache":
        return replace(self, self_cache=self.self_cache.merge_prefix(prefix.self_cache))

    def gather_rows(self, rows: Array) -> "SourceCache":
        """Row i goes on from what row rows[i] has read; both have the same source."""
        initial = jax.tree.map(lambda x: x[rows], self.initial)
        return replace(self, self_cache=self.self_cache.gather_rows(rows), initial=initial)

    def rewind(self, lengths) -> "SourceCache":
        return replace(self, self_cache=self.self_cache.rewind(lengths))


def init_cache(
    num_layers: int,
    batch_size: int,
    num_kv_heads: int,
    slots: int,
    head_dim: int,
    dtype,
    reach: int | None = None,
) -> Cache:
    """An empty cache of so many slots a row; a ring, where a reach is given."""
    shape = (batch_size, num_kv_heads, slots, head_dim)
    if reach is not None and slots < reach:
        raise ValueError(f"capacity is {slots}; a ring must have the window's {reach} slots")
    return Cache(
        tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        jnp.zeros((batch_size, slots), jnp.int32),
        jnp.zeros((batch_size, slots), jnp.int32),
        DocumentCursor.begin(batch_size),
        jnp.int32(0),
        None if reach is None else jnp.zeros(batch_size, jnp.int32),
        reach,
    )
