"""Exact attention in tiles, a block of queries × a block of keys (any device; the default on CPU).

Only the keys that the mask's `key_range` allows are touched: with a causal mask nothing above the
diagonal is computed but a corner of a tile. The forward pass keeps the output and, per query,
log Σ exp(score); the backward pass computes the weights again from it (Dao et al. 2022).

A short row has one tile for each of at most 16 blocks of queries, and the program spells them out.
A long row has many tiles of one fixed size in one loop, so that scores take the memory of a single
tile and the program is as small for any length: memory grows linearly with the length. There
softmax is online (Milakov & Gimelshein 2018): sums over the keys so far are relative to the largest
score so far, and are scaled down when a tile holds a larger one.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.functional.heads import group_heads, over_heads
from jaxformer.functional.masks import DynamicSlice, Mask, TokenInfo, cut
from jaxformer.functional.scores import Scores

_SMALLEST_BLOCK, _MOST_BLOCKS = 64, 16  # of queries, in a short row
# A row is short while no tile has more scores a head: of causal tokens, up to 2,048. With 4,096, on
# two cores of a Xeon, the loop took three quarters of the time, and a quarter to compile.
_LARGEST_TILE = 2**18
_LOOP_QUERIES, _LOOP_KEYS = 256, 512  # smaller tiles were slower, larger ones not clearly faster


@jax.custom_vjp
def blockwise_attention(query, key, value, mask: Mask, query_info, key_info, scores: Scores):
    """What `explicit_attention` gives; query [*batch, heads, queries, head_dim], and so on."""
    return _forward(query, key, value, mask, query_info, key_info, scores)[0]


def _forward(query, key, value, mask, query_info, key_info, scores):
    places = mask, query_info, key_info
    forward = _short_forward if _is_short(*places) else _long_forward
    output, log_total = forward(group_heads(query, key.shape[-3]), key, value, places, scores)
    return output.reshape(*query.shape[:-1], value.shape[-1]), log_total


def _forward_and_residuals(query, key, value, mask, query_info, key_info, scores):
    inputs = query, key, value, mask, query_info, key_info, scores
    output, log_total = _forward(*inputs)
    return output, (*inputs, output, log_total)


def _backward(residuals, cotangent):
    """With P the weights and D_i = o_i · do_i: dV = Pᵀ dO, dS = P ⊙ (dO Vᵀ − D), dQ = dS K, …"""
    query, key, value, *places, scores, output, log_total = residuals
    grouped, d_output = (group_heads(x, key.shape[-3]) for x in (query, cotangent))
    products = (output.astype(jnp.float32) * cotangent.astype(jnp.float32)).sum(axis=-1)
    products = products.reshape(log_total.shape)
    backward = _short_backward if _is_short(*places) else _long_backward
    upstream = (d_output, products, log_total)
    *gradients, d_scores = backward(grouped, key, value, *upstream, places, scores)
    inputs = (query, key, value)
    gradients = (d.reshape(x.shape).astype(x.dtype) for d, x in zip(gradients, inputs, strict=True))
    d_scores = jax.tree.map(lambda d, x: d.astype(x.dtype), d_scores, scores)
    return *gradients, None, None, None, d_scores


blockwise_attention.defvjp(_forward_and_residuals, _backward)


# ---- one tile


def _products(query, key):
    """q·k [*batch, kv_heads, group, queries, keys] in float32."""
    return jnp.einsum("...kgqd,...ksd->...kgqs", query, key, preferred_element_type=jnp.float32)


def _masked(scores, visible):
    return scores if visible is None else jnp.where(over_heads(visible), scores, -jnp.inf)


def _powers(scores, largest):
    """exp(score − largest), of which both may be −∞ where a query sees nothing: then 0."""
    return jnp.exp(scores - jnp.where(largest == -jnp.inf, 0.0, largest)[..., None])


def _weighted(powers, value):
    return jnp.einsum(
        "...kgqs,...ksd->...kgqd",
        powers.astype(value.dtype),
        value,
        preferred_element_type=jnp.float32,
    )


def _log_total(largest, total):
    # A query that sees nothing has +inf, so that its weights are exp(−inf) = 0 going back.
    return jnp.where(total == 0.0, jnp.inf, largest + jnp.log(total))


def _gradients(query, key, value, d_output, products, log_total, visible, scores, tile):
    """What a tile adds to the gradients of its queries, keys and values, in float32, and of what is
    learnt of the scores. tile: what `Scores.tile` asks for."""
    float32 = {"preferred_element_type": jnp.float32}
    adjusted, pull_back = jax.vjp(
        lambda products, scores: scores.tile(products, *tile), _products(query, key), scores
    )
    weights = jnp.exp(_masked(adjusted, visible) - log_total[..., None])
    d_weights = jnp.einsum("...kgqd,...ksd->...kgqs", d_output, value, **float32)
    d_products, d_scores = pull_back(weights * (d_weights - products[..., None]))
    weights, d_products = weights.astype(value.dtype), d_products.astype(key.dtype)
    return (
        jnp.einsum("...kgqs,...ksd->...kgqd", d_products, key, **float32),
        jnp.einsum("...kgqs,...kgqd->...ksd", d_products, query, **float32),
        jnp.einsum("...kgqs,...kgqd->...ksd", weights, d_output, **float32),
        d_scores,
    )


def _zeros(scores: Scores):
    """The sum of no gradients of what is learnt of the scores."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), scores)


def _sum(scores: Scores, more: Scores):
    return jax.tree.map(jnp.add, scores, more)


# ---- a short row: one tile for each block of queries


def _key_ranges(mask, query_info: TokenInfo, key_info: TokenInfo, block: int):
    """(queries, keys) as slices, block by block: these queries see no other keys."""
    in_order = query_info.positions is None and key_info.positions is None
    for start in range(0, query_info.length, block):
        stop = min(start + block, query_info.length)
        low, high = 0, key_info.length
        if in_order:
            low, high = mask.key_range(start, stop, key_info.length)
        if low < high:
            yield slice(start, stop), slice(low, high)


def _short_ranges(mask, query_info, key_info):
    block = max(_SMALLEST_BLOCK, -(-query_info.length // _MOST_BLOCKS))
    return _key_ranges(mask, query_info, key_info, block)


def _is_short(mask, query_info, key_info) -> bool:
    return all(
        (rows.stop - rows.start) * (columns.stop - columns.start) <= _LARGEST_TILE
        for rows, columns in _short_ranges(mask, query_info, key_info)
    )


def _short_tiles(mask, query_info, key_info):
    """(queries, keys, visible) tile by tile; visible is None where every pair is visible."""
    for rows, columns in _short_ranges(mask, query_info, key_info):
        visible = mask.tile(query_info, key_info, rows, columns)
        if isinstance(visible, (np.ndarray, np.bool_)) and visible.all():
            visible = None
        yield rows, columns, visible


def _short_forward(query, key, value, places, scores):
    output = jnp.zeros((*query.shape[:-1], value.shape[-1]), query.dtype)
    log_total = jnp.full(query.shape[:-1], jnp.inf, jnp.float32)
    for rows, columns, visible in _short_tiles(*places):
        products = _products(query[..., rows, :], key[..., columns, :])
        adjusted = _masked(scores.tile(products, *places[1:], rows, columns), visible)
        largest = adjusted.max(axis=-1)
        powers = _powers(adjusted, largest)
        total = powers.sum(axis=-1)
        weighted = _weighted(powers, value[..., columns, :])
        weighted /= jnp.where(total == 0.0, 1.0, total)[..., None]
        output = output.at[..., rows, :].set(weighted.astype(output.dtype))
        log_total = log_total.at[..., rows].set(_log_total(largest, total))
    return output, log_total


def _short_backward(query, key, value, d_output, products, log_total, places, scores):
    d_scores = _zeros(scores)
    d_query = jnp.zeros(query.shape, query.dtype)
    d_key, d_value = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    for rows, columns, visible in _short_tiles(*places):
        inputs = query[..., rows, :], key[..., columns, :], value[..., columns, :]
        upstream = d_output[..., rows, :], products[..., rows], log_total[..., rows]
        tile = (*places[1:], rows, columns)
        d_rows, *d_columns, more = _gradients(*inputs, *upstream, visible, scores, tile)
        d_query = d_query.at[..., rows, :].set(d_rows.astype(query.dtype))
        d_key = d_key.at[..., columns, :].add(d_columns[0])
        d_value = d_value.at[..., columns, :].add(d_columns[1])
        d_scores = _sum(d_scores, more)
    return d_query, d_key, d_value, d_scores


# ---- a long row: a loop over tiles of one size


def _long_forward(query, key, value, places, scores):
    def add(sums, queries, keys, visible):
        (output, largest, total), *none = sums
        products = _products(cut(query, queries, -2), cut(key, keys, -2))
        adjusted = _masked(scores.tile(products, *places[1:], queries, keys), visible)
        larger = jnp.maximum(largest, adjusted.max(axis=-1, keepdims=True))
        powers, kept = (_powers(x, larger[..., 0]) for x in (adjusted, largest))
        output = output * kept + _weighted(powers, cut(value, keys, -2))
        return (output, larger, total * kept + powers.sum(axis=-1, keepdims=True)), *none

    total = jnp.zeros((*query.shape[:-1], 1), jnp.float32)
    output = jnp.zeros((*query.shape[:-1], value.shape[-1]), jnp.float32)
    sums = (output, total - jnp.inf, total), (), ()
    output, largest, total = _over_tiles(places, add, sums)[0]
    output /= jnp.where(total == 0.0, 1.0, total)
    return output.astype(query.dtype), _log_total(largest, total)[..., 0]


def _long_backward(query, key, value, d_output, products, log_total, places, scores):
    def add(sums, queries, keys, visible):
        (d_query,), (d_key, d_value), d_scores = sums
        inputs = cut(query, queries, -2), cut(key, keys, -2), cut(value, keys, -2)
        upstream = cut(d_output, queries, -2), cut(products, queries), cut(log_total, queries)
        tile = (*places[1:], queries, keys)
        more, *both, learnt = _gradients(*inputs, *upstream, visible, scores, tile)
        return (d_query + more,), (d_key + both[0], d_value + both[1]), _sum(d_scores, learnt)

    d_query, d_key, d_value = (jnp.zeros(x.shape, jnp.float32) for x in (query, key, value))
    sums = (d_query,), (d_key, d_value), _zeros(scores)
    (d_query,), d_columns, d_scores = _over_tiles(places, add, sums)
    return d_query, *d_columns, d_scores


def _over_tiles(places, add, sums):
    """`add(sums of a tile, its queries, its keys, visible)`, one tile after another.

    sums: arrays [..., queries, dim] and arrays [..., keys, dim], of which a tile's part is read and
    written, and a tree that all tiles share. Where who sees whom depends on arrays, a tile in which
    no one sees anyone is known only as the program runs, and is skipped then.
    """
    mask, *row = places
    lengths = np.int32([side.length for side in row])
    sizes = np.minimum(lengths, (_LOOP_QUERIES, _LOOP_KEYS))
    tiles = np.int32(_long_tiles(mask, *row, *sizes.tolist()))
    ragged = (tiles > lengths - sizes).any()
    depends_on_arrays = len(jax.tree.leaves(places)) > 0

    def step(sums, tile):
        # All tiles are of one size: the last of a ragged row starts before what is new in it.
        start = jnp.minimum(tile, lengths - sizes)
        parts = [DynamicSlice(start[side], sizes[side].item()) for side in (0, 1)]
        visible = mask.tile(*row, *parts)
        if ragged:
            rows, columns = (start[side] + jnp.arange(sizes[side]) >= tile[side] for side in (0, 1))
            visible = visible & rows[:, None] & columns
        elif isinstance(visible, np.bool_) and visible:
            visible = None
        *tiled, shared = sums
        before = *_each(lambda part, x: cut(x, part, -2), parts, tiled), shared
        update = partial(add, queries=parts[0], keys=parts[1], visible=visible)
        if depends_on_arrays and visible is not None:
            after = jax.lax.cond(jnp.any(visible), update, lambda same: same, before)
        else:
            after = update(before)
        *tiled_after, shared = after
        return (*_each(_put, parts, tiled, tiled_after), shared), None

    return jax.lax.scan(step, sums, tiles)[0]


def _long_tiles(mask, query_info, key_info, block: int, key_block: int):
    """[first query, first key] of every tile."""
    return [
        (rows.start, column)
        for rows, columns in _key_ranges(mask, query_info, key_info, block)
        for column in range(columns.start, columns.stop, key_block)
    ]


def _put(part, x, new):
    return jax.lax.dynamic_update_slice_in_dim(x, new, part.start, -2)


def _each(function, parts, *sums):
    """`function` of the part and the arrays, first those of queries and then those of keys."""
    return tuple(
        tuple(function(part, *arrays) for arrays in zip(*some, strict=True))
        for part, *some in zip(parts, *sums, strict=True)
    )
