"""Writing to the arrays of a cache."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped


def write_rows(
    slots: Shaped[Array, "batch slots"],
    new: Shaped[Array, "batch new"],
    written: Int[Array, "*tokens"],
) -> Shaped[Array, "batch slots"]:
    """Writes `new` [batch, new] into `slots` [batch, slots].

    Args:
        slots: The slots of each batch element.
        new: The values to write.
        written: The slot of the first value, int [], or of each value, int [batch, new]. Values
            beyond the last slot are dropped.
    """
    new = new.astype(slots.dtype)
    if written.ndim == 0:
        return jax.lax.dynamic_update_slice_in_dim(slots, new, written, axis=1)
    rows = jnp.arange(len(slots), dtype=jnp.int32)[:, None]
    return slots.at[rows, written].set(new, mode="drop")


def write_slots(
    slots: Float[Array, "batch kv_heads slots d"],
    new: Float[Array, "batch kv_heads new d"],
    written: Int[Array, "*tokens"],
) -> Float[Array, "batch kv_heads slots d"]:
    """Writes keys or values into a cache's slots, as `write_rows` does."""
    new = new.astype(slots.dtype)
    if written.ndim == 0:
        return jax.lax.dynamic_update_slice_in_dim(slots, new, written, axis=2)
    rows = jnp.arange(len(new), dtype=jnp.int32)[:, None]
    return slots.at[rows, :, written].set(new.swapaxes(1, 2), mode="drop")


def overwrite(x: Array, start_of_x: Array) -> Array:
    """Returns x with its start replaced by `start_of_x`."""
    return jax.lax.dynamic_update_slice(x, start_of_x, (0,) * x.ndim)
