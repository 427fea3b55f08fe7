"""Tests of the rules against tables drawn by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxformer as jf
from jaxformer.verify import rules
from tests.properties import tiny


def table(drawing: str):
    return np.array([[mark == "x" for mark in row] for row in drawing.split()])


DRAWN = {
    "causal": (rules.causal(4), "x... xx.. xxx. xxxx"),
    "window": (rules.visible(4, window=2), "x... xx.. .xx. ..xx"),
    "prefix": (rules.visible(4, prefix=2), "xx.. xx.. xxx. xxxx"),
    "prefix and window": (rules.visible(4, prefix=3, window=2), "xxx. xxx. .xx. ..xx"),
    "everyone": (rules.bidirectional(3), "xxx xxx xxx"),
    "packed": (rules.causal([1, 1, 2, 2]), "x... xx.. ..x. ..xx"),
    "padded": (rules.causal([0, 1, 0, 1]), ".... .x.. .... .x.x"),
    "a document again is another": (rules.causal([1, 2, 1]), "x.. .x. ..x"),
    "a window counts tokens, not padding": (rules.visible([1, 0, 1], window=2), "x.. ... x.x"),
    # Lecture 11 §8: a causal convolution of width 2 has seven edges, a centred one of width 3 ten.
    "causal convolution": (rules.convolved(4, 2), "x... xx.. .xx. ..xx"),
    "centred convolution": (rules.near(4, 1), "xx.. xxx. .xxx ..xx"),
    "dilated convolution": (rules.convolved(5, 2, dilation=2), "x.... .x... x.x.. .x.x. ..x.x"),
    "two windows": (
        rules.composed([rules.visible(5, window=2)] * 2, 5),
        "x.... xx... xxx.. .xxx. ..xxx",
    ),
    "without a residual": (
        rules.composed([table("... x.. .x.")] * 2, 3, residual=False),
        "... ... x..",
    ),
    "with one": (rules.composed([table("... x.. .x.")] * 2, 3), "x.. xx. xxx"),
}


@pytest.mark.parametrize("name", DRAWN)
def test_computed_dependency_tables_equal_hand_drawn_tables(name):
    made, drawing = DRAWN[name]
    np.testing.assert_array_equal(made, table(drawing))


def test_convolution_rules_have_7_dependencies_for_width_2_and_10_for_width_3():
    """Width 2 has seven edges, including 4→4, which the lecture omits; centred width 3 has ten."""
    assert rules.convolved(4, 2).sum() == 7 and rules.near(4, 1).sum() == 10


@given(segment_ids=tiny.segment_sequences(), layers=st.integers(1, 4), window=st.integers(1, 5))
def test_windows_of_several_layers_equal_one_window_of_their_combined_range(
    segment_ids, layers, window
):
    """L layers that see w tokens each reach 1 + L (w − 1)."""
    seen = [rules.visible(segment_ids, window=window)] * layers
    whole = rules.visible(segment_ids, window=1 + layers * (window - 1))
    np.testing.assert_array_equal(rules.composed(seen, segment_ids), whole)


def test_dependency_table_of_each_model_config_equals_hand_drawn_table():
    segment_ids = [[1, 1, 1], [1, 2, 0]]
    for config, drawing in (
        (jf.DecoderConfig(), "x.. xx. xxx"),
        (jf.DecoderConfig(prefix=2), "xx. xx. xxx"),
        (jf.EncoderConfig(), "xxx xxx xxx"),
        (jf.RecurrentConfig(), "x.. xx. xxx"),
        (jf.ConvolutionalConfig(num_layers=1, kernel_size=2), "x.. xx. .xx"),
    ):
        made = rules.model_rule(config, segment_ids)
        np.testing.assert_array_equal(made[0, :, 0], table(drawing))
        np.testing.assert_array_equal(made[1, :, 1], table("x.. .x. ..."))
        assert not made[0, :, 1].any() and not made[1, :, 0].any()
    np.testing.assert_array_equal(
        rules.source_rule([[1, 0]], [[0, 1, 1]])[0, :, 0], table(".xx ...")
    )
