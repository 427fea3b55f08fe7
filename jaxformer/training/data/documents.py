"""Documents that are read anew each time, piece by piece: a text may be larger than memory."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple, Protocol

PIECE_BYTES = 1 << 20
HUB = "hf:"


class NotText(ValueError):
    """A file that holds no text at all. In a folder it is left out; text that is damaged further
    on is a plain ``ValueError``, and ends everything."""


class Document(NamedTuple):
    """One text, in memory; ``name`` is the path of its file, from the folder that was named."""

    name: str
    text: str

    def pieces(self) -> Iterator[str]:
        """The text, in order, in pieces of no particular size."""
        yield self.text

    def documents(self) -> Iterator[Document]:
        """Itself: it may stand where a source does."""
        yield self

    @property
    def num_bytes(self) -> int:
        """Length in UTF-8 bytes."""
        return len(self.text.encode())


class _Read:
    """A document of which only a piece is in memory at a time."""

    __slots__ = ()

    @property
    def text(self) -> str:
        """All of it, in memory."""
        return "".join(self.pieces())

    @property
    def num_bytes(self) -> int:
        return sum(len(piece.encode()) for piece in self.pieces())


@dataclass(frozen=True, slots=True)
class Excerpt(_Read):
    """The characters ``start`` to ``stop`` (None: the end) of a document."""

    document: Document | TextFile
    start: int
    stop: int | None = None

    @property
    def name(self) -> str:
        return self.document.name

    def pieces(self) -> Iterator[str]:
        at = 0
        for piece in self.document.pieces():
            part = piece[max(0, self.start - at) : None if self.stop is None else self.stop - at]
            at += len(piece)
            if part:
                yield part
            if self.stop is not None and at >= self.stop:
                return


class Source(Protocol):
    """Where documents are read from: a file of one, or a file of records."""

    name: str
    path: str

    def documents(self) -> Iterator[Document | TextFile]:
        """All of them, from the beginning."""
        ...


@dataclass(frozen=True, slots=True)
class File:
    """A file below a folder that was named."""

    folder: str
    name: str

    @property
    def path(self) -> str:
        return os.path.join(self.folder, self.name)


@dataclass(frozen=True, slots=True)
class TextFile(_Read, File):
    """A file that is one document: UTF-8 text, as it is or compressed (.gz, .zst).

    Errors, while it is read: ``NotText`` if it is empty, has a NUL byte or is not UTF-8;
    ``ValueError`` naming the line after which what was compressed is damaged.
    """

    def documents(self) -> Iterator[TextFile]:
        yield self

    def pieces(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        at, lines = 0, 1
        with opened(self.path) as file:
            while True:
                data, error = read_piece(file)
                if error is not None:
                    line = lines + data.count(b"\n")
                    raise damaged(self.path, f"line {line}", at or data, error) from None
                if not data and not at:
                    raise NotText(f"{self.path}: the file is empty")
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
                if text:
                    yield text
                if not data:
                    return
                at, lines = at + len(data), lines + data.count(b"\n")


@contextmanager
def opened(path: str) -> Iterator:
    """A file of bytes, what was compressed decompressed. ``NotText`` if it cannot be opened."""
    try:
        if path.endswith(".zst"):
            pyarrow = needed("pyarrow", f"read {path}", "data")
            with open(path, "rb") as file, pyarrow.CompressedInputStream(file, "zstd") as stream:
                yield io.BufferedReader(stream)
        else:
            with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
                yield file
    except OSError as error:
        raise NotText(f"{path}: {(error.strerror or str(error)).lower()}") from None


def read_piece(file) -> tuple[bytes, Exception | None]:
    """About PIECE_BYTES of a file, less only at its end, and what went wrong after them."""
    parts, size = [], 0
    while size < PIECE_BYTES:
        try:
            part = file.read1(PIECE_BYTES - size)
        except Exception as error:  # each format has its own
            return b"".join(parts), error
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts), None


def read_lines(path: str, file) -> Iterator[bytes]:
    """The lines of a file without their line feeds; an error that names the line of a damage."""
    number, rest, more = 0, b"", True
    while more:
        data, error = read_piece(file)
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
        number += len(lines)
        if error is not None:
            raise damaged(path, f"line {number + 1}", number or rest, error) from None
        more = bool(data)
    if rest:
        yield rest


def damaged(path: str, where: str, begun, error: Exception) -> ValueError:
    """What went wrong while a file was read, with its name and, if anything was read, the place."""
    problem = getattr(error, "strerror", None) or str(error)
    if begun:
        return ValueError(f"{path}: damaged at {where}: {problem}")
    return NotText(f"{path}: {problem.lower()}")


def needed(package: str, what: str, extra: str):
    """The package, which an extra of this project installs; ``ValueError`` with how, if missing."""
    try:
        return import_module(package)
    except ImportError:
        name = package.partition(".")[0]
        raise ValueError(
            f"to {what} the package {name} is needed: pip install -e '.[{extra}]'"
        ) from None


class Measured(NamedTuple):
    """digest: 16 bytes, of the UTF-8 text; sizes in UTF-8 bytes and in characters."""

    digest: bytes
    num_bytes: int
    num_characters: int


def measure(document, on_read: Callable[[int], None] = lambda num_bytes: None) -> Measured:
    """Reads a document to its end; on_read is told how many bytes have been read of it."""
    digest, num_bytes, num_characters = hashlib.blake2b(digest_size=16), 0, 0
    for piece in document.pieces():
        data = piece.encode()
        digest.update(data)
        num_bytes += len(data)
        num_characters += len(piece)
        on_read(num_bytes)
    return Measured(digest.digest(), num_bytes, num_characters)
