"""Scaled dot-product attention: softmax(Q Kᵀ / √d + bias + mask) V.

`attend` computes it for the queries of one layer; `Context` says what they attend to. The axis of
heads precedes the axis of positions, [*batch, heads, length, head_dim], because a cache in this
layout is read fastest. `dot_product.dot_product_attention` is the same for single arrays.

Grouped heads (Ainslie et al. 2023): keys and values may have fewer heads than the queries. Each key
head then serves num_heads / num_kv_heads consecutive query heads.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.functional.attention.blockwise import blockwise_attention
from jaxformer.functional.attention.context import Context
from jaxformer.functional.attention.formula import softmax
from jaxformer.functional.attention.fused_kernels import FusedKernel, first_supporting
from jaxformer.functional.attention.heads import group_heads, over_heads, ungroup_heads
from jaxformer.functional.attention.masks import DenseMask, Mask, Padding
from jaxformer.functional.attention.scores import Scores
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.linear.products import contract
from jaxformer.functional.own_gradient import own_gradient
from jaxformer.functional.symbolic import is_known
from jaxformer.functional.taps import NO_TAP, TapFunction


def attend(
    query: Float[Array, "*batch heads queries d"],
    key: Float[Array, "*rows kv_heads keys d"],
    value: Float[Array, "*rows kv_heads keys v"],
    context: Context,
    tap: TapFunction = NO_TAP,
) -> Float[Array, "*batch heads queries v"]:
    """Computes o_i = Σ_j α_ij v_j with α_i = softmax_j(s_ij) over the keys j that query i sees.

    The output of a query that sees no key is zero, and its gradients are finite. If the batch has n
    times as many elements as the keys have rows, n consecutive elements share a row.

    Args:
        query: q.
        key: k; kv_heads divides heads.
        value: v.
        context: what the queries attend to.
        tap: receives the weights, with explicit attention.

    Reference:
        Vaswani et al. 2017, §3.2.1; notes, lecture 11 §5.
    """
    context = replace(context, scores=context.scores.for_heads(query.shape[-1]))
    if context.implementation != "step":
        if context.keys.segments is not None:
            context = replace(context, mask=context.mask & Padding())
        query, key, value = _zero_masked(query, key, value, context)
        is_known_length = is_known(query.shape[-2], key.shape[-2])  # blocks need a known length
        if context.implementation != "explicit" and is_known_length:
            if key.shape[:-3] != query.shape[:-3]:
                context = replace(context, keys=context.keys.repeat_rows(len(query)))
                key, value = (jnp.repeat(x, len(query) // len(x), axis=0) for x in (key, value))
            attention = _attention_in_tiles(query, key, value, context)
            places = context.mask, context.queries, context.keys
            return attention(query, key, value, *places, context.scores)

    # All scores at once. All queries that share a key head are one axis: otherwise XLA:CPU
    # transposes a cache at every step.
    grouped = group_heads(query, key)
    folded = grouped.reshape(*key.shape[:-2], -1, key.shape[-1])
    products = contract("...qd,...sd->...qs", folded, key, jnp.float32)
    products = products.reshape(*grouped.shape[:-1], -1)
    visible = over_heads(context.mask(context.queries, context.keys))
    scores = context.scores(products, context.queries, context.keys)
    sink = context.scores.sink_of_groups(key.shape[-3])
    sink = None if sink is None else sink[..., None]
    weights = softmax(jnp.where(visible, scores, -jnp.inf), sink)

    weights = tap(context.point, ungroup_heads(weights, query.shape[:-2]))
    weights = group_heads(weights, key).reshape(*key.shape[:-2], -1, key.shape[-2])
    output = contract("...qs,...sd->...qd", weights.astype(value.dtype), value)
    return ungroup_heads(output.reshape(*grouped.shape[:-1], -1), query.shape[:-2])


def _zero_masked(
    query: Float[Array, "*batch heads queries d"],
    key: Float[Array, "*rows kv_heads keys d"],
    value: Float[Array, "*rows kv_heads keys v"],
    context: Context,
) -> tuple[
    Float[Array, "*batch heads queries d"],
    Float[Array, "*rows kv_heads keys d"],
    Float[Array, "*rows kv_heads keys v"],
]:
    """Zeroes padding, keys that no query sees and queries that see no key.

    The attention weights there are 0, but 0 × NaN is NaN, forward and backward. Visibility is read
    from dense masks and segments only.
    """
    arrays = [rule.array for rule in context.mask.rules() if type(rule) is DenseMask]
    seen_keys, seeing_queries = ([array.any(axis=axis) for array in arrays] for axis in (-2, -1))
    for real, info in ((seen_keys, context.keys), (seeing_queries, context.queries)):
        if info.segments is not None:
            real.append(info.segments != 0)
    for is_seen in seen_keys:
        key, value = (jnp.where(is_seen[..., None, :, None], x, 0) for x in (key, value))
    for sees in seeing_queries:
        query = jnp.where(sees[..., None, :, None], query, 0)
    return query, key, value


def chosen_kernel(
    query: Float[Array, "*batch heads queries d"],
    key: Float[Array, "*batch kv_heads keys d"],
    value: Float[Array, "*batch kv_heads keys v"],
    context: Context,
) -> FusedKernel | None:
    """Returns the first fused kernel that supports these arguments; None: blockwise attention.

    Raises:
        ValueError: the implementation is "fused", but no kernel supports the arguments.
    """
    if context.implementation == "blockwise" or not is_known(*query.shape, *key.shape):
        return None
    kernels = context.placement.fused_kernels
    kernel, reason = first_supporting(kernels, query, key, value, context)
    if kernel is None and kernels and context.implementation == "fused":
        raise ValueError(f'attention "fused" cannot run this: {reason}')
    return kernel


def _attention_in_tiles(
    query: Float[Array, "*batch heads queries d"],
    key: Float[Array, "*batch kv_heads keys d"],
    value: Float[Array, "*batch kv_heads keys v"],
    context: Context,
) -> Callable[..., Float[Array, "*batch heads queries v"]]:
    """Returns the fused kernel for these arguments, or `blockwise_attention`."""
    kernel = chosen_kernel(query, key, value, context)
    if kernel is None:
        return blockwise_attention

    def fused(
        query: Array,
        key: Array,
        value: Array,
        mask: Mask,
        queries: TokenInfo,
        keys: TokenInfo,
        scores: Scores,
    ) -> Array:
        of_arguments = replace(context, mask=mask, queries=queries, keys=keys, scores=scores)
        return kernel.attention(query, key, value, of_arguments)

    # Kernels have a gradient, but no derivative in forward mode.
    return own_gradient(
        fused,
        partial(jax.vjp, fused),
        lambda pull_back, cotangent: pull_back(cotangent),
        derived=blockwise_attention,
    )
