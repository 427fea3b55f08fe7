"""The static part of a call of the splash kernel: its mask, its blocks and padded sizes.

A rule about positions becomes a mask of the kernel. Causal masks and windows have masks that the
kernel computes; another rule is evaluated tile by tile while tracing.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxformer.functional.attention.key_ranges import RANGES
from jaxformer.functional.attention.masks import Causal, Mask, Visible, Window
from jaxformer.functional.attention.token_info import TokenInfo

LANES = 128  # blocks of keys are a multiple of it
_LARGEST_BLOCK = 512


def tile_of(rule: Mask, queries: int, keys: int, rows: slice, columns: slice) -> Visible:
    """Evaluates a rule for some queries and keys of a row in order."""
    return rule.tile(TokenInfo(queries), TokenInfo(keys), rows, columns)


@dataclass(frozen=True)
class Plan:
    """The static part of a call of the kernel.

    Attributes:
        rule: which keys each query sees, apart from padding and documents.
        queries: the number of queries.
        keys: the number of keys.
        has_ids: whether queries and keys have ids.
        cap: the cap of the scores.
        interpret: whether to run the kernel on a CPU.
    """

    rule: Mask
    queries: int
    keys: int
    has_ids: bool
    cap: float | None
    interpret: bool

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of queries and keys of the kernel, multiples of their block."""
        # Between queries and keys that differ, a query that sees no key needs padding to see.
        extra = int(self.has_ids and not self.is_square)
        return padded(self.queries), padded(self.keys + extra)

    @property
    def rules(self) -> tuple[Mask, ...]:
        """The rules that `rule` combines."""
        return self.rule.rules()

    @property
    def is_square(self) -> bool:
        """Whether each query sees the key at its own position."""
        return self.queries == self.keys and all(type(rule) in RANGES for rule in self.rules)

    @property
    def is_computed(self) -> bool:
        """Whether the kernel computes the mask of causal rules and windows itself."""
        return self.is_square and all(type(rule) in (Causal, Window) for rule in self.rules)

    @property
    def hides_padding(self) -> bool:
        """Whether the mask alone, without ids, hides padding from all queries of the row."""
        is_causal = self.is_computed and any(type(rule) is Causal for rule in self.rules)
        return is_causal or self.sizes == (self.queries, self.keys)

    def mask(self) -> Any:
        """Returns the mask of the kernel."""
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

        windows = [rule.size for rule in self.rules if type(rule) is Window]
        if not self.rules:
            return masks.FullMask(self.sizes)
        if not self.is_computed:
            return rule_mask(self)
        if not windows:
            return masks.CausalMask(self.sizes)
        later = 0 if len(windows) < len(self.rules) else None
        return masks.LocalMask(self.sizes, (min(windows) - 1, later), 0)

    def kernel(self, num_heads: int) -> Any:
        """Returns the kernel for this number of heads."""
        from jax.experimental.pallas.ops.tpu.splash_attention import (
            splash_attention_kernel as kernels,
        )
        from jax.experimental.pallas.ops.tpu.splash_attention import (
            splash_attention_mask as masks,
        )

        q, k = (block_of(size) for size in self.sizes)
        blocks = kernels.BlockSizes(
            block_q=q,
            block_kv=k,
            block_kv_compute=k,
            block_q_dkv=q,
            block_kv_dkv=k,
            block_kv_dkv_compute=k,
            block_q_dq=q,
            block_kv_dq=k,
        )
        return kernels.make_splash_mha(
            mask=masks.MultiHeadMask([self.mask()] * num_heads),
            block_sizes=blocks,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=self.cap,
            interpret=self.interpret,
        )


def padded(length: int) -> int:
    """Returns the multiple of a block that is at least `length`: of 512 if that adds little."""
    for block in (_LARGEST_BLOCK, _LARGEST_BLOCK // 2):
        size = -(-length // block) * block
        if size - length <= length // 8:
            return size
    return -(-length // LANES) * LANES


def block_of(size: int) -> int:
    """Returns the largest block that divides a padded size."""
    return next(b for b in (_LARGEST_BLOCK, _LARGEST_BLOCK // 2, LANES) if size % b == 0)


def rule_mask(plan: Plan) -> Any:
    """Returns a mask of the kernel that evaluates a rule tile by tile, while tracing."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    @dataclass(frozen=True)
    class RuleMask(masks.Mask):
        plan: Plan

        @property
        def shape(self) -> tuple[int, int]:
            return self.plan.sizes

        def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
            return _padded_tile(self.plan, *idx)

    return RuleMask(plan)


def _padded_tile(plan: Plan, rows: slice, columns: slice) -> np.ndarray:
    """Evaluates the rule; every query may see padding, which has its own id."""
    (row, rows_end), (column, columns_end) = (
        (part.start or 0, size if part.stop is None else part.stop)
        for part, size in zip((rows, columns), plan.sizes, strict=True)
    )
    tile = np.zeros((rows_end - row, columns_end - column), bool)
    tile[:, max(0, plan.keys - column) :] = True
    real = slice(row, min(rows_end, plan.queries)), slice(column, min(columns_end, plan.keys))
    sizes = [max(0, part.stop - part.start) for part in real]
    if all(sizes):
        tile[: sizes[0], : sizes[1]] = tile_of(plan.rule, plan.queries, plan.keys, *real)
    return tile


def by_row(
    plan: Plan,
    query: Float[Array, "batch heads queries d"],
    key: Float[Array, "batch kv_heads keys d"],
    value: Float[Array, "batch kv_heads keys v"],
    *ids: Array,
) -> Float[Array, "batch heads queries v"]:
    """Pads the arrays and calls the kernel for each row of the batch."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    sizes = plan.sizes
    query, key, value = (
        _pad(x, size, -2)
        for x, size in zip((query, key, value), (sizes[0], sizes[1], sizes[1]), strict=True)
    )
    kernel = plan.kernel(query.shape[1])
    if not ids:
        return jax.vmap(lambda q, k, v: kernel(q, k, v))(query, key, value)[:, :, : plan.queries]
    segments = [_pad(x, size, -1) for x, size in zip(ids, sizes, strict=True)]

    def of_row(q: Array, k: Array, v: Array, q_ids: Array, k_ids: Array) -> Array:
        return kernel(q, k, v, kernels.SegmentIds(q_ids, k_ids))

    return jax.vmap(of_row)(query, key, value, *segments)[:, :, : plan.queries]


def _pad(x: Array, size: int, axis: int) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)
