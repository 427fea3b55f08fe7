"""Reading of files: bytes and lines, decompressed, piece by piece."""

import gzip
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Protocol

PIECE_BYTES = 1 << 20
# Largest decompressed size: this multiple of the compressed size, or _SMALL bytes if that is more.
# Text has 3 to 20 times its compressed size, repeated bytes 1,000 times (gzip) and more (zstd).
_MOST_EXPANSION = 100
_SMALL = 64 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class NotText(ValueError):
    """Raised for a file without text; files in a folder are then skipped.

    A file that is damaged after its beginning raises a plain ``ValueError``, which is not caught.
    """


class _TooLarge(ValueError):
    """Raised for a compressed file whose content is too large to be text."""


class Stream(Protocol):
    """A file of bytes that is open for reading."""

    def read1(self, size: int, /) -> bytes:
        """Returns at most `size` bytes; none at the end of the file."""


class _Bounded:
    """Decompressed stream that raises `_TooLarge` when it exceeds the largest size of text."""

    def __init__(self, stream: Stream, path: str):
        self._stream, self._path = stream, path
        self._left = max(_SMALL, _MOST_EXPANSION * os.path.getsize(path))

    def read1(self, size: int) -> bytes:
        data = self._stream.read1(size)
        self._left -= len(data)
        if self._left < 0:
            raise _TooLarge(
                f"{self._path}: it decompresses to more than {_MOST_EXPANSION} times its size; if "
                "that is meant, decompress it and name the decompressed file"
            )
        return data


def suffix_of(name: str) -> str:
    """Returns the suffix of a file's format in lower case: `.jsonl` for `.JSONL.gz`."""
    stem, suffix = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] if suffix in (".gz", ".zst") else suffix


@contextmanager
def open_stream(path: str) -> Iterator[Stream]:
    """Opens a file of bytes; .gz and .zst are decompressed, up to a multiple of their size.

    Raises:
        NotText: The file cannot be opened.
    """
    try:
        if path.lower().endswith(".zst"):
            pyarrow = needed("pyarrow", f"read {path}", "data")
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


def read_piece(file: Stream) -> tuple[bytes, Exception | None]:
    """Reads PIECE_BYTES of a file, fewer only at its end or before an error.

    Returns:
        (the bytes, the error that followed them or None).
    """
    parts, size = [], 0
    while size < PIECE_BYTES:
        try:
            part = file.read1(PIECE_BYTES - size)
        except Exception as error:  # each format has its own exceptions
            return b"".join(parts), error
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts), None


def read_lines(path: str) -> Iterator[bytes]:
    """Yields the lines of a file without their line feeds and without a byte order mark.

    Raises:
        NotText: The file cannot be opened.
        ValueError: The file is damaged. The message names the line.
    """
    number, rest, more = 0, [b""], True  # a list, so that a long line is joined only once
    with open_stream(path) as file:
        while more:
            data, error = read_piece(file)
            head, *lines = data.split(b"\n")
            rest.append(head)
            for line in lines:
                whole = b"".join(rest)
                yield whole if number else whole.removeprefix(_BYTE_ORDER_MARK)
                number, rest = number + 1, [line]
            if error is not None:
                raise damaged(path, f"line {number + 1}", number or any(rest), error) from None
            more = bool(data)
    whole = b"".join(rest)
    if whole := (whole if number else whole.removeprefix(_BYTE_ORDER_MARK)):
        yield whole


def damaged(path: str, where: str, begun: object, error: Exception) -> ValueError:
    """Returns the error to raise for a failed read of a file.

    Args:
        path: The file.
        where: The place of the damage, such as "line 3".
        begun: Whether anything was read. If not, the error is `NotText`.
        error: The exception of the read.
    """
    if isinstance(error, _TooLarge):
        return error
    problem = getattr(error, "strerror", None) or str(error)
    if begun:
        return ValueError(f"{path}: damaged at {where}: {problem}")
    return NotText(f"{path}: {problem.lower()}")


def needed(package: str, what: str, extra: str) -> ModuleType:
    """Imports an optional package.

    Args:
        package: The name of the package.
        what: The task that needs it, such as "read FILE".
        extra: The extra of this project that installs it.

    Raises:
        ValueError: The package is missing. The message says how to install it.
    """
    try:
        return import_module(package)
    except ImportError:
        name = package.partition(".")[0]
        raise ValueError(
            f"to {what} the package {name} is needed: pip install -e '.[{extra}]'"
        ) from None
