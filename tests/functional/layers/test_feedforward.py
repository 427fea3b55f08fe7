"""The feed-forward layer against its formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxformer.functional import At, feed_forward
from jaxformer.functional.layers.feedforward import (
    ACTIVATIONS,
    activate,
    gated,
    init_feed_forward,
)
from jaxformer.functional.layers.plain import ActivatedFeedForward
from tests.properties import oracle, tiny
from tests.slow import mostly_slow


def random_weights(seed, activation, use_bias=True):
    """Draws nonzero weights with the shapes of `init_feed_forward`."""
    shapes = init_feed_forward(jax.random.key(0), 6, 10, activation, use_bias=use_bias)
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: np.float32(rng.normal(size=leaf.shape)), shapes)


@pytest.mark.parametrize("use_bias", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "activation", mostly_slow(ACTIVATIONS, "relu", "gelu", "swiglu", "geglu", slow=ACTIVATIONS)
)
@given(seed=tiny.seeds)
def test_feed_forward_equals_formula(activation, use_bias, seed):
    """act(x W₁ + b₁) W₂ + b₂, gated for the gated activations, with both forms of GELU.

    `ActivatedFeedForward` applies the activation after the second map too, as in lecture 10.
    """
    weights, x = random_weights(seed, activation, use_bias), tiny.embeddings(seed, 3, 6)
    device = jax.tree.map(jnp.asarray, weights)
    for twice in (False, True):
        y = feed_forward(device, x, activation)
        if twice:
            y = ActivatedFeedForward(10, activation)(device, x, At(None)).x
        exact = oracle.float64(weights)
        expected = oracle.feed_forward(exact, np.asarray(x, np.float64), activation, twice)
        tiny.close(y, expected, 1e-5)


@pytest.mark.parametrize("dtype, rtol", [("float32", 1e-6), ("bfloat16", 2**-8)])
@given(seed=tiny.seeds)
def test_user_defined_activation_is_computed_in_float32(dtype, rtol, seed):
    """act(x W₁ + b₁) W₂ + b₂ without a gate; act is rounded once, and so is its gradient."""
    weights, x = random_weights(seed, jnp.sin), tiny.embeddings(seed, 3, 6)
    assert weights.keys() == {"up", "down"}
    y = feed_forward(jax.tree.map(jnp.asarray, weights), x, jnp.sin)
    up, down = weights["up"], weights["down"]
    hidden = np.sin(np.asarray(x, np.float64) @ up["kernel"] + up["bias"])
    tiny.close(y, hidden @ down["kernel"] + down["bias"], 1e-4)
    x = (50 * x).astype(dtype)
    for function, exact in ((activate, np.sin), (slope_of, np.cos)):
        found = np.asarray(function(x, jnp.sin), np.float64)
        np.testing.assert_allclose(found, exact(np.asarray(x, np.float64)), rtol=rtol, atol=1e-5)


def slope_of(x, activation):
    return jax.grad(lambda x: activate(x, activation).sum())(x)


@pytest.mark.parametrize("wrong", ["reLU", 3, None, ("relu",), dict])
def test_feed_forward_rejects_invalid_activation(wrong):
    weights, x = jax.tree.map(jnp.asarray, random_weights(0, "relu")), jnp.ones((2, 6))
    with pytest.raises(ValueError, match=r"one of relu, .*, or a function of an array"):
        feed_forward(weights, x, wrong)


@pytest.mark.slow
@given(seed=tiny.seeds)
def test_feed_forward_computes_each_position_independently(seed):
    """The layer gives the same values position by position, under vmap, and mixes none."""
    weights = jax.tree.map(jnp.asarray, random_weights(seed, "swiglu"))
    x = tiny.embeddings(seed, 2, 3, 6)
    y = feed_forward(weights, x, "swiglu")
    alone = jax.vmap(jax.vmap(lambda x: feed_forward(weights, x, "swiglu")))(x)
    tiny.close(alone, y)
    changed = feed_forward(weights, x.at[1, 2].add(1.0), "swiglu")
    assert (np.asarray(y != changed).any(axis=-1) == [[0, 0, 0], [0, 0, 1]]).all()


@pytest.mark.parametrize("activation", oracle.ACTIVATIONS)
def test_activation_functions_round_their_bfloat16_result_only_once(activation):
    """The only error is that of the result, also where 1 + tanh or 1 + erf is almost 0.

    The derivative is exact up to its own rounding, by a central difference in float64.
    """
    x = jnp.linspace(-6.0, 6.0, 1001).astype(jnp.bfloat16)
    x64, exact = np.asarray(x, np.float64), oracle.ACTIVATIONS[activation]
    y = activate(x, activation)
    assert y.dtype == jnp.bfloat16
    # Near −1, tanh and erf in float32 have errors of about 1e-7, multiplied by up to |x| = 6.
    np.testing.assert_allclose(np.asarray(y, np.float64), exact(x64), rtol=2**-8, atol=1e-6)
    slope = np.asarray(jax.vmap(jax.grad(activate), (0, None))(x, activation), np.float64)
    expected = (exact(x64 + 1e-6) - exact(x64 - 1e-6)) / 2e-6
    smooth = abs(x64) > 1e-3  # without 0, where ReLU has a kink
    np.testing.assert_allclose(slope[smooth], expected[smooth], rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("activation", oracle.GATES)
@given(seed=tiny.seeds)
def test_feed_forward_rounds_gates_once_in_bfloat16(activation, seed):
    """act(gate) is not rounded before it multiplies the other half."""
    x = tiny.embeddings(seed, 64, 8).astype(jnp.bfloat16)
    same, reversed_ = {"kernel": np.eye(8)}, {"kernel": np.eye(8)[::-1]}
    weights = {"up": same, "gate": reversed_, "down": same}
    y = feed_forward(jax.tree.map(jnp.asarray, weights), x, activation)
    expected = oracle.feed_forward(weights, np.asarray(x, np.float64), activation)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=2**-8, atol=1e-6)


clipped = jax.jit(lambda g, u: gated(g, u, "clipped_swiglu"))
clipped_gradients = jax.jit(jax.grad(lambda g, u: clipped(g, u).sum(), (0, 1)))


@pytest.mark.parametrize("dtype, rtol", [("float32", 1e-6), ("bfloat16", 2**-8)])
@given(seed=tiny.seeds)
def test_clipped_swiglu_clips_gate_and_value(dtype, rtol, seed):
    """min(g, 7) σ(1.702 min(g, 7)) (min(max(u, −7), 7) + 1), with values far beyond ±7.

    A clipped half has no gradient.
    """
    gate, up = 8 * tiny.embeddings(seed, 2, 64, 8).astype(dtype)
    y = clipped(gate, up)
    g, u = np.minimum(np.float64(gate), 7.0), np.clip(np.float64(up), -7.0, 7.0)
    assert y.dtype == dtype
    expected = g / (1 + np.exp(-1.702 * g)) * (u + 1)
    np.testing.assert_allclose(np.float64(y), expected, rtol=rtol, atol=1e-6)
    of_gate, of_up, gate, up = map(np.asarray, (*clipped_gradients(gate, up), gate, up))
    assert (of_gate[gate > 7] == 0).all() and (of_up[abs(up) > 7] == 0).all()
    assert (of_up[(abs(up) < 7) & (gate > -7)] != 0).all()
