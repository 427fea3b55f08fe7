"""Normalization over the features of one position.

Reference:
    Notes, lecture 11 §2, and the lesson on LayerNorm.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.functional.arguments import checks_arguments
from jaxformer.functional.recomputed import recomputed


@checks_arguments()
@recomputed
def layer_norm(
    x: Float[Array, "*batch dim"],
    scale: Float[Array, " dim"],
    bias: Float[Array, " dim"] | None = None,
    epsilon: float = 1e-5,
) -> Float[Array, "*batch dim"]:
    """Computes y = γ (x − μ) / √(σ² + ε) + β, with μ and σ² over the features of one position.

    σ² is the population variance, taken as the mean of (x − μ)² because E[x²] − μ² cancels when
    |μ| ≫ σ. Statistics are float32 whatever the dtype of x, which is also the dtype of y.
    Source: Ba, Kiros & Hinton 2016; notes, lecture 11 §2.
    """
    x32 = x.astype(jnp.float32)
    centred = x32 - x32.mean(axis=-1, keepdims=True)
    variance = jnp.square(centred).mean(axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(variance + epsilon) * scale
    return (y if bias is None else y + bias).astype(x.dtype)


@checks_arguments()
@recomputed
def rms_norm(
    x: Float[Array, "*batch dim"], scale: Float[Array, " dim"], epsilon: float = 1e-5
) -> Float[Array, "*batch dim"]:
    """Computes y = γ x / √(mean(x²) + ε), with statistics in float32 (Zhang & Sennrich 2019)."""
    x32 = x.astype(jnp.float32)
    mean_square = jnp.square(x32).mean(axis=-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(mean_square + epsilon) * scale).astype(x.dtype)


def init_norm(norm: str, dim: int, *, use_bias: bool = True) -> dict[str, Float[Array, " dim"]]:
    """Returns γ = 1 and, for "layer" with use_bias, β = 0; no weights for "none".

    "rms_one_plus" stores γ − 1, as Gemma's checkpoints do: weight decay then pulls γ towards 1.
    """
    if norm == "none":
        return {}
    weights = {
        "scale": jnp.zeros(dim, jnp.float32)
        if norm == "rms_one_plus"
        else jnp.ones(dim, jnp.float32)
    }
    if norm == "layer" and use_bias:
        weights["bias"] = jnp.zeros(dim, jnp.float32)
    return weights


def normalize(
    weights: Mapping, x: Float[Array, "*batch dim"], config: Any
) -> Float[Array, "*batch dim"]:
    """Applies the norm of a config, with the weights of `init_norm`."""
    if config.norm == "layer":
        return layer_norm(x, weights["scale"], weights.get("bias"), config.norm_epsilon)
    if config.norm == "rms":
        return rms_norm(x, weights["scale"], config.norm_epsilon)
    if config.norm == "rms_one_plus":
        return rms_norm(x, 1.0 + weights["scale"], config.norm_epsilon)
    return x
