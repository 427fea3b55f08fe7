"""Each generated token follows from a full pass, the key and the sampler's definition."""

from collections import Counter
from dataclasses import astuple
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.decoding import batches as batches_module
from jaxformer.decoding import beam as beam_module
from jaxformer.decoding import generate as generate_module
from jaxformer.decoding.fill import fill
from jaxformer.functional.hooks import Patch
from tests.properties import oracle, tiny
from tests.properties.models import MODELS
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_blocks")
COMPILED = Counter()  # functions traced ("f") or compiled ("jit(f)") since the last clear()


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
    """Returns a model, its weights and three prompts of different lengths."""
    model, rng = tiny.build(**{**MODEL, **changes}), np.random.default_rng(seed)
    prompts = [tiny.tokens(seed + i, n).tolist() for i, n in enumerate(rng.integers(1, 12, 3))]
    return model, tiny.weights(model, seed), prompts


def run(model, variables, prompts, max_new_tokens=NEW, **options):
    return jf.generate(model, variables, prompts, max_new_tokens=max_new_tokens, **options)


def predictions(model, variables, prompt, generated):
    """Returns the logits [generated, vocab] for each generated token, from one forward pass."""
    sequence = np.zeros((1, model.config.max_length), np.int32)
    text = [*prompt, *generated]
    sequence[0, : len(text)] = text
    logits = np.asarray(tiny.apply(model)(variables, sequence))[0]
    return logits[len(prompt) - 1 : len(text) - 1]


@pytest.mark.slow
def test_long_generation_grows_the_cache():
    """40 tokens after a prompt of 30 enlarge the cache, and each token is the argmax.

    Two compiled programs run the three blocks of steps.
    """
    model, variables, _ = setup(0, max_length=70, positions="rotary", window=None)
    prompts = tiny.tokens(0, 1, 30)
    COMPILED.clear()
    out = run(model, variables, prompts, 40, sampler=jf.Sampler(temperature=0.0))
    assert COMPILED["jit(decode_chunk)"] == 2
    for prompt, generated in zip(prompts, out.tokens, strict=True):
        logits = predictions(model, variables, prompt, generated)
        np.testing.assert_array_equal(generated, logits.argmax(axis=-1))


@cache
def draws():
    """Returns a compiled reference that samples with fold_in(fold_in(key, index), step)."""

    def draw(key, index, logits):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(
            jax.random.fold_in(key, index), jnp.arange(len(logits))
        )
        return jax.vmap(jax.random.categorical)(keys, logits)

    return jax.jit(draw)


@pytest.mark.slow
@given(seed=tiny.seeds, sampler=SAMPLERS)
def test_random_key_of_each_sampled_token_depends_on_prompt_and_step(seed, sampler):
    """Token t of prompt i is sampled with fold_in(fold_in(key, i), t), after truncation.

    `log_probs` do not depend on the sampler.
    """
    model, variables, prompts = setup(seed)
    key, numbers = jax.random.key(seed), astuple(sampler)
    out = run(model, variables, prompts, sampler=sampler, key=key)
    for index, (prompt, generated) in enumerate(zip(prompts, out.tokens, strict=True)):
        logits = predictions(model, variables, prompt, generated)
        tempered = logits / sampler.temperature
        left = np.array([oracle.kept(step, *numbers) for step in logits])
        expected = draws()(key, index, np.where(left, tempered, -np.inf).astype(np.float32))
        np.testing.assert_array_equal(generated, expected)
        own = np.take_along_axis(oracle.log_softmax(logits), generated[:, None], axis=-1)[:, 0]
        tiny.close(out.log_probs[index], own)


@pytest.mark.slow
@given(seed=tiny.seeds)
def test_sampled_text_is_independent_of_other_prompts(seed):
    """A text depends on the key and its batch index, not on the other prompts.

    Equal keys give equal texts, and different keys different texts. Equal prompts at different
    indices get different texts. The number and lengths of the other prompts have no effect.
    """
    model, variables, prompts = setup(seed)
    key, other = jax.random.split(jax.random.key(seed))
    hot = jf.Sampler(temperature=5.0)  # nearly uniform: two draws of 16 tokens always differ

    def tokens(prompts, key):
        return run(model, variables, prompts, sampler=hot, key=key).tokens

    drawn, company = tokens(prompts, key), [[1], prompts[1], prompts[1], [2, 3], [4]]
    np.testing.assert_array_equal(drawn, tokens(prompts, key))
    assert (drawn != tokens(prompts, other)).any()
    among_others = tokens(company, key)
    np.testing.assert_array_equal(drawn[1], among_others[1])
    assert (among_others[1] != among_others[2]).any()


@pytest.mark.slow
@given(seed=tiny.seeds, stops=st.sets(st.integers(0, 12), min_size=2, max_size=2))
def test_generated_sequence_ends_with_its_first_stop_token(seed, stops):
    """The text is unchanged up to and including its first stop token, and 0 after it."""
    model, variables, prompts = setup(seed)
    key = jax.random.key(seed)
    free = run(model, variables, prompts, 20, key=key)
    told = []
    out = run(model, variables, prompts, 20, key=key, stop_tokens=stops, on_tokens=told.append)
    for index in range(3):
        ends = np.flatnonzero(np.isin(free.tokens[index], list(stops)))
        length = ends[0] + 1 if len(ends) else 20
        assert out.lengths[index] == length
        np.testing.assert_array_equal(out.tokens[index, :length], free.tokens[index, :length])
        # Another number of stop tokens needs another program, which may round differently.
        tiny.close(out.log_probs[index, :length], free.log_probs[index, :length], 1e-6)
        assert not out.tokens[index, length:].any() and not out.log_probs[index, length:].any()
        streamed = [token for block in told for token in block[index]]
        assert streamed == out.tokens[index, :length].tolist()


class Letters:
    """A tokenizer whose ids are letters, except id 0, which has no bytes."""

    vocabulary_bytes = (b"", *(bytes([letter]) for letter in b"abcdefghijkl"))

    def decode(self, ids):
        return b"".join(self.vocabulary_bytes[token] for token in ids).decode()


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", mostly_slow([None, 1], None))
@given(seed=tiny.seeds, data=st.data())
def test_generated_texts_end_at_their_first_stop_string(batch_size, seed, data):
    """The text is unchanged up to and including the token that completes a stop string."""
    model, variables, prompts = setup(seed)
    options = {"key": jax.random.key(seed), "batch_size": batch_size}
    free = run(model, variables, prompts, 20, **options)
    start = data.draw(st.integers(0, 15))
    text = Letters().decode(free.tokens[data.draw(st.integers(0, 2))])
    words = (text[start : start + data.draw(st.integers(1, 3))] or "a", "lk")
    stop = jf.StopStrings(Letters(), words)
    out = run(model, variables, prompts, 20, stop_strings=stop, **options)
    for index in range(3):
        texts = [Letters().decode(free.tokens[index, :n]) for n in range(1, 21)]
        ends = [n for n, text in enumerate(texts, 1) if any(word in text for word in words)]
        length = ends[0] if ends else 20
        assert out.lengths[index] == length
        np.testing.assert_array_equal(out.tokens[index, :length], free.tokens[index, :length])


@pytest.mark.slow
def test_stop_tokens_may_be_any_iterable():
    """Stop tokens may be a list, an array, a set, an iterator or a range."""
    model, variables, prompts = setup(3)
    free = run(model, variables, prompts, key=jax.random.key(0))
    stop = int(free.tokens[0, 2])
    for stops in ({stop}, iter([stop]), map(int, [stop]), {"eos": stop}.values()):
        out = run(model, variables, prompts, key=jax.random.key(0), stop_tokens=stops)
        assert out.lengths[0] == free.tokens[0].tolist().index(stop) + 1


@pytest.mark.slow
def test_sampling_at_the_smallest_temperature_equals_greedy_decoding():
    """Division by the smallest temperature overflows; the largest logit must still be sampled."""
    model, variables, prompts = setup(4)
    cold = run(model, variables, prompts, sampler=jf.Sampler(1e-38), key=jax.random.key(0))
    greedy = run(model, variables, prompts, sampler=jf.Sampler(0.0))
    np.testing.assert_array_equal(cold.tokens, greedy.tokens)


@pytest.mark.slow
def test_generate_compiles_few_programs_and_none_twice():
    """Prompt lengths fall into buckets, so few programs compile, and each compiles once.

    Sampling and greedy decoding need at most 2 log₂(max_length) programs each. Then nothing is
    compiled or traced again for another length of the same bucket, another seed or sampler, other
    stop tokens, or a new module with an equal config.
    """
    model, variables, _ = setup(0, max_length=64)
    COMPILED.clear()
    lengths = (1, 3, 17, 30, 32, 33, 40, 48)
    for length in lengths:
        for sampler in (jf.Sampler(), jf.Sampler(temperature=0.0)):
            options = {"key": jax.random.key(0), "stop_tokens": (3,), "sampler": sampler}
            run(model, variables, tiny.tokens(0, 1, length), **options)
    assert 1 <= COMPILED["jit(prefill)"] <= 6
    assert 2 <= COMPILED["jit(decode_chunk)"] <= 12
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


def test_batch_sizes_rounded_to_one_bucket_share_compiled_programs():
    """A batch of three prompts runs the programs of a batch of four, with equal texts."""
    model, variables, prompts = setup(5)
    key = jax.random.key(0)
    four = run(model, variables, [*prompts, [1]], key=key)
    COMPILED.clear()
    three = run(model, variables, prompts, key=key)
    assert not COMPILED, COMPILED
    np.testing.assert_array_equal(three.tokens, four.tokens[:3])
    np.testing.assert_array_equal(three.log_probs, four.log_probs[:3])


@pytest.mark.slow
def test_batch_sizes_are_rounded_up_to_buckets():
    """For batch sizes 3 to 7, only programs for the batch sizes 4 and 8 are compiled.

    The test covers generation, beam search, scoring and fill-mask. Captured values and patches have
    the caller's batch size.
    """
    model, variables, _ = setup(6)
    encoder = tiny.build(kind=jf.EncoderConfig)
    own = tiny.weights(encoder, 6)
    greedy, point = jf.Sampler(temperature=0.0), "block.output"
    COMPILED.clear()
    for size in range(3, 8):
        prompts = tiny.tokens(0, 7, 5)[:size]
        out = run(model, variables, prompts, 3, sampler=greedy, capture=(point,))
        assert out.captured[point].shape[:3] == (1, size, 3) and len(out.lengths) == size
        found = jf.beam_search(model, variables, prompts, max_new_tokens=3, beam_width=2)
        assert found.tokens.shape == (size, 1, 3)
        assert jf.score(model, variables, prompts).shape == (size,)
        assert len(fill(encoder, own, prompts, mask_token=1)) == size
    for name in (
        "prefill",
        "choose_first",
        "_init_search",
        "_run_steps",
        "_score",
        "_most_probable",
    ):
        assert COMPILED[f"jit({name})"] <= (4 if name == "prefill" else 2), COMPILED
    value = np.arange(3.0)[None, :, None, None]
    patch = {point: Patch(np.ones((1, 3, 1, 1), bool), value)}
    seen = run(model, variables, prompts[:3], 2, sampler=greedy, capture=(point,), patch=patch)
    np.testing.assert_array_equal(seen.captured[point][0, :, 0, 0], [0.0, 1.0, 2.0])


@pytest.mark.slow
def test_cache_memory_depends_on_the_number_of_generated_tokens(monkeypatch):
    """A large `max_new_tokens` changes no token, and only the slots in use are allocated."""
    model = tiny.build(**{**MODELS["encoder-decoder"], "max_length": 2000})
    variables, prompts = tiny.weights(model, 1), [[1], [2]]
    source, sizes = tiny.sources(model, 1, 2), []

    def watched(function):
        def watch(*arguments, **named):
            sizes.extend(max(x.shape, default=0) for x in jax.tree.leaves(arguments[2]))
            return function(*arguments, **named)

        return watch

    monkeypatch.setattr(generate_module, "decode_chunk", watched(generate_module.decode_chunk))
    monkeypatch.setattr(beam_module, "_run_steps", watched(beam_module._run_steps))
    greedy = jf.Sampler(temperature=0.0)
    free = run(model, variables, prompts, 20, sampler=greedy, source=source)
    stops = {*range(0, 13, 2), *free.tokens[:, 3].tolist()}
    how, early = {"stop_tokens": stops, "source": source}, {"early_stopping": True}
    for find in (
        lambda n: run(model, variables, prompts, n, sampler=greedy, **how),
        lambda n: jf.beam_search(model, variables, prompts, max_new_tokens=n, **early, **how),
    ):
        few, many = find(20), find(1990)
        assert few.lengths.max() < 20
        np.testing.assert_array_equal(many.lengths, few.lengths)
        np.testing.assert_array_equal(many.tokens[..., :20], few.tokens)
        assert not many.tokens[..., 20:].any()
    assert 32 <= max(sizes) <= 96


def test_generate_rejects_variables_without_params():
    model, variables, _ = setup(0)
    with pytest.raises(ValueError, match=r"has the keys .*; it must have 'params' .* or 'packed'"):
        run(model, variables["params"], [[1]], 1, key=jax.random.key(0))


def test_generate_rejects_invalid_arguments():
    """Invalid arguments of `generate` and `Sampler` raise ValueError with name and value."""
    model, variables, prompts = setup(0)
    wrong = {
        "max_new_tokens is 0": {"max_new_tokens": 0},
        "key is None, but sampling at temperature 1.0": {"key": None},
        "prompts is empty": {"prompts": []},
        "prompt 1 is empty": {"prompts": [[1], []]},
        "prompt 1 contains id 13, but vocab_size is 13": {"prompts": [[1], [2, 13]]},
        "prompt 0 contains id -1": {"prompts": [[-1]]},
        "stop_tokens contains id 99": {"stop_tokens": (99,)},
        "stop_tokens is 5; it must be an iterable": {"stop_tokens": 5},
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


def in_batches_and_at_once(monkeypatch, call):
    """Returns the results of one batch with all texts, and of several smaller batches.

    The smaller batch size is an argument, or follows from a memory limit that allows one text.
    """
    at_once = call(None)
    with monkeypatch.context() as patched:
        patched.setattr(batches_module, "BATCH_BYTES", 1)
        return at_once, [call(2), call(None)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_slow(["decoder", "encoder-decoder"], "decoder"))
def test_generation_in_several_batches_equals_one_batch(kind, monkeypatch):
    """Results and `on_tokens` are equal for prompts of mixed lengths in mixed order."""
    model = tiny.build(**{**MODELS[kind], "max_length": 80})
    variables, rng = tiny.weights(model, 3), np.random.default_rng(3)
    top = 36 if kind == "decoder" else 6
    prompts = [tiny.tokens(i, n).tolist() for i, n in enumerate(rng.integers(1, top, 5))]
    source = None if kind == "decoder" else [prompt[::-1] for prompt in prompts]

    def call(batch_size):
        told = [[] for _ in prompts]

        def on_tokens(blocks):
            for text, block in zip(told, blocks, strict=True):
                text += block

        out = run(
            model,
            variables,
            prompts,
            4,
            key=jax.random.key(7),
            stop_tokens=[1, 2],
            source=source,
            batch_size=batch_size,
            on_tokens=on_tokens,
        )
        assert told == [ids[:n].tolist() for ids, n in zip(out.tokens, out.lengths, strict=True)]
        return out

    at_once, batched = in_batches_and_at_once(monkeypatch, call)
    for out in batched:
        np.testing.assert_array_equal(out.tokens, at_once.tokens)
        np.testing.assert_array_equal(out.lengths, at_once.lengths)
        np.testing.assert_allclose(out.log_probs, at_once.log_probs, atol=1e-4)


@pytest.mark.slow
def test_beam_search_in_several_batches_equals_one_batch(monkeypatch):
    model, variables, prompts = setup(4)

    def call(batch_size):
        return jf.beam_search(
            model, variables, prompts, max_new_tokens=4, beam_width=2, batch_size=batch_size
        )

    at_once, batched = in_batches_and_at_once(monkeypatch, call)
    for out in batched:
        np.testing.assert_array_equal(out.tokens, at_once.tokens)
        np.testing.assert_allclose(out.scores, at_once.scores, atol=1e-4)
