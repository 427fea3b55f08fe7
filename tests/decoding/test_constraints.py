"""Constraints on the next token equal a reference in Python loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.decoding.constraints import NO_TOKEN, build_rules
from jaxformer.models.config.generation import Constraints
from tests.properties import oracle

VOCAB, SLOTS, BATCH = 7, 10, 3
IDS = st.integers(0, VOCAB - 1)
SOME = st.lists(IDS, max_size=2).map(tuple)
CONSTRAINTS = st.builds(
    Constraints,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.4]),
    presence_penalty=st.sampled_from([0.0, 0.6]),
    no_repeat_ngram_size=st.integers(0, 4),
    bad_words_ids=st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    min_length=st.integers(0, 8),
    min_new_tokens=st.integers(0, 4),
    forced_bos_token_id=st.none() | IDS,
    forced_eos_token_id=SOME,
    allowed_tokens=SOME,
    suppress_tokens=SOME,
    begin_suppress_tokens=SOME,
    sequence_bias=st.lists(
        st.tuples(st.lists(IDS, min_size=1, max_size=3).map(tuple), st.sampled_from([-2.0, 1.5])),
        max_size=3,
        unique_by=lambda pair: pair[0],
    ).map(tuple),
    encoder_repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    encoder_no_repeat_ngram_size=st.integers(0, 3),
    exponential_decay_length_penalty=st.none() | st.tuples(st.integers(0, 3), st.just(1.4)),
    renormalize_logits=st.booleans(),
)


def has_repeated(ngram, words):
    """Returns whether the words have this n-gram."""
    size = len(ngram)
    return ngram in [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]


def expected(constraints, scores, words, prompt, step, last_step, stops, read):
    """Constrains the scores of one text, `words`, whose first `prompt` ids are the prompt.

    `read` is the source or, without a source, the prompt.
    """
    scores = scores.copy()
    for token in range(VOCAB):
        for word, bias in constraints.sequence_bias:
            if (*words, token)[-len(word) :] == word:
                scores[token] += bias
    for token in set(read):
        by = constraints.encoder_repetition_penalty
        scores[token] = scores[token] / by if scores[token] < 0 else scores[token] * by
    for token in set(words):
        by = constraints.repetition_penalty
        scores[token] = scores[token] * by if scores[token] < 0 else scores[token] / by
    for token in words[prompt:]:
        scores[token] -= constraints.frequency_penalty
    for token in set(words[prompt:]):
        scores[token] -= constraints.presence_penalty
    for token in range(VOCAB):
        for size, earlier in (
            (constraints.no_repeat_ngram_size, words),
            (constraints.encoder_no_repeat_ngram_size, read),
        ):
            ngram = (*words, token)[-size:] if size else ()
            if size and len(ngram) == size and has_repeated(ngram, earlier):
                scores[token] = -np.inf
        for word in constraints.bad_words_ids:
            is_free = len(word) == 1 and word[0] in stops
            if not is_free and (*words, token)[-len(word) :] == word:
                scores[token] = -np.inf
        if token in stops and len(words) < constraints.min_length:
            scores[token] = -np.inf
        if token in stops and step < constraints.min_new_tokens:
            scores[token] = -np.inf
    first, last = constraints.forced_bos_token_id, constraints.forced_eos_token_id
    if first is not None and len(words) == 1:
        scores = np.where(np.arange(VOCAB) == first, 0.0, -np.inf)
    if last and step == last_step:
        scores = np.where(np.isin(np.arange(VOCAB), last), 0.0, -np.inf)
    start, factor = constraints.exponential_decay_length_penalty or (step, 1.0)
    for token in set(stops):
        if step > start and np.isfinite(scores[token]):
            scores[token] += abs(scores[token]) * (factor ** (step - start) - 1)
    if constraints.allowed_tokens:
        scores[~np.isin(np.arange(VOCAB), constraints.allowed_tokens)] = -np.inf
    scores[list(constraints.suppress_tokens)] = -np.inf
    if step == (1 if prompt == 1 and first is not None else 0):
        scores[list(constraints.begin_suppress_tokens)] = -np.inf
    if constraints.renormalize_logits and scores.max() > -np.inf:
        scores = oracle.log_softmax(scores)
    return scores


@pytest.mark.slow
@given(CONSTRAINTS, st.integers(0, 2**31), st.integers(0, 5), SOME, st.booleans())
def test_decoding_constraints_change_scores_like_a_python_reference(
    constraints, seed, step, stops, has_source
):
    """Prompts and sources have different lengths and are padded on the left."""
    random = np.random.default_rng(seed)
    prompts = random.integers(1, SLOTS - 5, BATCH)
    width = prompts.max()
    tokens = np.full((BATCH, SLOTS), NO_TOKEN)
    for index, length in enumerate(prompts):
        tokens[index, width - length : width + step] = random.integers(0, 3, length + step)
    scores = random.normal(size=(BATCH, VOCAB)).astype(np.float32)
    last_step = int(random.integers(step, step + 2))
    shorter = [tokens[index, width - n : width] for index, n in enumerate(prompts)]
    sources = [random.integers(0, VOCAB, length) for length in random.integers(1, 6, BATCH)]
    source = sources if has_source else None
    rules = build_rules(constraints, shorter, width, last_step + 1, np.array(stops, int), source)
    generated = np.full((BATCH, 6), NO_TOKEN)
    generated[:, :step] = tokens[:, width : width + step]
    found = scores
    if rules is not None:
        with jax.disable_jit():
            found = rules.apply(jnp.asarray(scores), jnp.asarray(generated), jnp.int32(step))
    for index, length in enumerate(prompts):
        words = tuple(tokens[index, width - length : width + step].tolist())
        read = tuple((sources if has_source else shorter)[index].tolist())
        wanted = expected(constraints, scores[index], words, length, step, last_step, stops, read)
        np.testing.assert_allclose(found[index], wanted, rtol=1e-5, atol=1e-6)


@given(seed=st.integers(0, 2**31), frequency=st.floats(-2, 2), presence=st.floats(-2, 2))
def test_frequency_penalty_is_subtracted_per_occurrence_and_presence_penalty_once(
    seed, frequency, presence
):
    """Tokens of the prompt do not count."""
    random = np.random.default_rng(seed)
    rules = Constraints(frequency_penalty=frequency, presence_penalty=presence)
    prompts = [random.integers(0, VOCAB, length) for length in (1, 4)]
    generated = random.integers(0, 3, (2, 5))
    generated[:, 4:] = NO_TOKEN
    rules = build_rules(rules, prompts, 4, 5, np.array([], int))
    scores = random.normal(size=(2, VOCAB)).astype(np.float32)
    counts = np.stack([np.bincount(row[:4], minlength=VOCAB) for row in generated])
    wanted = scores - frequency * counts - presence * (counts > 0)
    if rules is not None:
        scores = rules.apply(jnp.asarray(scores), jnp.asarray(generated), jnp.int32(4))
    np.testing.assert_allclose(scores, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("repetition_penalty", 0.0, "repetition_penalty is 0.0"),
        ("min_length", -1, "min_length is -1"),
        ("frequency_penalty", float("nan"), "frequency_penalty is nan"),
        ("presence_penalty", float("inf"), "presence_penalty is inf"),
        ("allowed_tokens", (-1,), "allowed_tokens is"),
        ("bad_words_ids", ((),), "bad_words_ids contains"),
        ("suppress_tokens", (1.5,), "suppress_tokens is"),
        ("forced_bos_token_id", True, "forced_bos_token_id is True"),
        ("sequence_bias", (((), 1.0),), "sequence_bias contains"),
        ("sequence_bias", ((1,),), "sequence_bias is"),
        ("encoder_repetition_penalty", -1.0, "encoder_repetition_penalty is -1.0"),
        ("exponential_decay_length_penalty", (1, 0.0), "exponential_decay_length_penalty is"),
        ("exponential_decay_length_penalty", (1,), "exponential_decay_length_penalty is"),
        ("renormalize_logits", 1, "renormalize_logits is 1"),
    ],
)
def test_invalid_decoding_constraint_raises_error_that_names_it(field, value, said):
    with pytest.raises(ValueError, match=said):
        Constraints(**{field: value})


@pytest.mark.parametrize("field", ["suppress_tokens", "forced_eos_token_id", "bad_words_ids"])
def test_error_for_constraint_id_outside_the_vocabulary_names_the_field(field):
    ids = ((2, 9),) if field == "bad_words_ids" else (2, 9)
    with pytest.raises(ValueError, match=f"{field} has the token id 9"):
        Constraints(**{field: ids}).check_ids(9)
