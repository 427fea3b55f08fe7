"""The affine map equals its float64 formula with a dense and with a packed kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.functional.linear.affine import init_linear, linear
from jaxformer.functional.linear.kernels import pack

compiled = jax.jit(linear)  # few shapes, because each one compiles
bias_gradient = jax.jit(jax.grad(lambda weights, x, factors: (linear(weights, x) * factors).sum()))


def drawn(seed, in_dim, out_dim, use_bias):
    key, bias_key = jax.random.split(jax.random.key(seed))
    weights = init_linear(key, in_dim, out_dim, use_bias=use_bias, stddev=1.0)
    if use_bias:
        weights["bias"] = jax.random.normal(bias_key, (out_dim,))
    return weights


@given(
    seed=st.integers(0, 99),
    # times 2 rows: above 64 rows, packed kernels take another path
    form=st.sampled_from([(1, 40, True), (9, 1, False), (9, 40, True)]),
)
def test_linear_equals_formula_for_every_kernel_layout(seed, form):
    out_dim, rows, use_bias = form
    weights = drawn(seed, 8, out_dim, use_bias)
    x = jax.random.normal(jax.random.key(seed + 1), (rows, 2, 8))
    wanted = np.asarray(x, np.float64) @ np.asarray(weights["kernel"], np.float64)
    wanted += np.asarray(weights.get("bias", 0.0), np.float64)
    for layout in (weights, {**weights, "kernel": pack(weights["kernel"], "float32", 2)}):
        np.testing.assert_allclose(compiled(layout, x), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [3, pytest.param(70, marks=pytest.mark.slow)])
@pytest.mark.parametrize("out_dim", [4, pytest.param(5, marks=pytest.mark.slow)])
def test_float32_results_are_not_rounded_to_the_operands_dtype(out_dim, rows):
    """Logits of a bfloat16 model are float32, so `linear(..., "float32")` must not round them."""
    weights = drawn(0, 64, out_dim, True)
    x = jax.random.normal(jax.random.key(1), (rows, 64)).astype("bfloat16")
    kernel = np.asarray(weights["kernel"].astype("bfloat16"), np.float64)
    wanted = np.asarray(x, np.float64) @ kernel + np.asarray(weights["bias"], np.float64)
    for layout in (weights, {**weights, "kernel": pack(weights["kernel"], "bfloat16", 2)}):
        y = linear(layout, x, "float32")
        assert y.dtype == "float32"
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)
        assert linear(layout, x).dtype == "bfloat16"


@given(seed=st.integers(0, 2**32 - 1))
def test_bias_gradients_are_summed_in_float32(seed):
    """For bfloat16 inputs too: the result has no rounding to bfloat16."""
    weights = drawn(0, 8, 9, use_bias=True)
    x = jnp.ones((3, 300, 8), jnp.bfloat16)
    factors = jnp.asarray(np.random.default_rng(seed).normal(size=(3, 300, 9)), jnp.bfloat16)
    gradient = bias_gradient(weights, x, factors)["bias"]
    exact = np.asarray(factors, np.float64)
    limit = 2.0**-20 * abs(exact).sum(axis=(0, 1))
    assert (abs(gradient - exact.sum(axis=(0, 1))) <= limit).all()
