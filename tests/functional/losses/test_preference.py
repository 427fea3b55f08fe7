"""Losses of preference tuning and of GRPO, compared with float64 formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxformer.functional import (
    clipped_policy_loss,
    dpo_loss,
    group_advantages,
    masked_mean,
    odds_ratio_loss,
    token_entropies,
    token_log_probs,
)

LOGS = arrays(np.float32, 5, elements=st.floats(-30, -0.015625, width=32))


def on_jax(function, *values, **options):
    """Calls a function with JAX arrays instead of NumPy arrays."""
    given = (jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in values)
    return np.asarray(function(*given, **options))


ANY = arrays(np.float32, (2, 6), elements=st.floats(-5, 5, width=32))


def log_sigmoid(x):
    return -np.logaddexp(0, -np.float64(x))


@given(LOGS, LOGS, LOGS, LOGS, st.floats(0.01, 2))
def test_dpo_equals_its_formula(chosen, rejected, old_chosen, old_rejected, beta):
    values = [np.float64(x) for x in (chosen, rejected, old_chosen, old_rejected)]
    better, worse = values[0] - values[2], values[1] - values[3]
    expected = -log_sigmoid(beta * (better - worse))
    found = on_jax(dpo_loss, chosen, rejected, old_chosen, old_rejected, beta)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_dpo_loss_of_unchanged_policy_is_log_2_and_its_gradient_favours_the_chosen_answer():
    logs = jnp.array([-3.0, -7.0])
    np.testing.assert_allclose(dpo_loss(logs, logs - 1, logs, logs - 1), np.log(2), rtol=1e-6)
    gradients = jax.grad(
        lambda c, r: dpo_loss(c, r, jnp.array(-3.0), jnp.array(-4.0), 0.5), argnums=(0, 1)
    )(jnp.array(-3.0), jnp.array(-4.0))
    np.testing.assert_allclose(gradients, [-0.25, 0.25], rtol=1e-6)


@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_dpo_and_its_gradient_are_finite_for_large_differences(gap):
    loss, gradient = jax.value_and_grad(lambda x: dpo_loss(x, 0.0 * x, 0.0 * x, 0.0 * x, 1.0))(
        jnp.float32(gap)
    )
    np.testing.assert_allclose(loss, max(0.0, -gap), rtol=1e-6)
    np.testing.assert_allclose(gradient, -1.0 if gap < 0 else 0.0, atol=1e-6)


@given(LOGS, LOGS)
def test_odds_ratio_loss_equals_its_formula(chosen, rejected):
    def log_odds(x):
        return x - np.log(-np.expm1(x))

    expected = -log_sigmoid(log_odds(np.float64(chosen)) - log_odds(np.float64(rejected)))
    np.testing.assert_allclose(
        on_jax(odds_ratio_loss, chosen, rejected), expected, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("chosen", [-1e-6, -0.5, -100.0])
def test_odds_ratio_loss_has_a_finite_gradient(chosen):
    gradient = jax.grad(lambda x: odds_ratio_loss(x, jnp.float32(-1.0)))(jnp.float32(chosen))
    assert np.isfinite(gradient) and gradient <= 0


@given(ANY, ANY, arrays(np.float32, 2, elements=st.floats(-3, 3, width=32)), st.floats(0.05, 0.5))
def test_clipped_policy_loss_equals_its_formula(new, old, advantages, clip):
    ratio, scale = np.exp(np.float64(new) - old), np.float64(advantages)[:, None]
    expected = -np.minimum(ratio * scale, np.clip(ratio, 1 - clip, 1 + clip) * scale)
    found = on_jax(clipped_policy_loss, new, old, advantages, clip)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_clipped_policy_loss_has_no_gradient_beyond_the_clip():
    old = jnp.zeros((2, 1))

    def gradient(ratio):
        new = jnp.log(ratio) * jnp.ones((2, 1))
        loss = lambda x: clipped_policy_loss(x, old, jnp.array([1.0, -1.0])).sum()  # noqa: E731
        return jax.grad(loss)(new)[:, 0]

    np.testing.assert_allclose(gradient(1.1), [-1.1, 1.1], rtol=1e-5)
    np.testing.assert_allclose(gradient(1.5), [0.0, 1.5], rtol=1e-5)
    np.testing.assert_allclose(gradient(0.5), [-0.5, 0.0], rtol=1e-5)


@given(arrays(np.float32, (3, 4), elements=st.floats(0, 1, width=32)))
def test_advantages_of_a_group_have_mean_zero(rewards):
    wide = np.float64(rewards)
    centred = wide - wide.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(
        on_jax(group_advantages, rewards, divides_by_std=False), centred, atol=1e-6
    )
    expected = centred / (wide.std(axis=1, ddof=1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(on_jax(group_advantages, rewards, epsilon=1e-3), expected, atol=1e-3)


def test_equal_rewards_in_a_group_give_advantages_of_zero():
    assert not group_advantages(jnp.full((2, 4), 0.7)).any()


@given(arrays(np.float32, (3, 4), elements=st.floats(-5, 5, width=32)), arrays(bool, (3, 4)))
def test_masked_mean_ignores_masked_values(values, mask):
    values = np.where(mask, values, np.nan)
    for axis in (None, 0, 1):
        with np.errstate(invalid="ignore"):
            expected = np.where(mask, np.float64(values), 0).sum(axis) / mask.sum(axis)
        np.testing.assert_allclose(
            on_jax(masked_mean, values, mask, axis), expected, rtol=1e-5, atol=1e-6
        )


@given(arrays(np.float32, (3, 7), elements=st.floats(-20, 20, width=32)), st.integers(0, 6))
def test_log_probabilities_and_entropies_equal_their_formulas(logits, target):
    wide = np.float64(logits)
    logs = wide - np.logaddexp.reduce(wide, axis=-1, keepdims=True)
    targets = np.full(3, target)
    np.testing.assert_allclose(on_jax(token_log_probs, logits, targets), logs[:, target], atol=1e-4)
    expected = -(np.exp(logs) * logs).sum(-1)
    np.testing.assert_allclose(on_jax(token_entropies, logits), expected, atol=1e-4)
