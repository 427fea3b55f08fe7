"""Paths that are not UTF-8: refused for a model that is written, before anything is computed."""

import pytest

from jaxformer.cli import main
from tests.hub import foreign

NAME = "caf\udce9"  # "café" in Latin-1


@pytest.mark.parametrize("verb", ["import", "export", "train"])
def test_an_output_path_that_is_not_utf8_is_refused(verb, tmp_path, capsys):
    foreign.write(tmp_path / "model", "gpt2")
    text = tmp_path / "text.txt"
    text.write_text("a short text")
    before, out = sorted(tmp_path.iterdir()), str(tmp_path / NAME)
    arguments = {
        "import": ["import", str(tmp_path / "model"), out],
        "export": ["export", str(tmp_path / "model"), out],
        "train": ["train", str(text), "--steps", "1", "--out", out],
    }
    assert main(arguments[verb]) == 2
    assert "is not UTF-8; use a path" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
