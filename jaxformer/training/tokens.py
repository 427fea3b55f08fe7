"""A tokenised text in a memory-mapped file.

A stream of tokens is ``[end_of_text] + document + [end_of_text] + document + ...``: the token in
front of a document lets its first byte be predicted, and ends the document before. By another's
tokenizer it is what that begins a text with, and may end one with another.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.training.corpus import Document

_FORMAT = "jaxformer tokens 1"
_HEADER_BYTES = 1024
_GROUP_CHARACTERS = 1 << 22


class TokenStream(NamedTuple):
    """A tokenised corpus and what it was made from."""

    ids: np.ndarray  # uint16 or uint32 [num_tokens], mapped from disk
    num_documents: int
    num_bytes: int  # UTF-8 bytes of text, without the ends of text
    tokenizer: str  # fingerprint of the tokenizer
    documents: str  # fingerprint of the documents, in order

    @property
    def num_targets(self) -> int:
        """Tokens that are predicted: all but each document's first, the end of the one before."""
        return len(self.ids) - self.num_documents


def write_tokens(
    documents: Iterable[Document],
    tokenizer: Tokenizer | Subwords,
    path: str | Path,
    after: Sequence[int] = (),
) -> TokenStream:
    """Tokenises documents into a file at ``path``, or reuses it if it was made from the same.
    ``after``: ids that stand after each.

    The file is a line of JSON padded to 1024 bytes, then the ids, little-endian, in two bytes
    each while the vocabulary fits in them and in four otherwise. It appears whole or not at all.

    Errors: ``ValueError`` if there are no documents.
    """
    documents = list(documents)
    if not documents:
        raise ValueError("documents: there are none to tokenise")
    header: dict[str, Any] = {
        "format": _FORMAT,
        "dtype": "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4",
        "num_documents": len(documents),
        "num_bytes": sum(document.num_bytes for document in documents),
        "tokenizer": tokenizer.fingerprint,
        "documents": fingerprint(document.text.encode() for document in documents),
    }
    if after:
        header["after"] = list(after)
    if (existing := _read_header(path)) and header.items() <= existing.items():
        return open_tokens(path)

    unfinished = Path(f"{path}.unfinished-{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(b" " * _HEADER_BYTES)
            num_tokens = 0
            for ids in _encode(documents, tokenizer, after):
                np.asarray(ids, header["dtype"]).tofile(file)
                num_tokens += len(ids)
            file.seek(0)
            line = json.dumps({**header, "num_tokens": num_tokens})
            file.write(line.encode().ljust(_HEADER_BYTES - 1) + b"\n")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return open_tokens(path)


def open_tokens(path: str | Path) -> TokenStream:
    """Maps a file of ``write_tokens`` into memory, read only.

    Errors: ``ValueError`` naming ``path`` if it is missing, of another kind, or cut short.
    """
    header = _read_header(path)
    if header is None:
        raise ValueError(f"{path}: not a file of tokens; write_tokens makes one")
    return TokenStream(
        ids=np.memmap(path, header["dtype"], "r", _HEADER_BYTES, (header["num_tokens"],)),
        **{name: header[name] for name in TokenStream._fields[1:]},
    )


def _encode(documents: Sequence[Document], tokenizer, after) -> Iterator[list[int]]:
    """The stream of tokens, in parts: some MB of text at a time, whatever the documents' sizes."""
    group: list[tuple[bool, bool, str]] = []
    size = 0
    for document in documents:
        pieces = list(tokenizer.pieces(document.text))
        for number, piece in enumerate(pieces, 1):
            group.append((number == 1, number == len(pieces), piece))
            size += len(piece)
            if size > _GROUP_CHARACTERS:
                yield from _encode_group(group, tokenizer, after)
                group, size = [], 0
    yield from _encode_group(group, tokenizer, after)


def _encode_group(group, tokenizer, after) -> Iterator[list[int]]:
    """group: (whether it begins a document, whether it ends one, text)."""
    encoded = tokenizer.encode_many(piece for *_, piece in group)
    for (begins, ends, _), ids in zip(group, encoded, strict=True):
        yield [*(tokenizer.opening if begins else ()), *ids, *(after if ends else ())]


def fingerprint(parts: Iterable[Any]) -> str:
    """Digest of the parts and of where they are divided."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(hashlib.blake2b(part, digest_size=16).digest())
    return digest.hexdigest()


def _read_header(path: str | Path) -> dict[str, Any] | None:
    """The header of a file of tokens, or None if there is no such file of the size it states."""
    try:
        with open(path, "rb") as file:
            header = json.loads(file.read(_HEADER_BYTES))
            size = _HEADER_BYTES + np.dtype(header["dtype"]).itemsize * header["num_tokens"]
            if header["format"] == _FORMAT and os.fstat(file.fileno()).st_size == size:
                return header
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None
