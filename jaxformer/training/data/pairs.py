"""Pairs of lines: reading, splitting, and batches of pairs with similar lengths.

Training uses teacher forcing. The decoder reads ``[start] + target`` and predicts ``target +
[end]``, all positions in one pass. Each prediction depends on the true previous tokens.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.training.batch import WHOLE, Batch, Ids, Indexed, Share
from jaxformer.training.data.documents import format_suffix, read_lines
from jaxformer.training.data.epochs import EpochBatches, shuffled
from jaxformer.training.data.split import choose_held_out

Pair = tuple[str, str]


def read_pairs(source: Path | str, target: Path | str | None = None) -> list[Pair]:
    """Reads pairs of lines from two files, or from one file with two columns.

    Files may be compressed (.gz, .zst). A file with two columns is .tsv (separated by a tab),
    .jsonl or .ndjson. Each line of a .jsonl or .ndjson file is a list of two texts, or an object
    with "source" and "target". Lines end with a line feed, optionally after a carriage return.
    Other Unicode line separators are part of a line.

    Args:
        source: The file of source texts, or a file with a source column and a target column.
        target: The file of target texts; None if `source` has both columns.

    Raises:
        ValueError: A file is missing or not UTF-8 text, the files have different numbers of lines
            or are empty, or a side of a pair is empty. The error message includes the path of the
            file and the line number.
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
        raise ValueError(f"{source}: the file is empty; it must have a line per pair")
    for number, pair in enumerate(pairs, 1):
        for path, line in zip((source, target or source), pair, strict=True):
            if not line.strip():
                raise ValueError(f"{path}: line {number} is empty; every line must have text")
    return pairs


def split_pairs(
    pairs: Sequence[Pair], fraction: float | None = None, tokenizer: Tokenizer | None = None
) -> tuple[list[Pair], list[Pair]]:
    """Splits pairs into a training part and a held-out part. Both parts keep the order of pairs.

    Pairs with similar sources go to the same part (see `choose_held_out`).

    Args:
        pairs: Lines of text and their translations.
        fraction: The fraction of the pairs to hold out. If None, the fraction is 0.05, but at most
            1,000 pairs are held out.
        tokenizer: The tokenizer of the sources (see `choose_held_out`).

    Returns:
        (the training pairs, the held-out pairs).

    Raises:
        ValueError: There are fewer than two groups of similar sources.
    """
    held_out = choose_held_out([source for source, _ in pairs], fraction, tokenizer)
    sides: tuple[list[Pair], list[Pair]] = ([], [])
    for pair, is_held_out in zip(pairs, held_out, strict=True):
        sides[is_held_out].append(pair)
    return sides


def _read_columns(path: Path) -> list[Pair]:
    suffix = format_suffix(path.name)
    if suffix not in _COLUMNS:
        raise ValueError(
            f"{path}: --target is missing; only files with the suffixes {', '.join(_COLUMNS)} can "
            "contain both sources and targets"
        )
    pairs = []
    for number, line in enumerate(_read_lines(path), 1):
        try:
            source, target = _COLUMNS[suffix](line)
        except ValueError as error:
            raise ValueError(f"{path}: line {number} {error}") from None
        pairs.append((source, target))
    return pairs


def _parse_tsv(line: str) -> list[str]:
    columns = line.split("\t")
    if len(columns) != 2:
        raise ValueError(f"has {len(columns)} columns; it must have two, a source and a target")
    return columns


def _parse_json(line: str) -> list[str]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {error}") from None
    if isinstance(entry, dict):
        entry = [entry[x] for x in ("source", "target") if x in entry]
    if not isinstance(entry, list) or [type(x) for x in entry] != [str, str]:
        raise ValueError('is neither a list of two texts nor an object with "source" and "target"')
    return entry


_COLUMNS = {".tsv": _parse_tsv, ".jsonl": _parse_json, ".ndjson": _parse_json}


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
    """Chooses at most `number` batch widths so that batches have the least padding.

    The candidates are the longest length and 16 quantiles of the lengths, rounded up to multiples
    of 4. The largest chosen width is always the longest length.

    Args:
        lengths: The length of each pair's longer side.
        number: The maximum number of batch widths.
    """
    cuts, longest = np.quantile(lengths, np.linspace(0, 1, 17), method="higher"), lengths.max()
    *narrower, widest = sorted({min(-(-int(cut) // 4) * 4, int(longest)) for cut in cuts})
    distinct, counts = np.unique(lengths, return_counts=True)

    def padded_size(widths: Sequence[int]) -> int:
        return int(counts @ np.array(widths)[np.searchsorted(widths, distinct)])

    choices = combinations(narrower, min(number - 1, len(narrower)))
    return min(([*choice, widest] for choice in choices), key=padded_size)


class PairBatches(EpochBatches[Batch[np.ndarray], tuple[int, list[int]]]):
    """Endless iterator over batches of shuffled pairs. Each epoch contains every pair once.

    Pairs are sorted into a few buckets by the length of their longer side. Batches then need little
    padding, and only a few shapes are compiled. A micro-batch has about ``tokens`` tokens on each
    side, including padding. Empty sequences fill the last batches of an epoch, and pad each
    micro-batch to a multiple of ``multiple`` sequences. ``multiple`` and ``share`` do not affect
    which pairs form a batch.
    """

    def __init__(
        self,
        pairs: Indexed[tuple[Ids, Ids]],
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
        """Initializes the iterator.

        Args:
            pairs: The token ids of (source, target), without an end-of-text token.
            tokens: Tokens per micro-batch on each side, including padding.
            end_of_text: The token id after each target.
            seed: Seed of the random order.
            num_buckets: The number of batch widths to choose if `widths` is None.
            start: The token id before each target in the decoder's input; `end_of_text` if None.
            accumulate: Micro-batches per batch, all of the same width.
            widths: The batch widths; chosen by `best_widths` if None.
            multiple: The batch size of a micro-batch is padded to a multiple of this number.
            share: Which shard of each micro-batch to return.

        Raises:
            ValueError: `pairs` is empty, a side of a pair is empty, or the longest pair has more
                tokens than `tokens` or the largest width.
        """
        if not len(pairs):
            raise ValueError("pairs is empty; it must have at least one pair")
        lengths = np.empty(len(pairs), int)
        for number, (source, target) in enumerate(pairs):
            if not len(source) or not len(target):
                raise ValueError(f"pairs: one side of pair {number + 1} is empty")
            lengths[number] = max(len(source), len(target) + 1)
        self.widths = best_widths(lengths, num_buckets) if widths is None else widths
        most = min(tokens, self.widths[-1])
        if most < lengths.max():
            raise ValueError(
                f"pairs: pair {lengths.argmax() + 1} has {lengths.max()} tokens on a side; a "
                f"sequence of a batch holds at most {most}"
            )
        self._bucket = np.searchsorted(self.widths, lengths)
        self._pairs, self._tokens, self._end, self._seed = pairs, tokens, end_of_text, seed
        self._start, self._accumulate = end_of_text if start is None else start, accumulate
        # For each bucket, the number of pairs in a micro-batch.
        self._num_pairs = [max(1, tokens // width) for width in self.widths]
        # For each bucket, the same number rounded up to a multiple of `multiple`. The additional
        # pairs are padding.
        self._batch_sizes = [-(-number // multiple) * multiple for number in self._num_pairs]
        self._share = share
        for number in self._batch_sizes:
            share.indices(number)
        super().__init__()

    def once(self) -> Iterator[Batch[np.ndarray]]:
        """Yields micro-batches [batch, width] that together contain every pair once."""
        for planned in self._plan_epoch(0):
            batch = self._build(planned)
            for number in range(self._accumulate):
                yield jax.tree.map(lambda x, number=number: x[number], batch)

    def shapes(self) -> list[Batch[jax.ShapeDtypeStruct]]:
        """Returns the shape of a batch for each width."""
        empty = (self._build((bucket, [])) for bucket in range(len(self.widths)))
        return [jax.eval_shape(lambda x: x, batch) for batch in empty]

    def _identity(self) -> dict[str, Any]:
        sizes = {"pairs": len(self._pairs), "tokens": self._tokens, "seed": self._seed}
        return {**sizes, "widths": list(self.widths), "accumulate": self._accumulate}

    def _plan_epoch(self, epoch: int) -> list[tuple[int, list[int]]]:
        """Returns (index of the bucket, indices of the pairs) for each batch of an epoch."""
        order = shuffled(len(self._pairs), self._seed, epoch)
        filling: list[list[int]] = [[] for _ in self.widths]
        plan = []
        for index in order:
            bucket = self._bucket[index]
            filling[bucket].append(int(index))
            if len(filling[bucket]) == self._accumulate * self._num_pairs[bucket]:
                plan.append((int(bucket), filling[bucket]))
                filling[bucket] = []
        return plan + [(bucket, rest) for bucket, rest in enumerate(filling) if rest]

    def _build(self, planned: tuple[int, list[int]]) -> Batch[np.ndarray]:
        """Returns a batch [accumulate, batch, width]. Sequences without a pair are only padding."""
        bucket, chosen = planned
        places, pairs = self._batch_sizes[bucket], self._num_pairs[bucket]
        indices = self._share.indices(places, self._accumulate)
        shape = (len(indices), self.widths[bucket])
        inputs, targets, source, real, source_real = np.zeros((5, *shape), np.int32)
        for index, (micro, place) in enumerate(zip(*divmod(indices, places), strict=True)):
            number = micro * pairs + place
            if place >= pairs or number >= len(chosen):
                continue
            read, written = self._pairs[chosen[number]]
            inputs[index, : len(written) + 1] = [self._start, *written]
            targets[index, : len(written) + 1] = [*written, self._end]
            source[index, : len(read)] = read
            real[index, : len(written) + 1] = source_real[index, : len(read)] = 1
        batch = Batch(inputs, targets, real.astype(np.float32), real, source, source_real)
        return jax.tree.map(lambda x: x.reshape(self._accumulate, -1, x.shape[1]), batch)
