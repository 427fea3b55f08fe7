"""Rewinding a cache, and ring caches, which reuse their slots."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.functional.layers.gated_delta import GatedDelta
from tests.models import own_layer
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


STATES = {
    "rnn": {"kind": jf.RecurrentConfig, "cell": "rnn"},
    "lstm": {"kind": jf.RecurrentConfig, "cell": "lstm"},
    "convolution": {"kind": jf.ConvolutionalConfig},
    "recurrent with a source": {"kind": jf.RecurrentEncoderDecoderConfig},
    "short convolution": {"layer_types": ("short_convolution", "attention")},
}


OWN = "gated delta and own"
SOME = mostly_slow([*STATES, OWN], "lstm", slow=("convolution", "short convolution"))


@cache
def with_states(name):
    if name in STATES:
        return tiny.build(**STATES[name])
    stack = GatedDelta(1, 2, 4, 4), own_layer.Memory()
    model = tiny.build()
    pairs = zip(stack, model.architecture.stack.layers, strict=True)
    return replace(model, layers=tuple((replace(x[0], sublayer=own), *x) for own, x in pairs))


@pytest.mark.parametrize("name", SOME)
@given(seed=tiny.seeds, segments=tiny.segment_batches(BATCH), data=st.data())
def test_states_are_rewound_to_any_token_of_the_last_call(name, seed, segments, data):
    """Rows with documents and padding drop tokens of the current document, once and again."""
    model = with_states(name)
    variables, source = tiny.weights(model, seed), tiny.sources(model, seed, BATCH)
    old, new = tiny.tokens(seed, BATCH, LENGTH), tiny.tokens(seed + 1, BATCH, 3)
    first = data.draw(st.integers(1, LENGTH - 1))
    kept = jf.start(model, variables, BATCH, 2 * LENGTH, source)
    _, kept = jf.advance(model, variables, old[:, :first], kept, segments[:, :first])
    last = segments[:, first:]
    _, kept = jf.advance(model, variables, old[:, first:], kept, last, keep_states=True)
    most = [int(min(kept.cursor.position[i], (last[i] != 0).sum())) for i in range(BATCH)]
    dropped = [data.draw(st.integers(0, n)) for n in most]
    again = [data.draw(st.integers(0, n - d)) for n, d in zip(most, dropped, strict=True)]
    kept = kept.rewind(np.array(dropped)).rewind(np.array(again))
    with pytest.raises(ValueError, match="can be rewound by"):
        kept.rewind(LENGTH + 1)
    logits, _ = jf.advance(model, variables, new, kept)
    texts, documents = np.zeros((2, BATCH, LENGTH + 3), int)
    for row in range(BATCH):
        real = np.flatnonzero(segments[row])
        read = real[: len(real) - dropped[row] - again[row]]
        document = segments[row, read[-1]] if kept.cursor.position[row] else 9
        texts[row, -3:], documents[row, -3:] = new[row], document
        texts[row, read], documents[row, read] = old[row, read], segments[row, read]
    whole = jf.inspect(model, variables, texts, segments=documents, source=source).logits
    tiny.close(logits, whole[:, -3:])


def test_states_are_kept_only_if_asked_for():
    model = with_states("lstm")
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, BATCH, 3)
    _, kept = jf.advance(model, variables, tokens, jf.start(model, variables, BATCH, LENGTH))
    with pytest.raises(ValueError, match=r"'recurrent' keeps its last state only.*keep_states"):
        kept.rewind(1)
    _, kept = jf.advance(model, variables, tokens, kept, keep_states=True)
    with pytest.raises(ValueError, match="by 0 … 3 tokens: it has no states from before the last"):
        kept.rewind(4)
    compiled = jax.jit(lambda kept, n: jf.advance(model, variables, tokens, kept.rewind(n)))
    logits, kept = compiled(kept, np.array([4, 0]))
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()
    logits, _ = jf.advance(model, variables, tokens, kept)
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()


def test_a_sub_layer_without_states_of_tokens_is_named():
    class Forgetful(own_layer.Memory):
        def __call__(self, weights, x, at):
            return super().__call__(weights, x, at._replace(keeps_states=False))

    model = tiny.build()
    layers = model.architecture.stack.layers
    forgetful = (replace(layers[0][0], sublayer=Forgetful()), layers[0][1])
    model = replace(model, layers=(forgetful, layers[1]))
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, BATCH, 3)
    with pytest.raises(ValueError, match=r"'memory' returned a state of shape .* each of the 3 t"):
        kept = jf.start(model, variables, BATCH, LENGTH)
        jf.advance(model, variables, tokens, kept, keep_states=True)


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
    with pytest.raises(ValueError, match="ring is True; not all layers of this Decoder have"):
        jf.start(whole, tiny.weights(whole, 0), 1, 8, ring=True)
    learned = windowed("learned")
    variables = tiny.weights(learned, 0)
    _, kept = in_ring(learned, variables, tiny.tokens(0, 1, 16), [2] * 8, 6)
    with pytest.raises(ValueError, match="17 tokens of a document; max_length is 16 positions"):
        jf.advance(learned, variables, tokens[:, :1], kept)
    compiled = jax.jit(lambda token, kept: jf.advance(learned, variables, token, kept)[0])
    assert np.isnan(compiled(tokens[:, :1], kept)).all()
