"""Hidden tokens for scoring encoders."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.models.parameters import init
from jaxformer.training.evaluate import hidden_rows, most_frequent, score_hidden, spread

pytestmark = pytest.mark.usefixtures("quick_compilation")

MASK = 28


def tokenizer_of(before=(), after=(), special=()):
    """Returns a tokenizer of the ids 0 to 28, of which the last is the mask."""
    text_ids = set(range(MASK)) - {*special}
    return SimpleNamespace(
        before=before, after=after, mask_token=MASK, vocab_size=MASK + 1, text_ids=text_ids
    )


documents = st.lists(st.lists(st.integers(1, 27), max_size=40), min_size=1, max_size=6)


@given(
    documents=documents,
    length=st.integers(4, 12),
    before=st.sampled_from([(), (1,)]),
    after=st.sampled_from([(), (2,)]),
    rate=st.floats(0.01, 0.9),
    seed=st.integers(0, 3),
    special=st.sampled_from([(), (3, 4, 28)]),
)
def test_every_token_stands_once_and_targets_are_what_is_hidden(
    documents, length, before, after, rate, seed, special
):
    """Every token occurs once, and the mask replaces exactly the targets that count.

    Special tokens and the ids before and after a text are never hidden. Padding has segment 0.
    """
    tokenizer, never = tokenizer_of(before, after, special), {*special, *before, *after}
    if not any(set(document) - never for document in documents):
        with pytest.raises(ValueError, match="there are no tokens to hide"):
            hidden_rows(documents, tokenizer, length)
        return
    how = {"rate": rate, "seed": seed}
    rows = hidden_rows(documents, tokenizer, length, **how)
    found, counted = [], 0
    for row in rows:
        inputs, targets, weights, segments, *_ = (x if x is None else x[0] for x in row)
        size = int(segments.sum())
        assert inputs.shape == (length,) and (segments[:size] == 1).all()
        np.testing.assert_array_equal(inputs == MASK, weights == 1)
        np.testing.assert_array_equal(inputs[weights == 0], targets[weights == 0])
        inner = slice(len(before), size - len(after))
        assert (
            tuple(targets[: inner.start]) == before and tuple(targets[inner.stop : size]) == after
        )
        assert weights.sum() == weights[inner].sum()
        assert not weights[np.isin(targets, [*never])].any()
        found += targets[inner].tolist()
        counted += int(weights.sum())
    assert found == [token for document in documents for token in document]
    assert len(rows) == sum(-(-len(x) // (length - len(before) - len(after))) for x in documents)
    assert counted >= 1
    for row, again in zip(rows, hidden_rows(documents, tokenizer, length, **how), strict=True):
        np.testing.assert_array_equal(row.inputs, again.inputs)


def test_the_rate_of_hidden_tokens_is_the_given_one():
    """Another seed hides other tokens."""
    text = [np.arange(1, 27).tolist() * 400]
    for rate in (0.15, 0.5):
        rows = [hidden_rows(text, tokenizer_of(), 64, rate=rate, seed=seed) for seed in (0, 1)]
        hidden = [np.concatenate([row.weights[0] for row in some]) for some in rows]
        assert all(abs(x.sum() / len(text[0]) - rate) < 0.02 for x in hidden)
        assert (hidden[0] != hidden[1]).any()


CONFIG = jf.EncoderConfig(vocab_size=29, max_length=8, num_layers=1, embed_dim=8, num_heads=2)
MODEL = jf.build(CONFIG)
APPLY = jax.jit(MODEL.apply)


@pytest.fixture(scope="module")
def variables():
    return jax.tree.map(lambda x: 5 * x, init(MODEL, jax.random.key(0)))


@pytest.mark.slow
@given(documents=documents.filter(any), batch_size=st.integers(1, 5))
def test_the_score_equals_that_of_the_logits(variables, documents, batch_size):
    """Loss and accuracy equal those from the logits, for any batch size and any padding rows."""
    rows = hidden_rows(documents, tokenizer_of(), 8)
    score = score_hidden(MODEL, variables, spread(rows, len(rows), batch_size))
    losses, right = [], []
    for row in rows:
        logits = np.asarray(APPLY(variables, row.inputs, row.segments), np.float64)
        at = row.weights > 0
        losses.append(
            np.log(np.exp(logits).sum(-1))[at]
            - np.take_along_axis(logits, row.targets[..., None], -1)[..., 0][at]
        )
        right.append((logits.argmax(-1) == row.targets)[at])
    losses, right = np.concatenate(losses), np.concatenate(right)
    assert score.tokens == len(losses)
    np.testing.assert_allclose(score.loss, losses.mean(), rtol=1e-5)
    np.testing.assert_allclose(score.accuracy, right.mean(), rtol=1e-6)


def test_the_baseline_is_the_most_frequent_hidden_token():
    rows = hidden_rows([[5, 5, 5, 6]], tokenizer_of(), 8, rate=1.0)
    assert most_frequent(rows) == {"the most frequent token": 0.75}
