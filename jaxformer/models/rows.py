"""Rows of ids of any lengths: checked, and padded to a few widths (and so to few programs)."""

import numpy as np


def row_of_ids(name: str, row, vocab_size: int, limit: str = "vocab_size") -> np.ndarray:
    """The row as an array, or a ValueError that names what is wrong with it."""
    ids = np.asarray(row)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"{name} is {ids.dtype} {ids.shape}; it must be a row of token ids")
    outside = ids[(ids < 0) | (ids >= vocab_size)] if ids.size else ids
    if outside.size:
        raise ValueError(f"{name} holds id {outside[0]}; {limit} is {vocab_size}")
    return ids


def bucket(length: int) -> int:
    """The least of 32, 48, 64, 96, 128, … (2ⁿ and 3 · 2ⁿ) that is at least `length`."""
    return min(power_of_two(length, 32), 3 * power_of_two(-(-length // 3), 16))


def power_of_two(length: int, smallest: int) -> int:
    """The least power of two that is at least `length` (and `smallest`)."""
    return max(smallest, 1 << (length - 1).bit_length())


def padded(rows, width: int, *, left: bool = False):
    """(ids, segments) int [rows, width]: padding, of segment 0, on the right or on the left."""
    ids, segments = np.zeros((2, len(rows), width), np.int32)
    for number, row in enumerate(rows):
        there = slice(width - len(row), width) if left else slice(len(row))
        ids[number, there], segments[number, there] = row, 1
    return ids, segments
