"""Layer and RMS norm equal their float64 formulas where float32 easily loses digits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.functional import layer_norm, rms_norm
from jaxformer.functional.layers.norms import dynamic_tanh
from jaxformer.models.builders.parts import build_norm
from tests.properties import oracle, tiny


def random_inputs(seed, mean=0.0, size=1.0, dim=64):
    rng = np.random.default_rng(seed)
    x = np.float32(mean + size * rng.normal(size=(3, dim)))
    return x, np.float32(rng.normal(size=dim)), np.float32(rng.normal(size=dim))


@given(
    seed=tiny.seeds,
    mean=st.sampled_from([0.0, 1.0, -1e4, 1e4]),
    size=st.sampled_from([1e-2, 1.0, 1e3]),
    epsilon=st.sampled_from([1e-6, 1e-5, 0.1, 1.0]),
)
def test_layer_norm_equals_formula(seed, mean, size, epsilon):
    """γ (x − μ) / √(σ² + ε) + β in float64, with ε inside the root.

    No digits cancel when the mean is 10⁶ deviations from 0, where E[x²] − μ² would be negative.
    """
    x, scale, bias = random_inputs(seed, mean, size)
    y = layer_norm(*map(jnp.asarray, (x, scale, bias)), epsilon=epsilon)
    # μ has an error of a few roundings of x, so x − μ may have the same error.
    rounding = abs(mean) * 2.0**-23 / max(size, epsilon**0.5)
    tiny.close(y, oracle.layer_norm(x, scale, bias, epsilon), 1e-5 + 4 * rounding)


@given(
    seed=tiny.seeds,
    size=st.sampled_from([1e-3, 1.0, 1e4]),
    epsilon=st.sampled_from([1e-6, 1e-5, 0.1, 1.0]),
)
def test_rms_norm_equals_formula(seed, size, epsilon):
    """γ x / √(mean(x²) + ε) in float64, with ε inside the root."""
    x, scale, _ = random_inputs(seed, 0.5 * size, size)
    y = rms_norm(jnp.asarray(x), jnp.asarray(scale), epsilon)
    tiny.close(y, oracle.rms_norm(x, scale, epsilon))


@given(seed=tiny.seeds, alpha=st.sampled_from([0.01, 0.5, 4.0]), size=st.sampled_from([1e-2, 1e3]))
def test_dynamic_tanh_equals_formula(seed, alpha, size):
    """γ tanh(α x) + β in float64; in bfloat16 the only error is rounding the result once."""
    x, scale, bias = map(jnp.asarray, random_inputs(seed, 0.0, size))
    for value, rounding in ((x, 1e-6), (x.astype(jnp.bfloat16), 2**-8)):
        wanted = np.tanh(alpha * np.asarray(value, np.float64)) * scale + bias
        y = dynamic_tanh(value, scale, jnp.full(1, alpha), bias)
        assert y.dtype == value.dtype
        np.testing.assert_allclose(np.asarray(y, np.float64), wanted, rtol=rounding, atol=1e-5)


@pytest.mark.parametrize("value", [0.0, 3.0, 1e4])
def test_layer_norm_of_equal_features_gives_bias_and_finite_gradients(value):
    """With variance 0, x − μ is divided by √ε only: the output is β and the gradient is finite."""
    x, scale, bias = jnp.full((2, 8), value), jnp.ones(8), jnp.arange(8.0)
    tiny.close(layer_norm(x, scale, bias), np.tile(np.arange(8.0), (2, 1)))
    for norm in (layer_norm, rms_norm):
        gradient = jax.grad(lambda x, norm=norm: (norm(x, scale) * bias).sum())(x)
        assert np.isfinite(gradient).all()
    tiny.close(rms_norm(jnp.zeros((2, 8)), scale), np.zeros((2, 8)), 0.0)


@given(seed=tiny.seeds, mean=st.sampled_from([0.0, 100.0]))
def test_norm_statistics_are_float32_for_every_dtype(seed, mean):
    """bfloat16 in and out: the only error is rounding the result once."""
    x, scale, bias = (jnp.asarray(part) for part in random_inputs(seed, mean))
    narrow = x.astype(jnp.bfloat16)
    for y, expected in (
        (layer_norm(narrow, scale, bias), oracle.layer_norm(narrow, scale, bias)),
        (rms_norm(narrow, scale), oracle.rms_norm(narrow, scale)),
    ):
        assert y.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=2**-8, atol=1e-4)


def test_norm_built_from_config_equals_reference_formula():
    """Initial weights change nothing but the size; "none" is no norm."""
    x = jnp.asarray(random_inputs(0, dim=8)[0])
    for use_bias in (True, False):
        for name, expected in (
            ("layer", oracle.layer_norm(x, 1.0, epsilon=0.1)),
            ("rms", oracle.rms_norm(x, 1.0, epsilon=0.1)),
            ("rms_one_plus", oracle.rms_norm(x, 1.0, epsilon=0.1)),
            ("dynamic_tanh", np.tanh(0.5 * x)),
        ):
            config = jf.DecoderConfig(norm=name, norm_epsilon=0.1, norm_bias=use_bias)
            norm = build_norm(config.resolved)
            weights = norm.init(8)
            assert ("bias" in weights) == (name in ("layer", "dynamic_tanh") and use_bias)
            tiny.close(norm(weights, x), expected)
    assert build_norm(jf.DecoderConfig(norm="none")) is None
