"""Unigram models of sentencepiece (Kudo and Richardson 2018), read into the `tokenizers` library.

A `.model` or `.spm` file is a protocol buffer: fields of a number and a value, one after the other.
Three of its messages are looked at: the pieces, what kind of model it is, and how text is
normalized.
"""

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from jaxformer.artifacts.subwords import MOST_BYTES

_UNIGRAM = 1  # trainer_spec.model_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # types of pieces; 1 is an ordinary one
_NEVER = -1e4  # the score of a piece that is read and never chosen
_LANGUAGE = re.compile(r">>.+<<")


class Piece(NamedTuple):
    """A token; score: its log-probability; kind: 1 is an ordinary one."""

    text: str
    score: float
    kind: int


class Unigram(NamedTuple):
    """What a file holds. charsmap: how characters are replaced, empty: not at all."""

    pieces: tuple[Piece, ...]
    charsmap: bytes
    add_prefix: bool
    merge_spaces: bool


def read_unigram(path: Path) -> Unigram:
    """ValueError if the file is damaged or its model is none of unigrams."""
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; at most {MOST_BYTES} are read")
    try:
        fields = list(_fields(path.read_bytes()))
        pieces = [_piece(value) for number, value in fields if number == 1]
        trainer, normalizer = (dict(_fields(dict(fields).get(x, b""))) for x in (2, 3))
    except (LookupError, TypeError, AttributeError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if trainer.get(3, _UNIGRAM) != _UNIGRAM:
        raise ValueError(f"{path} is of another kind than unigram")
    if sum(piece.kind == _UNKNOWN for piece in pieces) != 1:
        raise ValueError(f"{path} must have one unknown token")
    return Unigram(
        tuple(pieces),
        normalizer.get(2, b""),
        bool(normalizer.get(3, 1)),
        bool(normalizer.get(4, 1)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field: an integer, or bytes (a number of 4 or 8 bytes, a text, a
    message)."""
    at = 0
    while at < len(data):
        key, at = _integer(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _integer(data, at)
        else:
            size, at = _integer(data, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
            if at + size > len(data):
                raise IndexError(f"a field of {size} bytes goes beyond its end")
            value, at = data[at : at + size], at + size
        yield number, value


def _integer(data: bytes, at: int) -> tuple[int, int]:
    """(an integer of 7 bits a byte, the lowest first, where the next field begins)."""
    value = 0
    for place in range(10):
        byte = data[at + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise IndexError("an integer has more than 10 bytes")


def _piece(data: bytes) -> Piece:
    found = dict(_fields(data))
    (score,) = struct.unpack("<f", found.get(2, bytes(4)))
    return Piece(found.get(1, b"").decode(), score, found.get(3, 1))


def of_t5(path: Path, num_sentinels: int = 100) -> tokenizers.Tokenizer:
    """T5's tokenizer and its relatives': the pieces, then <extra_id_99> … <extra_id_0>."""
    model = read_unigram(path)
    sentinels = [Piece(f"<extra_id_{n}>", 0.0, _CONTROL) for n in reversed(range(num_sentinels))]
    return _backend(model, [*model.pieces, *sentinels])


def of_marian(path: Path, ids: dict[str, int]) -> tokenizers.Tokenizer:
    """Marian's tokenizer of sources: the pieces of source.spm by the ids of vocab.json, which holds
    those of targets too. Where a source has a character of targets alone, its pieces are that id
    and not the unknown token."""
    model = read_unigram(path)
    known = {piece.text: piece for piece in model.pieces}
    if sorted(ids.values()) != list(range(len(ids))):
        raise ValueError(f"{path.parent / 'vocab.json'}: the ids are not 0 … {len(ids) - 1}")
    pieces = []
    for text in sorted(ids, key=ids.get):
        kind = _USER_DEFINED if _LANGUAGE.fullmatch(text) else _CONTROL if text == "<pad>" else 1
        pieces.append(known.get(text, Piece(text, _NEVER, kind)))
    return _backend(model, pieces)


def _backend(model: Unigram, pieces: list[Piece]) -> tokenizers.Tokenizer:
    """Pieces by their ids, with </s> after a text."""
    (unknown,) = (n for n, piece in enumerate(pieces) if piece.kind == _UNKNOWN)
    has_bytes = any(piece.kind == _BYTE for piece in pieces)
    scores = [(piece.text, piece.score) for piece in pieces]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(scores, unknown, has_bytes))
    steps = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.merge_spaces:
        steps += [normalizers.Replace(tokenizers.Regex(" {2,}"), " "), normalizers.Strip()]
    backend.normalizer = normalizers.Sequence(steps)
    spaces = {"replacement": "▁", "prepend_scheme": "always" if model.add_prefix else "never"}
    backend.pre_tokenizer = pre_tokenizers.Metaspace(**spaces)
    backend.decoder = decoders.Metaspace(**spaces)
    backend.add_special_tokens([x.text for x in pieces if x.kind in (_UNKNOWN, _CONTROL)])
    backend.add_tokens([piece.text for piece in pieces if piece.kind == _USER_DEFINED])
    end = backend.token_to_id("</s>")
    if end is not None:
        backend.post_processor = processors.TemplateProcessing("$A </s>", None, [("</s>", end)])
    return backend
