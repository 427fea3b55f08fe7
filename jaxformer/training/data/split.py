"""Split of a text into a training part and a held-out part, and baselines for the latter."""

import gzip
import hashlib
import lzma
import math
import unicodedata
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.training.batch import noop
from jaxformer.training.data.corpus import Documents, grouped
from jaxformer.training.data.documents import AnyDocument, Document, Excerpt, TextFile
from jaxformer.training.data.tokens import groups

# Default (fraction, minimum_bytes, maximum_bytes) of `split`. For a small text, the fraction alone
# is too little to distinguish two models. For a large text it is more than necessary, and the end
# of a run scores the whole held-out part.
DEFAULT_SPLIT = (0.05, 500_000, 10_000_000)

# Largest share of the held-out text for one document. Only the end of a larger one is held out.
_LARGEST_SHARE = 1 / 4

_TRAIN, _HELD_OUT, _CUT = range(3)
_ENCODED_TOGETHER = 1 << 14  # lines


class SplitPart:
    """One part of a split: whole documents and excerpts, which each iteration reads from disk."""

    def __init__(
        self,
        documents: Documents,
        sides: np.ndarray,
        side: int,
        position: Callable[[int, Document | TextFile], int],
    ):
        """Selects the documents of one side.

        Args:
            documents: The documents of both parts.
            sides: uint8 [documents]: `_TRAIN`, `_HELD_OUT` or `_CUT`.
            side: `_TRAIN` or `_HELD_OUT`.
            position: Returns where to cut a document with this number.
        """
        self._documents, self._sides, self._side = documents, sides, side
        self._position, lengths = position, documents.characters
        least = 1 if side == _TRAIN else 2  # one character cannot be divided
        is_cut = (sides == _CUT) & (lengths >= least)
        self._is_included = is_cut | ((sides == side) & (lengths > 0))

    def __iter__(self) -> Iterator[AnyDocument]:
        """Yields the documents and excerpts in order."""
        for number, document in enumerate(self._documents):
            if not self._is_included[number]:
                continue
            if self._sides[number] == _CUT:
                position = self._position(number, document)
                first, last = (0, position) if self._side == _TRAIN else (position, None)
                document = Excerpt(document, first, last)
            yield document

    def __len__(self) -> int:
        """Returns the number of documents and excerpts."""
        return int(self._is_included.sum())


def split(
    documents: Documents,
    fraction: float = 0.05,
    minimum_bytes: float = 0,
    maximum_bytes: float = math.inf,
) -> tuple[SplitPart, SplitPart]:
    """Divides the text into a training part and a held-out part. Both preserve the order.

    The target size of the held-out part is ``fraction`` of the bytes, but at least
    ``minimum_bytes`` (or a tenth of the text, if that is less) and at most ``maximum_bytes``. Whole
    documents are held out, in the order of a digest of their content, until the target is reached.
    From a document that would be more than a quarter of the held-out part, only the end is held
    out, from a line break on. So the held-out part is at most about 1.25 times the target, and
    ``split(book, 0.1)`` holds out the last tenth of a book.

    The digest is of the content, not of the name. So copies are always in the same part, and the
    result does not depend on the machine, the folder or the order. Every character is in exactly
    one part.

    Args:
        documents: The text.
        fraction: The share of the bytes to hold out, in (0, 0.5].
        minimum_bytes: Lower limit of the target size.
        maximum_bytes: Upper limit of the target size.

    Returns:
        (the training part, the held-out part).

    Raises:
        ValueError: `fraction` is out of range, or the text is too short to divide.
    """
    if not 0 < fraction <= 0.5:
        raise ValueError(f"fraction is {fraction}; it must be in (0, 0.5]")
    total = documents.num_bytes
    aim = min(max(fraction * total, min(minimum_bytes, total / 10)), maximum_bytes)
    share = aim / max(total, 1)
    sides, lengths, positions = _choose(documents, aim, share), documents.characters, {}

    def position(number: int, document: Document | TextFile) -> int:
        if number not in positions:
            positions[number] = _cut_position(document, int(lengths[number]), share)
        return positions[number]

    train, held_out = (SplitPart(documents, sides, x, position) for x in (_TRAIN, _HELD_OUT))
    if not train or not held_out:
        raise ValueError(f"documents: {total} bytes of text are too few to hold some of them out")
    return train, held_out


def _choose(documents: Documents, aim: float, share: float) -> np.ndarray:
    """Returns the side of each document, uint8 [documents].

    Copies count as one document of their total size.
    """
    order, group = grouped(documents.digests)
    sizes = np.bincount(group, documents.sizes[order])
    is_cut = sizes > _LARGEST_SHARE * aim
    missing = aim - share * sizes[is_cut].sum()
    before = np.subtract.accumulate(np.append(missing, sizes[~is_cut]))[:-1]
    of_group = np.full(len(sizes), _TRAIN, np.uint8)
    of_group[is_cut] = _CUT
    of_group[np.flatnonzero(~is_cut)[before > 0]] = _HELD_OUT
    sides = np.empty(len(documents), np.uint8)
    sides[order] = of_group[group]
    return sides


def _cut_position(document: Document | TextFile, length: int, share: float) -> int:
    """Returns the position where the last ``share`` of a document begins.

    It is after a line break, if one follows within a quarter of the rest.
    """
    position = max(1, min(round((1 - share) * length), length - 1))
    at = position - 1
    for piece in Excerpt(document, at, position + (length - position) // 4).pieces():
        if (line_break := piece.find("\n")) >= 0:
            return at + line_break + 1
        at += len(piece)
    return position


def token_digests(
    documents: Iterable[AnyDocument], tokenizer: Tokenizer, on_encoded: Callable[[int], None] = noop
) -> np.ndarray:
    """Returns a digest of each document's tokens, big-endian uint64 [documents, 2].

    Args:
        documents: The documents. They are read once, with only a few MB in memory.
        tokenizer: Encodes the text.
        on_encoded: Called with the number of bytes of text encoded so far.
    """
    digests, digest, num_bytes = bytearray(), hashlib.blake2b(digest_size=16), 0
    for group in groups(documents, tokenizer):
        encoded = tokenizer.encode_many(piece for *_, piece in group)
        for (_, ends, piece), ids in zip(group, encoded, strict=True):
            digest.update(np.asarray(ids, "<u4").tobytes())
            num_bytes += len(piece.encode())
            if ends:
                digests += digest.digest()
                digest = hashlib.blake2b(digest_size=16)
        on_encoded(num_bytes)
    return np.frombuffer(bytes(digests), ">u8").reshape(-1, 2)


def groups_of_alike(lines: Sequence[str], tokenizer: Tokenizer | None = None) -> list[Hashable]:
    """Returns a label for each line. Alike lines have equal labels.

    Two lines are alike if they differ only in case, accents, compatibility characters or white
    space, if the tokenizer encodes them to the same tokens, or if both are alike to a third line.
    """
    parents: dict[Hashable, Hashable] = {}

    def root(key: Hashable) -> Hashable:
        while (parent := parents.setdefault(key, key)) != key:
            parents[key] = parents[parent]  # halves the path for later calls
            key = parent
        return key

    plain = list(map(_plain, lines))
    if tokenizer is not None:
        for key, tokens in zip(plain, _token_keys(lines, tokenizer), strict=True):
            parents[root(tokens)] = root(key)
    return list(map(root, plain))


def _plain(line: str) -> str:
    """Returns a line in lower case, without accents and with collapsed white space."""
    characters = unicodedata.normalize("NFKD", line.casefold())
    letters = "".join(x for x in characters if not unicodedata.combining(x))
    return " ".join(letters.casefold().split())


def _token_keys(lines: Sequence[str], tokenizer: Tokenizer) -> Iterator[bytes]:
    for start in range(0, len(lines), _ENCODED_TOGETHER):
        for ids in tokenizer.encode_many(lines[start : start + _ENCODED_TOGETHER]):
            yield hashlib.blake2b(np.asarray(ids, "<u4").tobytes(), digest_size=16).digest()


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
