"""Parallel text: pairs of lines, from two files or from one that holds both sides."""

import hashlib
import json
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path

from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.training.data.reading import read_lines, suffix_of
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
