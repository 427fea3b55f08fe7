"""Uses the masks of a model's layers to check whether the model is autoregressive."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.models.language_model import LanguageModel

# Side length of the square tiles in which masks are evaluated. Evaluating a mask of 8,192 positions
# takes 0.25 seconds on two cores.
_BLOCK = 1024


def unsupported_reason(model: LanguageModel) -> str | None:
    """Returns why a model cannot generate text; None for autoregressive models."""
    if not model.architecture.generates:
        return "it does not have a cache"
    if model.mask is None and model.layers is None:
        return None
    for mask in dict.fromkeys(model.masks):
        if edge := forward_edge(mask, model.config.max_length):
            return f"position {edge[0]} attends to the later position {edge[1]}"
    return None


def require_autoregressive(model: Any) -> None:
    """Raises ValueError if the model is not autoregressive. The message contains the reason."""
    is_model = isinstance(model, LanguageModel)
    if reason := unsupported_reason(model) if is_model else "it does not have a cache":
        raise ValueError(
            f"{type(model).__name__} is not autoregressive ({reason}), so it can neither generate "
            "nor score token by token"
        )


@cache
def forward_edge(mask: Mask, length: int) -> tuple[int, int] | None:
    """Returns a pair (query, key) with key > query that the mask allows, or None.

    A result of None means that the mask is causal for sequences of this length.
    """
    block = min(length, _BLOCK)
    for row in range(0, length, block):
        low, high = mask.key_range(row, min(row + block, length), length)
        for column in range(max(row, low // block * block), high, block):
            # Inside jit, `later` would otherwise be a tracer.
            with jax.ensure_compile_time_eval():
                later = _later(mask, length, block, row, column)
                if later.any():
                    query, key = divmod(int(later.argmax()), block)
                    return row + query, column + key
    return None


@partial(jax.jit, static_argnames=("mask", "length", "block"))
def _later(
    mask: Mask, length: int, block: int, row: Int[Array, ""], column: Int[Array, ""]
) -> Bool[Array, "block block"]:
    """Returns one tile of the mask, True where a query attends to a later key."""
    query, key = (first + jnp.arange(block, dtype=jnp.int32) for first in (row, column))
    visible = mask(TokenInfo(block, query), TokenInfo(block, key))
    is_pair = (key > query[:, None]) & (key < length) & (query < length)[:, None]
    return is_pair & visible
