"""Scaled dot-product attention of plain arrays, with checks of all arguments."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from jaxformer.functional.arguments import check_choice, checks_arguments
from jaxformer.functional.attention.attend import attend
from jaxformer.functional.attention.context import Context
from jaxformer.functional.attention.masks import All, DenseMask, Mask
from jaxformer.functional.attention.own_masks import MaskFunction, as_booleans, as_mask
from jaxformer.functional.attention.platforms import fused_kernels, implementation_here
from jaxformer.functional.attention.scores import DenseBias, Scores
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.hooks import NO_HOOK, HookFunction
from jaxformer.functional.placement import OneDevice

ATTENTION = ("auto", "explicit", "blockwise", "fused")


@checks_arguments()
def dot_product_attention(
    query: Float[Array, "*batch_and_heads queries head_dim"],
    key: Float[Array, "*batch_and_kv_heads keys head_dim"],
    value: Float[Array, "*batch_and_kv_heads keys value_dim"],
    mask: Mask
    | MaskFunction
    | Shaped[Array | np.ndarray, "*mask_batch_and_heads queries keys"]
    | None = None,
    *,
    query_info: TokenInfo | None = None,
    key_info: TokenInfo | None = None,
    scores: Scores = Scores(),  # noqa: B008 (frozen)
    implementation: str = "auto",
    hook: HookFunction = NO_HOOK,
) -> Float[Array, "*batch_and_heads queries value_dim"]:
    """Computes o_i = Σ_j α_ij v_j with α_i = softmax_j(q_i·k_j / √head_dim) over visible keys j.

    The output of a query without visible keys is 0, with finite gradients.

    Args:
        query: [*batch, heads, queries, head_dim], or [queries, head_dim] for one head.
        key: [*batch, kv_heads, keys, head_dim], or [keys, head_dim]; heads must be a multiple of
            kv_heads.
        value: shaped like `key`, except for the size of the last axis.
        mask: which keys each query attends to; all keys if None. A `Mask` is evaluated for the
            positions and documents in `query_info` and `key_info`. A function such as
            `lambda query, key: key <= query` is evaluated for the positions. An array of booleans,
            or of 0 and 1, has the shape [*batch, queries, keys]. An array with as many axes as the
            query has the shape [*batch, heads or 1, queries, keys].
        query_info: positions and documents of the queries; defaults to positions 0, 1, 2, … in one
            document.
        key_info: positions and documents of the keys. Padding is never attended to.
        scores: scale (1/√head_dim if None), soft cap and bias of the scores, and attention sinks
            (`attention.scores`).
        implementation: "explicit" stores all scores in one array. "blockwise" computes the scores
            in tiles, with memory linear in the length. "fused" runs cuDNN or tokamax on a GPU and
            splash on a TPU. "auto" selects a fused kernel that supports the arguments, otherwise
            "blockwise".
        hook: receives the scores and the attention weights (see `functional.hooks`); only explicit
            attention calls it.

    Returns:
        [*batch, heads, queries, value_dim], or [queries, value_dim] for one head.

    Raises:
        ValueError: Shapes, dtypes or the mask do not fit, or `implementation` is unknown.
            "fused" also raises ValueError if no fused kernel of the platform supports the
            arguments.

    Reference:
        Vaswani et al. 2017, §3.2.1; notes, lecture 11 §5.
    """
    is_single = query.ndim == key.ndim == 2
    if is_single:
        query, key, value = query[None], key[None], value[None]
    context = Context(
        All(),
        query_info or TokenInfo(query.shape[-2]),
        key_info or TokenInfo(key.shape[-2]),
        scores,
        implementation,
        placement=OneDevice(fused_kernels()),
    )
    output = _with_mask(query, key, value, mask, context, hook)
    return output[0] if is_single else output


@checks_arguments()
def scaled_dot_product_attention(
    query: Float[Array, "*batch_and_heads queries head_dim"],
    key: Float[Array, "*batch_and_kv_heads keys head_dim"],
    value: Float[Array, "*batch_and_kv_heads keys value_dim"],
    mask: Mask
    | MaskFunction
    | Shaped[Array | np.ndarray, "*mask_batch_and_heads queries keys"]
    | None = None,
    *,
    scale: float | None = None,
) -> Float[Array, "*batch_and_heads queries value_dim"]:
    """Computes softmax(Q Kᵀ · scale) V over the keys that the mask allows.

    Args:
        query: see `dot_product_attention`, which has further options.
        key: see `dot_product_attention`.
        value: see `dot_product_attention`.
        mask: see `dot_product_attention`.
        scale: the factor of the scores; defaults to 1/√head_dim. Lecture 10 §3 uses 1.

    Reference:
        Vaswani et al. 2017, §3.2.1; notes, lecture 11 §5.
    """
    return dot_product_attention(query, key, value, mask, scores=Scores(scale))


# The annotations below give different names to sizes that must be equal, so that `_check`, not the
# annotations, rejects unequal sizes.


def _with_mask(
    query: Float[Array, "*batch heads queries head_dim"],
    key: Float[Array, "*key_batch kv_heads keys key_dim"],
    value: Float[Array, "*value_batch value_heads values value_dim"],
    mask: Mask | MaskFunction | Shaped[Array | np.ndarray, "..."] | None,
    context: Context,
    hook: HookFunction,
) -> Float[Array, "*batch heads queries value_dim"]:
    if isinstance(mask, jax.Array | np.ndarray) and mask.ndim == query.ndim > 2:
        if mask.shape[-3] != 1:
            return _masked_by_head(query, key, value, mask, context, hook)
        mask = mask[..., 0, :, :]  # All heads use the same mask.
    mask = _as_rule(mask)
    _check(query, key, value, mask, context)
    form = implementation_here(context.implementation)
    return attend(query, key, value, replace(context, mask=mask, implementation=form), hook)


def _masked_by_head(
    query: Float[Array, "*batch heads queries head_dim"],
    key: Float[Array, "*key_batch kv_heads keys key_dim"],
    value: Float[Array, "*value_batch value_heads values value_dim"],
    mask: Shaped[Array | np.ndarray, "*batch_and_heads queries keys"],
    context: Context,
    hook: HookFunction,
) -> Float[Array, "*batch heads queries value_dim"]:
    """Applies a different mask to each head, by turning heads into batch elements with one head."""
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if mask.shape[-3] != heads or heads % kv_heads:
        raise ValueError(f"mask has shape {mask.shape}; its axis of heads must be 1 or {heads}")
    key, value = (jnp.repeat(x, heads // kv_heads, axis=-3) for x in (key, value))
    scores = context.scores.for_heads(query.shape[-1])
    if scores.sink is not None:
        scores = replace(scores, sink=scores.sink[..., None])
    if scores.bias is not None:
        bias = jnp.broadcast_to(scores.bias(context.queries, context.keys), mask.shape)
        scores = replace(scores, bias=DenseBias(bias[..., None, :, :]))
    places = [place.with_axis(-2) for place in (context.queries, context.keys)]
    context = replace(context, queries=places[0], keys=places[1], scores=scores)

    def hook_heads(
        name: str, value: Float[Array, "*batch_and_heads 1 queries keys"]
    ) -> Float[Array, "*batch_and_heads 1 queries keys"]:
        return hook(name, value[..., 0, :, :])[..., None, :, :]

    query, key, value = (x[..., None, :, :] for x in (query, key, value))
    return _with_mask(query, key, value, mask, context, hook_heads)[..., 0, :, :]


def _as_rule(mask: Mask | MaskFunction | Shaped[Array | np.ndarray, "..."] | None) -> Mask:
    if isinstance(mask, jax.Array | np.ndarray):
        return DenseMask(as_booleans(mask))
    rule = as_mask(mask)
    return All() if rule is None else rule


def _check(
    query: Float[Array, "..."],
    key: Float[Array, "..."],
    value: Float[Array, "..."],
    mask: Mask,
    context: Context,
) -> None:
    check_choice("implementation", context.implementation, ATTENTION)
    lengths = (query.shape[-2], key.shape[-2])
    for table in (rule.array for rule in mask.rules() if type(rule) is DenseMask):
        axes = (*query.shape[:-3], *lengths)[-table.ndim :] if table.ndim <= query.ndim - 1 else ()
        fits = len(axes) == table.ndim and all(
            size in (1, axis) for size, axis in zip(table.shape[:-2], axes[:-2], strict=True)
        )
        if table.dtype != bool or table.shape[-2:] != lengths or not fits:
            raise ValueError(
                f"mask is {table.dtype} {table.shape}; it must be bool [..., queries, keys], here "
                f"[..., {lengths[0]}, {lengths[1]}], true where a query may see a key"
            )
    for name, places, length in zip(
        ("query_info", "key_info"), (context.queries, context.keys), lengths, strict=True
    ):
        if places.length != length:
            raise ValueError(
                f"{name} describes {places.length} tokens, but {name.removesuffix('_info')} has "
                f"{length} tokens"
            )
        for part, array in (("positions", places.positions), ("segment_ids", places.segment_ids)):
            if array is not None and array.shape[-1:] != (length,):
                raise ValueError(
                    f"{name}.{part} has shape {array.shape}; its last axis must be {length}"
                )
    if query.ndim != key.ndim:
        raise ValueError(
            f"query {query.shape} and key {key.shape} must have the same number of axes"
        )
    if query.shape[-1] != key.shape[-1] or query.shape[:-3] != key.shape[:-3]:
        raise ValueError(
            f"query {query.shape} and key {key.shape} must have the same head_dim (last axis) and "
            "the same batch axes (before the heads)"
        )
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if heads % kv_heads:
        raise ValueError(
            f"query has {heads} heads and key has {kv_heads}; the number of query heads must be a "
            "multiple of the number of key heads"
        )
    sink = context.scores.sink
    if sink is not None and sink.shape[-1:] != (heads,):
        raise ValueError(
            f"scores.sink has shape {sink.shape}; its last axis must be {heads}, "
            "the number of heads"
        )
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"key {key.shape} and value {value.shape} must have equal shapes "
            "except for the last axis"
        )
