"""Blockwise attention in a long row: one loop over tiles of one size.

The scores take the memory of a single tile and the size of the program does not depend on the
length, so memory grows linearly with the length. The softmax is online (Milakov & Gimelshein 2018):
the running sums are relative to the largest score so far and are rescaled when a tile has a larger
one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxformer.functional.attention.masks import Visible
from jaxformer.functional.attention.scores import Scores
from jaxformer.functional.attention.tiles import (
    Gradients,
    Operands,
    Output,
    PerQuery,
    Places,
    Upstream,
    add_gradients,
    gradients_of,
    key_ranges,
    log_total_of,
    masked,
    of_queries,
    powers_of,
    products_of,
    scores_of,
    tile_of,
    weighted_sum,
    zero_gradients,
)
from jaxformer.functional.attention.token_info import DynamicSlice, cut, put

# Smaller tiles were slower, larger ones not clearly faster.
_LOOP_QUERIES, _LOOP_KEYS = 256, 512


class Sums(NamedTuple):
    """What a loop over tiles adds up.

    Attributes:
        rows: arrays [..., queries, dim].
        columns: arrays [..., keys, dim].
        shared: a tree that all tiles share.
    """

    rows: tuple[Array, ...]
    columns: tuple[Array, ...] = ()
    shared: Any = ()


AddTile = Callable[[Sums, DynamicSlice, DynamicSlice, Visible | None], Sums]


def long_forward(operands: Operands, places: Places, scores: Scores) -> tuple[Output, PerQuery]:
    """Returns the output and log Σ exp(score) of each query."""

    def add(sums: Sums, queries: DynamicSlice, keys: DynamicSlice, visible: Visible | None) -> Sums:
        output, largest, total = sums.rows
        part = tile_of(operands, queries, keys)
        adjusted = scores_of(places, queries, keys)(scores, products_of(part.query, part.key))
        adjusted = masked(adjusted, visible)
        larger = jnp.maximum(largest, adjusted.max(axis=-1, keepdims=True))
        powers, decay = (powers_of(x, larger[..., 0]) for x in (adjusted, largest))
        output = output * decay + weighted_sum(powers, part.value)
        return Sums((output, larger, total * decay + powers.sum(axis=-1, keepdims=True)))

    query, value = operands.query, operands.value
    total = jnp.zeros((*query.shape[:-1], 1), jnp.float32)
    output = jnp.zeros((*query.shape[:-1], value.shape[-1]), jnp.float32)
    sums = _over_tiles(places, add, Sums((output, total - jnp.inf, total)))
    output, largest, total = sums.rows
    output /= jnp.where(total == 0.0, 1.0, total)
    return output.astype(query.dtype), log_total_of(largest, total)[..., 0]


def long_backward(
    operands: Operands, upstream: Upstream, places: Places, scores: Scores
) -> Gradients:
    """Returns the gradients of queries, keys, values and scores."""

    def add(sums: Sums, queries: DynamicSlice, keys: DynamicSlice, visible: Visible | None) -> Sums:
        (d_query,), (d_key, d_value), d_scores = sums
        part, known = tile_of(operands, queries, keys), of_queries(upstream, queries)
        more = gradients_of(part, known, visible, scores, scores_of(places, queries, keys))
        d_columns = (d_key + more.key, d_value + more.value)
        return Sums((d_query + more.query,), d_columns, add_gradients(d_scores, more.scores))

    d_query, d_key, d_value = (jnp.zeros(x.shape, jnp.float32) for x in operands)
    sums = Sums((d_query,), (d_key, d_value), zero_gradients(scores))
    (d_query,), (d_key, d_value), d_scores = _over_tiles(places, add, sums)
    return Gradients(d_query, d_key, d_value, d_scores)


def _over_tiles(places: Places, add: AddTile, sums: Sums) -> Sums:
    """Calls `add(sums of a tile, its queries, its keys, visible)` for one tile after another.

    Each call reads and writes its tile's part of the arrays. If visibility depends on arrays, a
    tile without a visible pair is found, and skipped, only at run time.
    """
    lengths = np.array([places.queries.length, places.keys.length], np.int32)
    sizes = np.minimum(lengths, (_LOOP_QUERIES, _LOOP_KEYS))
    tiles = np.array(_long_tiles(places, *sizes.tolist()), np.int32)
    ragged = (tiles > lengths - sizes).any()
    depends_on_arrays = len(jax.tree.leaves(places)) > 0

    def step(sums: Sums, tile: Int[Array, "2"]) -> tuple[Sums, None]:
        # All tiles have one size. The last tile of a ragged row starts earlier and overlaps the
        # tile before it; `visible` excludes the overlap.
        start = jnp.minimum(tile, lengths - sizes)
        queries, keys = (DynamicSlice(start[side], sizes[side].item()) for side in (0, 1))
        visible = places.mask.tile(places.queries, places.keys, queries, keys)
        if ragged:
            rows, columns = (
                start[side] + jnp.arange(sizes[side], dtype=jnp.int32) >= tile[side]
                for side in (0, 1)
            )
            visible = visible & rows[:, None] & columns
        elif isinstance(visible, np.bool_) and visible:
            visible = None
        before = Sums(
            tuple(cut(x, queries, -2) for x in sums.rows),
            tuple(cut(x, keys, -2) for x in sums.columns),
            sums.shared,
        )

        def update(sums: Sums) -> Sums:
            return add(sums, queries, keys, visible)

        if depends_on_arrays and visible is not None:
            after = jax.lax.cond(jnp.any(visible), update, lambda same: same, before)
        else:
            after = update(before)
        return Sums(
            _put_all(sums.rows, queries, after.rows),
            _put_all(sums.columns, keys, after.columns),
            after.shared,
        ), None

    return jax.lax.scan(step, sums, jnp.asarray(tiles))[0]


def _long_tiles(places: Places, block: int, key_block: int) -> list[tuple[int, int]]:
    """Returns [first query, first key] of every tile."""
    return [
        (rows.start, column)
        for rows, columns in key_ranges(places, block)
        for column in range(columns.start, columns.stop, key_block)
    ]


def _put_all(
    arrays: tuple[Array, ...], part: DynamicSlice, new: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Returns the arrays with the new values at `part` of their axis −2."""
    return tuple(put(x, part, y, -2) for x, y in zip(arrays, new, strict=True))
