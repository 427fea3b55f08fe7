"""Attention by JAX's splash kernel for TPUs, which skips the tiles that the mask excludes.

The kernel takes a static mask and an id for each query and key: a query sees the keys of its own id
that the mask allows. Rules about positions become the mask, documents and padding become ids. What
the kernel leaves open is settled here:

- It needs multiples of 128 positions, and is faster with multiples of 512. Rows are padded at the
  end. Padding has id 0, unless the mask alone hides it, as a causal mask does.
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
from jaxtyping import Array, Float, Int

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
from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.attention.splash_plan import Plan, by_row, tile_of

DTYPES = (jnp.bfloat16, jnp.float32)


@dataclass(frozen=True)
class Splash:
    """The splash kernel, a `FusedKernel`.

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
        context: Any,
    ) -> str | None:
        """See `FusedKernel`."""
        reason = unsupported_arrays(query, key, value, DTYPES)
        return reason or unsupported_scores(context.scores) or _unsupported(context)

    def attention(
        self,
        query: Float[Array, "batch heads queries d"],
        key: Float[Array, "batch kv_heads keys d"],
        value: Float[Array, "batch kv_heads keys v"],
        context: Any,
    ) -> Float[Array, "batch heads queries v"]:
        """See `FusedKernel`."""
        if context.queries.positions is None:
            return splash_attention(query, key, value, context, self.interpret)
        # Without padding inside a document, distances in a document are those in the row.
        queries, keys = (replace(x, positions=None) for x in (context.queries, context.keys))
        by_row = replace(context, queries=queries, keys=keys)
        fused = partial(splash_attention, context=by_row, interpret=self.interpret)
        has_gaps = ~only_rise(context.keys.segments)
        return blockwise_if(has_gaps, fused, (query, key, value), context)


def _unsupported(context: Any) -> str | None:
    if context.scores.bias is not None:
        return "it does not support a bias of the scores"
    rules = context.mask.rules()
    by_distance = all(type(rule) in (*DISTANCES, *RUN_TIME) for rule in rules)
    if has_other_positions(context):
        return "it does not support cached or other positions"
    if context.queries.positions is not None and not by_distance:
        return "it supports positions in documents only for masks that compare distances"
    is_self = context.queries.length == context.keys.length
    if is_packed(context) and not is_self:
        return "it supports packed documents only in self-attention"
    for rule in rules:
        if type(rule) in RUN_TIME:
            continue
        if not _is_static(rule):
            return f"it does not support the mask {type(rule).__name__}, which is not a static rule"
        if context.keys.segments is not None and type(rule) not in RANGES:
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
    """Computes attention by the kernel; distances are those in the row.

    Args:
        query: the queries.
        key: the keys; zero where they are padding.
        value: the values; zero where the keys are padding.
        context: what the queries attend to.
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
    scaled = (context.scores.scale * query.astype(jnp.float32)).astype(query.dtype)
    arrays = [scaled, key, value] + ([] if ids is None else [ids.query, ids.key])
    return context.placement.per_device(partial(by_row, plan), *arrays)


@dataclass(frozen=True)
class Ids:
    """An id for each query and key; a query sees the keys of its own id.

    Attributes:
        query: 0 for a query that sees no key.
        key: 0 for padding.
    """

    query: Int[Array, "batch queries"]
    key: Int[Array, "batch keys"]


def visible_ids(context: Any, plan: Plan, batch_size: int) -> Ids | None:
    """Returns the ids; None if every query sees a key and the plan's mask hides all padding."""
    queries, keys = context.queries, context.keys
    if keys.segments is None:
        sees = sees_statically(plan.rule, queries.length, keys.length)
        if sees.all() and plan.hides_padding:
            return None
        query, key = sees, np.ones(keys.length)
    elif is_packed(context):
        query, key = queries.segments, keys.segments  # a token sees itself
    else:
        real = keys.segments != 0
        before = jnp.pad(jnp.cumsum(real, axis=-1), [(0, 0)] * (real.ndim - 1) + [(1, 0)])
        low, high = ranges(plan.rule, queries.length, keys.length)
        query, key = before[..., high] > before[..., low], real

    def rows(x: Any) -> Array:
        return jnp.broadcast_to(jnp.asarray(x, jnp.int32), (batch_size, x.shape[-1]))

    return Ids(rows(query), rows(key))


def sees_statically(rule: Mask, queries: int, keys: int) -> np.ndarray:
    """Returns whether each query sees a key by the rule."""
    if all(type(part) in RANGES for part in rule.rules()):
        low, high = ranges(rule, queries, keys)
        return high > low
    blocks = (slice(i, min(i + 256, queries)) for i in range(0, queries, 256))
    found = []
    for rows in blocks:
        tile = np.asarray(tile_of(rule, queries, keys, rows, slice(0, keys)))
        found.append(np.broadcast_to(tile, (rows.stop - rows.start, keys)).any(axis=1))
    return np.concatenate(found)
