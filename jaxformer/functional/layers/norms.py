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
from jaxformer.functional.hooks import HookPoints
from jaxformer.functional.recomputed import recomputed
from jaxformer.functional.trees import Weights


@checks_arguments()
@recomputed
def layer_norm(
    x: Float[Array, "*batch dim"],
    scale: Float[Array, " dim"] | float = 1.0,
    bias: Float[Array, " dim"] | float | None = None,
    epsilon: float = 1e-5,
) -> Float[Array, "*batch dim"]:
    """Computes y = γ (x − μ) / √(σ² + ε) + β, with μ and σ² over the features of one position.

    The population variance σ² is computed as the mean of (x − μ)², because E[x²] − μ² cancels if
    |μ| ≫ σ. Statistics are float32, and y has the dtype of x.

    Reference:
        Ba, Kiros & Hinton 2016; notes, lecture 11 §2.
    """
    x32 = x.astype(jnp.float32)
    centred = x32 - x32.mean(axis=-1, keepdims=True)
    variance = jnp.square(centred).mean(axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(variance + epsilon) * scale
    return (y if bias is None else y + bias).astype(x.dtype)


@checks_arguments()
@recomputed
def rms_norm(
    x: Float[Array, "*batch dim"], scale: Float[Array, " dim"] | float = 1.0, epsilon: float = 1e-5
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
    """Computes y = γ tanh(α x) + β in float32, without statistics of x (Zhu et al. 2025)."""
    y = jnp.tanh(input_scale * x.astype(jnp.float32)) * scale
    return (y if bias is None else y + bias).astype(x.dtype)


@runtime_checkable
class Norm(Protocol):
    """Interface of norms, which are frozen, hashable dataclasses."""

    def init(self, dim: int) -> Weights:
        """Returns the initial weights for `dim` features."""

    def __call__(
        self, weights: Weights, x: Float[Array, "*batch dim"]
    ) -> Float[Array, "*batch dim"]:
        """Computes the norm of x."""

    def divisor(
        self, weights: Weights, x: Float[Array, "*batch dim"]
    ) -> Float[Array, "*batch one_or_dim"]:
        """Computes the number by which the norm divides the features of x, in float32."""

    def divide(
        self,
        weights: Weights,
        x: Float[Array, "*batch dim"],
        divisor: Float[Array, "*batch one_or_dim"],
    ) -> Float[Array, "*batch dim"]:
        """Computes the norm of x with a given divisor, as an affine function of x."""


@dataclass(frozen=True)
class LayerNorm:
    """LayerNorm, with γ = 1 and β = 0 initially; see `layer_norm`.

    Attributes:
        epsilon: added to the variance.
        use_bias: whether the norm has β.
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

    def divisor(self, weights: Weights, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch 1"]:
        """See `Norm`. The divisor is the standard deviation √(σ² + ε)."""
        return jnp.sqrt(x.astype(jnp.float32).var(axis=-1, keepdims=True) + self.epsilon)

    def divide(
        self, weights: Weights, x: Float[Array, "*batch dim"], divisor: Float[Array, "*batch 1"]
    ) -> Float[Array, "*batch dim"]:
        """See `Norm`."""
        x32 = x.astype(jnp.float32)
        y = weights["scale"] * (x32 - x32.mean(axis=-1, keepdims=True)) / divisor
        return (y + weights.get("bias", 0.0)).astype(x.dtype)


@dataclass(frozen=True)
class RMSNorm:
    """RMSNorm, with γ = 1 initially; see `rms_norm`.

    Attributes:
        epsilon: added to the mean square.
        one_plus: whether γ − 1 is stored, as in Gemma's checkpoints, so that weight decay pulls γ
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
        return rms_norm(x, self.gain(weights), self.epsilon)

    def divisor(self, weights: Weights, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch 1"]:
        """See `Norm`. The divisor is the root mean square √(mean(x²) + ε)."""
        mean_square = jnp.square(x.astype(jnp.float32)).mean(axis=-1, keepdims=True)
        return jnp.sqrt(mean_square + self.epsilon)

    def divide(
        self, weights: Weights, x: Float[Array, "*batch dim"], divisor: Float[Array, "*batch 1"]
    ) -> Float[Array, "*batch dim"]:
        """See `Norm`."""
        return (self.gain(weights) * x.astype(jnp.float32) / divisor).astype(x.dtype)

    def gain(self, weights: Weights) -> Float[Array, " dim"]:
        """Returns γ."""
        return 1.0 + weights["scale"] if self.one_plus else weights["scale"]


@dataclass(frozen=True)
class DynamicTanh:
    """Dynamic tanh, with γ = 1, β = 0 and α = 1/2 initially; see `dynamic_tanh`.

    Attributes:
        use_bias: whether the norm has β.
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

    def divisor(
        self, weights: Weights, x: Float[Array, "*batch dim"]
    ) -> Float[Array, "*batch dim"]:
        """See `Norm`. The divisor of each feature is x / tanh(α x); for x = 0, its limit 1/α."""
        alpha, x32 = weights["input"]["scale"], x.astype(jnp.float32)
        nonzero = jnp.where(x32 == 0.0, 1.0, x32)
        return jnp.where(x32 == 0.0, 1.0 / alpha, nonzero / jnp.tanh(alpha * nonzero))

    def divide(
        self, weights: Weights, x: Float[Array, "*batch dim"], divisor: Float[Array, "*batch dim"]
    ) -> Float[Array, "*batch dim"]:
        """See `Norm`."""
        y = weights["scale"] * x.astype(jnp.float32) / divisor
        return (y + weights.get("bias", 0.0)).astype(x.dtype)


@dataclass(frozen=True)
class Unapplied:
    """Identity function that has the weights of a norm but does not use them.

    Only layers with equal weight shapes can be stacked. The first layer of ModernBERT lacks the
    norm before attention, but gets unused norm weights, so that it can be stacked with the other
    layers.
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

    def divisor(self, weights: Weights, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch 1"]:
        """Returns ones."""
        return jnp.ones_like(x[..., :1], jnp.float32)

    def divide(
        self, weights: Weights, x: Float[Array, "*batch dim"], divisor: Float[Array, "*batch 1"]
    ) -> Float[Array, "*batch dim"]:
        """Returns x / divisor."""
        return (x.astype(jnp.float32) / divisor).astype(x.dtype)


def apply_norm(
    norm: Norm | None, weights: Weights, name: str, x: Float[Array, "*batch dim"], hook: HookPoints
) -> Float[Array, "*batch dim"]:
    """Applies a norm whose divisor is a hook point; returns x if `norm` is None.

    Args:
        norm: the norm, or None.
        weights: a dict whose entry `name` holds the weights of the norm.
        name: the name of the norm. The hook point of its divisor is `divisor_point(name)`.
        x: the input.
        hook: captures or replaces the divisor.
    """
    if norm is None:
        return x
    own, point = weights[name], divisor_point(name)
    # `norm` computes divisor and quotient in one pass, and recomputes them for the gradient. If the
    # divisor is changed, two separate steps compute them, and the result is rounded differently.
    if hook.changes(point):
        return norm.divide(own, x, hook(point, norm.divisor(own, x)))
    if hook.has(point):
        hook(point, norm.divisor(own, x))
    return norm(own, x)


def divisor_point(name: str) -> str:
    """Returns the name of the hook point of a norm's divisor."""
    return f"{name}.divisor"


# Norms by their names in configs, each a function of (epsilon, use_bias).
NORMS: dict[str, Callable[[float, bool], Norm | None]] = {
    "layer": LayerNorm,
    "rms": lambda epsilon, use_bias: RMSNorm(epsilon),
    "rms_one_plus": lambda epsilon, use_bias: RMSNorm(epsilon, one_plus=True),
    "dynamic_tanh": lambda epsilon, use_bias: DynamicTanh(use_bias),
    "none": lambda epsilon, use_bias: None,
}
