"""Rules as literal matrices of 0 and 1, combined by &, in parts, and the ranges they promise."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.functional import Causal, Packed, Padding, Prefix, TokenInfo, Window
from jaxformer.functional.masks import All, DenseMask, DynamicSlice
from jaxformer.verify import rules
from tests.properties import tiny

LITERAL = {
    "causal": (Causal(), ["1000", "1100", "1110", "1111"]),
    "window 1": (Causal() & Window(1), ["1000", "0100", "0010", "0001"]),
    "window 2": (Causal() & Window(2), ["1000", "1100", "0110", "0011"]),
    "window alone": (Window(2), ["1111", "1111", "0111", "0011"]),
    "prefix 0": (Prefix(0), ["1000", "1100", "1110", "1111"]),
    "prefix 2": (Prefix(2), ["1100", "1100", "1110", "1111"]),
    "prefix 3, window 2": (Prefix(3) & Window(2), ["1110", "1110", "0110", "0011"]),
    "everyone": (All(), ["1111"] * 4),
}
SEGMENTED = {
    "padding": (Padding(), [0, 1, 1, 0], ["0110"] * 4),
    "packed": (Packed(), [1, 1, 2, 0], ["1100", "1100", "0010", "0000"]),
    "causal packed": (Causal() & Packed(), [1, 1, 2, 2], ["1000", "1100", "0010", "0011"]),
    "causal padding": (Causal() & Padding(), [0, 1, 1, 0], ["0000", "0100", "0110", "0110"]),
}


def matrix(rows):
    return np.array([[int(digit) for digit in row] for row in rows], bool)


@pytest.mark.parametrize("name", LITERAL)
def test_a_rule_is_its_matrix(name):
    """Row: query; column: key. Known while tracing, the answer is NumPy's and stays static."""
    rule, rows = LITERAL[name]
    answer = rule(TokenInfo(4), TokenInfo(4))
    assert isinstance(answer, (np.ndarray, np.bool_))
    np.testing.assert_array_equal(np.broadcast_to(answer, (4, 4)), matrix(rows))


@pytest.mark.parametrize("name", SEGMENTED)
def test_a_rule_about_documents_is_its_matrix(name):
    """Documents see themselves alone; padding is seen by no one."""
    rule, segments, rows = SEGMENTED[name]
    places = TokenInfo(4, None, np.array(segments))
    np.testing.assert_array_equal(np.broadcast_to(rule(places, places), (4, 4)), matrix(rows))


def test_positions_count_not_columns():
    """Slots in any order: the rule asks where a token stands, not where it is stored."""
    query, key = TokenInfo(2, np.array([5, 7])), TokenInfo(4, np.array([7, 5, 4, 6]))
    np.testing.assert_array_equal((Causal() & Window(2))(query, key), matrix(["0110", "1001"]))


RULES = st.sampled_from(
    [Causal(), Window(1), Window(3), Prefix(0), Prefix(4), Causal() & Window(2), All()]
)
LENGTH = 9
TILES = st.tuples(st.integers(0, 4), st.sampled_from([1, 5]))  # (start, size)


@given(one=RULES, other=RULES)
def test_combined_rules_hold_together(one, other):
    """a & b sees what both see, in either order."""
    places = TokenInfo(LENGTH)
    both = np.logical_and(one(places, places), other(places, places))
    for combined in (one & other, other & one):
        np.testing.assert_array_equal(combined(places, places), both)


@given(
    rule=RULES,
    other=RULES,
    rows=st.tuples(st.integers(0, 8), st.integers(1, 9)),
    columns=st.tuples(st.integers(0, 8), st.integers(1, 9)),
)
def test_a_tile_is_a_part_and_a_range_hides_nothing(rule, other, rows, columns):
    """Asked block by block a rule answers as when asked whole; outside its key_range it sees
    nothing."""
    rule, places = rule & other, TokenInfo(LENGTH)
    whole = np.broadcast_to(rule(places, places), (LENGTH, LENGTH))
    rows, columns = (slice(start, min(start + size, LENGTH)) for start, size in (rows, columns))
    part = np.broadcast_to(rule.tile(places, places, rows, columns), whole[rows, columns].shape)
    np.testing.assert_array_equal(part, whole[rows, columns])
    table = DenseMask(whole)
    np.testing.assert_array_equal(table.tile(places, places, rows, columns), part)
    low, high = rule.key_range(rows.start, rows.stop, LENGTH)
    assert not whole[rows, :low].any() and not whole[rows, high:].any()


@given(
    rule=RULES,
    segments=tiny.segment_rows(length=LENGTH),
    rows=TILES,
    columns=TILES,
)
def test_a_tile_may_be_found_as_the_program_runs(rule, segments, rows, columns):
    """Starts that are traced give the tile that starts known beforehand give: of a row in order, of
    documents, of counted positions, and of a table."""
    documents, positions = map(np.array, rules.read(segments))
    table = np.random.default_rng(rows[0]).random((LENGTH, LENGTH)) < 0.5
    static = [slice(start, start + size) for start, size in (rows, columns)]
    traced = [DynamicSlice(jnp.int32(start), size) for start, size in (rows, columns)]
    for told in ((None, None), (None, documents), (positions, documents)):
        places = TokenInfo(LENGTH, *told)
        for mask in (rule, rule & Packed() & DenseMask(table)):
            tile = [mask.tile(places, places, *parts) for parts in (static, traced)]
            np.testing.assert_array_equal(*tile)


@given(start=st.integers(0, 8), size=st.integers(1, 5), window=st.integers(1, 9))
def test_ranges_are_tight(start, size, window):
    """The first and the last key of the range are seen by someone: no block too many."""
    stop = min(start + size, LENGTH)
    for rule in (Causal(), Causal() & Window(window), Prefix(4)):
        seen = rule(TokenInfo(LENGTH), TokenInfo(LENGTH))[start:stop].any(axis=0)
        low, high = rule.key_range(start, stop, LENGTH)
        assert seen[low] and seen[high - 1]


@given(segments=tiny.segment_rows(), window=st.integers(1, 5), prefix=st.integers(0, 5))
def test_rules_on_counted_positions_are_the_loops(segments, window, prefix):
    """Window, prefix and documents together, positions counted per document, against the oracle."""
    documents, positions = rules.read(segments)
    places = TokenInfo(len(segments), positions, documents)
    rule = Prefix(prefix) & Window(window) & Packed()
    np.testing.assert_array_equal(
        rule(places, places), rules.visible(segments, window=window, prefix=prefix)
    )


def test_a_window_without_room_is_refused():
    """A token sees at least itself."""
    with pytest.raises(ValueError, match="window is 0"):
        Window(0)
