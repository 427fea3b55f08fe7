"""Encoding takes time and memory in proportion to the text, for any tokenizer.json and any text."""

import gzip
import itertools
import json
import os
import time

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from jaxformer.artifacts import byte_vocabulary
from jaxformer.artifacts.backend import guarded, is_quadratic
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import SpecialTokens
from jaxformer.training.data import reading
from jaxformer.training.data.corpus import read_documents
from tests.errors import error_of
from tests.hub import foreign
from tests.slow import mostly_slow

SUPERBPE = r"(?=(\d{3})+(?!\d))"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_of(pattern, kind=Subwords):
    backend = tokenizers.Tokenizer.from_str(foreign.tokenizer().to_json())
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    return Subwords(backend, SpecialTokens((0,))) if kind is Subwords else ByteTokenizer(backend)


EXPONENTIAL = [r"(\w+\s?)+$", "(a+)+$", "(?:a|aa)+$", "(x+x+)+y", r"(\s*\w*)*!$", r"(\d+)*\."]


@pytest.mark.parametrize("pattern", mostly_slow(EXPONENTIAL, EXPONENTIAL[2]))
def test_a_pattern_of_exponential_time_is_refused(pattern, capfd):
    """The error is one line: the library's panic does not reach the terminal."""
    said = error_of(is_quadratic, {"pre_tokenizer": {"pattern": {"Regex": pattern}}})
    assert "exponential" in said and repr(pattern) in said
    assert capfd.readouterr().err == ""


QUADRATIC = [SUPERBPE, r"\d{1,3}(?=(?:\d{3})*\b)", r"\s+$", r"(?:\s+\w+)+"]
LINEAR = [CL100K, r"\d+(?:,\d+)*", r"\d{1,3}(?:,\d{3})*", r"\p{L}+(?:'\p{L}+)*", " {2,}"]


@pytest.mark.parametrize("pattern", mostly_slow(LINEAR, CL100K))
def test_a_pattern_of_linear_time_gets_the_whole_text(pattern):
    assert not is_quadratic([{"pattern": {"Regex": pattern}}])


@pytest.mark.parametrize("pattern", mostly_slow(QUADRATIC))
def test_a_pattern_of_quadratic_time_is_recognized(pattern):
    assert is_quadratic([{"pattern": {"Regex": pattern}}])


@pytest.mark.parametrize("kind", mostly_slow([Subwords, ByteTokenizer], Subwords))
def test_a_pattern_of_quadratic_time_gets_bounded_pieces(kind):
    """Short numbers are divided as by the library, and a long one takes less than a second."""
    tokenizer = tokenizer_of(SUPERBPE, kind)
    text = "the tide came in 1234567 times, at 12:30"
    expected = tokenizer._backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text) == expected
    begin = time.process_time()
    ids = tokenizer.encode("7" * 20_000)  # as a whole it takes 2 s
    assert time.process_time() - begin < 1
    assert tokenizer.decode(ids) == "7" * 20_000


class Panic(BaseException):
    """Stands for the library's panic, which does not derive from Exception."""


def test_a_panic_of_the_library_is_one_line(capfd):
    def panicking():
        os.write(2, b"before\n\nthread '<unnamed>' panicked at lib.rs:647:\n" + b"frame\n" * 80)
        raise Panic("Onig: Regex search error:\nretry-limit-in-match over")

    said = error_of(lambda: guarded(panicking, silent=True))
    assert "takes too long on this text" in said
    assert capfd.readouterr().err == "before\n"


WORDS = st.sampled_from(["a1", "b,", "'s", " ", "\n", "é", "7", "#x", "  ", "_", "ab", "漢"])


@given(st.lists(WORDS, max_size=30).map("".join), st.integers(1, 5), st.integers(0, 6))
def test_cuts_between_and_within_words_change_no_tokens(text, length, longest):
    """Unless a window of the text has no place to cut: letters, digits and signs alternate."""
    tokenizer = foreign.tokenizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_vocabulary, "LONGEST_WORD", longest)
        whole = list(byte_vocabulary.cut([text], length))
        assert list(byte_vocabulary.cut(text, length)) == whole and "".join(whole) == text
        assert all(len(piece) <= length + longest for piece in whole[:-1])
    ids = [token for piece in whole for token in tokenizer.encode(piece)]
    safe = all(
        byte_vocabulary._BETWEEN_WORDS.match(text, at)
        or byte_vocabulary._WITHIN_WORDS.match(text, at)
        for at in itertools.accumulate(map(len, whole[:-1]))
    )
    assert not safe or ids == tokenizer.encode(text)


def test_a_text_without_spaces_is_cut_in_linear_time():
    """Each piece examines the same number of characters, whatever precedes it."""
    text = "x" * (3 * byte_vocabulary.LONGEST_WORD)
    found = list(byte_vocabulary.cut([text[:5], text[5:]], 1000))
    assert max(map(len, found)) <= 1000 + byte_vocabulary.LONGEST_WORD and "".join(found) == text


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
def test_a_tokenizer_that_makes_a_text_much_longer_is_refused(kind, load, tmp_path):
    content = json.loads(foreign.tokenizer().to_json())
    for name, part in GROWING[kind].items():
        content[name] = (content[name] | part) if name == "model" else part
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    said = error_of(load, tmp_path / "tokenizer.json")
    assert "tokenizer.json" in said and len(said) < 500


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.txt.GZ", "a.txt.zst"])
def test_a_small_file_that_decompresses_to_a_huge_one_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_SMALL", 1 << 16)
    data = b'{"text": "' + b"x" * (1 << 22) + b'"}'
    if name.endswith(".zst"):
        data = pytest.importorskip("pyarrow").compress(data, "zstd", asbytes=True)
    else:
        data = gzip.compress(data, mtime=0)
    (tmp_path / name).write_bytes(data)
    said = error_of(lambda: list(read_documents([tmp_path / name])[0]))
    assert name in said and "100 times its size" in said


def test_a_long_line_is_joined_once(tmp_path, monkeypatch):
    """Each byte of a line that arrives in many pieces is copied a bounded number of times."""
    monkeypatch.setattr(reading, "PIECE_BYTES", 64)
    lines = [b"x" * 5000, b"", b"y" * 100, b"z"]
    (tmp_path / "a.txt").write_bytes(b"\n".join(lines))
    assert list(reading.read_lines(str(tmp_path / "a.txt"))) == lines
