"""Rows of ids of any lengths: their checks, and padding to few widths and batch sizes.

Each shape needs its own compiled program, so lengths and batch sizes are rounded up to a few
values.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int


def row_of_ids(name: str, row: Any, vocab_size: int, limit: str = "vocab_size") -> np.ndarray:
    """Returns the row as an array of ids.

    Raises:
        ValueError: it is not a row of whole numbers, or an id is not in the vocabulary.
    """
    ids = np.asarray(row)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"{name} is {ids.dtype} {ids.shape}; it must be a row of token ids")
    outside = ids[(ids < 0) | (ids >= vocab_size)] if ids.size else ids
    if outside.size:
        raise ValueError(f"{name} holds id {outside[0]}; {limit} is {vocab_size}")
    return ids


def bucket(length: int) -> int:
    """Returns the least of 32, 48, 64, 96, 128, … (2ⁿ and 3 · 2ⁿ) that is at least `length`."""
    return min(power_of_two(length, 32), 3 * power_of_two(-(-length // 3), 16))


def batch_bucket(batch_size: int) -> int:
    """Returns the least of 1, 2, 4, 8, 12, 16, 24, 32, … that is at least `batch_size`.

    With a mesh in context it returns `batch_size`, which the caller chose for its devices.
    """
    if jax.sharding.get_abstract_mesh().axis_names:
        return batch_size
    return min(power_of_two(batch_size, 1), 3 * power_of_two(-(-batch_size // 3), 4))


def with_batch_size(rows: Any, batch_size: int) -> Any:
    """Returns `rows` followed by copies of its first row.

    Args:
        rows: a list, an array with a batch axis, or None, which remains None.
        batch_size: number of rows of the result, at least that of `rows`.
    """
    if rows is None or len(rows) == batch_size:
        return rows
    missing = batch_size - len(rows)
    if hasattr(rows, "shape"):
        rows = np.asarray(rows)
        return np.concatenate([rows, np.repeat(rows[:1], missing, axis=0)])
    return [*rows, *[rows[0]] * missing]


def power_of_two(length: int, smallest: int) -> int:
    """Returns the least power of two that is at least `length` and `smallest`."""
    return max(smallest, 1 << (length - 1).bit_length())


def padded(
    rows: Sequence[Any], width: int, *, left: bool = False
) -> tuple[Int[np.ndarray, "rows width"], Int[np.ndarray, "rows width"]]:
    """Pads rows of ids on the right, or with `left` on the left.

    Returns:
        (ids, segments), both int [rows, width]; segments are 0 for padding and otherwise 1.
    """
    ids, segments = np.zeros((2, len(rows), width), np.int32)
    for number, row in enumerate(rows):
        columns = slice(width - len(row), width) if left else slice(len(row))
        ids[number, columns], segments[number, columns] = row, 1
    return ids, segments
