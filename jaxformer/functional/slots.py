"""The arrays of a cache: [batch, kv_heads, slots, head_dim], or without axes of size 1."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxformer.functional.spread import kept_in_place


def write_rows(slots: Array, new: Array, written: Array) -> Array:
    """Put `new` [batch, new] into `slots` [batch, slots]: from slot `written`, int [], on (in place
    where the compiler can), or each at its own slot, int [batch, new]; past the last: nowhere."""
    new = new.astype(slots.dtype)
    if written.ndim == 0:
        return jax.lax.dynamic_update_slice_in_dim(slots, new, written, axis=1)
    rows = jnp.arange(len(slots))[:, None]
    return slots.at[rows, written].set(new, mode="drop")


def write_slots(slots: Array, new: Array, written: Array) -> Array:
    """The same for `new` [batch, kv_heads, new, head_dim] and `slots` [batch, kv_heads, slots,
    head_dim], with or without axes of size 1."""
    new = new.astype(slots.dtype)
    if written.ndim == 0:
        batch_size, kv_heads = new.shape[:2]
        new = new.reshape(*slots.shape[:-2], *new.shape[-2:])
        slots = jax.lax.dynamic_update_slice_in_dim(slots, new, written, axis=slots.ndim - 2)
        return kept_in_place(slots, batch_size, kv_heads)
    rows = jnp.arange(len(new))[:, None]
    heads = by_head(slots, len(new)).at[rows, :, written].set(new.swapaxes(1, 2), mode="drop")
    return heads.reshape(slots.shape)


def by_head(slots: Array, batch_size: int) -> Array:
    """[batch, kv_heads, slots, head_dim], whichever axes of size 1 were left out."""
    return slots.reshape(batch_size, -1, *slots.shape[-2:])


def without_single_axes(x):
    """Without the axes of batch and heads that are of size 1."""
    return x.reshape(*(size for size in x.shape[:2] if size != 1), *x.shape[2:])


def overwrite(x, start_of_x):
    return jax.lax.dynamic_update_slice(x, start_of_x, (0,) * x.ndim)
