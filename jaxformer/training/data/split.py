"""Which of a text is trained on, and which is held out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxformer.training.data.corpus import Documents, grouped
from jaxformer.training.data.documents import Document, Excerpt, TextFile

# Unless told otherwise: (fraction, minimum_bytes, maximum_bytes) of `split`. Of a small text the
# fraction alone is too little to tell two models apart; of a large one it is more than that takes,
# and all of it is scored at the end.
DEFAULT_SPLIT = (0.05, 500_000, 10_000_000)

# A document may be at most this part of the held-out text; one that is larger gives its end.
_LARGEST_SHARE = 1 / 4

_TRAIN, _HELD_OUT, _CUT = range(3)


class _Division(NamedTuple):
    """sides: uint8 [documents]; lengths: their characters; share: of each document that is cut,
    what is held out; positions: where those are cut, as far as that is known."""

    documents: Documents
    sides: np.ndarray
    lengths: np.ndarray
    share: float
    positions: dict[int, int]

    def position(self, number: int, document) -> int:
        if number not in self.positions:
            length = int(self.lengths[number])
            self.positions[number] = _cut_position(document, length, self.share)
        return self.positions[number]


class Part:
    """The documents of one side, read anew on each walk; of those that are cut, its share."""

    def __init__(self, division: _Division, side: int):
        self._division, self._side = division, side
        least = 1 if side == _TRAIN else 2  # one character cannot be divided
        is_cut = (division.sides == _CUT) & (division.lengths >= least)
        is_whole = (division.sides == side) & (division.lengths > 0)
        self._given = is_cut | is_whole

    def __iter__(self) -> Iterator[Document | TextFile | Excerpt]:
        division = self._division
        for number, document in enumerate(division.documents):
            if not self._given[number]:
                continue
            if division.sides[number] == _CUT:
                position = division.position(number, document)
                first, last = (0, position) if self._side == _TRAIN else (position, None)
                yield Excerpt(document, first, last)
            else:
                yield document

    def __len__(self) -> int:
        return int(self._given.sum())


def split(
    documents: Documents,
    fraction: float = 0.05,
    minimum_bytes: float = 0,
    maximum_bytes: float = math.inf,
) -> tuple[Part, Part]:
    """Divides the text into a part to train on and a part held out; both keep the order given.

    The held-out part aims at ``fraction`` of the bytes, or at ``minimum_bytes`` where that is
    more, though not at more than a tenth for the sake of the minimum, nor at more than
    ``maximum_bytes``. Whole documents are taken in the order of a digest of their content until it
    is reached. A document that would be more than a quarter of the held-out part (every document,
    when there are few) is not taken: its end, cut at a line break, is. So the held-out part is
    never more than 1.25 times its aim (and a line break or so), and ``split(book, 0.1)`` holds
    out the last tenth of a book.

    The digest is of the content, not of the name: copies fall on the same side, so that nothing
    held out was trained on under another name, and neither the machine nor where the folder lies
    nor the order matters. Every character is in exactly one part.

    Errors: ``ValueError`` for a fraction outside (0, 0.5] or text too short to divide.
    """
    if not 0 < fraction <= 0.5:
        raise ValueError(f"fraction: {fraction} is not accepted; more than 0 and at most 0.5 is")
    total = documents.num_bytes
    aim = min(max(fraction * total, min(minimum_bytes, total / 10)), maximum_bytes)
    share = aim / max(total, 1)
    sides = _choose(documents, aim, share)
    division = _Division(documents, sides, documents.characters, share, {})
    train, held_out = Part(division, _TRAIN), Part(division, _HELD_OUT)
    if not train or not held_out:
        raise ValueError(f"documents: {total} bytes of text are too few to hold some of them out")
    return train, held_out


def _choose(documents: Documents, aim: float, share: float) -> np.ndarray:
    """The side of each document, uint8 [documents]; copies count as one document of all their
    bytes."""
    sides = np.full(len(documents), _TRAIN, np.uint8)
    if not len(sides):
        return sides
    order, group = grouped(documents.digests)
    sizes = np.bincount(group, documents.sizes[order])
    is_cut = sizes > _LARGEST_SHARE * aim
    missing = aim - share * sizes[is_cut].sum()
    before = np.subtract.accumulate(np.append(missing, sizes[~is_cut]))[:-1]
    of_group = np.full(len(sizes), _TRAIN, np.uint8)
    of_group[is_cut] = _CUT
    of_group[np.flatnonzero(~is_cut)[before > 0]] = _HELD_OUT
    sides[order] = of_group[group]
    return sides


def _cut_position(document, length: int, share: float) -> int:
    """Where the last ``share`` of so many characters begins: after a line break if one is near, or
    as is."""
    position = max(1, min(round((1 - share) * length), length - 1))
    at = position - 1
    for piece in Excerpt(document, at, position + (length - position) // 4).pieces():
        if (line_break := piece.find("\n")) >= 0:
            return at + line_break + 1
        at += len(piece)
    return position
