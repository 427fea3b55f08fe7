"""Exact attention, one block of queries at a time (any device; the default on CPU).

For a block of queries, only the keys that the mask's `key_range` allows are touched: with a causal
mask nothing above the diagonal is computed but a corner of the last tile. The forward pass keeps
the output and, per query, log Σ exp(score); the backward pass computes the weights again from it
(Dao et al. 2022), so [heads, length, length] never exists for the whole sequence.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.functional.heads import group_heads, over_heads
from jaxformer.functional.masks import Mask, Places

_SMALLEST_BLOCK, _MOST_BLOCKS = 64, 16


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def blockwise_attention(query, key, value, mask: Mask, query_places, key_places, scale: float):
    """What `explicit_attention` gives; query [*batch, heads, queries, head_dim], and so on."""
    return _forward(query, key, value, mask, query_places, key_places, scale)[0]


def _tiles(mask, query_places: Places, key_places: Places):
    """(queries, keys, visible) block by block; visible is None where every pair is visible."""
    block = max(_SMALLEST_BLOCK, -(-query_places.length // _MOST_BLOCKS))
    in_order = query_places.positions is None and key_places.positions is None
    for start in range(0, query_places.length, block):
        stop = min(start + block, query_places.length)
        low, high = 0, key_places.length
        if in_order:
            low, high = mask.key_range(start, stop, key_places.length)
        if low < high:
            visible = mask.tile(query_places, key_places, slice(start, stop), slice(low, high))
            if isinstance(visible, (np.ndarray, np.bool_)) and visible.all():
                visible = None
            yield slice(start, stop), slice(low, high), visible


def _scores(query, key, visible, scale):
    """Masked scores [*batch, kv_heads, group, queries, keys] in float32."""
    scores = scale * jnp.einsum(
        "...kgqd,...ksd->...kgqs", query, key, preferred_element_type=jnp.float32
    )
    return scores if visible is None else jnp.where(over_heads(visible), scores, -jnp.inf)


def _forward(query, key, value, mask, query_places, key_places, scale):
    grouped = group_heads(query, key.shape[-3])
    output = jnp.zeros((*grouped.shape[:-1], value.shape[-1]), query.dtype)
    log_total = jnp.full(grouped.shape[:-1], jnp.inf, jnp.float32)
    for rows, columns, visible in _tiles(mask, query_places, key_places):
        scores = _scores(grouped[..., rows, :], key[..., columns, :], visible, scale)
        largest = scores.max(axis=-1)
        largest = jnp.where(largest == -jnp.inf, 0.0, largest)
        powers = jnp.exp(scores - largest[..., None])
        total = powers.sum(axis=-1)
        weighted = jnp.einsum(
            "...kgqs,...ksd->...kgqd",
            powers.astype(value.dtype),
            value[..., columns, :],
            preferred_element_type=jnp.float32,
        )
        weighted /= jnp.where(total == 0.0, 1.0, total)[..., None]
        output = output.at[..., rows, :].set(weighted.astype(output.dtype))
        # A query that sees nothing keeps +inf, so that its weights are exp(−inf) = 0 going back.
        log_total = log_total.at[..., rows].set(
            jnp.where(total == 0.0, jnp.inf, largest + jnp.log(total))
        )
    return output.reshape(*query.shape[:-1], value.shape[-1]), log_total


def _forward_and_residuals(query, key, value, mask, query_places, key_places, scale):
    output, log_total = _forward(query, key, value, mask, query_places, key_places, scale)
    return output, (query, key, value, mask, query_places, key_places, output, log_total)


def _backward(scale, residuals, cotangent):
    """With P the weights and D_i = o_i · do_i: dV = Pᵀ dO, dS = P ⊙ (dO Vᵀ − D), dQ = dS K, …"""
    query, key, value, mask, query_places, key_places, output, log_total = residuals
    grouped, d_output = (group_heads(x, key.shape[-3]) for x in (query, cotangent))
    products = (output.astype(jnp.float32) * cotangent.astype(jnp.float32)).sum(axis=-1)
    products = products.reshape(log_total.shape)
    d_query = jnp.zeros(grouped.shape, query.dtype)
    d_key, d_value = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    wide = {"preferred_element_type": jnp.float32}
    for rows, columns, visible in _tiles(mask, query_places, key_places):
        q, k, v = grouped[..., rows, :], key[..., columns, :], value[..., columns, :]
        d_o = d_output[..., rows, :]
        weights = jnp.exp(_scores(q, k, visible, scale) - log_total[..., rows, None])
        d_weights = jnp.einsum("...kgqd,...ksd->...kgqs", d_o, v, **wide)
        d_scores = weights * (d_weights - products[..., rows, None]) * scale
        weights, d_scores = weights.astype(value.dtype), d_scores.astype(key.dtype)
        d_value = d_value.at[..., columns, :].add(
            jnp.einsum("...kgqs,...kgqd->...ksd", weights, d_o, **wide)
        )
        d_key = d_key.at[..., columns, :].add(
            jnp.einsum("...kgqs,...kgqd->...ksd", d_scores, q, **wide)
        )
        d_query = d_query.at[..., rows, :].set(jnp.einsum("...kgqs,...ksd->...kgqd", d_scores, k))
    d_query = d_query.reshape(query.shape)
    return d_query, d_key.astype(key.dtype), d_value.astype(value.dtype), None, None, None


blockwise_attention.defvjp(_forward_and_residuals, _backward)
