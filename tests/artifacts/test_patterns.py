"""Encoding with any pattern takes linear time, and splitting texts preserves tokens."""

import functools
import json
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from jaxformer.artifacts import untrusted
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import SpecialTokens
from jaxformer.artifacts.untrusted import backtracking_patterns, guarded
from tests.errors import error_of
from tests.hub import foreign
from tests.slow import mostly_slow

# Patterns of published tokenizers.
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD = r"[^\r\n\p{L}\p{N}]?"
LLAMA3 = rf"{CONTRACTIONS}|{WORD}\p{{L}}+|\p{{N}}{{1,3}}|{REST}"
SUPERBPE = r"(?=(\d{3})+(?!\d))"
PUBLISHED = {
    "gpt2": [r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"],
    "llama3": [LLAMA3],
    "qwen": [rf"{CONTRACTIONS}|{WORD}[\p{{L}}\p{{M}}]+|\p{{N}}|{REST}"],
    "o200k": [
        rf"{WORD}{UPPER}*{LOWER}+{CONTRACTIONS}?|{WORD}{UPPER}+{LOWER}*{CONTRACTIONS}?"
        rf"|\p{{N}}{{1,3}}|{REST}"
    ],
    "kimi": [rf"[\p{{Han}}]+|{WORD}[\p{{L}}&&[^\p{{Han}}]]+|\p{{N}}{{1,3}}|{REST}"],
    "deepseek": [
        r"[\r\n]",
        r"\s?[A-Za-zµÀ-ÖØ-öø-ƺ]+",
        r"\s?[!-/:-~]+",
        r"\s+$",
        "[一-龥ࠀ-一가-퟿]+",
    ],
    "deepseek v3": [r"\p{N}{1,3}", rf"[!-/:-~][A-Za-z]+|[^\r\n\p{{L}}]?[\p{{L}}\p{{M}}]+|{REST}"],
    "bloom": [r" ?[^(\s|[.,!?…。，、।۔،])]+"],
    "clip": [r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"],
}
SIMPLE = [" {2,}", r"\s+", r"\s{2,}|[\n\r\t]", r"[!\"\#\-\[\\\]^_`{|}~]", r"[\r\n]", r"\p{N}{1,3}"]


@functools.cache
def learnt() -> Tokenizer:
    """Returns byte-level BPE that has merged words, and long runs of one character or pair."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    runs = [x * n for x in (" ", "\n", "a", "ab", "7", "👩‍👧") for n in range(1, 40)]
    words = ["the tide", " came in", "'ll", "12", "345", "漢字", "é", ".\n\n", " \n"] * 9
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=["<e>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([*runs, *words], trainer)
    return backend


@functools.cache
def split_by(*found: str) -> Subwords:
    backend = Tokenizer.from_str(learnt().to_str())
    steps = [pre_tokenizers.Split(Regex(x), "isolated") for x in found]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, backend.pre_tokenizer])
    return Subwords(backend, SpecialTokens((0,)))


PIECES = [
    "the tide came",
    " ",
    "\n",
    "a",
    "ab",
    "7",
    "123",
    "👩‍👧",
    "漢字",
    ". ",
    "'ll",
    "\t",
    " \n",
]
RUNS = st.tuples(st.sampled_from(PIECES), st.sampled_from([1, 2, 3, 5, 50, 1201]))


@pytest.mark.parametrize("name", mostly_slow(PUBLISHED, "deepseek", slow=PUBLISHED))
@given(runs=st.lists(RUNS, min_size=10, max_size=40))
def test_splitting_long_text_gives_the_tokens_of_tokenizers_library(name, runs):
    tokenizer = split_by(*PUBLISHED[name])
    assert tokenizer._patterns
    text = "".join(part * number for part, number in runs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(untrusted, "LONGEST_PIECE", 1024)
        patch.setattr("jaxformer.artifacts.tokenizer.LONGEST_PIECE", 1024)
        ids = tokenizer.encode(text)
    assert ids == tokenizer._backend.encode(text, add_special_tokens=False).ids


def test_normalizing_text_in_pieces_equals_normalizing_whole_text():
    backend = Tokenizer.from_str(learnt().to_str())
    steps = [normalizers.Replace(Regex(r"(?<=\w)\s+(?=\w)"), "_"), normalizers.NFC()]
    backend.normalizer = normalizers.Sequence(steps)
    tokenizer, text = Subwords(backend, SpecialTokens((0,))), "the  tide. came  in\n" * 2000
    assert tokenizer.normalized(text) == backend.normalizer.normalize_str(text)


EXPONENTIAL = [
    *[r"(\w+\s?)+$", "(a+)+$", "(?:a|aa)+$", "(x+x+)+y", r"(\s*\w*)*!$", r"(\d+)*\."],
    *["(?:qz|qzqz)+x", r"(?:[qk]z|[qk]z[qk]z)+\d", "(?:(?:ab){2}c|ababcababc)+x"],
    *["(?:(?=q)qz|qzqz)+x", "(?<n>qz|qzqz)+x", "(?:qz|q(?:z)qz)+x", r"(?:\p{Greek}ж|αжαж)+!"],
]
CUBIC = ["a+a+x", "(?:qz)+(?:qz)+x"]


@pytest.mark.parametrize("pattern", mostly_slow(EXPONENTIAL + CUBIC, "(?:qz|qzqz)+x"))
def test_tokenizer_regex_of_more_than_quadratic_time_is_rejected(pattern, capfd):
    """The error is one line: the library's panic does not reach the terminal."""
    said = error_of(backtracking_patterns, {"pre_tokenizer": {"pattern": {"Regex": pattern}}})
    assert ("cubic" if pattern in CUBIC else "exponential") in said and repr(pattern) in said
    assert capfd.readouterr().err == ""


QUADRATIC = [SUPERBPE, r"\d{1,3}(?=(?:\d{3})*\b)", r"\s+$", r"(?:\s+\w+)+", "(?:qz)+x"]
LINEAR = [x for some in PUBLISHED.values() for x in some if not untrusted.is_simple(x)]


@pytest.mark.parametrize("pattern", mostly_slow([*QUADRATIC, *LINEAR], LLAMA3))
@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer"])
def test_tokenizer_regex_of_at_most_quadratic_time_is_accepted(part, pattern):
    steps = {part: {"steps": [{"pattern": {"Regex": pattern}}]}}
    assert backtracking_patterns(steps) == (pattern,)


@pytest.mark.parametrize("pattern", SIMPLE)
def test_regex_without_backtracking_is_matched_on_the_whole_text(pattern):
    assert backtracking_patterns({"decoder": {"pattern": {"Regex": pattern}}}) == ()


@pytest.mark.parametrize("pattern", ["(?:qz)+x", "a{500,}", r"\s+$", "a*b"])
def test_backtracking_regex_in_tokenizer_decoder_is_rejected(pattern):
    said = error_of(backtracking_patterns, {"decoder": [{"pattern": {"Regex": pattern}}]})
    assert repr(pattern) in said and "decoder" in said


SLOW = {"(?:qz)+x": "qz", r"(?:ab)+c(?!.)": "ab", r"(?:7\s)+x": "7 "}


@pytest.mark.parametrize("pattern", mostly_slow(SLOW, "(?:qz)+x"))
@pytest.mark.parametrize("kind", mostly_slow([Subwords, ByteTokenizer], Subwords))
def test_quadratic_regex_is_matched_on_bounded_pieces_of_text(kind, pattern):
    """No call of the library has more than 8,192 characters, and the tokens are the same."""
    content = json.loads(foreign.tokenizer().to_json())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps = [split | {"invert": False}, whole | {"use_regex": False}]
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    backend = Tokenizer.from_str(json.dumps(content))
    tokenizer = Subwords(backend, SpecialTokens((0,))) if kind is Subwords else kind(backend)
    text, lengths = SLOW[pattern] * 8000, []
    encode = tokenizer._encode_whole

    def counted(texts, allow_special):
        lengths.extend(map(len, texts))
        return encode(texts, allow_special)

    tokenizer._encode_whole = counted
    assert tokenizer.encode(text) == backend.encode(text, add_special_tokens=False).ids
    assert max(lengths) == untrusted.LONGEST_PIECE and sum(lengths) < 2 * len(text)


def test_encoding_rejects_long_text_that_cannot_be_split():
    """SuperBPE groups digits from the right end, so a long number cannot be split."""
    tokenizer = split_by(SUPERBPE, LLAMA3)
    begin = time.process_time()
    said = error_of(tokenizer.encode, "tide " + "7" * 20_000)  # as a whole it takes 2 s
    assert "must be split" in said and "line break" in said
    assert time.process_time() - begin < 1.5
    text = "tide " + "7" * 2000 + " " + "7" * 2000
    assert tokenizer.encode(text) == tokenizer._backend.encode(text).ids


class Panic(BaseException):
    """Stands for the library's panic, which does not derive from Exception."""


def test_panic_of_tokenizers_library_becomes_one_line_error(capfd):
    def panicking():
        os.write(2, b"before\n\nthread '<unnamed>' panicked at lib.rs:647:\n" + b"frame\n" * 80)
        raise Panic("Onig: Regex search error:\nretry-limit-in-match over")

    said = error_of(lambda: guarded(panicking, silent=True))
    assert "takes too long on this text" in said
    assert capfd.readouterr().err == "before\n"


@pytest.mark.parametrize("call", ["encode", "normalized"])
def test_error_after_tokenizers_panic_names_regex_and_file(call, tmp_path, monkeypatch, capfd):
    """The pattern passes the checks here, as if the test strings had missed its backtracking."""
    pattern = "(?:qz|qzqz)+x"
    backend = Tokenizer.from_str(learnt().to_str())
    backend.normalizer = normalizers.Replace(Regex(pattern), "")
    backend.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(untrusted, "_try_out", lambda _: None)
    tokenizer = Subwords.load(tmp_path / "tokenizer.json", SpecialTokens((0,)))
    said = error_of(getattr(tokenizer, call), "qz" * 100)
    assert repr(pattern) in said and str(tmp_path) in said and "\n" not in said
    assert capfd.readouterr().err == ""
