"""The tokenizer is lossless and deterministic, and streams whole characters."""

import itertools
import os
import subprocess
import sys

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from jaxformer.artifacts import byte_tokenizer as tokenizer_module
from jaxformer.artifacts.byte_tokenizer import END_OF_TEXT, MASK, ByteTokenizer, StreamDecoder
from tests.errors import error_of

CORPUS = [
    "def train(texts, size):\n    return texts\n" * 20,
    "the cat – the café, 猫と犬 😀😀\r\n'twas <a> longer #sentence, of which 1234 words are learnt"
    * 20,
]
LEARNT = ByteTokenizer.train(CORPUS, 400)
BYTES = ByteTokenizer.train(CORPUS, 257)
MASKED = ByteTokenizer.train([*CORPUS, MASK * 50], 400, mask=True)

# Nothing is compiled here, so each case is cheap.
many_cases = settings(max_examples=5 * settings().max_examples)

# In addition to arbitrary text: words that have merges, and text that a normalizer would change.
hard = st.sampled_from(
    ["the café", "  ", "\r\n", " 😀", "猫と", "'re", END_OF_TEXT, "cafe\u0301", "\u212b", "ﬁ", "\0"]
)
texts = st.lists(st.one_of(st.text(), hard)).map("".join)
ids = st.lists(st.integers(0, LEARNT.vocab_size - 1))


@many_cases
@given(texts)
def test_decoding_inverts_encoding(text):
    for tokenizer in (LEARNT, BYTES):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@many_cases
@given(texts)
def test_end_of_text_token_never_results_from_encoding(text):
    for tokenizer in (LEARNT, BYTES):
        assert tokenizer.end_of_text not in tokenizer.encode(text + END_OF_TEXT + text)


@many_cases
@given(texts)
def test_tokenizer_without_merges_encodes_each_byte_as_one_token(text):
    encoded = BYTES.encode(text)
    assert b"".join(map(BYTES.token_bytes, encoded)) == text.encode()
    assert len(encoded) == len(text.encode())


@many_cases
@given(st.lists(texts))
def test_encode_many_equals_encoding_each_text(many):
    assert LEARNT.encode_many(many) == [LEARNT.encode(text) for text in many]


@many_cases
@given(texts, st.integers(1, 5), st.integers(1, 9))
def test_encoding_text_that_arrives_in_pieces_gives_the_tokens_of_the_whole_text(
    text, piece_length, part
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "_PIECE_LENGTH", piece_length)
        assert "".join(LEARNT.pieces([text])) == text
        parts = (text[at : at + part] for at in range(0, len(text), part))
        arriving = LEARNT.encode_many(LEARNT.pieces(parts))
        in_pieces = LEARNT.encode(text)
    assert [token for ids in arriving for token in ids] == in_pieces
    assert in_pieces == LEARNT._backend.encode(text).ids


def test_long_texts_are_cut_into_pieces_before_encoding(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "_PIECE_LENGTH", 8)
    assert list(LEARNT.pieces(["one two three  four five"])) == ["one two three", "  four five"]
    assert list(LEARNT.pieces(["一二三四五六七八九\n十"])) == ["一二三四五六七八九", "\n十"]
    assert list(LEARNT.pieces(["x" * 100])) == ["x" * 100]


@many_cases
@given(ids)
def test_decoded_text_equals_that_of_the_tokenizers_library(sequence):
    assert LEARNT.decode(sequence) == LEARNT._backend.decode(sequence)


def test_decoding_skips_end_of_text_tokens():
    end = LEARNT.end_of_text
    assert LEARNT.decode([end, *LEARNT.encode("a b"), end, *LEARNT.encode("c"), end]) == "a bc"


@many_cases
@given(st.lists(ids))
def test_streamed_text_equals_decoded_text_for_any_division_of_ids(parts):
    stream = StreamDecoder(LEARNT)
    for _ in range(2):  # a flushed decoder can be reused
        given_out = "".join(stream.push(part) for part in parts) + stream.flush()
        assert given_out == LEARNT.decode(itertools.chain(*parts))


@many_cases
@given(texts)
def test_stream_decoder_returns_only_whole_characters(text):
    stream = StreamDecoder(BYTES)
    given_out = [stream.push([token]) for token in BYTES.encode(text)]
    assert [part for part in given_out if part] == list(text)
    assert stream.flush() == ""


def test_stream_decoder_replaces_incomplete_character_only_at_flush():
    stream = StreamDecoder(BYTES)
    assert stream.push(BYTES.encode("a😀")[:-1]) == "a"
    assert stream.flush() == "\ufffd"


@pytest.mark.parametrize("vocab_size", [257, 300, 340])
def test_vocabulary_contains_every_byte_and_the_end_of_text_token(vocab_size):
    tokenizer = ByteTokenizer.train(CORPUS, vocab_size)
    assert tokenizer.vocab_size == vocab_size
    assert tokenizer.end_of_text == 0
    assert {tokenizer.token_bytes(token) for token in range(1, 257)} == {
        bytes([byte]) for byte in range(256)
    }


@many_cases
@given(st.lists(st.one_of(texts, st.just(MASK), st.just(MASK[:4]))).map("".join))
def test_mask_token_never_results_from_encoding(text):
    """The mask token never results from encoding, even if the training texts spell it out."""
    for tokenizer in (MASKED, ByteTokenizer.train([MASK], 258, mask=True)):
        assert tokenizer.mask_token == tokenizer.vocab_size - 1
        ids = tokenizer.encode(text)
        assert tokenizer.mask_token not in ids and tokenizer.decode(ids) == text
        assert tokenizer.decode([tokenizer.mask_token, *ids]) == text
    assert LEARNT.mask_token is None and MASKED.vocab_size <= 400


def test_small_corpus_gives_a_smaller_vocabulary_than_requested():
    assert ByteTokenizer.train(["ab ab ab"], 10_000).vocab_size == 257 + 2  # "ab" and " ab"
    assert ByteTokenizer.train([], 10_000).vocab_size == 257


def test_tokenizer_training_is_deterministic_across_processes():
    script = (
        "from jaxformer.artifacts.byte_tokenizer import ByteTokenizer;"
        f"print(ByteTokenizer.train({CORPUS!r}, 400).fingerprint)"
    )
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == [LEARNT.fingerprint]
    assert run.stderr == ""


def test_tokenizer_training_splits_long_lines_without_spaces():
    tokenizer = ByteTokenizer.train(["x" * 300_000], 300)
    assert max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)) <= 64


def test_saved_tokenizer_is_loaded_unchanged(tmp_path):
    LEARNT.save(tmp_path / "tokenizer.json")
    loaded = ByteTokenizer.load(tmp_path / "tokenizer.json")
    text = f"the café {END_OF_TEXT} 😀"
    assert loaded.encode(text) == LEARNT.encode(text)
    assert (loaded.fingerprint, loaded.vocab_size) == (LEARNT.fingerprint, LEARNT.vocab_size)
    assert loaded.fingerprint != BYTES.fingerprint
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_text_with_added_tokens_is_decoded_unchanged():
    backend = tokenizers.Tokenizer.from_str(LEARNT._backend.to_str())
    backend.add_tokens(["\n\n\n", "é é"])
    backend.add_special_tokens(["<|user|>"])
    tokenizer = ByteTokenizer(backend)
    text = "a\n\n\né é<|user|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.token_bytes(backend.token_to_id("\n\n\n")) == b"\n\n\n"
    assert tokenizer.decode([backend.token_to_id("<|user|>")]) == ""


def test_tokenizer_training_rejects_vocab_size_below_the_number_of_bytes():
    assert error_of(ByteTokenizer.train, ["a"], 256).startswith("vocab_size: 256 is too small")


@pytest.mark.parametrize("token", [-1, LEARNT.vocab_size])
def test_decoding_rejects_ids_outside_the_vocabulary(token):
    message = f"ids: {token} is not a token id; it must be 0 to {LEARNT.vocab_size - 1}"
    assert error_of(LEARNT.decode, [1, token]) == message
    assert error_of(StreamDecoder(LEARNT).push, [token]) == message


def test_encoding_rejects_lone_surrogates():
    assert error_of(LEARNT.encode, "a\ud800").startswith("the text cannot be encoded as UTF-8: ")


@pytest.mark.parametrize("content", [None, "", "{}", "[1, 2", "\udcff"])
def test_load_error_names_missing_or_malformed_tokenizer_file(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content.encode(errors="surrogateescape"))
    assert error_of(ByteTokenizer.load, path).startswith(
        f"{path} cannot be read as a byte-level BPE"
    )


def test_tokenizer_other_than_byte_level_bpe_is_rejected():
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    assert error_of(ByteTokenizer, words) == "tokenizer: its model is WordLevel, not BPE"
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    assert error_of(ByteTokenizer, backend) == "tokenizer: its decoder is NoneType, not ByteLevel"
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert error_of(ByteTokenizer, backend).startswith(
        "tokenizer: it has no end-of-text token (<|endoftext|> or "
    )
    backend = tokenizers.Tokenizer(models.BPE({"猫": 0}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    assert (
        error_of(ByteTokenizer, backend)
        == "tokenizer: token '猫' contains a character that does not represent a byte"
    )
