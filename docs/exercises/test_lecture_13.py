"""Grades the exercises of lecture 13."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_lecture_10 import close, random

from jaxformer import functional as F


@pytest.mark.points(2)
def test_cross_attention_equals_the_library(student):
    """1. Cross-attention"""
    x, source = random(0, 3, 4), random(1, 6, 4)
    Q, K, V = random(2, 4, 5), random(3, 4, 5), random(4, 4, 2)
    matrices = {"query": Q, "key": K, "value": V}
    close(student.cross_attention(x, source, Q, K, V), F.cross_attention(matrices, x, source))


@pytest.mark.points(2)
def test_padding_mask_hides_positions_beyond_each_length(student):
    """2. Padding"""
    mask = np.asarray(student.padding_mask(jnp.array([3, 1, 4]), 2, 4))
    assert mask.dtype == bool
    rows = [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    np.testing.assert_array_equal(mask, np.repeat(np.array(rows, bool)[:, None], 2, axis=1))


@pytest.mark.points(1)
def test_shift_right_prepends_the_start_token_and_drops_the_last_token(student):
    """3. Teacher forcing"""
    found = student.shift_right(jnp.array([5, 6, 7]), 1)
    np.testing.assert_array_equal(found, [1, 5, 6])
    np.testing.assert_array_equal(student.shift_right(jnp.array([9]), 2), [2])


@pytest.mark.points(3)
def test_attention_with_a_cache_equals_attention_without_a_cache(student):
    """4. Give the decoder a cache"""
    x, Q, K, V = random(0, 6, 4), random(1, 4, 5), random(2, 4, 5), random(3, 4, 3)
    matrices = {"query": Q, "key": K, "value": V}
    cache, outputs = None, []
    for x_t in x:
        output, cache = student.attend_with_cache(x_t, cache, Q, K, V)
        outputs.append(output)
    close(jnp.stack(outputs), F.self_attention(matrices, x, F.Causal()))


@pytest.mark.points(2)
def test_greedy_decoding_stops_at_the_end_token_or_the_length_limit(student):
    """5. Greedy decoding"""

    def counting(tokens):
        return -abs(jnp.arange(10.0) - (tokens[-1] + 1))

    assert list(student.greedy_decode(counting, [2, 3], 6, 9)) == [2, 3, 4, 5, 6]
    assert list(student.greedy_decode(counting, [2], 9, 3)) == [2, 3, 4, 5]


@pytest.mark.points(2)
def test_loss_equals_cross_entropy_over_real_tokens(student):
    """6. The loss of the decoder"""
    targets, is_real = jnp.array([3, 1, 4, 0, 0]), jnp.array([1, 1, 1, 0, 0], bool)
    for size in (1.0, 500.0):
        logits = size * random(0, 5, 7)
        expected = F.cross_entropy(logits[None], targets[None], is_real[None].astype(jnp.float32))
        close(student.loss(logits, targets, is_real), expected)
