"""Any sequence of cache operations gives the logits of a full pass over each text."""

import copy

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.cache.key_values import CacheSize, init_cache
from jaxformer.functional.cache.slots import SlotSize, SourceSlots
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


def rows_of(values, number=BATCH):
    return st.tuples(*[values] * number)


tokens = rows_of(st.sampled_from([*[SAME] * 8, NEW, PADDING]), BATCH * NEW_TOKENS)
append = st.tuples(st.just("append"), tokens)
rewind = st.tuples(st.just("rewind"), rows_of(st.integers(0, 6)))
others = st.one_of(
    st.tuples(st.just("gather_rows"), rows_of(st.integers(0, BATCH - 1))),
    st.tuples(st.just("toggle_live_prefix"), st.none()),
)
ALL_SAME = [SAME] * BATCH * NEW_TOKENS
TWICE_REWOUND = [("rewind", (5, 4)), ("append", ALL_SAME)] * 3
OPERATIONS = st.lists(st.one_of(append, rewind, append, rewind, others), min_size=8, max_size=12)


class Row:
    """Text of one batch element, and the tokens that its ring slots hold, simulated in Python."""

    def __init__(self, slots: int, window: int):
        self.text, self.segment = [], 1  # text: (unique number, token, segment)
        self.slots, self.window = [None] * slots, window

    def append(self, number: int, token: int, segment: int):
        self.slots[len(self.text) % len(self.slots)] = number
        self.text.append((number, token, segment))
        self.segment = segment

    def longest_rewind(self) -> int:
        """Returns how many tokens can be forgotten with the next window still in the slots."""
        document = [number for number, _, segment in self.text if segment == self.segment]
        for length in range(len(document) + 1):
            window = document[: len(document) - length][-self.window + 1 :]
            if not all(number in self.slots for number in window):
                return length - 1
        return len(document)


class Simulation:
    """A cache beside the texts that it should hold. Full passes over the texts check it."""

    def __init__(self, seed, slots=None, **options):
        self.model, self.is_ring = tiny.build(max_length=LONGEST, **options), slots is not None
        self.variables, self.random = tiny.weights(self.model, seed), np.random.default_rng(seed)
        self.source = tiny.sources(self.model, seed, 1)
        sizes = (slots, self.model.reach) if self.is_ring else (SLOTS, SLOTS)
        self.rows, self.whole, self.number = [Row(*sizes) for _ in range(BATCH)], None, 0
        start = (self.model, self.variables, BATCH, sizes[0], self.source)
        self.cache = jf.start(*start, ring=self.is_ring)
        for _ in range(4):  # this fills a ring
            self.append(ALL_SAME)

    def append(self, kinds):
        longest = max(len(row.text) for row in self.rows)
        is_full = not self.is_ring and self.cache.length + NEW_TOKENS > LONGEST
        if longest + NEW_TOKENS > LONGEST or is_full:
            return
        tokens = self.random.integers(0, tiny.SIZES["vocab_size"], (BATCH, NEW_TOKENS))
        segments = np.zeros((BATCH, NEW_TOKENS), int)
        for (r, t), token in np.ndenumerate(tokens):
            row, kind = self.rows[r], kinds[r * NEW_TOKENS + t]
            if kind != PADDING:
                segments[r, t] = row.segment + (kind == NEW)
                self.number += 1
                row.append(self.number, token, segments[r, t])
        logits, self.cache = jf.advance(self.model, self.variables, tokens, self.cache, segments)
        for row, own, wanted, new in zip(
            self.rows, logits, self.full_pass(), segments != 0, strict=True
        ):
            tiny.close(own[new], wanted[len(row.text) - new.sum() : len(row.text)])

    def full_pass(self):
        tokens, segments = np.zeros((2, BATCH, LONGEST), np.int32)
        for number, row in enumerate(self.rows):
            for place, (_, token, segment) in enumerate(row.text):
                tokens[number, place], segments[number, place] = token, segment
        read = tiny.read(self.model, self.source and self.source * BATCH)
        return np.asarray(tiny.apply(self.model)(self.variables, tokens, segments, **read))

    def rewind(self, lengths):
        """Rewinds by `lengths`. Checks that excessive lengths raise, and then reduces them."""
        longest = [row.longest_rewind() for row in self.rows]
        is_refused = np.array(lengths) > longest
        if is_refused.any():
            row = int(is_refused.argmax())
            refusal = rf"lengths\[{row}\] is {lengths[row]}; .* by 0 … {longest[row]} tokens"
            with pytest.raises(ValueError, match=refusal):
                self.cache.rewind(lengths)
        later = rewound(self.cache, np.array(lengths))
        np.testing.assert_array_equal(later.cursor.position < 0, is_refused)
        lengths = np.minimum(lengths, longest)
        self.cache = rewound(self.cache, lengths)
        for row, length in zip(self.rows, lengths, strict=True):
            row.text = row.text[: len(row.text) - length]

    def gather_rows(self, rows):
        self.cache = gathered(self.cache, np.array(rows))
        self.rows = [copy.deepcopy(self.rows[row]) for row in rows]

    def toggle_live_prefix(self, _):
        if self.whole is not None:
            self.cache, self.whole = merged(self.whole, self.cache), None
        else:
            self.whole = self.cache
            self.cache = live_prefix(self.cache, None if self.is_ring else LONGEST)


gathered = jax.jit(lambda kept, rows: kept.gather_rows(rows))
merged = jax.jit(lambda kept, prefix: kept.merge_prefix(prefix))
live_prefix = jax.jit(lambda kept, slots: kept.live_prefix(slots), static_argnums=1)
rewound = jax.jit(lambda kept, lengths: kept.rewind(lengths))


@pytest.mark.parametrize("name", mostly_slow(KINDS, "ring"))
@given(seed=tiny.seeds, operations=OPERATIONS)
@example(seed=0, operations=TWICE_REWOUND)
def test_any_sequence_of_operations_is_a_full_pass(name, seed, operations):
    simulation = Simulation(seed, **KINDS[name])
    for operation, argument in operations:
        getattr(simulation, operation)(argument)


@pytest.mark.slow
def test_an_excessive_rewind_inside_jit_gives_nan():
    """NaN lasts until the batch element starts its next document; the other one is unaffected."""
    simulation = Simulation(0, **KINDS["ring"])
    model, variables, one = simulation.model, simulation.variables, np.ones((BATCH, 1), np.int32)
    torn = rewound(simulation.cache, np.array([6, 1]))
    for segments, expected in ((1, [True, False]), (1, [True, False]), (2, [True, False])):
        logits, torn = jf.advance(model, variables, one, torn, segments * one)
        assert np.isnan(logits).all(axis=(1, 2)).tolist() == expected
    logits, _ = jf.advance(model, variables, one, torn, 2 * one)
    assert np.isfinite(logits).all()


def test_invalid_gathers_are_rejected():
    """An index outside the cache, or one that reads another source."""
    own = init_cache([{"attention": SlotSize(1, 2)}], CacheSize(4, SLOTS), "float32")
    source = np.zeros((2, 1, 3, 2), np.float32)
    states = [{"attention": SlotSize(1, 2), "cross_attention": SourceSlots(source, source)}]
    kept = init_cache(states, CacheSize(4, SLOTS), "float32", TokenInfo(3))
    assert len(kept.gather_rows(np.array([1, 0, 3, 3])).cursor.position) == 4
    assert len(kept.gather_rows(np.array([1, 2])).cursor.position) == 2
    for cache, rows, message in (
        (own, [0, 4], "rows holds 4; the cache has 4 rows"),
        (own, [-1], "rows holds -1"),
        (kept, [0, 4], "rows holds 4"),
        (kept, [0, 1, 1, 3], r"rows\[2\] is 1, which reads source 0; row 2 reads source 1"),
        (kept, [0, 1, 2], "rows has 3 entries; the 2 sources must divide it"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.gather_rows(np.array(rows))
    ring = init_cache([{"attention": SlotSize(1, 2, 4)}], CacheSize(2, 8, ring=True), "float32")
    with pytest.raises(ValueError, match="slots is 6; a ring needs all of its 8 slots"):
        ring.live_prefix(6)
    with pytest.raises(ValueError, match="lengths is float32"):
        own.rewind(0.5)
