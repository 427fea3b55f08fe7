"""Dropout, the only random operation of a forward pass."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


def dropout(
    key: PRNGKeyArray | None, x: Float[Array, "*shape"], rate: float
) -> Float[Array, "*shape"]:
    """Zeroes each feature with probability `rate` and divides the rest by 1 − rate.

    Returns x if `key` is None.
    """
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, jnp.float32(1.0 - rate), x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))
