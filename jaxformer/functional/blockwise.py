"""Exact attention in tiles of queries × keys, on any device; the default on CPU.

The mask's `key_range` limits the keys of each tile: with a causal mask only corners of tiles lie
above the diagonal. The forward pass stores the output and, for each query, log Σ exp(score). The
backward pass recomputes the weights from them (Dao et al. 2022).

A short row has one tile for each of at most 16 blocks of queries, and the program unrolls the
tiles.

A long row has many tiles of one fixed size, which one loop processes. The scores take the memory of
a single tile and the size of the program does not depend on the length, so memory grows linearly
with the length. The softmax is online (Milakov & Gimelshein 2018): the running sums are relative to
the largest score so far and are rescaled when a tile has a larger one.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.functional.heads import group_heads
from jaxformer.functional.masks import Mask, Visible
from jaxformer.functional.scores import Scores
from jaxformer.functional.tiles import (
    Gradients,
    Operands,
    Output,
    PerQuery,
    Places,
    Upstream,
    add_gradients,
    gradients_of,
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
from jaxformer.functional.token_info import DynamicSlice, TokenInfo, cut

_SMALLEST_BLOCK, _MOST_BLOCKS = 64, 16  # queries of a block and blocks, in a short row
# A row is short if none of its tiles has more scores per head than this: up to 2,048 causal tokens.
# With 4,096 tokens on two cores of a Xeon, the loop took three quarters of the time of the unrolled
# program, and a quarter of its time to compile.
_LARGEST_TILE = 2**18
_LOOP_QUERIES, _LOOP_KEYS = 256, 512  # smaller tiles were slower, larger ones not clearly faster


def blockwise_attention(
    query: Float[Array, "*batch heads queries d"],
    key: Float[Array, "*batch kv_heads keys d"],
    value: Float[Array, "*batch kv_heads keys v"],
    mask: Mask,
    query_info: TokenInfo,
    key_info: TokenInfo,
    scores: Scores,
) -> Float[Array, "*batch heads queries v"]:
    """Computes the same as `attention.explicit_attention`, tile by tile.

    Args:
        query: [*batch, heads, queries, head_dim].
        key: [*batch, kv_heads, keys, head_dim].
        value: [*batch, kv_heads, keys, value_dim].
        mask: which of the keys each query sees.
        query_info: positions and documents of the queries.
        key_info: positions and documents of the keys.
        scores: scale, cap and bias, with the scale set.
    """
    places = mask, query_info, key_info
    if jax.tree.leaves(places):
        # The masks of all tiles depend on the documents alone. Without the barrier, JAX computes
        # them once for all layers and stores them, which takes the memory of all scores of a row.
        query, places = jax.lax.optimization_barrier((query, places))
    return _attention(query, key, value, *places, scores)


@jax.custom_vjp
def _attention(
    query: Float[Array, "*batch heads queries d"],
    key: Float[Array, "*batch kv_heads keys d"],
    value: Float[Array, "*batch kv_heads keys v"],
    mask: Mask,
    query_info: TokenInfo,
    key_info: TokenInfo,
    scores: Scores,
) -> Float[Array, "*batch heads queries v"]:
    """Computes `blockwise_attention`, with gradients of its own."""
    return _forward(query, key, value, Places(mask, query_info, key_info), scores)[0]


def _forward(
    query: Float[Array, "*batch heads queries d"],
    key: Float[Array, "*batch kv_heads keys d"],
    value: Float[Array, "*batch kv_heads keys v"],
    places: Places,
    scores: Scores,
) -> tuple[Float[Array, "*batch heads queries v"], PerQuery]:
    """Returns the output and log Σ exp(score) of each query."""
    forward = _short_forward if _is_short(places) else _long_forward
    output, log_total = forward(Operands(group_heads(query, key), key, value), places, scores)
    return output.reshape(*query.shape[:-1], value.shape[-1]), log_total


def _forward_and_residuals(
    query: Float[Array, "*batch heads queries d"],
    key: Float[Array, "*batch kv_heads keys d"],
    value: Float[Array, "*batch kv_heads keys v"],
    mask: Mask,
    query_info: TokenInfo,
    key_info: TokenInfo,
    scores: Scores,
) -> tuple[Float[Array, "*batch heads queries v"], tuple[Any, ...]]:
    places = Places(mask, query_info, key_info)
    output, log_total = _forward(query, key, value, places, scores)
    return output, (query, key, value, places, scores, output, log_total)


def _backward(
    residuals: tuple[Any, ...], cotangent: Float[Array, "*batch heads queries v"]
) -> tuple[Array, Array, Array, None, None, None, Scores]:
    """Computes the gradients from the residuals of the forward pass.

    With weights P and D_i = o_i · do_i: dV = Pᵀ dO, dS = P ⊙ (dO Vᵀ − D), dQ = dS K, dK = dSᵀ Q.
    """
    query, key, value, places, scores, output, log_total = residuals
    products = (output.astype(jnp.float32) * cotangent.astype(jnp.float32)).sum(axis=-1)
    products = products.reshape(log_total.shape)
    operands = Operands(group_heads(query, key), key, value)
    upstream = Upstream(group_heads(cotangent, key), products, log_total)
    backward = _short_backward if _is_short(places) else _long_backward
    d_query, d_key, d_value, d_scores = backward(operands, upstream, places, scores)
    d_scores = jax.tree.map(lambda d, x: d.astype(x.dtype), d_scores, scores)
    d_query = d_query.reshape(query.shape).astype(query.dtype)
    d_key, d_value = d_key.astype(key.dtype), d_value.astype(value.dtype)
    return d_query, d_key, d_value, None, None, None, d_scores


_attention.defvjp(_forward_and_residuals, _backward)


# ---- a short row: one tile for each block of queries


def _key_ranges(places: Places, block: int) -> Iterator[tuple[slice, slice]]:
    """Yields (queries, keys) as slices, block by block: the queries see no other keys."""
    mask, query_info, key_info = places
    in_order = query_info.positions is None and key_info.positions is None
    for start in range(0, query_info.length, block):
        stop = min(start + block, query_info.length)
        low, high = 0, key_info.length
        if in_order:
            low, high = mask.key_range(start, stop, key_info.length)
        if low < high:
            yield slice(start, stop), slice(low, high)


def _short_ranges(places: Places) -> Iterator[tuple[slice, slice]]:
    block = max(_SMALLEST_BLOCK, -(-places.queries.length // _MOST_BLOCKS))
    return _key_ranges(places, block)


def _is_short(places: Places) -> bool:
    return all(
        (rows.stop - rows.start) * (columns.stop - columns.start) <= _LARGEST_TILE
        for rows, columns in _short_ranges(places)
    )


def _short_tiles(places: Places) -> Iterator[tuple[slice, slice, Visible | None]]:
    """Yields (queries, keys, visible) tile by tile; visible is None if all pairs are visible."""
    for rows, columns in _short_ranges(places):
        visible = places.mask.tile(places.queries, places.keys, rows, columns)
        if isinstance(visible, (np.ndarray, np.bool_)) and visible.all():
            visible = None
        yield rows, columns, visible


def _short_forward(operands: Operands, places: Places, scores: Scores) -> tuple[Output, PerQuery]:
    query, value = operands.query, operands.value
    output = jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)
    log_total = jnp.full(query.shape[:-1], jnp.inf, jnp.float32)
    for rows, columns, visible in _short_tiles(places):
        part = tile_of(operands, rows, columns)
        adjusted = scores_of(places, rows, columns)(scores, products_of(part.query, part.key))
        adjusted = masked(adjusted, visible)
        largest = adjusted.max(axis=-1)
        powers = powers_of(adjusted, largest)
        total = powers.sum(axis=-1)
        weighted = weighted_sum(powers, part.value)
        weighted /= jnp.where(total == 0.0, 1.0, total)[..., None]
        output = output.at[..., rows, :].set(weighted.astype(output.dtype))
        log_total = log_total.at[..., rows].set(log_total_of(largest, total))
    return output, log_total


def _short_backward(
    operands: Operands, upstream: Upstream, places: Places, scores: Scores
) -> Gradients:
    query, key, value = operands
    d_scores = zero_gradients(scores)
    d_query = jnp.zeros(query.shape, query.dtype)
    d_key, d_value = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    for rows, columns, visible in _short_tiles(places):
        part, known = tile_of(operands, rows, columns), of_queries(upstream, rows)
        tile = scores_of(places, rows, columns)
        d_rows, *d_columns, more = gradients_of(part, known, visible, scores, tile)
        d_query = d_query.at[..., rows, :].set(d_rows.astype(query.dtype))
        d_key = d_key.at[..., columns, :].add(d_columns[0])
        d_value = d_value.at[..., columns, :].add(d_columns[1])
        d_scores = add_gradients(d_scores, more)
    return Gradients(d_query, d_key, d_value, d_scores)


# ---- a long row: a loop over tiles of one size


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


def _long_forward(operands: Operands, places: Places, scores: Scores) -> tuple[Output, PerQuery]:
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


def _long_backward(
    operands: Operands, upstream: Upstream, places: Places, scores: Scores
) -> Gradients:
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
            rows, columns = (start[side] + jnp.arange(sizes[side]) >= tile[side] for side in (0, 1))
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
            _put(queries, sums.rows, after.rows),
            _put(keys, sums.columns, after.columns),
            after.shared,
        ), None

    return jax.lax.scan(step, sums, jnp.asarray(tiles))[0]


def _long_tiles(places: Places, block: int, key_block: int) -> list[tuple[int, int]]:
    """Returns [first query, first key] of every tile."""
    return [
        (rows.start, column)
        for rows, columns in _key_ranges(places, block)
        for column in range(columns.start, columns.stop, key_block)
    ]


def _put(
    part: DynamicSlice, arrays: tuple[Array, ...], new: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Returns the arrays with the new values at `part`."""
    return tuple(
        jax.lax.dynamic_update_slice_in_dim(x, y, part.start, -2)
        for x, y in zip(arrays, new, strict=True)
    )
