"""Tokenised text in memory-mapped files.

A stream of tokens is ``opening + document + opening + document + ...``. With the opening tokens, a
model can predict the first token of a document. A `ByteTokenizer` has one opening token: the
end-of-text token, which also ends the previous document. Imported tokenizers define other opening
tokens, and may add tokens after a document.

The file also stores the index of each document's first token. The tokens alone do not determine
this index, because a config.json may define an ordinary word as the opening token.
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
# Number of threads that encode the next groups of pieces while the ids of a group are written.
_THREADS = 2

# For each piece of text: whether it begins a document, whether it ends a document, and the text.
Group = list[tuple[bool, bool, str]]


class TokenStream(NamedTuple):
    """The tokens of a corpus, and fingerprints of the text and the tokenizer.

    Attributes:
        ids: uint16 or uint32 [num_tokens], memory-mapped from disk.
        starts: int64 [num_documents]: the index of each document's first token.
        num_documents: The number of documents.
        num_bytes: The number of UTF-8 bytes of the text, without special tokens.
        tokenizer: A fingerprint of the tokenizer.
        documents: A fingerprint of the documents and of their order.
    """

    ids: np.ndarray
    starts: np.ndarray
    num_documents: int
    num_bytes: int
    tokenizer: str
    documents: str

    @property
    def num_targets(self) -> int:
        """Number of predicted tokens: all except the first token of each document."""
        return len(self.ids) - self.num_documents

    def split(self) -> list[np.ndarray]:
        """Returns the tokens of each document, which include the document's opening tokens."""
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
    - the ids, little-endian, with two bytes each if the vocabulary permits, otherwise four.

    The file is named ``path``.unfinished until it is complete. After an interruption, the next call
    continues this file.

    Args:
        documents: The documents. The function reads them twice, with only a few MB in memory.
        tokenizer: Encodes the text.
        path: The file to write.
        on_encoded: Called with the number of bytes of text encoded so far.
        after: Ids to write after each document.

    Returns:
        The token stream, memory-mapped from the file.

    Raises:
        ValueError: `documents` is empty, or the documents changed between the two reads.
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
            raise ValueError(f"{path}: the documents changed during tokenisation; start again")
        file.seek(0)
        line = json_text({**header, "num_tokens": done.num_tokens})
        file.write(line.encode().ljust(_HEADER_BYTES - 1) + b"\n")
    os.replace(unfinished, path)
    journal.unlink()
    return open_tokens(path)


def open_tokens(path: str | Path) -> TokenStream:
    """Memory-maps a file that ``write_tokens`` wrote, read only.

    Raises:
        ValueError: The file is missing, truncated or in another format.
    """
    header = _read_header(path)
    if header is None:
        raise ValueError(f"{path} is not a token file; create one with write_tokens")
    ids = np.memmap(path, header["dtype"], "r", _ids_offset(header), (header["num_tokens"],))
    starts = np.memmap(path, header["starts"], "r", _HEADER_BYTES, (header["num_documents"],))
    return TokenStream(ids, starts, **{name: header[name] for name in TokenStream._fields[2:]})


def open_streams(folder: RunFolder, paths: list[Path], tokenizer: Tokenizer) -> list[TokenStream]:
    """Opens token files.

    Raises:
        ValueError: A file was written with a tokenizer other than ``tokenizer``.
    """
    streams = [open_tokens(path) for path in paths]
    for path, stream in zip(paths, streams, strict=True):
        if stream.tokenizer != tokenizer.fingerprint:
            raise ValueError(
                f"{path} was written with a different tokenizer than {folder.tokenizer}"
            )
    return streams


def base_tokenizer(folder: RunFolder) -> Tokenizer | None:
    """Returns the tokenizer of the run's base checkpoint, or None without a base checkpoint.

    A run without a base checkpoint trains a tokenizer.
    """
    began = folder.holds_run and "init_from" in folder.read_config()
    return run_tokenizer(folder) if began else None


def _ids_offset(header: dict[str, Any]) -> int:
    """Returns the size in bytes of the header and the start indices, which precede the ids."""
    return _HEADER_BYTES + _START_BYTES * header["num_documents"]


def _size(header: dict[str, Any], num_tokens: int) -> int:
    """Returns the size in bytes of a file with this header and `num_tokens` ids."""
    return _ids_offset(header) + np.dtype(header["dtype"]).itemsize * num_tokens


def _describe(
    documents: Iterable[AnyDocument], tokenizer: Tokenizer, after: Sequence[int]
) -> dict[str, Any]:
    """Returns the header of a token file, without the number of tokens."""
    number = num_bytes = 0
    digest = hashlib.blake2b(digest_size=16)
    for measured in map(measure, documents):
        number += 1
        num_bytes += measured.num_bytes
        digest.update(measured.digest)
    if not number:
        raise ValueError("documents is empty; it must have at least one document")
    header: dict[str, Any] = {"format": _FORMAT, "dtype": _DTYPES[tokenizer.vocab_size > 1 << 16]}
    header |= {"num_documents": number, "starts": _STARTS, "num_bytes": num_bytes}
    header |= {"tokenizer": tokenizer.fingerprint, "documents": digest.hexdigest()}
    return header | ({"after": list(after)} if after else {})


class _Progress(NamedTuple):
    """Progress of `write_tokens`.

    Attributes:
        groups: The number of written groups (see `groups`).
        num_tokens: The number of written tokens.
        num_bytes: The number of bytes of text that the written tokens encode.
        num_documents: The number of documents whose first token is written.
    """

    groups: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_documents: int = 0

    @classmethod
    def read(cls, journal: Path, header: dict[str, Any], unfinished: Path) -> Self:
        """Returns the progress of an interrupted call for this file, or zero progress."""
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
    """Encodes all groups of pieces that are not yet written.

    Yields:
        (the progress after writing the group, the ids of the group, the indices in these ids at
        which documents start).
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
    """Splits documents of any size into pieces, and yields groups of pieces with a few MB each.

    Yields:
        Lists of (is_first, is_last, piece). The flags are True for the first and the last piece of
        a document.
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
    """Returns the ids of a group of pieces, and the indices in these ids at which documents start.

    The tokenizer uses several threads and releases Python's global interpreter lock.
    """
    parts = []
    encoded = tokenizer.encode_many(piece for *_, piece in group)
    for (begins, ends, _), ids in zip(group, encoded, strict=True):
        around = (tokenizer.opening if begins else (), after if ends else ())
        parts.append(np.array([*around[0], *ids, *around[1]], np.uint32))
    places = np.cumsum([0, *map(len, parts[:-1])])
    return np.concatenate(parts), places[[begins for begins, *_ in group]]


def _read_header(path: str | Path) -> dict[str, Any] | None:
    """Returns the header of a token file, or None if the file is missing or has the wrong size."""
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
