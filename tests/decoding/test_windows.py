"""A layer with a window keeps its window only, whatever the other layers keep."""

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
CHUNKS = (1, 11, RING + 3)  # the last one is longer than a ring
GREEDY = jf.Sampler(temperature=0.0)


@pytest.mark.parametrize("options", [MIXED, WINDOWED], ids=["mixed", "all windows"])
@given(seed=tiny.seeds, first=st.sampled_from(CHUNKS[1:]))
def test_any_chunking_is_one_pass(options, seed, first):
    """Also for a chunk longer than the ring, for packed documents and for padding."""
    model = tiny.build(max_length=LONG, **options)
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, 2, LONG)
    random = np.random.default_rng(seed)
    segments = 1 + np.cumsum(random.random((2, LONG)) < 0.03, axis=1)
    segments = np.where(random.random((2, LONG)) < 0.1, 0, segments)
    sizes = [11, CHUNKS[2], 1, 11, 1] if first == 11 else [CHUNKS[2], 11, 11, 1, 1]
    cache, logits, start = jf.start(model, variables, 2, LONG), [], 0
    for size in sizes:
        part = slice(start, start + size)
        new, cache = jf.advance(model, variables, tokens[:, part], cache, segments[:, part])
        logits.append(new)
        start += size
    whole = tiny.apply(model)(variables, tokens, segments)[:, :start]
    tiny.close(np.concatenate(logits, axis=1), whole, where=segments[:, :start] != 0)


def test_a_layer_keeps_its_window():
    """The memory is that of the window, in a start, in generate and in a beam search."""
    model = tiny.build(max_length=4096, **MIXED)
    variables = tiny.weights(model, 0)
    cache = jf.start(model, variables, 1, 4096)
    assert [x.keys.shape[2] for x in cache.slots] == [RING, 4096, RING]
    whole = jf.start(model, variables, 1, 4096, ring=False)
    assert [x.keys.shape[2] for x in whole.slots] == [4096] * 3
    assert [x.keys.shape[2] for x in jf.start(model, variables, 1, RING).slots] == [RING] * 3
    grown = jf.start(model, variables, 1, 4096).live_prefix(48).grow(96)
    assert [x.keys.shape[2] for x in grown.slots] == [RING, 96, RING]


@pytest.mark.slow
@pytest.mark.parametrize("options", [MIXED, WINDOWED], ids=["mixed", "all windows"])
def test_generation_is_that_of_whole_passes(options):
    """Prompts shorter and longer than the ring, greedy and by beams, while the cache grows."""
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


def test_a_ring_can_be_rewound_by_its_spare_slots():
    model = tiny.build(max_length=LONG, **MIXED)
    variables, tokens = tiny.weights(model, 1), tiny.tokens(1, 1, LONG)
    _, cache = jf.advance(model, variables, tokens[:, :100], jf.start(model, variables, 1, LONG))
    logits, _ = jf.advance(model, variables, tokens[:, 40:50], cache.rewind(60))
    tiny.close(logits, tiny.apply(model)(variables, tokens[:, :50])[:, 40:])
    with pytest.raises(ValueError, match=f"can be rewound by 0 … {SPARE + 1} tokens: its ring"):
        cache.rewind(SPARE + 2)


def test_attention_weights_need_equal_slots():
    """`generate` keeps all slots for them; a cache with rings refuses with what to do."""
    model = tiny.build(max_length=LONG, **MIXED)
    variables, prompt = tiny.weights(model, 0), tiny.tokens(0, 1, 80)
    point = "attention.weights"
    out = jf.generate(model, variables, prompt, max_new_tokens=2, sampler=GREEDY, capture=(point,))
    assert len(out.captured[point]) == 3
    one = prompt[:, :1]
    with pytest.raises(ValueError, match=r"different shapes .* start it with ring=False"):
        _, cache = jf.advance(model, variables, prompt, jf.start(model, variables, 1, LONG))
        jf.inspect(model, variables, one, cache, capture=(point,))
    cache = jf.start(model, variables, 1, LONG, ring=False)
    assert len(jf.inspect(model, variables, one, cache, capture=(point,)).captured[point]) == 3


def test_the_largest_ring_must_be_whole():
    model = tiny.build(window=(2, 3), max_length=2 * (SPARE + 3))
    variables, kept = tiny.weights(model, 0), None
    kept = jf.start(model, variables, 1, 2 * (SPARE + 3))
    assert [table.slots for table in kept.tables] == [SPARE + 2, SPARE + 3]
    with pytest.raises(ValueError, match=f"slots is {SPARE + 2}; a ring needs all of its"):
        kept.live_prefix(SPARE + 2)


def test_a_part_of_a_ring_is_read_in_place():
    """A step over few of the slots of a long window copies no keys, since it overwrites none."""
    model = tiny.build(window=(None, 100), max_length=400)
    kept = jf.start(model, tiny.weights(model, 0), 1, 300).live_prefix(32)
    _, _, views = kept.append(jax.numpy.ones((1, 1), int))
    assert [view.earlier for view in views.values()] == [None, None]
