"""A tokenised text in a memory-mapped file.

A stream of tokens is ``[end_of_text] + document + [end_of_text] + document + ...``: the token in
front of a document lets its first byte be predicted, and ends the document before. By another's
tokenizer it is what that begins a text with, and may end one with another.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer.artifacts.run import write_whole
from jaxformer.artifacts.subwords import Subwords
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.training.data.documents import Document, measure

_FORMAT = "jaxformer tokens 1"
_HEADER_BYTES = 1024
_GROUP_CHARACTERS = 1 << 21
_THREADS = 2  # groups at work at once: one's ids are gathered while another's are found


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
    on_encoded: Callable[[int], None] = lambda num_bytes: None,
    *,
    after: Sequence[int] = (),
) -> TokenStream:
    """Tokenises documents into a file at ``path``, or reuses it if it was made from the same.
    ``after``: ids that stand after each.

    The file is a line of JSON padded to 1024 bytes, then the ids, little-endian, in two bytes
    each while the vocabulary fits in them and in four otherwise. It appears whole or not at all:
    until then it is ``path``.unfinished, and a start after one that was ended goes on there.

    documents: are walked twice, and only a few MB of them are in memory. on_encoded: is told how
    many bytes of text are done.

    Errors: ``ValueError`` if there are no documents.
    """
    header = _describe(documents, tokenizer, after)
    if (existing := _read_header(path)) and header.items() <= existing.items():
        return open_tokens(path)
    unfinished, journal = Path(f"{path}.unfinished"), Path(f"{path}.unfinished.json")
    done = _Progress.read(journal, header, unfinished)
    with unfinished.open("r+b" if done.groups else "wb") as file:
        file.seek(_HEADER_BYTES + done.num_tokens * np.dtype(header["dtype"]).itemsize)
        file.truncate()
        for progress, ids in _encode(documents, tokenizer, after, done):
            np.asarray(ids, header["dtype"]).tofile(file)
            os.fsync(file.fileno())
            write_whole(journal, json.dumps({**progress._asdict(), "header": header}))
            on_encoded(progress.num_bytes)
            done = progress
        file.seek(0)
        line = json.dumps({**header, "num_tokens": done.num_tokens})
        file.write(line.encode().ljust(_HEADER_BYTES - 1) + b"\n")
    os.replace(unfinished, path)
    journal.unlink()
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


def _describe(documents: Iterable[Document], tokenizer, after: Sequence[int]) -> dict[str, Any]:
    """The header of their file of tokens, but for how many tokens there are."""
    number = num_bytes = 0
    digest = hashlib.blake2b(digest_size=16)  # that of `fingerprint`
    for measured in map(measure, documents):
        number += 1
        num_bytes += measured.num_bytes
        digest.update(measured.digest)
    if not number:
        raise ValueError("documents: there are none to tokenise")
    return {
        "format": _FORMAT,
        "dtype": "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4",
        "num_documents": number,
        "num_bytes": num_bytes,
        "tokenizer": tokenizer.fingerprint,
        "documents": digest.hexdigest(),
        **({"after": list(after)} if after else {}),
    }


class _Progress(NamedTuple):
    """How much has been written: groups of pieces, and the tokens and bytes of text in them."""

    groups: int = 0
    num_tokens: int = 0
    num_bytes: int = 0

    @classmethod
    def read(cls, journal: Path, header: dict[str, Any], unfinished: Path) -> _Progress:
        """What an earlier start has written of the same file, none if there was no such start."""
        try:
            found = json.loads(journal.read_text())
            done = cls(**{name: found[name] for name in cls._fields})
            needed = _HEADER_BYTES + done.num_tokens * np.dtype(header["dtype"]).itemsize
            if found["header"] == header and unfinished.stat().st_size >= needed:
                return done
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return cls()


def _encode(
    documents: Iterable[Document], tokenizer, after: Sequence[int], done: _Progress
) -> Iterator[tuple[_Progress, np.ndarray]]:
    """The tokens of each group that is not done yet, and how much is done with it."""
    waiting: deque[tuple[int, Future]] = deque()

    def take(done: _Progress) -> tuple[_Progress, np.ndarray]:
        num_bytes, future = waiting.popleft()
        ids = future.result()
        groups, num_tokens = done.groups + 1, done.num_tokens + len(ids)
        return _Progress(groups, num_tokens, done.num_bytes + num_bytes), ids

    with ThreadPoolExecutor(_THREADS) as pool:
        for group in islice(_groups(documents, tokenizer), done.groups, None):
            num_bytes = sum(len(piece.encode()) for *_, piece in group)
            waiting.append((num_bytes, pool.submit(_encode_group, group, tokenizer, after)))
            if len(waiting) > _THREADS:
                done, ids = take(done)
                yield done, ids
        while waiting:
            done, ids = take(done)
            yield done, ids


def _groups(documents: Iterable[Document], tokenizer) -> Iterator[list]:
    """The text in groups of (whether it begins a document, whether it ends one, piece): some MB
    each, whatever the documents' sizes."""
    group, size = [], 0
    for document in documents:
        for begins, ends, piece in _marked(tokenizer.pieces(document.pieces())):
            group.append((begins, ends, piece))
            size += len(piece)
            if size > _GROUP_CHARACTERS:
                yield group
                group, size = [], 0
    if group:
        yield group


def _marked(pieces: Iterable[str]) -> Iterator[tuple[bool, bool, str]]:
    """Each piece, and whether it is the first, and the last."""
    begins, held = True, None
    for piece in pieces:
        if held is not None:
            yield begins, False, held
            begins = False
        held = piece
    if held is not None:
        yield begins, True, held


def _encode_group(group, tokenizer, after: Sequence[int]) -> np.ndarray:
    """The tokenizer spreads a group over threads of its own, and Python waits meanwhile."""
    encoded = tokenizer.encode_many(piece for *_, piece in group)
    ids = (
        [*(tokenizer.opening if begins else ()), *ids, *(after if ends else ())]
        for (begins, ends, _), ids in zip(group, encoded, strict=True)
    )
    return np.concatenate([np.asarray(some, np.uint32) for some in ids])


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
