"""Handmade sentencepiece files are read correctly or refused."""

import json
import struct

import pytest

from jaxformer.hub.tokenizers.files import read_tokenizer
from jaxformer.hub.tokenizers.sentencepiece import read_unigram

PIECES = (
    ("<unk>", 0.0, 2),
    ("</s>", 0.0, 3),
    ("▁the", -1.0, 1),
    ("▁", -3.0, 1),
    ("t", -4.0, 1),
    ("h", -4.0, 1),
    ("e", -4.0, 1),
    ("▁tide", -2.0, 1),
)


def field(number: int, value) -> bytes:
    """Encodes a field of a protocol buffer: an integer below 128, a float, or up to 127 bytes."""
    if isinstance(value, int):
        return bytes([number << 3, value])
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    return bytes([number << 3 | 2, len(value)]) + value


def model(pieces=PIECES, kind: int = 1) -> bytes:
    whole = b"".join(
        field(1, field(1, text.encode()) + field(2, score) + field(3, type_))
        for text, score, type_ in pieces
    )
    return whole + field(2, field(3, kind)) + field(3, field(3, 1) + field(4, 1))


def folder_of(tmp_path, data: bytes):
    (tmp_path / "spiece.model").write_bytes(data)
    (tmp_path / "config.json").write_text('{"model_type": "t5", "eos_token_id": 1}')
    return tmp_path


def test_sentencepiece_encoding_chooses_the_most_probable_pieces(tmp_path):
    tokenizer = read_tokenizer(folder_of(tmp_path, model()))
    assert tokenizer.encode_source("  the   tide het") == [2, 7, 3, 5, 6, 4, 1]
    assert tokenizer.decode([2, 7, 1]) == "the tide"
    assert tokenizer.vocab_size == len(PIECES) + 100


def test_truncated_sentencepiece_file_is_rejected_or_has_fewer_pieces(tmp_path):
    """It is valid only if it ends between two pieces."""
    path = tmp_path / "spiece.model"
    for size in range(1, len(model())):
        path.write_bytes(model()[:size])
        try:
            found = read_unigram(path).pieces
        except ValueError as error:
            assert str(path) in str(error) and len(str(error).splitlines()) == 1
        else:
            assert found == PIECES[: len(found)]


REFUSED = {
    "of another kind": (model(kind=2), "not a unigram model"),
    "no unknown token": (model(PIECES[1:]), "one unknown token"),
    "text is no UTF-8": (model() + field(1, field(1, b"\xff")), "damaged"),
    "an endless integer": (b"\xff" * 64, "damaged"),
    "an unknown wire": (b"\x0f\x00", "damaged"),
    "two unknown tokens": (model((*PIECES, ("<other>", 0.0, 2))), "one unknown token"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_damaged_sentencepiece_file_is_rejected(wrong, tmp_path):
    data, said = REFUSED[wrong]
    with pytest.raises(ValueError, match=said) as error:
        read_tokenizer(folder_of(tmp_path, data))
    assert "spiece.model" in str(error.value) and len(str(error.value).splitlines()) == 1


def test_vocabulary_ids_of_translation_model_must_have_no_gaps(tmp_path):
    (tmp_path / "source.spm").write_bytes(model())
    (tmp_path / "vocab.json").write_text(json.dumps({"<unk>": 0, "</s>": 1, "▁the": 3}))
    (tmp_path / "config.json").write_text('{"model_type": "marian"}')
    with pytest.raises(ValueError, match=r"vocab\.json: the ids"):
        read_tokenizer(tmp_path)
