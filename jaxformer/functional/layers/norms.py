"""Normalization over the features of one position.

Reference:
    Notes, lecture 11 §2, and the lesson on LayerNorm.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.functional.arguments import checks_arguments
from jaxformer.functional.recomputed import recomputed
from jaxformer.functional.trees import Weights


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


@checks_arguments()
@recomputed
def dynamic_tanh(
    x: Float[Array, "*batch dim"],
    scale: Float[Array, " dim"],
    input_scale: Float[Array, ""] | Float[Array, " 1"],
    bias: Float[Array, " dim"] | None = None,
) -> Float[Array, "*batch dim"]:
    """Computes y = γ tanh(α x) + β in float32; it needs no statistics of x (Zhu et al. 2025)."""
    y = jnp.tanh(input_scale * x.astype(jnp.float32)) * scale
    return (y if bias is None else y + bias).astype(x.dtype)


@runtime_checkable
class Norm(Protocol):
    """A norm: a frozen, hashable dataclass whose fields are its options."""

    def init(self, dim: int) -> Weights:
        """Returns the initial weights for `dim` features."""

    def __call__(
        self, weights: Weights, x: Float[Array, "*batch dim"]
    ) -> Float[Array, "*batch dim"]:
        """Computes the norm of x."""

    def affine(
        self, weights: Weights, x: Float[Array, "*batch dim"], at: Float[Array, "*batch dim"]
    ) -> Float[Array, "*batch dim"]:
        """Computes the affine map of x that equals the norm at `at`, for attributions to parts."""


@dataclass(frozen=True)
class LayerNorm:
    """`layer_norm` with its weights, γ = 1 and β = 0 at first.

    Attributes:
        epsilon: added to the variance.
        use_bias: whether there is β.
    """

    epsilon: float = 1e-5
    use_bias: bool = True

    def init(self, dim: int) -> Weights:
        """See `Norm`."""
        bias = {"bias": jnp.zeros(dim, jnp.float32)} if self.use_bias else {}
        return {"scale": jnp.ones(dim, jnp.float32), **bias}

    def __call__(
        self, weights: Weights, x: Float[Array, "*batch dim"]
    ) -> Float[Array, "*batch dim"]:
        """See `Norm`."""
        return layer_norm(x, weights["scale"], weights.get("bias"), self.epsilon)

    def affine(
        self, weights: Weights, x: Float[Array, "*batch dim"], at: Float[Array, "*batch dim"]
    ) -> Float[Array, "*batch dim"]:
        """See `Norm`: the deviation is that of `at`."""
        deviation = jnp.sqrt(at.var(axis=-1, keepdims=True) + self.epsilon)
        y = weights["scale"] * (x - x.mean(axis=-1, keepdims=True)) / deviation
        return y + weights.get("bias", 0.0)


@dataclass(frozen=True)
class RMSNorm:
    """`rms_norm` with its weight, γ = 1 at first.

    Attributes:
        epsilon: added to the mean square.
        one_plus: whether γ − 1 is stored, as in Gemma's checkpoints: weight decay then pulls γ
            towards 1.
    """

    epsilon: float = 1e-5
    one_plus: bool = False

    def init(self, dim: int) -> Weights:
        """See `Norm`."""
        return {"scale": (jnp.zeros if self.one_plus else jnp.ones)(dim, jnp.float32)}

    def __call__(
        self, weights: Weights, x: Float[Array, "*batch dim"]
    ) -> Float[Array, "*batch dim"]:
        """See `Norm`."""
        return rms_norm(x, self._scale(weights), self.epsilon)

    def affine(
        self, weights: Weights, x: Float[Array, "*batch dim"], at: Float[Array, "*batch dim"]
    ) -> Float[Array, "*batch dim"]:
        """See `Norm`: the mean square is that of `at`."""
        mean_square = jnp.square(at).mean(axis=-1, keepdims=True)
        return self._scale(weights) * x * jax.lax.rsqrt(mean_square + self.epsilon)

    def _scale(self, weights: Weights) -> Float[Array, " dim"]:
        return 1.0 + weights["scale"] if self.one_plus else weights["scale"]


@dataclass(frozen=True)
class DynamicTanh:
    """`dynamic_tanh` with its weights, γ = 1, β = 0 and α = 1/2 at first.

    Attributes:
        use_bias: whether there is β.
    """

    use_bias: bool = True

    def init(self, dim: int) -> Weights:
        """See `Norm`."""
        bias = {"bias": jnp.zeros(dim, jnp.float32)} if self.use_bias else {}
        alpha = {"scale": jnp.full(1, 0.5, jnp.float32)}
        return {"scale": jnp.ones(dim, jnp.float32), "input": alpha, **bias}

    def __call__(
        self, weights: Weights, x: Float[Array, "*batch dim"]
    ) -> Float[Array, "*batch dim"]:
        """See `Norm`."""
        alpha = weights["input"]["scale"]
        return dynamic_tanh(x, weights["scale"], alpha, weights.get("bias"))

    def affine(
        self, weights: Weights, x: Float[Array, "*batch dim"], at: Float[Array, "*batch dim"]
    ) -> Float[Array, "*batch dim"]:
        """See `Norm`: each feature is multiplied by tanh(α at) / at."""
        alpha = weights["input"]["scale"]
        factor = jnp.where(at == 0.0, alpha, jnp.tanh(alpha * at) / jnp.where(at == 0.0, 1.0, at))
        return weights["scale"] * factor * x + weights.get("bias", 0.0)


@dataclass(frozen=True)
class Unapplied:
    """The weights of a norm that is not applied.

    Layers with equal weights are stacked. The first layer of ModernBERT has no norm before its
    attention, and has the weights of one, so that it can be stacked with the others.
    """

    norm: Norm

    def init(self, dim: int) -> Weights:
        """See `Norm`."""
        return self.norm.init(dim)

    def __call__(
        self, weights: Weights, x: Float[Array, "*batch dim"]
    ) -> Float[Array, "*batch dim"]:
        """Returns x."""
        return x

    def affine(
        self, weights: Weights, x: Float[Array, "*batch dim"], at: Float[Array, "*batch dim"]
    ) -> Float[Array, "*batch dim"]:
        """Returns x."""
        return x


# The norms that a config can name, each a function of (epsilon, whether it has a bias).
NORMS: dict[str, Callable[[float, bool], Norm | None]] = {
    "layer": LayerNorm,
    "rms": lambda epsilon, use_bias: RMSNorm(epsilon),
    "rms_one_plus": lambda epsilon, use_bias: RMSNorm(epsilon, one_plus=True),
    "dynamic_tanh": lambda epsilon, use_bias: DynamicTanh(use_bias),
    "none": lambda epsilon, use_bias: None,
}
