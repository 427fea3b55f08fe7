"""Mask rules: their literal matrices, their combination with &, their tiles and key ranges."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.functional import Causal, Packed, Padding, Prefix, TokenInfo, Window
from jaxformer.functional.attention.masks import All, DenseMask
from jaxformer.functional.attention.token_info import DynamicSlice
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
def test_mask_equals_hand_written_matrix(name):
    """Rows are queries, columns are keys. For static positions the result is a NumPy array."""
    rule, rows = LITERAL[name]
    answer = rule(TokenInfo(4), TokenInfo(4))
    assert isinstance(answer, (np.ndarray, np.bool_))
    np.testing.assert_array_equal(np.broadcast_to(answer, (4, 4)), matrix(rows))


@pytest.mark.parametrize("name", SEGMENTED)
def test_document_mask_equals_hand_written_matrix(name):
    """Documents see only themselves. Padding keys are masked."""
    rule, segment_ids, rows = SEGMENTED[name]
    places = TokenInfo(4, None, np.array(segment_ids))
    np.testing.assert_array_equal(np.broadcast_to(rule(places, places), (4, 4)), matrix(rows))


def test_masks_use_token_positions_not_slot_indices():
    """Cache slots are in any order: a rule uses a token's position, not the slot's index."""
    query, key = TokenInfo(2, np.array([5, 7])), TokenInfo(4, np.array([7, 5, 4, 6]))
    np.testing.assert_array_equal((Causal() & Window(2))(query, key), matrix(["0110", "1001"]))


RULES = st.sampled_from(
    [Causal(), Window(1), Window(3), Prefix(0), Prefix(4), Causal() & Window(2), All()]
)
LENGTH = 9
TILES = st.tuples(st.integers(0, 4), st.sampled_from([1, 5]))  # (start, size)


@given(one=RULES, other=RULES)
def test_combined_masks_allow_what_both_masks_allow(one, other):
    """`a & b` and `b & a` are the elementwise and of both matrices."""
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
def test_mask_tile_equals_part_of_matrix_and_key_range_covers_visible_keys(
    rule, other, rows, columns
):
    """`tile` equals that part of the whole matrix. No key outside `key_range` is visible."""
    rule, places = rule & other, TokenInfo(LENGTH)
    whole = np.broadcast_to(rule(places, places), (LENGTH, LENGTH))
    rows, columns = (slice(start, min(start + size, LENGTH)) for start, size in (rows, columns))
    part = np.broadcast_to(rule.tile(places, places, rows, columns), whole[rows, columns].shape)
    np.testing.assert_array_equal(part, whole[rows, columns])
    table = DenseMask(whole)
    np.testing.assert_array_equal(table.tile(places, places, rows, columns), part)
    low, high = rule.key_range(rows.start, rows.stop, LENGTH)
    assert not whole[rows, :low].any() and not whole[rows, high:].any()


@pytest.mark.slow
@given(
    rule=RULES,
    segment_ids=tiny.segment_sequences(length=LENGTH),
    rows=TILES,
    columns=TILES,
)
def test_mask_tile_with_traced_start_equals_tile_with_static_start(
    rule, segment_ids, rows, columns
):
    """Holds for default positions, for documents, for counted positions, and for a mask array."""
    documents, positions = map(np.array, rules.read(segment_ids))
    table = np.random.default_rng(rows[0]).random((LENGTH, LENGTH)) < 0.5
    static = [slice(start, start + size) for start, size in (rows, columns)]
    traced = [DynamicSlice(jnp.int32(start), size) for start, size in (rows, columns)]
    for told in ((None, None), (None, documents), (positions, documents)):
        places = TokenInfo(LENGTH, *told)
        for mask in (rule, rule & Packed() & DenseMask(table)):
            tile = [mask.tile(places, places, *parts) for parts in (static, traced)]
            np.testing.assert_array_equal(*tile)


@given(start=st.integers(0, 8), size=st.integers(1, 5), window=st.integers(1, 9))
def test_key_range_of_mask_contains_no_masked_keys_at_its_ends(start, size, window):
    """Some query sees the first key of the range and some query sees the last."""
    stop = min(start + size, LENGTH)
    for rule in (Causal(), Causal() & Window(window), Prefix(4)):
        seen = rule(TokenInfo(LENGTH), TokenInfo(LENGTH))[start:stop].any(axis=0)
        low, high = rule.key_range(start, stop, LENGTH)
        assert seen[low] and seen[high - 1]


@given(segment_ids=tiny.segment_sequences(), window=st.integers(1, 5), prefix=st.integers(0, 5))
def test_combination_of_window_and_prefix_and_packing_mask_equals_python_loops(
    segment_ids, window, prefix
):
    """Window, prefix and documents with positions per document, against `verify.rules`."""
    documents, positions = rules.read(segment_ids)
    places = TokenInfo(len(segment_ids), positions, documents)
    rule = Prefix(prefix) & Window(window) & Packed()
    np.testing.assert_array_equal(
        rule(places, places), rules.visible(segment_ids, window=window, prefix=prefix)
    )


def test_window_of_size_0_is_rejected():
    """A token always sees itself, so the smallest size is 1."""
    with pytest.raises(ValueError, match=r"size \(which includes the token itself\) is 0"):
        Window(0)
