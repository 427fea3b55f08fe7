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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, DTypeLike, Int

from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.cache.slots import Slots, SlotSize, SourceSlots, TokenStates
from jaxformer.functional.cache.table import SlotTable, SlotView
from jaxformer.functional.positions import DocumentCursor, document_positions

# Slots of a ring beyond its window: SPARE + 1 tokens can be appended at once, or dropped, before a
# key in the window is lost.
SPARE = 64


@dataclass(frozen=True)
class CacheSize:
    """Size of a cache.

    Attributes:
        batch_size: number of rows.
        capacity: the most tokens of a row, padding included.
        ring: True: each layer gets a ring of `capacity` slots, and must have a window. False: each
            layer gets `capacity` slots. None: layers with a window get a ring if that is smaller.
        most: the capacity to which the cache may grow; None: it does not grow.
    """

    batch_size: int
    capacity: int
    ring: bool | None = None
    most: int | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """What the layers keep of the tokens read so far.

    Attributes:
        states: for each layer the states of its sub-layers, by name: `Slots`, `SourceSlots`, or the
            arrays of `SubLayer.init_state`, whose first axis is the batch. `TokenStates` has these
            arrays after each token of the last pass.
        tables: the tokens in the slots, a table for each entry of `reaches`; layers of one reach
            share it.
        cursor: the segment, document and position at which each row stopped.
        length: int [], number of tokens read so far, padding included.
        reaches: the reach of each table, None for that of all tokens.
        source: length and padding of the sources; None: the model reads none.
        is_prefix: True for the result of `live_prefix`, whose empty slots are zero already.
    """

    states: tuple[Mapping[str, Any], ...]
    tables: tuple[SlotTable, ...]
    cursor: Any  # not annotated as arrays: JAX also fills the fields with placeholders
    length: Any
    reaches: tuple[int | None, ...] = field(metadata={"static": True})
    source: TokenInfo | None = None
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
    def slots(self) -> list[Slots]:
        """The slots of each layer that has them."""
        return [x for _, x in self._named_states if isinstance(x, Slots)]

    @property
    def _named_states(self) -> list[tuple[str, Any]]:
        """The name and the state of each sub-layer of each layer."""
        return [named for states in self.states for named in states.items()]

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
        tables = tuple(table for table, _ in appended)
        views = [view for _, view in appended]
        length = self.length + segments.shape[1]
        cache = replace(self, tables=tables, cursor=cursor, length=length)
        return cache, new, dict(zip(self.reaches, views, strict=True))

    @property
    def current_states(self) -> tuple[dict[str, Any], ...]:
        """The states of each layer after the last token."""
        return tuple(
            {name: x.now if isinstance(x, TokenStates) else x for name, x in states.items()}
            for states in self.states
        )

    def with_states(
        self, states: Sequence[Mapping[str, Any]], tokens: TokenInfo | None = None
    ) -> "Cache":
        """Returns the cache with these states in place of those of the same sub-layers.

        Args:
            states: the states after a pass.
            tokens: the tokens of the pass, if `Run.keeps_states` is True: states without slots are
                then those after each token. Otherwise None.
        """
        pairs = list(zip(self.current_states, states, strict=True))
        if tokens is not None:
            pairs = [(old, _by_token(old, new, tokens)) for old, new in pairs]
        return replace(self, states=tuple({**old, **new} for old, new in pairs))

    def live_prefix(self, slots: int | None) -> "Cache":
        """Returns a cache of the first `slots` slots (None: all), with zeros in the empty ones.

        A step attends to all slots of the cache that it gets, so its cost grows with `slots` and
        not with the capacity. `merge_prefix` copies the prefix back. Empty slots are set to zero
        here, once for many steps, because 0 × NaN is NaN. A ring of at most `slots` slots is kept
        whole. A larger one is cut, which is safe: if all tokens fit into `slots`, it has reused no
        slot.

        Raises:
            ValueError: all layers have a window, and `slots` is smaller than a ring.
        """
        most = max((table.slots for table in self.tables), default=0)
        if self.capacity is None and slots is not None and slots < most:
            raise ValueError(f"slots is {slots}; a ring needs all of its {most} slots")
        if self.is_prefix and slots in (None, self.capacity):
            return self
        tables = tuple(table.part(slots) for table in self.tables)
        states = self._map_slots(lambda x, table: x.live_part(table.documents), tables)
        return replace(self, states=states, tables=tables, is_prefix=True)

    def merge_prefix(self, prefix: "Cache") -> "Cache":
        """Returns `prefix` followed by the remaining slots of this cache."""
        if self.is_prefix and prefix.capacity == self.capacity:
            return prefix
        pairs = zip(self.states, prefix.states, strict=True)
        states = tuple(
            {name: old[name].merge(x) if isinstance(x, Slots) else x for name, x in new.items()}
            for old, new in pairs
        )
        tables = tuple(
            table.merge(part) for table, part in zip(self.tables, prefix.tables, strict=True)
        )
        return replace(prefix, states=states, tables=tables, is_prefix=self.is_prefix)

    def grow(self, slots: int) -> "Cache":
        """Returns the cache with empty slots appended, so that it has `slots` of them.

        Rings grow up to the slots that they need; they have reused none while they are smaller.

        Raises:
            ValueError: all layers have a window, so that tokens would be in other slots then.
        """
        if not self.tables:
            return self
        if self.capacity is None:
            raise ValueError("a ring reuses its slots; it cannot grow")
        sizes = [
            slots if reach is None else max(table.slots, min(slots, reach + SPARE))
            for reach, table in zip(self.reaches, self.tables, strict=True)
        ]
        tables = tuple(map(SlotTable.grow, self.tables, sizes))
        states = self._map_slots(lambda x, table: x.grow(table.slots), tables)
        return replace(self, states=states, tables=tables)

    def _map_slots(
        self, function: Callable[[Slots, SlotTable], Slots], tables: Sequence[SlotTable]
    ) -> tuple[dict[str, Any], ...]:
        """Returns the states with function(x, table of its layer) for all slots x."""
        table_of = dict(zip(self.reaches, tables, strict=True))
        return tuple(
            {
                name: function(x, table_of[x.reach]) if isinstance(x, Slots) else x
                for name, x in states.items()
            }
            for states in self.states
        )

    def gather_rows(self, rows: ArrayLike | Sequence[Any]) -> "Cache":
        """Returns a cache whose row i is row rows[i] of this one; the number of rows may change.

        The source of a row depends on its index, so row rows[i] must read the source of row i.

        Args:
            rows: int [new_batch].

        Raises:
            ValueError: outside jit, if an entry of `rows` is no row of this cache or has another
                source.
        """
        rows = checked_rows(rows, len(self.cursor.position))
        self._check_sources(rows)
        own = replace(self, source=None)  # sources have no axis of rows
        gathered = jax.tree.map(
            lambda x: x if isinstance(x, SourceSlots) or not x.ndim else x[rows],
            own,
            is_leaf=lambda x: isinstance(x, SourceSlots),
        )
        return replace(gathered, source=self.source)

    def _check_sources(self, rows: Int[Array | np.ndarray, " rows"]) -> None:
        slots = [x for _, x in self._named_states if isinstance(x, SourceSlots)]
        if not slots:
            return
        sources = len(slots[0].keys)
        if len(rows) % sources:
            raise ValueError(f"rows has {len(rows)} entries; the {sources} sources must divide it")
        if isinstance(rows, jax.core.Tracer):
            return
        old, new = (np.arange(n) // (n // sources) for n in (len(self.cursor.position), len(rows)))
        differs = old[rows] != new
        if differs.any():
            row = int(differs.argmax())
            raise ValueError(
                f"rows[{row}] is {rows[row]}, which reads source {old[rows[row]]}; row {row} "
                f"reads source {new[row]}"
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
        for name, x in self._named_states:
            if not isinstance(x, Slots | SourceSlots | TokenStates):
                raise ValueError(
                    f"the sub-layer {name!r} keeps its last state only, so no token can be "
                    "dropped; read the tokens with keep_states=True"
                )
        position = self.cursor.position
        lengths = _lengths_of_rows(lengths, len(position))
        longest = position
        for table in self.tables:
            longest = jnp.minimum(longest, table.longest_rewind(position))
        recent = [x for _, x in self._named_states if isinstance(x, TokenStates)]
        for x in recent:
            longest = jnp.minimum(longest, x.longest_rewind)
        longest = jnp.maximum(longest, 0)
        is_refused = (lengths < 0) | (lengths > longest)
        if not isinstance(is_refused, jax.core.Tracer) and is_refused.any():
            row = int(is_refused.argmax())
            why = ""
            if longest[row] < position[row]:
                why = ": its ring has overwritten earlier ones"
                if any(x.longest_rewind[row] == longest[row] for x in recent):
                    why = ": it has no states from before the last call"
            raise ValueError(
                f"lengths[{row}] is {lengths[row]}; row {row} can be rewound by 0 … {longest[row]} "
                f"tokens{why}"
            )
        lengths = jnp.where(is_refused, 0, lengths)
        remaining = position - lengths
        tables = tuple(table.rewind(lengths, remaining, self.cursor) for table in self.tables)
        cursor = self.cursor._replace(position=jnp.where(is_refused, _NOWHERE, remaining))
        states = tuple(
            {
                name: x.rewind(lengths) if isinstance(x, TokenStates) else x
                for name, x in kept.items()
            }
            for kept in self.states
        )
        cache = replace(self, states=states, tables=tables, cursor=cursor)
        if None not in self.reaches:
            return cache
        used = (tables[self.reaches.index(None)].documents != 0).any(axis=0)
        numbers = jnp.arange(1, len(used) + 1, dtype=jnp.int32)
        return replace(cache, length=jnp.where(used, numbers, 0).max())


def _by_token(old: Mapping[str, Any], new: Mapping[str, Any], tokens: TokenInfo) -> dict[str, Any]:
    """Returns the new states of a layer, with those of each token for sub-layers without slots."""
    return {
        name: x if isinstance(x, Slots) else TokenStates.of(name, old[name], x, tokens)
        for name, x in new.items()
    }


def _lengths_of_rows(lengths: ArrayLike | Sequence[Any], batch_size: int) -> Int[Array, " batch"]:
    """Returns one length for each row; ValueError if `lengths` are not whole numbers for them."""
    lengths = jnp.asarray(lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer) or lengths.shape not in ((), (batch_size,)):
        raise ValueError(
            f"lengths is {lengths.dtype} {lengths.shape}; it must be one whole number, or one for "
            f"each of the {batch_size} rows"
        )
    return jnp.broadcast_to(lengths.astype(jnp.int32), (batch_size,))


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


def init_cache(
    states: Sequence[Mapping[str, Any]],
    size: CacheSize,
    dtype: DTypeLike,
    source: TokenInfo | None = None,
) -> Cache:
    """Returns an empty cache.

    Args:
        states: the states of the sub-layers of each layer, by name. A `SlotSize` stands for empty
            slots.
        size: the number of rows and slots.
        dtype: the dtype of keys and values.
        source: length and padding of the sources; None: the model reads none.

    Raises:
        ValueError: the cache is a ring with fewer slots than the window.
    """
    reaches = [x.reach for each in states for x in each.values() if isinstance(x, SlotSize)]
    sizes, rows = _table_sizes(tuple(dict.fromkeys(reaches)), size), size.batch_size

    def empty(layer: SlotSize) -> Slots:
        reach = layer.reach if layer.reach in sizes else None  # the table of all tokens
        shape = (rows, layer.kv_heads, sizes[reach], layer.head_dim)
        return Slots(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), reach)

    return Cache(
        tuple(
            {name: empty(x) if isinstance(x, SlotSize) else x for name, x in each.items()}
            for each in states
        ),
        tuple(SlotTable.empty(rows, slots, reach) for reach, slots in sizes.items()),
        DocumentCursor.begin(rows),
        jnp.int32(0),
        tuple(sizes),
        source,
    )


def _table_sizes(reaches: Sequence[int | None], size: CacheSize) -> dict[int | None, int]:
    """Returns the number of slots of each table, by its reach.

    A window gets a ring only if the ring is smaller than the largest capacity of the cache.
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
