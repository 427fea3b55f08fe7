"""Key/value cache for incremental decoding.

The cache is an immutable pytree: a forward pass takes a cache and returns the updated cache. Each
attention layer has an array of keys and an array of values, both [batch, kv_heads, slots,
head_dim]. A slot is a place in these arrays for the key and the value of one token. A table records
the position and the document of the token in each slot. With this table, the same code supports
batch elements of different lengths, several new tokens per call, and packed documents.

Layers without a window share one table, which lists all tokens. Layers with the same window size
share one table, whose slots are a ring buffer. The ring buffer has slots for the tokens of the
window and for `SPARE` more tokens, and new tokens overwrite the oldest tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, DTypeLike, Int

from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.cache.slots import KeyValueSize, Slots, SourceKeysValues, TokenStates
from jaxformer.functional.cache.table import TableView, TokenTable
from jaxformer.functional.positions import DocumentCursor, document_positions

# Number of slots that a ring buffer has in addition to its window size. One call can append or drop
# up to SPARE + 1 tokens without losing a key that a window needs.
SPARE = 64


@dataclass(frozen=True)
class CacheSize:
    """Size of a cache.

    Attributes:
        batch_size: number of batch elements.
        capacity: maximum number of tokens per batch element, padding included.
        ring: if True, each layer gets a ring buffer of `capacity` slots; all layers must then have
            a window. If False, each layer gets `capacity` slots that are never reused. If None, a
            layer with a window gets a ring buffer if this buffer needs fewer than max(`capacity`,
            `most`) slots.
        most: the capacity to which the cache may grow; defaults to `capacity`.
    """

    batch_size: int
    capacity: int
    ring: bool | None = None
    most: int | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """State of all layers after the tokens read so far.

    Attributes:
        states: for each layer, a dictionary from the name of a sub-layer to its state. A state is
            `Slots` (self-attention), `SourceKeysValues` (cross-attention), or a tree of arrays from
            `SubLayer.init_state` with the batch as first axis. If the last pass stored the tree
            after each token (`Run.keeps_states`), the state is `TokenStates` instead of the tree.
        tables: for each entry of `reaches`, a table of the tokens in the slots. Layers with the
            same window size share a table.
        cursor: for each batch element, the last segment id, the number of documents and the next
            position.
        length: int [], the number of tokens read per batch element so far, padding included.
        reaches: the window size of each table's layers; None for the table of all tokens.
        source: length and padding of the sources; None for a model without a source.
        is_prefix: whether `live_prefix` returned this cache, so that all empty slots hold zeros.
    """

    # `cursor` and `length` have the type `Any`, because JAX also fills these fields with
    # placeholders.
    states: tuple[Mapping[str, Any], ...]
    tables: tuple[TokenTable, ...]
    cursor: Any
    length: Any
    reaches: tuple[int | None, ...] = field(metadata={"static": True})
    source: TokenInfo | None = None
    is_prefix: bool = field(default=False, metadata={"static": True})

    @property
    def reach(self) -> int | None:
        """The largest window size of all layers; None if a layer attends to all tokens."""
        reaches = [reach for reach in self.reaches if reach is not None]
        return max(reaches) if reaches and len(reaches) == len(self.reaches) else None

    @property
    def capacity(self) -> int | None:
        """Maximum number of tokens per batch element, padding included; None without a limit."""
        return self.tables[self.reaches.index(None)].num_slots if None in self.reaches else None

    @property
    def key_values(self) -> list[Slots]:
        """The keys and values of each layer with self-attention."""
        return [x for _, x in self._named_states if isinstance(x, Slots)]

    @property
    def _named_states(self) -> list[tuple[str, Any]]:
        """The pairs (name, state) of the sub-layers of all layers."""
        return [named for states in self.states for named in states.items()]

    def append(
        self, segment_ids: Int[Array, "batch new"]
    ) -> tuple["Cache", TokenInfo, dict[int | None, TableView]]:
        """Reserves slots for new tokens with these segment ids.

        Returns:
            (cache, new, views). The cache has updated tables; keys and values are written later, by
            each layer. `new` holds the positions and documents of the new tokens. `views` maps the
            window size of each table to the table's `TableView`.
        """
        documents, positions, cursor = document_positions(segment_ids, self.cursor)
        new = TokenInfo(segment_ids.shape[1], positions, documents)
        appended = [table.append(new, self.length) for table in self.tables]
        tables = tuple(table for table, _ in appended)
        views = [view for _, view in appended]
        length = self.length + segment_ids.shape[1]
        cache = replace(self, tables=tables, cursor=cursor, length=length)
        return cache, new, dict(zip(self.reaches, views, strict=True))

    @property
    def current_states(self) -> tuple[dict[str, Any], ...]:
        """For each layer, the states of its sub-layers after the last token."""
        return tuple(
            {name: x.now if isinstance(x, TokenStates) else x for name, x in states.items()}
            for states in self.states
        )

    def with_states(
        self, states: Sequence[Mapping[str, Any]], tokens: TokenInfo | None = None
    ) -> "Cache":
        """Returns the cache with new states for the sub-layers in `states`.

        Args:
            states: for each layer, {name of a sub-layer: state after a pass}.
            tokens: the tokens of the pass if `Run.keeps_states` is True, otherwise None. With
                `keeps_states`, `states` holds recurrent states after each token.
        """
        pairs = list(zip(self.current_states, states, strict=True))
        if tokens is not None:
            pairs = [(old, _token_states(old, new, tokens)) for old, new in pairs]
        return replace(self, states=tuple({**old, **new} for old, new in pairs))

    def live_prefix(self, num_slots: int | None) -> "Cache":
        """Returns a cache of the first `num_slots` slots, with zeros in the empty slots.

        A decoding step attends to all slots of its cache, so the cost of a step grows with
        `num_slots` and not with the capacity. `merge_prefix` copies the prefix back into this
        cache. Empty slots must be zero, because 0 × NaN is NaN. `live_prefix` zeroes them once for
        all later steps.

        Ring buffers with at most `num_slots` slots are unchanged. Larger ring buffers are truncated
        to `num_slots` slots. A truncated ring buffer holds all tokens if there are at most
        `num_slots` tokens.

        Args:
            num_slots: the number of slots; all slots if None.

        Raises:
            ValueError: All layers have ring buffers, and `num_slots` is smaller than the largest
                ring buffer.
        """
        most = max((table.num_slots for table in self.tables), default=0)
        if self.capacity is None and num_slots is not None and num_slots < most:
            raise ValueError(
                f"num_slots is {num_slots}; it must be None or at least {most} "
                "(the size of the ring)"
            )
        if self.is_prefix and num_slots in (None, self.capacity):
            return self
        tables = tuple(table.part(num_slots) for table in self.tables)
        states = self._map_key_values(lambda x, table: x.live_part(table.documents), tables)
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

    def grow(self, num_slots: int) -> "Cache":
        """Appends empty slots, so that the cache has `num_slots` slots.

        A ring buffer grows to at most window + `SPARE` slots. A ring buffer below this size has not
        overwritten any token.

        Raises:
            ValueError: All layers have ring buffers. Such a cache cannot grow, because ring buffers
                overwrite old tokens.
        """
        if not self.tables:
            return self
        if self.capacity is None:
            raise ValueError(
                "this cache cannot grow: it has only ring buffers, which overwrite old tokens"
            )
        sizes = [
            num_slots if reach is None else max(table.num_slots, min(num_slots, reach + SPARE))
            for reach, table in zip(self.reaches, self.tables, strict=True)
        ]
        tables = tuple(map(TokenTable.grow, self.tables, sizes))
        states = self._map_key_values(lambda x, table: x.grow(table.num_slots), tables)
        return replace(self, states=states, tables=tables)

    def _map_key_values(
        self, function: Callable[[Slots, TokenTable], Slots], tables: Sequence[TokenTable]
    ) -> tuple[dict[str, Any], ...]:
        """Returns all states, with `function(slots, table)` in place of each `Slots`."""
        format_table = dict(zip(self.reaches, tables, strict=True))
        return tuple(
            {
                name: function(x, format_table[x.reach]) if isinstance(x, Slots) else x
                for name, x in states.items()
            }
            for states in self.states
        )

    def gather_batch(self, indices: ArrayLike | Sequence[Any]) -> "Cache":
        """Returns a cache whose batch element i is batch element indices[i] of this cache.

        The number of indices may differ from the batch size. The source of a batch element depends
        on its index. Therefore, batch element i of the result and batch element indices[i] of this
        cache must have the same source.

        Args:
            indices: int [new_batch].

        Raises:
            ValueError: Outside jit, an entry of `indices` is not in 0 … batch − 1, or selects a
                batch element of another source.
        """
        indices = _check_indices(indices, len(self.cursor.position))
        self._check_sources(indices)
        # The batch axis of the sources is not the batch axis that `indices` refers to.
        own = replace(self, source=None)
        gathered = jax.tree.map(
            lambda x: x if isinstance(x, SourceKeysValues) or not x.ndim else x[indices],
            own,
            is_leaf=lambda x: isinstance(x, SourceKeysValues),
        )
        return replace(gathered, source=self.source)

    def _check_sources(self, indices: Int[Array | np.ndarray, " new_batch"]) -> None:
        cached = [x for _, x in self._named_states if isinstance(x, SourceKeysValues)]
        if not cached:
            return
        sources = len(cached[0].keys)
        if len(indices) % sources:
            raise ValueError(
                f"indices has {len(indices)} entries; their number must be a multiple of the "
                f"number of sources ({sources})"
            )
        if isinstance(indices, jax.core.Tracer):
            return
        old, new = (
            np.arange(n) // (n // sources) for n in (len(self.cursor.position), len(indices))
        )
        differs = old[indices] != new
        if differs.any():
            i = int(differs.argmax())
            raise ValueError(
                f"indices[{i}] is {indices[i]}, but batch element {indices[i]} of the cache "
                f"belongs to source {old[indices[i]]}, and batch element {i} of the result to "
                f"source {new[i]}; both must have the same source"
            )

    def rewind(self, lengths: ArrayLike | Sequence[Any]) -> "Cache":
        """Drops the last lengths[i] tokens of batch element i.

        The dropped tokens must belong to the current document of the batch element. The last
        slots become free if no batch element has a remaining token in them. A ring buffer
        overwrites old tokens, so tokens can be dropped only if all tokens in the window of the next
        token are still in the ring buffer.

        Args:
            lengths: int [batch], or one number for all batch elements.

        Raises:
            ValueError: Outside jit, batch element i cannot drop lengths[i] tokens. Inside jit,
                the logits of batch element i are NaN instead, until its next document begins.
        """
        for name, x in self._named_states:
            if not isinstance(x, Slots | SourceKeysValues | TokenStates):
                raise ValueError(
                    f"the cache has only the last state of the sub-layer {name!r}, so tokens "
                    "cannot be dropped; pass keep_states=True to jf.extend"
                )
        position = self.cursor.position
        lengths = _check_lengths(lengths, len(position))
        longest = position
        for table in self.tables:
            longest = jnp.minimum(longest, table.longest_rewind(position))
        recent = [x for _, x in self._named_states if isinstance(x, TokenStates)]
        for x in recent:
            longest = jnp.minimum(longest, x.longest_rewind)
        longest = jnp.maximum(longest, 0)
        is_refused = (lengths < 0) | (lengths > longest)
        if not isinstance(is_refused, jax.core.Tracer) and is_refused.any():
            index = int(is_refused.argmax())
            why = ""
            if longest[index] < position[index]:
                why = ", because the ring buffer has overwritten earlier tokens"
                if any(x.longest_rewind[index] == longest[index] for x in recent):
                    why = ", because the cache has no recurrent states from before the last call"
            raise ValueError(
                f"lengths[{index}] is {lengths[index]}; the number of tokens to drop must be in "
                f"0 … {longest[index]}{why}"
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


def _token_states(
    old: Mapping[str, Any], new: Mapping[str, Any], tokens: TokenInfo
) -> dict[str, Any]:
    """Returns the new states of a layer; a recurrent state becomes `TokenStates`."""
    return {
        name: x if isinstance(x, Slots) else TokenStates.of(name, old[name], x, tokens)
        for name, x in new.items()
    }


def _check_lengths(lengths: ArrayLike | Sequence[Any], batch_size: int) -> Int[Array, " batch"]:
    """Returns `lengths` as int32 [batch].

    Raises:
        ValueError: `lengths` is not an integer or one integer per batch element.
    """
    lengths = jnp.asarray(lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer) or lengths.shape not in ((), (batch_size,)):
        raise ValueError(
            f"lengths is {lengths.dtype} of shape {lengths.shape}; it must be a whole number, or "
            f"an array of {batch_size} whole numbers, one per batch element"
        )
    return jnp.broadcast_to(lengths.astype(jnp.int32), (batch_size,))


def _check_indices(
    indices: ArrayLike | Sequence[Any], batch_size: int
) -> Int[Array | np.ndarray, " new_batch"]:
    """Returns `indices`, int [new_batch], as an array.

    Raises:
        ValueError: Outside jit, an index is not in 0 … batch_size − 1.
    """
    if isinstance(indices, jax.core.Tracer):
        return indices
    indices = np.asarray(indices)
    missing = (indices < 0) | (indices >= batch_size)
    if missing.any():
        index = indices[missing][0]
        raise ValueError(f"indices contains {index}; it must be in 0 … {batch_size - 1}")
    return indices


# The logits of a token at a negative position are NaN.
_NOWHERE = -(2**30)


def empty_cache(
    states: Sequence[Mapping[str, Any]],
    size: CacheSize,
    dtype: DTypeLike,
    source: TokenInfo | None = None,
) -> Cache:
    """Returns an empty cache.

    Args:
        states: for each layer, the initial states of its sub-layers, by name. Each `KeyValueSize`
            is replaced by empty slots.
        size: the batch size and the number of slots.
        dtype: the dtype of keys and values.
        source: length and padding of the sources; None for a model without a source.

    Raises:
        ValueError: `size.ring` is True, and `size.capacity` is below the largest window size.
    """
    reaches = [x.reach for each in states for x in each.values() if isinstance(x, KeyValueSize)]
    sizes, batch_size = _table_sizes(tuple(dict.fromkeys(reaches)), size), size.batch_size

    def empty(layer: KeyValueSize) -> Slots:
        # If `reach` is None, the layer has no ring buffer and stores all tokens.
        reach = layer.reach if layer.reach in sizes else None
        shape = (batch_size, layer.kv_heads, sizes[reach], layer.head_dim)
        return Slots(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), reach)

    return Cache(
        tuple(
            {name: empty(x) if isinstance(x, KeyValueSize) else x for name, x in each.items()}
            for each in states
        ),
        tuple(TokenTable.empty(batch_size, num_slots, reach) for reach, num_slots in sizes.items()),
        DocumentCursor.begin(batch_size),
        jnp.int32(0),
        tuple(sizes),
        source,
    )


def _table_sizes(reaches: Sequence[int | None], size: CacheSize) -> dict[int | None, int]:
    """Returns {window size: number of slots in the table for layers with this window}.

    By default, a layer with a window gets a ring buffer if window + `SPARE` is below the largest
    capacity, max(`capacity`, `most`).
    """
    if size.ring:
        largest = max(reach for reach in reaches if reach is not None)
        if size.capacity < largest:
            raise ValueError(
                f"capacity is {size.capacity}; a ring needs at least {largest} slots, the largest "
                "window size"
            )
        return dict.fromkeys(reaches, size.capacity)
    most = max(size.capacity, size.most or 0)
    rings: dict[int | None, int] = {
        reach: reach + SPARE
        for reach in reaches
        if size.ring is None and reach is not None and reach + SPARE < most
    }
    if len(rings) == len(reaches):
        # If every layer has a ring buffer, the cache cannot grow, so the ring buffers have their
        # full size from the start.
        return rings
    return {None: size.capacity} | {x: min(n, size.capacity) for x, n in rings.items()}
