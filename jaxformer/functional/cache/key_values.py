"""Key/value cache for incremental decoding.

The cache is an immutable pytree: a pass takes one and returns the updated one. Each layer has one
array of keys and one of values, in which the axis of heads precedes that of slots. Each slot
records the position and the document of its token (document 0: empty, or padding). One code path
therefore serves rows of different lengths, several new tokens per call, and packed documents.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, DTypeLike, Int, Shaped

from jaxformer.functional.architecture import CacheSize
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.cache.ring import Ring
from jaxformer.functional.cache.slots import overwrite, write_rows
from jaxformer.functional.positions import DocumentCursor, document_positions


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens read so far.

    Attributes:
        keys: [batch, kv_heads, slots, head_dim] for each layer.
        values: [batch, kv_heads, slots, head_dim] for each layer.
        positions: int [batch, slots].
        documents: int [batch, slots].
        cursor: the segment, document and position at which each row stopped.
        length: int [], number of slots used so far, padding included.
        ring: which tokens the slots still hold, if slots are reused; None if they are not.
        is_prefix: True for the result of `live_prefix`, whose empty slots are zero already.
    """

    keys: Any  # not annotated as arrays: JAX also fills the fields with placeholders
    values: Any
    positions: Any
    documents: Any
    cursor: Any
    length: Any
    ring: Ring | None = None
    is_prefix: bool = field(default=False, metadata={"static": True})

    @property
    def slots(self) -> int:
        """Number of slots of a row."""
        return self.positions.shape[1]

    @property
    def reach(self) -> int | None:
        """How many tokens a token of a ring sees, itself included; None if this is no ring."""
        return None if self.ring is None else self.ring.reach

    @property
    def capacity(self) -> int | None:
        """The largest number of tokens of a row, padding included; None if there is no limit."""
        return self.slots if self.ring is None else None

    @property
    def layers(self) -> list:
        """(keys, values) of each layer."""
        return list(zip(self.keys, self.values, strict=True))

    def append(
        self, segments: Int[Array, "batch new"]
    ) -> tuple["Cache", TokenInfo, TokenInfo, Int[Array, "*tokens"]]:
        """Marks slots as those of the next tokens, whose segment ids are `segments`.

        Returns:
            (cache, new, all slots, written). The cache's keys and values are not written yet. The
            `TokenInfo`s describe the new tokens and all slots. `written` has the slots to write
            (see `write_slots`).
        """
        documents, positions, cursor = document_positions(segments, self.cursor)
        ring, written = self.ring, self.length
        if ring is not None:
            ring, written = ring.append(documents != 0, self.slots)
        cache = replace(
            self,
            positions=write_rows(self.positions, positions, written),
            documents=write_rows(self.documents, documents, written),
            cursor=cursor,
            length=self.length + segments.shape[1],
            ring=ring,
        )
        slots = TokenInfo(self.slots, cache.positions, cache.documents)
        return cache, TokenInfo(segments.shape[1], positions, documents), slots, written

    def with_layers(self, layers: Iterable[tuple[Array, Array]]) -> "Cache":
        """Returns the cache with these (keys, values) of each layer."""
        keys, values = zip(*layers, strict=True)
        return replace(self, keys=keys, values=values)

    def live_prefix(self, slots: int | None) -> "Cache":
        """Returns a cache of the first `slots` slots (None: all), with zeros in the empty ones.

        A step attends to all slots of the cache that it gets, so its cost grows with `slots` and
        not with the capacity. `merge_prefix` copies the prefix back. Empty slots are set to zero
        here, once for many steps, because 0 × NaN is NaN.

        Raises:
            ValueError: this is a ring, which needs every slot, and `slots` is smaller.
        """
        if self.ring is not None and slots is not None and slots < self.slots:
            raise ValueError(f"slots is {slots}; a ring needs all of its {self.slots} slots")
        if self.is_prefix and slots in (None, self.slots):
            return self
        used = self.documents[:, None, :slots, None] != 0

        def zeroed(
            x: Shaped[Array, "batch kv_heads slots d"],
        ) -> Shaped[Array, "batch kv_heads live d"]:
            return jnp.where(used, x[:, :, :slots], 0)

        return replace(
            self,
            keys=tuple(map(zeroed, self.keys)),
            values=tuple(map(zeroed, self.values)),
            positions=self.positions[:, :slots],
            documents=self.documents[:, :slots],
            is_prefix=True,
        )

    def merge_prefix(self, prefix: "Cache") -> "Cache":
        """Returns `prefix` followed by the remaining slots of this cache."""
        if self.is_prefix and prefix.slots == self.slots:
            return prefix

        return replace(
            prefix,
            keys=tuple(map(overwrite, self.keys, prefix.keys)),
            values=tuple(map(overwrite, self.values, prefix.values)),
            positions=overwrite(self.positions, prefix.positions),
            documents=overwrite(self.documents, prefix.documents),
            is_prefix=self.is_prefix,
        )

    def grow(self, slots: int) -> "Cache":
        """Returns the cache with empty slots appended, so that it has `slots` of them.

        Raises:
            ValueError: this is a ring, whose tokens would be in other slots then.
        """
        if self.ring is not None:
            raise ValueError("a ring reuses its slots; it cannot grow")
        added = slots - self.slots

        def grown(x: Array, axis: int) -> Array:
            widths = [(0, 0)] * x.ndim
            widths[axis] = (0, added)
            return jnp.pad(x, widths)

        return replace(
            self,
            keys=tuple(grown(x, -2) for x in self.keys),
            values=tuple(grown(x, -2) for x in self.values),
            positions=grown(self.positions, 1),
            documents=grown(self.documents, 1),
        )

    def gather_rows(self, rows: ArrayLike | Sequence[Any]) -> "Cache":
        """Returns a cache whose row i is row rows[i] of this one; the number of rows may change.

        Args:
            rows: int [new_batch].

        Raises:
            ValueError: outside jit, if an entry of `rows` is no row of this cache.
        """
        batch_size = len(self.positions)
        rows = checked_rows(rows, batch_size)

        def gathered(x: Shaped[Array, "batch ..."]) -> Shaped[Array, "rows ..."]:
            return x[rows]

        each_row = (self.positions, self.documents, self.cursor, self.ring)
        positions, documents, cursor, ring = jax.tree.map(lambda x: x[rows], each_row)
        return replace(
            self,
            keys=tuple(map(gathered, self.keys)),
            values=tuple(map(gathered, self.values)),
            positions=positions,
            documents=documents,
            cursor=cursor,
            ring=ring,
        )

    def rewind(self, lengths: ArrayLike | Sequence[Any]) -> "Cache":
        """Drops the last lengths[i] tokens of row i, which must belong to its current document.

        Slots after the last remaining token of all rows are free again. A ring overwrites old
        tokens, so a row can drop tokens only while the window of the next token is intact.

        Args:
            lengths: int [batch], or one number for all rows.

        Raises:
            ValueError: outside jit, if a row cannot drop that many tokens. Inside jit, the logits
                of that row are NaN until its next document begins.
        """
        position = self.cursor.position
        lengths = _lengths_of_rows(lengths, len(position))
        longest = position if self.ring is None else self.ring.longest_rewind(position)
        longest = jnp.maximum(longest, 0)
        is_refused = (lengths < 0) | (lengths > longest)
        if not isinstance(is_refused, jax.core.Tracer) and is_refused.any():
            row = int(is_refused.argmax())
            overwritten = longest[row] < position[row]
            raise ValueError(
                f"lengths[{row}] is {lengths[row]}; row {row} can be rewound by 0 … {longest[row]} "
                f"tokens{': its ring has overwritten earlier ones' if overwritten else ''}"
            )
        lengths = jnp.where(is_refused, 0, lengths)
        remaining = position - lengths
        is_current = self.documents == self.cursor.document[:, None]
        forgotten = is_current & (self.positions >= remaining[:, None])
        documents = jnp.where(forgotten, 0, self.documents)
        cursor = self.cursor._replace(position=jnp.where(is_refused, _NOWHERE, remaining))
        if self.ring is not None:
            ring = self.ring.rewind(lengths)
            return replace(self, documents=documents, cursor=cursor, ring=ring)
        used = (documents != 0).any(axis=0)
        length = jnp.where(used, jnp.arange(1, self.slots + 1, dtype=jnp.int32), 0).max()
        return replace(self, documents=documents, cursor=cursor, length=length)


def _lengths_of_rows(lengths: ArrayLike | Sequence[Any], batch_size: int) -> Int[Array, " batch"]:
    """Returns one length for each row; ValueError if `lengths` are not whole numbers for them."""
    lengths = jnp.asarray(lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer) or lengths.shape not in ((), (batch_size,)):
        raise ValueError(
            f"lengths is {lengths.dtype} {lengths.shape}; it must be one whole number, or one for "
            f"each of the {batch_size} rows"
        )
    return jnp.broadcast_to(lengths, (batch_size,))


def checked_rows(
    rows: ArrayLike | Sequence[Any], batch_size: int
) -> Int[Array | np.ndarray, " rows"]:
    """Returns `rows`, int [new_batch], as an array.

    Raises:
        ValueError: outside jit, if an entry is not in 0 … batch_size − 1.
    """
    if isinstance(rows, jax.core.Tracer):
        return rows
    rows = np.asarray(rows)
    missing = (rows < 0) | (rows >= batch_size)
    if missing.any():
        raise ValueError(f"rows holds {rows[missing][0]}; the cache has {batch_size} rows")
    return rows


_NOWHERE = -(2**30)  # tokens at negative positions have NaN as logits


def init_cache(heads: Sequence[tuple[int, int]], size: CacheSize, dtype: DTypeLike) -> Cache:
    """Returns an empty cache.

    Args:
        heads: (number of key heads, width of a head) of each layer.
        size: the number of rows and slots.
        dtype: the dtype of keys and values.

    Raises:
        ValueError: the cache is a ring with fewer slots than the window.
    """
    rows, slots, reach = size.batch_size, size.capacity, size.reach
    if reach is not None and slots < reach:
        raise ValueError(f"capacity is {slots}; a ring must have the window's {reach} slots")
    shapes = [(rows, kv_heads, slots, head_dim) for kv_heads, head_dim in heads]
    keys, values = (tuple(jnp.zeros(shape, dtype) for shape in shapes) for _ in range(2))
    positions, documents = (jnp.zeros((rows, slots), jnp.int32) for _ in range(2))
    ring = None if reach is None else Ring.start(rows, reach)
    return Cache(keys, values, positions, documents, DocumentCursor.begin(rows), jnp.int32(0), ring)
