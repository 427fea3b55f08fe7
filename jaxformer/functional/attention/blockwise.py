"""Blockwise attention: exact attention in tiles of queries × keys, the default on CPU.

The mask's `key_range` limits the keys of each tile, so that a causal mask skips tiles above the
diagonal. The forward pass stores the output and, for each query, log Σ exp(score). The backward
pass recomputes the attention weights from the stored values (Dao et al. 2022).

A short sequence is split into at most 16 blocks of queries, each with one tile. The compiled
program unrolls the loop over the tiles.

A long sequence is split into many tiles of a fixed size, which a loop processes (see
`long_sequences`).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxformer.functional.attention.heads import group_heads
from jaxformer.functional.attention.long_sequences import long_backward, long_forward
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
from jaxformer.functional.attention.token_info import TokenInfo, cut, put
from jaxformer.functional.own_gradient import own_gradient

# A block of a short sequence has a quarter of the queries, but at least 64, and at most 128 unless
# the sequence would then have more than 16 blocks. With 1,024 tokens and 12 heads of 64 features on
# two Xeon cores, blocks of 128 instead of 64 queries halved the time of the forward pass. Both
# passes together took 7% less time.
_SMALLEST_BLOCK, _LARGEST_BLOCK, _MOST_BLOCKS = 64, 128, 16
# The maximum number of scores per head in a tile of a short sequence. With a causal mask, sequences
# of up to 2,048 tokens count as short. With 4,096 tokens on two Xeon cores, a loop over tiles took
# 75% of the run time and 25% of the compile time of the unrolled program.
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
    """Computes explicit attention (`attend.attend`) in tiles.

    Args:
        query: [*batch, heads, queries, head_dim].
        key: [*batch, kv_heads, keys, head_dim].
        value: [*batch, kv_heads, keys, value_dim].
        mask: which keys each query attends to.
        query_info: positions and documents of the queries.
        key_info: positions and documents of the keys.
        scores: scale, soft cap and bias; the scale must not be None.
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
    """Returns the output, and the residuals: all arguments, the output and log Σ exp(score).

    The softmax with a sink s is the softmax over the keys times σ(log Σ exp(score) − s).
    """
    places = Places(mask, query_info, key_info)
    if jax.tree.leaves(places):
        # The masks of tiles depend only on the documents. Without the barrier, JAX computes all
        # masks once and stores them for all layers, which takes as much memory as all scores.
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

    With attention weights P and D_i = o_i · do_i, the gradients are dV = Pᵀ dO, dS = P ⊙ (dO Vᵀ −
    D), dQ = dS K and dK = dSᵀ Q. The value vector of a sink is 0, so the gradient of the sink is
    −Σ_i p_i D_i, where p_i is the attention weight of the sink for query i.
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


# ---- short sequences: one tile for each block of queries


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
    """Yields (queries, keys, visible) of each tile; `visible` is None if all pairs are visible."""
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
        part = slice_operands(operands, rows, columns)
        adjusted = bind_score_tile(places, rows, columns)(
            scores, query_key_products(part.query, part.key)
        )
        adjusted = masked(adjusted, visible)
        largest = adjusted.max(axis=-1)
        powers = exp_scores(adjusted, largest)
        total = powers.sum(axis=-1)
        weighted = weighted_sum(powers, part.value)
        weighted /= jnp.where(total == 0.0, 1.0, total)[..., None]
        output = put(output, rows, weighted.astype(output.dtype), -2)
        log_total = put(log_total, rows, log_sum_exp(largest, total))
    return output, log_total


def _short_backward(
    operands: Operands, upstream: Upstream, places: Places, scores: Scores
) -> Gradients:
    query, key, value = operands
    d_scores = zero_gradients(scores)
    d_query = jnp.zeros(query.shape, query.dtype)
    d_key, d_value = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    for rows, columns, visible in _short_tiles(places):
        part, known = slice_operands(operands, rows, columns), slice_upstream(upstream, rows)
        tile = bind_score_tile(places, rows, columns)
        d_rows, *d_columns, more = tile_gradients(part, known, visible, scores, tile)
        d_query = put(d_query, rows, d_rows.astype(query.dtype), -2)
        d_key = put(d_key, columns, cut(d_key, columns, -2) + d_columns[0], -2)
        d_value = put(d_value, columns, cut(d_value, columns, -2) + d_columns[1], -2)
        d_scores = add_gradients(d_scores, more)
    return Gradients(d_query, d_key, d_value, d_scores)
