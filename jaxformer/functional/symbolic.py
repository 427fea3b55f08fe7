"""Comparisons of symbolic sizes, in programs that `jax.export` compiles for all sizes.

If a comparison of sizes is true for only some values of a symbol, JAX raises an error, whereas the
functions of this module return False. Callers therefore use a faster method only if the method is
valid for all sizes.

Reference:
    JAX documentation, "Shape polymorphism".
"""

from typing import Any

import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jax.extend.core import InconclusiveDimensionOperation
from jaxtyping import Array, Float

# An int, or a symbol such as "batch" or "2*length + 1".
Size = Any


def is_known(*sizes: Size) -> bool:
    """Returns whether all sizes are integers, not symbols."""
    return not any(map(is_symbolic_dim, sizes))


def exceeds(size: Size, limit: Size) -> bool:
    """Returns whether `size` is above `limit` for all values of symbolic dimensions."""
    try:
        return bool(size > limit)
    except InconclusiveDimensionOperation:
        return False


def at_most(size: Size, limit: Size) -> bool:
    """Returns whether `size` is at most `limit` for all values of symbolic dimensions."""
    return exceeds(limit + 1, size)


def broadcasts(shape: tuple[Size, ...], target: tuple[Size, ...]) -> bool:
    """Returns whether an array of this shape broadcasts to the target shape."""
    try:
        return jnp.broadcast_shapes(shape, target) == target
    except (ValueError, InconclusiveDimensionOperation):
        return False


def nan_if_longer(x: Float[Array, "*shape"], length: Size, limit: int) -> Float[Array, "*shape"]:
    """Replaces x by NaN if `length` is a symbol whose value at run time is above the limit."""
    if is_known(length) or at_most(length, limit):
        return x
    return jnp.where(jnp.asarray(length) > limit, jnp.nan, x)
