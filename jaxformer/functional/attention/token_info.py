"""Positions and documents of tokens, and slices of sequences."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Integer

from jaxformer.functional.arguments import whole_number
from jaxformer.functional.symbolic import Size, is_known


class DynamicSlice(NamedTuple):
    """A slice of `size` tokens whose start is known only at run time."""

    start: Any
    size: int


# A range of the tokens of a sequence.
Part = slice | DynamicSlice


def cut(array: Any, part: Part, axis: int = -1) -> Any:
    """Returns `part` of the array along `axis`, which is −1 or −2."""
    if isinstance(part, DynamicSlice):
        return jax.lax.dynamic_slice_in_dim(array, part.start, part.size, axis)
    return array[(..., part, *[slice(None)] * (-1 - axis))]


def put(array: Any, part: Part, new: Any, axis: int = -1) -> Any:
    """Replaces `part` of the array along `axis` by `new`."""
    return jax.lax.dynamic_update_slice_in_dim(array, new, part.start, axis)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["positions", "segment_ids"],
    meta_fields=["length"],
)
@dataclass(frozen=True)
class TokenInfo:
    """Positions and documents of the tokens of a sequence.

    Attributes:
        length: the number of tokens.
        positions: int [*batch, length], or None for 0, 1, 2, … (known while tracing).
        segment_ids: int [*batch, length], the document of each token, 0 for padding or an empty
            slot of a cache; None for one document without padding.
    """

    length: Size
    positions: Any = None
    segment_ids: Any = None

    def __post_init__(self) -> None:
        """Checks `length`."""
        if is_known(self.length):
            whole_number("length", self.length, 0)

    def part(self, part: Part) -> "TokenInfo":
        """Returns the `TokenInfo` of a part of the sequence, without renumbering positions."""
        if isinstance(part, DynamicSlice):
            in_order, length = part.start + jax.numpy.arange(part.size), part.size
        else:
            in_order, length = _arange(part.start, part.stop), part.stop - part.start
        positions = in_order if self.positions is None else cut(self.positions, part)
        segment_ids = None if self.segment_ids is None else cut(self.segment_ids, part)
        return TokenInfo(length, positions, segment_ids)

    def with_axis(self, axis: int) -> "TokenInfo":
        """Returns the `TokenInfo` for arrays with an additional axis at `axis`.

        One-dimensional positions, which all batch elements share, remain unchanged.
        """
        positions, segment_ids = self.positions, self.segment_ids
        if np.ndim(positions) > 1:
            positions = jax.numpy.expand_dims(positions, axis)
        if segment_ids is not None:
            segment_ids = jax.numpy.expand_dims(segment_ids, axis)
        return TokenInfo(self.length, positions, segment_ids)

    def followed_by(self, other: "TokenInfo") -> "TokenInfo":
        """Concatenates the tokens of this `TokenInfo` and the tokens of `other`."""
        return jax.tree.map(
            lambda *x: jax.numpy.concatenate(x, axis=-1),
            replace(self, length=self.length + other.length),
            replace(other, length=self.length + other.length),
        )

    def repeat_batch(self, batch_size: int) -> "TokenInfo":
        """Repeats each batch element equally often, so that the batch size is `batch_size`."""
        positions, segment_ids = (
            x if np.ndim(x) < 2 else jax.numpy.repeat(x, batch_size // len(x), axis=0)
            for x in (self.positions, self.segment_ids)
        )
        return TokenInfo(self.length, positions, segment_ids)

    def position_ids(self) -> Integer[Array | np.ndarray, "*batch length"]:
        """Returns `positions`, or 0, 1, 2, … if `positions` is None."""
        if self.positions is not None:
            return self.positions
        return _arange(0, self.length)


def _arange(start: int, stop: Size) -> Any:
    """Returns start … stop − 1, as a static NumPy array if `stop` is known while tracing."""
    return (np if is_known(stop) else jax.numpy).arange(start, stop)
