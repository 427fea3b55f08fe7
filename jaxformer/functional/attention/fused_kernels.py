"""What the fused attention kernels of the platforms have in common.

A fused kernel computes attention in one call, without an array of all scores. `cudnn`, `tokamax`
and `splash` are such kernels.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float

from jaxformer.functional.attention.blockwise import blockwise_attention
from jaxformer.functional.attention.context import Context
from jaxformer.functional.attention.scores import Scores


@runtime_checkable
class FusedKernel(Protocol):
    """A fused attention kernel; `attention.attend` calls it.

    Attributes:
        name: the kernel's name.
    """

    @property
    def name(self) -> str:
        """See `FusedKernel`."""

    def unsupported_reason(
        self,
        query: Float[Array, "*batch heads queries d"],
        key: Float[Array, "*batch kv_heads keys d"],
        value: Float[Array, "*batch kv_heads keys v"],
        context: Context,
    ) -> str | None:
        """Returns why the kernel does not support the arguments, or None if it does."""

    def attention(
        self,
        query: Float[Array, "batch heads queries d"],
        key: Float[Array, "batch kv_heads keys d"],
        value: Float[Array, "batch kv_heads keys v"],
        context: Context,
    ) -> Float[Array, "batch heads queries v"]:
        """Computes attention.

        Args:
            query: the queries.
            key: the keys; zero where they are padding.
            value: the values; zero where the keys are padding.
            context: what the queries attend to, an `attention.Context`.
        """


def first_supporting(
    kernels: Sequence[FusedKernel],
    query: Float[Array, "*batch heads queries d"],
    key: Float[Array, "*batch kv_heads keys d"],
    value: Float[Array, "*batch kv_heads keys v"],
    context: Context,
) -> tuple[FusedKernel | None, str]:
    """Returns the first kernel that supports the arguments, and why those before it do not."""
    reasons: list[str] = []
    for kernel in kernels:
        reason = kernel.unsupported_reason(query, key, value, context)
        if reason is None:
            return kernel, "; ".join(reasons)
        reasons.append(f"{kernel.name}: {reason}")
    return None, "; ".join(reasons)


def unsupported_arrays(
    query: Float[Array, "*batch heads queries d"],
    key: Float[Array, "*batch kv_heads keys d"],
    value: Float[Array, "*batch kv_heads keys v"],
    dtypes: Sequence[DTypeLike],
) -> str | None:
    """Returns why a kernel for batches in `dtypes` does not support the arrays, or None."""
    if query.ndim != 4:
        return f"it needs a batch of sequences [batch, heads, length, head_dim], not {query.shape}"
    names = [np.dtype(dtype).name for dtype in dtypes]
    if query.dtype.name not in names:
        return f"it needs {' or '.join(names)}, not {query.dtype}"
    if 0 in (query.shape[-2], key.shape[-2]):
        return "it needs at least one query and one key"
    if not query.dtype == key.dtype == value.dtype:
        return "it needs queries, keys and values of one dtype"
    return None


def unsupported_scores(scores: Scores) -> str | None:
    """Returns why a kernel that computes scale, cap and bias itself lacks the scores, or None."""
    if scores.sink is not None:
        return "it does not support attention sinks"
    if type(scores) is Scores:
        return None
    return f"it does not support scores of the class {type(scores).__name__}"


def blockwise_if(
    unsupported: Bool[Array, ""],
    fused: Callable[[Array, Array, Array], Array],
    arrays: tuple[Array, Array, Array],
    context: Context,
) -> Float[Array, "batch heads queries v"]:
    """Computes attention by a kernel, or blockwise if at run time the kernel does not support it.

    Args:
        unsupported: whether to compute blockwise.
        fused: (query, key, value) → the output of the kernel.
        arrays: query, key and value.
        context: what the queries attend to.
    """

    def blockwise(query: Array, key: Array, value: Array) -> Array:
        rest = (context.mask, context.queries, context.keys, context.scores)
        return blockwise_attention(query, key, value, *rest)

    return jax.lax.cond(unsupported, blockwise, fused, *arrays)
