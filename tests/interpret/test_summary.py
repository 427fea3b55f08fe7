"""Results of the room describe themselves on one short line, and draw themselves in a notebook."""

from inspect import isclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from jaxformer import interpret
from jaxformer.interpret import AttentionMaps, Page, Sweep, draw_attention
from jaxformer.interpret.summary import summary

# Values without arrays, for which the usual text is short enough.
PLAIN = {"AtlasSettings", "ScoreSettings", "Node", "Edge", "InterchangeSite", "EncodedText"}
RESULTS = {
    name: getattr(interpret, name)
    for name in interpret.__all__
    if isclass(getattr(interpret, name)) and hasattr(getattr(interpret, name), "_fields")
}


@pytest.mark.parametrize("name", sorted(RESULTS.keys() - PLAIN))
def test_repr_of_a_result_with_large_arrays_is_one_short_line(name):
    kind = RESULTS[name]
    result = kind(*[np.ones((40, 50, 60), np.float32)] * len(kind._fields))
    text = repr(result)
    assert text.startswith(f"{name}({kind._fields[0]}=float32 [40, 50, 60]")
    assert "\n" not in text and len(text) < 60 * (1 + len(kind._fields))


@given(
    st.text(max_size=300), st.floats(width=32), st.dictionaries(st.text(max_size=9), st.integers())
)
def test_summary_of_a_result_with_any_field_values_is_one_short_line(text, number, entries):
    found = summary(Sweep(np.zeros(3), number, np.float32(number), (text, entries)))
    assert "\n" not in found and len(found) < 250


def test_repr_of_a_page_does_not_contain_its_html():
    page = Page("<html>" * 10_000, "live", None, 7)
    assert repr(page) == "Page(live, 7 tokens, 60,000 bytes)"
    assert "srcdoc" in page._repr_html_()


def test_attention_maps_are_displayed_as_pictures(tmp_path):
    weights = np.tril(np.ones((2, 3, 4, 4))) / np.arange(1, 5)[:, None]
    maps = AttentionMaps(weights, tuple("abcd"), tuple("abcd"), "self-attention", (0, 1))
    assert maps._repr_png_().startswith(b"\x89PNG")
    figure = draw_attention(maps, layer=1)
    assert isinstance(figure, Figure) and not list(tmp_path.iterdir())
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[:3] == [f"layer 1, head {head}" for head in range(3)]
    draw_attention(maps, tmp_path / "maps.png")
    assert (tmp_path / "maps.png").read_bytes().startswith(b"\x89PNG")
