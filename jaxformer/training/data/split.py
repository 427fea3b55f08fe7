"""Splits a text into a training part and a held-out part, and computes baselines."""

import gzip
import hashlib
import lzma
import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.training.batch import noop
from jaxformer.training.data.corpus import Documents, grouped
from jaxformer.training.data.documents import AnyDocument, Document, Excerpt, TextFile
from jaxformer.training.data.tokens import groups

# Default (fraction, minimum_bytes, maximum_bytes) of `split`. In a small text, 5% of the bytes are
# too few to distinguish two models. In a large text, 5% are more than necessary, and scoring the
# whole held-out part at the end of a run would take long.
DEFAULT_SPLIT = (0.05, 500_000, 10_000_000)

# A document is held out as a whole only if it takes at most this fraction of the held-out part.
# Only the end of a longer document is held out.
_LARGEST_SHARE = 1 / 4

_TRAIN, _HELD_OUT, _CUT = range(3)
# Number of lines to encode in one call.
_ENCODED_TOGETHER = 1 << 14


class SplitPart:
    """The training part or the held-out part of a text: whole documents and excerpts.

    Each iteration reads the documents from disk.
    """

    def __init__(
        self,
        documents: Documents,
        sides: np.ndarray,
        side: int,
        position: Callable[[int, Document | TextFile], int],
    ):
        """Selects the documents of the training part or of the held-out part.

        Args:
            documents: All documents of the text.
            sides: uint8 [documents]: `_TRAIN` or `_HELD_OUT` for a document that belongs to one
                part, `_CUT` for a document that is divided between the two parts.
            side: The part to select, `_TRAIN` or `_HELD_OUT`.
            position: Returns the index of the character at which to divide a document.
        """
        self._documents, self._sides, self._side = documents, sides, side
        self._position, lengths = position, documents.characters
        # A document of one character cannot be divided and belongs to the training part.
        least = 1 if side == _TRAIN else 2
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
        """Returns the total number of whole documents and excerpts."""
        return int(self._is_included.sum())


def split(
    documents: Documents,
    fraction: float = 0.05,
    minimum_bytes: float = 0,
    maximum_bytes: float = math.inf,
) -> tuple[SplitPart, SplitPart]:
    """Splits a text into a training part and a held-out part. Both parts keep the document order.

    The target size of the held-out part is ``fraction`` of the bytes, but at least
    ``minimum_bytes`` and at most ``maximum_bytes``. If ``minimum_bytes`` is more than a tenth of
    the text, this tenth replaces ``minimum_bytes``. Whole documents are held out, in the order of a
    digest of their content, until the held-out part has the target size.
    If a document would be more than a quarter of the held-out part, only its end is held out,
    starting after a line break. The held-out part is therefore at most about 1.25 times the target
    size, and ``split(book, 0.1)`` holds out the last tenth of a book.

    The digest of a document depends on the content, not on the name. Copies are therefore always in
    the same part, and the split does not depend on the machine, the folder or the order of the
    documents. Every character is in exactly one part.

    Args:
        documents: The text.
        fraction: The fraction of the bytes to hold out, in (0, 0.5].
        minimum_bytes: The smallest target size of the held-out part.
        maximum_bytes: The largest target size of the held-out part.

    Returns:
        (the training part, the held-out part).

    Raises:
        ValueError: `fraction` is out of range, or the text is too short to split.
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
        raise ValueError(
            f"documents have {total} bytes, too few for a training and a held-out part; "
            "give more text"
        )
    return train, held_out


def _choose(documents: Documents, aim: float, share: float) -> np.ndarray:
    """Assigns each document `_TRAIN`, `_HELD_OUT` or `_CUT`; returns uint8 [documents].

    Copies are treated as one document with their total size.
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
    """Returns the index at which the last fraction ``share`` of a document begins.

    If the first quarter of this last part contains a line break, the function returns the index
    after the first line break instead.
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
        documents: The documents. The function reads them once, with only a few MB in memory.
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


def choose_held_out(
    sources: Sequence[str],
    fraction: float | None = None,
    tokenizer: Tokenizer | None = None,
    *,
    noun: str = "sources",
) -> list[bool]:
    """Chooses which of several sources to hold out.

    Similar sources (see `similarity_groups`) are held out together. A model therefore never trains
    on a held-out source, even if the tokenizer ignores case or accents. Digests of the sources
    determine which groups of similar sources are held out.

    Args:
        sources: The texts that a model reads, such as sentences to translate.
        fraction: The fraction to hold out. If None, the fraction is 0.05, but at most 1,000 sources
            are held out.
        tokenizer: The tokenizer of the sources, with which `similarity_groups` compares the tokens
            of the sources. If None, only the text of the sources is compared.
        noun: The word for the sources in error messages.

    Raises:
        ValueError: There are fewer than two groups of similar sources.
    """
    labels = similarity_groups(sources, tokenizer)
    digests: dict[Hashable, bytes] = {}
    for source, label in zip(sources, labels, strict=True):
        digest = hashlib.blake2b(source.encode(), digest_size=16).digest()
        digests[label] = min(digest, digests.get(label, digest))
    if len(digests) < 2:
        raise ValueError(
            f"there are {len(digests)} different {noun}; at least 2 are needed to hold some out "
            f"({noun} that differ only in case, accents or white space count as one)"
        )
    counts = Counter(labels)
    wanted = fraction * len(sources) if fraction else min(0.05 * len(sources), 1000)
    chosen, number = set(), 0
    for label in sorted(digests, key=digests.__getitem__)[:-1]:
        if number >= max(1, wanted):
            break
        chosen.add(label)
        number += counts[label]
    return [label in chosen for label in labels]


def similarity_groups(lines: Sequence[str], tokenizer: Tokenizer | None = None) -> list[Hashable]:
    """Groups similar lines, and returns the label of each line's group.

    Two lines are similar if they differ only in case, accents, compatibility characters or white
    space, or if the tokenizer encodes them to the same tokens. Similarity is transitive.
    """
    parents: dict[Hashable, Hashable] = {}

    def root(key: Hashable) -> Hashable:
        while (parent := parents.setdefault(key, key)) != key:
            parents[key] = parents[parent]  # Path halving speeds up later calls.
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


# Largest number of bytes to compress. xz takes a second and 20 MB of memory per million bytes.
MOST_COMPRESSED = 1 << 24
LONG_LINE = 60
_LONGEST_LINE = 1 << 20
_HASHED_TOGETHER = 1 << 16


def baselines(held_out: Iterable[AnyDocument]) -> dict[str, float]:
    """Returns the bits per byte of ``gzip -9`` and ``xz -9e`` on at most 16 MiB of the documents.

    gzip and xz find only repetitions. A model that needs fewer bits per byte has learned more than
    repetitions.

    Raises:
        ValueError: The documents have no text.
    """
    data = bytearray()
    pieces = (piece for document in held_out for piece in document.pieces())
    while len(data) < MOST_COMPRESSED and (piece := next(pieces, None)) is not None:
        data += piece.encode()
    data = bytes(data[:MOST_COMPRESSED])
    if not data:
        raise ValueError("held_out must contain text to compress, but all documents are empty")
    compressed = {
        "gzip": gzip.compress(data, compresslevel=9, mtime=0),
        "xz": lzma.compress(data, preset=9 | lzma.PRESET_EXTREME),
    }
    return {name: 8 * len(output) / len(data) for name, output in compressed.items()}


class Repeated(NamedTuple):
    """Count of long held-out lines that also occur in the training part.

    Attributes:
        lines: The number of long held-out lines.
        repeated: The number of long held-out lines that also occur in the training part.
    """

    lines: int
    repeated: int

    def __str__(self) -> str:
        """Returns the counts as a line of text for the screen."""
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

    White space is ignored. Lines are compared by hashes of eight bytes, so two different lines
    count as equal about once in 10^19 comparisons.

    Args:
        train: The training part.
        held_out: The held-out part.
        normalized: Normalizes a line as the tokenizer does, for example to lower case.
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
    """Yields int64 arrays with the hashes of the documents' long lines."""
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
