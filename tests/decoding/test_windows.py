"""A layer with a window stores only its window, independently of other layers."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.functional.cache.key_values import SPARE
from tests.properties import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")
LONG, WINDOW = 112, 5
RING = WINDOW + SPARE
MIXED = {"window": (WINDOW, None, WINDOW), "num_layers": 3, "positions": "rotary"}
WINDOWED = {"window": (WINDOW, 3), "num_layers": 2, "positions": "alibi"}
CHUNKS = (1, 11, RING + 3)  # the last chunk is longer than a ring buffer
GREEDY = jf.Sampler(temperature=0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [MIXED, pytest.param(WINDOWED, marks=pytest.mark.slow)],
    ids=["mixed", "all windows"],
)
@given(seed=tiny.seeds, first=st.sampled_from(CHUNKS[1:]))
def test_chunked_window_attention_equals_single_pass(options, seed, first):
    """The cases include a chunk longer than the ring buffer, packed documents and padding."""
    model = tiny.build(max_length=LONG, **options)
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, 2, LONG)
    random = np.random.default_rng(seed)
    segment_ids = 1 + np.cumsum(random.random((2, LONG)) < 0.03, axis=1)
    segment_ids = np.where(random.random((2, LONG)) < 0.1, 0, segment_ids)
    sizes = [11, CHUNKS[2], 1, 11, 1] if first == 11 else [CHUNKS[2], 11, 11, 1, 1]
    cache, logits, start = jf.init_cache(model, variables, 2, LONG), [], 0
    for size in sizes:
        part = slice(start, start + size)
        new, cache = jf.extend(model, variables, tokens[:, part], cache, segment_ids[:, part])
        logits.append(new)
        start += size
    whole = tiny.apply(model)(variables, tokens, segment_ids)[:, :start]
    tiny.close(np.concatenate(logits, axis=1), whole, where=segment_ids[:, :start] != 0)


def test_layer_with_window_attention_caches_only_its_window():
    """init_cache, generate and beam_search allocate memory for the window only."""
    model = tiny.build(max_length=4096, **MIXED)
    variables = tiny.weights(model, 0)
    cache = jf.init_cache(model, variables, 1, 4096)
    assert [x.keys.shape[2] for x in cache.key_values] == [RING, 4096, RING]
    whole = jf.init_cache(model, variables, 1, 4096, ring=False)
    assert [x.keys.shape[2] for x in whole.key_values] == [4096] * 3
    assert [x.keys.shape[2] for x in jf.init_cache(model, variables, 1, RING).key_values] == [
        RING
    ] * 3
    grown = jf.init_cache(model, variables, 1, 4096).live_prefix(48).grow(96)
    assert [x.keys.shape[2] for x in grown.key_values] == [RING, 96, RING]


@pytest.mark.slow
@pytest.mark.parametrize("options", [MIXED, WINDOWED], ids=["mixed", "all windows"])
def test_generation_with_window_attention_equals_full_passes(options):
    """Greedy and beam search, with prompts shorter and longer than the window."""
    model = tiny.build(max_length=2 * LONG, **options)
    variables, length = tiny.weights(model, 3), 2 * LONG - 100
    prompts = [tiny.tokens(4, 1, 100)[0].tolist(), tiny.tokens(5, 1, 3)[0].tolist()]
    out = jf.generate(model, variables, prompts, max_new_tokens=100, sampler=GREEDY)
    beams = jf.beam_search(model, variables, prompts, max_new_tokens=100, beam_width=1)
    np.testing.assert_array_equal(np.asarray(beams.tokens)[:, 0], out.tokens)
    for prompt, new, log_probs in zip(prompts, out.tokens, out.log_probs, strict=True):
        text = np.array([[*prompt, *new]])
        logits = tiny.apply(model)(variables, np.pad(text, ((0, 0), (0, 2 * LONG - text.size))))
        wanted = jax.nn.log_softmax(logits[0, len(prompt) - 1 : len(prompt) + 99])
        assert length >= 100 and (wanted.argmax(axis=-1) == new).mean() > 0.97
        tiny.close(log_probs, np.take_along_axis(np.asarray(wanted), new[:, None], 1)[:, 0])


@pytest.mark.slow
def test_cache_with_different_windows_rewinds_as_far_as_spare_slots_allow():
    model = tiny.build(max_length=LONG, **MIXED)
    variables, tokens = tiny.weights(model, 1), tiny.tokens(1, 1, LONG)
    _, cache = jf.extend(
        model, variables, tokens[:, :100], jf.init_cache(model, variables, 1, LONG)
    )
    logits, _ = jf.extend(model, variables, tokens[:, 40:50], cache.rewind(60))
    tiny.close(logits, tiny.apply(model)(variables, tokens[:, :50])[:, 40:])
    with pytest.raises(ValueError, match=f"must be in 0 … {SPARE + 1}, because the ring"):
        cache.rewind(SPARE + 2)


@pytest.mark.slow
def test_capturing_attention_weights_from_ring_buffers_of_different_sizes_is_rejected():
    """`generate` stores all tokens to capture weights; a cache with windows raises an error."""
    model = tiny.build(max_length=LONG, **MIXED)
    variables, prompt = tiny.weights(model, 0), tiny.tokens(0, 1, 80)
    point = "attention.weights"
    out = jf.generate(model, variables, prompt, max_new_tokens=2, sampler=GREEDY, capture=(point,))
    assert len(out.captured[point]) == 3
    one = prompt[:, :1]
    with pytest.raises(ValueError, match=r"different shapes .* call init_cache with ring=False"):
        _, cache = jf.extend(model, variables, prompt, jf.init_cache(model, variables, 1, LONG))
        jf.inspect(model, variables, one, cache, capture=(point,))
    cache = jf.init_cache(model, variables, 1, LONG, ring=False)
    assert len(jf.inspect(model, variables, one, cache, capture=(point,)).captured[point]) == 3


def test_cache_prefix_smaller_than_the_largest_ring_buffer_is_rejected():
    model = tiny.build(window=(2, 3), max_length=2 * (SPARE + 3))
    variables, kept = tiny.weights(model, 0), None
    kept = jf.init_cache(model, variables, 1, 2 * (SPARE + 3))
    assert [table.num_slots for table in kept.tables] == [SPARE + 2, SPARE + 3]
    with pytest.raises(ValueError, match=f"num_slots is {SPARE + 2}; it must be None or at"):
        kept.live_prefix(SPARE + 2)


@pytest.mark.slow
def test_reading_ring_buffer_before_it_wraps_around_copies_no_keys():
    """A step over the first slots of a long window copies no keys, because none are overwritten."""
    model = tiny.build(window=(None, 100), max_length=400)
    kept = jf.init_cache(model, tiny.weights(model, 0), 1, 300).live_prefix(32)
    _, _, views = kept.append(jax.numpy.ones((1, 1), int))
    assert [view.earlier for view in views.values()] == [None, None]
