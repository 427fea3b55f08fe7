"""Rewinding a cache, and ring caches, which reuse their slots."""

from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from tests.properties import tiny
from tests.properties.chunks import cuts
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
BATCH, LENGTH = 2, tiny.LENGTH
REWOUND = [{"positions": "rotary"}, {"kind": jf.EncoderDecoderConfig, "num_layers": 1}]


@pytest.mark.slow
@pytest.mark.parametrize("options", mostly_slow(REWOUND, REWOUND[0]))
@given(seed=tiny.seeds, forgotten=st.lists(st.integers(0, 5), min_size=BATCH, max_size=BATCH))
def test_rewound_rows_go_on_as_if_they_had_not_read(options, seed, forgotten):
    """Each batch element forgets its own number of tokens and continues as in one pass."""
    model = tiny.build(**options)
    variables, source = tiny.weights(model, seed), tiny.sources(model, seed, BATCH)
    old, new = tiny.tokens(seed, BATCH, 5), tiny.tokens(seed + 1, BATCH, 5)
    kept = jf.start(model, variables, BATCH, LENGTH, source)
    _, kept = jf.advance(model, variables, old, kept)
    logits, kept = jf.advance(model, variables, new, kept.rewind(np.array(forgotten)))
    for row, count in enumerate(forgotten):
        text = np.concatenate([old[row, : 5 - count], new[row]])[None]
        own = None if source is None else source[row : row + 1]
        whole = jf.inspect(model, variables, text, source=own).logits
        tiny.close(logits[row], whole[0, 5 - count :])
    assert kept.length == 5 - min(forgotten) + 5  # slots that no batch element needs are free


def test_rewinding_ends_at_the_start_of_a_document():
    model = tiny.build()
    variables = tiny.weights(model, 0)
    kept = jf.start(model, variables, BATCH, LENGTH)
    segments = np.array([[1, 1, 1, 2], [0, 1, 1, 1]])
    _, kept = jf.advance(model, variables, tiny.tokens(0, BATCH, 4), kept, segments)
    assert kept.rewind([1, 3]).cursor.position.tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"lengths\[0\] is 2; row 0 can be rewound by 0 … 1 tok"):
        kept.rewind([2, 0])
    with pytest.raises(ValueError, match=r"lengths\[1\] is -1; row 1 can be rewound by 0 … 3 tok"):
        kept.rewind([0, -1])
    one = tiny.tokens(1, BATCH, 1)
    compiled = jax.jit(lambda kept, n: jf.advance(model, variables, one, kept.rewind(n))[0])
    logits = np.asarray(compiled(kept, np.array([2, 0])))
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()


def test_a_state_cannot_be_rewound():
    for kind in (jf.RecurrentConfig, jf.ConvolutionalConfig, jf.RecurrentEncoderDecoderConfig):
        model = tiny.build(kind=kind)
        source = tiny.sources(model, 0, BATCH)
        kept = jf.start(model, tiny.weights(model, 0), BATCH, LENGTH, source)
        with pytest.raises(ValueError, match="keeps a state of one size"):
            kept.rewind(1)


# ---- rings

WINDOW = 4


@cache
def windowed(positions="rotary", window=WINDOW, max_length=16):
    return tiny.build(window=window, positions=positions, max_length=max_length)


def in_ring(model, variables, tokens, chunks, slots, segments=None):
    kept, logits, start = jf.start(model, variables, len(tokens), slots, ring=True), [], 0
    for size in chunks:
        span = slice(start, start + size)
        some = None if segments is None else segments[:, span]
        new, kept = jf.advance(model, variables, tokens[:, span], kept, some)
        logits.append(new)
        start += size
    return np.concatenate(logits, axis=1), kept


@pytest.mark.slow
@given(seed=tiny.seeds, segments=tiny.segment_batches(BATCH), chunks=cuts())
def test_a_ring_of_few_slots_is_one_pass(seed, segments, chunks):
    """A window of 4 and chunks of up to 5 need 8 slots for a text of any length.

    Documents and padding are random. Padding takes no slots.
    """
    model = windowed()
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, LENGTH)
    slots = WINDOW - 1 + max(chunks)
    logits, kept = in_ring(model, variables, tokens, chunks, slots, segments)
    whole = tiny.apply(model)(variables, tokens, segments)
    tiny.close(logits, whole, where=segments != 0)
    assert kept.slots[0].keys.shape == (BATCH, 2, slots, 4)


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["rotary", "none"])
def test_a_ring_continues_past_max_length(positions):
    """2,000 tokens in chunks through 32 + 8 slots give the logits of one pass."""
    model, long = (windowed(positions, window=32, max_length=length) for length in (64, 2000))
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 1, 2000)
    logits, _ = in_ring(model, variables, tokens, [8] * 250, 32 + 8)
    tiny.close(logits, tiny.apply(long)(variables, tokens))


@pytest.mark.slow
@given(seed=tiny.seeds, count=st.integers(0, 3))
def test_a_ring_can_be_rewound_by_its_spare_slots(seed, count):
    model = windowed()
    variables = tiny.weights(model, seed)
    old, new = tiny.tokens(seed, BATCH, 10), tiny.tokens(seed + 1, BATCH, 2)
    _, kept = in_ring(model, variables, old, [2] * 5, WINDOW + 2)
    logits, _ = jf.advance(model, variables, new, kept.rewind(count))
    text = np.concatenate([old[:, : 10 - count], new], axis=1)
    tiny.close(logits, np.asarray(tiny.apply(model)(variables, text))[:, -2:])
    with pytest.raises(ValueError, match="can be rewound by 0 … 3 tokens"):
        kept.rewind(4)


@pytest.mark.parametrize("size", [5, 6, 9])
def test_any_chunk_fits_a_ring(size):
    """A ring of 8 slots and a window of 4 takes 5 tokens at once; more are one pass too."""
    model, length = windowed(), 6 + size
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 2, length)
    logits, _ = in_ring(model, variables, tokens, [3, 3, size], 8)
    tiny.close(logits, tiny.apply(model)(variables, tokens))


@pytest.mark.slow
def test_what_a_ring_cannot_do_is_refused():
    model = windowed()
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 1, 4)
    with pytest.raises(ValueError, match="capacity is 3; a ring must have the window's 4 slots"):
        jf.start(model, variables, 1, 3, ring=True)
    whole = tiny.build()
    with pytest.raises(ValueError, match="ring is True; this Decoder has no window"):
        jf.start(whole, tiny.weights(whole, 0), 1, 8, ring=True)
    learned = windowed("learned")
    variables = tiny.weights(learned, 0)
    _, kept = in_ring(learned, variables, tiny.tokens(0, 1, 16), [2] * 8, 6)
    with pytest.raises(ValueError, match="17 tokens of a document; max_length is 16 positions"):
        jf.advance(learned, variables, tokens[:, :1], kept)
    compiled = jax.jit(lambda token, kept: jf.advance(learned, variables, token, kept)[0])
    assert np.isnan(compiled(tokens[:, :1], kept)).all()
