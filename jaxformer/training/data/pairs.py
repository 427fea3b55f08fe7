"""Pairs of lines: how they are read and split, and their batches, of similar lengths.

Training uses teacher forcing: the decoder reads ``[start] + target`` and predicts
``target + [end]``. It predicts all tokens at once, each from the true tokens before it.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.training.batch import WHOLE, Batch, Ids, Rows, Share
from jaxformer.training.data.documents import read_lines, suffix_of
from jaxformer.training.data.split import groups_of_alike

Pair = tuple[str, str]


def read_pairs(source: Path | str, target: Path | str | None = None) -> list[Pair]:
    """Reads pairs of lines from two files, or from the two columns of one file.

    A file may be compressed (.gz, .zst). A file with two columns is .tsv (separated by a tab),
    .jsonl or .ndjson: each line is a list of two texts, or an object with "source" and "target". A
    line ends at a line feed, or at a carriage return and a line feed. Other line ends of Unicode
    are part of a line.

    Args:
        source: The file of sources, or the file of both columns.
        target: The file of targets; None: `source` has both columns.

    Raises:
        ValueError: A file is missing or not UTF-8 text, the files have different numbers of lines
            or no lines, or a side of a pair is empty. The message names the file and the line.
    """
    source = Path(source)
    if target is None:
        pairs = _read_columns(source)
    else:
        sides = [_read_lines(Path(path)) for path in (source, target)]
        if len(sides[0]) != len(sides[1]):
            raise ValueError(
                f"{source} has {len(sides[0])} lines and {target} has {len(sides[1])}; both must "
                "have the same number of lines"
            )
        pairs = list(zip(*sides, strict=True))
    if not pairs:
        raise ValueError(f"{source}: there are no lines")
    for number, pair in enumerate(pairs, 1):
        for path, line in zip((source, target or source), pair, strict=True):
            if not line.strip():
                raise ValueError(f"{path}: line {number} is empty; every line must have text")
    return pairs


def split_pairs(
    pairs: Sequence[Pair], fraction: float | None = None, tokenizer: Tokenizer | None = None
) -> tuple[list[Pair], list[Pair]]:
    """Divides pairs into a training part and a held-out part. Both preserve the order.

    Pairs with alike sources (see `groups_of_alike`) are in the same part. So a model never trains
    on a held-out source, even if its tokenizer ignores case or accents. A digest of their text
    determines which groups of sources are held out.

    Args:
        pairs: Lines of text and their translations.
        fraction: The share of the pairs to hold out; None: 0.05, but at most 1,000 pairs.
        tokenizer: The tokenizer of the sources; None: only their text is compared.

    Returns:
        (the training pairs, the held-out pairs).

    Raises:
        ValueError: There are fewer than two groups of sources.
    """
    sources = [source for source, _ in pairs]
    labels = groups_of_alike(sources, tokenizer)
    digests: dict[Hashable, bytes] = {}
    for source, label in zip(sources, labels, strict=True):
        digest = hashlib.blake2b(source.encode(), digest_size=16).digest()
        digests[label] = min(digest, digests.get(label, digest))
    if len(digests) < 2:
        raise ValueError(
            f"pairs: {len(digests)} different sources are too few to hold some out (sources that "
            "differ only in case, accents or white space count as one)"
        )
    counts = Counter(labels)
    wanted = fraction * len(pairs) if fraction else min(0.05 * len(pairs), 1000)
    chosen, number = set(), 0
    for label in sorted(digests, key=digests.__getitem__)[:-1]:
        if number >= max(1, wanted):
            break
        chosen.add(label)
        number += counts[label]
    sides: tuple[list[Pair], list[Pair]] = ([], [])
    for pair, label in zip(pairs, labels, strict=True):
        sides[label in chosen].append(pair)
    return sides


def _read_columns(path: Path) -> list[Pair]:
    suffix = suffix_of(path.name)
    if suffix not in _COLUMNS:
        raise ValueError(
            f"{path}: --target is missing; a file with both sides must be {', '.join(_COLUMNS)}"
        )
    pairs = []
    for number, line in enumerate(_read_lines(path), 1):
        try:
            source, target = _COLUMNS[suffix](line)
        except ValueError as error:
            raise ValueError(f"{path}: line {number} {error}") from None
        pairs.append((source, target))
    return pairs


def _of_tsv(line: str) -> list[str]:
    columns = line.split("\t")
    if len(columns) != 2:
        raise ValueError(f"has {len(columns)} columns; it must have two, a source and a target")
    return columns


def _of_json(line: str) -> list[str]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {error}") from None
    if isinstance(entry, dict):
        entry = [entry[x] for x in ("source", "target") if x in entry]
    if not isinstance(entry, list) or [type(x) for x in entry] != [str, str]:
        raise ValueError('is neither a list of two texts nor an object with "source" and "target"')
    return entry


_COLUMNS = {".tsv": _of_tsv, ".jsonl": _of_json, ".ndjson": _of_json}


def _read_lines(path: Path) -> list[str]:
    lines = []
    for line in read_lines(str(path)):
        try:
            lines.append(line.decode().removesuffix("\r"))
        except UnicodeDecodeError as error:
            number = len(lines) + 1
            raise ValueError(f"{path}: line {number} is not UTF-8 text: {error}") from None
    return lines


def best_widths(lengths: np.ndarray, number: int) -> list[int]:
    """Returns at most `number` batch widths that hold all lengths with the least padding.

    The candidates are the longest length and 16 quantiles, rounded up to multiples of 4.

    Args:
        lengths: The lengths of the pairs.
        number: The largest number of widths.
    """
    cuts, longest = np.quantile(lengths, np.linspace(0, 1, 17), method="higher"), lengths.max()
    *narrower, widest = sorted({min(-(-int(cut) // 4) * 4, int(longest)) for cut in cuts})
    distinct, counts = np.unique(lengths, return_counts=True)

    def padded_size(widths: Sequence[int]) -> int:
        return int(counts @ np.array(widths)[np.searchsorted(widths, distinct)])

    choices = combinations(narrower, min(number - 1, len(narrower)))
    return min(([*choice, widest] for choice in choices), key=padded_size)


class PairBatches(Iterator[Batch[np.ndarray]]):
    """Endless iterator over batches of shuffled pairs; each epoch has every pair once.

    Pairs are sorted into a few buckets by the length of their longer side. So a batch has little
    padding, and only a few shapes are compiled. A batch has about ``tokens`` tokens on each side,
    including padding. A batch with fewer pairs than rows, at the end of an epoch or because
    ``multiple`` adds rows, is filled up with rows of padding. The pairs of a batch depend on the
    arguments only, except ``multiple`` and ``share``.
    """

    def __init__(
        self,
        pairs: Rows[tuple[Ids, Ids]],
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
        """Prepares to read batches.

        Args:
            pairs: The ids of (source, target), the target without the end of text.
            tokens: Tokens per micro-batch on each side, including padding.
            end_of_text: The id that ends a target.
            seed: The seed of the order.
            num_buckets: The number of widths.
            start: The id before a target; None: `end_of_text`.
            accumulate: Micro-batches per batch, all of one width.
            widths: The widths of batches; None: the best `num_buckets` widths.
            multiple: The rows of a micro-batch are filled up to a multiple of this number.
            share: The rows of each micro-batch to return.

        Raises:
            ValueError: There are no pairs, a side of a pair is empty, or `tokens` or the largest
                width is less than the length of the longest pair.
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
                f"row of a batch holds at most {most}"
            )
        self._bucket = np.searchsorted(self.widths, lengths)
        self._pairs, self._tokens, self._end, self._seed = pairs, tokens, end_of_text, seed
        self._start, self._accumulate = end_of_text if start is None else start, accumulate
        # Of a micro-batch of each bucket: the number of pairs, and of rows including padding.
        self._num_pairs = [max(1, tokens // width) for width in self.widths]
        self._num_rows = [-(-number // multiple) * multiple for number in self._num_pairs]
        self._share = share
        for number in self._num_rows:
            share.rows(number)
        self.epoch, self._place = 0, 0
        self._plan = self._plan_of(0)

    def __next__(self) -> Batch[np.ndarray]:
        """Returns the next batch, with micro-batches along the first axis."""
        if self._place == len(self._plan):
            self.epoch, self._place = self.epoch + 1, 0
            self._plan = self._plan_of(self.epoch)
        planned = self._plan[self._place]
        self._place += 1
        return self._batch(*planned)

    def once(self) -> Iterator[Batch[np.ndarray]]:
        """Yields every pair once, in single micro-batches [rows, width]."""
        for planned in self._plan_of(0):
            batch = self._batch(*planned)
            for number in range(self._accumulate):
                yield jax.tree.map(lambda x, number=number: x[number], batch)

    def shapes(self) -> list[Batch[jax.ShapeDtypeStruct]]:
        """Returns the shape of a batch of each width."""
        empty = (self._batch(bucket, []) for bucket in range(len(self.widths)))
        return [jax.eval_shape(lambda x: x, batch) for batch in empty]

    def state(self) -> dict[str, Any]:
        """Returns the position of the iterator, for JSON."""
        return {"epoch": self.epoch, "place": self._place, **self._identity()}

    def restore(self, state: dict[str, Any]) -> None:
        """Moves the iterator to the position in ``state``.

        Raises:
            ValueError: ``state`` belongs to other data or settings.
        """
        for name, here in self._identity().items():
            if state.get(name) != here:
                raise ValueError(f"state: its {name} is {state.get(name)!r}, but here it is {here}")
        self.epoch, self._place = state["epoch"], state["place"]
        self._plan = self._plan_of(self.epoch)

    def _identity(self) -> dict[str, Any]:
        sizes = {"pairs": len(self._pairs), "tokens": self._tokens, "seed": self._seed}
        return {**sizes, "widths": list(self.widths), "accumulate": self._accumulate}

    def _plan_of(self, epoch: int) -> list[tuple[int, list[int]]]:
        """Returns (bucket, numbers of the pairs) of each batch of an epoch, in order."""
        words = np.random.Philox(np.random.SeedSequence([self._seed, epoch]))
        order = np.argsort(words.random_raw(len(self._pairs)), kind="stable")
        filling: list[list[int]] = [[] for _ in self.widths]
        plan = []
        for index in order:
            bucket = self._bucket[index]
            filling[bucket].append(int(index))
            if len(filling[bucket]) == self._accumulate * self._num_pairs[bucket]:
                plan.append((int(bucket), filling[bucket]))
                filling[bucket] = []
        return plan + [(bucket, rest) for bucket, rest in enumerate(filling) if rest]

    def _batch(self, bucket: int, chosen: list[int]) -> Batch[np.ndarray]:
        """Returns a batch [accumulate, rows, width]. Rows without a pair are padding."""
        places, pairs = self._num_rows[bucket], self._num_pairs[bucket]
        rows = self._share.rows(places, self._accumulate)
        shape = (len(rows), self.widths[bucket])
        inputs, targets, source, real, source_real = np.zeros((5, *shape), np.int32)
        for row, (micro, place) in enumerate(zip(*divmod(rows, places), strict=True)):
            number = micro * pairs + place
            if place >= pairs or number >= len(chosen):
                continue
            read, written = self._pairs[chosen[number]]
            inputs[row, : len(written) + 1] = [self._start, *written]
            targets[row, : len(written) + 1] = [*written, self._end]
            source[row, : len(read)] = read
            real[row, : len(written) + 1] = source_real[row, : len(read)] = 1
        batch = Batch(inputs, targets, real.astype(np.float32), real, source, source_real)
        return jax.tree.map(lambda x: x.reshape(self._accumulate, -1, x.shape[1]), batch)
