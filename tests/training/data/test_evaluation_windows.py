"""Evaluation windows score every token exactly once."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.training.data.windows import EvaluationWindows
from jaxformer.training.evaluate import spread
from tests.errors import error_of

many_cases = settings(max_examples=5 * settings().max_examples)


def evaluation_windows(tokens, length, stride):
    """Yields the windows of one document as batches of one sequence."""
    for window in EvaluationWindows([tokens], length, stride):
        yield jax.tree.map(lambda x: x[0], window)


@many_cases
@given(st.integers(0, 70), st.integers(1, 16), st.data())
def test_evaluation_scores_each_token_once_with_enough_context(num_targets, length, draw):
    stride = draw.draw(st.integers(1, length))
    document = np.arange(100, 100 + num_targets + 1)  # token - 100 is its index
    times_scored = np.zeros(num_targets, int)
    windows = list(evaluation_windows(document, length, stride))
    for number, window in enumerate(windows):
        for array in window[:4]:
            assert array.shape == (length,)
        real = window.segment_ids == 1
        assert np.all(window.segment_ids[~real] == 0) and np.all(np.diff(window.segment_ids) <= 0)
        assert np.all(window.weights[~real] == 0) and set(window.weights) <= {0, 1}
        assert np.array_equal(window.targets[real], window.inputs[real] + 1)
        assert np.all(np.diff(window.inputs[real]) == 1)
        for place in np.flatnonzero(window.weights):
            times_scored[window.targets[place] - 101] += 1
            context = place + 1
            assert number == 0 or context > length - stride
    assert np.all(times_scored == 1)
    beyond = max(0, num_targets - length)
    assert len(windows) == (num_targets > 0) + -(-beyond // stride)


@many_cases
@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 5), st.integers(1, 10))
def test_evaluation_batches_contain_windows_of_all_documents_in_order(sizes, batch_size, length):
    stride = max(1, length // 2)
    documents = [np.arange(size + 1) + 1 for size in sizes]
    expected = [
        element for tokens in documents for element in evaluation_windows(tokens, length, stride)
    ]
    windows = EvaluationWindows(documents, length, stride)
    batches = list(spread(windows, len(windows), batch_size))
    assert len(batches) == -(-len(expected) // batch_size)
    elements = []
    for batch in batches:
        for array in batch[:4]:
            assert array.shape == (batch_size, length)
        assert [array.dtype for array in batch[:4]] == [np.int32, np.int32, np.float32, np.int32]
        elements += zip(*batch[:4], strict=True)
    for element, window in zip(elements, expected, strict=False):
        assert all(map(np.array_equal, element, window[:4]))
    for padding in elements[len(expected) :]:
        assert not np.any(padding)


@pytest.mark.parametrize("stride", [0, 5])
def test_evaluation_windows_reject_invalid_stride(stride):
    message = f"stride is {stride}; it must be in 1 … window length (4)"
    assert error_of(lambda: list(evaluation_windows([1, 2, 3], 4, stride))) == message


def test_an_evaluation_batch_size_of_zero_is_rejected():
    message = "batch_size is 0; it must be at least 1"
    assert error_of(lambda: list(spread(EvaluationWindows([[1, 2]], 4, 2), 1, 0))) == message
