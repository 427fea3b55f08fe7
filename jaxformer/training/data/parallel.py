"""Parallel text: pairs of lines, from two files or from one that holds both sides."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from jaxformer.training.data.documents import opened, read_lines

Pair = tuple[str, str]


def read_pairs(source: Path | str, target: Path | str | None = None) -> list[Pair]:
    """The lines of two files side by side or, without a target, the two columns of one.

    A file may be gzip (its name ends in .gz). One of two columns is .tsv (a tab between them), or
    .jsonl: each line a list of two texts, or an object with "source" and "target". A line ends at a
    line feed, or at a carriage return and a line feed. A carriage return elsewhere, and what else
    Unicode may call a line's end, is a part of it.

    Errors: ``ValueError`` naming the file, and the line, if one is missing or not UTF-8 text, if
    they have unequal numbers of lines or none, or if a side of a pair is empty.
    """
    source = Path(source)
    if target is None:
        pairs = _read_columns(source)
    else:
        sides = [_read_lines(Path(path)) for path in (source, target)]
        if len(sides[0]) != len(sides[1]):
            raise ValueError(
                f"{source} has {len(sides[0])} lines and {target} has {len(sides[1])}; a parallel "
                "text has as many on both sides"
            )
        pairs = list(zip(*sides, strict=True))
    if not pairs:
        raise ValueError(f"{source}: there are no lines")
    for number, pair in enumerate(pairs, 1):
        for path, line in zip((source, target or source), pair, strict=True):
            if not line.strip():
                raise ValueError(f"{path}: line {number} is empty; it has nothing to translate")
    return pairs


def split_pairs(
    pairs: Sequence[Pair], fraction: float | None = None
) -> tuple[list[Pair], list[Pair]]:
    """(to train on, held out): of the pairs, in their order, about a fraction by a digest of the
    source; None: 0.05, but at most 1,000. Pairs of one source are on the same side.

    Errors: ``ValueError`` if there are fewer than two sources.
    """
    digests = [hashlib.blake2b(source.encode(), digest_size=16).digest() for source, _ in pairs]
    wanted = fraction * len(pairs) if fraction else min(0.05 * len(pairs), 1000)
    counts: dict[bytes, int] = {}
    for digest in digests:
        counts[digest] = counts.get(digest, 0) + 1
    if len(counts) < 2:
        raise ValueError(f"pairs: {len(counts)} different sources are too few to hold some out")
    chosen, number = set(), 0
    for digest in sorted(counts)[:-1]:
        if number >= max(1, wanted):
            break
        chosen.add(digest)
        number += counts[digest]
    sides: tuple[list[Pair], list[Pair]] = ([], [])
    for pair, digest in zip(pairs, digests, strict=True):
        sides[digest in chosen].append(pair)
    return sides


def _read_columns(path: Path) -> list[Pair]:
    suffix = Path(path.stem if path.suffix == ".gz" else path.name).suffix
    if suffix not in _COLUMNS:
        raise ValueError(
            f"{path}: --target is missing; one file holds both sides only as .tsv or .jsonl"
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
        raise ValueError(f"has {len(columns)} columns; a source and a target are two")
    return columns


def _of_json(line: str) -> list[str]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from None
    columns = [entry.get(x) for x in ("source", "target")] if isinstance(entry, dict) else entry
    if not isinstance(columns, list) or [type(x) for x in columns] != [str, str]:
        raise ValueError('is neither a list of two texts nor an object with "source" and "target"')
    return columns


_COLUMNS = {".tsv": _of_tsv, ".jsonl": _of_json}


def _read_lines(path: Path) -> list[str]:
    lines = []
    with opened(str(path)) as file:
        for line in read_lines(str(path), file):
            try:
                lines.append(line.decode().removesuffix("\r"))
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}: line {len(lines) + 1} is not UTF-8 text: {error}"
                ) from None
    return lines
