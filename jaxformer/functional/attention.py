"""Scaled dot-product attention, softmax(Q Kᵀ / √d + bias + mask) V, behind one function.

Shapes: heads stand before positions, [*batch, heads, length, head_dim], since that is how a cache
is read fastest. Grouped heads (Ainslie et al. 2023): key and value may have fewer heads than the
query, each shared by num_heads / num_kv_heads consecutive query heads.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxformer.functional import fused
from jaxformer.functional.blockwise import blockwise_attention
from jaxformer.functional.heads import group_heads, over_heads
from jaxformer.functional.masks import All, DenseMask, Mask, Padding, TokenInfo
from jaxformer.functional.scores import DenseBias, Scores
from jaxformer.functional.taps import no_tap

ATTENTION = ("auto", "explicit", "blockwise", "fused")


def dot_product_attention(
    query: Float[Array, "*batch heads queries head_dim"],
    key: Float[Array, "*batch kv_heads keys head_dim"],
    value: Float[Array, "*batch kv_heads keys value_dim"],
    mask: Mask | Bool[Array, "*rows_and_heads queries keys"] | None = None,
    *,
    query_info: TokenInfo | None = None,
    key_info: TokenInfo | None = None,
    scores: Scores = Scores(),  # noqa: B008 (frozen)
    implementation: str = "auto",
    tap=no_tap,
) -> Float[Array, "*batch heads queries value_dim"]:
    """o_i = Σ_j α_ij v_j with α_i = softmax_j(scale · q_i·k_j over the keys that i may see).

    mask: a rule of `masks`, asked about `query_info` and `key_info` (by default positions
    0, 1, 2, … without padding); or a bool array, true where a query may see a key, of shape
    [*batch, queries, keys] or, with as many axes as the query, [*batch, heads or 1, queries, keys];
    None: everyone sees everyone. Keys that are padding by `key_info` are seen by no one, whatever
    the rule. A query that may see nothing gets zeros, and its gradients are finite.
    scores: the scale, 1/√head_dim unless given, and a cap or a bias of the products if there is one
    (`functional.scores`). Errors: ValueError naming the shapes that do not fit.
    implementation: "explicit" (this formula, whole), "blockwise" (in tiles, never all scores at
    once: memory linear in the length), "fused" (cuDNN; raises ValueError with the reason where it
    cannot), or "auto": fused on a GPU where it can, else blockwise.
    Source: Vaswani et al. 2017, §3.2.1; notes, lecture 11 §5.
    """
    query_info = query_info or TokenInfo(query.shape[-2])
    key_info = key_info or TokenInfo(key.shape[-2])
    scores = scores.for_heads(query.shape[-1])
    if not isinstance(mask, Mask) and np.ndim(mask) == query.ndim > 2:
        if mask.shape[-3] != 1:
            how = (query_info, key_info, scores, implementation, tap)
            return _masked_by_head(query, key, value, mask, *how)
        mask = mask[..., 0, :, :]  # one for all heads
    mask = _as_rule(mask)
    _check(query, key, value, mask, query_info, key_info, implementation)
    if key_info.segments is not None:
        mask = mask & Padding()
    query, key, value = _zero_masked(query, key, value, mask, query_info, key_info)
    inputs = (query, key, value, mask, query_info, key_info, scores)
    implementation = _resolved(implementation, *inputs)
    if implementation == "fused":
        return fused.fused_attention(query, key, value, mask, scores.scale)
    if implementation == "blockwise":
        return _blockwise(*inputs)
    return explicit_attention(*inputs, tap=tap)


def _resolved(implementation, *inputs) -> str:
    """The implementation that "auto" stands for; ValueError for "fused" where it cannot run."""
    if implementation not in ("auto", "fused"):
        return implementation
    reason = fused.unsupported_reason(*inputs)
    if implementation == "fused" and reason:
        raise ValueError(f'attention "fused" cannot run this: {reason}')
    return "blockwise" if reason else "fused"


def _blockwise(*inputs):
    try:
        return blockwise_attention(*inputs)
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise ValueError(
            "blockwise attention has no forward-mode derivative (jvp, jacfwd); use "
            'implementation="explicit", in a model Execution(attention="explicit")'
        ) from error


def _masked_by_head(query, key, value, mask, query_info, key_info, scores, implementation, tap):
    """A mask of its own for each head: heads become rows of a batch, of one head each."""
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if mask.shape[-3] != heads or heads % kv_heads:
        raise ValueError(
            f"mask is {mask.shape}; with an axis of heads that must be 1 or {heads}, the query's"
        )
    key, value = (jnp.repeat(x, heads // kv_heads, axis=-3) for x in (key, value))
    if scores.bias is not None:
        bias = jnp.broadcast_to(scores.bias(query_info, key_info), mask.shape)
        scores = replace(scores, bias=DenseBias(bias[..., None, :, :]))
    places = [place.with_axis(-2) for place in (query_info, key_info)]

    def tap_heads(name, weights):
        return tap(name, weights[..., 0, :, :])[..., None, :, :]

    output = dot_product_attention(
        *(x[..., None, :, :] for x in (query, key, value)),
        mask,
        query_info=places[0],
        key_info=places[1],
        scores=scores,
        implementation=implementation,
        tap=tap_heads,
    )
    return output[..., 0, :, :]


def explicit_attention(query, key, value, mask, query_info, key_info, scores, *, tap=no_tap):
    """The formula as it is written, all scores at once.

    The weights pass through tap("attention.weights") as float32 [*batch, heads, queries, keys].
    """
    grouped = group_heads(query, key.shape[-3])
    products = jnp.einsum(
        "...kgqd,...ksd->...kgqs", grouped, key, preferred_element_type=jnp.float32
    )
    visible = over_heads(mask(query_info, key_info))
    scores = scores(products, query_info, key_info)
    weights = _softmax(jnp.where(visible, scores, -jnp.inf))

    heads = (*query.shape[:-1], key.shape[-2])
    weights = tap("attention.weights", weights.reshape(heads)).reshape(weights.shape)
    output = jnp.einsum("...kgqs,...ksd->...kgqd", weights.astype(value.dtype), value)
    return output.reshape(*query.shape[:-1], value.shape[-1])


def few_queries_attention(
    query: Float[Array, "batch heads new head_dim"],
    keys: Float[Array, "*rows_and_heads slots head_dim"],
    values: Float[Array, "*rows_and_heads slots value_dim"],
    visible: Bool[Array, "rows some_new slots"],
    scores: Scores = Scores(),  # noqa: B008 (frozen)
    *,
    tap=no_tap,
) -> Float[Array, "batch heads new value_dim"]:
    """The formula for a few queries over a cache, all scores at once.

    keys, values: axes of size 1 of [rows, kv_heads] may be left out. Each row of keys serves batch
    / rows queries in turn (hypotheses of one source). A bias of the scores is one that has been
    asked, of [batch or 1, heads, new, slots]. All queries that share a key head are folded
    into its query positions, so that every product is one batched matrix product.
    """
    batch, heads, new, head_dim = query.shape
    rows, slots = len(visible), keys.shape[-2]
    kv_heads = keys.size // (rows * slots * head_dim)
    by_row = (rows, batch // rows, kv_heads, heads // kv_heads, new)

    def folded(x):
        """[rows, kv_heads, served by each, group, new, …]."""
        return x.reshape(*by_row, -1).swapaxes(1, 2)

    def unfolded(x):
        x = x.reshape(rows, kv_heads, batch // rows, *by_row[3:], -1)
        return x.swapaxes(1, 2).reshape(batch, heads, new, -1)

    products = jnp.einsum(
        "...qd,...sd->...qs",
        folded(query).reshape(*keys.shape[:-2], -1, head_dim),
        keys,
        preferred_element_type=jnp.float32,
    )
    scaled = scores.for_heads(head_dim).scaled(products)
    if scores.bias is not None:
        bias = jnp.broadcast_to(scores.bias.array, (batch, heads, new, slots))
        scaled += folded(bias).reshape(scaled.shape)
    in_folds = (rows, kv_heads, batch // rows, heads // kv_heads, new, slots)
    visible = jnp.broadcast_to(visible[:, None, None, None], in_folds).reshape(scaled.shape)
    weights = _softmax(jnp.where(visible, scaled, -jnp.inf))
    weights = tap("attention.weights", unfolded(weights))
    weights = folded(weights).reshape(products.shape)
    return unfolded(jnp.einsum("...qs,...sd->...qd", weights.astype(values.dtype), values))


def _softmax(scores):
    """softmax over the last axis, zeros where all of it is −∞."""
    largest = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    powers = jnp.exp(scores - jnp.where(largest == -jnp.inf, 0.0, largest))
    total = powers.sum(axis=-1, keepdims=True)
    return powers / jnp.where(total == 0.0, 1.0, total)


def _zero_masked(query, key, value, mask, query_info, key_info):
    """Zero what no one may see and what sees nothing: 0 × NaN is NaN, forward and backward."""
    arrays = [rule.array for rule in mask.rules() if isinstance(rule, DenseMask)]
    seen_keys, seeing_queries = ([array.any(axis=axis) for array in arrays] for axis in (-2, -1))
    for real, info in ((seen_keys, key_info), (seeing_queries, query_info)):
        if info.segments is not None:
            real.append(info.segments != 0)
    for is_seen in seen_keys:
        key, value = (jnp.where(is_seen[..., None, :, None], x, 0) for x in (key, value))
    for sees in seeing_queries:
        query = jnp.where(sees[..., None, :, None], query, 0)
    return query, key, value


def _as_rule(mask) -> Mask:
    if mask is None:
        return All()
    return mask if isinstance(mask, Mask) else DenseMask(mask)


def _check(query, key, value, mask, query_info, key_info, implementation):
    if implementation not in ATTENTION:
        raise ValueError(f"implementation is {implementation!r}; it must be one of {ATTENTION}")
    lengths = (query.shape[-2], key.shape[-2])
    for table in (rule.array for rule in mask.rules() if isinstance(rule, DenseMask)):
        if table.dtype != bool or table.shape[-2:] != lengths:
            raise ValueError(
                f"mask is {table.dtype} {table.shape}; it must be bool [..., queries, keys], here "
                f"[..., {lengths[0]}, {lengths[1]}], true where a query may see a key"
            )
    for name, places, length in zip(
        ("query_info", "key_info"), (query_info, key_info), lengths, strict=True
    ):
        if places.length != length:
            raise ValueError(f"{name} are of {places.length} tokens; there are {length}")
    if query.shape[-1] != key.shape[-1] or query.shape[:-3] != key.shape[:-3]:
        raise ValueError(
            f"query {query.shape} and key {key.shape} must agree in head_dim, their last axis, and "
            "in the axes before the heads"
        )
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if heads % kv_heads:
        raise ValueError(
            f"query has {heads} heads and key {kv_heads}; the first must be a multiple of the other"
        )
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"key {key.shape} and value {value.shape} must agree up to the last axis")
