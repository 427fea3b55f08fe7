"""Attention by JAX's splash kernel for TPUs, which skips the tiles that the mask excludes.

The kernel takes a static mask and an id for each query and key: a query sees the keys of its own id
that the mask allows. Rules about positions become the mask, documents and padding become ids. What
the kernel leaves open is settled here:

- It needs multiples of 128 positions. Rows are padded at the end, with id 0.
- The output of a query that sees no key is undefined. Such queries get id 0 and see padding, whose
  values are zeros.
- A window counts the tokens of a document, the kernel's mask those of the row. They differ if a
  document has padding inside it, which is known only at run time. Blockwise attention computes such
  rows.

Reference:
    jax.experimental.pallas.ops.tpu.splash_attention; Dao et al. 2022.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.functional.blockwise import blockwise_attention
from jaxformer.functional.masks import All, Causal, Mask, Near, Packed, Padding, Prefix, Window
from jaxformer.functional.token_info import TokenInfo

LANES = 128  # blocks of keys are a multiple of it
_LARGEST_BLOCK = 512
_DISTANCES = (Causal, Window, Near)  # rules about the distance of two tokens
_RANGES = (*_DISTANCES, Prefix)  # rules that allow one range of keys


def unsupported_reason(
    query: Float[Array, "*batch heads queries d"],
    key: Float[Array, "*batch kv_heads keys d"],
    value: Float[Array, "*batch kv_heads keys v"],
    context: Any,
) -> str | None:
    """Returns why the kernel does not support the arguments, or None if it does."""
    if query.ndim != 4:
        return f"it needs a batch of sequences [batch, heads, length, head_dim], not {query.shape}"
    if query.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it needs bfloat16 or float32, not {query.dtype}"
    if not query.dtype == key.dtype == value.dtype:
        return "it needs queries, keys and values of one dtype"
    if context.scores.bias is not None:
        return "it does not support a bias of the scores"
    rules = context.mask.rules()
    by_distance = all(isinstance(rule, (*_DISTANCES, Packed, Padding)) for rule in rules)
    if context.queries.positions is not None and not (context.in_order and by_distance):
        return "it supports positions in documents only for masks that compare distances"
    is_self = context.queries.length == context.keys.length
    packed = any(isinstance(rule, Packed) for rule in rules)
    if packed and context.queries.segments is not None and not is_self:
        return "it supports packed documents only in self-attention"
    for rule in rules:
        if isinstance(rule, (Padding, Packed)):
            continue
        if not _is_static(rule):
            return f"it does not support the mask {type(rule).__name__}, which is not a static rule"
        if context.keys.segments is not None and not isinstance(rule, _RANGES):
            return f"it does not support padding or documents together with the mask {rule}"
        if context.keys.segments is not None and not is_self:
            return f"it does not support padding of a source together with the mask {rule}"
    return None


def _is_static(rule: Mask) -> bool:
    return not jax.tree.leaves(rule) and type(rule).__call__ is not Mask.__call__


def splash_attention(
    query: Float[Array, "batch heads queries d"],
    key: Float[Array, "batch kv_heads keys d"],
    value: Float[Array, "batch kv_heads keys v"],
    context: Any,
    interpret: bool = False,
) -> Float[Array, "batch heads queries v"]:
    """Computes attention by the kernel; see `attention.attend`.

    Args:
        query: the queries.
        key: the keys; zero where they are padding.
        value: the values; zero where the keys are padding.
        context: what the queries attend to.
        interpret: whether to run the kernel on a CPU, for tests.
    """
    if context.queries.positions is not None:
        return _unless_gaps(query, key, value, context, interpret)
    ids = visible_ids(context, len(query))
    sees = None if ids is None else ids.sees
    rules = [rule for rule in context.mask.rules() if not isinstance(rule, (Padding, Packed))]
    plan = Plan(
        All(tuple(rules)),
        context.queries.length,
        context.keys.length,
        has_ids=ids is not None,
        cap=context.scores.cap,
        interpret=interpret,
    )
    scaled = (context.scores.scale * query.astype(jnp.float32)).astype(query.dtype)
    arrays = [scaled, key, value] + ([] if ids is None else [ids.query, ids.key])
    output = context.placement.per_device(partial(_by_row, plan), *arrays)
    return output if sees is None else jnp.where(sees[:, None, :, None], output, 0)


def _unless_gaps(
    query: Float[Array, "batch heads queries d"],
    key: Float[Array, "batch kv_heads keys d"],
    value: Float[Array, "batch kv_heads keys v"],
    context: Any,
    interpret: bool,
) -> Float[Array, "batch heads queries v"]:
    """Computes attention by the kernel, or blockwise if a document has padding inside it.

    Without such padding, distances in a document are those in the row.
    """
    queries, keys = (replace(x, positions=None) for x in (context.queries, context.keys))
    by_row = replace(context, queries=queries, keys=keys)

    def fused(query: Array, key: Array, value: Array) -> Array:
        return splash_attention(query, key, value, by_row, interpret)

    def blockwise(query: Array, key: Array, value: Array) -> Array:
        rest = (context.mask, context.queries, context.keys, context.scores)
        return blockwise_attention(query, key, value, *rest)

    # Otherwise the backward pass would store what either branch needs.
    @jax.checkpoint
    def either(query: Array, key: Array, value: Array) -> Array:
        return jax.lax.cond(has_gaps(context.keys.segments), blockwise, fused, query, key, value)

    return either(query, key, value)


def has_gaps(documents: Int[Array, "*batch length"]) -> Bool[Array, ""]:
    """Returns whether a document has padding between two of its tokens."""
    latest = jax.lax.cummax(documents, axis=documents.ndim - 1)  # they are numbered in order
    after_padding = (documents[..., :-1] == 0) & (documents[..., 1:] != 0)
    return (after_padding & (documents[..., 1:] == latest[..., :-1])).any()


@dataclass(frozen=True)
class Ids:
    """An id for each query and key; a query sees the keys of its own id.

    Attributes:
        query: 0 for a query that sees no key.
        key: 0 for padding.
        sees: whether a query sees a key.
    """

    query: Int[Array, "batch queries"]
    key: Int[Array, "batch keys"]
    sees: Bool[Array, "batch queries"]


def visible_ids(context: Any, batch_size: int) -> Ids | None:
    """Returns the ids; None if every query sees a key and nothing is padding."""
    queries, keys, rules = context.queries, context.keys, context.mask.rules()
    static = All(tuple(rule for rule in rules if not isinstance(rule, (Padding, Packed))))
    if keys.segments is None:
        sees = sees_statically(static, queries.length, keys.length)
        if sees.all() and queries.length % LANES == 0 and keys.length % LANES == 0:
            return None
        query, key = sees.astype(np.int32), np.ones(keys.length, np.int32)
    elif any(isinstance(rule, Packed) for rule in rules) and queries.segments is not None:
        query, key = queries.segments, keys.segments
        sees = queries.segments != 0  # a token sees itself
    else:
        real = keys.segments != 0
        before = jnp.pad(jnp.cumsum(real, axis=-1), [(0, 0)] * (real.ndim - 1) + [(1, 0)])
        low, high = ranges(static, queries.length, keys.length)
        sees = before[..., high] > before[..., low]
        query, key = sees, real

    def rows(x: Any) -> Array:
        return jnp.broadcast_to(jnp.asarray(x), (batch_size, x.shape[-1]))

    return Ids(rows(query).astype(jnp.int32), rows(key).astype(jnp.int32), rows(sees))


def ranges(rule: Mask, queries: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first key that each query sees by the rule, and the one after the last."""
    found = np.array([rule.key_range(i, i + 1, keys) for i in range(queries)], int)
    return found[:, 0], found[:, 1]


def sees_statically(rule: Mask, queries: int, keys: int) -> np.ndarray:
    """Returns whether each query sees a key by the rule."""
    if all(isinstance(part, _RANGES) for part in rule.rules()):
        low, high = ranges(rule, queries, keys)
        return high > low
    found = [
        np.broadcast_to(
            np.asarray(_tile(rule, queries, keys, slice(i, min(i + 256, queries)), slice(0, keys))),
            (min(256, queries - i), keys),
        ).any(axis=1)
        for i in range(0, queries, 256)
    ]
    return np.concatenate(found)


def _tile(rule: Mask, queries: int, keys: int, rows: slice, columns: slice) -> Any:
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

    rule: All
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
    def is_square(self) -> bool:
        """Whether each query sees the key at its own position."""
        return self.queries == self.keys and all(
            isinstance(rule, _RANGES) for rule in self.rule.rules()
        )

    def mask(self) -> Any:
        """Returns the mask of the kernel."""
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

        rules, sizes = self.rule.rules(), self.sizes
        windows = [rule.size for rule in rules if isinstance(rule, Window)]
        if not rules:
            return masks.FullMask(sizes)
        if self.is_square and all(isinstance(rule, (Causal, Window)) for rule in rules):
            is_causal = len(windows) < len(rules)
            if not windows:
                return masks.CausalMask(sizes)
            return masks.LocalMask(sizes, (min(windows) - 1, 0 if is_causal else None), 0)
        return rule_mask(self)

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

        def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
            return _padded_tile(self.plan, *index)

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
        tile[: sizes[0], : sizes[1]] = _tile(plan.rule, plan.queries, plan.keys, *real)
    return tile


def _by_row(
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
