"""The moving average of the weights."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.training.batch import Batch
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.optimizer import make_optimizer
from jaxformer.training.step import init_state, make_step, update_average
from tests.properties import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODEL = tiny.build(num_layers=1)


@given(decay=st.floats(0.01, 0.9999), steps=st.integers(1, 12), seed=st.integers(0, 2**16))
def test_moving_average_of_parameters_equals_the_weighted_mean(decay, steps, seed):
    """The average is Σ d^(t−s) θ_s / Σ d^(t−s) in float64; its initial value has no effect."""
    values = np.random.default_rng(seed).normal(size=(steps, 3)).astype(np.float32)
    average = np.full(3, 100.0, np.float32)
    for step, value in enumerate(values):
        average = update_average(average, value, step, decay)
    weights = decay ** np.arange(steps)[::-1]
    wanted = weights @ values.astype(np.float64) / weights.sum()
    np.testing.assert_allclose(average, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_parameter_average_is_saved_and_leaves_updates_unchanged():
    """With an average, the losses equal the losses of a run without an average.

    Evaluation uses the average, and a restored state continues like the saved state.
    """
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=0))
    batch = Batch(*(tiny.tokens(seed, 1, 2, 8) for seed in (0, 1)))
    plain, averaging = make_step(MODEL, optimizer), make_step(MODEL, optimizer, ema_decay=0.8)
    one = init_state(MODEL, optimizer, 0)
    other = init_state(MODEL, optimizer, 0, averages=True)
    seen = []
    for _ in range(4):
        (one, loss), (other, same) = plain(one, batch, 0.01), averaging(other, batch, 0.01)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), loss, same)
        seen.append(jax.tree.map(np.array, other.params))
    weights = 0.8 ** np.arange(4)[::-1]
    weights /= weights.sum()
    wanted = jax.tree.map(lambda *x: sum(w * y for w, y in zip(weights, x, strict=True)), *seen)
    used = other.weights()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), used, wanted)
    params, rest = other.parts()
    assert params is other.average
    for one_leaf, same_leaf in zip(
        *map(jax.tree.leaves, (rest["params"], other.params)), strict=True
    ):
        assert one_leaf is same_leaf
    parts = jax.tree.map(np.array, other.parts())
    again = init_state(MODEL, optimizer, 1, averages=True).restored(4, *parts)
    (on, _), (off, _) = averaging(other, batch, 0.01), averaging(again, batch, 0.01)
    jax.tree.map(np.testing.assert_array_equal, on.parts(), off.parts())
