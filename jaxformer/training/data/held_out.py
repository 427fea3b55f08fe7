"""Baselines for a model's score on held-out text: compressors, and lines known from training."""

import gzip
import lzma
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from jaxformer.training.data.documents import AnyDocument

MOST_COMPRESSED = 1 << 24  # bytes: xz takes a second and 20 MB of memory for each million
LONG_LINE = 60
_LONGEST_LINE = 1 << 20
_HASHED_TOGETHER = 1 << 16


def baselines(held_out: Iterable[AnyDocument]) -> dict[str, float]:
    """Returns the bits per byte of ``gzip -9`` and ``xz -9e`` on at most 16 MiB of the documents.

    A model with fewer bits per byte has learnt more than repetitions.

    Raises:
        ValueError: There is no text.
    """
    data = bytearray()
    pieces = (piece for document in held_out for piece in document.pieces())
    while len(data) < MOST_COMPRESSED and (piece := next(pieces, None)) is not None:
        data += piece.encode()
    data = bytes(data[:MOST_COMPRESSED])
    if not data:
        raise ValueError("held_out: there is no text to compress")
    compressed = {
        "gzip": gzip.compress(data, compresslevel=9, mtime=0),
        "xz": lzma.compress(data, preset=9 | lzma.PRESET_EXTREME),
    }
    return {name: 8 * len(output) / len(data) for name, output in compressed.items()}


class Repeated(NamedTuple):
    """Count of long held-out lines that also occur in the training part.

    Attributes:
        lines: The number of long held-out lines.
        repeated: The number of those that also occur in the training part.
    """

    lines: int
    repeated: int

    def __str__(self) -> str:
        """Returns a line of text for the screen."""
        return (
            f"{self.repeated:,} of {self.lines:,} held-out lines of {LONG_LINE} or more characters "
            "also occur in the training part (white space ignored)"
        )


def repeated_lines(
    train: Iterable[AnyDocument],
    held_out: Iterable[AnyDocument],
    normalized: Callable[[str], str] = lambda line: line,
) -> Repeated:
    """Counts the long held-out lines that also occur in the training part.

    Lines that differ only in white space are the same. Lines are compared by hashes of eight bytes,
    so two different lines count as the same about once in 10^19 comparisons.

    Args:
        train: The training part.
        held_out: The held-out part.
        normalized: Returns a line as the model reads it, for example in lower case.
    """
    hashes = np.concatenate([np.zeros(0, np.int64), *_hashes(held_out, normalized)])
    distinct, numbers = np.unique(hashes, return_inverse=True)
    is_repeated = np.zeros(len(distinct), bool)
    for known in _hashes(train, normalized) if len(distinct) else ():
        place = np.minimum(np.searchsorted(distinct, known), len(distinct) - 1)
        is_repeated[place[distinct[place] == known]] = True
    return Repeated(len(hashes), int(is_repeated[numbers].sum()))


def _hashes(
    documents: Iterable[AnyDocument], normalized: Callable[[str], str]
) -> Iterator[np.ndarray]:
    """Yields the hashes of the long lines of documents, some at a time, int64."""
    waiting: list[int] = []
    for document in documents:
        rest = ""
        for piece in document.pieces():
            *lines, rest = (rest + piece).split("\n")
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest], ""
            waiting += _long(lines, normalized)
            if len(waiting) > _HASHED_TOGETHER:
                yield np.array(waiting, np.int64)
                waiting = []
        waiting += _long([rest], normalized)
    yield np.array(waiting, np.int64)


def _long(lines: list[str], normalized: Callable[[str], str]) -> list[int]:
    long = (" ".join(normalized(line).split()) for line in lines if len(line) >= LONG_LINE)
    return [hash(line) for line in long if len(line) >= LONG_LINE]
