"""Attention by JAX's splash kernel for TPUs, which skips tiles that the mask excludes.

The kernel takes a static mask and an id for each query and key. A query attends to the keys that
the mask allows and that have the same id as the query. The mask depends only on positions; the ids
separate documents and mark padding. This module handles three limits of the kernel:

- Lengths must be multiples of 128, and multiples of 512 are faster. Sequences are padded at the
  end. The added tokens have id 0, unless the mask alone hides these tokens, as a causal mask does.
- The kernel's output for a query without visible keys is undefined. This module assigns the id 0 to
  such a query, so that the query attends to padding, whose values are zeros.
- A window counts the tokens of a document, but the kernel's mask counts the tokens of the sequence.
  The counts differ if a document contains padding, which is known only at run time. In this case,
  blockwise attention computes the output.

Reference:
    jax.experimental.pallas.ops.tpu.splash_attention; Dao et al. 2022.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
    RUN_TIME,
    has_other_positions,
    is_packed,
    only_rise,
    positional,
    ranges,
)
from jaxformer.functional.attention.masks import Causal, Mask, Visible, Window
from jaxformer.functional.attention.token_info import TokenInfo

# The size of a block of keys must be a multiple of LANES.
LANES = 128
_LARGEST_BLOCK = 512


def visible_tile(rule: Mask, queries: int, keys: int, rows: slice, columns: slice) -> Visible:
    """Evaluates a rule for a part of the queries and keys, with positions 0, 1, 2, … in order."""
    return rule.tile(TokenInfo(queries), TokenInfo(keys), rows, columns)


@dataclass(frozen=True)
class Plan:
    """Static arguments of a call of the splash kernel.

    Attributes:
        rule: which keys each query attends to, apart from padding and documents.
        queries: the number of queries.
        keys: the number of keys.
        has_ids: whether queries and keys have ids.
        cap: soft cap of the scaled products, or None.
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
        """The padded numbers of queries and keys, multiples of their block sizes."""
        # In cross-attention, queries without visible keys attend to one additional padding key.
        extra = int(self.has_ids and not self.is_square)
        return padded(self.queries), padded(self.keys + extra)

    @property
    def rules(self) -> tuple[Mask, ...]:
        """The masks that `rule` combines."""
        return self.rule.rules()

    @property
    def is_square(self) -> bool:
        """Whether each query attends to the key at its own position."""
        return self.queries == self.keys and all(type(rule) in RANGES for rule in self.rules)

    @property
    def is_computed(self) -> bool:
        """Whether the kernel computes the mask from positions, as for causal masks and windows."""
        return self.is_square and all(type(rule) in (Causal, Window) for rule in self.rules)

    @property
    def hides_padding(self) -> bool:
        """Whether the mask alone hides the added tokens, so that queries and keys need no ids."""
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

        q, k = (largest_block(size) for size in self.sizes)
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
    """Rounds `length` up to a multiple of 512 or 256 if that adds little padding, else of 128."""
    for block in (_LARGEST_BLOCK, _LARGEST_BLOCK // 2):
        size = -(-length // block) * block
        if size - length <= length // 8:
            return size
    return -(-length // LANES) * LANES


def largest_block(size: int) -> int:
    """Returns the largest block size that divides a padded size."""
    return next(b for b in (_LARGEST_BLOCK, _LARGEST_BLOCK // 2, LANES) if size % b == 0)


def rule_mask(plan: Plan) -> Any:
    """Returns a mask that the splash kernel evaluates by tiles while tracing."""
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
    """Evaluates the rule for a tile. The result is True for padded keys, which the ids hide."""
    (row, rows_end), (column, columns_end) = (
        (part.start or 0, size if part.stop is None else part.stop)
        for part, size in zip((rows, columns), plan.sizes, strict=True)
    )
    tile = np.zeros((rows_end - row, columns_end - column), bool)
    tile[:, max(0, plan.keys - column) :] = True
    real = slice(row, min(rows_end, plan.queries)), slice(column, min(columns_end, plan.keys))
    sizes = [max(0, part.stop - part.start) for part in real]
    if all(sizes):
        tile[: sizes[0], : sizes[1]] = visible_tile(plan.rule, plan.queries, plan.keys, *real)
    return tile


def attend_each_sequence(
    plan: Plan,
    query: Float[Array, "batch heads queries d"],
    key: Float[Array, "batch kv_heads keys d"],
    value: Float[Array, "batch kv_heads keys v"],
    *ids: Array,
) -> Float[Array, "batch heads queries v"]:
    """Pads the arrays and calls the kernel for each batch element."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    sizes = plan.sizes
    query, key, value = (
        _pad(x, size, -2)
        for x, size in zip((query, key, value), (sizes[0], sizes[1], sizes[1]), strict=True)
    )
    kernel = plan.kernel(query.shape[1])
    if not ids:
        return jax.vmap(lambda q, k, v: kernel(q, k, v))(query, key, value)[:, :, : plan.queries]
    segment_ids = [_pad(x, size, -1) for x, size in zip(ids, sizes, strict=True)]

    def attend_one(q: Array, k: Array, v: Array, q_ids: Array, k_ids: Array) -> Array:
        return kernel(q, k, v, kernels.SegmentIds(q_ids, k_ids))

    return jax.vmap(attend_one)(query, key, value, *segment_ids)[:, :, : plan.queries]


def _pad(x: Array, size: int, axis: int) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


DTYPES = (jnp.bfloat16, jnp.float32)


@dataclass(frozen=True)
class Splash:
    """Splash attention kernel for TPUs.

    Attributes:
        interpret: whether to run the kernel on a CPU, for tests.
    """

    interpret: bool = False
    name: str = "splash"

    def unsupported_reason(
        self,
        query: Float[Array, "*batch heads queries d"],
        key: Float[Array, "*batch kv_heads keys d"],
        value: Float[Array, "*batch kv_heads keys v"],
        context: Context,
    ) -> str | None:
        """See `FusedKernel`."""
        reason = unsupported_arrays(query, key, value, DTYPES)
        return reason or unsupported_scores(context.scores) or _unsupported(context)

    def attention(
        self,
        query: Float[Array, "batch heads queries d"],
        key: Float[Array, "batch kv_heads keys d"],
        value: Float[Array, "batch kv_heads keys v"],
        context: Context,
    ) -> Float[Array, "batch heads queries v"]:
        """See `FusedKernel`."""
        if context.queries.positions is None:
            return splash_attention(query, key, value, context, self.interpret)
        # Without padding inside a document, two tokens have the same distance in the document and
        # in the sequence.
        queries, keys = (replace(x, positions=None) for x in (context.queries, context.keys))
        by_sequence = replace(context, queries=queries, keys=keys)
        fused = partial(splash_attention, context=by_sequence, interpret=self.interpret)
        has_gaps = ~only_rise(context.keys.segment_ids)
        return blockwise_if(has_gaps, fused, (query, key, value), context)


def _unsupported(context: Context) -> str | None:
    if context.scores.bias is not None:
        return "the kernel does not support a bias of the scores"
    rules = context.mask.rules()
    by_distance = all(type(rule) in (*DISTANCES, *RUN_TIME) for rule in rules)
    if has_other_positions(context):
        return "the kernel does not support cached or explicit positions"
    if context.queries.positions is not None and not by_distance:
        return (
            "the kernel needs a mask that depends only on distances between tokens if positions "
            "restart in each document"
        )
    is_self = context.queries.length == context.keys.length
    if is_packed(context) and not is_self:
        return "the kernel supports packed documents only in self-attention"
    for rule in rules:
        if type(rule) in RUN_TIME:
            continue
        if not _is_static(rule):
            return (
                f"the kernel does not support the mask {type(rule).__name__}, which is not static"
            )
        if context.keys.segment_ids is not None and type(rule) not in RANGES:
            return f"the kernel does not support padding or documents together with the mask {rule}"
        if context.keys.segment_ids is not None and not is_self:
            return f"the kernel does not support padding of a source together with the mask {rule}"
    return None


def _is_static(rule: Mask) -> bool:
    return not jax.tree.leaves(rule) and type(rule).__call__ is not Mask.__call__


def splash_attention(
    query: Float[Array, "batch heads queries d"],
    key: Float[Array, "batch kv_heads keys d"],
    value: Float[Array, "batch kv_heads keys v"],
    context: Context,
    interpret: bool = False,
) -> Float[Array, "batch heads queries v"]:
    """Computes attention by the splash kernel, whose windows count the tokens of the sequence.

    Args:
        query: the queries.
        key: the keys; zero at padding.
        value: the values; zero at padding.
        context: the mask, the positions and the scores.
        interpret: whether to run the kernel on a CPU, for tests.
    """
    plan = Plan(
        positional(context.mask),
        context.queries.length,
        context.keys.length,
        has_ids=False,
        cap=context.scores.cap,
        interpret=interpret,
    )
    ids = visible_ids(context, plan, len(query))
    plan = replace(plan, has_ids=ids is not None)
    scaled = (context.scores.factor * query.astype(jnp.float32)).astype(query.dtype)
    arrays = [scaled, key, value] + ([] if ids is None else [ids.query, ids.key])
    return context.placement.per_device(partial(attend_each_sequence, plan), *arrays)


@dataclass(frozen=True)
class Ids:
    """Ids of queries and keys; a query attends to keys with the same id.

    Attributes:
        query: ids of the queries; 0 for a query without visible keys.
        key: ids of the keys; 0 for padding.
    """

    query: Int[Array, "batch queries"]
    key: Int[Array, "batch keys"]


def visible_ids(context: Context, plan: Plan, batch_size: int) -> Ids | None:
    """Returns the ids; None if each query has a visible key and the mask hides all padding."""
    queries, keys = context.queries, context.keys
    if keys.segment_ids is None:
        sees = sees_statically(plan.rule, queries.length, keys.length)
        if sees.all() and plan.hides_padding:
            return None
        query, key = sees, np.ones(keys.length)
    elif is_packed(context):
        # Each query attends to its own token, so every query has a visible key.
        query, key = queries.segment_ids, keys.segment_ids
    else:
        real = keys.segment_ids != 0
        before = jnp.pad(jnp.cumsum(real, axis=-1), [(0, 0)] * (real.ndim - 1) + [(1, 0)])
        low, high = ranges(plan.rule, queries.length, keys.length)
        query, key = before[..., high] > before[..., low], real

    def batched(x: Any) -> Array:
        return jnp.broadcast_to(jnp.asarray(x, jnp.int32), (batch_size, x.shape[-1]))

    return Ids(batched(query), batched(key))


def sees_statically(rule: Mask, queries: int, keys: int) -> np.ndarray:
    """Returns, for each query, whether the rule allows at least one key."""
    if all(type(part) in RANGES for part in rule.rules()):
        low, high = ranges(rule, queries, keys)
        return high > low
    blocks = (slice(i, min(i + 256, queries)) for i in range(0, queries, 256))
    found = []
    for rows in blocks:
        tile = np.asarray(visible_tile(rule, queries, keys, rows, slice(0, keys)))
        found.append(np.broadcast_to(tile, (rows.stop - rows.start, keys)).any(axis=1))
    return np.concatenate(found)
