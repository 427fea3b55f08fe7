"""Positions and documents of tokens, and parts of rows."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Integer

from jaxformer.functional.arguments import whole_number
from jaxformer.functional.symbolic import Size, is_known


class DynamicSlice(NamedTuple):
    """`size` tokens of a row from `start` on, where `start` is known only at run time."""

    start: Any
    size: int


Part = slice | DynamicSlice  # part of a row


def cut(array: Any, part: Part, axis: int = -1) -> Any:
    """Returns `part` of the array along `axis`, which is −1 or −2."""
    if isinstance(part, DynamicSlice):
        return jax.lax.dynamic_slice_in_dim(array, part.start, part.size, axis)
    return array[(..., part, *[slice(None)] * (-1 - axis))]


def put(array: Any, part: Part, new: Any, axis: int = -1) -> Any:
    """Returns the array with `new` in place of `part` along `axis`."""
    return jax.lax.dynamic_update_slice_in_dim(array, new, part.start, axis)


@partial(
    jax.tree_util.register_dataclass, data_fields=["positions", "segments"], meta_fields=["length"]
)
@dataclass(frozen=True)
class TokenInfo:
    """Positions and documents of the tokens of a row.

    Attributes:
        length: the number of tokens.
        positions: int [*batch, length], or None for 0, 1, 2, … along the row (known while tracing).
        segments: int [*batch, length], the document of each token, 0 for padding or an empty slot;
            None for one document without padding.
    """

    length: Size
    positions: Any = None
    segments: Any = None

    def __post_init__(self) -> None:
        """Checks `length`."""
        if is_known(self.length):
            whole_number("length", self.length, 0)

    def part(self, part: Part) -> "TokenInfo":
        """Returns the `TokenInfo` of one contiguous part of the row, with unchanged positions."""
        if isinstance(part, DynamicSlice):
            in_order, length = part.start + jax.numpy.arange(part.size), part.size
        else:
            in_order, length = _arange(part.start, part.stop), part.stop - part.start
        positions = in_order if self.positions is None else cut(self.positions, part)
        segments = None if self.segments is None else cut(self.segments, part)
        return TokenInfo(length, positions, segments)

    def with_axis(self, axis: int) -> "TokenInfo":
        """Returns the `TokenInfo` for arrays with an additional axis at `axis`.

        One-dimensional positions, which all batch elements share, remain unchanged.
        """
        positions, segments = self.positions, self.segments
        if np.ndim(positions) > 1:
            positions = jax.numpy.expand_dims(positions, axis)
        if segments is not None:
            segments = jax.numpy.expand_dims(segments, axis)
        return TokenInfo(self.length, positions, segments)

    def followed_by(self, other: "TokenInfo") -> "TokenInfo":
        """Returns the `TokenInfo` of these tokens and then the others, both [batch, length]."""
        return jax.tree.map(
            lambda *x: jax.numpy.concatenate(x, axis=-1),
            replace(self, length=self.length + other.length),
            replace(other, length=self.length + other.length),
        )

    def repeat_rows(self, rows: int) -> "TokenInfo":
        """Returns the `TokenInfo` of `rows` batch elements, each row repeated equally often."""
        positions, segments = (
            x if np.ndim(x) < 2 else jax.numpy.repeat(x, rows // len(x), axis=0)
            for x in (self.positions, self.segments)
        )
        return TokenInfo(self.length, positions, segments)

    def position_ids(self) -> Integer[Array | np.ndarray, "*batch length"]:
        """Returns `positions`, or 0, 1, 2, … if they are None."""
        if self.positions is not None:
            return self.positions
        return _arange(0, self.length)


def _arange(start: int, stop: Size) -> Any:
    """Returns start … stop − 1: a NumPy array, which is known while tracing, if the stop is."""
    return (np if is_known(stop) else jax.numpy).arange(start, stop)
