"""Rules for primitives that move elements: each element keeps its marks and bounds.

Rules have the signature `rule(params, inputs, outputs)`, as in `primitives`. `moved` and `gathered`
make the rule of a primitive.
"""

import jax
import numpy as np

from jaxformer.verify import marks as m
from jaxformer.verify.bounds import bounds_of
from jaxformer.verify.marks import Bounds, Marked, everything


def moved(primitive):
    """Makes a rule that runs the primitive on the elements' indices instead of their values."""

    def rule(params, inputs, outputs):
        if any(x.marks is not None for x in inputs[MOVED[primitive.name] :]):
            return everything(params, inputs, outputs)  # the places are unknown
        rows, ids, count = [], [], 0
        for x in inputs:
            is_index = len(ids) >= MOVED[primitive.name]
            if is_index:
                ids.append(x.value)
                continue
            shape = np.shape(x.value)
            size = int(np.prod(shape))
            ids.append(np.arange(count, count + size, dtype=np.int32).reshape(shape))
            rows.append((x.marks, shape))
            count += size
        found = primitive.bind(*map(jax.numpy.asarray, ids), **_for_ids(params))
        table = _rows_of(rows, count)
        found = found if primitive.multiple_results else [found]
        return [
            m.compressed(table[np.where(np.asarray(y) < 0, count, np.asarray(y))]) for y in found
        ]

    return rule


def _for_ids(params):
    """Sets the fill value of out-of-bounds positions to −1, which stands for no element."""
    return {**params, "fill_value": -1} if "fill_value" in params else params


def _rows_of(rows, count: int):
    """Returns [count + 1, bytes]: the marks of all elements in order, then an empty row."""
    width = next(marks.shape[-1] for marks, _ in rows if marks is not None)
    table, start = np.zeros((count + 1, width), np.uint8), 0
    for marks, shape in rows:
        size = int(np.prod(shape))
        if marks is not None:
            table[start : start + size] = m.expand(marks, shape).reshape(size, width)
        start += size
    return table


# The number of leading operands whose elements are moved. The other operands are indices.
_MANY = 1 << 20
MOVED = {"slice": 1, "rev": 1, "split": 1, "gather": 1, "dynamic_slice": 1, "pad": 2}
MOVED |= {"dynamic_update_slice": 2, "concatenate": _MANY, "stack": _MANY, "unstack": 1, "tile": 1}


def moved_bounds(primitive, params, inputs) -> list[Bounds] | None:
    """Returns the bounds of each output of a primitive that moves elements.

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
    whole = []
    for side in zip(*map(bounds_of, operands), strict=True):
        full = (
            jax.numpy.asarray(np.broadcast_to(bound, np.shape(x.value)), np.float32)
            for bound, x in zip(side, operands, strict=True)
        )
        found = primitive.bind(*full, *(x.value for x in places), **params)
        whole.append(found if primitive.multiple_results else [found])
    return [Bounds(np.float64(low), np.float64(high)) for low, high in zip(*whole, strict=True)]


def gathered(primitive):
    """Makes the rule of a lookup.

    With unmarked indices, elements are moved. With marked indices, an element may come from
    anywhere in the table or, if table and indices have rows (`vmap`), from anywhere in its row.
    """
    plain = moved(primitive)

    def rule(params, inputs, outputs):
        operand, indices = inputs
        if indices.marks is None:
            return plain(params, inputs, outputs)
        dims, rank = params["dimension_numbers"], np.ndim(outputs[0])
        batch = [axis for axis in range(rank) if axis not in dims.offset_dims]
        rows = {
            own: batch[there]
            for own, there in zip(
                dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True
            )
        }
        each = _placed(indices.marks, dict(enumerate(batch)), rank)
        return [m.union(each, _placed(operand.marks, rows, rank))]

    return rule


def _placed(marks, places: dict[int, int], rank: int):
    """Returns marks with `rank` axes: moves the axes in `places`, and merges the others."""
    if marks is None:
        return None
    rest = [axis for axis in range(marks.ndim - 1) if axis not in places]
    order, shape = sorted(places, key=places.__getitem__), [1] * rank
    for axis in order:
        shape[places[axis]] = marks.shape[axis]
    whole = m.merged(marks, rest).transpose(*order, *rest, marks.ndim - 1)
    return whole.reshape(*shape, -1)


def _somewhere(params, operand: Marked, indices: Marked, updates: Marked):
    """Marks all elements that a write at unknown indices may reach.

    They are all elements or, if operand and indices have rows (`vmap`), those of the same row.
    """
    dims, rank = params["dimension_numbers"], np.ndim(operand.value)
    rows = dict(zip(dims.scatter_indices_batching_dims, dims.operand_batching_dims, strict=True))
    window = dims.update_window_dims
    batch = [axis for axis in range(np.ndim(updates.value)) if axis not in window]
    written = {batch[there]: own for there, own in rows.items()}
    return [
        m.union(
            operand.marks,
            _placed(indices.marks, rows, rank),
            _placed(updates.marks, written, rank),
        )
    ]


def scattered(params, inputs, outputs):
    """Rule of `scatter` with unmarked indices: an element has the marks of its last writer."""
    operand, indices, updates = inputs
    if indices.marks is not None:
        return _somewhere(params, *inputs)
    if params["update_jaxpr"] is not None:  # the new value depends on the current element
        return [operand.marks] if updates.marks is None else everything(params, inputs, outputs)
    sizes = [int(np.prod(np.shape(x.value))) for x in (operand, updates)]
    ids = [
        np.arange(start, start + size, dtype=np.int32).reshape(np.shape(x.value))
        for x, start, size in zip((operand, updates), (0, sizes[0]), sizes, strict=True)
    ]
    found = jax.lax.scatter(
        jax.numpy.asarray(ids[0]),
        indices.value,
        jax.numpy.asarray(ids[1]),
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )
    table = _rows_of([(x.marks, np.shape(x.value)) for x in (operand, updates)], sum(sizes))
    return [m.compressed(table[np.asarray(found)])]


def added_at(params, inputs, outputs):
    """Rule of `scatter_add` and its like: an element keeps its marks and gets those of all writers.

    They combine values at indices by an operation such as +, × or max.
    """
    operand, indices, updates = inputs
    if indices.marks is not None:
        return _somewhere(params, *inputs)
    if updates.marks is None:
        return [operand.marks]
    how = {name: params[name] for name in ("indices_are_sorted", "unique_indices", "mode")}
    bits = np.unpackbits(m.expand(updates.marks, np.shape(updates.value)), axis=-1)
    empty = jax.numpy.zeros(np.shape(operand.value), np.int32)

    def one(bit):
        return jax.lax.scatter_add(empty, indices.value, bit, params["dimension_numbers"], **how)

    found = jax.vmap(one, -1, -1)(jax.numpy.asarray(bits, np.int32))
    return [m.union(operand.marks, np.packbits(np.asarray(found) > 0, axis=-1))]
