"""Taint rules of primitives that move elements without changing them.

A moved element keeps its taint marks and bounds. A taint rule maps an `Equation` to the taint marks
of its outputs, as in `primitives`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxformer.verify import marks as m
from jaxformer.verify.bounds import element_bounds
from jaxformer.verify.marks import Bounds, Equation, Found, Limit, Marked, Marks, everything

# These slices select the operands whose elements a primitive moves. The primitive's other operands
# are indices.
_FIRST, _FIRST_TWO, _ALL = slice(1), slice(2), slice(None)
MOVED: dict[str, slice] = {
    **dict.fromkeys("slice rev split gather dynamic_slice unstack tile".split(), _FIRST),
    **dict.fromkeys(("dynamic_update_slice", "pad"), _FIRST_TWO),
    **dict.fromkeys(("concatenate", "stack"), _ALL),
}
# A scatter has the operands (operand, indices, updates). This slice selects the first operand and
# the updates.
_WRITTEN = slice(None, None, 2)


def moved(equation: Equation) -> Found:
    """Taint rule of primitives that move elements: output elements keep their taint marks."""
    where = MOVED[equation.primitive.name]
    if _has_marked_places(equation, where):
        return everything(equation.inputs, equation.outputs)
    return _moved_marks(equation, where)


def _has_marked_places(equation: Equation, where: slice) -> bool:
    """Returns whether inputs affect the indices, so that the origins of elements are unknown."""
    return any(x.marks is not None for x in equation.inputs[len(equation.inputs[where]) :])


def _moved_marks(equation: Equation, where: slice) -> Found:
    """Moves taint marks together with the elements of the operands `equation.inputs[where]`."""
    operands = equation.inputs[where]
    width = next(x.marks.shape[-1] for x in operands if x.marks is not None)
    empty = np.zeros(width, np.uint8)
    table = _in_order([empty if x.marks is None else x.marks for x in operands], operands, empty)
    return [m.compress(table[ids]) for ids in _moved_ids(equation, where)]


def _moved_ids(equation: Equation, where: slice) -> list[np.ndarray]:
    """Runs the primitive on the indices of the elements.

    The result is the index from which each output element comes, or −1 for the fill value.
    """
    params, arguments = equation.params, [x.value for x in equation.inputs]
    if "fill_value" in params:
        params = {**params, "fill_value": -1}
    arguments[where] = _numbered(equation.inputs[where])
    ids = equation.primitive.bind(*arguments, **params)
    return list(map(np.asarray, ids if equation.primitive.multiple_results else [ids]))


def _numbered(operands: Sequence[Marked]) -> list[Int32[Array, "..."]]:
    """Numbers the elements of all operands from 0. Returns int32 arrays of the same shapes."""
    shapes = [np.shape(x.value) for x in operands]
    ends = np.cumsum([np.prod(shape, dtype=int) for shape in shapes])
    numbers = np.split(np.arange(ends[-1], dtype=np.int32), ends[:-1])
    return [jnp.asarray(x.reshape(shape)) for x, shape in zip(numbers, shapes, strict=True)]


def _in_order(
    arrays: Sequence[Limit], operands: Sequence[Marked], last: np.ndarray | float
) -> np.ndarray:
    """Concatenates the elements of all arrays and `last`.

    Each array is first broadcast to the shape of its operand.
    """
    last = np.asarray(last)
    flat = [
        np.broadcast_to(x, (*np.shape(operand.value), *last.shape)).reshape(-1, *last.shape)
        for x, operand in zip(arrays, operands, strict=True)
    ]
    return np.concatenate([*flat, last[None]])


def moved_bounds(equation: Equation) -> list[Bounds] | None:
    """Returns the bounds of each output of a primitive that moves elements; None if unknown.

    The primitive runs on the indices of the elements, and the resulting indices select the bounds.
    If the primitive ran on the bounds, an element's lower and upper bound could round to the same
    number in the array's dtype. The element would then wrongly count as a constant.
    """
    where = MOVED.get(equation.primitive.name, _FIRST)
    operands = equation.inputs[where]
    if all(x.bounds is None for x in operands) or _has_marked_places(equation, where):
        return None
    lows, highs = zip(*map(element_bounds, operands), strict=True)
    low, high = _in_order(lows, operands, -np.inf), _in_order(highs, operands, np.inf)
    return [Bounds(low[ids], high[ids]) for ids in _moved_ids(equation, where)]


def gathered(equation: Equation) -> Found:
    """Taint rule of `gather`.

    If no input affects the indices, the taint marks move with their elements. If an input affects
    the indices, an output element may come from any element of the operand. With batch axes
    (`vmap`), both elements belong to the same batch element.
    """
    operand, indices = equation.inputs
    if indices.marks is None:
        return moved(equation)
    dims, rank = equation.params["dimension_numbers"], np.ndim(equation.outputs[0])
    batch = [axis for axis in range(rank) if axis not in dims.offset_dims]
    pairs = zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True)
    batch_axes = {axis: batch[index_axis] for axis, index_axis in pairs}
    each = _move_axes(indices.marks, dict(enumerate(batch)), rank)
    return [m.union(each, _move_axes(operand.marks, batch_axes, rank))]


def _move_axes(marks: Marks | None, places: dict[int, int], rank: int) -> Marks | None:
    """Moves axis i of an array of taint marks to axis `places[i]`.

    The result has `rank` axes. Along the axes that are not in `places`, the function takes the
    union of the taint marks.
    """
    if marks is None:
        return None
    rest = [axis for axis in range(marks.ndim - 1) if axis not in places]
    order, shape = sorted(places, key=places.__getitem__), [1] * rank
    for axis in order:
        shape[places[axis]] = marks.shape[axis]
    whole = m.merge(marks, rest).transpose(*order, *rest, marks.ndim - 1)
    return whole.reshape(*shape, -1)


def _somewhere(equation: Equation) -> Found:
    """Returns the taint marks of a scatter whose indices are unknown, because inputs affect them.

    Each update may change any element of the operand. With batch axes (`vmap`), each update may
    only change elements of the same batch element.
    """
    operand, indices, updates = equation.inputs
    dims, rank = equation.params["dimension_numbers"], np.ndim(operand.value)
    batch_axes = dict(
        zip(dims.scatter_indices_batching_dims, dims.operand_batching_dims, strict=True)
    )
    window = dims.update_window_dims
    batch = [axis for axis in range(np.ndim(updates.value)) if axis not in window]
    written = {batch[index_axis]: axis for index_axis, axis in batch_axes.items()}
    chosen = _move_axes(indices.marks, batch_axes, rank)
    return [m.union(operand.marks, chosen, _move_axes(updates.marks, written, rank))]


def scattered(equation: Equation) -> Found:
    """Taint rule of `scatter`: an element gets the taint marks of the last update written to it."""
    operand, indices, updates = equation.inputs
    if indices.marks is not None:
        return _somewhere(equation)
    if equation.params["update_jaxpr"] is None:
        return _moved_marks(equation, _WRITTEN)
    if updates.marks is None:
        # Each new element depends only on the old element and on constants.
        return [operand.marks]
    return everything(equation.inputs, equation.outputs)


def added_at(equation: Equation) -> Found:
    """Taint rule of `scatter_add` and similar primitives, which combine values by +, × or max.

    An element keeps its taint marks, and gets the marks of all updates that are added to it.
    """
    operand, indices, updates = equation.inputs
    if indices.marks is not None:
        return _somewhere(equation)
    if updates.marks is None:
        return [operand.marks]
    names = "dimension_numbers indices_are_sorted unique_indices mode".split()
    options = {name: equation.params[name] for name in names}
    empty = jnp.zeros(np.shape(operand.value), np.int32)

    def add(bits: Array) -> Array:
        return jax.lax.scatter_add(empty, indices.value, bits, **options)

    added = m.map_bits(add, updates.marks, np.shape(updates.value), np.int32)
    return [m.union(operand.marks, added)]
