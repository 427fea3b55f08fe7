"""Batches of pairs of about one length.

A target is learnt by teacher forcing: the decoder reads ``[start] + target`` and is to say
``target + [end]``, every token at once, each from the true ones before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import jax
import numpy as np

from jaxformer.training.batch import WHOLE, Batch, Share


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
    is padding and few shapes are compiled. A batch has about ``tokens`` places on each side, and
    rows that are padding alone where there are more places for rows than pairs: at the end of an
    epoch, and on devices among which the pairs do not divide. Which pairs come together is a
    function of the arguments alone, and of neither the devices nor the share.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        tokens: int,
        end_of_text: int,
        seed: int = 0,
        num_buckets: int = 4,
        *,
        start: int | None = None,
        accumulate: int = 1,
        widths: list[int] | None = None,
        multiple: int = 1,
        share: Share = WHOLE,
    ):
        """pairs: ids of (source, target), the target without the end of text. start: what a target
        is written after; None: the end of text. accumulate: micro-batches of one width per batch.
        widths: in the place of the best ``num_buckets``. multiple: the rows of a micro-batch
        are filled up to one of it. share: of each micro-batch, the rows that are given.

        Errors: ``ValueError`` if there are none, if a side of one is empty, or if ``tokens`` or
        the widths are less than the longest pair's.
        """
        if not len(pairs):
            raise ValueError("pairs: there are none")
        lengths = np.empty(len(pairs), int)
        for number, (source, target) in enumerate(pairs):
            if not len(source) or not len(target):
                raise ValueError(f"pairs: one side of number {number + 1} is empty")
            lengths[number] = max(len(source), len(target) + 1)
        self.widths = best_widths(lengths, num_buckets) if widths is None else widths
        most = min(tokens, self.widths[-1])
        if most < lengths.max():
            raise ValueError(
                f"pairs: number {lengths.argmax() + 1} has {lengths.max()} tokens on a side; a "
                f"batch has {most} places"
            )
        self._bucket = np.searchsorted(self.widths, lengths)
        self._pairs, self._tokens, self._end, self._seed = pairs, tokens, end_of_text, seed
        self._start, self._accumulate = end_of_text if start is None else start, accumulate
        self._multiple, self._share = multiple, share
        for bucket in range(len(self.widths)):
            share.rows(self._places(bucket))
        self.epoch, self._place = 0, 0
        self._plan = self._plan_of(0)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._place == len(self._plan):
            self.epoch, self._place = self.epoch + 1, 0
            self._plan = self._plan_of(self.epoch)
        planned = self._plan[self._place]
        self._place += 1
        return self._batch(*planned)

    def once(self) -> Iterator[Batch]:
        """Every pair once, each micro-batch by itself, [rows, width]."""
        for planned in self._plan_of(0):
            batch = self._batch(*planned)
            for number in range(self._accumulate):
                yield jax.tree.map(lambda x, number=number: x[number], batch)

    def shapes(self) -> list[Batch]:
        """The shape of a batch of each width."""
        shapes = []
        for bucket, width in enumerate(self.widths):
            rows = self._places(bucket) // self._share.count
            shape = (self._accumulate, rows, width)
            ids, weights = (jax.ShapeDtypeStruct(shape, x) for x in (np.int32, np.float32))
            shapes.append(Batch(ids, ids, weights, ids, ids, ids))
        return shapes

    def state(self) -> dict[str, Any]:
        """Where the iterator stands, for JSON."""
        return {"epoch": self.epoch, "place": self._place, **self._identity()}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes where ``state`` was taken.

        Errors: ``ValueError`` if it was taken from others: the order can only be resumed unchanged.
        """
        for name, here in self._identity().items():
            if state.get(name) != here:
                raise ValueError(f"state: its {name} is {state.get(name)!r}, but here it is {here}")
        self.epoch, self._place = state["epoch"], state["place"]
        self._plan = self._plan_of(self.epoch)

    def _identity(self) -> dict[str, Any]:
        sizes = {"pairs": len(self._pairs), "tokens": self._tokens, "seed": self._seed}
        return {**sizes, "widths": list(self.widths), "accumulate": self._accumulate}

    def _rows(self, bucket: int) -> int:
        """Pairs of a micro-batch of this bucket."""
        return max(1, self._tokens // self.widths[bucket])

    def _places(self, bucket: int) -> int:
        """Rows of such a micro-batch, those of padding too."""
        return -(-self._rows(bucket) // self._multiple) * self._multiple

    def _plan_of(self, epoch: int) -> list[tuple[int, list[int]]]:
        """(bucket, pairs) of each batch of an epoch, in the order in which they come."""
        words = np.random.Philox(np.random.SeedSequence([self._seed, epoch]))
        order = np.argsort(words.random_raw(len(self._pairs)), kind="stable")
        filling: list[list[int]] = [[] for _ in self.widths]
        plan = []
        for index in order:
            bucket = self._bucket[index]
            filling[bucket].append(int(index))
            if len(filling[bucket]) == self._accumulate * self._rows(bucket):
                plan.append((int(bucket), filling[bucket]))
                filling[bucket] = []
        return plan + [(bucket, rest) for bucket, rest in enumerate(filling) if rest]

    def _batch(self, bucket: int, chosen: list[int]) -> Batch:
        """[accumulate, rows, width]; a row that no pair is left for is padding."""
        places, pairs = self._places(bucket), self._rows(bucket)
        rows = self._share.rows(places, self._accumulate)
        shape = (len(rows), self.widths[bucket])
        inputs, targets, source = (np.zeros(shape, np.int32) for _ in range(3))
        real, source_real = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for row, (micro, place) in enumerate(zip(*divmod(rows, places), strict=True)):
            number = micro * pairs + place
            if place >= pairs or number >= len(chosen):
                continue
            read, said = self._pairs[chosen[number]]
            inputs[row, : len(said) + 1] = [self._start, *said]
            targets[row, : len(said) + 1] = [*said, self._end]
            source[row, : len(read)] = read
            real[row, : len(said) + 1] = source_real[row, : len(read)] = 1
        batch = Batch(inputs, targets, real.astype(np.float32), real, source, source_real)
        return jax.tree.map(lambda x: x.reshape(self._accumulate, -1, x.shape[1]), batch)
