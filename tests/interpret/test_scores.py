"""Scores of heads equal plain loops over queries and keys, and are exact for constructed heads."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.interpret.scores import (
    CrossScores,
    HeadScores,
    ScoreSettings,
    cross_scores,
    head_scores,
)
from tests.errors import error_of
from tests.properties import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")
LAYERS, BATCH, HEADS, LENGTH, SOURCE = 2, 2, 3, tiny.LENGTH, 7
SETTINGS = ScoreSettings(delimiters=(1, 2), window=2)


def draw_weights(seed, keys=LENGTH):
    """Draws rows that sum to 1 over all keys, so that wrongly counted keys change a score."""
    logits = np.random.default_rng(seed).normal(size=(LAYERS, BATCH, HEADS, LENGTH, keys))
    return np.asarray(jax.nn.softmax(logits), np.float32)


def documents_of(segment_ids):
    """Returns the documents of a sequence, each a list of the indices of its tokens."""
    found, last = [], None
    for index, segment in enumerate(segment_ids):
        if segment and segment != last:
            found.append([])
            last = segment
        if segment:
            found[-1].append(index)
    return found


def keys_of(name, q, ids, settings):
    """Returns the positions that count for the query at position q, or None if undefined."""
    n = len(ids)
    if name == "previous_token":
        return [q - 1] if q else None
    if name == "duplicate_token":
        return [k for k in range(q) if ids[k] == ids[q]] or None
    if name == "induction":
        return [k for k in range(1, q) if ids[k - 1] == ids[q]] or None
    if name == "first_token":
        return [0] if q else None
    if name == "local":
        near = [k for k in range(n) if abs(k - q) <= settings.window]
        return near if q > settings.window else None
    visible = range(n) if settings.bidirectional else range(q + 1)
    return [k for k in visible if ids[k] in settings.delimiters] or None


def by_loops(weights, tokens, segment_ids, settings):
    scores = []
    for name in HeadScores._fields:
        shares = []
        for element in range(len(tokens)):
            for document in documents_of(segment_ids[element]):
                ids = [tokens[element][index] for index in document]
                for q, index in enumerate(document):
                    keys = keys_of(name, q, ids, settings)
                    if keys is not None:
                        columns = [document[k] for k in keys]
                        shares.append(weights[:, element, :, index, columns].sum(axis=0))
        scores.append(np.mean(shares, axis=0) if shares else np.full((LAYERS, HEADS), np.nan))
    return HeadScores(*scores)


def assert_equal(found, expected):
    for name in expected._fields:
        actual, wanted = getattr(found, name), getattr(expected, name)
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-5, err_msg=name)


@given(
    seed=tiny.seeds,
    tokens=st.lists(
        st.lists(st.integers(0, 4), min_size=LENGTH, max_size=LENGTH), min_size=2, max_size=2
    ),
    segment_ids=tiny.segment_batches(ids=(1, 2)),
    bidirectional=st.booleans(),
)
def test_head_scores_equal_explicit_loops_over_queries_and_keys(
    seed, tokens, segment_ids, bidirectional
):
    """For packed documents with padding between and inside; weights at padding are NaN."""
    settings = SETTINGS._replace(bidirectional=bidirectional)
    weights, tokens = draw_weights(seed), np.array(tokens, np.int32)
    expected = by_loops(weights, tokens, segment_ids, settings)
    padded = np.where((segment_ids == 0)[None, :, None, :, None], np.nan, weights)
    assert_equal(head_scores(padded, tokens, segment_ids, settings), expected)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_head_scores_without_segment_ids_treat_a_sequence_as_one_document(length):
    weights, tokens = draw_weights(0)[..., :length, :length], tiny.tokens(1, BATCH, length) % 4
    expected = by_loops(weights, tokens, np.ones((BATCH, length), int), SETTINGS)
    assert_equal(head_scores(weights, tokens, None, SETTINGS), expected)


TOKENS = np.array([[5, 1, 7, 8, 5, 1, 7, 8, 5, 1, 7, 8]] * BATCH, np.int32)
EXACT = {  # the key of each query, in a text of period 4
    "previous_token": lambda q: q - 1,
    "duplicate_token": lambda q: q - 4,
    "induction": lambda q: q - 3,
    "first_token": lambda q: 0,
    "local": lambda q: q - 2,
    "delimiter": lambda q: 1 if q < 5 else 5,
}


@pytest.mark.parametrize("name", EXACT)
def test_pattern_score_is_1_for_a_head_that_follows_the_pattern_exactly(name):
    """Head 1 of layer 0 follows the pattern; the other heads attend to the query itself."""
    weights = np.tile(np.eye(LENGTH, dtype=np.float32), (LAYERS, BATCH, HEADS, 1, 1))
    column = [EXACT[name](q) for q in range(LENGTH)]
    weights[0, :, 1] = np.eye(LENGTH)[np.maximum(column, 0)]
    found = getattr(head_scores(weights, TOKENS, None, SETTINGS), name)
    assert found[0, 1] == 1.0
    others = np.delete(np.asarray(found).ravel(), 1)
    if name == "local":  # the query itself is local
        assert (others == 1.0).all()
    else:
        assert (others < 0.5).all()


def test_head_score_that_applies_to_no_token_is_nan():
    """No token repeats and there are no delimiters."""
    weights = draw_weights(0)
    found = head_scores(weights, np.tile(np.arange(LENGTH), (BATCH, 1)), None, ScoreSettings())
    assert all(np.isnan(x).all() for x in (found.duplicate_token, found.induction, found.delimiter))
    assert not np.isnan(found.previous_token).any()


def cross_by_loops(weights, segment_ids, source_segment_ids):
    moved, first, last = [], [], []
    for element in range(BATCH):
        keys = [k for k in range(SOURCE) if source_segment_ids[element][k]]
        for document in documents_of(segment_ids[element]):
            for i, q in enumerate(document):
                first.append(weights[:, element, :, q, keys[0]])
                last.append(weights[:, element, :, q, keys[-1]])
                for later in document[i + 1 :]:
                    pair = [
                        np.sign(b - a)
                        * weights[:, element, :, q, a]
                        * weights[:, element, :, later, b]
                        for a in keys
                        for b in keys
                    ]
                    moved.append(sum(pair))
    lists = (moved, first, last)
    return CrossScores(
        *(np.mean(x, axis=0) if x else np.full((LAYERS, HEADS), np.nan) for x in lists)
    )


@given(
    seed=tiny.seeds,
    segment_ids=tiny.segment_batches(ids=(1, 2)),
    lengths=st.lists(st.integers(1, SOURCE), min_size=BATCH, max_size=BATCH),
)
def test_cross_attention_scores_equal_explicit_loops_over_positions(seed, segment_ids, lengths):
    weights = draw_weights(seed, SOURCE)
    source_segment_ids = (np.arange(SOURCE) < np.array(lengths)[:, None]).astype(np.int32)
    found = cross_scores(weights, segment_ids, source_segment_ids)
    assert_equal(found, cross_by_loops(weights, segment_ids, source_segment_ids))


def test_monotone_score_is_1_for_diagonal_and_minus_1_for_reversed_diagonal_weights():
    diagonal, fixed = np.eye(SOURCE), np.eye(SOURCE)[np.zeros(SOURCE, int)]
    uniform = np.full((SOURCE, SOURCE), 1 / SOURCE)
    weights = np.stack([diagonal, diagonal[::-1], fixed, uniform])[None, None]
    found = cross_scores(weights.astype(np.float32))
    np.testing.assert_allclose(found.monotone[0], [1, -1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(found.first_token[0, 2], 1.0)


WRONG = {
    "tokens is int64 [2, 5]; it must be int [batch, length], given weights float32 [2, 2, 3, 12": (
        (draw_weights(0), np.zeros((2, 5), int))
    ),
    "weights has shape (2, 2, 3, 0, 0); every axis must have a size of at least 1": (
        (draw_weights(0)[..., :0, :0], np.zeros((2, 0), int))
    ),
    "tokens is float32 [2, 12]; it must be int [batch, length]": (
        (draw_weights(0), np.zeros((2, LENGTH), np.float32))
    ),
    "segment_ids is int64 [2, 3]; it must be int [batch, length]": (
        (draw_weights(0), np.zeros((2, LENGTH), int), np.ones((2, 3), int))
    ),
    "window is 0; it must be a whole number of at least 1": (
        (draw_weights(0), np.zeros((2, LENGTH), int), None, ScoreSettings(window=0))
    ),
    "delimiters is 'a'; it must be a whole number of at least 0": (
        (draw_weights(0), np.zeros((2, LENGTH), int), None, ScoreSettings(("a",)))
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_error_of_computing_head_scores_names_the_invalid_argument(message):
    assert message in error_of(head_scores, *WRONG[message])


def test_error_of_computing_cross_attention_scores_names_the_invalid_argument():
    weights = draw_weights(0, SOURCE)
    assert "it must be float [layers, batch, heads, length, source]" in error_of(
        cross_scores, weights[0]
    )
    wrong = np.ones((2, 3), int)
    assert "segment_ids is int64 [2, 3]" in error_of(cross_scores, weights, wrong)
    assert "source_segment_ids is int64 [2, 3]; it must be int [batch, source]" in error_of(
        cross_scores, weights, None, wrong
    )
