"""Attention by cuDNN's fused kernel, which replaces masks by flags."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.functional.masks import Causal, Mask, Packed, Padding, Window


def unsupported_reason(
    query: Float[Array, "*batch heads queries d"],
    key: Float[Array, "*batch kv_heads keys d"],
    value: Float[Array, "*batch kv_heads keys v"],
    context: Any,
) -> str | None:
    """Returns why the kernel does not support the arguments, or None if it does."""
    if query.ndim != 4:
        return f"it needs a batch of sequences [batch, heads, length, head_dim], not {query.shape}"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16, not {query.dtype}"
    if query.shape[-1] % 8 or query.shape[-1] > 128:
        return f"it needs a head_dim that is a multiple of 8 and at most 128, not {query.shape[-1]}"
    if key.shape != value.shape or not query.dtype == key.dtype == value.dtype:
        return "it needs keys and values of equal shapes, in the dtype of the queries"
    if context.scores.cap is not None or context.scores.bias is not None:
        return "it supports neither a cap nor a bias of the scores"
    places = (context.queries, context.keys)
    if any(place.positions is not None or place.segments is not None for place in places):
        return "it does not support padding, packed documents or cached positions"
    rules = context.mask.rules()
    if not all(isinstance(rule, (Causal, Window, Packed, Padding)) for rule in rules):
        return f"it does not support the mask {context.mask}"
    if any(isinstance(rule, Window) for rule in rules) and not _is_causal(context.mask):
        return "it supports a sliding window only together with the causal mask"
    if query.shape[-2] != key.shape[-2]:
        return f"it needs equal numbers, not {query.shape[-2]} queries and {key.shape[-2]} keys"
    return None


def fused_attention(
    query: Float[Array, "*batch heads queries d"],
    key: Float[Array, "*batch kv_heads keys d"],
    value: Float[Array, "*batch kv_heads keys v"],
    context: Any,
) -> Float[Array, "*batch heads queries v"]:
    """Computes attention by cuDNN; jax.nn expects the layout [batch, length, heads, head_dim]."""
    windows = [rule.size for rule in context.mask.rules() if isinstance(rule, Window)]
    output = jax.nn.dot_product_attention(
        *(x.swapaxes(1, 2) for x in (query, key, value)),
        scale=context.scores.scale,
        is_causal=_is_causal(context.mask),
        local_window_size=(min(windows) - 1, 0) if windows else None,
        implementation="cudnn",
    )
    return output.swapaxes(1, 2)


def _is_causal(mask: Mask) -> bool:
    return any(isinstance(rule, Causal) for rule in mask.rules())
