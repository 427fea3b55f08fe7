"""Marks: which of the inputs may have had a say in each element of an array.

The marks of an array of some shape are bits, one for each input, packed into bytes along a last
axis: uint8 [*shape, bytes], where an axis of size 1 stands for one along which all elements have
the same marks. None is an array that no input has marked.
"""

from typing import Any, NamedTuple

import numpy as np


def unit_marks(positions: tuple[int, ...], num_axes: int):
    """Marks of an input with those position axes: each position gets a bit of its own."""
    bits = np.eye(int(np.prod(positions)), dtype=bool)
    features = (1,) * (num_axes - len(positions))
    return np.packbits(bits, axis=-1).reshape(*positions, *features, -1)


def bits_of(marks, shape, number: int):
    """bool [*shape, number]."""
    if marks is None:
        return np.zeros((*shape, number), bool)
    return np.unpackbits(expand(marks, shape), axis=-1, count=number).astype(bool)


def expand(marks, shape):
    """Marks with every axis at its full size."""
    return np.broadcast_to(marks, (*shape, marks.shape[-1]))


def union(*some):
    """What any of them is marked by; the arrays have one shape, or none."""
    present = [marks for marks in some if marks is not None]
    if not present:
        return None
    whole = present[0]
    for marks in present[1:]:
        whole = whole | marks
    return whole


def merged(marks, axes):
    """What any element along these axes is marked by; they keep size 1."""
    if marks is None or not axes:
        return marks
    return np.bitwise_or.reduce(marks, axis=tuple(axes), keepdims=True)


def kept(marks, where):
    """The marks where it is true, none elsewhere; where is bool [*shape], or None: everywhere."""
    if marks is None or where is None or where.all():
        return marks
    if not where.any():
        return None
    return np.where(where[..., None], marks, np.uint8(0))


def marked(marks, shape):
    """bool [*shape]: is an element marked at all?"""
    if marks is None:
        return np.zeros(shape, bool)
    return np.broadcast_to(marks.any(axis=-1), shape)


def compressed(marks):
    """The same, axes along which nothing changes brought down to size 1."""
    if marks is None or not marks.any():
        return None
    for axis in range(marks.ndim - 1):
        first = marks.take([0], axis)
        if marks.shape[axis] > 1 and (marks.take([1], axis) == first).all():
            marks = first if (marks == first).all() else marks
    return marks


class Marked(NamedTuple):
    """A value and which inputs have had a say in it."""

    value: Any
    marks: np.ndarray | None = None


def ranked(x: Marked, like):
    """The marks of x, of the rank of `like`: a number alone goes with every element."""
    if x.marks is None or np.ndim(x.value) == np.ndim(like):
        return x.marks
    return x.marks.reshape(*(1,) * np.ndim(like), -1)


def everything(params, inputs, outputs):
    """Each element of each output by all that any element of any input is marked by."""
    flat = [merged(x.marks, range(x.marks.ndim - 1)) for x in inputs if x.marks is not None]
    every = union(*(marks.reshape(-1) for marks in flat))
    return [every.reshape((1,) * np.ndim(y) + every.shape) for y in outputs]


def counts(x: Marked, is_absorbing):
    """bool [*shape]: not an element that settles the result whatever it meets."""
    settled = is_absorbing(np.asarray(x.value))
    if not settled.any():
        return None
    return ~settled | marked(x.marks, settled.shape)


def is_zero(x):
    return x == 0
