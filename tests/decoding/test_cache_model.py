"""Random sequences of cache operations give the logits of a full pass over each text."""

import copy

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.cache.key_values import CacheSize, empty_cache
from jaxformer.functional.cache.slots import KeyValueSize, SourceKeysValues
from tests.properties import tiny
from tests.slow import mostly_slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
BATCH, LONGEST, NEW_TOKENS, SLOTS = 2, 32, 3, 48
KINDS = {
    "ring": {"positions": "rotary", "window": 4, "num_layers": 1, "slots": 8},
    "ring of several windows": {"positions": "none", "window": (3, 1), "slots": 6},
    "ring with learned positions": {"window": 3, "num_layers": 1, "slots": 5},
    "plain": {"positions": "rotary", "num_layers": 1},
    "encoder-decoder": {"kind": jf.EncoderDecoderConfig, "num_layers": 1},
}
SAME, NEW, PADDING = "same document", "new document", "padding"


def lists_of(values, number=BATCH):
    return st.tuples(*[values] * number)


tokens = lists_of(st.sampled_from([*[SAME] * 8, NEW, PADDING]), BATCH * NEW_TOKENS)
append = st.tuples(st.just("append"), tokens)
rewind = st.tuples(st.just("rewind"), lists_of(st.integers(0, 6)))
others = st.one_of(
    st.tuples(st.just("gather_batch"), lists_of(st.integers(0, BATCH - 1))),
    st.tuples(st.just("toggle_live_prefix"), st.none()),
)
ALL_SAME = [SAME] * BATCH * NEW_TOKENS
TWICE_REWOUND = [("rewind", (5, 4)), ("append", ALL_SAME)] * 3
OPERATIONS = st.lists(st.one_of(append, rewind, append, rewind, others), min_size=8, max_size=12)


class CachedSequence:
    """Python simulation of one batch element: its text, and the tokens in its ring slots."""

    def __init__(self, slots: int, window: int):
        self.text, self.segment = [], 1  # text: (unique number, token, segment)
        self.slots, self.window = [None] * slots, window

    def append(self, number: int, token: int, segment: int):
        self.slots[len(self.text) % len(self.slots)] = number
        self.text.append((number, token, segment))
        self.segment = segment

    def longest_rewind(self) -> int:
        """Returns the largest rewind after which the slots still contain the next window."""
        document = [number for number, _, segment in self.text if segment == self.segment]
        for length in range(len(document) + 1):
            window = document[: len(document) - length][-self.window + 1 :]
            if not all(number in self.slots for number in window):
                return length - 1
        return len(document)


class Simulation:
    """A cache and the texts that it should contain, checked by full passes over the texts."""

    def __init__(self, seed, slots=None, **options):
        self.model, self.is_ring = tiny.build(max_length=LONGEST, **options), slots is not None
        self.variables, self.random = tiny.weights(self.model, seed), np.random.default_rng(seed)
        self.source = tiny.sources(self.model, seed, 1)
        sizes = (slots, self.model.reach) if self.is_ring else (SLOTS, SLOTS)
        self.sequences, self.whole, self.number = (
            [CachedSequence(*sizes) for _ in range(BATCH)],
            None,
            0,
        )
        start = (self.model, self.variables, BATCH, sizes[0], self.source)
        self.cache = jf.init_cache(*start, ring=self.is_ring)
        for _ in range(4):  # this fills a ring
            self.append(ALL_SAME)

    def append(self, kinds):
        longest = max(len(sequence.text) for sequence in self.sequences)
        is_full = not self.is_ring and self.cache.length + NEW_TOKENS > LONGEST
        if longest + NEW_TOKENS > LONGEST or is_full:
            return
        tokens = self.random.integers(0, tiny.SIZES["vocab_size"], (BATCH, NEW_TOKENS))
        segment_ids = np.zeros((BATCH, NEW_TOKENS), int)
        for (r, t), token in np.ndenumerate(tokens):
            sequence, kind = self.sequences[r], kinds[r * NEW_TOKENS + t]
            if kind != PADDING:
                segment_ids[r, t] = sequence.segment + (kind == NEW)
                self.number += 1
                sequence.append(self.number, token, segment_ids[r, t])
        logits, self.cache = jf.extend(self.model, self.variables, tokens, self.cache, segment_ids)
        for sequence, own, wanted, new in zip(
            self.sequences, logits, self.full_pass(), segment_ids != 0, strict=True
        ):
            tiny.close(own[new], wanted[len(sequence.text) - new.sum() : len(sequence.text)])

    def full_pass(self):
        tokens, segment_ids = np.zeros((2, BATCH, LONGEST), np.int32)
        for number, sequence in enumerate(self.sequences):
            for place, (_, token, segment) in enumerate(sequence.text):
                tokens[number, place], segment_ids[number, place] = token, segment
        read = tiny.read(self.model, self.source and self.source * BATCH)
        return np.asarray(tiny.apply(self.model)(self.variables, tokens, segment_ids, **read))

    def rewind(self, lengths):
        """Checks that excessive rewinds raise, then rewinds by the reduced lengths."""
        longest = [sequence.longest_rewind() for sequence in self.sequences]
        is_refused = np.array(lengths) > longest
        if is_refused.any():
            index = int(is_refused.argmax())
            refusal = rf"lengths\[{index}\] is {lengths[index]}; .* must be in 0 … {longest[index]}"
            with pytest.raises(ValueError, match=refusal):
                self.cache.rewind(lengths)
        later = rewound(self.cache, np.array(lengths))
        np.testing.assert_array_equal(later.cursor.position < 0, is_refused)
        lengths = np.minimum(lengths, longest)
        self.cache = rewound(self.cache, lengths)
        for sequence, length in zip(self.sequences, lengths, strict=True):
            sequence.text = sequence.text[: len(sequence.text) - length]

    def gather_batch(self, indices):
        self.cache = gathered(self.cache, np.array(indices))
        self.sequences = [copy.deepcopy(self.sequences[index]) for index in indices]

    def toggle_live_prefix(self, _):
        if self.whole is not None:
            self.cache, self.whole = merged(self.whole, self.cache), None
        else:
            self.whole = self.cache
            self.cache = live_prefix(self.cache, None if self.is_ring else LONGEST)


gathered = jax.jit(lambda kept, indices: kept.gather_batch(indices))
merged = jax.jit(lambda kept, prefix: kept.merge_prefix(prefix))
live_prefix = jax.jit(lambda kept, slots: kept.live_prefix(slots), static_argnums=1)
rewound = jax.jit(lambda kept, lengths: kept.rewind(lengths))


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(KINDS, "ring"))
@given(seed=tiny.seeds, operations=OPERATIONS)
@example(seed=0, operations=TWICE_REWOUND)
def test_logits_after_random_cache_operations_equal_full_pass(name, seed, operations):
    simulation = Simulation(seed, **KINDS[name])
    for operation, argument in operations:
        getattr(simulation, operation)(argument)


@pytest.mark.slow
def test_cache_rewind_beyond_its_limit_inside_jit_gives_nan():
    """The logits are NaN until the element's next document; the other element is unaffected."""
    simulation = Simulation(0, **KINDS["ring"])
    model, variables, one = simulation.model, simulation.variables, np.ones((BATCH, 1), np.int32)
    torn = rewound(simulation.cache, np.array([6, 1]))
    for segment_ids, expected in ((1, [True, False]), (1, [True, False]), (2, [True, False])):
        logits, torn = jf.extend(model, variables, one, torn, segment_ids * one)
        assert np.isnan(logits).all(axis=(1, 2)).tolist() == expected
    logits, _ = jf.extend(model, variables, one, torn, 2 * one)
    assert np.isfinite(logits).all()


def test_gather_batch_of_cache_rejects_invalid_indices():
    """An index outside the cache, or an element with another source, raises ValueError."""
    own = empty_cache([{"attention": KeyValueSize(1, 2)}], CacheSize(4, SLOTS), "float32")
    source = np.zeros((2, 1, 3, 2), np.float32)
    states = [
        {"attention": KeyValueSize(1, 2), "cross_attention": SourceKeysValues(source, source)}
    ]
    kept = empty_cache(states, CacheSize(4, SLOTS), "float32", TokenInfo(3))
    assert len(kept.gather_batch(np.array([1, 0, 3, 3])).cursor.position) == 4
    assert len(kept.gather_batch(np.array([1, 2])).cursor.position) == 2
    for cache, indices, message in (
        (own, [0, 4], "indices contains 4; it must be in 0 … 3"),
        (own, [-1], "indices contains -1"),
        (kept, [0, 4], "indices contains 4"),
        (
            kept,
            [0, 1, 1, 3],
            r"indices\[2\] is 1, but batch element 1 of the cache belongs to source 0, and batch "
            "element 2 of the result to source 1",
        ),
        (kept, [0, 1, 2], "indices has 3 entries; their number must be a multiple"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.gather_batch(np.array(indices))
    ring = empty_cache(
        [{"attention": KeyValueSize(1, 2, 4)}], CacheSize(2, 8, ring=True), "float32"
    )
    with pytest.raises(ValueError, match="num_slots is 6; it must be None or at least 8"):
        ring.live_prefix(6)
    with pytest.raises(ValueError, match="lengths is float32"):
        own.rewind(0.5)
