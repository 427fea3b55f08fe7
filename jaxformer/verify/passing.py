"""How each primitive of JAX passes marks on: a table from its name to a rule.

rule(params, inputs, outputs) → the marks of each output. Inputs are `Marked`, a value and its
marks; outputs are the values that the primitive gave. What has no rule here marks all of its
outputs with all that any of its inputs has (`everything`): too much, never too little.

Values count: an element that is exactly 0, and marked by nothing, takes the marks away from what it
multiplies, and a −∞ from what is added to it; exp of less than −1000 is 0 and stays 0. That is how
a mask works, and why what is found is exact where a look at the shapes alone would say that
attention depends on everything. It supposes that what is marked is finite: 0 × ∞ is NaN.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformer.verify import marks as m


class Marked(NamedTuple):
    """A value and which inputs have had a say in it."""

    value: Any
    marks: np.ndarray | None = None


def everything(params, inputs, outputs):
    """Each element of each output by all that any element of any input is marked by."""
    flat = [m.merged(x.marks, range(x.marks.ndim - 1)) for x in inputs if x.marks is not None]
    every = m.union(*(marks.reshape(-1) for marks in flat))
    return [every.reshape((1,) * np.ndim(y) + every.shape) for y in outputs]


# ---- element by element


def _union(params, inputs, outputs):
    return [m.union(*(x.marks for x in inputs))]


def _counts(x: Marked, is_absorbing):
    """bool [*shape]: not an element that settles the result whatever it meets."""
    settled = is_absorbing(np.asarray(x.value))
    if not settled.any():
        return None
    return ~settled | m.marked(x.marks, settled.shape)


def _absorbed(is_absorbing):
    """A rule of two operands, either of which may settle the result."""

    def rule(params, inputs, outputs):
        a, b = inputs
        return [m.union(_kept(a.marks, b), _kept(b.marks, a))]

    def _kept(marks, other):
        return m.kept(marks, None if marks is None else _counts(other, is_absorbing))

    return rule


def _is_zero(x):
    return x == 0


def _quotient(params, inputs, outputs):
    a, b = inputs
    below = m.kept(b.marks, None if b.marks is None else _counts(a, _is_zero))
    return [m.union(a.marks, below)]


def _power(params, inputs, outputs):
    """exp(x), of which nothing is left below −1000, whatever in reason is added to x: masks of −10⁹
    or of the least number there is are masks."""
    (x,) = inputs
    return [m.kept(x.marks, ~(np.asarray(x.value) < -1000))]


def _select(params, inputs, outputs):
    """The marks of what decides, and of what was chosen; the others had no say."""
    which, *cases = inputs
    choice = np.asarray(which.value)
    chosen = [m.kept(case.marks, choice == i) for i, case in enumerate(cases)]
    return [m.union(which.marks, *chosen)]


_ELEMENTWISE = """
    abs acos acosh asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy copy_p cos
    cosh digamma eq erf erf_inv erfc expm1 floor ge gt imag integer_pow is_finite le lgamma
    log log1p logistic lt max min ne neg nextafter not or pow real reduce_precision rem round rsqrt
    sign sin sinh sqrt square stop_gradient tan tanh xor
""".split()


def _each(params, inputs, outputs):
    """As many outputs as inputs, each what it was."""
    return [x.marks for x in inputs]


# ---- over axes


def _reduced(params, inputs, outputs):
    (x,) = inputs
    axes = tuple(params["axes"])
    whole = m.merged(x.marks, axes)
    return [np.squeeze(whole, axis=axes)] if axes else [whole]


def _cumulated(params, inputs, outputs):
    (x,) = inputs
    axis, whole = params["axis"], m.expand(x.marks, np.shape(x.value))
    if params["reverse"]:
        whole = np.flip(whole, axis)
    whole = np.bitwise_or.accumulate(whole, axis=axis)
    return [np.flip(whole, axis) if params["reverse"] else whole]


def _sorted(params, inputs, outputs):
    axis = params.get("dimension", -1) % np.ndim(inputs[0].value)
    whole = m.merged(m.union(*(x.marks for x in inputs)), (axis,))
    return [whole] * len(outputs)


# ---- moves: where did each element come from?


def _moved(primitive):
    """Run the primitive on the numbers of the elements instead of their values."""

    def rule(params, inputs, outputs):
        rows, numbers, count = [], [], 0
        for x in inputs:
            is_index = len(numbers) >= _MOVED[primitive.name]
            if is_index:  # where to, not what
                numbers.append(x.value)
                continue
            shape = np.shape(x.value)
            size = int(np.prod(shape))
            numbers.append(np.arange(count, count + size, dtype=np.int32).reshape(shape))
            rows.append((x.marks, shape))
            count += size
        found = primitive.bind(*map(jax.numpy.asarray, numbers), **_for_numbers(params))
        table = _rows_of(rows, count)
        found = found if primitive.multiple_results else [found]
        direction = m.union(*(_merged_whole(x) for x in inputs[_MOVED[primitive.name] :]))
        moved = [table[np.where(np.asarray(y) < 0, count, np.asarray(y))] for y in found]
        return [m.compressed(m.union(marks, direction)) for marks in moved]

    return rule


def _for_numbers(params):
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


def _merged_whole(x: Marked):
    return None if x.marks is None else m.merged(x.marks, range(x.marks.ndim - 1)).reshape(-1)


# Of how many of the first operands are the elements moved? The others say where to.
_MANY = 1 << 20
_MOVED = {"slice": 1, "rev": 1, "split": 1, "gather": 1, "dynamic_slice": 1, "pad": 2}
_MOVED |= {"dynamic_update_slice": 2, "concatenate": _MANY, "expand_dims": 1}


def _gathered(primitive):
    """A gather's indices are marked row by row: each output by its own index too."""
    plain = _moved(primitive)

    def rule(params, inputs, outputs):
        operand, indices = inputs
        moved = None
        if operand.marks is not None:
            moved = plain(params, (operand, Marked(indices.value)), outputs)[0]
        if indices.marks is None:
            return [moved]
        numbers = params["dimension_numbers"]
        each = m.merged(indices.marks, (indices.marks.ndim - 2,))  # the index vector's axis
        shape = [1] * np.ndim(outputs[0])
        batch = [axis for axis in range(len(shape)) if axis not in numbers.offset_dims]
        for axis, size in zip(batch, each.shape[:-2], strict=True):
            shape[axis] = size
        return [m.union(moved, each.reshape(*shape, each.shape[-1]))]

    return rule


def _scattered(params, inputs, outputs):
    """Values set at clean places: each element is its last writer's. Anything else: everything."""
    operand, indices, updates = inputs
    if indices.marks is not None:
        return everything(params, inputs, outputs)
    sizes = [int(np.prod(np.shape(x.value))) for x in (operand, updates)]
    numbers = [
        np.arange(start, start + size, dtype=np.int32).reshape(np.shape(x.value))
        for x, start, size in zip((operand, updates), (0, sizes[0]), sizes, strict=True)
    ]
    found = jax.lax.scatter(
        jax.numpy.asarray(numbers[0]),
        indices.value,
        jax.numpy.asarray(numbers[1]),
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )
    table = _rows_of([(x.marks, np.shape(x.value)) for x in (operand, updates)], sum(sizes))
    return [m.compressed(table[np.asarray(found)])]


def _added_at(params, inputs, outputs):
    """Values added at clean places: an element's own marks, and those of all its writers."""
    operand, indices, updates = inputs
    if indices.marks is not None:
        return everything(params, inputs, outputs)
    if updates.marks is None:
        return [operand.marks]
    how = {name: params[name] for name in ("indices_are_sorted", "unique_indices", "mode")}
    bits = np.unpackbits(m.expand(updates.marks, np.shape(updates.value)), axis=-1)
    empty = jax.numpy.zeros(np.shape(operand.value), np.int32)

    def one(bit):
        return jax.lax.scatter_add(empty, indices.value, bit, params["dimension_numbers"], **how)

    found = jax.vmap(one, -1, -1)(jax.numpy.asarray(bits, np.int32))
    return [m.union(operand.marks, np.packbits(np.asarray(found) > 0, axis=-1))]


# ---- shapes alone


def _transposed(params, inputs, outputs):
    (x,) = inputs
    order = tuple(params["permutation"])
    return [np.transpose(x.marks, (*order, len(order)))]


def _squeezed(params, inputs, outputs):
    (x,) = inputs
    return [np.squeeze(x.marks, axis=tuple(params["dimensions"]))]


def _broadcast(params, inputs, outputs):
    x, shape = inputs[0], [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], x.marks.shape, strict=False):
        shape[axis] = size
    return [x.marks.reshape(*shape, x.marks.shape[-1])]


def _reshaped(params, inputs, outputs):
    """Axes that are split or joined in groups; a group of which all axes are of size 1 stays so."""
    x, new = inputs[0], np.shape(outputs[0])
    shape, full = [], []
    for old_axes, new_axes in _groups(np.shape(x.value), new):
        uniform = all(x.marks.shape[axis] == 1 for axis in old_axes)
        full += [1 if uniform else np.shape(x.value)[axis] for axis in old_axes]
        shape += [1 if uniform else new[axis] for axis in new_axes]
    return [m.expand(x.marks, full).reshape(*shape, x.marks.shape[-1])]


def _groups(old, new):
    """[(axes of old, axes of new), …] of equal products, as small as they can be."""
    i = j = 0
    while i < len(old) or j < len(new):
        first, second = [*range(i, len(old))][:1], [*range(j, len(new))][:1]
        while (before := _size(old, first)) != (after := _size(new, second)):
            if before < after:
                first.append(first[-1] + 1 if first else i)
            else:
                second.append(second[-1] + 1 if second else j)
        i, j = i + len(first), j + len(second)
        yield first, second


def _size(shape, axes):
    return int(np.prod([shape[axis] for axis in axes]))


# ---- products


def _product(params, inputs, outputs):
    """out[b, m, n] = Σ_k a[b, m, k] b[b, k, n]: each side's marks where the other is not 0."""
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    sides = [
        _Side(x, tuple(batch), tuple(contracted))
        for x, batch, contracted in zip(
            inputs, (left_batch, right_batch), (left, right), strict=True
        )
    ]
    a, b = sides
    whole = []
    if inputs[0].marks is not None:
        passed = _through(a.marks(), b.live())  # [B, M, N, bytes]
        whole.append(a.shaped(passed, b, first=True))
    if inputs[1].marks is not None:
        passed = _through(b.marks(), a.live())  # [B, N, M, bytes]
        whole.append(a.shaped(passed, b, first=False))
    return [m.compressed(m.union(*whole))]


class _Side:
    """An operand of a product as [batch, free, contracted], each one axis."""

    def __init__(self, x: Marked, batch, contracted):
        self.x, self.shape = x, np.shape(x.value)
        free = tuple(i for i in range(len(self.shape)) if i not in (*batch, *contracted))
        self.groups = (batch, free, contracted)

    def sizes(self, group: int):
        return [self.shape[axis] for axis in self.groups[group]]

    def live(self):
        """bool [batch, free, contracted], or None if no element is a clean zero."""
        live = _counts(self.x, _is_zero)
        if live is None:
            return None
        order = [axis for group in self.groups for axis in group]
        sizes = [int(np.prod(self.sizes(group))) for group in range(3)]
        return live.transpose(order).reshape(sizes)

    def marks(self):
        """The marks in the same order, a group of axes of size 1 staying so."""
        marks = self.x.marks
        order = [axis for group in self.groups for axis in group]
        marks = marks.transpose(*order, marks.ndim - 1)
        full, joined, start = [], [], 0
        for group in range(3):
            sizes = self.sizes(group)
            own = marks.shape[start : start + len(sizes)]
            uniform = all(size == 1 for size in own)
            full += [1] * len(sizes) if uniform else sizes
            joined.append(1 if uniform else int(np.prod(sizes)))
            start += len(sizes)
        return m.expand(marks, full).reshape(*joined, marks.shape[-1])

    def shaped(self, passed, other, first: bool):
        """[batch, own free, other's free, bytes] as the product's axes are."""
        if not first:
            passed = passed.swapaxes(1, 2)
        groups = (self.sizes(0), self.sizes(1), other.sizes(1))
        shape = []
        for size, sizes in zip(passed.shape, groups, strict=False):
            shape += [1] * len(sizes) if size == 1 else sizes
        return passed.reshape(*shape, passed.shape[-1])


def _through(marks, live):
    """marks [B, M, K, bytes], live [B, N, K]: by k, to every n that k reaches → [B, M, N, bytes].

    B, M and K of the marks may be 1; so may N of the result.
    """
    if live is None:
        return m.merged(marks, (2,))
    if (live == live[:, :1]).all():  # the same for each n
        some = m.kept(np.broadcast_to(marks, (*_larger(marks, live), marks.shape[-1])), live[:, :1])
        return m.merged(some, (2,)) if some is not None else np.zeros_like(marks[:, :, :1])
    if marks.shape[2] == 1:
        return np.where(live.any(axis=2)[:, None, :, None], marks, np.uint8(0))
    paths = live.astype(np.float32)
    reached = []
    for row in range(marks.shape[1]):
        bits = np.unpackbits(marks[:, row], axis=-1).astype(np.float32)
        reached.append(np.packbits(paths @ bits > 0, axis=-1))
    return np.stack(reached, axis=1)


def _larger(marks, live):
    """The shape of marks [B, M, K] beside live [B, N, K]."""
    return (max(marks.shape[0], live.shape[0]), marks.shape[1], max(marks.shape[2], live.shape[2]))


def _convolved(primitive):
    """The same convolution of ones and zeros, bit by bit."""

    def rule(params, inputs, outputs):
        whole = []
        for side, (x, other) in enumerate((inputs, inputs[::-1])):
            if x.marks is None:
                continue
            live = _counts(other, _is_zero)
            paths = np.ones(np.shape(other.value)) if live is None else live
            paths = jax.numpy.asarray(paths, np.float32)

            def one(bits, paths=paths, side=side):
                operands = (bits, paths) if side == 0 else (paths, bits)
                return primitive.bind(*operands, **{**params, "preferred_element_type": None})

            bits = np.unpackbits(m.expand(x.marks, np.shape(x.value)), axis=-1)
            found = jax.vmap(one, -1, -1)(jax.numpy.asarray(bits, np.float32))
            whole.append(np.packbits(np.asarray(found) > 0.5, axis=-1))
        return [m.union(*whole)]

    return rule


_RULES = {
    **dict.fromkeys(_ELEMENTWISE, _union),
    **dict.fromkeys(("mul", "and"), _absorbed(_is_zero)),
    **dict.fromkeys(("add", "sub", "add_any"), _absorbed(np.isinf)),
    "div": _quotient,
    **dict.fromkeys(("exp", "exp2"), _power),
    "select_n": _select,
    **dict.fromkeys(("optimization_barrier", "name", "pvary"), _each),
    **dict.fromkeys(
        "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax "
        "argmin".split(),
        _reduced,
    ),
    **dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp".split(), _cumulated),
    **dict.fromkeys(("sort", "top_k"), _sorted),
    "transpose": _transposed,
    "squeeze": _squeezed,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "dot_general": _product,
    "scatter": _scattered,
    "scatter-add": _added_at,
    "scatter_add": _added_at,
}
_MADE = {"gather": _gathered, "conv_general_dilated": _convolved}


def rule_of(primitive):
    """The rule of a primitive; None: it has none of its own."""
    if primitive.name in _RULES:
        return _RULES[primitive.name]
    if primitive.name in _MADE:
        return _MADE[primitive.name](primitive)
    return _moved(primitive) if primitive.name in _MOVED else None
