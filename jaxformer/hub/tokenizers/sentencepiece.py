"""Reader of unigram models from sentencepiece files, for the `tokenizers` library.

A sentencepiece file has the extension `.model` or `.spm`. The file contains the tokens (pieces),
the type of the model, and the normalization of texts.

Reference: Kudo and Richardson 2018, "SentencePiece".
"""

import re
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from jaxformer.artifacts.untrusted import MOST_BYTES
from jaxformer.optional import import_optional

# This value of trainer_spec.model_type means a unigram model.
_UNIGRAM = 1
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
# This score is so low that Marian's source tokenizer uses a piece of the target vocabulary only if
# no piece of the source vocabulary matches.
_NEVER = -1e4
_LANGUAGE = re.compile(r">>.+<<")


class Piece(NamedTuple):
    """A token with its score (log-probability) and its type, where 1 means a normal token."""

    text: str
    score: float
    kind: int


class Unigram(NamedTuple):
    """Content of a sentencepiece file with a unigram model.

    Attributes:
        pieces: The tokens, ordered by id.
        charsmap: Compiled replacements of characters in texts; may be empty.
        add_prefix: Whether to add a space before a text.
        merge_spaces: Whether to remove leading, trailing and repeated spaces.
    """

    pieces: tuple[Piece, ...]
    charsmap: bytes
    add_prefix: bool
    merge_spaces: bool


def read_unigram(path: Path) -> Unigram:
    """Reads a sentencepiece file, which is a protocol buffer.

    Raises:
        ValueError: The file is too large or damaged, its model is not a unigram model, or
            sentencepiece is not installed.
    """
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes; the file may have at most {MOST_BYTES} bytes"
        )
    schema = "sentencepiece.sentencepiece_model_pb2"
    content = import_optional(schema, f"read {path}", "sentencepiece").ModelProto()
    try:
        content.ParseFromString(path.read_bytes())
        pieces = tuple(Piece(x.piece, x.score, x.type) for x in content.pieces)
    # Only private modules of protobuf contain the class DecodeError.
    except Exception as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    # If a piece is not UTF-8, protobuf returns it as `bytes` instead of `str`.
    if not all(isinstance(piece.text, str) for piece in pieces):
        raise ValueError(f"{path} is damaged: a piece is not UTF-8")
    if content.trainer_spec.model_type != _UNIGRAM:
        raise ValueError(f"{path} is not a unigram model; only unigram models are supported")
    if sum(piece.kind == _UNKNOWN for piece in pieces) != 1:
        raise ValueError(f"{path} must contain exactly one unknown token")
    normalizer = content.normalizer_spec
    add_prefix, merge_spaces = normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces
    return Unigram(pieces, normalizer.precompiled_charsmap, add_prefix, merge_spaces)


def t5_tokenizer(path: Path, num_sentinels: int = 100) -> tokenizers.Tokenizer:
    """Returns the tokenizer of T5.

    The vocabulary of the tokenizer consists of the pieces in the file and, after them, the tokens
    <extra_id_99>, …, <extra_id_0>.

    Args:
        path: The file spiece.model.
        num_sentinels: The number of tokens <extra_id_…>.
    """
    model = read_unigram(path)
    sentinels = [Piece(f"<extra_id_{n}>", 0.0, _CONTROL) for n in reversed(range(num_sentinels))]
    return _backend(model, [*model.pieces, *sentinels])


def marian_tokenizer(path: Path, ids: dict[str, int]) -> tokenizers.Tokenizer:
    """Returns Marian's tokenizer for source texts.

    The pieces come from source.spm, and their ids from vocab.json, which also contains the pieces
    of target texts. The tokenizer uses the pieces of target texts only for characters that the
    pieces of source.spm do not cover. A character that no piece covers becomes the unknown token.

    Args:
        path: The file source.spm.
        ids: The content of vocab.json.
    """
    model = read_unigram(path)
    known = {piece.text: piece for piece in model.pieces}
    if sorted(ids.values()) != list(range(len(ids))):
        raise ValueError(f"{path.parent / 'vocab.json'}: the ids must be 0 to {len(ids) - 1}")
    pieces = []
    for text in sorted(ids, key=ids.__getitem__):
        kind = _USER_DEFINED if _LANGUAGE.fullmatch(text) else _CONTROL if text == "<pad>" else 1
        pieces.append(known.get(text, Piece(text, _NEVER, kind)))
    return _backend(model, pieces)


def _backend(model: Unigram, pieces: list[Piece]) -> tokenizers.Tokenizer:
    """Builds a tokenizer that appends </s> to a text; `pieces` are ordered by id."""
    (unknown,) = (n for n, piece in enumerate(pieces) if piece.kind == _UNKNOWN)
    has_bytes = any(piece.kind == _BYTE for piece in pieces)
    scores = [(piece.text, piece.score) for piece in pieces]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(scores, unknown, has_bytes))
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.merge_spaces:
        # The normalizer `Strip` would also remove other spaces, such as U+0085, which sentencepiece
        # preserves.
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
