"""Scaled dot-product attention: softmax(Q Kᵀ / √d + bias + mask) V.

`attend` computes this formula for the queries of one layer. A `Context` holds the mask, the
positions and the scores of the layer. Arrays are [*batch, heads, length, head_dim], because a cache
in this layout is read fastest. `dot_product.dot_product_attention` is the public function for plain
arrays.

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
from jaxformer.functional.hooks import NO_HOOK, HookFunction
from jaxformer.functional.linear.products import contract
from jaxformer.functional.own_gradient import own_gradient
from jaxformer.functional.symbolic import is_known


def attend(
    query: Float[Array, "*batch heads queries d"],
    key: Float[Array, "*key_batch kv_heads keys d"],
    value: Float[Array, "*key_batch kv_heads keys v"],
    context: Context,
    hook: HookFunction = NO_HOOK,
) -> Float[Array, "*batch heads queries v"]:
    """Computes o_i = Σ_j α_ij v_j with α_i = softmax_j(s_ij) over the keys j visible to query i.

    The output of a query without visible keys is 0, with finite gradients. If the batch size of the
    queries is n times the batch size of the keys, n consecutive batch elements share keys and
    values.

    Args:
        query: the queries q.
        key: the keys k; heads must be a multiple of kv_heads.
        value: the values v.
        context: the mask, the positions and the scores.
        hook: receives the scores and the attention weights; only explicit attention calls it.

    Reference:
        Vaswani et al. 2017, §3.2.1; notes, lecture 11 §5.
    """
    context = replace(context, scores=context.scores.for_heads(query.shape[-1]))
    if context.implementation != "step":
        if context.keys.segment_ids is not None:
            context = replace(context, mask=context.mask & Padding())
        query, key, value = _zero_masked(query, key, value, context)
        # Attention in tiles requires static lengths.
        is_known_length = is_known(query.shape[-2], key.shape[-2])
        if context.implementation != "explicit" and is_known_length:
            if key.shape[:-3] != query.shape[:-3]:
                context = replace(context, keys=context.keys.repeat_batch(len(query)))
                key, value = (jnp.repeat(x, len(query) // len(x), axis=0) for x in (key, value))
            attention = _attention_in_tiles(query, key, value, context)
            places = context.mask, context.queries, context.keys
            return attention(query, key, value, *places, context.scores)

    # The code below computes all scores in one array. The queries that share a key head form one
    # axis, because otherwise XLA:CPU transposes the cache at every step.
    grouped = group_heads(query, key)
    folded = grouped.reshape(*key.shape[:-2], -1, key.shape[-1])
    products = contract("...qd,...sd->...qs", folded, key, jnp.float32)
    products = products.reshape(*grouped.shape[:-1], -1)
    visible = over_heads(context.mask(context.queries, context.keys))
    scores = context.scores(products, context.queries, context.keys)
    sink = context.scores.sink_of_groups(key.shape[-3])
    sink = None if sink is None else sink[..., None]
    scores = ungroup_heads(jnp.where(visible, scores, -jnp.inf), query.shape[:-2])
    scores = group_heads(hook(f"{context.name}.scores", scores), key)
    # The mask is applied again, so that an edit of the scores cannot make a masked key visible.
    weights = softmax(jnp.where(visible, scores, -jnp.inf), sink)

    weights = hook(f"{context.name}.weights", ungroup_heads(weights, query.shape[:-2]))
    weights = group_heads(weights, key).reshape(*key.shape[:-2], -1, key.shape[-2])
    output = contract("...qs,...sd->...qd", weights.astype(value.dtype), value)
    return ungroup_heads(output.reshape(*grouped.shape[:-1], -1), query.shape[:-2])


def _zero_masked(
    query: Float[Array, "*batch heads queries d"],
    key: Float[Array, "*key_batch kv_heads keys d"],
    value: Float[Array, "*key_batch kv_heads keys v"],
    context: Context,
) -> tuple[
    Float[Array, "*batch heads queries d"],
    Float[Array, "*key_batch kv_heads keys d"],
    Float[Array, "*key_batch kv_heads keys v"],
]:
    """Zeroes padding, keys that no query attends to, and queries without visible keys.

    Otherwise, a NaN in a query, key or value whose attention weights are 0 would enter the output
    or the gradients, because 0 × NaN is NaN. The function considers only dense masks and segment
    ids, not the other rules of the mask.
    """
    arrays = [rule.array for rule in context.mask.rules() if type(rule) is DenseMask]
    seen_keys, seeing_queries = ([array.any(axis=axis) for array in arrays] for axis in (-2, -1))
    for real, info in ((seen_keys, context.keys), (seeing_queries, context.queries)):
        if info.segment_ids is not None:
            real.append(info.segment_ids != 0)
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
    """Returns the first fused kernel that supports these arguments; None for blockwise attention.

    Raises:
        ValueError: The implementation is "fused", but no kernel supports the arguments.
    """
    if context.implementation == "blockwise" or not is_known(*query.shape, *key.shape):
        return None
    kernels = context.placement.fused_kernels
    kernel, reason = first_supporting(kernels, query, key, value, context)
    if kernel is None and kernels and context.implementation == "fused":
        raise ValueError(f'attention="fused" is not possible: {reason}; use "auto"')
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

    # The kernels define a backward pass, but not forward-mode derivatives. Forward mode therefore
    # differentiates blockwise attention.
    return own_gradient(
        fused,
        partial(jax.vjp, fused),
        lambda pull_back, cotangent: pull_back(cotangent),
        derived=blockwise_attention,
    )
