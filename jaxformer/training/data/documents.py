"""Documents that are read from disk piece by piece, because a text may not fit into memory."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

from jaxformer.optional import import_optional
from jaxformer.training.batch import noop

HUB = "hf:"
PIECE_BYTES = 1 << 20
# A file may decompress to at most _SMALL bytes, or _MOST_EXPANSION times its size if that is more.
# Compression shrinks text 3 to 20 times, and repeated bytes 1,000 times (gzip) or more (zstd).
_MOST_EXPANSION = 100
_SMALL = 64 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class NotText(ValueError):
    """Raised for a file that is not text. Such files in a folder are skipped.

    If a file is damaged after its first bytes, a plain ``ValueError`` is raised instead. This error
    stops the reading of all files.
    """


class _TooLarge(ValueError):
    """Raised for a compressed file whose content is too large to be text."""


class Stream(Protocol):
    """A binary file, open for reading."""

    def read1(self, size: int, /) -> bytes:
        """Returns at most `size` bytes, or no bytes at the end of the file."""


class _Bounded:
    """Decompressed stream that raises `_TooLarge` when its size exceeds the limit for text."""

    def __init__(self, stream: Stream, path: str):
        self._stream, self._path = stream, path
        self._left = max(_SMALL, _MOST_EXPANSION * os.path.getsize(path))

    def read1(self, size: int) -> bytes:
        data = self._stream.read1(size)
        self._left -= len(data)
        if self._left < 0:
            raise _TooLarge(
                f"{self._path}: the file decompresses to more than {_MOST_EXPANSION} times its "
                "size; if this is intended, decompress the file and name the result"
            )
        return data


def format_suffix(name: str) -> str:
    """Returns the suffix of a file's format in lower case, such as `.jsonl` for `A.JSONL.gz`."""
    stem, suffix = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] if suffix in (".gz", ".zst") else suffix


@contextmanager
def _open(path: str) -> Generator[Stream]:
    """Opens a file for reading bytes, and decompresses .gz and .zst up to a size limit.

    Raises:
        NotText: The file cannot be opened.
    """
    try:
        if path.lower().endswith(".zst"):
            pyarrow = import_optional("pyarrow", f"read {path}", "data")
            with open(path, "rb") as file, pyarrow.CompressedInputStream(file, "zstd") as stream:
                yield _Bounded(io.BufferedReader(stream), path)
        elif path.lower().endswith(".gz"):
            with gzip.open(path, "rb") as file:
                yield _Bounded(file, path)
        else:
            with open(path, "rb") as file:
                yield file
    except OSError as error:
        raise NotText(f"{path}: {(error.strerror or str(error)).lower()}") from None


def read_pieces(path: str) -> Generator[bytes, None, None]:
    """Yields the bytes of a file in pieces of PIECE_BYTES. The last piece may be smaller.

    Raises:
        NotText: The file cannot be opened, or its first bytes cannot be read.
        ValueError: The file is damaged after its first bytes. The error message includes the line
            number.
    """
    line, begun = 1, False
    with _open(path) as file:
        while True:
            data, error = _read_piece(file)
            line, begun = line + data.count(b"\n"), begun or bool(data)
            if isinstance(error, _TooLarge):
                raise error
            if error is not None:
                problem = getattr(error, "strerror", None) or str(error)
                if begun:
                    raise ValueError(f"{path}: damaged at line {line}: {problem}") from None
                raise NotText(f"{path}: {problem.lower()}") from None
            if not data:
                return
            yield data


def _read_piece(file: Stream) -> tuple[bytes, Exception | None]:
    """Reads PIECE_BYTES of a file, or fewer if an error occurs or the file ends.

    Returns:
        (the bytes, the error that occurred after these bytes, or None).
    """
    parts, size = [], 0
    while size < PIECE_BYTES:
        try:
            part = file.read1(PIECE_BYTES - size)
        except Exception as error:  # Compression formats raise different exceptions.
            return b"".join(parts), error
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts), None


def read_lines(path: str) -> Iterator[bytes]:
    """Yields the lines of a file, and removes line feeds and the byte order mark.

    Raises:
        NotText: The file cannot be opened.
        ValueError: The file is damaged. The error message includes the line number.
    """
    # `rest` is a list, so that the pieces of a long line are joined only once.
    number, rest = 0, [b""]
    for data in read_pieces(path):
        head, *lines = data.split(b"\n")
        rest.append(head)
        for line in lines:
            whole = b"".join(rest)
            yield whole if number else whole.removeprefix(_BYTE_ORDER_MARK)
            number, rest = number + 1, [line]
    whole = b"".join(rest)
    if whole := (whole if number else whole.removeprefix(_BYTE_ORDER_MARK)):
        yield whole


class Document(NamedTuple):
    """A text in memory.

    Attributes:
        name: The path of the text's file, relative to the folder that the user named.
        text: The text.
    """

    name: str
    text: str

    def pieces(self) -> Iterator[str]:
        """Yields the text in order, in pieces of any size."""
        yield self.text

    def documents(self) -> Iterator[Document]:
        """Yields this document, so that a document is also a `Source`."""
        yield self

    @property
    def path(self) -> str:
        """The document's name, which messages show like a file path."""
        return self.name

    @property
    def num_bytes(self) -> int:
        """Length in UTF-8 bytes."""
        return len(self.text.encode())


class _Read(ABC):
    """Base class of documents that are read from disk piece by piece."""

    __slots__ = ()

    @abstractmethod
    def pieces(self) -> Iterator[str]:
        """Yields the text in order, in pieces of any size."""

    @property
    def text(self) -> str:
        """The whole text, loaded into memory."""
        return "".join(self.pieces())

    @property
    def num_bytes(self) -> int:
        """Length in UTF-8 bytes."""
        return sum(len(piece.encode()) for piece in self.pieces())


@dataclass(frozen=True, slots=True)
class Excerpt(_Read):
    """Part of a document: the characters from ``start`` to ``stop``, or to the end if None."""

    document: Document | TextFile
    start: int
    stop: int | None = None

    @property
    def name(self) -> str:
        """Name of the document."""
        return self.document.name

    def pieces(self) -> Iterator[str]:
        """Yields the text in order, in pieces of any size."""
        at = 0
        for piece in self.document.pieces():
            part = piece[max(0, self.start - at) : None if self.stop is None else self.stop - at]
            at += len(piece)
            if part:
                yield part
            if self.stop is not None and at >= self.stop:
                return


class Source(Protocol):
    """A source of documents: a file with one document, or a file of records."""

    @property
    def path(self) -> str:
        """Path of the file, for messages."""

    def documents(self) -> Iterator[Document | TextFile]:
        """Yields all documents from the beginning."""


@dataclass(frozen=True, slots=True)
class File:
    """A file in a folder that the user named.

    Attributes:
        folder: The path of the folder.
        name: The path of the file within the folder.
    """

    folder: str
    name: str

    @property
    def path(self) -> str:
        """Path of the file."""
        return os.path.join(self.folder, self.name)


@dataclass(frozen=True, slots=True)
class TextFile(_Read, File):
    """A file with one document: UTF-8 text, uncompressed or compressed (.gz, .zst)."""

    def documents(self) -> Iterator[TextFile]:
        """Yields this file as the only document."""
        yield self

    def pieces(self) -> Iterator[str]:
        """Yields the text in order, in pieces of any size.

        Raises:
            NotText: The file is empty, has a NUL byte or is not UTF-8.
            ValueError: The compressed file is damaged. The error message includes the line number.
        """
        decoder = codecs.getincrementaldecoder("utf-8")()
        at, begun, is_empty = 0, False, True
        for data in chain(read_pieces(self.path), (b"",)):
            if b"\0" in data:
                raise NotText(f"{self.path}: not a text file (it contains NUL bytes)")
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                place, byte = at - pending + error.start, error.object[error.start]
                raise NotText(
                    f"{self.path}: not UTF-8 text (byte {place} is 0x{byte:02x})"
                ) from None
            if text and not begun:
                begun, text = True, text.removeprefix("\ufeff")
            if text:
                is_empty = False
                yield text
            at += len(data)
        if is_empty:
            raise NotText(f"{self.path}: the file is empty")


AnyDocument = Document | TextFile | Excerpt


def text_parts(documents: Iterable[AnyDocument]) -> Iterator[str]:
    """Yields the text of documents in parts of any size, with a line feed after each document."""
    for document in documents:
        yield from document.pieces()
        yield "\n"


def marked(parts: Iterable[str]) -> Iterator[tuple[bool, bool, str]]:
    """Yields (is_first, is_last, part) for each part of a text."""
    remaining = iter(parts)
    is_first, part = True, next(remaining, None)
    while part is not None:
        following = next(remaining, None)
        yield is_first, following is None, part
        is_first, part = False, following


class DocumentDigest(NamedTuple):
    """Digest and length of a document.

    Attributes:
        digest: A digest of the UTF-8 text, 16 bytes.
        num_bytes: Length in UTF-8 bytes.
        num_characters: Length in characters.
    """

    digest: bytes
    num_bytes: int
    num_characters: int


def measure(document: AnyDocument, on_read: Callable[[int], None] = noop) -> DocumentDigest:
    """Reads a whole document, and returns its digest and its length.

    Args:
        document: The document.
        on_read: Called with the number of bytes read so far.
    """
    digest, num_bytes, num_characters = hashlib.blake2b(digest_size=16), 0, 0
    for piece in document.pieces():
        data = piece.encode()
        digest.update(data)
        num_bytes += len(data)
        num_characters += len(piece)
        on_read(num_bytes)
    return DocumentDigest(digest.digest(), num_bytes, num_characters)
