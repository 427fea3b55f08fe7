"""Sizes that are symbols, in a program that `jax.export` compiles for all sizes.

JAX raises an error if a comparison holds for some sizes of a symbol only. The functions here return
False then, so a caller uses a faster method only if it is valid for all sizes.

Reference:
    JAX documentation, "Shape polymorphism".
"""

from typing import Any

import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jax.extend.core import InconclusiveDimensionOperation
from jaxtyping import Array, Float

Size = Any  # an int, or a symbol such as "batch" or "2*length + 1"


def is_known(*sizes: Size) -> bool:
    """Returns whether none of the sizes is a symbol."""
    return not any(map(is_symbolic_dim, sizes))


def exceeds(size: Size, limit: Size) -> bool:
    """Returns whether the size is above the limit for certain."""
    try:
        return bool(size > limit)
    except InconclusiveDimensionOperation:
        return False


def at_most(size: Size, limit: Size) -> bool:
    """Returns whether the size is at most the limit for certain."""
    return exceeds(limit + 1, size)


def nan_if_longer(x: Float[Array, "*shape"], length: Size, limit: int) -> Float[Array, "*shape"]:
    """Replaces x by NaN where the program runs if `length` is a symbol and is above the limit."""
    if is_known(length) or at_most(length, limit):
        return x
    return jnp.where(jnp.asarray(length) > limit, jnp.nan, x)
