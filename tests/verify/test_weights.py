"""Leaks behind weights that are 0: fresh models pass every test of values, trained ones leak."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jaxformer.verify import RemarkWarning, assert_dependencies, dependency_matrix, rules
from tests.properties import tiny

LENGTH = 6
CAUSAL = rules.causal(LENGTH)
X = tiny.embeddings(0, LENGTH, 4)
LOWER = jnp.tril(jnp.ones((LENGTH, LENGTH)))


def causal(x):
    return jnp.cumsum(x, axis=0)


def leak(x):
    return jnp.broadcast_to(x.mean(axis=0), x.shape)


def _gated(x, gate):
    return causal(x) + leak(x) * gate


KERNEL, NUMBER, SCALE = jnp.zeros((4, 4)), jnp.zeros(()), jnp.zeros(4)
HIDDEN = {
    "a kernel": lambda x: causal(x) + leak(x) @ KERNEL,
    "a NumPy kernel": lambda x: causal(x) + leak(x) @ np.zeros((4, 4), np.float32),
    "ReZero": lambda x: _gated(x, NUMBER),
    "a scale": lambda x: _gated(x, SCALE),
    "a gate": lambda x: _gated(x, jnp.tanh(NUMBER)),
    "a compiled gate": lambda x: _gated(x, jax.jit(lambda: jnp.tanh(NUMBER) * SCALE)()),
    "a gate of each step": lambda x: (
        causal(x) + jax.lax.scan(lambda state, row: (state, row * SCALE), 0, leak(x))[1]
    ),
    "a function that is computed again": jax.checkpoint(lambda x: _gated(x, SCALE)),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_taint_analysis_finds_dependency_through_zero_weights(name):
    found = dependency_matrix(HIDDEN[name], X, witnesses=("taint",))
    assert found.matrix.all() and "arrays of zeros in the function's closure" in found.notes[0]
    changes = dependency_matrix(HIDDEN[name], X, witnesses=("change",))
    np.testing.assert_array_equal(changes.matrix, CAUSAL)


class Residual(nnx.Module):
    def __init__(self, mask):
        self.mask = mask
        self.mix = nnx.MultiHeadAttention(1, 4, decode=False, rngs=nnx.Rngs(0))
        self.out = nnx.Linear(4, 4, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return x + self.out(self.mix(x, mask=self.mask))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.Dense(4, kernel_init=nn.initializers.zeros)(leak(x))
        return nn.LayerNorm(scale_init=nn.initializers.zeros)(x)


@pytest.mark.slow
def test_taint_analysis_finds_dependencies_of_untrained_modules():
    """It is tested for NNX and Linen, with captured weights and with weights as arguments."""
    block = Block()
    variables = block.init(jax.random.key(0), X)
    for function, options in (
        (Residual(None), {}),
        (lambda x: block.apply(variables, x), {}),
        (block.apply, {"weights": variables}),
    ):
        assert dependency_matrix(function, X, witnesses=("taint",), **options).matrix.all()
    sound = dependency_matrix(Residual(CAUSAL), X, witnesses=("taint",))
    np.testing.assert_array_equal(sound.matrix, CAUSAL)
    assert not sound.remarks


@pytest.mark.parametrize("value", [0.0, -1.0, 1.0])
def test_taint_analysis_result_holds_for_all_values_of_the_weights(value):
    """A gate that a negative weight closes can open; a captured mask stays a mask."""

    def function(weights, x):
        return LOWER @ x + leak(x) * jax.nn.relu(weights["gate"])

    options = {"weights": {"gate": jnp.full(4, value)}, "witnesses": ("taint",)}
    assert dependency_matrix(function, X, **options).matrix.all()
    masked = dependency_matrix(lambda weights, x: LOWER @ x * weights["gate"], X, **options)
    np.testing.assert_array_equal(masked.matrix, CAUSAL)


def test_zeros_in_arrays_that_a_function_closes_over_add_a_remark_to_taint_analysis():
    """They may be a mask or rows of an embedding; a passing test warns or returns the remark."""
    rows = jnp.ones((LENGTH, 4)).at[1:].set(0.0)
    only = {"witnesses": ("taint",)}
    for function, rule, count in (
        (lambda x: LOWER @ x, CAUSAL, 15),
        (lambda x: rows * x.sum(axis=0), np.arange(LENGTH)[:, None] + 0 * CAUSAL == 0, 30),
    ):
        with pytest.warns(RemarkWarning, match=rf"would add {count} dependencies.*weights=…"):
            assert_dependencies(function, X, rule, **only)
        assert assert_dependencies(function, X, rule, allow_remarks=True, **only).remarks
    assert_dependencies(lambda weights, x: LOWER @ x, X, CAUSAL, weights=(), **only)
    assert_dependencies(lambda x: jnp.where(CAUSAL, 1.0, 0.0) @ x, X, CAUSAL, **only)


def test_assertion_warns_about_primitive_unknown_to_taint_analysis():
    def function(x):
        return jnp.linalg.cholesky(x @ x.T + jnp.eye(LENGTH))

    with pytest.warns(RemarkWarning, match="no rule for cholesky"):
        assert_dependencies(function, X, rules.bidirectional(LENGTH), witnesses=("taint",))


@pytest.mark.parametrize("rule", [CAUSAL, np.stack([CAUSAL, CAUSAL])], ids=["one", "each"])
def test_dependency_table_of_one_sequence_is_applied_to_a_whole_batch(rule):
    """Batch elements must then be independent."""
    batch, only = jnp.stack([X, X + 1]), {"witnesses": ("taint",)}
    assert_dependencies(lambda x: jnp.cumsum(x, axis=1), batch, rule, **only)
    with pytest.raises(
        AssertionError, match="6 unexpected dependencies: output 0 of batch element 1"
    ):
        assert_dependencies(lambda x: jnp.cumsum(x, axis=1) + x[:1], batch, rule, **only)
    with pytest.raises(ValueError, match=r"rule is bool \(5, 5\).*or bool \(6, 6\) for every"):
        assert_dependencies(jnp.sin, batch, rules.causal(5), **only)


def test_error_for_a_module_in_training_mode_recommends_eval():
    dropout, norm = nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    for module in (dropout, norm):
        with pytest.raises(ValueError, match=r"Call model\.eval\(\)"):
            dependency_matrix(module, X)
        module.eval()
        assert dependency_matrix(module, X, witnesses=("taint",)).matrix.trace() == LENGTH
