"""Masking of tokens for the evaluation of encoders."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.models.parameters import init
from jaxformer.training.evaluate import masked_windows, most_frequent, score_masked_tokens, spread

pytestmark = pytest.mark.usefixtures("quick_compilation")

MASK = 28


def tokenizer_of(before=(), after=(), special=()):
    """Returns a tokenizer with the ids 0 to 28. The last id is the mask token."""
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
def test_masked_windows_contain_each_token_once_and_mask_only_targets(
    documents, length, before, after, rate, seed, special
):
    """Every token occurs exactly once, and the mask token replaces exactly the scored targets.

    Special tokens and template tokens are never masked. Padding has segment 0.
    """
    tokenizer, never = tokenizer_of(before, after, special), {*special, *before, *after}
    if not any(set(document) - never for document in documents):
        with pytest.raises(ValueError, match="documents must contain at least one token"):
            masked_windows(documents, tokenizer, length)
        return
    how = {"rate": rate, "seed": seed}
    windows = masked_windows(documents, tokenizer, length, **how)
    found, counted = [], 0
    for window in windows:
        inputs, targets, weights, segment_ids, *_ = (x if x is None else x[0] for x in window)
        size = int(segment_ids.sum())
        assert inputs.shape == (length,) and (segment_ids[:size] == 1).all()
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
    assert len(windows) == sum(-(-len(x) // (length - len(before) - len(after))) for x in documents)
    assert counted >= 1
    for window, again in zip(
        windows, masked_windows(documents, tokenizer, length, **how), strict=True
    ):
        np.testing.assert_array_equal(window.inputs, again.inputs)


def test_the_fraction_of_masked_tokens_is_the_given_rate():
    """A different seed masks different tokens."""
    text = [np.arange(1, 27).tolist() * 400]
    for rate in (0.15, 0.5):
        windows = [
            masked_windows(text, tokenizer_of(), 64, rate=rate, seed=seed) for seed in (0, 1)
        ]
        hidden = [np.concatenate([window.weights[0] for window in some]) for some in windows]
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
def test_masked_token_loss_and_accuracy_match_the_logits(variables, documents, batch_size):
    """Loss and accuracy match the logits, for any batch size and any padding."""
    windows = masked_windows(documents, tokenizer_of(), 8)
    score = score_masked_tokens(MODEL, variables, spread(windows, len(windows), batch_size))
    losses, right = [], []
    for window in windows:
        logits = np.asarray(APPLY(variables, window.inputs, window.segment_ids), np.float64)
        at = window.weights > 0
        losses.append(
            np.log(np.exp(logits).sum(-1))[at]
            - np.take_along_axis(logits, window.targets[..., None], -1)[..., 0][at]
        )
        right.append((logits.argmax(-1) == window.targets)[at])
    losses, right = np.concatenate(losses), np.concatenate(right)
    assert score.tokens == len(losses)
    np.testing.assert_allclose(score.loss, losses.mean(), rtol=1e-5)
    np.testing.assert_allclose(score.accuracy, right.mean(), rtol=1e-6)


def test_masked_token_baseline_always_predicts_the_most_frequent_token():
    windows = masked_windows([[5, 5, 5, 6]], tokenizer_of(), 8, rate=1.0)
    assert most_frequent(windows) == {"the most frequent token": 0.75}
