"""Selection of the windows that every evaluation of a run scores."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.training.data.windows import EvaluationWindows
from jaxformer.training.evaluate import evaluate_documents, half, spread
from tests.errors import error_of


@given(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=12),
    length=st.integers(1, 12),
    number=st.integers(1, 30),
    batch_size=st.integers(1, 9),
)
def test_evaluation_windows_are_evenly_spaced(lengths, length, number, batch_size):
    """The windows are evenly spaced and include the first and the last window of the text.

    If the text has fewer windows, all of them are scored. All batches have the same shape, and
    padding has weight 0.
    """
    starts = np.cumsum([0, *lengths])
    documents = [np.arange(start, start + n) for start, n in zip(starts, lengths, strict=False)]
    windows = EvaluationWindows(documents, length, half(length))
    every = [[x[0] for x in window[:4]] for window in windows]
    batches = list(spread(windows, number, batch_size))
    assert {batch.inputs.shape for batch in batches} == {(batch_size, length)}
    elements = [tuple(element) for batch in batches for element in zip(*batch[:4], strict=True)]
    kept = min(number, len(every))
    places = []
    for element in elements[:kept]:
        same = [all(np.array_equal(*pair) for pair in zip(element, w, strict=True)) for w in every]
        places.append(same.index(True))
    assert (places[0], places[-1]) == (0, len(every) - 1 if kept > 1 else 0)
    gaps = np.diff(places)
    assert not len(gaps) or (min(gaps) >= 1 and max(gaps) - min(gaps) <= 1)
    assert all(not element[2].any() and not element[3].any() for element in elements[kept:])


def test_evaluation_rejects_text_without_tokens():
    """A tokenizer may produce no tokens, although the text is not empty."""
    model = SimpleNamespace(config=SimpleNamespace(max_length=8))
    message = "batches is empty: the text must have at least one token to score"
    assert error_of(evaluate_documents, model, None, [[0], [0]], 9) == message
