"""`translate` reads files as it reads standard input."""

import gzip
import io

import pytest

from jaxformer.cli import main
from jaxformer.cli.translate import iterate_lines

LINES = b"\xef\xbb\xbfone\rtwo\nthree\r\n\nfour"


def test_translate_reads_a_file_like_standard_input(tmp_path, monkeypatch):
    """The same holds for a compressed file. A carriage return alone ends no line."""
    (tmp_path / "in.en").write_bytes(LINES)
    (tmp_path / "in.en.gz").write_bytes(gzip.compress(LINES))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(LINES)))
    expected = ["one\rtwo", "three", "", "four"]
    for path in (None, tmp_path / "in.en", tmp_path / "in.en.gz"):
        assert list(iterate_lines(path)) == expected


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("in.en", b"one\n\xff\n", "line 2 of .*in.en is not UTF-8"),
        ("in.en.gz", b"one\n", "in.en.gz cannot be read"),
        ("in.en.gz", gzip.compress(LINES, mtime=0)[:-9], "in.en.gz cannot be read"),
    ],
)
def test_translate_error_names_an_unreadable_file(name, content, said, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        list(iterate_lines(tmp_path / name))


def test_translate_refuses_a_missing_file_before_loading_the_model(tmp_path, capsys):
    for name, said in (("nowhere.en", "no such file"), (str(tmp_path), "not a file, but a folder")):
        assert main(["translate", "no-run", name]) == 2
        assert capsys.readouterr().err == f"jaxformer: {name}: {said}\n"
