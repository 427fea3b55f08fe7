"""The file of tokens holds the text, whole, and is written again only where it must be."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxformer.artifacts import tokenizer as tokenizer_module
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.training.data import tokens
from jaxformer.training.data.documents import Document
from jaxformer.training.data.tokens import open_tokens, write_tokens
from tests.errors import error_of

DOCUMENTS = [Document("a", "the café " * 9), Document("empty", ""), Document("b", "the end\n")]
TOKENIZER = Tokenizer.train([document.text for document in DOCUMENTS], 270)
STREAM = [
    token
    for document in DOCUMENTS
    for token in [TOKENIZER.end_of_text, *TOKENIZER.encode(document.text)]
]


def test_the_file_holds_the_stream(tmp_path):
    stream = write_tokens(DOCUMENTS, TOKENIZER, tmp_path / "train.tokens")
    assert stream.ids.tolist() == STREAM
    assert stream.ids.dtype == np.uint16
    assert isinstance(stream.ids, np.memmap) and not stream.ids.flags.writeable
    assert stream.num_documents == 3
    assert stream.num_bytes == len(("the café " * 9 + "the end\n").encode())
    assert [path.name for path in tmp_path.iterdir()] == ["train.tokens"]

    again = open_tokens(tmp_path / "train.tokens")
    assert again.ids.tolist() == STREAM
    assert again[1:] == stream[1:]


def test_long_corpora_are_written_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "_GROUP_CHARACTERS", 20)
    monkeypatch.setattr(tokenizer_module, "_PIECE_LENGTH", 7)
    assert write_tokens(DOCUMENTS, TOKENIZER, tmp_path / "tokens").ids.tolist() == STREAM


def _tokenizer_of_size(vocab_size):
    return SimpleNamespace(
        vocab_size=vocab_size,
        opening=[vocab_size - 1],
        fingerprint="",
        pieces=lambda parts: parts,
        encode_many=lambda texts: [[vocab_size - 2] * len(text) for text in texts],
    )


@pytest.mark.parametrize("vocab_size, dtype", [(65_536, np.uint16), (65_537, np.uint32)])
def test_ids_are_as_wide_as_the_vocabulary_needs(tmp_path, vocab_size, dtype):
    stream = write_tokens([Document("", "ab")], _tokenizer_of_size(vocab_size), tmp_path / "tokens")
    assert stream.ids.dtype == dtype
    assert stream.ids.tolist() == [vocab_size - 1, vocab_size - 2, vocab_size - 2]


def test_a_file_is_reused_only_for_the_same_text_and_tokenizer(tmp_path, monkeypatch):
    path = tmp_path / "tokens"
    encoded = []
    original = tokens._encode
    monkeypatch.setattr(tokens, "_encode", lambda *a: encoded.append(1) or original(*a))

    def times_encoded(documents, tokenizer):
        encoded.clear()
        assert write_tokens(documents, tokenizer, path).ids.tolist() == [
            token
            for document in documents
            for token in [tokenizer.end_of_text, *tokenizer.encode(document.text)]
        ]
        return len(encoded)

    assert times_encoded(DOCUMENTS, TOKENIZER) == 1
    assert times_encoded(DOCUMENTS, TOKENIZER) == 0
    assert times_encoded(DOCUMENTS[::-1], TOKENIZER) == 1
    assert times_encoded(DOCUMENTS[::-1], Tokenizer.train([], 257)) == 1
    moved = [Document("a", "the café " * 9 + "t"), Document("", ""), Document("b", "he end\n")]
    assert times_encoded(DOCUMENTS, TOKENIZER) == 1
    assert times_encoded(moved, TOKENIZER) == 1
    path.write_bytes(path.read_bytes()[:-2])
    assert times_encoded(moved, TOKENIZER) == 1


def _in_small_groups(monkeypatch):
    monkeypatch.setattr(tokens, "_GROUP_CHARACTERS", 20)
    monkeypatch.setattr(tokenizer_module, "_PIECE_LENGTH", 7)


def _ended_after(monkeypatch, groups, *arguments):
    """write_tokens, killed in the middle of what comes after so many groups."""
    write_whole, written = tokens.write_whole, []

    def ended(journal, text):
        write_whole(journal, text)
        written.append(text)
        if len(written) == groups:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tokens, "write_whole", ended)
        write_tokens(*arguments)
    with open(f"{arguments[-1]}.unfinished", "ab") as file:
        file.write(b"half a group")


def test_a_start_that_was_ended_is_gone_on_with(tmp_path, monkeypatch):
    """Wherever it was ended, and twice: what is written down is not tokenised again, the file is
    the same in the end, and until then the old one stands."""
    _in_small_groups(monkeypatch)
    path, whole, encoded = tmp_path / "tokens", tmp_path / "whole", []
    write_tokens(DOCUMENTS, TOKENIZER, whole)
    groups = len(list(tokens._groups(DOCUMENTS, TOKENIZER)))
    encode_group = tokens._encode_group
    monkeypatch.setattr(tokens, "_encode_group", lambda *x: encoded.append(1) or encode_group(*x))
    for first in range(1, groups):
        write_tokens(DOCUMENTS[:1], TOKENIZER, path)
        old = path.read_bytes()
        _ended_after(monkeypatch, first, DOCUMENTS, TOKENIZER, path)
        _ended_after(monkeypatch, 1, DOCUMENTS, TOKENIZER, path)
        assert path.read_bytes() == old
        encoded.clear()
        write_tokens(DOCUMENTS, TOKENIZER, path)
        assert len(encoded) == groups - first - 1
        assert path.read_bytes() == whole.read_bytes()
        assert sorted(tmp_path.iterdir()) == [path, whole]


def test_what_was_begun_of_another_text_is_begun_anew(tmp_path, monkeypatch):
    _in_small_groups(monkeypatch)
    path = tmp_path / "tokens"
    _ended_after(monkeypatch, 2, [Document("a", "x " * 90)], TOKENIZER, path)
    assert write_tokens(DOCUMENTS, TOKENIZER, path).ids.tolist() == STREAM


def test_no_documents_are_refused(tmp_path):
    message = "documents: there are none to tokenise"
    assert error_of(write_tokens, [], TOKENIZER, tmp_path / "tokens") == message


@pytest.mark.parametrize("damage", ["missing", "cut", "text", "empty", "other"])
def test_a_file_that_is_not_of_tokens_is_refused_by_name(tmp_path, damage):
    path = tmp_path / "tokens"
    write_tokens(DOCUMENTS, TOKENIZER, path)
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(
            {"cut": content[:-1], "text": b"text", "empty": b"", "other": b"[]" + content}[damage]
        )
    message = f"{path}: not a file of tokens; write_tokens makes one"
    assert error_of(open_tokens, path) == message
