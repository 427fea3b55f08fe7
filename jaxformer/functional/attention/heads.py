"""Conversion between features and heads."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxformer.functional.symbolic import Size


def split_heads(
    x: Float[Array, "*batch length features"], num_heads: int
) -> Float[Array, "*batch heads length head_dim"]:
    """Splits features into heads: features = heads · head_dim."""
    *batch, length, features = x.shape
    return x.reshape(*batch, length, num_heads, features // num_heads).swapaxes(-3, -2)


def merge_heads(
    x: Float[Array, "*batch heads length head_dim"],
) -> Float[Array, "*batch length features"]:
    """Concatenates heads: the inverse of `split_heads`."""
    *batch, heads, length, head_dim = x.shape
    return x.swapaxes(-3, -2).reshape(*batch, length, heads * head_dim)


def group_heads(
    query: Float[Array, "*batch heads length d"], key: Float[Array, "*key_batch kv_heads keys _"]
) -> Float[Array, "*key_batch kv_heads group length d"]:
    """Groups the query heads that share a key head.

    Consecutive query heads share a key head, as in every published grouped-query checkpoint. If the
    batch size of the queries is n times the batch size of the keys, n consecutive batch elements,
    such as the beams of one source, share keys. A group then contains the query heads of these n
    batch elements.
    """
    *batch, heads, length, features = query.shape
    *key_batch, kv_heads = key.shape[:-2]
    if batch == key_batch:
        return query.reshape(*key_batch, kv_heads, heads // kv_heads, length, features)
    shared = query.reshape(*key_batch, -1, kv_heads, heads // kv_heads, length, features)
    return shared.swapaxes(1, 2).reshape(*key_batch, kv_heads, -1, length, features)


def ungroup_heads(
    x: Float[Array, "*key_batch kv_heads group length n"], batch_and_heads: tuple[Size, ...]
) -> Float[Array, "*batch heads length n"]:
    """Restores the axes of batch and heads: the inverse of `group_heads`."""
    *key_batch, kv_heads, _, length, features = x.shape
    *batch, heads = batch_and_heads
    if batch != key_batch:
        x = x.reshape(*key_batch, kv_heads, -1, heads // kv_heads, length, features).swapaxes(1, 2)
    return x.reshape(*batch, heads, length, features)


def over_heads(
    visible: Bool[Array, "*batch queries keys"] | np.ndarray | np.bool_,
) -> Bool[Array, "*batch 1 1 queries keys"] | np.ndarray | np.bool_:
    """Inserts axes for [kv_heads, group] into a mask."""
    return visible if np.ndim(visible) == 0 else jnp.asarray(visible)[..., None, None, :, :]
