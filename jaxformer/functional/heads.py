"""Moving between features and heads."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def split_heads(x: Float[Array, "*batch length features"], num_heads: int):
    """[*batch, length, heads · head_dim] → [*batch, heads, length, head_dim]."""
    *batch, length, features = x.shape
    return x.reshape(*batch, length, num_heads, features // num_heads).swapaxes(-3, -2)


def merge_heads(x: Float[Array, "*batch heads length head_dim"]):
    """[*batch, heads, length, head_dim] → [*batch, length, heads · head_dim]: concatenation."""
    *batch, heads, length, head_dim = x.shape
    return x.swapaxes(-3, -2).reshape(*batch, length, heads * head_dim)


def group_heads(query: Float[Array, "*batch heads length head_dim"], num_kv_heads: int):
    """[*batch, heads, length, d] → [*batch, kv_heads, heads / kv_heads, length, d].

    Consecutive query heads share a key head, as in every published grouped-query checkpoint.
    """
    *batch, heads, length, head_dim = query.shape
    return query.reshape(*batch, num_kv_heads, heads // num_kv_heads, length, head_dim)


def over_heads(visible):
    """A mask [*rows, queries, keys] made to broadcast over [kv_heads, group] in front of it."""
    return visible if np.ndim(visible) == 0 else jnp.asarray(visible)[..., None, None, :, :]
