"""Figures whose texts contain file names that are not UTF-8."""

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from jaxformer.artifacts.files import without_surrogates, write_figure


@pytest.mark.parametrize("name", ["caf\udce9", "\ud800"])
def test_figure_replaces_lone_surrogates(name, tmp_path):
    """Title, legend and axis labels show U+FFFD in place of lone surrogates."""
    figure = Figure()
    axes = figure.subplots()
    axes.plot([1, 2], label=name)
    axes.set(xlabel=name, title=name)
    axes.legend()
    write_figure(figure, name, tmp_path / "picture.png", dpi=50)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    texts = [text.get_text() for text in figure.findobj(Text)]
    assert name not in texts and texts.count(without_surrogates(name)) == 4


def test_figure_text_without_lone_surrogates_is_unchanged():
    assert without_surrogates("a\n é 𝄞 \ufffd") == "a\n é 𝄞 \ufffd"
    assert without_surrogates("\ud834\udd1e") == "\ufffd\ufffd"
