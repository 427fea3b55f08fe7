"""Grades the exercises of lecture 11."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_lecture_10 import close, random

from jaxformer import functional as F
from jaxformer.verify import dependency_matrix


@pytest.mark.points(2)
def test_layer_norm_equals_the_library(student):
    """1. Layer normalisation"""
    for size, offset in ((1.0, 0.0), (1e-3, 0.0), (1.0, 100.0)):
        z, gamma, beta = offset + size * random(0, 3, 8), random(1, 8), random(2, 8)
        np.testing.assert_allclose(
            student.layer_norm(z, gamma, beta), F.layer_norm(z, gamma, beta), rtol=1e-3, atol=1e-3
        )
    x = 1e-3 * random(0, 3, 8)
    close(student.layer_norm(x, jnp.ones(8), jnp.zeros(8), 1.0), F.layer_norm(x, epsilon=1.0))


@pytest.mark.points(2)
def test_post_norm_and_pre_norm_equal_the_library(student):
    """2. Two positions of the norm"""
    x = random(0, 3, 8)
    close(student.post_norm(x, jnp.sin, F.layer_norm), F.norm_after(jnp.sin, x, F.layer_norm))
    close(student.pre_norm(x, jnp.sin, F.layer_norm), F.norm_before(jnp.sin, x, F.layer_norm))


@pytest.mark.points(2)
def test_splitting_heads_equals_the_library_and_merging_inverts_splitting(student):
    """3. Heads"""
    x = random(0, 5, 12)
    heads = student.split_heads(x, 3)
    close(heads, F.split_heads(x, 3))
    close(student.merge_heads(F.split_heads(x, 3)), x)


@pytest.mark.points(3)
def test_multi_head_attention_equals_the_library(student):
    """4. Multi-head attention with a causal mask"""
    x, *matrices = random(0, 5, 12), *(random(seed, 12, 12) for seed in range(1, 5))
    weights = {
        name: {"kernel": matrix}
        for name, matrix in zip(("query", "key", "value", "output"), matrices, strict=True)
    }
    for heads in (1, 3):
        expected = F.multi_head_attention(weights, x, F.Causal(), num_heads=heads)
        close(student.multi_head_attention(x, *matrices, heads), expected)


@pytest.mark.points(2)
def test_lstm_step_equals_the_library(student):
    """5. One step of an LSTM"""
    x, h, c = random(0, 3), random(1, 4), random(2, 4)
    W, U, b = random(3, 3, 16), random(4, 4, 16), random(5, 16)
    weights = {"input": {"kernel": W, "bias": b}, "state": {"kernel": U}}
    found, expected = student.lstm_step(x, h, c, W, U, b), F.lstm_cell(weights, x, (h, c))
    for state, wanted in zip(found, expected, strict=True):
        close(state, wanted)


@pytest.mark.points(2)
def test_log_probability_of_a_text_equals_the_library(student):
    """6. The probability of a text"""
    tokens = jnp.array([3, 1, 4, 1, 5])
    for size in (1.0, 500.0):
        logits = size * random(0, 5, 7)
        expected = -4 * F.cross_entropy(logits[None, :-1], tokens[None, 1:])
        close(student.log_probability(logits, tokens), expected)


@pytest.mark.points(2)
def test_convolution_rule_equals_the_computed_dependencies(student):
    """7. Which inputs does a convolution read?"""
    for m, size, dilation in ((6, 2, 1), (7, 3, 2), (5, 1, 4)):
        weights = {"kernel": jax.random.normal(jax.random.key(0), (size * 3, 3))}

        def convolve(x, weights=weights, dilation=dilation):
            return F.causal_convolution(weights, x, dilation=dilation)

        found = np.asarray(student.convolution_rule(m, size, dilation))
        np.testing.assert_array_equal(found, dependency_matrix(convolve, random(0, m, 3)).matrix)
