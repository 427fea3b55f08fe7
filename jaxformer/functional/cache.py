"""The keys and values of earlier positions: an explicit value, handed in and handed back.

One array for keys and one for values per layer, heads before slots, allocated once. Each slot
remembers the position and the document of its token (document 0: empty, or padding), so rows of
different lengths, several new tokens at once and packed documents are one case.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxformer.functional.masks import TokenInfo
from jaxformer.functional.positions import DocumentCursor, document_positions


class Cache(NamedTuple):
    """keys, values: per layer [batch · kv_heads, capacity, head_dim]; positions, documents: int
    [batch, capacity]; cursor: how far each row has been read; length: slots used, int [].

    Batch and heads are one axis: with two, XLA:CPU copies the whole cache at each step of batch 1.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    positions: Array
    documents: Array
    cursor: DocumentCursor
    length: Array

    @property
    def capacity(self) -> int:
        return self.positions.shape[1]

    def live_prefix(self, slots: int) -> "Cache":
        """The first `slots` slots alone, what is in empty ones wiped out.

        Steps that attend to a narrow cache cost what is live, whatever the capacity; `widen` puts
        it back. Wiping here, once for many steps, keeps a NaN in an empty slot from 0 × NaN.
        """
        used = self.documents[:, :slots] != 0

        def wiped(x):
            heads = len(x) // len(used)
            return jnp.where(jnp.repeat(used, heads, axis=0)[:, :, None], x[:, :slots], 0)

        return self._replace(
            keys=tuple(map(wiped, self.keys)),
            values=tuple(map(wiped, self.values)),
            positions=self.positions[:, :slots],
            documents=self.documents[:, :slots],
        )

    def merge_prefix(self, narrow: "Cache") -> "Cache":
        """This cache with its first slots, its cursor and its length taken from `narrow`."""
        (
            (keys, values, positions, documents),
            (new_keys, new_values, new_positions, new_documents),
        ) = (cache[:4] for cache in (self, narrow))
        return Cache(
            tuple(map(_overwrite, keys, new_keys)),
            tuple(map(_overwrite, values, new_values)),
            _overwrite(positions, new_positions),
            _overwrite(documents, new_documents),
            narrow.cursor,
            narrow.length,
        )

    def gather_rows(self, rows: Array) -> "Cache":
        """Row i goes on from what row rows[i] has read; there may be more or fewer rows."""
        batch_size = len(self.positions)

        def taken(x):
            return read_heads(x, batch_size)[rows].reshape(-1, *x.shape[1:])

        return Cache(
            tuple(map(taken, self.keys)),
            tuple(map(taken, self.values)),
            self.positions[rows],
            self.documents[rows],
            jax.tree.map(lambda x: x[rows], self.cursor),
            self.length,
        )


class FixedSizeState:
    """What a cache has of slots when it has none, but a state of one size: subclasses are frozen
    dataclasses whose arrays have a row each (`length` apart), and go on for ever."""

    capacity = None

    def live_prefix(self, slots: None):
        return self

    def merge_prefix(self, narrow):
        return narrow

    def gather_rows(self, rows):
        return jax.tree.map(lambda x: x[rows] if x.ndim else x, self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SourceCache:
    """A decoder's own cache and, beside it, what it has of its sources.

    memory: a tree of what it looks up there, [sources · heads, source length, dim]; visible: which
    of that is no padding, bool [sources, 1, source length]; initial: the states, a row each, from
    which documents begin (None: they have none). Each source serves as many rows in turn as come to
    its share.
    """

    own: Any
    memory: Any
    visible: Array
    initial: Any = None

    @property
    def cursor(self) -> DocumentCursor:
        return self.own.cursor

    @property
    def length(self) -> Array:
        return self.own.length

    @property
    def capacity(self) -> int | None:
        return self.own.capacity

    def live_prefix(self, slots: int | None) -> "SourceCache":
        return replace(self, own=self.own.live_prefix(slots))

    def merge_prefix(self, narrow: "SourceCache") -> "SourceCache":
        return replace(self, own=self.own.merge_prefix(narrow.own))

    def gather_rows(self, rows: Array) -> "SourceCache":
        """Row i goes on from what row rows[i] has read; both have the same source."""
        initial = jax.tree.map(lambda x: x[rows], self.initial)
        return replace(self, own=self.own.gather_rows(rows), initial=initial)


def visible_source(source, segments):
    """bool [sources, 1, source length]: where a token stands. segments 0: padding; None: none."""
    if segments is None:
        segments = jnp.ones(source.shape[:2], jnp.int32)
    return (segments != 0)[:, None]


def fold_source(heads, visible):
    """Each of the arrays [sources, heads, source length, dim] with its first two axes in one, what
    stands in padding wiped out: 0 × NaN is NaN."""
    return tuple(jnp.where(visible[..., None], x, 0).reshape(-1, *x.shape[2:]) for x in heads)


def _overwrite(x, start_of_x):
    return jax.lax.dynamic_update_slice(x, start_of_x, (0,) * x.ndim)


def init_cache(
    num_layers: int, batch_size: int, num_kv_heads: int, capacity: int, head_dim: int, dtype
) -> Cache:
    """An empty cache of `capacity` slots a row."""
    shape = (batch_size * num_kv_heads, capacity, head_dim)
    return Cache(
        tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        jnp.zeros((batch_size, capacity), jnp.int32),
        jnp.zeros((batch_size, capacity), jnp.int32),
        DocumentCursor.begin(batch_size),
        jnp.int32(0),
    )


def append_slots(cache: Cache, segments: Array) -> tuple[Cache, TokenInfo, TokenInfo]:
    """Read `segments` [batch, new] on from where the cache stopped and mark the next slots so.

    Returns the cache (its keys and values still to be written at `cache.length`, which is the old
    one), the places of the new tokens and the places of all slots.
    """
    documents, positions, cursor = document_positions(segments, cache.cursor)
    marked = cache._replace(
        positions=write_slots(cache.positions, positions, cache.length),
        documents=write_slots(cache.documents, documents, cache.length),
        cursor=cursor,
    )
    new = TokenInfo(segments.shape[1], positions, documents)
    return marked, new, TokenInfo(cache.capacity, marked.positions, marked.documents)


def write_slots(slots: Array, new: Array, length: Array) -> Array:
    """Put `new` [rows, new, …] at slots length, length + 1, … (in place where the compiler can)."""
    return jax.lax.dynamic_update_slice_in_dim(slots, new.astype(slots.dtype), length, axis=1)


def read_heads(slots: Array, batch_size: int) -> Array:
    """[batch · kv_heads, capacity, head_dim] as [batch, kv_heads, capacity, head_dim]."""
    return slots.reshape(batch_size, -1, *slots.shape[1:])


def write_heads(slots: Array, new: Array, length: Array) -> Array:
    """Put `new` [batch, kv_heads, new, head_dim] at slots length, length + 1, …"""
    return write_slots(slots, new.reshape(-1, *new.shape[2:]), length)
