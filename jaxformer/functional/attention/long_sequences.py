"""Blockwise attention for long sequences: one loop over tiles of equal size.

Only the scores of one tile are in memory, and the size of the program does not depend on the
length. Memory therefore grows linearly with the length. The softmax is online (Milakov & Gimelshein
2018): the running sums are relative to the largest score so far, and are rescaled when a tile has a
larger score.
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
    bind_score_tile,
    exp_scores,
    key_ranges,
    log_sum_exp,
    masked,
    query_key_products,
    slice_operands,
    slice_upstream,
    tile_gradients,
    weighted_sum,
    zero_gradients,
)
from jaxformer.functional.attention.token_info import DynamicSlice, cut, put

# Smaller tiles were slower; larger tiles were not clearly faster.
_LOOP_QUERIES, _LOOP_KEYS = 256, 512


class Sums(NamedTuple):
    """Accumulators of the loop over tiles.

    Attributes:
        rows: sums per query, arrays [..., queries, dim].
        columns: sums per key, arrays [..., keys, dim].
        shared: sums over all tiles, such as the gradient of a bias.
    """

    rows: tuple[Array, ...]
    columns: tuple[Array, ...] = ()
    shared: Any = ()


AddTile = Callable[[Sums, DynamicSlice, DynamicSlice, Visible | None], Sums]


def long_forward(operands: Operands, places: Places, scores: Scores) -> tuple[Output, PerQuery]:
    """Returns the output and log Σ exp(score) of each query."""

    def add(sums: Sums, queries: DynamicSlice, keys: DynamicSlice, visible: Visible | None) -> Sums:
        output, largest, total = sums.rows
        part = slice_operands(operands, queries, keys)
        adjusted = bind_score_tile(places, queries, keys)(
            scores, query_key_products(part.query, part.key)
        )
        adjusted = masked(adjusted, visible)
        larger = jnp.maximum(largest, adjusted.max(axis=-1, keepdims=True))
        powers, decay = (exp_scores(x, larger[..., 0]) for x in (adjusted, largest))
        output = output * decay + weighted_sum(powers, part.value)
        return Sums((output, larger, total * decay + powers.sum(axis=-1, keepdims=True)))

    query, value = operands.query, operands.value
    total = jnp.zeros((*query.shape[:-1], 1), jnp.float32)
    output = jnp.zeros((*query.shape[:-1], value.shape[-1]), jnp.float32)
    sums = _over_tiles(places, add, Sums((output, total - jnp.inf, total)))
    output, largest, total = sums.rows
    output /= jnp.where(total == 0.0, 1.0, total)
    return output.astype(query.dtype), log_sum_exp(largest, total)[..., 0]


def long_backward(
    operands: Operands, upstream: Upstream, places: Places, scores: Scores
) -> Gradients:
    """Returns the gradients of queries, keys, values and scores."""

    def add(sums: Sums, queries: DynamicSlice, keys: DynamicSlice, visible: Visible | None) -> Sums:
        (d_query,), (d_key, d_value), d_scores = sums
        part, known = slice_operands(operands, queries, keys), slice_upstream(upstream, queries)
        more = tile_gradients(part, known, visible, scores, bind_score_tile(places, queries, keys))
        d_columns = (d_key + more.key, d_value + more.value)
        return Sums((d_query + more.query,), d_columns, add_gradients(d_scores, more.scores))

    d_query, d_key, d_value = (jnp.zeros(x.shape, jnp.float32) for x in operands)
    sums = Sums((d_query,), (d_key, d_value), zero_gradients(scores))
    (d_query,), (d_key, d_value), d_scores = _over_tiles(places, add, sums)
    return Gradients(d_query, d_key, d_value, d_scores)


def _over_tiles(places: Places, add: AddTile, sums: Sums) -> Sums:
    """Calls `add(sums, queries, keys, visible)` for each tile, in a loop.

    Each call updates the sums of the tile's queries and keys. Tiles outside the mask's key ranges
    are omitted. If the mask depends on arrays, other tiles without a visible pair are skipped at
    run time.
    """
    lengths = np.array([places.queries.length, places.keys.length], np.int32)
    sizes = np.minimum(lengths, (_LOOP_QUERIES, _LOOP_KEYS))
    tiles = np.array(_long_tiles(places, *sizes.tolist()), np.int32)
    ragged = (tiles > lengths - sizes).any()
    depends_on_arrays = len(jax.tree.leaves(places)) > 0

    def step(sums: Sums, tile: Int[Array, "2"]) -> tuple[Sums, None]:
        # All tiles have the same size. If the length is not a multiple of this size, the last tile
        # starts earlier and overlaps the tile before it; `visible` excludes the overlap.
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
    """Replaces the slice `part` of each array along axis −2 by the array in `new`."""
    return tuple(put(x, part, y, -2) for x, y in zip(arrays, new, strict=True))
