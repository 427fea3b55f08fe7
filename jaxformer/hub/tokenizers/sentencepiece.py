"""Reader of sentencepiece's unigram models, for the `tokenizers` library.

A `.model` or `.spm` file is a protocol buffer: a sequence of fields, each a number and a value.
Three of its messages are read: the pieces, the kind of model, and the normalization of text.

Reference: Kudo and Richardson 2018, "SentencePiece".
"""

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from jaxformer.artifacts.untrusted import MOST_BYTES

_UNIGRAM = 1  # trainer_spec.model_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # types of pieces; 1 is an ordinary piece
_NEVER = -1e4  # score of a target piece, which is used only where no source piece fits
_LANGUAGE = re.compile(r">>.+<<")


class Piece(NamedTuple):
    """A token with its score (log-probability) and its kind (1: an ordinary piece)."""

    text: str
    score: float
    kind: int


class Unigram(NamedTuple):
    """Content of a file. `charsmap` maps characters to replacements; empty: no replacements."""

    pieces: tuple[Piece, ...]
    charsmap: bytes
    add_prefix: bool
    merge_spaces: bool


def read_unigram(path: Path) -> Unigram:
    """Reads a sentencepiece file.

    Raises:
      ValueError: If the file is too large or damaged, or its model is not a unigram model.
    """
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; at most {MOST_BYTES} are read")
    try:
        fields = list(_fields(path.read_bytes()))
        pieces = [_piece(value) for number, value in fields if number == 1]
        trainer, normalizer = (dict(_fields(dict(fields).get(x, b""))) for x in (2, 3))
    except (LookupError, TypeError, AttributeError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if trainer.get(3, _UNIGRAM) != _UNIGRAM:
        raise ValueError(f"{path} is not a unigram model")
    if sum(piece.kind == _UNKNOWN for piece in pieces) != 1:
        raise ValueError(f"{path} must have one unknown token")
    add_prefix, merge_spaces = (bool(normalizer.get(x, 1)) for x in (3, 4))
    return Unigram(tuple(pieces), normalizer.get(2, b""), add_prefix, merge_spaces)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields (number, value) of each field.

    The value is an integer, or bytes: a number of 4 or 8 bytes, a text or a message.
    """
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
    """Decodes the integer at `at` (7 bits per byte, lowest first); also returns the next offset."""
    value = 0
    for place in range(10):
        byte = data[at + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise IndexError("an integer has more than 10 bytes")


def _piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
    return Piece(fields.get(1, b"").decode(), score, fields.get(3, 1))


def of_t5(path: Path, num_sentinels: int = 100) -> tokenizers.Tokenizer:
    """Returns the tokenizer of T5 and relatives: the pieces, then <extra_id_99> … <extra_id_0>."""
    model = read_unigram(path)
    sentinels = [Piece(f"<extra_id_{n}>", 0.0, _CONTROL) for n in reversed(range(num_sentinels))]
    return _backend(model, [*model.pieces, *sentinels])


def of_marian(path: Path, ids: dict[str, int]) -> tokenizers.Tokenizer:
    """Returns Marian's tokenizer of sources.

    The pieces are those of source.spm, with the ids of vocab.json. That file holds the pieces of
    targets too. A character that only target pieces contain is encoded as the target's piece, not
    as the unknown token.

    Args:
      path: The file source.spm.
      ids: The content of vocab.json.
    """
    model = read_unigram(path)
    known = {piece.text: piece for piece in model.pieces}
    if sorted(ids.values()) != list(range(len(ids))):
        raise ValueError(f"{path.parent / 'vocab.json'}: the ids are not 0 … {len(ids) - 1}")
    pieces = []
    for text in sorted(ids, key=ids.__getitem__):
        kind = _USER_DEFINED if _LANGUAGE.fullmatch(text) else _CONTROL if text == "<pad>" else 1
        pieces.append(known.get(text, Piece(text, _NEVER, kind)))
    return _backend(model, pieces)


def _backend(model: Unigram, pieces: list[Piece]) -> tokenizers.Tokenizer:
    """Builds a tokenizer from the pieces, ordered by id, that appends </s> to a text."""
    (unknown,) = (n for n, piece in enumerate(pieces) if piece.kind == _UNKNOWN)
    has_bytes = any(piece.kind == _BYTE for piece in pieces)
    scores = [(piece.text, piece.score) for piece in pieces]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(scores, unknown, has_bytes))
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.merge_spaces:
        # Strip() would remove other spaces too, such as U+0085, that sentencepiece keeps.
        for pattern, text in ((" {2,}", " "), (r"\A | \z", "")):
            steps.append(normalizers.Replace(tokenizers.Regex(pattern), text))
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
