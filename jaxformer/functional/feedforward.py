"""The position-wise feed-forward layer (seeds: lecture 10 §7; lecture 13 §3)."""

import jax
from jaxtyping import Array, Float

from jaxformer.functional.linear import init_linear, linear
from jaxformer.functional.taps import no_tap

_PLAIN = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),  # x Φ(x), by erf
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),  # GPT-2's approximation
    "silu": jax.nn.silu,
}
_GATES = {
    "swiglu": _PLAIN["silu"],
    "geglu": _PLAIN["gelu"],
    "geglu_tanh": _PLAIN["gelu_tanh"],
}
ACTIVATIONS = (*_PLAIN, *_GATES)


def activate(x: Float[Array, "*shape"], activation: str) -> Float[Array, "*shape"]:
    """The non-linearity of that name, one of ACTIVATIONS; of a gated one, that of its gate."""
    return (_PLAIN | _GATES)[activation](x)


def feed_forward(
    weights,
    x: Float[Array, "*batch dim"],
    activation: str = "gelu_tanh",
    *,
    output_activation: bool = False,
    tap=no_tap,
) -> Float[Array, "*batch dim"]:
    """act(x W₁ + b₁) W₂ + b₂, or, gated, (act(x W_g + b_g) ⊙ (x W₁ + b₁)) W₂ + b₂.

    `activation` is one of ACTIVATIONS; "swiglu", "geglu" and "geglu_tanh" are gated
    (Shazeer 2020).
    `output_activation` puts the non-linearity after the second map too, as lecture 10 §7 wrote it.
    """
    hidden = linear(weights["up"], x)
    if activation in _GATES:
        hidden = activate(linear(weights["gate"], x), activation) * hidden
    else:
        hidden = activate(hidden, activation)
    y = linear(weights["down"], tap("feedforward.hidden", hidden))
    return tap("feedforward.output", activate(y, activation) if output_activation else y)


def init_feed_forward(
    key, dim: int, mlp_dim: int, activation: str, *, use_bias=True, output_stddev=0.02
):
    """Weights of `feed_forward`; output_stddev is that of W₂, which writes into the residual."""
    up, gate, down = jax.random.split(key, 3)
    weights = {
        "up": init_linear(up, dim, mlp_dim, use_bias=use_bias),
        "down": init_linear(down, mlp_dim, dim, use_bias=use_bias, stddev=output_stddev),
    }
    if activation in _GATES:
        weights["gate"] = init_linear(gate, dim, mlp_dim, use_bias=use_bias)
    return weights
