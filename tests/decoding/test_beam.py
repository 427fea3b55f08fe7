"""Beam search equals greedy search at width 1 and exhaustive search at full width."""

from itertools import product

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from tests.properties import tiny
from tests.properties.models import MODELS, each_model

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_blocks")

# The two types of caches are slots of tokens and recurrent states.
CACHES = ("decoder", "attention lstm")
VOCAB, NEW = 4, 3
PROMPTS = [[1], [2, 3, 0], [0, 3], [3]]
STOPS = st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=1)


def setup(name, seed):
    """Returns a model with a tiny vocabulary, its weights and its sources (or None)."""
    model = tiny.build(**{**MODELS[name], "vocab_size": VOCAB})
    variables = tiny.weights(model, seed)
    return model, variables, tiny.sources(model, seed, len(PROMPTS))


def log_prob(model, variables, prompt, continuations, source):
    """Returns log P of each continuation, computed with `score`."""
    width = max(map(len, PROMPTS)) + NEW  # one shape for all prompts compiles once
    tokens, segment_ids = np.zeros((2, len(continuations), width), np.int32)
    for index, continuation in enumerate(continuations):
        text = [*prompt, *continuation]
        tokens[index, : len(text)], segment_ids[index, : len(text)] = text, 1
    many = None if source is None else [source] * len(continuations)
    whole, given = (
        jf.score(model, variables, tokens, segment_ids=segment_ids * seen, source=many)
        for seen in (1, np.arange(width) < len(prompt))
    )
    return np.asarray(whole - given, np.float64)


def every_text(stops):
    """Yields all continuations, which end at a stop token or have the full length."""
    for length in range(1, NEW + 1):
        for text in product(range(VOCAB), repeat=length):
            ends = text[-1] in stops
            if not set(text[:-1]) & set(stops) and (ends or length == NEW):
                yield text


@pytest.mark.slow
@each_model("decoder")
@given(seed=tiny.seeds, stops=st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=2))
def test_beam_width_one_is_greedy_decoding(name, seed, stops):
    """An extreme length penalty, which rewards longer texts, does not change the result."""
    model, variables, source = setup(name, seed)
    how = {"max_new_tokens": 8, "stop_tokens": tuple(stops), "source": source}
    found = jf.beam_search(model, variables, PROMPTS, beam_width=1, length_penalty=20.0, **how)
    greedy = jf.generate(model, variables, PROMPTS, sampler=jf.Sampler(temperature=0.0), **how)
    np.testing.assert_array_equal(found.tokens[:, 0], greedy.tokens)
    np.testing.assert_array_equal(found.lengths[:, 0], greedy.lengths)
    tiny.close(found.log_probs[:, 0], greedy.log_probs.sum(axis=1))


@each_model("decoder")
@given(seed=tiny.seeds, stops=STOPS, length_penalty=st.sampled_from([0.0, 0.6, 1.0, 2.0]))
def test_full_width_beam_equals_exhaustive_search(name, seed, stops, length_penalty):
    """A beam as wide as the number of possible texts finds all texts, sorted by score."""
    model, variables, source = setup(name, seed)
    texts = list(every_text(stops))
    found = jf.beam_search(
        model,
        variables,
        PROMPTS,
        max_new_tokens=NEW,
        beam_width=VOCAB**NEW,
        num_hypotheses=len(texts),
        length_penalty=length_penalty,
        stop_tokens=tuple(stops),
        source=source,
    )
    lengths = np.array([len(text) for text in texts])
    for index, prompt in enumerate(PROMPTS):
        log_probs = log_prob(model, variables, prompt, texts, source and source[index])
        scores = log_probs / lengths**length_penalty
        tiny.close(found.scores[index], np.sort(scores)[::-1], 2e-5)
        own = {
            tuple(tokens[:length].tolist()): value
            for tokens, length, value in zip(
                found.tokens[index], found.lengths[index], found.log_probs[index], strict=True
            )
        }
        assert own.keys() == set(texts)
        tiny.close([own[text] for text in texts], log_probs, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHES)
@given(seed=tiny.seeds, stops=STOPS)
def test_beam_hypotheses_have_consistent_scores_and_log_probs(name, seed, stops):
    """The hypotheses of a narrow beam are distinct, and sorted by score.

    Log P of a hypothesis equals `score` of its text, and its score is log P divided by the length.
    """
    model, variables, source = setup(name, seed)
    found = jf.beam_search(
        model,
        variables,
        PROMPTS,
        max_new_tokens=NEW,
        beam_width=3,
        num_hypotheses=3,
        stop_tokens=tuple(stops),
        source=source,
    )
    for index, prompt in enumerate(PROMPTS):
        assert found.lengths[index].all()
        texts = [
            tuple(tokens[:length].tolist())
            for tokens, length in zip(found.tokens[index], found.lengths[index], strict=True)
        ]
        assert len(set(texts)) == len(texts)
        log_probs = log_prob(model, variables, prompt, texts, source and source[index])
        tiny.close(found.log_probs[index], log_probs, 2e-5)
        tiny.close(found.scores[index], log_probs / found.lengths[index], 2e-5)
        assert (np.diff(found.scores[index]) <= 0).all()


def test_beam_search_raises_errors_that_name_invalid_arguments():
    model, variables, _ = setup("decoder", 0)
    wrong = {
        "beam_width is 0; it must be a whole number of at least 1": {"beam_width": 0},
        "length_penalty is nan; it must be finite": {"length_penalty": float("nan")},
        "num_hypotheses is 5; it must be from 1 to beam_width": {"num_hypotheses": 5},
        "max_new_tokens is 0": {"max_new_tokens": 0},
        "there are 1 sources and 4 prompts": {"source": [[1]]},
        "source is not accepted, because Decoder does not have an encoder": {"source": [[1]] * 4},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            jf.beam_search(model, variables, PROMPTS, **{"max_new_tokens": 2, **change})


def test_decoding_functions_reject_model_without_cache():
    """Every decoding function rejects a model without a cache."""
    encoder = tiny.build(kind=jf.EncoderConfig)
    variables = tiny.weights(encoder, 0)
    for call in (
        lambda: jf.beam_search(encoder, variables, PROMPTS, max_new_tokens=1),
        lambda: jf.generate(encoder, variables, PROMPTS, max_new_tokens=1),
        lambda: jf.init_cache(encoder, variables, 1, 4),
        lambda: jf.extend(encoder, variables, np.ones((1, 1), int), None),
        lambda: jf.score(encoder, variables, np.ones((1, 3), int)),
        lambda: jf.pack_weights(encoder, variables),
    ):
        with pytest.raises(ValueError, match=r"Encoder is not autoregressive .*not have a cache"):
            call()


@pytest.mark.slow
def test_beam_search_continues_while_live_hypothesis_may_improve():
    """With early_stopping=False, the default, some texts score better than with True."""
    model, variables, _ = setup("decoder", 3)
    variables = jax.tree.map(lambda x: 2 * x, variables)
    how = {"max_new_tokens": 12, "stop_tokens": (0,), "beam_width": 2, "length_penalty": 1.0}
    early, late, default = (
        jf.beam_search(model, variables, PROMPTS, **how, **asked)
        for asked in ({"early_stopping": True}, {"early_stopping": False}, {})
    )
    np.testing.assert_array_equal(default.tokens, late.tokens)
    tiny.close(default.scores, late.scores)
    gain = late.scores[:, 0] - early.scores[:, 0]
    same = (late.tokens[:, 0] == early.tokens[:, 0]).all(axis=1)
    # Different programs may round the score of a text differently.
    assert (gain[~same] > 0).all() and (gain > 0.1).any()
    np.testing.assert_allclose(gain[same], 0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHES)
def test_beam_search_enlarges_its_cache(name):
    """A longer beam search enlarges the cache of 48 slots; a shorter search reuses its programs."""
    model = tiny.build(**{**MODELS[name], "vocab_size": VOCAB, "max_length": 60})
    variables, source = tiny.weights(model, 5), tiny.sources(model, 5, len(PROMPTS))
    greedy = jf.Sampler(temperature=0.0)
    for number in (20, 18):
        how = {"max_new_tokens": number, "source": source}
        found = jf.beam_search(model, variables, PROMPTS, **how, beam_width=1)
        wanted = jf.generate(model, variables, PROMPTS, **how, sampler=greedy)
        np.testing.assert_array_equal(found.tokens[:, 0], wanted.tokens)
        tiny.close(found.log_probs[:, 0], wanted.log_probs.sum(axis=1))
