"""Sequences of ids or vectors: checks, and padding to a few lengths and batch sizes.

Each shape needs its own compiled program, so lengths and batch sizes are rounded up to a few
values.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Shaped


def id_sequence(name: str, sequence: Any, vocab_size: int, limit: str = "vocab_size") -> np.ndarray:
    """Converts a sequence to an array of ids.

    Raises:
        ValueError: The sequence does not consist of whole numbers, or an id is not in the
            vocabulary.
    """
    ids = np.asarray(sequence)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError(f"{name} is {ids.dtype} {ids.shape}; it must be a list of token ids")
    outside = ids[(ids < 0) | (ids >= vocab_size)] if ids.size else ids
    if outside.size:
        raise ValueError(f"{name} contains id {outside[0]}, but {limit} is {vocab_size}")
    return ids


def vector_sequence(name: str, sequence: Any, width: int) -> Float[np.ndarray, "length width"]:
    """Converts a sequence to a float32 array of vectors.

    Raises:
        ValueError: The sequence does not consist of finite vectors with `width` features.
    """
    vectors = np.asarray(sequence)
    is_float = jnp.issubdtype(vectors.dtype, jnp.floating)
    if not is_float or vectors.ndim != 2 or vectors.shape[1] != width:
        raise ValueError(
            f"{name} is {vectors.dtype} {vectors.shape}; it must be float [length, {width}], a "
            "vector for each position"
        )
    is_finite = np.isfinite(vectors).all(axis=1)
    if not is_finite.all():
        raise ValueError(
            f"{name} is not finite at position {int(is_finite.argmin())}; it must be finite"
        )
    return vectors.astype(np.float32)


def bucket(length: int) -> int:
    """Rounds `length` up to one of 32, 48, 64, 96, 128, … (2ⁿ and 3 · 2ⁿ)."""
    return min(power_of_two(length, 32), 3 * power_of_two(-(-length // 3), 16))


def batch_bucket(batch_size: int) -> int:
    """Rounds `batch_size` up to one of 1, 2, 4, 8, 12, 16, 24, 32, and so on.

    With a mesh in context, `batch_size` is returned unchanged, because the caller chose the batch
    size for the devices.
    """
    if jax.sharding.get_abstract_mesh().axis_names:
        return batch_size
    return min(power_of_two(batch_size, 1), 3 * power_of_two(-(-batch_size // 3), 4))


def with_batch_size(sequences: Any, batch_size: int) -> Any:
    """Appends copies of the first sequence until there are `batch_size` sequences.

    Args:
        sequences: a list, an array with a batch axis, or None, which is returned unchanged.
        batch_size: the batch size of the result.
    """
    if sequences is None or len(sequences) == batch_size:
        return sequences
    missing = batch_size - len(sequences)
    if hasattr(sequences, "shape"):
        sequences = np.asarray(sequences)
        return np.concatenate([sequences, np.repeat(sequences[:1], missing, axis=0)])
    return [*sequences, *[sequences[0]] * missing]


def power_of_two(length: int, smallest: int) -> int:
    """Rounds `length` up to a power of two, at least `smallest`."""
    return max(smallest, 1 << (length - 1).bit_length())


def padded(
    sequences: Sequence[Any], width: int, *, left: bool = False
) -> tuple[Shaped[np.ndarray, "batch width ..."], Int[np.ndarray, "batch width"]]:
    """Pads sequences of ids or vectors to equal lengths, on the right unless `left` is True.

    Returns:
        (sequences, segment_ids): int [batch, width] or float32 [batch, width, features], and int
        [batch, width]. The segment ids are 0 for padding and otherwise 1.
    """
    segment_ids = np.zeros((len(sequences), width), np.int32)
    features = np.shape(sequences[0])[1:]
    items = np.zeros((*segment_ids.shape, *features), np.float32 if features else np.int32)
    for number, sequence in enumerate(sequences):
        columns = slice(width - len(sequence), width) if left else slice(len(sequence))
        items[number, columns], segment_ids[number, columns] = sequence, 1
    return items, segment_ids
