"""The keys that each query sees, as a range low ≤ j < high, for kernels that take ranges.

Causal masks, windows and prefixes allow one range of keys. So do padding at the ends of a row and
packed documents, if each document is contiguous, which is known only at run time.
"""

from functools import reduce
from operator import and_
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxformer.functional.attention.context import Context
from jaxformer.functional.attention.masks import (
    All,
    Causal,
    Mask,
    Near,
    Packed,
    Padding,
    Prefix,
    Window,
)

# Kernels look for the type of a rule in these tables, not for a subclass: its rule may differ.
DISTANCES = (Causal, Window, Near)  # rules about the distance of two tokens
RANGES = (*DISTANCES, Prefix)  # rules that allow one range of keys
RUN_TIME = (Padding, Packed)  # rules about documents, which are known only at run time


class KeyRanges(NamedTuple):
    """The range of keys of each query.

    Attributes:
        low: the first key.
        high: the key after the last one; at most `low` if the query sees no key.
        are_exact: whether every query sees one range of keys. The ranges of queries that are
            padding may contain padding.
    """

    low: Int[Array, "batch queries"]
    high: Int[Array, "batch queries"]
    are_exact: Bool[Array, ""]


def key_ranges(context: Context, batch_size: int) -> KeyRanges:
    """Returns the ranges of an `attention.Context` whose rules about positions are `RANGES`."""
    queries, keys = context.queries, context.keys
    rule = positional(context.mask)
    low, high = (jnp.asarray(x) for x in ranges(rule, queries.length, keys.length))
    are_exact = jnp.array(True)
    if is_packed(context):
        first, end = runs(keys.segments)
        same = (queries.segments == keys.segments).all()
        low, high = jnp.maximum(low, first), jnp.minimum(high, end)
        are_exact = same & only_rise(keys.segments)
    elif keys.segments is not None:
        real = keys.segments != 0
        first = real.argmax(axis=-1, keepdims=True)
        end = real.shape[-1] - real[..., ::-1].argmax(axis=-1, keepdims=True)
        low, high = jnp.maximum(low, first), jnp.minimum(high, end)
        are_exact = only_rise(real.astype(jnp.int32))
    shape = (batch_size, queries.length)
    low, high = (jnp.broadcast_to(x.astype(jnp.int32), shape) for x in (low, high))
    return KeyRanges(low, high, are_exact)


def is_packed(context: Context) -> bool:
    """Returns whether the rows of an `attention.Context` are packed documents."""
    packed = any(type(rule) is Packed for rule in context.mask.rules())
    return packed and context.queries.segments is not None and context.keys.segments is not None


def has_other_positions(context: Context) -> bool:
    """Returns whether positions are given that do not count the tokens of packed documents."""
    infos = (context.queries, context.keys)
    has_positions = any(info.positions is not None for info in infos)
    # Without the rule `Packed`, documents see each other, and positions begin anew in each of them.
    return has_positions and not (context.in_order and is_packed(context))


def positional(mask: Mask) -> Mask:
    """Returns the rules of a mask about positions, without those about padding and documents."""
    rules = [rule for rule in mask.rules() if type(rule) not in RUN_TIME]
    return reduce(and_, rules, All())


def ranges(rule: Mask, queries: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first key that each query sees by the rule, and the one after the last."""
    found = np.array([rule.key_range(i, i + 1, keys) for i in range(queries)], int).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def runs(segments: Int[Array, "*batch length"]) -> tuple[Array, Array]:
    """Returns where the document of each token begins, and where it ends, if it is contiguous."""
    axis, index = segments.ndim - 1, jnp.arange(segments.shape[-1], dtype=jnp.int32)
    differs = segments[..., 1:] != segments[..., :-1]
    edge = jnp.ones_like(differs, shape=(*segments.shape[:-1], 1))
    begins = jnp.concatenate([edge, differs], axis=axis)
    ends = jnp.concatenate([differs, edge], axis=axis)
    first = jax.lax.cummax(jnp.where(begins, index, 0), axis=axis)
    end = jax.lax.cummin(jnp.where(ends, index + 1, len(index)), axis=axis, reverse=True)
    return first, end


def only_rise(segments: Int[Array, "*batch length"]) -> Bool[Array, ""]:
    """Returns whether every document is contiguous, with a higher number than all before it."""
    largest = jax.lax.cummax(segments, axis=segments.ndim - 1)[..., :-1]
    before, after = segments[..., :-1], segments[..., 1:]
    return ((after == before) | (after == 0) | (after > largest)).all()
