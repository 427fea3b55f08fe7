"""Dropout: the only randomness of a forward pass, and only where a key was given."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def dropout(key, x: Float[Array, "*shape"], rate: float) -> Float[Array, "*shape"]:
    """Zero each feature with probability `rate` and divide the rest by 1 − rate; key None: x."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))
