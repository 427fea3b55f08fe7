"""`jaxformer plot-attention` draws a picture and refuses what it cannot draw."""

import pytest

from jaxformer.cli import main


def test_plot_attention_writes_a_picture(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("attention.png", "attention-2.png"):
        assert main(["plot-attention", str(trained), "def f(x): return x"]) == 0
        assert f"picture: {name}" in capsys.readouterr().out and (tmp_path / name).exists()
    assert (
        main(["plot-attention", str(trained), "x $y$ [b]", "-o", "other.png", "--layer", "0"]) == 0
    )
    assert (tmp_path / "other.png").exists()


@pytest.mark.parametrize(
    "words, message",
    [
        (["", "-o", "a.png"], "text is empty"),
        (["x" * 5000, "-o", "a.png"], "tokens; this model reads at most 32"),
        (["x", "-o", "a.jpg"], "out is a.jpg; it must be a .png file"),
        (
            ["x", "-o", "a.png", "--layer", "9"],
            "layer is 9; the layers with this attention are 0, 1",
        ),
        (["x", "-o", "a.png", "--attention", "cross"], "whose attention is self"),
    ],
)
def test_plot_attention_prints_one_line_for_invalid_input(
    trained, tmp_path, capsys, monkeypatch, words, message
):
    monkeypatch.chdir(tmp_path)
    assert main(["plot-attention", str(trained), *words]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not (tmp_path / "a.png").exists()
