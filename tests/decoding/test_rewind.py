"""Rewinding of caches, and ring buffers, which reuse their slots."""

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
def test_logits_after_rewinding_the_cache_equal_one_pass(options, seed, forgotten):
    """Each batch element drops a different number of tokens and continues as in one pass."""
    model = tiny.build(**options)
    variables, source = tiny.weights(model, seed), tiny.sources(model, seed, BATCH)
    old, new = tiny.tokens(seed, BATCH, 5), tiny.tokens(seed + 1, BATCH, 5)
    kept = jf.init_cache(model, variables, BATCH, LENGTH, source)
    _, kept = jf.extend(model, variables, old, kept)
    logits, kept = jf.extend(model, variables, new, kept.rewind(np.array(forgotten)))
    for index, count in enumerate(forgotten):
        text = np.concatenate([old[index, : 5 - count], new[index]])[None]
        own = None if source is None else source[index : index + 1]
        whole = jf.inspect(model, variables, text, source=own).logits
        tiny.close(logits[index], whole[0, 5 - count :])
    assert kept.length == 5 - min(forgotten) + 5  # slots that no batch element needs are free


@pytest.mark.slow
def test_cache_rewind_stops_at_the_start_of_a_document():
    model = tiny.build()
    variables = tiny.weights(model, 0)
    kept = jf.init_cache(model, variables, BATCH, LENGTH)
    segment_ids = np.array([[1, 1, 1, 2], [0, 1, 1, 1]])
    _, kept = jf.extend(model, variables, tiny.tokens(0, BATCH, 4), kept, segment_ids)
    assert kept.rewind([1, 3]).cursor.position.tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"lengths\[0\] is 2; .* must be in 0 … 1"):
        kept.rewind([2, 0])
    with pytest.raises(ValueError, match=r"lengths\[1\] is -1; .* must be in 0 … 3"):
        kept.rewind([0, -1])
    one = tiny.tokens(1, BATCH, 1)
    compiled = jax.jit(lambda kept, n: jf.extend(model, variables, one, kept.rewind(n))[0])
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


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH), data=st.data())
def test_recurrent_states_can_be_rewound_within_the_last_call(name, seed, segment_ids, data):
    """Repeated rewinds drop tokens of the current document, with packed documents and padding."""
    model = with_states(name)
    variables, source = tiny.weights(model, seed), tiny.sources(model, seed, BATCH)
    old, new = tiny.tokens(seed, BATCH, LENGTH), tiny.tokens(seed + 1, BATCH, 3)
    first = data.draw(st.sampled_from((1, LENGTH // 2)))  # each length compiles
    kept = jf.init_cache(model, variables, BATCH, 2 * LENGTH, source)
    _, kept = jf.extend(model, variables, old[:, :first], kept, segment_ids[:, :first])
    last = segment_ids[:, first:]
    _, kept = jf.extend(model, variables, old[:, first:], kept, last, keep_states=True)
    most = [int(min(kept.cursor.position[i], (last[i] != 0).sum())) for i in range(BATCH)]
    dropped = [data.draw(st.integers(0, n)) for n in most]
    again = [data.draw(st.integers(0, n - d)) for n, d in zip(most, dropped, strict=True)]
    kept = kept.rewind(np.array(dropped)).rewind(np.array(again))
    with pytest.raises(ValueError, match="must be in 0 … "):
        kept.rewind(LENGTH + 1)
    logits, _ = jf.extend(model, variables, new, kept)
    texts, documents = np.zeros((2, BATCH, LENGTH + 3), int)
    for index in range(BATCH):
        real = np.flatnonzero(segment_ids[index])
        read = real[: len(real) - dropped[index] - again[index]]
        document = segment_ids[index, read[-1]] if kept.cursor.position[index] else 9
        texts[index, -3:], documents[index, -3:] = new[index], document
        texts[index, read], documents[index, read] = old[index, read], segment_ids[index, read]
    whole = jf.inspect(model, variables, texts, segment_ids=documents, source=source).logits
    tiny.close(logits, whole[:, -3:])


@pytest.mark.slow
def test_recurrent_states_can_be_rewound_only_if_earlier_states_were_kept():
    model = with_states("lstm")
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, BATCH, 3)
    _, kept = jf.extend(model, variables, tokens, jf.init_cache(model, variables, BATCH, LENGTH))
    with pytest.raises(ValueError, match=r"'recurrent', so tokens cannot be dropped.*keep_states"):
        kept.rewind(1)
    _, kept = jf.extend(model, variables, tokens, kept, keep_states=True)
    with pytest.raises(ValueError, match="must be in 0 … 3, because the cache has no"):
        kept.rewind(4)
    compiled = jax.jit(lambda kept, n: jf.extend(model, variables, tokens, kept.rewind(n)))
    logits, kept = compiled(kept, np.array([4, 0]))
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()
    logits, _ = jf.extend(model, variables, tokens, kept)
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()


def test_error_names_sublayer_that_does_not_return_the_requested_states():
    class Forgetful(own_layer.Memory):
        def __call__(self, weights, x, at):
            return super().__call__(weights, x, at._replace(keeps_states=False))

    model = tiny.build()
    layers = model.architecture.stack.layers
    forgetful = (replace(layers[0][0], sublayer=Forgetful()), layers[0][1])
    model = replace(model, layers=(forgetful, layers[1]))
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, BATCH, 3)
    with pytest.raises(
        ValueError, match=r"'memory' returned a state of shape .* must return 3 states"
    ):
        kept = jf.init_cache(model, variables, BATCH, LENGTH)
        jf.extend(model, variables, tokens, kept, keep_states=True)


# ---- rings

WINDOW = 4


@cache
def windowed(positions="rotary", window=WINDOW, max_length=16):
    return tiny.build(window=window, positions=positions, max_length=max_length)


def in_ring(model, variables, tokens, chunks, slots, segment_ids=None):
    kept, logits, start = jf.init_cache(model, variables, len(tokens), slots, ring=True), [], 0
    for size in chunks:
        span = slice(start, start + size)
        some = None if segment_ids is None else segment_ids[:, span]
        new, kept = jf.extend(model, variables, tokens[:, span], kept, some)
        logits.append(new)
        start += size
    return np.concatenate(logits, axis=1), kept


@pytest.mark.slow
@given(seed=tiny.seeds, segment_ids=tiny.segment_batches(BATCH), chunks=cuts())
def test_logits_of_ring_buffer_cache_equal_single_pass(seed, segment_ids, chunks):
    """With a window of 4 and chunks of up to 5 tokens, 8 slots suffice for texts of any length.

    Documents and padding are random. Padding takes no slots.
    """
    model = windowed()
    variables, tokens = tiny.weights(model, seed), tiny.tokens(seed, BATCH, LENGTH)
    slots = WINDOW - 1 + max(chunks)
    logits, kept = in_ring(model, variables, tokens, chunks, slots, segment_ids)
    whole = tiny.apply(model)(variables, tokens, segment_ids)
    tiny.close(logits, whole, where=segment_ids != 0)
    assert kept.key_values[0].keys.shape == (BATCH, 2, slots, 4)


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["rotary", "none"])
def test_ring_buffer_cache_continues_past_max_length(positions):
    """2,000 tokens in chunks through 32 + 8 slots give the logits of one pass."""
    model, long = (windowed(positions, window=32, max_length=length) for length in (64, 2000))
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 1, 2000)
    logits, _ = in_ring(model, variables, tokens, [8] * 250, 32 + 8)
    tiny.close(logits, tiny.apply(long)(variables, tokens))


@pytest.mark.slow
@given(seed=tiny.seeds, count=st.integers(0, 3))
def test_ring_buffer_cache_rewinds_as_far_as_its_spare_slots_allow(seed, count):
    model = windowed()
    variables = tiny.weights(model, seed)
    old, new = tiny.tokens(seed, BATCH, 10), tiny.tokens(seed + 1, BATCH, 2)
    _, kept = in_ring(model, variables, old, [2] * 5, WINDOW + 2)
    logits, _ = jf.extend(model, variables, new, kept.rewind(count))
    text = np.concatenate([old[:, : 10 - count], new], axis=1)
    tiny.close(logits, np.asarray(tiny.apply(model)(variables, text))[:, -2:])
    with pytest.raises(ValueError, match="must be in 0 … 3"):
        kept.rewind(4)


@pytest.mark.parametrize("size", mostly_slow([5, 6, 9], 6, slow=[5]))
def test_ring_buffer_accepts_chunks_of_any_length(size):
    """A ring of 8 slots accepts longer chunks; the logits equal those of a single pass."""
    model, length = windowed(), 6 + size
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 2, length)
    logits, _ = in_ring(model, variables, tokens, [3, 3, size], 8)
    tiny.close(logits, tiny.apply(model)(variables, tokens))


@pytest.mark.slow
def test_invalid_ring_buffer_arguments_are_rejected():
    model = windowed()
    variables, tokens = tiny.weights(model, 0), tiny.tokens(0, 1, 4)
    with pytest.raises(ValueError, match="capacity is 3; a ring needs at least 4 slots"):
        jf.init_cache(model, variables, 1, 3, ring=True)
    whole = tiny.build()
    with pytest.raises(ValueError, match="some layers of this Decoder attend to all"):
        jf.init_cache(whole, tiny.weights(whole, 0), 1, 8, ring=True)
    learned = windowed("learned")
    variables = tiny.weights(learned, 0)
    _, kept = in_ring(learned, variables, tiny.tokens(0, 1, 16), [2] * 8, 6)
    with pytest.raises(ValueError, match="has 17 tokens, but max_length is 16"):
        jf.extend(learned, variables, tokens[:, :1], kept)
    compiled = jax.jit(lambda token, kept: jf.extend(learned, variables, token, kept)[0])
    assert np.isnan(compiled(tokens[:, :1], kept)).all()
