"""The position-wise feed-forward layer.

Reference:
    Notes, lecture 10 §7; lecture 13 §3.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.arguments import check_maps, checks_arguments
from jaxformer.functional.hooks import NO_HOOK, HookFunction
from jaxformer.functional.layers.sublayer import (
    At,
    Initial,
    Output,
    SubLayer,
    WeightAxis,
    axes_of_linear,
)
from jaxformer.functional.linear.affine import Scalar, init_linear, linear
from jaxformer.functional.recomputed import recomputed
from jaxformer.functional.trees import Weights

# An activation: a name in ACTIVATIONS, or an elementwise function of an array.
Activation = str | Callable[[Float[Array, "*shape"]], Float[Array, "*shape"]]


def sigmoid(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Computes σ(x) = 1 / (1 + exp(−x))."""
    return jax.nn.sigmoid(x)


# gpt-oss clips the inputs of its gates at this value.
_LIMIT = 7.0

# Each entry is a pair: an activation, and its mean square for inputs from N(0, 1). The mean square
# determines the scale of the initial weights.
# "gelu_tanh" is the approximation in GPT-2, "squared_relu" is from Primer (So et al. 2021), and
# "clipped_swiglu" is from gpt-oss.
_PLAIN = {
    "relu": (jax.nn.relu, 0.5),
    "gelu": (lambda x: jax.nn.gelu(x, approximate=False), 0.4252),
    "gelu_tanh": (lambda x: jax.nn.gelu(x, approximate=True), 0.4252),
    "silu": (jax.nn.silu, 0.3557),
    "squared_relu": (lambda x: jnp.square(jax.nn.relu(x)), 1.5),
    "sigmoid": (sigmoid, 0.2934),
    "tanh": (jnp.tanh, 0.3943),
}
_GATES = {
    "swiglu": _PLAIN["silu"],
    "geglu": _PLAIN["gelu"],
    "geglu_tanh": _PLAIN["gelu_tanh"],
    "clipped_swiglu": (lambda x: _scaled_silu(jnp.minimum(x, _LIMIT)), 0.4220),
}
# Some gated activations also apply a function to x W₁ + b₁, before the product with the gate.
_GATED = {"clipped_swiglu": lambda x: jnp.clip(x, -_LIMIT, _LIMIT) + 1.0}
ACTIVATIONS = (*_PLAIN, *_GATES)


def check_activation(activation: object) -> None:
    """Raises ValueError unless `activation` is a name in ACTIVATIONS or a function."""
    if activation in ACTIVATIONS or (callable(activation) and not isinstance(activation, type)):
        return
    raise ValueError(
        f"activation is {activation!r}; it must be one of {', '.join(ACTIVATIONS)}, or a function "
        "of an array"
    )


@recomputed
def activate(x: Float[Array, "*shape"], activation: Activation) -> Float[Array, "*shape"]:
    """Applies an activation, or the gate function of a gated activation.

    The activation is computed in float32, and the result has the dtype of x. In bfloat16, the term
    1 + tanh of GELU would lose most digits for x < −1.
    """
    check_activation(activation)
    return _activated(x, activation).astype(x.dtype)


@recomputed
def gated(
    gate: Float[Array, "*shape"],
    x: Float[Array, "*shape"],
    activation: str,
) -> Float[Array, "*shape"]:
    """Computes act(gate) ⊙ x in float32 for a gated activation; the result has the dtype of x.

    For "clipped_swiglu", the function computes act(gate) ⊙ (min(max(x, −7), 7) + 1).
    """
    other = _GATED.get(activation, lambda x: x)(_wide(x))
    return (_activated(gate, activation) * other).astype(x.dtype)


def _activated(x: Float[Array, "*shape"], activation: Activation) -> Float[Array, "*shape"]:
    function = (_PLAIN | _GATES)[activation][0] if isinstance(activation, str) else activation
    return function(_wide(x))


def _wide(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Converts x to float32, unless its dtype is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _scaled_silu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Computes x σ(1.702 x), which approximates GELU (Hendrycks and Gimpel 2016)."""
    return x * jax.nn.sigmoid(1.702 * x)


def activation_power(activation: Activation, of_gate: float = 1.0) -> Scalar:
    """Returns E[act(z)²] for z ~ N(0, 1), multiplied by `of_gate` if the activation is gated.

    `of_gate` is the mean square of the features that the gate multiplies.
    For a user-defined function, the expectation is integrated by the trapezoidal rule on [−8, 8].
    """
    if isinstance(activation, str):
        return (_PLAIN | _GATES)[activation][1] * (of_gate if activation in _GATES else 1.0)
    z = np.linspace(-8, 8, 1025, dtype=np.float32)
    density = np.exp(-(z**2) / 2)
    return jnp.dot(density / density.sum(), jnp.square(activate(jnp.asarray(z), activation)))


def _check(weights: Any, x: Float[Any, "*batch dim"], activation: object, **_: object) -> None:
    check_activation(activation)
    dim, inner = x.shape[-1], ("up", "gate") if activation in _GATES else ("up",)
    check_maps("weights", weights, {name: (dim, None) for name in inner})
    mlp_dim = weights["up"]["kernel"].shape[-1]
    sizes = {name: (dim, mlp_dim) for name in inner}
    check_maps("weights", weights, {**sizes, "down": (mlp_dim, dim)})


@checks_arguments(_check)
def feed_forward(
    weights: Weights,
    x: Float[Array, "*batch dim"],
    activation: Activation = "gelu_tanh",
    hook: HookFunction = NO_HOOK,
) -> Float[Array, "*batch dim"]:
    """Computes act(x W₁ + b₁) W₂ + b₂; gated: (act(x W_g + b_g) ⊙ (x W₁ + b₁)) W₂ + b₂.

    Args:
        weights: the linear layers "up" (W₁), "down" (W₂) and, for a gated activation, "gate" (W_g).
            Each is {"kernel": [inputs, outputs]} with an optional "bias" (see `init_feed_forward`).
        x: the input.
        activation: a name in ACTIVATIONS, or an elementwise function, which is applied in float32.
            "swiglu", "geglu", "geglu_tanh" (Shazeer 2020) and "clipped_swiglu" (see `gated`) are
            gated; functions are not.
        hook: see `functional.hooks`.

    Returns:
        The output, in the shape and dtype of x.

    Raises:
        ValueError: The activation is unknown, or a kernel is missing or has a wrong shape.
    """
    hidden = linear(weights["up"], x)
    if activation in _GATES:
        hidden = gated(linear(weights["gate"], x), hidden, activation)
    else:
        hidden = activate(hidden, activation)
    return linear(weights["down"], hook("feedforward.hidden", hidden))


@dataclass(frozen=True)
class FeedForward(SubLayer):
    """Position-wise feed-forward layer; see `feed_forward`.

    Attributes:
        width: number of hidden features.
        activation: a name in ACTIVATIONS, or an elementwise function.
        use_bias: whether the linear layers have biases.
    """

    name: ClassVar[str] = "feedforward"
    hook_points: ClassVar[tuple[str, ...]] = ("feedforward.hidden", "feedforward.output")

    width: int
    activation: Activation = "gelu_tanh"
    use_bias: bool = True

    def weight_axes(self) -> dict[str, tuple[WeightAxis, ...]]:
        """See `SubLayer`."""
        return axes_of_linear("dim", "hidden", "up", "gate") | axes_of_linear(
            "hidden", "dim", "down"
        )

    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """See `SubLayer`."""
        gated = initial.gate_power
        if self.activation in _GATED:
            # The gate multiplies u + 1 with E[u] = 0, and E[(u + 1)²] = E[u²] + 1.
            gated += 1.0
        power = activation_power(self.activation, gated)
        return init_feed_forward(
            key,
            dim,
            self.width,
            self.activation,
            use_bias=self.use_bias,
            stddev=initial.reading(dim),
            output_stddev=initial.writing(self.width) * initial.gain(power),
        )

    def __call__(self, weights: Weights, x: Float[Array, "*batch length dim"], at: At) -> Output:
        """See `feed_forward`."""
        y = feed_forward(weights, x, self.activation, at.hook)
        return Output(at.hook("feedforward.output", y))


def init_feed_forward(
    key: PRNGKeyArray,
    dim: int,
    mlp_dim: int,
    activation: Activation,
    *,
    use_bias: bool = True,
    stddev: Scalar = 0.02,
    output_stddev: Scalar = 0.02,
) -> Weights:
    """Returns initial weights of `feed_forward`.

    `stddev` is the standard deviation of W₁ and W_g, and `output_stddev` is the standard deviation
    of W₂.
    """
    up, gate, down = jax.random.split(key, 3)
    weights = {
        "up": init_linear(up, dim, mlp_dim, use_bias=use_bias, stddev=stddev),
        "down": init_linear(down, mlp_dim, dim, use_bias=use_bias, stddev=output_stddev),
    }
    if activation in _GATES:
        weights["gate"] = init_linear(gate, dim, mlp_dim, use_bias=use_bias, stddev=stddev)
    return weights
