"""Key ranges: the keys low ≤ j < high that each query attends to, for kernels that take ranges.

Causal masks, windows and prefixes allow one range of keys per query. Padding at the ends of a
sequence and contiguous packed documents also allow one range per query. Whether documents are
contiguous is known only at run time.
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

# Kernels look up the exact type of a mask in these tables, because a subclass may change the rule.
# The rules in DISTANCES depend only on the distance of two tokens. With a rule in RANGES, each
# query attends to one contiguous range of keys. The rules in RUN_TIME depend on documents, which
# are known only at run time.
DISTANCES = (Causal, Window, Near)
RANGES = (*DISTANCES, Prefix)
RUN_TIME = (Padding, Packed)


class KeyRanges(NamedTuple):
    """The range of keys of each query.

    Attributes:
        low: the first key.
        high: the key after the last key; at most `low` if the query has no visible key.
        are_exact: whether the visible keys of every query form one range. If a query is padding,
            its range may contain padding.
    """

    low: Int[Array, "batch queries"]
    high: Int[Array, "batch queries"]
    are_exact: Bool[Array, ""]


def key_ranges(context: Context, batch_size: int) -> KeyRanges:
    """Returns the key range of each query.

    The class of every rule of the mask must be in `RANGES` or `RUN_TIME`.
    """
    queries, keys = context.queries, context.keys
    rule = positional(context.mask)
    low, high = (jnp.asarray(x) for x in ranges(rule, queries.length, keys.length))
    are_exact = jnp.array(True)
    if is_packed(context):
        first, end = runs(keys.segment_ids)
        same = (queries.segment_ids == keys.segment_ids).all()
        low, high = jnp.maximum(low, first), jnp.minimum(high, end)
        are_exact = same & only_rise(keys.segment_ids)
    elif keys.segment_ids is not None:
        real = keys.segment_ids != 0
        first = real.argmax(axis=-1, keepdims=True)
        end = real.shape[-1] - real[..., ::-1].argmax(axis=-1, keepdims=True)
        low, high = jnp.maximum(low, first), jnp.minimum(high, end)
        are_exact = only_rise(real.astype(jnp.int32))
    shape = (batch_size, queries.length)
    low, high = (jnp.broadcast_to(x.astype(jnp.int32), shape) for x in (low, high))
    return KeyRanges(low, high, are_exact)


def is_packed(context: Context) -> bool:
    """Returns whether the sequences of a context are packed documents."""
    packed = any(type(rule) is Packed for rule in context.mask.rules())
    return (
        packed and context.queries.segment_ids is not None and context.keys.segment_ids is not None
    )


def has_other_positions(context: Context) -> bool:
    """Returns whether explicit positions may differ from the token index within each document."""
    infos = (context.queries, context.keys)
    has_positions = any(info.positions is not None for info in infos)
    # Without `Packed`, a query attends to keys of other documents. Positions restart at 0 in each
    # document, so the mask must compare positions, not token indices.
    return has_positions and not (context.in_order and is_packed(context))


def positional(mask: Mask) -> Mask:
    """Returns the position rules of a mask, without the rules about padding and documents."""
    rules = [rule for rule in mask.rules() if type(rule) not in RUN_TIME]
    return reduce(and_, rules, All())


def ranges(rule: Mask, queries: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (low, high) for each query: the rule allows the keys low … high − 1."""
    found = np.array([rule.key_range(i, i + 1, keys) for i in range(queries)], int).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def runs(segment_ids: Int[Array, "*batch length"]) -> tuple[Array, Array]:
    """Returns the start and the end of each token's document, for contiguous documents."""
    axis, index = segment_ids.ndim - 1, jnp.arange(segment_ids.shape[-1], dtype=jnp.int32)
    differs = segment_ids[..., 1:] != segment_ids[..., :-1]
    edge = jnp.ones_like(differs, shape=(*segment_ids.shape[:-1], 1))
    begins = jnp.concatenate([edge, differs], axis=axis)
    ends = jnp.concatenate([differs, edge], axis=axis)
    first = jax.lax.cummax(jnp.where(begins, index, 0), axis=axis)
    end = jax.lax.cummin(jnp.where(ends, index + 1, len(index)), axis=axis, reverse=True)
    return first, end


def only_rise(segment_ids: Int[Array, "*batch length"]) -> Bool[Array, ""]:
    """Returns whether documents are contiguous and numbered in increasing order."""
    largest = jax.lax.cummax(segment_ids, axis=segment_ids.ndim - 1)[..., :-1]
    before, after = segment_ids[..., :-1], segment_ids[..., 1:]
    return ((after == before) | (after == 0) | (after > largest)).all()
