"""Attention by cuDNN's fused kernel, where its constraints hold; a mask becomes its flags."""

import jax
import jax.numpy as jnp

from jaxformer.functional.masks import Causal, Packed, Padding, Window
from jaxformer.functional.spread import platform


def unsupported_reason(query, key, value, mask, query_info, key_info, scores) -> str | None:
    """Why the kernel cannot do this, in words, or None if it can."""
    if platform() != "gpu":
        return f"it needs a GPU, and the platform is {platform()!r}"
    if query.ndim != 4:
        return f"it needs a batch of sequences [batch, heads, length, head_dim], not {query.shape}"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16, not {query.dtype}"
    if query.shape[-1] % 8 or query.shape[-1] > 128:
        return f"it needs a head_dim that is a multiple of 8 and at most 128, not {query.shape[-1]}"
    if key.shape != value.shape or not query.dtype == key.dtype == value.dtype:
        return "it needs keys and values of one shape, and of the dtype of the queries"
    if scores.cap is not None or scores.bias is not None:
        return "it has neither a cap nor a bias of the scores"
    places = (query_info, key_info)
    if any(place.positions is not None or place.segments is not None for place in places):
        return "it knows only whole rows without padding, packed documents or cached positions"
    rules = mask.rules()
    if not all(isinstance(rule, (Causal, Window, Packed, Padding)) for rule in rules):
        return f"it has no flag for {mask}"
    if any(isinstance(rule, Window) for rule in rules) and not _is_causal(mask):
        return "it has a sliding window only together with the causal mask"
    if query.shape[-2] != key.shape[-2]:
        return f"{query.shape[-2]} queries and {key.shape[-2]} keys are not of one row"
    return None


def fused_attention(query, key, value, mask, scale):
    """cuDNN flash attention through jax.nn, which wants [batch, length, heads, head_dim]."""
    windows = [rule.size for rule in mask.rules() if isinstance(rule, Window)]
    output = jax.nn.dot_product_attention(
        *(x.swapaxes(1, 2) for x in (query, key, value)),
        scale=scale,
        is_causal=_is_causal(mask),
        local_window_size=(min(windows) - 1, 0) if windows else None,
        implementation="cudnn",
    )
    return output.swapaxes(1, 2)


def _is_causal(mask):
    return any(isinstance(rule, Causal) for rule in mask.rules())
