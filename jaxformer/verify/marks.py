"""Marks: which inputs may affect each element of an array.

The marks of an array are bits, one per input, packed into bytes along a last axis: uint8
[*shape, bytes]. An axis of size 1 stands for one along which all elements have the same marks.
None means that no input affects the array.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jaxtyping import Array, Bool, DTypeLike, UInt8

Marks = UInt8[np.ndarray, "..."]
Where = Bool[np.ndarray, "..."] | np.bool_
Limit = np.ndarray | float


class Bounds(NamedTuple):
    """Lowest and highest value of each element: float64, broadcastable to the array's shape."""

    low: Limit
    high: Limit


class Marked(NamedTuple):
    """A value with its marks and bounds.

    Attributes:
        value: The array.
        marks: The inputs that may affect each element; None: no input affects the array.
        bounds: Bounds of the marked elements for all inputs; None: unknown.
    """

    value: Any
    marks: Marks | None = None
    bounds: Bounds | None = None


class Equation(NamedTuple):
    """An equation of a jaxpr, with the values that it computed.

    Attributes:
        primitive: The primitive.
        params: The parameters of the primitive.
        inputs: The operands. Those of an element-by-element primitive may be scalars.
        outputs: The values of the outputs.
    """

    primitive: Primitive
    params: Mapping[str, Any]
    inputs: Sequence[Marked]
    outputs: Sequence[Array]

    def marks(self) -> Marks:
        """Returns the union of the operands' marks, for a primitive with marked operands."""
        whole = union(*(x.marks for x in self.inputs))
        assert whole is not None
        return whole


Found = Sequence[Marks | None]  # the marks of each output of a primitive
Rule = Callable[[Equation], Found]


def unit_marks(positions: tuple[int, ...], num_axes: int) -> Marks:
    """Returns the marks of an input with these position axes: one bit per position."""
    bits = np.eye(int(np.prod(positions)), dtype=bool)
    features = (1,) * (num_axes - len(positions))
    return np.packbits(bits, axis=-1).reshape(*positions, *features, -1)


def widened(marks: Marks) -> Marks:
    """Appends a byte, which is 0, to the marks."""
    return np.pad(marks, [(0, 0)] * (marks.ndim - 1) + [(0, 1)])


def bits_of(
    marks: Marks | None, shape: Sequence[int], number: int
) -> Bool[np.ndarray, "*shape number"]:
    """Unpacks the first `number` bits of the marks: bool [*shape, number]."""
    if marks is None:
        return np.zeros((*shape, number), bool)
    return np.unpackbits(expand(marks, shape), axis=-1, count=number).astype(bool)


def expand(marks: Marks, shape: Sequence[int]) -> Marks:
    """Broadcasts the marks to every element."""
    return np.broadcast_to(marks, (*shape, marks.shape[-1]))


def map_bits(
    function: Callable[[Array], Array], marks: Marks, shape: Sequence[int], dtype: DTypeLike
) -> Marks:
    """Applies a function to each bit of the marks.

    Args:
        function: Maps an array [*shape], 1 where the bit is set and 0 elsewhere, to an array that
            is positive where the bit of the result is set.
        marks: The marks.
        shape: The shape of the marked array.
        dtype: The dtype of the function's argument.
    """
    bits = jnp.asarray(np.unpackbits(expand(marks, shape), axis=-1), dtype)
    return np.packbits(np.asarray(jax.vmap(function, -1, -1)(bits)) > 0.5, axis=-1)


@overload
def union(whole: Marks, *others: Marks | None) -> Marks: ...
@overload
def union(whole: Marks | None, *others: Marks | None) -> Marks | None: ...
def union(whole: Marks | None, *others: Marks | None) -> Marks | None:
    """Returns the union of the marks of arrays with one shape; None counts as no marks."""
    for marks in others:
        if marks is not None:
            whole = marks if whole is None else whole | marks
    return whole


def merged(marks: Marks, axes: Sequence[SupportsIndex]) -> Marks:
    """Returns the union of the marks along the given axes, which become size 1."""
    return np.bitwise_or.reduce(marks, axis=tuple(axes), keepdims=True) if axes else marks


def only_where(marks: Marks | None, where: Where | None) -> Marks | None:
    """Removes the marks where `where` (bool [*shape]; None: true everywhere) is false."""
    if marks is None or where is None or where.all():
        return marks
    if not where.any():
        return None
    return np.where(np.expand_dims(where, -1), marks, np.uint8(0))


def marked(marks: Marks | None, shape: Sequence[int]) -> Where:
    """Returns bool [*shape]: whether any input affects the element."""
    if marks is None:
        return np.zeros(shape, bool)
    return np.broadcast_to(marks.any(axis=-1), shape)


def compressed(marks: Marks | None) -> Marks | None:
    """Reduces each axis along which the marks are constant to size 1."""
    if marks is None or not marks.any():
        return None
    for axis in range(marks.ndim - 1):
        first = marks.take([0], axis)
        if marks.shape[axis] > 1 and (marks.take([1], axis) == first).all():
            marks = first if (marks == first).all() else marks
    return marks


def permuted(marks: Marks, order: Sequence[int]) -> Marks:
    """Permutes the axes of the marked array."""
    return np.transpose(marks, (*order, len(order)))


def fits(marks: Marks | None, shape: Sequence[int]) -> bool:
    """Returns whether these can be the marks of an array with that shape."""
    if marks is None:
        return True
    sizes = zip(marks.shape[:-1], shape, strict=False)
    return marks.ndim == len(shape) + 1 and all(a in (1, b) for a, b in sizes)


def of_rank(marks: Marks | None, rank: int) -> Marks | None:
    """Merges the axes after the first `rank` ones, or appends axes of size 1."""
    if marks is None:
        return None
    whole = merged(marks, range(rank, marks.ndim - 1))
    same = whole.shape[: min(rank, marks.ndim - 1)]
    return whole.reshape(*same, *(1,) * (rank - len(same)), -1)


def everything(inputs: Sequence[Marked], values: Sequence[Array]) -> Found:
    """Returns the marks of values of which each element depends on all inputs."""
    flat = [merged(x.marks, range(x.marks.ndim - 1)) for x in inputs if x.marks is not None]
    every = union(None, *(marks.reshape(-1) for marks in flat))
    if every is None:
        return [None for _ in values]
    return [every.reshape((1,) * np.ndim(y) + every.shape) for y in values]


def marked_by(inputs: Sequence[Marked], outputs: Sequence[Marked]) -> list[Marked]:
    """Marks each output by all inputs. The bounds of the outputs become unknown."""
    values = [x.value for x in outputs]
    return list(map(Marked, values, everything(inputs, values)))


def counts(x: Marked, is_absorbing: Callable[[np.ndarray], Where]) -> Where | None:
    """Returns bool [*shape], false at unmarked absorbing elements; None if there are none.

    Args:
        x: The operand.
        is_absorbing: Maps the value to bool, true for elements that determine the result whatever
            the other operand is, such as the 0 of a product.
    """
    settled = is_absorbing(np.asarray(x.value))
    if not settled.any():
        return None
    live = ~settled | marked(x.marks, settled.shape)
    return None if live.all() else live


def is_zero(x: np.ndarray) -> Where:
    """Returns whether each element is 0, the absorbing element of a product."""
    return x == 0
