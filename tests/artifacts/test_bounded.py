"""Encoding takes linear time and memory, for any tokenizer.json and any text."""

import gzip
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.artifacts import byte_tokenizer
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import SpecialTokens
from jaxformer.training.data import documents
from jaxformer.training.data.corpus import read_documents
from tests.errors import error_of
from tests.hub import foreign

WORDS = st.sampled_from(["a1", "b,", "'s", " ", "\n", "é", "7", "#x", "  ", "_", "ab", "漢"])


@given(st.lists(WORDS, max_size=30).map("".join), st.integers(1, 5), st.integers(0, 6))
def test_cutting_text_at_word_boundaries_does_not_change_tokens(text, length, longest):
    """Splitting preserves tokens unless letters, digits and signs alternate without a boundary."""
    tokenizer = foreign.tokenizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_tokenizer, "LONGEST_WORD", longest)
        whole = list(byte_tokenizer.cut([text], length))
        assert list(byte_tokenizer.cut(text, length)) == whole and "".join(whole) == text
        assert all(len(piece) <= length + longest for piece in whole[:-1])
    ids = [token for piece in whole for token in tokenizer.encode(piece)]
    safe = all(
        byte_tokenizer._BETWEEN_WORDS.match(text, at)
        or byte_tokenizer._WITHIN_WORDS.match(text, at)
        for at in itertools.accumulate(map(len, whole[:-1]))
    )
    assert not safe or ids == tokenizer.encode(text)


def test_text_without_spaces_is_cut_into_pieces_in_linear_time():
    """Splitting examines a constant number of characters per piece."""
    text = "x" * (3 * byte_tokenizer.LONGEST_WORD)
    found = list(byte_tokenizer.cut([text[:5], text[5:]], 1000))
    assert max(map(len, found)) <= 1000 + byte_tokenizer.LONGEST_WORD and "".join(found) == text


GROWING = {
    "a normalizer prepends megabytes": {"normalizer": {"type": "Prepend", "prepend": "x" * 10**6}},
    "a normalizer replaces": {
        "normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x" * 1000}
    },
    "a prefix of words": {"model": {"continuing_subword_prefix": "#" * 10**6}},
    "a suffix of words": {"model": {"end_of_word_suffix": "#" * 10**6}},
    "words of any length": {"model": {"max_input_chars_per_word": 10**9}},
}


@pytest.mark.parametrize("kind", GROWING)
@pytest.mark.parametrize(
    "load", [ByteTokenizer.load, lambda path: Subwords.load(path, SpecialTokens())]
)
def test_tokenizer_that_expands_text_excessively_is_rejected(kind, load, tmp_path):
    content = json.loads(foreign.tokenizer().to_json())
    for name, part in GROWING[kind].items():
        content[name] = (content[name] | part) if name == "model" else part
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    said = error_of(load, tmp_path / "tokenizer.json")
    assert "tokenizer.json" in said and len(said) < 500


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.txt.GZ", "a.txt.zst"])
def test_decompression_bomb_is_rejected(name, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_SMALL", 1 << 16)
    data = b'{"text": "' + b"x" * (1 << 22) + b'"}'
    if name.endswith(".zst"):
        data = pytest.importorskip("pyarrow").compress(data, "zstd", asbytes=True)
    else:
        data = gzip.compress(data, mtime=0)
    (tmp_path / name).write_bytes(data)
    said = error_of(lambda: list(read_documents([tmp_path / name])[0]))
    assert name in said and "100 times its size" in said


def test_long_line_read_in_many_pieces_is_copied_in_linear_time(tmp_path, monkeypatch):
    """If a line arrives in many pieces, each byte is copied a bounded number of times."""
    monkeypatch.setattr(documents, "PIECE_BYTES", 64)
    lines = [b"x" * 5000, b"", b"y" * 100, b"z"]
    (tmp_path / "a.txt").write_bytes(b"\n".join(lines))
    assert list(documents.read_lines(str(tmp_path / "a.txt"))) == lines
