"""Taint in 64-bit JAX: two bounds that differ stay different, however close they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.verify.dependency import dependency_matrix
from tests.verify.programs import LENGTH, _moved, _number, _reduced, _reshaped, program


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def edges(function, x, witness):
    return dependency_matrix(function, x, witnesses=(witness,)).matrix


def missed(function, seed):
    """Returns whether a change shows an edge that taint denies, and the number of edges."""
    x = jnp.asarray(np.random.default_rng(seed).normal(size=(LENGTH, 3)))
    found, true = edges(function, x, "taint"), edges(function, x, "change")
    return bool((true & ~found).any()), int(true.sum())


def narrow(x):
    return 1 + 1e-9 * jnp.tanh(x)


def narrow_program(seed, kinds):
    """Returns a function that moves values between 1 − 1e-9 and 1 + 1e-9, and shows their part."""

    def run(x):
        rng, arrays = np.random.default_rng(seed), [narrow(x)]
        for _ in range(4):
            some, other = (arrays[rng.integers(len(arrays))] for _ in range(2))
            arrays.append(kinds[rng.integers(len(kinds))](rng, some, other))
        return 1e9 * (arrays[-1] - 1)

    return run


@pytest.mark.slow
def test_taint_analysis_finds_dependencies_of_nearly_constant_values():
    total = 0
    for seed in range(7):
        wrong, num = missed(narrow_program(seed, (_moved, _reshaped)), seed)
        assert not wrong, seed
        total += num
    assert total > 30


@pytest.mark.slow
def test_taint_analysis_finds_dependencies_of_nearly_constant_sums():
    for seed in range(20):
        assert not missed(narrow_program(seed, (_moved, _reduced)), seed)[0], seed


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [(_moved, _reshaped, _number), (_moved, _reduced)])
def test_taint_analysis_finds_all_dependencies_of_float64_programs(kinds):
    for seed in range(20):
        assert not missed(program(seed, kinds), seed)[0], seed


def test_tiny_nonzero_derivative_is_reported_as_a_dependency():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(LENGTH, 3)))
    assert edges(lambda x: 1e-60 * jnp.cumsum(x, axis=0), x, "derivative").sum() == 15
