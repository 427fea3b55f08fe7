"""Taint marks: for each element of an array, the set of inputs that may affect it.

A set is stored as bits, one per input. The bits are packed into bytes along a last axis, so that
the taint marks of an array are uint8 [*shape, bytes]. An axis along which all marks are equal may
have size 1. The taint marks are None if no input affects the array.
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
    """Lower and upper bound of each element: float64, broadcastable to the array's shape."""

    low: Limit
    high: Limit


class Marked(NamedTuple):
    """An array with taint marks and bounds.

    Attributes:
        value: The array.
        marks: The inputs that may affect each element; None if no input affects the array.
        bounds: Bounds on the marked elements, which hold for all inputs; None if unknown.
    """

    value: Any
    marks: Marks | None = None
    bounds: Bounds | None = None


class Equation(NamedTuple):
    """An equation of a jaxpr, with the values of its operands and outputs.

    Attributes:
        primitive: The primitive.
        params: The parameters of the primitive.
        inputs: The operands. Operands of an elementwise primitive may be scalars.
        outputs: The values of the outputs.
    """

    primitive: Primitive
    params: Mapping[str, Any]
    inputs: Sequence[Marked]
    outputs: Sequence[Array]

    def marks(self) -> Marks:
        """Returns the union of the operands' taint marks, of which at least one is not None."""
        whole = union(*(x.marks for x in self.inputs))
        assert whole is not None
        return whole


# The taint marks of each output of a primitive. Taint marks record which inputs affect each element
# of an array.
Found = Sequence[Marks | None]
Rule = Callable[[Equation], Found]


def unit_marks(positions: tuple[int, ...], num_axes: int) -> Marks:
    """Returns the taint marks of the inputs: one bit per position."""
    bits = np.eye(int(np.prod(positions)), dtype=bool)
    features = (1,) * (num_axes - len(positions))
    return np.packbits(bits, axis=-1).reshape(*positions, *features, -1)


def with_extra_byte(marks: Marks) -> Marks:
    """Appends a zero byte to the taint marks of each element."""
    return np.pad(marks, [(0, 0)] * (marks.ndim - 1) + [(0, 1)])


def unpack_bits(
    marks: Marks | None, shape: Sequence[int], number: int
) -> Bool[np.ndarray, "*shape number"]:
    """Unpacks the first `number` bits of taint marks to bool [*shape, number]."""
    if marks is None:
        return np.zeros((*shape, number), bool)
    return np.unpackbits(expand(marks, shape), axis=-1, count=number).astype(bool)


def expand(marks: Marks, shape: Sequence[int]) -> Marks:
    """Broadcasts taint marks to the full shape of an array."""
    return np.broadcast_to(marks, (*shape, marks.shape[-1]))


def map_bits(
    function: Callable[[Array], Array], marks: Marks, shape: Sequence[int], dtype: DTypeLike
) -> Marks:
    """Applies a function separately to each bit of taint marks. Each bit stands for one input.

    Args:
        function: Maps an array [*shape] of zeros and ones, one bit of each element's taint marks,
            to an array of the result's shape. Values above 0.5 in the returned array become the bit
            1, and other values the bit 0.
        marks: The taint marks.
        shape: The shape of the array to which the marks belong.
        dtype: The dtype of the function's argument.
    """
    bits = jnp.asarray(np.unpackbits(expand(marks, shape), axis=-1), dtype)
    return np.packbits(np.asarray(jax.vmap(function, -1, -1)(bits)) > 0.5, axis=-1)


@overload
def union(whole: Marks, *others: Marks | None) -> Marks: ...
@overload
def union(whole: Marks | None, *others: Marks | None) -> Marks | None: ...
def union(whole: Marks | None, *others: Marks | None) -> Marks | None:
    """Returns the union of the taint marks of arrays with equal shapes; None is the empty set."""
    for marks in others:
        if marks is not None:
            whole = marks if whole is None else whole | marks
    return whole


def merge(marks: Marks, axes: Sequence[SupportsIndex]) -> Marks:
    """Reduces axes to size 1 by taking the union of the taint marks along them."""
    return np.bitwise_or.reduce(marks, axis=tuple(axes), keepdims=True) if axes else marks


def only_where(marks: Marks | None, where: Where | None) -> Marks | None:
    """Removes the taint marks where `where` (bool [*shape], or None to keep all) is False."""
    if marks is None or where is None or where.all():
        return marks
    if not where.any():
        return None
    return np.where(np.expand_dims(where, -1), marks, np.uint8(0))


def marked(marks: Marks | None, shape: Sequence[int]) -> Where:
    """Returns bool [*shape]: whether any input may affect the element."""
    if marks is None:
        return np.zeros(shape, bool)
    return np.broadcast_to(marks.any(axis=-1), shape)


def compress(marks: Marks | None) -> Marks | None:
    """Reduces each axis along which the taint marks are constant to size 1."""
    if marks is None or not marks.any():
        return None
    for axis in range(marks.ndim - 1):
        first = marks.take([0], axis)
        if marks.shape[axis] > 1 and (marks.take([1], axis) == first).all():
            marks = first if (marks == first).all() else marks
    return marks


def permute(marks: Marks, order: Sequence[int]) -> Marks:
    """Permutes the axes of taint marks like the axes of the array."""
    return np.transpose(marks, (*order, len(order)))


def fits(marks: Marks | None, shape: Sequence[int]) -> bool:
    """Returns whether taint marks broadcast to an array of the given shape."""
    if marks is None:
        return True
    sizes = zip(marks.shape[:-1], shape, strict=False)
    return marks.ndim == len(shape) + 1 and all(a in (1, b) for a, b in sizes)


def with_rank(marks: Marks | None, rank: int) -> Marks | None:
    """Reshapes taint marks to `rank` axes: merges the last axes, or appends axes of size 1."""
    if marks is None:
        return None
    whole = merge(marks, range(rank, marks.ndim - 1))
    same = whole.shape[: min(rank, marks.ndim - 1)]
    return whole.reshape(*same, *(1,) * (rank - len(same)), -1)


def everything(inputs: Sequence[Marked], values: Sequence[Array]) -> Found:
    """Returns the taint marks of values whose elements all depend on all operands."""
    flat = [merge(x.marks, range(x.marks.ndim - 1)) for x in inputs if x.marks is not None]
    every = union(None, *(marks.reshape(-1) for marks in flat))
    if every is None:
        return [None for _ in values]
    return [every.reshape((1,) * np.ndim(y) + every.shape) for y in values]


def marked_by(inputs: Sequence[Marked], outputs: Sequence[Marked]) -> list[Marked]:
    """Returns the outputs with the taint marks of all inputs and with unknown bounds."""
    values = [x.value for x in outputs]
    return list(map(Marked, values, everything(inputs, values)))


def live_elements(x: Marked, is_absorbing: Callable[[np.ndarray], Where]) -> Where | None:
    """Returns bool [*shape]: False at constant absorbing elements, such as the zeros of a mask.

    Returns None if no element is constant and absorbing.

    Args:
        x: The operand.
        is_absorbing: Maps the value to bool [*shape], True at absorbing elements. An absorbing
            element, such as a factor 0 in a product, determines the result alone.
    """
    settled = is_absorbing(np.asarray(x.value))
    if not settled.any():
        return None
    live = ~settled | marked(x.marks, settled.shape)
    return None if live.all() else live


def is_zero(x: np.ndarray) -> Where:
    """Returns whether each element is 0, the absorbing element of products."""
    return x == 0
