"""Grades the exercises of lecture 10."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import functional as F


def random(seed: int, *shape: int):
    """Returns random numbers from N(0, 1)."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def close(found, expected) -> None:
    """Asserts that two arrays have equal shapes and nearly equal entries."""
    assert jnp.shape(found) == jnp.shape(expected)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.points(2)
def test_softmax_equals_the_library_for_small_and_large_scores(student):
    """1. A softmax that survives large scores"""
    for size in (1.0, 1000.0):
        scores = size * random(0, 3, 5)
        close(student.softmax(scores), F.softmax(scores))
    close(student.softmax(jnp.array([1000.0, 1001.0])), F.softmax(jnp.array([0.0, 1.0])))
    close(student.softmax(random(1, 2, 3, 4)).sum(axis=-1), jnp.ones((2, 3)))


@pytest.mark.points(2)
def test_self_attention_equals_the_library(student):
    """2. Self-attention"""
    x, Q, K, V = random(0, 5, 4), random(1, 4, 3), random(2, 4, 3), random(3, 4, 6)
    matrices = {"query": Q, "key": K, "value": V}
    close(student.self_attention(x, Q, K, V), F.self_attention(matrices, x, scale=1.0))


@pytest.mark.points(1)
def test_causal_mask_is_boolean_and_lower_triangular(student):
    """3. The causal mask"""
    for m in (1, 4, 7):
        mask = np.asarray(student.causal_mask(m))
        assert mask.dtype == bool
        np.testing.assert_array_equal(mask, np.tri(m, dtype=bool))


@pytest.mark.points(2)
def test_masked_self_attention_equals_the_library_and_ignores_masked_words(student):
    """4. Masked self-attention"""
    x, Q, K, V = (random(seed, 5, 5) for seed in range(4))
    matrices = {"query": Q, "key": K, "value": V}
    for mask in (np.tri(5, dtype=bool), np.eye(5, dtype=bool) | (np.arange(5) == 2)):
        mask = jnp.asarray(mask)
        found = student.masked_self_attention(x, Q, K, V, mask)
        close(found, F.self_attention(matrices, x, mask, scale=1.0))
    # A hidden word has no effect, however large its vector is.
    causal = jnp.asarray(np.tri(5, dtype=bool))
    other = x.at[4].set(1000.0)
    before, after = (student.masked_self_attention(y, Q, K, V, causal)[:4] for y in (x, other))
    np.testing.assert_array_equal(before, after)


@pytest.mark.points(1)
def test_embeddings_plus_positions_equal_the_library(student):
    """5. Positions"""
    x, positions = random(0, 5, 4), random(1, 9, 4)
    close(student.add_positions(x, positions), F.encode_positions(x, positions))


@pytest.mark.points(1)
def test_feed_forward_layer_equals_the_library_followed_by_relu(student):
    """6. The feed-forward layer of the lecture"""
    x, W1, b1, W2, b2 = (
        random(0, 5, 4),
        random(1, 4, 7),
        random(2, 7),
        random(3, 7, 4),
        random(4, 4),
    )
    weights = {"up": {"kernel": W1, "bias": b1}, "down": {"kernel": W2, "bias": b2}}
    expected = jnp.maximum(F.feed_forward(weights, x, "relu"), 0)
    close(student.feed_forward(x, W1, b1, W2, b2), expected)


@pytest.mark.points(2)
def test_leak_detector_accepts_only_causal_functions(student):
    """7. Find the leak"""
    x = random(0, 6, 4)

    def attend(mask):
        return lambda x: F.dot_product_attention(x, x, x, mask)

    hole = np.tri(6, dtype=bool)
    hole[2, 4] = True
    assert student.leaks(attend(jnp.asarray(hole)), x)
    assert student.leaks(lambda x: x[::-1], x)
    assert student.leaks(attend(None), x)
    assert not student.leaks(attend(F.Causal()), x)
    assert not student.leaks(lambda x: jnp.cumsum(x, axis=0), x)
