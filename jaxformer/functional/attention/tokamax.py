"""Attention by tokamax's fused kernel for GPUs.

The kernel takes a range of keys for each query. Unlike cuDNN's kernel, tokamax's kernel supports
soft caps of the scores, and windows in packed or padded sequences. tokamax is an optional
dependency (the extra `kernels`) and needs Python 3.12.

- The kernel's output for a query without keys is undefined. This module assigns a range with one
  key to such a query, and replaces the output of the query by zeros.
- If the keys of a query do not form one range, which is known only at run time, blockwise attention
  computes the output.
- A bias of the scores is not supported, because its gradients would need an array of all scores.

Reference:
    tokamax.dot_product_attention (without ranges); PallasMosaicGpuFlashAttention (with ranges).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.functional.attention.context import Context
from jaxformer.functional.attention.fused_kernels import (
    blockwise_if,
    unsupported_arrays,
    unsupported_scores,
)
from jaxformer.functional.attention.key_ranges import (
    DISTANCES,
    RANGES,
    has_other_positions,
    is_packed,
    key_ranges,
    positional,
)

# float16 is excluded: with a cap of at most 60 the kernel does not subtract the maximum, so
# exp(score) overflows.
DTYPES = (jnp.bfloat16,)
# Largest head_dim by compute capability (9 is Hopper, 10 is data-centre Blackwell). For wider heads
# the kernels of the backward pass do not compile.
MOST_HEAD_DIM = {9: 256, 10: 192}
INSTALL = "pip install -e '.[kernels]', on Python 3.12 or newer"


@dataclass(frozen=True)
class Tokamax:
    """Fused attention kernel of tokamax.

    Attributes:
        generation: the major compute capability of the GPUs, such as 9 for Hopper.
        compute: the kernel, a function (query, key, value, ranges, scale, cap) → output; defaults
            to the kernel of the installed tokamax.
    """

    generation: int
    compute: Callable[..., Array] | None = None
    name: str = "tokamax"

    def unsupported_reason(
        self,
        query: Float[Array, "*batch heads queries d"],
        key: Float[Array, "*batch kv_heads keys d"],
        value: Float[Array, "*batch kv_heads keys v"],
        context: Context,
    ) -> str | None:
        """See `FusedKernel`."""
        reason = unsupported_arrays(query, key, value, DTYPES)
        reason = reason or unsupported_scores(context.scores) or _unsupported(context)
        if reason is None and key.shape != value.shape:
            reason = "the kernel needs keys and values of equal shapes"
        most, head_dim = MOST_HEAD_DIM.get(self.generation, 0), query.shape[-1]
        if reason is None and most == 0:
            reason = (
                "the kernel needs a Hopper or data-centre Blackwell GPU (compute "
                "capability 9 or 10)"
            )
        if reason is None and head_dim > most:
            reason = f"the kernel needs a head_dim of at most {most}, not {head_dim}"
        return reason or (missing() if self.compute is None else None)

    def attention(
        self,
        query: Float[Array, "batch heads queries d"],
        key: Float[Array, "batch kv_heads keys d"],
        value: Float[Array, "batch kv_heads keys v"],
        context: Context,
    ) -> Float[Array, "batch heads queries v"]:
        """See `FusedKernel`."""
        ranges = key_ranges(context, len(query))
        on_device = partial(
            _attention_in_ranges,
            self.compute or tokamax_attention,
            context.scores.factor,
            context.scores.cap,
        )

        def fused(query: Array, key: Array, value: Array) -> Array:
            per_device = context.placement.per_device
            return per_device(on_device, query, key, value, ranges.low, ranges.high)

        if context.keys.segment_ids is None:
            return fused(query, key, value)
        return blockwise_if(~ranges.are_exact, fused, (query, key, value), context)


def _unsupported(context: Context) -> str | None:
    if context.scores.bias is not None:
        return "the kernel does not support a bias of the scores"
    if has_other_positions(context):
        return "the kernel does not support cached or explicit positions"
    for rule in positional(context.mask).rules():
        if type(rule) not in RANGES:
            return (
                "the kernel needs a mask that allows one range of keys per query, "
                f"not {type(rule).__name__}"
            )
        if context.queries.positions is not None and type(rule) not in DISTANCES:
            return (
                f"the kernel does not support the mask {rule} if positions restart in each document"
            )
    if is_packed(context) and context.queries.length != context.keys.length:
        return "the kernel supports packed documents only in self-attention"
    return None


@cache
def missing() -> str | None:
    """Returns why tokamax cannot be used, or None if it can."""
    try:
        installed = version("tokamax")
    except PackageNotFoundError:
        return f"tokamax is not installed ({INSTALL})"
    try:
        _classes()
    # The classes are private to tokamax, and importing them needs a matching version of JAX.
    except Exception as error:
        return f"tokamax {installed} does not work here; use tokamax 0.0.17: {error!r} ({INSTALL})"
    return None


def _classes() -> tuple[Any, Any]:
    """Returns tokamax's mask class and the class of its GPU kernel."""
    # pyrefly: ignore[missing-import] (an optional dependency)
    from tokamax._src.ops.attention.base import Mask

    # pyrefly: ignore[missing-import]
    from tokamax._src.ops.attention.pallas_mosaic_gpu import PallasMosaicGpuFlashAttention

    return Mask, PallasMosaicGpuFlashAttention


def _attention_in_ranges(
    compute: Callable[..., Array],
    scale: float,
    cap: float | None,
    query: Float[Array, "batch heads queries d"],
    key: Float[Array, "batch kv_heads keys d"],
    value: Float[Array, "batch kv_heads keys v"],
    low: Int[Array, "batch queries"],
    high: Int[Array, "batch queries"],
) -> Float[Array, "batch heads queries v"]:
    """Calls the kernel and replaces the output of queries without visible keys by zeros."""
    sees = high > low
    substitute = jnp.minimum(jnp.arange(low.shape[-1], dtype=jnp.int32), key.shape[-2] - 1)
    low, high = jnp.where(sees, low, substitute), jnp.where(sees, high, substitute + 1)
    output = compute(query, key, value, (low, high), scale, cap)
    return jnp.where(sees[:, None, :, None], output, 0)


def tokamax_attention(
    query: Float[Array, "batch heads queries d"],
    key: Float[Array, "batch kv_heads keys d"],
    value: Float[Array, "batch kv_heads keys v"],
    ranges: tuple[Int[Array, "batch queries"], Int[Array, "batch queries"]],
    scale: float,
    cap: float | None,
    implementation: Callable[..., Any] | None = None,
) -> Float[Array, "batch heads queries v"]:
    """Computes attention by the installed tokamax.

    Args:
        query: the queries.
        key: the keys.
        value: the values.
        ranges: (low, high); each query attends to the keys low … high − 1.
        scale: factor of the products.
        cap: soft cap of the scaled products, or None.
        implementation: one of tokamax's implementations; defaults to its GPU kernel.
    """
    mask, kernel = _classes()
    low, high = (x[:, None, :] for x in ranges)  # The new axis is for heads.
    output = (implementation or kernel())(
        *(x.swapaxes(1, 2) for x in (query, key, value)),  # [batch, length, heads, head_dim]
        mask=mask(k_start=low, k_end=high),
        logits_scale=scale,
        logits_soft_cap=cap,
    )
    return output.swapaxes(1, 2)
