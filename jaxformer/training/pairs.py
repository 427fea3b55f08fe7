"""Parallel text: pairs of lines, and batches of those of about one length.

A target is learnt by teacher forcing: the decoder reads ``[end_of_text] + target`` and is to say
``target + [end_of_text]``, every token at once, each from the true ones before it.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np

from jaxformer.training.batch import Batch


def read_pairs(source: Path | str, target: Path | str) -> list[tuple[str, str]]:
    """The lines of two files, plain or gzip (by the name's end), side by side.

    A line ends at a line feed, or at a carriage return and a line feed. A carriage return
    elsewhere, and what else Unicode may call a line's end, is a part of it.

    Errors: ``ValueError`` naming the file, and the line, if one is missing or not UTF-8 text, if
    they have unequal numbers of lines or none, or if a line is empty.
    """
    sides = [_read_lines(Path(path)) for path in (source, target)]
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"{source} has {len(sides[0])} lines and {target} has {len(sides[1])}; a parallel text "
            "has as many on both sides"
        )
    if not sides[0]:
        raise ValueError(f"{source}: there are no lines")
    for path, lines in zip((source, target), sides, strict=True):
        for number, line in enumerate(lines, 1):
            if not line.strip():
                raise ValueError(f"{path}: line {number} is empty; it has nothing to translate")
    return list(zip(*sides, strict=True))


def _read_lines(path: Path) -> list[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", newline="\n") as file:
            return [line.removesuffix("\r\n").removesuffix("\n") for line in file]
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ValueError(f"{path}: not readable as text: {error}") from error


def best_widths(lengths: np.ndarray, number: int) -> list[int]:
    """At most `number` widths that hold these lengths with the least padding, out of the longest
    and 16 quantiles, rounded up to multiples of 4."""
    cuts, longest = np.quantile(lengths, np.linspace(0, 1, 17), method="higher"), lengths.max()
    candidates = sorted({min(-(-int(cut) // 4) * 4, int(longest)) for cut in cuts})
    widest, number = candidates[-1], min(number, len(candidates))
    some, counts = np.unique(lengths, return_counts=True)

    def places(widths):
        return counts @ np.array(widths)[np.searchsorted(widths, some)]

    choices = combinations(candidates[:-1], number - 1)
    return min(([*choice, widest] for choice in choices), key=places)


class PairBatches:
    """Batches of pairs, shuffled, without end; each epoch has every pair once.

    Pairs are sorted into a few buckets by the longer of their two sides, so that little of a batch
    is padding and few shapes are compiled. A batch has about ``tokens`` places on each side; what
    is left of a bucket at the end of an epoch comes in a batch filled up with rows that weigh
    nothing. What comes is a function of pairs, tokens and seed alone.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        tokens: int,
        end_of_text: int,
        seed: int = 0,
        num_buckets: int = 4,
    ):
        """pairs: ids of (source, target), without the end of text.

        Errors: ``ValueError`` if there are none, if a side of one is empty, or if ``tokens`` is
        less than the longest pair's.
        """
        if not pairs:
            raise ValueError("pairs: there are none")
        for number, pair in enumerate(pairs, 1):
            if not all(len(side) for side in pair):
                raise ValueError(f"pairs: one side of number {number} is empty")
        lengths = np.array([max(len(source), len(target) + 1) for source, target in pairs])
        if tokens < lengths.max():
            raise ValueError(
                f"pairs: number {lengths.argmax() + 1} has {lengths.max()} tokens on a side; a "
                f"batch has {tokens} places"
            )
        self.widths = best_widths(lengths, num_buckets)
        self._bucket = np.searchsorted(self.widths, lengths)
        self._pairs, self._tokens, self._end, self._seed = pairs, tokens, end_of_text, seed
        self.epoch, self._place = 0, 0
        self._plan = self._plan_of(0)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._place == len(self._plan):
            self.epoch, self._place = self.epoch + 1, 0
            self._plan = self._plan_of(self.epoch)
        bucket, chosen = self._plan[self._place]
        self._place += 1
        return self._batch(bucket, chosen)

    def state(self) -> dict[str, int]:
        """Where the iterator stands, for JSON."""
        return {"epoch": self.epoch, "place": self._place}

    def restore(self, state: dict[str, int]) -> None:
        """Goes where ``state`` was taken."""
        self.epoch, self._place = state["epoch"], state["place"]
        self._plan = self._plan_of(self.epoch)

    def rows(self, bucket: int) -> int:
        """Rows of a batch of this bucket."""
        return max(1, self._tokens // self.widths[bucket])

    def _plan_of(self, epoch: int) -> list[tuple[int, list[int]]]:
        """(bucket, pairs) of each batch of an epoch, in the order in which they come."""
        words = np.random.Philox(np.random.SeedSequence([self._seed, epoch]))
        order = np.argsort(words.random_raw(len(self._pairs)), kind="stable")
        filling: list[list[int]] = [[] for _ in self.widths]
        plan = []
        for index in order:
            bucket = self._bucket[index]
            filling[bucket].append(int(index))
            if len(filling[bucket]) == self.rows(bucket):
                plan.append((int(bucket), filling[bucket]))
                filling[bucket] = []
        return plan + [(bucket, rest) for bucket, rest in enumerate(filling) if rest]

    def _batch(self, bucket: int, chosen: list[int]) -> Batch:
        """[1, rows, width]; rows beyond those chosen repeat the first, with weight 0."""
        rows = self.rows(bucket)
        shape = (1, rows, self.widths[bucket])
        ids = {name: np.zeros(shape, np.int32) for name in ("inputs", "targets", "source")}
        real, source_real = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        weights = np.zeros(shape, np.float32)
        for row in range(rows):
            source, target = self._pairs[chosen[row] if row < len(chosen) else chosen[0]]
            ids["inputs"][0, row, : len(target) + 1] = [self._end, *target]
            ids["targets"][0, row, : len(target) + 1] = [*target, self._end]
            ids["source"][0, row, : len(source)] = source
            real[0, row, : len(target) + 1] = source_real[0, row, : len(source)] = 1
            weights[0, row, : len(target) + 1] = row < len(chosen)
        return Batch(ids["inputs"], ids["targets"], weights, real, ids["source"], source_real)
