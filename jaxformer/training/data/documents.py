"""Documents, which are read from disk piece by piece: a text may be larger than memory."""

from __future__ import annotations

import codecs
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jaxformer.training.data.reading import NotText, damaged, open_stream, read_piece

HUB = "hf:"


class Document(NamedTuple):
    """A text in memory.

    Attributes:
        name: The path of its file, relative to the folder that the user named.
        text: The text.
    """

    name: str
    text: str

    def pieces(self) -> Iterator[str]:
        """Yields the text in order, in pieces of any size."""
        yield self.text

    def documents(self) -> Iterator[Document]:
        """Yields itself, so that a document is also a `Source`."""
        yield self

    @property
    def path(self) -> str:
        """The name, which messages show like the path of a file."""
        return self.name

    @property
    def num_bytes(self) -> int:
        """Length in UTF-8 bytes."""
        return len(self.text.encode())


class _Read(ABC):
    """Base class of documents of which only a piece is in memory at a time."""

    __slots__ = ()

    @abstractmethod
    def pieces(self) -> Iterator[str]:
        """Yields the text in order, in pieces of any size."""

    @property
    def text(self) -> str:
        """The whole text, in memory."""
        return "".join(self.pieces())

    @property
    def num_bytes(self) -> int:
        """Length in UTF-8 bytes."""
        return sum(len(piece.encode()) for piece in self.pieces())


@dataclass(frozen=True, slots=True)
class Excerpt(_Read):
    """Part of a document: the characters ``start`` to ``stop`` (None: the end)."""

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
    """Interface of a source of documents: a file with one document, or a file of records."""

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
        name: The path of the file in it.
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
        """Yields itself."""
        yield self

    def pieces(self) -> Iterator[str]:
        """Yields the text in order, in pieces of any size.

        Raises:
            NotText: The file is empty, has a NUL byte or is not UTF-8.
            ValueError: The compressed file is damaged. The message names the line.
        """
        decoder = codecs.getincrementaldecoder("utf-8")()
        at, lines, begun, empty = 0, 1, False, True
        with open_stream(self.path) as file:
            while True:
                data, error = read_piece(file)
                if error is not None:
                    line = lines + data.count(b"\n")
                    raise damaged(self.path, f"line {line}", at or data, error) from None
                if b"\0" in data:
                    raise NotText(f"{self.path}: not a text file (it has NUL bytes)")
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
                    empty = False
                    yield text
                if not data:
                    if empty:
                        raise NotText(f"{self.path}: the file is empty")
                    return
                at, lines = at + len(data), lines + data.count(b"\n")


AnyDocument = Document | TextFile | Excerpt


def text_parts(documents: Iterable[AnyDocument]) -> Iterator[str]:
    """Yields the text of documents in parts of any size, with a line feed after each document."""
    for document in documents:
        yield from document.pieces()
        yield "\n"


class DocumentDigest(NamedTuple):
    """Digest and size of a document.

    Attributes:
        digest: 16 bytes, of the UTF-8 text.
        num_bytes: Length in UTF-8 bytes.
        num_characters: Length in characters.
    """

    digest: bytes
    num_bytes: int
    num_characters: int


def measure(
    document: AnyDocument, on_read: Callable[[int], None] = lambda num_bytes: None
) -> DocumentDigest:
    """Reads a document to its end and returns its digest and size.

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
