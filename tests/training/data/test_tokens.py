"""The token file holds the whole text and is rewritten only if necessary."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from jaxformer.artifacts import byte_tokenizer as tokenizer_module
from jaxformer.artifacts.byte_tokenizer import ByteTokenizer
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import SpecialTokens
from jaxformer.training.data import tokens
from jaxformer.training.data.documents import Document
from jaxformer.training.data.tokens import open_tokens, write_tokens
from jaxformer.training.tasks.pairs import EncodedPairs
from tests.errors import error_of

DOCUMENTS = [Document("a", "the café " * 9), Document("empty", ""), Document("b", "the end\n")]
TOKENIZER = ByteTokenizer.train([document.text for document in DOCUMENTS], 270)
STREAM = [
    token
    for document in DOCUMENTS
    for token in [TOKENIZER.end_of_text, *TOKENIZER.encode(document.text)]
]


def test_token_file_contains_the_ids_of_all_documents(tmp_path):
    stream = write_tokens(DOCUMENTS, TOKENIZER, tmp_path / "train.tokens")
    assert stream.ids.tolist() == STREAM
    assert stream.ids.dtype == np.uint16
    assert isinstance(stream.ids, np.memmap) and not stream.ids.flags.writeable
    assert stream.num_documents == 3
    assert stream.num_bytes == len(("the café " * 9 + "the end\n").encode())
    assert [path.name for path in tmp_path.iterdir()] == ["train.tokens"]

    again = open_tokens(tmp_path / "train.tokens")
    assert again.ids.tolist() == STREAM
    assert again[2:] == stream[2:]


def test_token_file_written_in_several_steps_contains_all_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "_GROUP_CHARACTERS", 20)
    monkeypatch.setattr(tokenizer_module, "_PIECE_LENGTH", 7)
    stream = write_tokens(DOCUMENTS, TOKENIZER, tmp_path / "tokens")
    assert stream.ids.tolist() == STREAM
    _check_documents(stream, TOKENIZER, DOCUMENTS)


def _check_documents(stream, tokenizer, documents, after=()):
    wanted = [
        [*tokenizer.opening, *tokenizer.encode(document.text), *after] for document in documents
    ]
    assert [some.tolist() for some in stream.split()] == wanted


def words(opening, stop):
    """Returns a tokenizer of lower-case words. Its opening and stop tokens may be such words."""
    backend = tokenizers.Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, "?"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Subwords(backend, SpecialTokens((stop,), opening))


WORDS = ["?", "the", "cat", "a", "dog"]
texts = st.lists(st.sampled_from([*WORDS, " ", "Cat", "\n"]), max_size=6).map(" ".join)


@settings(max_examples=8)
@given(st.lists(texts, min_size=1, max_size=6), st.integers(0, 4), st.integers(0, 4))
def test_document_boundaries_are_independent_of_token_ids_in_the_text(texts, opening, stop):
    """This includes opening and stop tokens that are also words of the texts."""
    documents, tokenizer = [Document("", text) for text in texts], words(opening, stop)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "_GROUP_CHARACTERS", 9)
        stream = write_tokens(documents, tokenizer, Path(folder) / "a", after=(stop,))
        _check_documents(stream, tokenizer, documents, (stop,))
        sides = [
            write_tokens(documents[::step], tokenizer, Path(folder) / f"{step}") for step in (1, -1)
        ]
        encoded = EncodedPairs(sides, tokenizer)
        wanted = [tokenizer.encode(text) for text in texts]
        found = [[side.tolist() for side in pair] for pair in encoded]
        assert found == [list(pair) for pair in zip(wanted, wanted[::-1], strict=True)]
        assert encoded.num_targets == sum(len(ids) + 1 for ids in wanted)


def _tokenizer_of_size(vocab_size):
    return SimpleNamespace(
        vocab_size=vocab_size,
        opening=[vocab_size - 1],
        fingerprint="",
        pieces=lambda parts: parts,
        encode_many=lambda texts: [[vocab_size - 2] * len(text) for text in texts],
    )


@pytest.mark.parametrize("vocab_size, dtype", [(65_536, np.uint16), (65_537, np.uint32)])
def test_token_ids_have_the_smallest_sufficient_dtype(tmp_path, vocab_size, dtype):
    stream = write_tokens([Document("", "ab")], _tokenizer_of_size(vocab_size), tmp_path / "tokens")
    assert stream.ids.dtype == dtype
    assert stream.ids.tolist() == [vocab_size - 1, vocab_size - 2, vocab_size - 2]


def test_token_file_is_reused_only_for_the_same_text_and_tokenizer(tmp_path, monkeypatch):
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
    assert times_encoded(DOCUMENTS[::-1], ByteTokenizer.train([], 257)) == 1
    moved = [Document("a", "the café " * 9 + "t"), Document("", ""), Document("b", "he end\n")]
    assert times_encoded(DOCUMENTS, TOKENIZER) == 1
    assert times_encoded(moved, TOKENIZER) == 1
    path.write_bytes(path.read_bytes()[:-2])
    assert times_encoded(moved, TOKENIZER) == 1


def _in_small_groups(monkeypatch):
    monkeypatch.setattr(tokens, "_GROUP_CHARACTERS", 20)
    monkeypatch.setattr(tokenizer_module, "_PIECE_LENGTH", 7)


def _ended_after(monkeypatch, groups, *arguments):
    """Calls write_tokens and interrupts it while it writes the group after `groups` groups."""
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


def test_writing_a_token_file_continues_after_an_interruption(tmp_path, monkeypatch):
    """A call that was interrupted anywhere, even twice, is continued by the next call.

    The next call does not encode written tokens again, and the final file is the same. The old file
    exists until then.
    """
    _in_small_groups(monkeypatch)
    path, whole, encoded = tmp_path / "tokens", tmp_path / "whole", []
    write_tokens(DOCUMENTS, TOKENIZER, whole)
    groups = len(list(tokens.groups(DOCUMENTS, TOKENIZER)))
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


def test_unfinished_token_file_of_another_text_is_discarded(tmp_path, monkeypatch):
    _in_small_groups(monkeypatch)
    path = tmp_path / "tokens"
    others = [Document(str(number), "x " * 90) for number in range(len(DOCUMENTS))]
    _ended_after(monkeypatch, 2, others, TOKENIZER, path)
    assert write_tokens(DOCUMENTS, TOKENIZER, path).ids.tolist() == STREAM


def test_write_tokens_rejects_an_empty_list_of_documents(tmp_path):
    message = "documents is empty; it must have at least one document"
    assert error_of(write_tokens, [], TOKENIZER, tmp_path / "tokens") == message


@pytest.mark.parametrize("damage", ["missing", "cut", "text", "empty", "other"])
def test_an_invalid_token_file_is_rejected(tmp_path, damage):
    path = tmp_path / "tokens"
    write_tokens(DOCUMENTS, TOKENIZER, path)
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(
            {"cut": content[:-1], "text": b"text", "empty": b"", "other": b"[]" + content}[damage]
        )
    message = f"{path} is not a token file; create one with write_tokens"
    assert error_of(open_tokens, path) == message
