"""A tokenizer that takes text in lower case, wherever it is kept."""

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from jaxformer.artifacts.load import run_tokenizer
from jaxformer.artifacts.lowercase import lowercased, lowers_case
from jaxformer.artifacts.run import RunFolder
from jaxformer.artifacts.subwords import SpecialTokens, Subwords
from jaxformer.artifacts.tokenizer import Tokenizer

PLAIN = Tokenizer.train(["one and Two", "THREE and four"] * 3, 300, split_digits=True)
LOWER = lowercased(PLAIN)


@given(text=st.text(st.characters(codec="ascii")))
def test_every_text_is_read_in_lower_case(text):
    """By the same ids as its lower case, from its file too; the ids mean what they meant."""
    assert LOWER.encode(text) == PLAIN.encode(text.lower())
    assert LOWER.decode(LOWER.encode(text)) == text.lower()


def test_its_file_says_so(tmp_path):
    LOWER.save(tmp_path / "tokenizer.json")
    again = Tokenizer.load(tmp_path / "tokenizer.json")
    assert lowers_case(again) and again.fingerprint == LOWER.fingerprint != PLAIN.fingerprint
    assert not lowers_case(PLAIN) and not LOWER.lossless and PLAIN.lossless
    assert lowercased(LOWER) is LOWER


def test_that_of_another_is_one_too():
    words = {"one": 0, "two": 1, "?": 2}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    theirs = Subwords(backend, SpecialTokens((0,)))
    assert theirs.encode("ONE two") == [2, 1]
    assert lowercased(theirs).encode("ONE two") == [0, 1]
    assert lowercased(theirs).special == theirs.special


def test_a_run_that_an_earlier_version_left_is_read_in_lower_case(tmp_path):
    """Its config says so, and not yet its tokenizer."""
    run = RunFolder(tmp_path)
    run.write_config({"model": {}, "training": {"lowercase": True}})
    PLAIN.save(run.tokenizer)
    assert run_tokenizer(run).fingerprint == LOWER.fingerprint
