"""The position-wise feed-forward layer.

Reference:
    Notes, lecture 10 §7; lecture 13 §3.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.arguments import check_choice, check_maps, checks_arguments
from jaxformer.functional.layers.sublayer import (
    At,
    Initial,
    Output,
    SubLayer,
    WeightAxis,
    axes_of_linear,
)
from jaxformer.functional.linear.affine import init_linear, linear
from jaxformer.functional.recomputed import recomputed
from jaxformer.functional.taps import NO_TAP, TapFunction
from jaxformer.functional.trees import Weights

_LIMIT = 7.0  # of gpt-oss's gates
# Each function with E[act(z)²] for z ~ N(0, 1), from which `initial` scales the weights.
_PLAIN = {
    "relu": (jax.nn.relu, 0.5),
    "gelu": (lambda x: jax.nn.gelu(x, approximate=False), 0.4252),  # x Φ(x), by erf
    "gelu_tanh": (lambda x: jax.nn.gelu(x, approximate=True), 0.4252),  # GPT-2's approximation
    "silu": (jax.nn.silu, 0.3557),
    "squared_relu": (lambda x: jnp.square(jax.nn.relu(x)), 1.5),  # Primer (So et al. 2021)
}
_GATES = {
    "swiglu": _PLAIN["silu"],
    "geglu": _PLAIN["gelu"],
    "geglu_tanh": _PLAIN["gelu_tanh"],
    "clipped_swiglu": (lambda x: _scaled_silu(jnp.minimum(x, _LIMIT)), 0.4220),  # gpt-oss
}
# What the gate multiplies, where it is not W₁ x + b₁ itself.
_GATED = {"clipped_swiglu": lambda x: jnp.clip(x, -_LIMIT, _LIMIT) + 1.0}
ACTIVATIONS = (*_PLAIN, *_GATES)


@recomputed
def activate(x: Float[Array, "*shape"], activation: str) -> Float[Array, "*shape"]:
    """Applies an activation; for the name of a gated one, the activation of its gate.

    It is computed in float32, whatever the dtype of x, which is also the dtype of the result. In
    bfloat16, 1 + tanh of GELU would lose most digits for x < −1.
    """
    check_choice("activation", activation, ACTIVATIONS)
    return _activated(x, activation).astype(x.dtype)


@recomputed
def gated(
    gate: Float[Array, "*shape"], x: Float[Array, "*shape"], activation: str
) -> Float[Array, "*shape"]:
    """Computes act(gate) ⊙ x in float32; returns the dtype of x.

    For "clipped_swiglu" it is act(gate) ⊙ (min(max(x, −7), 7) + 1).
    """
    other = _GATED.get(activation, lambda x: x)(_wide(x))
    return (_activated(gate, activation) * other).astype(x.dtype)


def _activated(x: Float[Array, "*shape"], activation: str) -> Float[Array, "*shape"]:
    function, _ = (_PLAIN | _GATES)[activation]
    return function(_wide(x))


def _wide(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns x in float32, or in its own dtype if that has more digits."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _scaled_silu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Computes x σ(1.702 x), which approximates GELU (Hendrycks and Gimpel 2016)."""
    return x * jax.nn.sigmoid(1.702 * x)


def activation_power(activation: str, of_gate: float = 1.0) -> float:
    """Returns E[act(z)²] for z ~ N(0, 1); for a gated activation, `of_gate` times that."""
    return (_PLAIN | _GATES)[activation][1] * (of_gate if activation in _GATES else 1.0)


def _check(weights: Any, x: Float[Any, "*batch dim"], activation: str, **_: object) -> None:
    check_choice("activation", activation, ACTIVATIONS)
    dim, inner = x.shape[-1], ("up", "gate") if activation in _GATES else ("up",)
    check_maps("weights", weights, {name: (dim, None) for name in inner})
    mlp_dim = weights["up"]["kernel"].shape[-1]
    sizes = {name: (dim, mlp_dim) for name in inner}
    check_maps("weights", weights, {**sizes, "down": (mlp_dim, dim)})


@checks_arguments(_check)
def feed_forward(
    weights: Weights,
    x: Float[Array, "*batch dim"],
    activation: str = "gelu_tanh",
    output_activation: bool = False,
    tap: TapFunction = NO_TAP,
) -> Float[Array, "*batch dim"]:
    """Computes act(x W₁ + b₁) W₂ + b₂, or, gated, (act(x W_g + b_g) ⊙ (x W₁ + b₁)) W₂ + b₂.

    Args:
        weights: the maps "up" (W₁), "down" (W₂) and, for a gated activation, "gate" (W_g). Each is
            {"kernel": [inputs, outputs]} with an optional "bias" (see `init_feed_forward`).
        x: the input.
        activation: one of ACTIVATIONS. "swiglu", "geglu" and "geglu_tanh" are gated (Shazeer 2020),
            and so is "clipped_swiglu" (see `gated`).
        output_activation: whether to apply the activation after the second map too, as in lecture
            10 §7.
        tap: see `functional.taps`.

    Returns:
        The output, in the shape and dtype of x.

    Raises:
        ValueError: the activation is unknown, or a kernel is missing or does not fit.
    """
    hidden = linear(weights["up"], x)
    if activation in _GATES:
        hidden = gated(linear(weights["gate"], x), hidden, activation)
    else:
        hidden = activate(hidden, activation)
    y = linear(weights["down"], tap("feedforward.hidden", hidden))
    return tap("feedforward.output", activate(y, activation) if output_activation else y)


# A gate squares the size of its input, so without norm and residual no size is stable. Four layers
# of 64 features grew to 440 with E[u²] = 1; with 1.5 they end between 0.02 and 10.
_GATE = 1.5


@dataclass(frozen=True)
class FeedForward(SubLayer):
    """The position-wise feed-forward layer as a sub-layer; see `feed_forward`.

    Attributes:
        width: number of hidden features.
        activation: one of ACTIVATIONS.
        output_activation: whether the activation is also applied to the output.
        use_bias: whether the maps have biases.
    """

    name: ClassVar[str] = "feedforward"
    points: ClassVar[tuple[str, ...]] = ("feedforward.hidden", "feedforward.output")

    width: int
    activation: str = "gelu_tanh"
    output_activation: bool = False
    use_bias: bool = True

    def weight_axes(self) -> dict[str, tuple[WeightAxis, ...]]:
        """See `SubLayer`."""
        return axes_of_linear("dim", "hidden", "up", "gate") | axes_of_linear(
            "hidden", "dim", "down"
        )

    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """See `SubLayer`."""
        gated = 1.0 if initial.is_normed else _GATE
        if self.activation in _GATED:
            gated += 1.0  # E[(u + 1)²] = E[u²] + 1
        power = activation_power(self.activation, gated)
        written = initial.writing(self.width, power)
        if self.output_activation and initial.num_layers is None:
            written /= power**0.5
        return init_feed_forward(
            key,
            dim,
            self.width,
            self.activation,
            use_bias=self.use_bias,
            stddev=initial.reading(dim),
            output_stddev=written,
        )

    def __call__(self, weights: Weights, x: Float[Array, "*batch length dim"], at: At) -> Output:
        """See `feed_forward`."""
        return Output(feed_forward(weights, x, self.activation, self.output_activation, at.tap))


def init_feed_forward(
    key: PRNGKeyArray,
    dim: int,
    mlp_dim: int,
    activation: str,
    *,
    use_bias: bool = True,
    stddev: float = 0.02,
    output_stddev: float = 0.02,
) -> Weights:
    """Returns the weights of `feed_forward`; stddev is that of W₁ and W_g, output_stddev of W₂."""
    up, gate, down = jax.random.split(key, 3)
    weights = {
        "up": init_linear(up, dim, mlp_dim, use_bias=use_bias, stddev=stddev),
        "down": init_linear(down, mlp_dim, dim, use_bias=use_bias, stddev=output_stddev),
    }
    if activation in _GATES:
        weights["gate"] = init_linear(gate, dim, mlp_dim, use_bias=use_bias, stddev=stddev)
    return weights
