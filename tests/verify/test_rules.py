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
    # Lecture 11 §8: width 2 on four positions has seven edges, centred width 3 has ten.
    "causal convolution": (rules.convolved(4, 2), "x... xx.. .xx. ..xx"),
    "centred convolution": (rules.convolved(4, 3, causal=False), "xx.. xxx. .xxx ..xx"),
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
def test_a_rule_is_its_drawing(name):
    made, drawing = DRAWN[name]
    np.testing.assert_array_equal(made, table(drawing))


def test_edges_as_the_lecture_counts_them():
    """Width 2 has seven edges, including 4→4, which the lecture omits; centred width 3 has ten."""
    assert rules.convolved(4, 2).sum() == 7 and rules.convolved(4, 3, causal=False).sum() == 10


@given(segments=tiny.segment_rows(), layers=st.integers(1, 4), window=st.integers(1, 5))
def test_layers_of_a_window_reach_as_far_as_they_add_up_to(segments, layers, window):
    """L layers that see w tokens each reach 1 + L (w − 1)."""
    seen = [rules.visible(segments, window=window)] * layers
    whole = rules.visible(segments, window=1 + layers * (window - 1))
    np.testing.assert_array_equal(rules.composed(seen, segments), whole)


def test_a_rule_of_each_config():
    rows = [[1, 1, 1], [1, 2, 0]]
    for config, row in (
        (jf.DecoderConfig(), "x.. xx. xxx"),
        (jf.DecoderConfig(prefix=2), "xx. xx. xxx"),
        (jf.EncoderConfig(), "xxx xxx xxx"),
        (jf.RecurrentConfig(), "x.. xx. xxx"),
        (jf.ConvolutionalConfig(num_layers=1, kernel_size=2), "x.. xx. .xx"),
    ):
        made = rules.of(config, rows)
        np.testing.assert_array_equal(made[0, :, 0], table(row))
        np.testing.assert_array_equal(made[1, :, 1], table("x.. .x. ..."))
        assert not made[0, :, 1].any() and not made[1, :, 0].any()
    np.testing.assert_array_equal(rules.of_source([[1, 0]], [[0, 1, 1]])[0, :, 0], table(".xx ..."))
