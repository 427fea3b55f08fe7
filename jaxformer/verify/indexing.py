"""Rules for primitives that move elements: each element keeps its marks and bounds.

Rules map an `Equation` to the marks of its outputs, as in `primitives`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxformer.verify import marks as m
from jaxformer.verify.bounds import bounds_of
from jaxformer.verify.marks import Bounds, Equation, Found, Limit, Marked, Marks, everything

# The operands whose elements each primitive moves. The other operands are indices.
_FIRST, _FIRST_TWO, _ALL = slice(1), slice(2), slice(None)
MOVED: dict[str, slice] = {
    **dict.fromkeys("slice rev split gather dynamic_slice unstack tile".split(), _FIRST),
    **dict.fromkeys(("dynamic_update_slice", "pad"), _FIRST_TWO),
    **dict.fromkeys(("concatenate", "stack"), _ALL),
}
_WRITTEN = slice(None, None, 2)  # the operand and the updates of a scatter, around the indices


def moved(equation: Equation) -> Found:
    """Runs the primitive on the elements' indices instead of their values."""
    where = MOVED[equation.primitive.name]
    if _has_marked_places(equation, where):
        return everything(equation.inputs, equation.outputs)
    return _moved_marks(equation, where)


def _has_marked_places(equation: Equation, where: slice) -> bool:
    """Returns whether inputs affect the places of the elements, which are then unknown."""
    return any(x.marks is not None for x in equation.inputs[len(equation.inputs[where]) :])


def _moved_marks(equation: Equation, where: slice) -> Found:
    """Moves the marks of the operands `where` to the places of their elements."""
    operands = equation.inputs[where]
    width = next(x.marks.shape[-1] for x in operands if x.marks is not None)
    empty = np.zeros(width, np.uint8)
    table = _in_order([empty if x.marks is None else x.marks for x in operands], operands, empty)
    return [m.compressed(table[ids]) for ids in _moved_ids(equation, where)]


def _moved_ids(equation: Equation, where: slice) -> list[np.ndarray]:
    """Runs the primitive on the numbers of the elements; −1 are elements that it fills in."""
    params, arguments = equation.params, [x.value for x in equation.inputs]
    if "fill_value" in params:
        params = {**params, "fill_value": -1}
    arguments[where] = _numbered(equation.inputs[where])
    ids = equation.primitive.bind(*arguments, **params)
    return list(map(np.asarray, ids if equation.primitive.multiple_results else [ids]))


def _numbered(operands: Sequence[Marked]) -> list[Int32[Array, "..."]]:
    """Numbers the elements of all operands, from 0: int32 arrays with their shapes."""
    shapes = [np.shape(x.value) for x in operands]
    ends = np.cumsum([np.prod(shape, dtype=int) for shape in shapes])
    numbers = np.split(np.arange(ends[-1], dtype=np.int32), ends[:-1])
    return [jnp.asarray(x.reshape(shape)) for x, shape in zip(numbers, shapes, strict=True)]


def _in_order(
    arrays: Sequence[Limit], operands: Sequence[Marked], last: np.ndarray | float
) -> np.ndarray:
    """Returns the elements of all arrays, broadcast to the operands, in order and then `last`."""
    last = np.asarray(last)
    rows = [
        np.broadcast_to(x, (*np.shape(operand.value), *last.shape)).reshape(-1, *last.shape)
        for x, operand in zip(arrays, operands, strict=True)
    ]
    return np.concatenate([*rows, last[None]])


def moved_bounds(equation: Equation) -> list[Bounds] | None:
    """Returns the bounds of each output of a primitive that moves elements; None: unknown.

    The primitive moves the numbers of the elements: in the dtype of the values, two bounds that
    differ could round to the same number, and the element would count as a constant.
    """
    where = MOVED.get(equation.primitive.name, _FIRST)
    operands = equation.inputs[where]
    if all(x.bounds is None for x in operands) or _has_marked_places(equation, where):
        return None
    lows, highs = zip(*map(bounds_of, operands), strict=True)
    low, high = _in_order(lows, operands, -np.inf), _in_order(highs, operands, np.inf)
    return [Bounds(low[ids], high[ids]) for ids in _moved_ids(equation, where)]


def gathered(equation: Equation) -> Found:
    """Rule of a lookup.

    With unmarked indices, elements are moved. With marked indices, an element may come from
    anywhere in the table or, if table and indices have rows (`vmap`), from anywhere in its row.
    """
    operand, indices = equation.inputs
    if indices.marks is None:
        return moved(equation)
    dims, rank = equation.params["dimension_numbers"], np.ndim(equation.outputs[0])
    batch = [axis for axis in range(rank) if axis not in dims.offset_dims]
    pairs = zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True)
    rows = {axis: batch[index_axis] for axis, index_axis in pairs}
    each = _placed(indices.marks, dict(enumerate(batch)), rank)
    return [m.union(each, _placed(operand.marks, rows, rank))]


def _placed(marks: Marks | None, places: dict[int, int], rank: int) -> Marks | None:
    """Returns marks with `rank` axes: moves the axes in `places`, and merges the others."""
    if marks is None:
        return None
    rest = [axis for axis in range(marks.ndim - 1) if axis not in places]
    order, shape = sorted(places, key=places.__getitem__), [1] * rank
    for axis in order:
        shape[places[axis]] = marks.shape[axis]
    whole = m.merged(marks, rest).transpose(*order, *rest, marks.ndim - 1)
    return whole.reshape(*shape, -1)


def _somewhere(equation: Equation) -> Found:
    """Marks all elements that a write at unknown indices may reach.

    They are all elements or, if operand and indices have rows (`vmap`), those of the same row.
    """
    operand, indices, updates = equation.inputs
    dims, rank = equation.params["dimension_numbers"], np.ndim(operand.value)
    rows = dict(zip(dims.scatter_indices_batching_dims, dims.operand_batching_dims, strict=True))
    window = dims.update_window_dims
    batch = [axis for axis in range(np.ndim(updates.value)) if axis not in window]
    written = {batch[index_axis]: axis for index_axis, axis in rows.items()}
    chosen = _placed(indices.marks, rows, rank)
    return [m.union(operand.marks, chosen, _placed(updates.marks, written, rank))]


def scattered(equation: Equation) -> Found:
    """Rule of `scatter` with unmarked indices: an element has the marks of its last writer."""
    operand, indices, updates = equation.inputs
    if indices.marks is not None:
        return _somewhere(equation)
    if equation.params["update_jaxpr"] is None:
        return _moved_marks(equation, _WRITTEN)
    if updates.marks is None:  # the new value depends on the current element
        return [operand.marks]
    return everything(equation.inputs, equation.outputs)


def added_at(equation: Equation) -> Found:
    """Rule of `scatter_add` and its like: an element keeps its marks and gets those of all writers.

    They combine values at indices by an operation such as +, × or max.
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
