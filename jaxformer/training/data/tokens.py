"""Tokenised text in memory-mapped files.

A stream of tokens is ``opening + document + opening + document + ...``. The opening tokens let a
model predict the first token of a document. A `ByteTokenizer` has one opening token, the end of
text, which also ends the previous document. Imported tokenizers define other opening tokens, and
may add tokens after a document.

The file stores the start of each document. The tokens alone do not determine it: a config.json may
define an ordinary word as the opening token.
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from operator import add
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from jaxformer.artifacts.files import json_text, write_whole
from jaxformer.artifacts.run import RunFolder
from jaxformer.artifacts.saved import run_tokenizer
from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.training.batch import noop
from jaxformer.training.data.documents import AnyDocument, marked, measure

_FORMAT = "jaxformer tokens 2"
_HEADER_BYTES = 1024
_DTYPES = ("<u2", "<u4")
_GROUP_CHARACTERS = 1 << 21
_STARTS = "<i8"
_START_BYTES = np.dtype(_STARTS).itemsize
_THREADS = 2  # groups in progress: one is encoded while the ids of the other are collected

# Of each piece: whether it begins a document, whether it ends one, its text.
Group = list[tuple[bool, bool, str]]


class TokenStream(NamedTuple):
    """The tokens of a corpus, and fingerprints of the text and the tokenizer."""

    ids: np.ndarray  # uint16 or uint32 [num_tokens], mapped from disk
    starts: np.ndarray  # int64 [num_documents]: the index of each document's first token
    num_documents: int
    num_bytes: int  # UTF-8 bytes of the text, without special tokens
    tokenizer: str  # fingerprint of the tokenizer
    documents: str  # fingerprint of the documents, in order

    @property
    def num_targets(self) -> int:
        """Number of predicted tokens: all except the first token of each document."""
        return len(self.ids) - self.num_documents

    def split(self) -> list[np.ndarray]:
        """Returns the tokens of each document, opening tokens included."""
        return np.split(self.ids, self.starts[1:])


def write_tokens(
    documents: Iterable[AnyDocument],
    tokenizer: Tokenizer,
    path: str | Path,
    on_encoded: Callable[[int], None] = noop,
    *,
    after: Sequence[int] = (),
) -> TokenStream:
    """Tokenises documents into a file at ``path``, or reuses a file made from the same documents.

    The file has three parts:

    - a line of JSON, padded to 1024 bytes;
    - the index of each document's first token, little-endian int64;
    - the ids, little-endian, two bytes each if the vocabulary fits in two bytes, else four.

    The file is named ``path``.unfinished until it is complete. A call after an interrupted one
    continues that file.

    Args:
        documents: The documents. They are read twice, with only a few MB in memory.
        tokenizer: Encodes the text.
        path: The file to write.
        on_encoded: Called with the number of bytes of text encoded so far.
        after: Ids to write after each document.

    Returns:
        The stream, mapped from the file.

    Raises:
        ValueError: There are no documents, or they changed between the two reads.
    """
    header = _describe(documents, tokenizer, after)
    if (existing := _read_header(path)) and header.items() <= existing.items():
        return open_tokens(path)
    unfinished, journal = Path(f"{path}.unfinished"), Path(f"{path}.unfinished.json")
    done = _Progress.read(journal, header, unfinished)
    with unfinished.open("r+b" if done.groups else "wb") as file:
        file.truncate(_size(header, done.num_tokens))
        for progress, ids, starts in _encode(documents, tokenizer, after, done):
            file.seek(_HEADER_BYTES + done.num_documents * _START_BYTES)
            np.asarray(done.num_tokens + starts, header["starts"]).tofile(file)
            file.seek(0, os.SEEK_END)
            np.asarray(ids, header["dtype"]).tofile(file)
            os.fsync(file.fileno())
            write_whole(journal, json_text({**progress._asdict(), "header": header}))
            on_encoded(progress.num_bytes)
            done = progress
        if done.num_documents != header["num_documents"]:
            raise ValueError(f"{path}: the documents changed while they were tokenised")
        file.seek(0)
        line = json_text({**header, "num_tokens": done.num_tokens})
        file.write(line.encode().ljust(_HEADER_BYTES - 1) + b"\n")
    os.replace(unfinished, path)
    journal.unlink()
    return open_tokens(path)


def open_tokens(path: str | Path) -> TokenStream:
    """Maps a file of ``write_tokens`` into memory, read only.

    Raises:
        ValueError: The file is missing, truncated or of another format.
    """
    header = _read_header(path)
    if header is None:
        raise ValueError(f"{path}: not a file of tokens; write_tokens makes one")
    ids = np.memmap(path, header["dtype"], "r", _ids_offset(header), (header["num_tokens"],))
    starts = np.memmap(path, header["starts"], "r", _HEADER_BYTES, (header["num_documents"],))
    return TokenStream(ids, starts, **{name: header[name] for name in TokenStream._fields[2:]})


def open_streams(folder: RunFolder, paths: list[Path], tokenizer: Tokenizer) -> list[TokenStream]:
    """Opens files of tokens.

    Raises:
        ValueError: A file was made by another tokenizer than that of the folder.
    """
    streams = [open_tokens(path) for path in paths]
    for path, stream in zip(paths, streams, strict=True):
        if stream.tokenizer != tokenizer.fingerprint:
            raise ValueError(f"{path} was made by another tokenizer than {folder.tokenizer}")
    return streams


def given_tokenizer(folder: RunFolder) -> Tokenizer | None:
    """Returns the tokenizer of the checkpoint from which a run began; None: there is no such one.

    Without it, the run trains a tokenizer.
    """
    began = folder.holds_run and "from" in folder.read_config()
    return run_tokenizer(folder) if began else None


def _ids_offset(header: dict[str, Any]) -> int:
    """Returns the number of bytes before the ids: the header and the table of starts."""
    return _HEADER_BYTES + _START_BYTES * header["num_documents"]


def _size(header: dict[str, Any], num_tokens: int) -> int:
    """Returns the number of bytes of a file up to the end of a number of ids."""
    return _ids_offset(header) + np.dtype(header["dtype"]).itemsize * num_tokens


def _describe(
    documents: Iterable[AnyDocument], tokenizer: Tokenizer, after: Sequence[int]
) -> dict[str, Any]:
    """Returns the header of the documents' token file, without the number of tokens."""
    number = num_bytes = 0
    digest = hashlib.blake2b(digest_size=16)
    for measured in map(measure, documents):
        number += 1
        num_bytes += measured.num_bytes
        digest.update(measured.digest)
    if not number:
        raise ValueError("documents: there are none to tokenise")
    header: dict[str, Any] = {"format": _FORMAT, "dtype": _DTYPES[tokenizer.vocab_size > 1 << 16]}
    header |= {"num_documents": number, "starts": _STARTS, "num_bytes": num_bytes}
    header |= {"tokenizer": tokenizer.fingerprint, "documents": digest.hexdigest()}
    return header | ({"after": list(after)} if after else {})


class _Progress(NamedTuple):
    """Written part of a token file.

    Attributes:
        groups: The number of groups of pieces.
        num_tokens: The tokens in them.
        num_bytes: The bytes of text in them.
        num_documents: The documents that start in them.
    """

    groups: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_documents: int = 0

    @classmethod
    def read(cls, journal: Path, header: dict[str, Any], unfinished: Path) -> Self:
        """Returns the part of the same file that an interrupted call has written."""
        try:
            content = json.loads(journal.read_text())
            done = cls(**{name: content[name] for name in cls._fields})
            needed = _size(header, done.num_tokens)
            if content["header"] == header and unfinished.stat().st_size >= needed:
                return done
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return cls()


def _encode(
    documents: Iterable[AnyDocument], tokenizer: Tokenizer, after: Sequence[int], done: _Progress
) -> Iterator[tuple[_Progress, np.ndarray, np.ndarray]]:
    """Encodes each group that is not written yet.

    Yields:
        (the progress including the group, its tokens, the indices of document starts in them).
    """
    waiting: deque[tuple[int, Future]] = deque()

    def take() -> tuple[_Progress, np.ndarray, np.ndarray]:
        nonlocal done
        num_bytes, future = waiting.popleft()
        ids, starts = future.result()
        done = _Progress(*map(add, done, (1, len(ids), num_bytes, len(starts))))
        return done, ids, starts

    with ThreadPoolExecutor(_THREADS) as pool:
        for group in islice(groups(documents, tokenizer), done.groups, None):
            num_bytes = sum(len(piece.encode()) for *_, piece in group)
            waiting.append((num_bytes, pool.submit(_encode_group, group, tokenizer, after)))
            if len(waiting) > _THREADS:
                yield take()
        while waiting:
            yield take()


def groups(documents: Iterable[AnyDocument], tokenizer: Tokenizer) -> Iterator[Group]:
    """Yields the text in groups of a few MB, for documents of any size.

    Yields:
        Lists of (whether the piece begins a document, whether it ends one, piece).
    """
    group, size = [], 0
    for document in documents:
        for begins, ends, piece in marked(tokenizer.pieces(document.pieces())):
            group.append((begins, ends, piece))
            size += len(piece)
            if size > _GROUP_CHARACTERS:
                yield group
                group, size = [], 0
    if group:
        yield group


def _encode_group(
    group: Group, tokenizer: Tokenizer, after: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of a group, and the indices of the document starts in them.

    The tokenizer uses several threads and releases Python's global lock while it encodes.
    """
    parts = []
    encoded = tokenizer.encode_many(piece for *_, piece in group)
    for (begins, ends, _), ids in zip(group, encoded, strict=True):
        around = (tokenizer.opening if begins else (), after if ends else ())
        parts.append(np.array([*around[0], *ids, *around[1]], np.uint32))
    places = np.cumsum([0, *map(len, parts[:-1])])
    return np.concatenate(parts), places[[begins for begins, *_ in group]]


def _read_header(path: str | Path) -> dict[str, Any] | None:
    """Returns the header of a token file; None if the file is missing or its size is wrong."""
    try:
        with open(path, "rb") as file:
            header = json.loads(file.read(_HEADER_BYTES))
            is_ours = header["format"] == _FORMAT and header["dtype"] in _DTYPES
            size = _size(header, header["num_tokens"])
            if is_ours and os.fstat(file.fileno()).st_size == size:
                return header
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None
