"""Attention by tokamax's fused kernel for GPUs, which takes a range of keys for each query.

It supports what cuDNN lacks: caps of the scores, and windows in packed or padded rows. tokamax is
an optional dependency, the extra `kernels`. It needs Python 3.12.

- The output of a query without keys is undefined. Such queries get the range of one key, and their
  output is replaced by zeros.
- Rows that do not have one range per query are known only at run time. Blockwise attention computes
  them.
- A bias of the scores is refused: the gradients would need an array of all scores.

Reference:
    tokamax.dot_product_attention, which takes no ranges; PallasMosaicGpuFlashAttention, which does.
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

# In float16, exp(score) overflows: with a cap of at most 60 the kernel subtracts no maximum.
DTYPES = (jnp.bfloat16,)
# By compute capability: Hopper is 9, data-centre Blackwell 10. The kernels for the gradients do not
# compile for wider heads.
MOST_HEAD_DIM = {9: 256, 10: 192}
INSTALL = 'pip install "jaxformer[kernels]", on Python 3.12 or newer'


@dataclass(frozen=True)
class Tokamax:
    """tokamax's kernel, a `FusedKernel`.

    Attributes:
        generation: the major compute capability of the GPUs, such as 9 for Hopper.
        compute: the kernel: (query, key, value, ranges, scale, cap) → output. None: that of the
            installed tokamax.
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
            reason = "it needs keys and values of equal shapes"
        most, head_dim = MOST_HEAD_DIM.get(self.generation, 0), query.shape[-1]
        if reason is None and most == 0:
            reason = "it needs a Hopper or data-centre Blackwell GPU (compute capability 9 or 10)"
        if reason is None and head_dim > most:
            reason = f"it needs a head_dim of at most {most}, not {head_dim}"
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
        of_rows = partial(
            _attention_in_ranges,
            self.compute or tokamax_attention,
            context.scores.factor,
            context.scores.cap,
        )

        def fused(query: Array, key: Array, value: Array) -> Array:
            per_device = context.placement.per_device
            return per_device(of_rows, query, key, value, ranges.low, ranges.high)

        if context.keys.segments is None:
            return fused(query, key, value)
        return blockwise_if(~ranges.are_exact, fused, (query, key, value), context)


def _unsupported(context: Context) -> str | None:
    if context.scores.bias is not None:
        return "it does not support a bias of the scores without an array of all scores"
    if has_other_positions(context):
        return "it does not support cached or other positions"
    for rule in positional(context.mask).rules():
        if type(rule) not in RANGES:
            return f"it does not support the mask {type(rule).__name__}, which is not a range"
        if context.queries.positions is not None and type(rule) not in DISTANCES:
            return f"it does not support the mask {rule} together with positions in documents"
    if is_packed(context) and context.queries.length != context.keys.length:
        return "it supports packed documents only in self-attention"
    return None


@cache
def missing() -> str | None:
    """Returns why tokamax cannot be used, or None."""
    try:
        installed = version("tokamax")
    except PackageNotFoundError:
        return f"it is not installed ({INSTALL})"
    try:
        _classes()
    except Exception as error:  # the classes are private, and importing them needs a fitting JAX
        return f"tokamax {installed} cannot be used, 0.0.17 can: {error!r} ({INSTALL})"
    return None


def _classes() -> tuple[Any, Any]:
    """Returns tokamax's class of masks and that of its kernel for GPUs."""
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
    """Calls the kernel; queries that see no key give zeros."""
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
        ranges: the first key of each query, and the one after the last.
        scale: factor of the products.
        cap: bound of the scaled products; None: no cap.
        implementation: one of tokamax's implementations; None: its kernel for GPUs.
    """
    mask, kernel = _classes()
    low, high = (x[:, None, :] for x in ranges)  # an axis of heads
    output = (implementation or kernel())(
        *(x.swapaxes(1, 2) for x in (query, key, value)),  # [batch, length, heads, head_dim]
        mask=mask(k_start=low, k_end=high),
        logits_scale=scale,
        logits_soft_cap=cap,
    )
    return output.swapaxes(1, 2)
