"""Interface and helpers of the fused attention kernels.

A fused kernel computes attention in one call, without an array of all scores. The modules `cudnn`,
`tokamax` and `splash` contain fused kernels.
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
    """Interface of a fused attention kernel, which `attention.attend` calls.

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
            key: the keys; zero at padding.
            value: the values; zero at padding.
            context: the mask, the positions and the scores.
        """


def first_supporting(
    kernels: Sequence[FusedKernel],
    query: Float[Array, "*batch heads queries d"],
    key: Float[Array, "*batch kv_heads keys d"],
    value: Float[Array, "*batch kv_heads keys v"],
    context: Context,
) -> tuple[FusedKernel | None, str]:
    """Returns the first kernel that supports the arguments, and why earlier kernels do not.

    The kernel is None if no kernel supports the arguments. One string contains all reasons.
    """
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
    """Returns why a kernel that accepts `dtypes` does not support the arrays, or None."""
    if query.ndim != 4:
        return f"the kernel needs arrays [batch, heads, length, head_dim], not {query.shape}"
    names = [np.dtype(dtype).name for dtype in dtypes]
    if query.dtype.name not in names:
        return f"the kernel needs {' or '.join(names)}, not {query.dtype}"
    if 0 in (query.shape[-2], key.shape[-2]):
        return "the kernel needs at least one query and one key"
    if not query.dtype == key.dtype == value.dtype:
        return "the kernel needs queries, keys and values of one dtype"
    return None


def unsupported_scores(scores: Scores) -> str | None:
    """Returns why a fused kernel does not support `scores`, or None if it does.

    The function assumes that the kernel supports a scale, a soft cap and a bias.
    """
    if scores.sink is not None:
        return "the kernel does not support attention sinks"
    if type(scores) is Scores:
        return None
    return f"the kernel does not support scores of the class {type(scores).__name__}"


def blockwise_if(
    unsupported: Bool[Array, ""],
    fused: Callable[[Array, Array, Array], Array],
    arrays: tuple[Array, Array, Array],
    context: Context,
) -> Float[Array, "batch heads queries v"]:
    """Runs a fused kernel, or blockwise attention if `unsupported` is true at run time.

    Args:
        unsupported: whether the kernel does not support the arguments.
        fused: function (query, key, value) → output of the kernel.
        arrays: query, key and value.
        context: the mask, the positions and the scores.
    """

    def blockwise(query: Array, key: Array, value: Array) -> Array:
        rest = (context.mask, context.queries, context.keys, context.scores)
        return blockwise_attention(query, key, value, *rest)

    return jax.lax.cond(unsupported, blockwise, fused, *arrays)
