"""How marks pass where elements are moved: each goes with the element that it came with.

`rule(params, inputs, outputs)`, as in `passing`; `moved` and `gathered` make one for a primitive.
"""

import jax
import numpy as np

from jaxformer.verify import marks as m
from jaxformer.verify.marks import Marked, everything


def moved(primitive):
    """Run the primitive on the numbers of the elements instead of their values."""

    def rule(params, inputs, outputs):
        if any(x.marks is not None for x in inputs[MOVED[primitive.name] :]):
            return everything(params, inputs, outputs)  # where to is not known
        rows, ids, count = [], [], 0
        for x in inputs:
            is_index = len(ids) >= MOVED[primitive.name]
            if is_index:  # where to, not what
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
    """What is out of bounds comes from nowhere, −1."""
    return {**params, "fill_value": -1} if "fill_value" in params else params


def _rows_of(rows, count: int):
    """[count + 1, bytes]: the marks of all elements one after the other, and of none."""
    width = next(marks.shape[-1] for marks, _ in rows if marks is not None)
    table, start = np.zeros((count + 1, width), np.uint8), 0
    for marks, shape in rows:
        size = int(np.prod(shape))
        if marks is not None:
            table[start : start + size] = m.expand(marks, shape).reshape(size, width)
        start += size
    return table


# Of how many of the first operands are the elements moved? The others say where to.
_MANY = 1 << 20
MOVED = {"slice": 1, "rev": 1, "split": 1, "gather": 1, "dynamic_slice": 1, "pad": 2}
MOVED |= {"dynamic_update_slice": 2, "concatenate": _MANY, "stack": _MANY, "unstack": 1, "tile": 1}


def gathered(primitive):
    """By clean indices, as elements are moved; by others, from anywhere in their row of the table,
    where both have rows (`vmap`)."""
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
    """Marks of `rank` axes: an axis goes to its place, one that has none is merged."""
    if marks is None:
        return None
    rest = [axis for axis in range(marks.ndim - 1) if axis not in places]
    order, shape = sorted(places, key=places.get), [1] * rank
    for axis in order:
        shape[places[axis]] = marks.shape[axis]
    whole = m.merged(marks, rest).transpose(*order, *rest, marks.ndim - 1)
    return whole.reshape(*shape, -1)


def _somewhere(params, operand: Marked, indices: Marked, updates: Marked):
    """Written at places that are not known, in their row where both have rows (`vmap`)."""
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
    """Values set at clean places: each element is its last writer's."""
    operand, indices, updates = inputs
    if indices.marks is not None:
        return _somewhere(params, *inputs)
    if params["update_jaxpr"] is not None:  # a function of what stands there
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
    """Values added, or otherwise combined, at clean places: an element's own marks, and those of
    all its writers."""
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
