"""Key/value cache for incremental decoding.

The cache is an immutable pytree: a pass takes one and returns the updated one. Each layer has one
array of keys and one of values, in which the axis of heads precedes that of slots. A table records
the position and the document of the token in each slot. One code path therefore serves rows of
different lengths, several new tokens per call, and packed documents.

Layers without a window share a table of all tokens. Layers with a window share a table that is a
ring: it has slots for the window and for `SPARE` more tokens, and reuses them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, DTypeLike, Int, Shaped

from jaxformer.functional.architecture import CacheSize
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.cache.slots import overwrite
from jaxformer.functional.cache.table import SlotTable, SlotView
from jaxformer.functional.positions import DocumentCursor, document_positions

# Slots of a window beyond its size: as many tokens can be read at once, or dropped, without
# further work.
SPARE = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens read so far.

    Attributes:
        keys: [batch, kv_heads, slots, head_dim] for each layer with self-attention.
        values: [batch, kv_heads, slots, head_dim] for each of these.
        tables: the tokens in the slots, for layers of one reach each.
        cursor: the segment, document and position at which each row stopped.
        length: int [], number of tokens read so far, padding included.
        reaches: the reach of each table, None for that of all tokens.
        layer_tables: the number of the table of each layer with self-attention.
        attends: whether each layer has self-attention.
        states: for each layer the states of its other sub-layers, by name; see
            `SubLayer.init_state`.
        is_prefix: True for the result of `live_prefix`, whose empty slots are zero already.
    """

    keys: Any  # not annotated as arrays: JAX also fills the fields with placeholders
    values: Any
    tables: tuple[SlotTable, ...]
    cursor: Any
    length: Any
    reaches: tuple[int | None, ...] = field(metadata={"static": True})
    layer_tables: tuple[int, ...] = field(metadata={"static": True})
    attends: tuple[bool, ...] = field(metadata={"static": True})
    states: tuple[Mapping[str, Any], ...] = ()
    is_prefix: bool = field(default=False, metadata={"static": True})

    @property
    def reach(self) -> int | None:
        """How many tokens a token sees, itself included; None if a layer sees all of them."""
        reaches = [reach for reach in self.reaches if reach is not None]
        return max(reaches) if reaches and len(reaches) == len(self.reaches) else None

    @property
    def capacity(self) -> int | None:
        """The largest number of tokens of a row, padding included; None if there is no limit."""
        return self.tables[self.reaches.index(None)].slots if None in self.reaches else None

    @property
    def layers(self) -> list[tuple[Array, Array]]:
        """(keys, values) of each layer with self-attention."""
        return list(zip(self.keys, self.values, strict=True))

    def append(
        self, segments: Int[Array, "batch new"]
    ) -> tuple["Cache", TokenInfo, dict[int | None, SlotView]]:
        """Marks slots as those of the next tokens, whose segment ids are `segments`.

        Returns:
            (cache, new, views). The cache's keys and values are not written yet. `new` describes
            the new tokens. `views` has the slots of the layers of each reach.
        """
        documents, positions, cursor = document_positions(segments, self.cursor)
        new = TokenInfo(segments.shape[1], positions, documents)
        appended = [table.append(new, self.length) for table in self.tables]
        tables, views = zip(*appended, strict=True)
        length = self.length + segments.shape[1]
        cache = replace(self, tables=tables, cursor=cursor, length=length)
        return cache, new, dict(zip(self.reaches, views, strict=True))

    @property
    def layer_states(self) -> list[dict[str, Any]]:
        """The states of each layer, by the names of its sub-layers."""
        layers = iter(self.layers)
        return [
            {**states, "attention": next(layers)} if has_attention else dict(states)
            for states, has_attention in zip(self.states, self.attends, strict=True)
        ]

    def with_states(self, layer_states: Sequence[Mapping[str, Any]]) -> "Cache":
        """Returns the cache with these states of each layer."""
        layers = [states["attention"] for states in layer_states if "attention" in states]
        others = tuple(
            {name: state for name, state in states.items() if name != "attention"}
            for states in layer_states
        )
        keys, values = (tuple(layer[side] for layer in layers) for side in (0, 1))
        return replace(self, keys=keys, values=values, states=others)

    def live_prefix(self, slots: int | None) -> "Cache":
        """Returns a cache of the first `slots` slots (None: all), with zeros in the empty ones.

        A step attends to all slots of the cache that it gets, so its cost grows with `slots` and
        not with the capacity. `merge_prefix` copies the prefix back. Empty slots are set to zero
        here, once for many steps, because 0 × NaN is NaN. A ring with fewer slots remains whole;
        one with more has reused none of them.

        Raises:
            ValueError: all layers have a window, and `slots` is smaller than a ring.
        """
        fewest = min((table.slots for table in self.tables), default=0)
        if self.capacity is None and slots is not None and slots < fewest:
            raise ValueError(f"slots is {slots}; a ring needs all of its {fewest} slots")
        if self.is_prefix and slots in (None, self.capacity):
            return self
        tables = tuple(table.part(slots) for table in self.tables)

        def zeroed(
            x: Shaped[Array, "batch kv_heads slots d"], table: SlotTable
        ) -> Shaped[Array, "batch kv_heads live d"]:
            return jnp.where(table.documents[:, None, :, None] != 0, x[:, :, : table.slots], 0)

        return replace(self._mapped(zeroed, tables), tables=tables, is_prefix=True)

    def merge_prefix(self, prefix: "Cache") -> "Cache":
        """Returns `prefix` followed by the remaining slots of this cache."""
        if self.is_prefix and prefix.capacity == self.capacity:
            return prefix
        return replace(
            prefix,
            keys=tuple(map(overwrite, self.keys, prefix.keys)),
            values=tuple(map(overwrite, self.values, prefix.values)),
            tables=tuple(
                table.merge(part) for table, part in zip(self.tables, prefix.tables, strict=True)
            ),
            is_prefix=self.is_prefix,
        )

    def grow(self, slots: int) -> "Cache":
        """Returns the cache with empty slots appended, so that it has `slots` of them.

        Rings grow up to the slots that they need; they have reused none while they are smaller.

        Raises:
            ValueError: all layers have a window, so that tokens would be in other slots then.
        """
        if self.capacity is None:
            raise ValueError("a ring reuses its slots; it cannot grow")
        sizes = [
            slots if reach is None else max(table.slots, min(slots, reach + SPARE))
            for reach, table in zip(self.reaches, self.tables, strict=True)
        ]
        tables = tuple(map(SlotTable.grow, self.tables, sizes))

        def grown(
            x: Shaped[Array, "batch kv_heads slots d"], table: SlotTable
        ) -> Shaped[Array, "batch kv_heads more d"]:
            return jnp.pad(x, ((0, 0), (0, 0), (0, table.slots - x.shape[2]), (0, 0)))

        return replace(self._mapped(grown, tables), tables=tables)

    def _mapped(self, function: Callable, tables: Sequence[SlotTable]) -> "Cache":
        """Returns the cache with function(x, table of its layer) for all keys and values x."""
        of_layers = [tables[number] for number in self.layer_tables]
        keys, values = (tuple(map(function, x, of_layers)) for x in (self.keys, self.values))
        return replace(self, keys=keys, values=values)

    def gather_rows(self, rows: ArrayLike | Sequence[Any]) -> "Cache":
        """Returns a cache whose row i is row rows[i] of this one; the number of rows may change.

        Args:
            rows: int [new_batch].

        Raises:
            ValueError: outside jit, if an entry of `rows` is no row of this cache.
        """
        rows = checked_rows(rows, len(self.cursor.position))
        return jax.tree.map(lambda x: x[rows] if x.ndim else x, self)

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
        if jax.tree.leaves(self.states):
            names = dict.fromkeys(name for states in self.states for name in states)
            raise ValueError(
                f"the sub-layer {next(iter(names))!r} keeps a state of one size, which has no "
                "earlier states to rewind to; keep the cache from before the tokens instead"
            )
        position = self.cursor.position
        lengths = _lengths_of_rows(lengths, len(position))
        longest = position
        for table in self.tables:
            longest = jnp.minimum(longest, table.longest_rewind(position))
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
        tables = tuple(table.rewind(lengths, remaining, self.cursor) for table in self.tables)
        cursor = self.cursor._replace(position=jnp.where(is_refused, _NOWHERE, remaining))
        cache = replace(self, tables=tables, cursor=cursor)
        if None not in self.reaches:
            return cache
        used = (tables[self.reaches.index(None)].documents != 0).any(axis=0)
        numbers = jnp.arange(1, len(used) + 1, dtype=jnp.int32)
        return replace(cache, length=jnp.where(used, numbers, 0).max())


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


class LayerSlots(NamedTuple):
    """What a layer keeps of each token: the number and width of its key heads, and its reach."""

    kv_heads: int
    head_dim: int
    reach: int | None = None


def init_cache(
    layers: Sequence[LayerSlots | None],
    size: CacheSize,
    dtype: DTypeLike,
    states: Sequence[Mapping[str, Any]] | None = None,
) -> Cache:
    """Returns an empty cache.

    Args:
        layers: what each layer keeps of each token; None: it has no self-attention.
        size: the number of rows and slots.
        dtype: the dtype of keys and values.
        states: the states of the other sub-layers of each layer; None: there are none.

    Raises:
        ValueError: the cache is a ring with fewer slots than the window.
    """
    attends = tuple(layer is not None for layer in layers)
    states = tuple(states or [{}] * len(layers))
    slots = [layer for layer in layers if layer is not None]
    sizes = _table_sizes(tuple(dict.fromkeys(layer.reach for layer in slots)), size)
    reaches, numbers = tuple(sizes), [list(sizes).index(_kept(x.reach, sizes)) for x in slots]
    shapes = [
        (size.batch_size, layer.kv_heads, sizes[reaches[number]], layer.head_dim)
        for layer, number in zip(slots, numbers, strict=True)
    ]
    keys, values = (tuple(jnp.zeros(shape, dtype) for shape in shapes) for _ in range(2))
    tables = tuple(SlotTable.empty(size.batch_size, sizes[reach], reach) for reach in reaches)
    cursor = DocumentCursor.begin(size.batch_size)
    zero, numbers = jnp.int32(0), tuple(numbers)
    return Cache(keys, values, tables, cursor, zero, reaches, numbers, attends, states)


def _kept(reach: int | None, sizes: Mapping[int | None, int]) -> int | None:
    """Returns the reach of the table of a layer: its own, or that of all tokens."""
    return reach if reach in sizes else None


def _table_sizes(reaches: Sequence[int | None], size: CacheSize) -> dict[int | None, int]:
    """Returns the number of slots of each table, by its reach.

    A window has a ring where that has fewer slots than the cache may ever have.
    """
    if size.ring:
        largest = max(reach for reach in reaches if reach is not None)
        if size.capacity < largest:
            raise ValueError(
                f"capacity is {size.capacity}; a ring must have the window's {largest} slots"
            )
        return dict.fromkeys(reaches, size.capacity)
    most = max(size.capacity, size.most or 0)
    rings: dict[int | None, int] = {
        reach: reach + SPARE
        for reach in reaches
        if size.ring is None and reach is not None and reach + SPARE < most
    }
    if len(rings) == len(reaches):
        return rings  # they never grow
    return {None: size.capacity} | {x: min(n, size.capacity) for x, n in rings.items()}
