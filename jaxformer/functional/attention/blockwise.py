"""Exact attention in tiles of queries × keys, on any device; the default on CPU.

The mask's `key_range` limits the keys of each tile: with a causal mask only corners of tiles lie
above the diagonal. The forward pass stores the output and, for each query, log Σ exp(score). The
backward pass recomputes the weights from them (Dao et al. 2022).

A short row has one tile for each of at most 16 blocks of queries, and the program unrolls the
tiles.

A long row has many tiles of one fixed size, which one loop processes: see `long_rows`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxformer.functional.attention.heads import group_heads
from jaxformer.functional.attention.long_rows import long_backward, long_forward
from jaxformer.functional.attention.masks import Mask, Visible
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
from jaxformer.functional.attention.token_info import TokenInfo, cut, put
from jaxformer.functional.own_gradient import own_gradient

# Queries of a block in a short row: a quarter of the row within these bounds, and more if there
# would be too many blocks. With 1,024 tokens and 12 heads of 64 features, blocks of 128 queries,
# not 64, took half the time, and 0.93 of it with gradients (two cores of a Xeon).
_SMALLEST_BLOCK, _LARGEST_BLOCK, _MOST_BLOCKS = 64, 128, 16
# A row is short if none of its tiles has more scores per head than this: up to 2,048 causal tokens.
# With 4,096 tokens on two cores of a Xeon, the loop took three quarters of the time of the unrolled
# program, and a quarter of its time to compile.
_LARGEST_TILE = 2**18


def _attention(
    query: Float[Array, "*batch heads queries d"],
    key: Float[Array, "*batch kv_heads keys d"],
    value: Float[Array, "*batch kv_heads keys v"],
    mask: Mask,
    query_info: TokenInfo,
    key_info: TokenInfo,
    scores: Scores,
) -> Float[Array, "*batch heads queries v"]:
    """Computes the same as `attend.attend` with explicit attention, tile by tile.

    Args:
        query: [*batch, heads, queries, head_dim].
        key: [*batch, kv_heads, keys, head_dim].
        value: [*batch, kv_heads, keys, value_dim].
        mask: which of the keys each query sees.
        query_info: positions and documents of the queries.
        key_info: positions and documents of the keys.
        scores: scale, cap and bias, with the scale set.
    """
    return _forward(query, key, value, mask, query_info, key_info, scores)[0]


def _forward(
    query: Float[Array, "*batch heads queries d"],
    key: Float[Array, "*batch kv_heads keys d"],
    value: Float[Array, "*batch kv_heads keys v"],
    mask: Mask,
    query_info: TokenInfo,
    key_info: TokenInfo,
    scores: Scores,
) -> tuple[Float[Array, "*batch heads queries v"], tuple[Any, ...]]:
    """Returns the output, and what the backward pass reads: all arguments and log Σ exp(score).

    The softmax with a sink s is the softmax over the keys times σ(log Σ exp(score) − s).
    """
    places = Places(mask, query_info, key_info)
    if jax.tree.leaves(places):
        # The masks of all tiles depend on the documents alone. Without the barrier, JAX computes
        # them once for all layers and stores them, which takes the memory of all scores of a row.
        query, places = jax.lax.optimization_barrier((query, places))
    forward = _short_forward if _is_short(places) else long_forward
    output, log_total = forward(Operands(group_heads(query, key), key, value), places, scores)
    if (sink := scores.sink_of_groups(key.shape[-3])) is not None:
        share = jax.nn.sigmoid(log_total - sink)
        output = (output * share[..., None]).astype(output.dtype)
        log_total = jnp.logaddexp(log_total, sink)
    output = output.reshape(*query.shape[:-1], value.shape[-1])
    return output, (query, key, value, places, scores, output, log_total)


def _backward(
    residuals: tuple[Any, ...], cotangent: Float[Array, "*batch heads queries v"]
) -> tuple[Array, Array, Array, None, None, None, Scores]:
    """Computes the gradients from the residuals of the forward pass.

    With weights P and D_i = o_i · do_i: dV = Pᵀ dO, dS = P ⊙ (dO Vᵀ − D), dQ = dS K, dK = dSᵀ Q.
    A sink is a score whose value is 0, so its gradient is −Σ_i p_i D_i for its weights p_i.
    """
    query, key, value, places, scores, output, log_total = residuals
    products = (output.astype(jnp.float32) * cotangent.astype(jnp.float32)).sum(axis=-1)
    products = products.reshape(log_total.shape)
    operands = Operands(group_heads(query, key), key, value)
    upstream = Upstream(group_heads(cotangent, key), products, log_total)
    backward = _short_backward if _is_short(places) else long_backward
    d_query, d_key, d_value, d_scores = backward(operands, upstream, places, scores)
    if (sink := scores.sink_of_groups(key.shape[-3])) is not None:
        d_sink = -(jnp.exp(sink - log_total) * products).sum(axis=-1)
        d_sink = d_sink.reshape(*d_sink.shape[:-2], -1)
        extra = tuple(range(d_sink.ndim - scores.sink.ndim))
        d_scores = replace(d_scores, sink=d_sink.sum(axis=extra))
    d_scores = jax.tree.map(lambda d, x: d.astype(x.dtype), d_scores, scores)
    d_query = d_query.reshape(query.shape).astype(query.dtype)
    d_key, d_value = d_key.astype(key.dtype), d_value.astype(value.dtype)
    return d_query, d_key, d_value, None, None, None, d_scores


blockwise_attention = own_gradient(_attention, _forward, _backward)


# ---- a short row: one tile for each block of queries


def _short_ranges(places: Places) -> Iterator[tuple[slice, slice]]:
    quarter, least = (-(-places.queries.length // n) for n in (4, _MOST_BLOCKS))
    block = min(max(quarter, _SMALLEST_BLOCK), _LARGEST_BLOCK)
    return key_ranges(places, max(block, least))


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
        output = put(output, rows, weighted.astype(output.dtype), -2)
        log_total = put(log_total, rows, log_total_of(largest, total))
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
        d_query = put(d_query, rows, d_rows.astype(query.dtype), -2)
        d_key = put(d_key, columns, cut(d_key, columns, -2) + d_columns[0], -2)
        d_value = put(d_value, columns, cut(d_value, columns, -2) + d_columns[1], -2)
        d_scores = add_gradients(d_scores, more)
    return Gradients(d_query, d_key, d_value, d_scores)
