"""Generation: each token is the one that a full pass, a seed and the sampler's rule determine."""

from collections import Counter
from functools import cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.decoding.sampling import sample_tokens, truncate
from jaxformer.verify import rules
from tests.properties import oracle, tiny

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_blocks")
COMPILED = Counter()  # by name, what is traced ("f") or compiled ("jit(f)") while this counts


@jax.monitoring.register_event_duration_secs_listener
def count(event, _, fun_name="", **__):
    if event.endswith(("backend_compile_duration", "jaxpr_trace_duration")):
        COMPILED[fun_name] += 1


NEW = 16
MODEL = {"num_layers": 1, "max_length": 40, "window": 5}
SAMPLERS = st.builds(
    jf.Sampler,
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 12, 13, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.05, 0.2]),
)


def setup(seed, **changes):
    """A model, its weights and three prompts of different lengths."""
    model, rng = tiny.build(**{**MODEL, **changes}), np.random.default_rng(seed)
    prompts = [tiny.tokens(seed + i, n).tolist() for i, n in enumerate(rng.integers(1, 12, 3))]
    return model, tiny.weights(model, seed), prompts


def run(model, variables, prompts, max_new_tokens=NEW, **options):
    return jf.generate(model, variables, prompts, max_new_tokens=max_new_tokens, **options)


def predictions(model, variables, prompt, generated):
    """Logits [generated, vocab] from which each generated token was to be chosen, by one pass."""
    row = np.zeros((1, model.config.max_length), np.int32)
    text = [*prompt, *generated]
    row[0, : len(text)] = text
    logits = np.asarray(tiny.apply(model)(variables, row))[0]
    return logits[len(prompt) - 1 : len(text) - 1]


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def kept(logits, sampler):
    """bool [vocab]: what top-k, then top-p, then min-p leave, by sorting; ties are all kept."""
    left = np.ones(len(logits), bool)
    if 0 < sampler.top_k < len(logits):
        left &= logits >= np.sort(logits)[::-1][sampler.top_k - 1]
    probabilities = np.exp(log_softmax(np.where(left, logits, -np.inf)))
    largest_first = np.sort(probabilities)[::-1]
    enough = np.searchsorted(np.cumsum(largest_first), sampler.top_p)
    left &= probabilities >= largest_first[min(enough, len(logits) - 1)]
    return left & (probabilities >= sampler.min_p * probabilities.max())


def test_long_generation_goes_on_past_every_bucket():
    """A prompt of 30 and 40 more tokens, block after block, into wider caches: still the argmax,
    by two programs for three blocks of steps."""
    model, variables, _ = setup(0, max_length=70, positions="rotary", window=None)
    prompts = tiny.tokens(0, 1, 30)
    COMPILED.clear()
    out = run(model, variables, prompts, 40, sampler=jf.Sampler(temperature=0.0))
    assert COMPILED["jit(decode_block)"] == 2
    for prompt, generated in zip(prompts, out.tokens, strict=True):
        logits = predictions(model, variables, prompt, generated)
        np.testing.assert_array_equal(generated, logits.argmax(axis=-1))


@cache
def draws():
    """(key, row, logits [steps, vocab]) → what fold_in(fold_in(key, row), step) draws."""

    def draw(key, row, logits):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(
            jax.random.fold_in(key, row), jnp.arange(len(logits))
        )
        return jax.vmap(jax.random.categorical)(keys, logits)

    return jax.jit(draw)


@given(seed=tiny.seeds, sampler=SAMPLERS)
def test_row_i_step_t_draws_with_its_own_key_from_what_is_kept(seed, sampler):
    """Temperature, then truncation, then a draw with fold_in(fold_in(key, i), t); and log_probs
    are those of the model itself, whatever the sampler."""
    model, variables, prompts = setup(seed)
    key = jax.random.key(seed)
    out = run(model, variables, prompts, sampler=sampler, key=key)
    for row, (prompt, generated) in enumerate(zip(prompts, out.tokens, strict=True)):
        logits = predictions(model, variables, prompt, generated)
        tempered = logits / sampler.temperature
        left = np.array([kept(step, sampler) for step in tempered])
        expected = draws()(key, row, np.where(left, tempered, -np.inf).astype(np.float32))
        np.testing.assert_array_equal(generated, expected)
        own = np.take_along_axis(log_softmax(logits), generated[:, None], axis=-1)[:, 0]
        tiny.close(out.log_probs[row], own)


@given(seed=tiny.seeds)
def test_a_row_depends_on_its_key_and_not_on_its_neighbours(seed):
    """The same key gives the same text, another key another; other prompts around a row, more of
    them and of other lengths, leave it as it is; equal prompts in two rows get different text."""
    model, variables, prompts = setup(seed)
    key, other = jax.random.split(jax.random.key(seed))
    hot = jf.Sampler(temperature=5.0)  # nearly uniform: two draws of 16 tokens never agree

    def tokens(prompts, key):
        return run(model, variables, prompts, sampler=hot, key=key).tokens

    drawn, company = tokens(prompts, key), [[1], prompts[1], prompts[1], [2, 3]]
    np.testing.assert_array_equal(drawn, tokens(prompts, key))
    assert (drawn != tokens(prompts, other)).any()
    among_others = tokens(company, key)
    np.testing.assert_array_equal(drawn[1], among_others[1])
    assert (among_others[1] != among_others[2]).any()


@given(seed=tiny.seeds, stops=st.sets(st.integers(0, 12), min_size=2, max_size=2))
def test_a_stop_token_ends_its_row_and_is_counted(seed, stops):
    """A row is what it would be without stop tokens up to and with its first one, then zeros."""
    model, variables, prompts = setup(seed)
    key = jax.random.key(seed)
    free = run(model, variables, prompts, 20, key=key)
    told = []
    out = run(model, variables, prompts, 20, key=key, stop_tokens=stops, on_tokens=told.append)
    for row in range(3):
        ends = np.flatnonzero(np.isin(free.tokens[row], list(stops)))
        length = ends[0] + 1 if len(ends) else 20
        assert out.lengths[row] == length
        np.testing.assert_array_equal(out.tokens[row, :length], free.tokens[row, :length])
        np.testing.assert_array_equal(out.log_probs[row, :length], free.log_probs[row, :length])
        assert not out.tokens[row, length:].any() and not out.log_probs[row, length:].any()
        streamed = [token for block in told for token in block[row]]
        assert streamed == out.tokens[row, :length].tolist()


def test_stop_tokens_may_come_once():
    """Whatever can be gone through: a generator is not used up by looking at it."""
    model, variables, prompts = setup(3)
    free = run(model, variables, prompts, key=jax.random.key(0))
    stop = int(free.tokens[0, 2])
    out = run(model, variables, prompts, key=jax.random.key(0), stop_tokens=iter([stop]))
    assert out.lengths[0] == free.tokens[0].tolist().index(stop) + 1


def test_the_smallest_temperature_is_greedy():
    """Divided by it logits overflow: the largest is drawn all the same."""
    model, variables, prompts = setup(4)
    cold = run(model, variables, prompts, sampler=jf.Sampler(1e-38), key=jax.random.key(0))
    greedy = run(model, variables, prompts, sampler=jf.Sampler(0.0))
    np.testing.assert_array_equal(cold.tokens, greedy.tokens)


@cache
def truncation():
    return jax.jit(truncate)


@settings(max_examples=10 * settings().max_examples)
@given(
    values=st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 1.5]), min_size=13, max_size=13),
    noise=st.sampled_from([0.0, 0.3]),
    seed=tiny.seeds,
    top_k=st.just(0) | st.integers(0, 15),
    top_p=st.just(1.0) | st.floats(0.01, 1.0),
    min_p=st.just(0.0) | st.floats(0.0, 1.0),
)
def test_truncation_is_that_of_a_sort(values, noise, seed, top_k, top_p, min_p):
    """Bisecting for thresholds keeps what sorting keeps, ties included, and changes no logit."""
    noisy = np.array(values) + noise * np.random.default_rng(seed).normal(size=13)
    logits, sampler = np.float32(noisy), jf.Sampler(top_k=top_k, top_p=top_p, min_p=min_p)

    def nearly(factor):
        thresholds = {"top_p": min(1.0, top_p * factor), "min_p": min(1.0, min_p * factor)}
        return kept(logits, jf.Sampler(top_k=top_k, **thresholds))

    # On the threshold itself float32 may decide either way.
    assume((nearly(1 - 1e-5) == nearly(1 + 1e-5)).all())
    found = np.asarray(truncation()(sampler.arrays(), logits[None]))[0]
    np.testing.assert_array_equal(found, np.where(kept(logits, sampler), logits, -np.inf))


def test_draws_have_the_frequencies_of_what_is_left():
    """20,000 draws: each token as often as its renormalised probability says, within 5 σ."""
    logits = np.float32([2.0, 1.0, 0.5, 0.0, -1.0, -6.0])
    sampler = jf.Sampler(temperature=0.7, top_k=4, top_p=0.95, min_p=0.02)
    number = 20_000
    rows = np.tile(logits, (number, 1))
    tokens = jax.jit(sample_tokens)(sampler.arrays(), jax.random.key(0), 0, rows)
    left = kept(logits / 0.7, sampler)
    expected = np.where(left, np.exp(logits / 0.7), 0.0)
    expected /= expected.sum()
    found = np.bincount(np.asarray(tokens), minlength=6) / number
    assert (abs(found - expected) <= 5 * np.sqrt(expected * (1 - expected) / number)).all()


@pytest.mark.parametrize("prefix", [0, 3])
@given(seed=tiny.seeds, segments=tiny.segment_batches(2))
def test_score_is_the_sum_over_documents(prefix, seed, segments):
    """Σ log P(x_i | x_<i) of each document, its first token (or its prefix) given, padding
    anywhere."""
    model = tiny.build(prefix=prefix)
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, *segments.shape)
    scores = jf.score(model, variables, tokens, segments=segments)
    for row, ids in enumerate(segments):
        log_probs = log_softmax(oracle.decoder(variables["params"], tokens[row], ids, model.config))
        documents, _ = rules.read(ids)
        expected = 0.0
        for document in range(1, documents.max() + 1):
            own = np.flatnonzero(documents == document)
            predicted = list(pairwise(own))[max(0, prefix - 1) :]
            expected += sum(log_probs[i, tokens[row, j]] for i, j in predicted)
        tiny.close(scores[row], expected, 2e-5)


@given(seed=tiny.seeds)
def test_log_probs_add_up_to_scores(seed):
    """score(prompt + generated) − score(prompt) = Σ log_probs, whatever the sampler."""
    model, variables, _ = setup(seed)
    prompts, cold = tiny.tokens(seed, 3, 8), jf.Sampler(temperature=0.5, top_k=5)
    out = run(model, variables, prompts, key=jax.random.key(seed), sampler=cold)
    whole = jf.score(model, variables, np.concatenate([prompts, out.tokens], axis=1))
    tiny.close(whole - jf.score(model, variables, prompts), out.log_probs.sum(axis=1), 2e-5)


def test_score_refuses_a_token_that_is_none():
    """An id outside the vocabulary is a ValueError, and inside jit NaN: never some other token."""
    model = tiny.build()
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 1, 11)  # the last: a block alone
    for bad in (-1, 13):
        tokens[0, -1] = bad
        with pytest.raises(ValueError, match=f"tokens hold id {bad}; vocab_size is 13"):
            jf.score(model, variables, tokens)
        assert np.isnan(jax.jit(lambda tokens: jf.score(model, variables, tokens))(tokens)).all()


def test_score_says_that_it_needs_the_params():
    model = tiny.build()
    ready = jf.prepare(model, tiny.weights(model, 0))
    with pytest.raises(ValueError, match="hold prepared; they must hold 'params'"):
        jf.score(model, ready, tiny.tokens(0, 1, 11))
    with pytest.raises(ValueError, match=r"hold .*; they must hold 'prepared' or 'params'"):
        run(model, tiny.weights(model, 0)["params"], [[1]], 1, key=jax.random.key(0))


def test_compilations_are_few_and_never_repeated():
    """Prompt lengths fall into buckets: at most 2 log₂(max_length) programs for all of them, and as
    many for greedy decoding. What was seen before compiles and traces nothing: not for another
    length of the same bucket, another seed or sampler, other stop tokens, or a new module of an
    equal config."""
    model, variables, _ = setup(0, max_length=64)
    COMPILED.clear()
    lengths = (1, 3, 17, 30, 32, 33, 40, 48)
    for length in lengths:
        for sampler in (jf.Sampler(), jf.Sampler(temperature=0.0)):
            options = {"key": jax.random.key(0), "stop_tokens": (3,), "sampler": sampler}
            run(model, variables, tiny.tokens(0, 1, length), **options)
    assert 1 <= COMPILED["jit(prefill)"] <= 6
    assert 2 <= COMPILED["jit(decode_block)"] <= 12
    COMPILED.clear()
    again = jf.Decoder(model.config, execution=model.execution)
    samplers = [
        jf.Sampler(temperature=0.5, top_k=3),
        jf.Sampler(top_p=0.5, min_p=0.1),
        jf.Sampler(temperature=0.0),
    ]
    for seed, sampler in enumerate(samplers):
        options = {"key": jax.random.key(seed), "stop_tokens": (seed,), "sampler": sampler}
        for length in (*lengths, 2, 31, 45):
            run(again, variables, tiny.tokens(seed, 1, length), 9 + seed, **options)
    assert not COMPILED, COMPILED


def test_what_cannot_be_generated_is_refused_by_name():
    """Each wrong argument of generate and of Sampler: a ValueError with its name and value."""
    model, variables, prompts = setup(0)
    wrong = {
        "max_new_tokens is 0": {"max_new_tokens": 0},
        "key is None, but sampling at temperature 1.0": {"key": None},
        "prompts is empty": {"prompts": []},
        "prompt 1 is empty": {"prompts": [[1], []]},
        "prompt 1 holds id 13; vocab_size is 13": {"prompts": [[1], [2, 13]]},
        "prompt 0 holds id -1": {"prompts": [[-1]]},
        "stop_tokens holds id 99": {"stop_tokens": (99,)},
        "stop_tokens is 5; it must be a collection": {"stop_tokens": 5},
        "stop_tokens is float64": {"stop_tokens": [1.9]},
        "prompt 0 is float64": {"prompts": [[0.5]]},
        "prompt 0 has 25 tokens and max_new_tokens is 16.*40": {"prompts": [[1] * 25]},
    }
    for message, change in wrong.items():
        options = {"prompts": prompts, "key": jax.random.key(0), **change}
        with pytest.raises(ValueError, match=message):
            run(model, variables, **options)
    assert run(model, variables, [[1] * 24] * 3, key=jax.random.key(0)).tokens.shape == (3, NEW)
    for name, value in (("temperature", -1.0), ("top_k", -1), ("top_p", 0.0), ("min_p", 1.5)):
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            jf.Sampler(**{name: value})
