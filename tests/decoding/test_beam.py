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

# Beam search uses only the cache of a model: either slots of tokens or a recurrent state.
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
    tokens, segments = np.zeros((2, len(continuations), width), np.int32)
    for row, continuation in enumerate(continuations):
        text = [*prompt, *continuation]
        tokens[row, : len(text)], segments[row, : len(text)] = text, 1
    many = None if source is None else [source] * len(continuations)
    whole, given = (
        jf.score(model, variables, tokens, segments=segments * seen, source=many)
        for seen in (1, np.arange(width) < len(prompt))
    )
    return np.asarray(whole - given, np.float64)


def every_text(stops):
    """Yields all continuations: those that end at a stop token, and full-length ones."""
    for length in range(1, NEW + 1):
        for text in product(range(VOCAB), repeat=length):
            ends = text[-1] in stops
            if not set(text[:-1]) & set(stops) and (ends or length == NEW):
                yield text


@each_model("decoder")
@given(seed=tiny.seeds, stops=st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=2))
def test_a_beam_of_one_is_greedy(name, seed, stops):
    """Holds with an extreme length penalty too, which would reward continuing after a stop."""
    model, variables, source = setup(name, seed)
    how = {"max_new_tokens": 8, "stop_tokens": tuple(stops), "source": source}
    found = jf.beam_search(model, variables, PROMPTS, beam_width=1, length_penalty=20.0, **how)
    greedy = jf.generate(model, variables, PROMPTS, sampler=jf.Sampler(temperature=0.0), **how)
    np.testing.assert_array_equal(found.tokens[:, 0], greedy.tokens)
    np.testing.assert_array_equal(found.lengths[:, 0], greedy.lengths)
    tiny.close(found.log_probs[:, 0], greedy.log_probs.sum(axis=1))


@each_model("decoder")
@given(seed=tiny.seeds, stops=STOPS, length_penalty=st.sampled_from([0.0, 0.6, 1.0, 2.0]))
def test_a_wide_beam_is_brute_force(name, seed, stops, length_penalty):
    """A beam whose width is the number of texts finds all of them, sorted by score."""
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
    for row, prompt in enumerate(PROMPTS):
        log_probs = log_prob(model, variables, prompt, texts, source and source[row])
        scores = log_probs / lengths**length_penalty
        tiny.close(found.scores[row], np.sort(scores)[::-1], 2e-5)
        own = {
            tuple(tokens[:length].tolist()): value
            for tokens, length, value in zip(
                found.tokens[row], found.lengths[row], found.log_probs[row], strict=True
            )
        }
        assert own.keys() == set(texts)
        tiny.close([own[text] for text in texts], log_probs, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHES)
@given(seed=tiny.seeds, stops=STOPS)
def test_hypotheses_are_what_they_say(name, seed, stops):
    """The hypotheses of a narrow beam are consistent.

    Their log P equals `score` of the text, their score is log P over length, none occurs twice, and
    they are sorted by score.
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
    for row, prompt in enumerate(PROMPTS):
        assert found.lengths[row].all()
        texts = [
            tuple(tokens[:length].tolist())
            for tokens, length in zip(found.tokens[row], found.lengths[row], strict=True)
        ]
        assert len(set(texts)) == len(texts)
        log_probs = log_prob(model, variables, prompt, texts, source and source[row])
        tiny.close(found.log_probs[row], log_probs, 2e-5)
        tiny.close(found.scores[row], log_probs / found.lengths[row], 2e-5)
        assert (np.diff(found.scores[row]) <= 0).all()


def test_invalid_search_arguments_are_rejected_by_name():
    model, variables, _ = setup("decoder", 0)
    wrong = {
        "beam_width is 0; it must be a whole number of at least 1": {"beam_width": 0},
        "length_penalty is nan; it must be finite": {"length_penalty": float("nan")},
        "num_hypotheses is 5; it must be in 1 … beam_width": {"num_hypotheses": 5},
        "max_new_tokens is 0": {"max_new_tokens": 0},
        "source has 1 rows; there are 4 prompts": {"source": [[1]]},
        "source was given, but a Decoder reads none": {"source": [[1]] * 4},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            jf.beam_search(model, variables, PROMPTS, **{"max_new_tokens": 2, **change})


def test_a_model_without_a_cache_is_rejected_with_the_reason():
    """Every decoding function rejects it."""
    encoder = tiny.build(kind=jf.EncoderConfig)
    variables = tiny.weights(encoder, 0)
    for call in (
        lambda: jf.beam_search(encoder, variables, PROMPTS, max_new_tokens=1),
        lambda: jf.generate(encoder, variables, PROMPTS, max_new_tokens=1),
        lambda: jf.start(encoder, variables, 1, 4),
        lambda: jf.advance(encoder, variables, np.ones((1, 1), int), None),
        lambda: jf.score(encoder, variables, np.ones((1, 3), int)),
        lambda: jf.prepare(encoder, variables),
    ):
        with pytest.raises(ValueError, match=r"Encoder is not autoregressive .*no cache"):
            call()


def test_a_search_goes_on_while_a_live_hypothesis_is_better():
    """Unless `early_stopping` is True, which is not the default. Some texts then score better."""
    model, variables, _ = setup("decoder", 3)
    variables = jax.tree.map(lambda x: 2 * x, variables)
    how = {"max_new_tokens": 12, "stop_tokens": (0,), "beam_width": 2, "length_penalty": 1.0}
    early, late, default = (
        jf.beam_search(model, variables, PROMPTS, **how, **asked).scores[:, 0]
        for asked in ({"early_stopping": True}, {"early_stopping": False}, {})
    )
    np.testing.assert_array_equal(default, late)
    assert (late >= early).all() and (late > early + 0.1).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHES)
def test_a_beam_continues_past_its_first_slots(name):
    """20 tokens after prompts of 3 need more than the first 48 slots; 18 need no other program."""
    model = tiny.build(**{**MODELS[name], "vocab_size": VOCAB, "max_length": 60})
    variables, source = tiny.weights(model, 5), tiny.sources(model, 5, len(PROMPTS))
    greedy = jf.Sampler(temperature=0.0)
    for number in (20, 18):
        how = {"max_new_tokens": number, "source": source}
        found = jf.beam_search(model, variables, PROMPTS, **how, beam_width=1)
        wanted = jf.generate(model, variables, PROMPTS, **how, sampler=greedy)
        np.testing.assert_array_equal(found.tokens[:, 0], wanted.tokens)
        tiny.close(found.log_probs[:, 0], wanted.log_probs.sum(axis=1))
