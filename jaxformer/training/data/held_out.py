"""What a model's score on held-out text is to be judged by."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from jaxformer.training.data.documents import Document

MOST_COMPRESSED = 1 << 24  # bytes: xz takes a second and 20 MB of memory for each million
LONG_LINE = 60
_LONGEST_LINE = 1 << 20
_HASHED_TOGETHER = 1 << 16


def baselines(held_out: Iterable[Document]) -> dict[str, float]:
    """Bits per byte of ``gzip -9`` and ``xz -9e`` on the documents concatenated, or on the first
    16 MB of them.

    What a model's bits per byte must beat to have learnt anything beyond repetition.

    Errors: ``ValueError`` if there is no text.
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
    """Of so many long lines of the held-out part, how many also stand in the training part."""

    lines: int
    repeated: int

    def __str__(self) -> str:
        return (
            f"{self.repeated:,} of {self.lines:,} long held-out lines ({LONG_LINE} characters or "
            "more) also stand in the training part, but for spaces"
        )


def repeated_lines(train: Iterable[Document], held_out: Iterable[Document]) -> Repeated:
    """How much of the held-out part could be known by heart.

    Lines that differ in white space alone are the same. Eight bytes of each long held-out line are
    in memory, so two lines that differ are taken for the same about once in 10^19 comparisons.
    """
    asked = np.concatenate([np.zeros(0, np.int64), *_hashes(held_out)])
    known = np.unique(asked)
    found = np.zeros(len(known), bool)
    for some in _hashes(train) if len(known) else ():
        place = np.minimum(np.searchsorted(known, some), len(known) - 1)
        found[place[known[place] == some]] = True
    return Repeated(len(asked), int(found[np.searchsorted(known, asked)].sum()))


def _hashes(documents: Iterable[Document]) -> Iterator[np.ndarray]:
    """Those of the long lines of documents, some at a time, int64."""
    waiting: list[int] = []
    for document in documents:
        rest = ""
        for piece in document.pieces():
            *lines, rest = (rest + piece).split("\n")
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest], ""
            waiting += _long(lines)
            if len(waiting) > _HASHED_TOGETHER:
                yield np.array(waiting, np.int64)
                waiting = []
        waiting += _long([rest])
    yield np.array(waiting, np.int64)


def _long(lines: list[str]) -> list[int]:
    words = (" ".join(line.split()) for line in lines if len(line) >= LONG_LINE)
    return [hash(line) for line in words if len(line) >= LONG_LINE]
