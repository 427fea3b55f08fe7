"""The affine map, y = x W + b, and the initialiser that GPT-2 gave it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def init_linear(key, in_dim: int, out_dim: int, *, use_bias: bool = True, stddev: float = 0.02):
    """W ~ N(0, stddev²) [in_dim, out_dim] and b = 0 [out_dim] (GPT-2, Radford et al. 2019)."""
    weights = {"kernel": stddev * jax.random.normal(key, (in_dim, out_dim))}
    if use_bias:
        weights["bias"] = jnp.zeros(out_dim)
    return weights


def linear(weights, x: Float[Array, "*batch in_dim"]) -> Float[Array, "*batch out_dim"]:
    """y = x W + b, computed in the dtype of x.

    The leading axes are folded into one: the gradient of W is then one plain matrix product.
    """
    kernel = weights["kernel"].astype(x.dtype)
    y = (x.reshape(-1, kernel.shape[0]) @ kernel).reshape(*x.shape[:-1], kernel.shape[1])
    return y + weights["bias"].astype(x.dtype) if "bias" in weights else y
