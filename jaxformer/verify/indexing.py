"""Rules for primitives that move elements: each element keeps its marks and bounds.

Rules have the signature `rule(params, inputs, outputs)`, as in `primitives`. `moved` and `gathered`
make the rule of a primitive.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jaxtyping import Array, Int32

from jaxformer.verify import marks as m
from jaxformer.verify.bounds import bounds_of
from jaxformer.verify.marks import Bounds, Found, Limit, Marked, Marks, Params, Rule, everything


def moved(primitive: Primitive) -> Rule:
    """Makes a rule that runs the primitive on the elements' indices instead of their values."""

    def rule(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
        count = MOVED[primitive.name]
        operands, places = inputs[:count], inputs[count:]
        if any(x.marks is not None for x in places):
            return everything(params, inputs, outputs)  # the places are unknown
        table = _table_of_marks(operands)
        return [m.compressed(table[x]) for x in _moved_ids(primitive, params, operands, places)]

    return rule


def _moved_ids(
    primitive: Primitive, params: Params, operands: Sequence[Marked], places: Sequence[Marked]
) -> list[np.ndarray]:
    """Runs the primitive on the numbers of the elements; −1 are elements that it fills in."""
    if "fill_value" in params:
        params = {**params, "fill_value": -1}
    ids = primitive.bind(*_numbered(operands), *(jnp.asarray(x.value) for x in places), **params)
    return list(map(np.asarray, ids if primitive.multiple_results else [ids]))


def _numbered(operands: Sequence[Marked]) -> list[Int32[Array, "..."]]:
    """Numbers the elements of all operands, from 0: int32 arrays with their shapes."""
    ends = np.cumsum([np.size(x.value) for x in operands])
    return [
        jnp.asarray(
            np.arange(end - np.size(x.value), end, dtype=np.int32).reshape(np.shape(x.value))
        )
        for x, end in zip(operands, ends, strict=True)
    ]


def _table_of_marks(operands: Sequence[Marked]) -> Marks:
    """Returns the marks of all elements in order and then an empty row: [elements + 1, bytes]."""
    width = next(x.marks.shape[-1] for x in operands if x.marks is not None)
    empty = np.zeros(width, np.uint8)
    rows = [
        m.expand(empty if x.marks is None else x.marks, np.shape(x.value)).reshape(-1, width)
        for x in operands
    ]
    return np.concatenate([*rows, empty[None]])


# The number of leading operands whose elements are moved. The other operands are indices.
_MANY = 1 << 20
MOVED = {"slice": 1, "rev": 1, "split": 1, "gather": 1, "dynamic_slice": 1, "pad": 2}
MOVED |= {"dynamic_update_slice": 2, "concatenate": _MANY, "stack": _MANY, "unstack": 1, "tile": 1}


def moved_bounds(
    primitive: Primitive, params: Params, inputs: Sequence[Marked]
) -> list[Bounds] | None:
    """Returns the bounds of each output of a primitive that moves elements.

    The primitive moves the numbers of the elements: in the dtype of the values, two bounds that
    differ could round to the same number, and the element would count as a constant.

    Args:
        primitive: The primitive.
        params: Its parameters.
        inputs: Its operands (`Marked`).

    Returns:
        The bounds; None if they are unknown.
    """
    count = MOVED.get(primitive.name, 1)
    operands, places = inputs[:count], inputs[count:]
    if all(x.bounds is None for x in operands) or any(x.marks is not None for x in places):
        return None
    each = [bounds_of(x) for x in operands]
    shapes = [np.shape(x.value) for x in operands]
    low = _table([x.low for x in each], shapes, -np.inf)
    high = _table([x.high for x in each], shapes, np.inf)
    ids = _moved_ids(primitive, params, operands, places)
    return [Bounds(low[x], high[x]) for x in ids]


def _table(arrays: Sequence[Limit], shapes: Sequence[tuple[int, ...]], last: float) -> np.ndarray:
    """Returns the elements of all arrays, broadcast to these shapes, in order and then `last`."""
    full = [np.broadcast_to(x, shape).ravel() for x, shape in zip(arrays, shapes, strict=True)]
    return np.concatenate([*full, [last]])


def gathered(primitive: Primitive) -> Rule:
    """Makes the rule of a lookup.

    With unmarked indices, elements are moved. With marked indices, an element may come from
    anywhere in the table or, if table and indices have rows (`vmap`), from anywhere in its row.
    """
    plain = moved(primitive)

    def rule(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
        operand, indices = inputs
        if indices.marks is None:
            return plain(params, inputs, outputs)
        dims, rank = params["dimension_numbers"], np.ndim(outputs[0])
        batch = [axis for axis in range(rank) if axis not in dims.offset_dims]
        pairs = zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True)
        rows = {axis: batch[index_axis] for axis, index_axis in pairs}
        each = _placed(indices.marks, dict(enumerate(batch)), rank)
        return [m.union(each, _placed(operand.marks, rows, rank))]

    return rule


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


def _somewhere(params: Params, operand: Marked, indices: Marked, updates: Marked) -> Found:
    """Marks all elements that a write at unknown indices may reach.

    They are all elements or, if operand and indices have rows (`vmap`), those of the same row.
    """
    dims, rank = params["dimension_numbers"], np.ndim(operand.value)
    rows = dict(zip(dims.scatter_indices_batching_dims, dims.operand_batching_dims, strict=True))
    window = dims.update_window_dims
    batch = [axis for axis in range(np.ndim(updates.value)) if axis not in window]
    written = {batch[index_axis]: axis for index_axis, axis in rows.items()}
    chosen = _placed(indices.marks, rows, rank)
    return [m.union(operand.marks, chosen, _placed(updates.marks, written, rank))]


def scattered(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
    """Rule of `scatter` with unmarked indices: an element has the marks of its last writer."""
    operand, indices, updates = inputs
    if indices.marks is not None:
        return _somewhere(params, *inputs)
    if params["update_jaxpr"] is not None:  # the new value depends on the current element
        return [operand.marks] if updates.marks is None else everything(params, inputs, outputs)
    (old, new), table = _numbered([operand, updates]), _table_of_marks([operand, updates])
    dims, options = params["dimension_numbers"], _scatter_options(params)
    ids = jax.lax.scatter(old, indices.value, new, dims, **options)
    return [m.compressed(table[np.asarray(ids)])]


def _scatter_options(params: Params) -> Params:
    return {name: params[name] for name in ("indices_are_sorted", "unique_indices", "mode")}


def added_at(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
    """Rule of `scatter_add` and its like: an element keeps its marks and gets those of all writers.

    They combine values at indices by an operation such as +, × or max.
    """
    operand, indices, updates = inputs
    if indices.marks is not None:
        return _somewhere(params, *inputs)
    if updates.marks is None:
        return [operand.marks]
    dims, options = params["dimension_numbers"], _scatter_options(params)
    empty = jnp.zeros(np.shape(operand.value), np.int32)

    def add(bits: Array) -> Array:
        return jax.lax.scatter_add(empty, indices.value, bits, dims, **options)

    added = m.map_bits(add, updates.marks, np.shape(updates.value), np.int32)
    return [m.union(operand.marks, added)]
