"""Which models are autoregressive, and why the others are not."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.models.language_model import LanguageModel

# Pairs of positions are evaluated in squares of this side: 8,192 positions take a quarter of a
# second on two cores.
_BLOCK = 1024


def unsupported_reason(model: LanguageModel) -> str | None:
    """Returns why a model cannot generate; None if it is autoregressive."""
    if not model.architecture.generates:
        return "it has no cache"
    if not model.config.causal:
        return "its kernels are centred: they see later tokens"
    if model.mask is None and model.layers is None:
        return None
    for mask in dict.fromkeys(model.masks):
        if edge := forward_edge(mask, model.config.max_length):
            return f"its mask lets position {edge[0]} see the later position {edge[1]}"
    return None


def require_autoregressive(model: Any) -> None:
    """Raises ValueError, with the reason, unless the model is autoregressive."""
    is_model = isinstance(model, LanguageModel)
    if reason := unsupported_reason(model) if is_model else "it has no cache":
        raise ValueError(
            f"{type(model).__name__} is not autoregressive ({reason}), so it can neither generate "
            "nor score token by token"
        )


@cache
def forward_edge(mask: Mask, length: int) -> tuple[int, int] | None:
    """Returns a (query, key) with key > query that the mask allows in a row of this length.

    Returns None if there is none, that is, if the mask is causal for such rows.
    """
    block = min(length, _BLOCK)
    for row in range(0, length, block):
        low, high = mask.key_range(row, min(row + block, length), length)
        for column in range(max(row, low // block * block), high, block):
            with jax.ensure_compile_time_eval():  # the caller may be traced
                later = _later(mask, length, block, row, column)
                if later.any():
                    query, key = divmod(int(later.argmax()), block)
                    return row + query, column + key
    return None


@partial(jax.jit, static_argnames=("mask", "length", "block"))
def _later(
    mask: Mask, length: int, block: int, row: Int[Array, ""], column: Int[Array, ""]
) -> Bool[Array, "block block"]:
    """Returns which keys from `column` on are visible and later, for the queries from `row` on."""
    query, key = (first + jnp.arange(block, dtype=jnp.int32) for first in (row, column))
    visible = mask(TokenInfo(block, query), TokenInfo(block, key))
    is_pair = (key > query[:, None]) & (key < length) & (query < length)[:, None]
    return is_pair & visible
