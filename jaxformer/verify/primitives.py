"""Rules for the marks of JAX primitives: a table from a primitive's name to its rule.

`rule(params, inputs, outputs)` returns the marks of each output. Inputs are `Marked`; outputs are
the values that the primitive computed. The operands of element-by-element primitives have equal
ranks (see `marks.aligned`). A primitive without a rule marks every output by every input
(`marks.everything`). This may mark too much, but never too little.

Rules depend on values. An unmarked 0 removes the marks of its factor. An unmarked −∞ removes the
marks of the number to which it is added; masks work in this way. The rules assume that marked
values are finite and that 0 is never divided by a marked 0, because 0 × ∞ and 0 / 0 are NaN.
`bounds` decides when a large finite number works as a mask.
"""

from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.extend.core import Primitive
from jaxtyping import Array

from jaxformer.functional.layers.expert_products import ByRow
from jaxformer.verify import marks as m
from jaxformer.verify.bounds import informative, sure_bounds
from jaxformer.verify.indexing import MOVED, added_at, gathered, moved, scattered
from jaxformer.verify.marks import Found, Limit, Marked, Marks, Params, Rule, Where, counts, is_zero
from jaxformer.verify.products import convolved, product


def _marks_of(inputs: Sequence[Marked]) -> Marks:
    """Returns the union of the operands' marks. Rules are called only if an operand has marks."""
    whole = m.union(*(x.marks for x in inputs))
    assert whole is not None
    return whole


# ---- element by element


def _union(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
    return [m.union(*(x.marks for x in inputs))]


def _absorbed(is_absorbing: Callable[[np.ndarray], Where]) -> Rule:
    """Makes a rule in which an absorbing element of one operand removes the other's marks."""

    def rule(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
        a, b = inputs
        return [m.union(_beside(b, is_absorbing, a), _beside(a, is_absorbing, b))]

    return rule


def _beside(other: Marked, is_absorbing: Callable[[np.ndarray], Where], x: Marked) -> Marks | None:
    """Returns the marks of x without those beside an unmarked absorbing element of `other`."""
    return None if x.marks is None else m.only_where(x.marks, counts(other, is_absorbing))


def _quotient(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
    """Rule of a division: an unmarked 0 as the dividend removes the marks of the divisor."""
    a, b = inputs
    return [m.union(a.marks, _beside(a, is_zero, b))]


def _extreme(sign: int) -> Rule:
    """Makes the rule of max (sign 1) or min (−1): an operand that never wins affects nothing."""

    def rule(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
        if not any(map(informative, inputs)):
            return _union(params, inputs, outputs)
        a, b = inputs
        (a_top, a_bottom), (b_top, b_bottom) = _ordered(sign, a), _ordered(sign, b)
        a_loses = np.broadcast_to(a_top < b_bottom, np.shape(outputs[0]))
        b_loses = np.broadcast_to(b_top < a_bottom, np.shape(outputs[0]))
        return [m.union(m.only_where(a.marks, ~a_loses), m.only_where(b.marks, ~b_loses))]

    return rule


def _ordered(sign: int, x: Marked) -> tuple[Limit, Limit]:
    """Returns (highest, lowest) value of each element or, if sign is −1, of its negative."""
    low, high = sure_bounds(x)
    return (high, low) if sign == 1 else (-low, -high)


def _select(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
    """Returns the marks of the predicate and of the chosen case (all cases, if it is marked)."""
    which, *cases = inputs
    choice = np.asarray(which.value)
    undecided = m.marked(which.marks, choice.shape)
    chosen = [m.only_where(case.marks, undecided | (choice == i)) for i, case in enumerate(cases)]
    return [m.union(which.marks, *chosen)]


_ELEMENTWISE = """
    abs acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex
    conj convert_element_type copy copy_p cos cosh digamma eq eq_to erf erf_inv erfc exp exp2 expm1
    floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite layout_constraint le le_to
    lgamma log log1p log2 logistic lt lt_to mesh_cast mulhi ne neg nextafter not or polygamma
    population_count pow random_clone random_fold_in random_seed real reduce_precision
    regularized_incomplete_beta relayout rem reshard round rsqrt sharding_constraint shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient tan tanh xor
    zeta
""".split()


def _each(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
    """Rule of identities: output i is input i."""
    return [x.marks for x in inputs]


def _behind(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
    """Rule of primitives that split an element into new last axes, or merge the last axes."""
    rank = np.ndim(outputs[0])
    return [m.union(*(_of_rank(x.marks, rank) for x in inputs))]


def _of_rank(marks: Marks | None, rank: int) -> Marks | None:
    if marks is None:
        return None
    whole = m.merged(marks, range(rank, marks.ndim - 1))
    same = whole.shape[: min(rank, marks.ndim - 1)]
    return whole.reshape(*same, *(1,) * (rank - len(same)), -1)


def _nothing(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
    """Rule of primitives without outputs, such as printing."""
    return []


# ---- over axes


def _reduced(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
    axes = tuple(params["axes"])
    return [np.squeeze(m.merged(_marks_of(inputs), axes), axis=axes)]


def _reduced_extreme(sign: int) -> Rule:
    """Makes the rule of reduce_max (sign 1) or reduce_min (−1).

    Elements that are never the largest (smallest) affect nothing.
    """

    def rule(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
        (x,) = inputs
        if informative(x) and np.size(x.value):
            top, bottom = (np.broadcast_to(y, np.shape(x.value)) for y in _ordered(sign, x))
            largest = bottom.max(axis=tuple(params["axes"]), keepdims=True)
            x = x._replace(marks=m.only_where(x.marks, ~(top < largest)))
        return [None] if x.marks is None else _reduced(params, [x], outputs)

    return rule


def _cumulated(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
    (x,) = inputs
    axis, whole = params["axis"], m.expand(_marks_of(inputs), np.shape(x.value))
    if params["reverse"]:
        whole = np.flip(whole, axis)
    whole = np.bitwise_or.accumulate(whole, axis=axis)
    return [np.flip(whole, axis) if params["reverse"] else whole]


def _pooled(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
    """Pools each bit with max over the primitive's windows."""
    (x,) = inputs
    bits = jax.numpy.asarray(np.unpackbits(m.expand(_marks_of(inputs), np.shape(x.value)), axis=-1))
    names = "window_dimensions window_strides base_dilation window_dilation".split()
    options = {name: (*params[name], 1) for name in names}
    padding = (*params["padding"], (0, 0))
    pooled = jax.lax.reduce_window(bits, np.uint8(0), jax.lax.max, padding=padding, **options)
    return [np.packbits(np.asarray(pooled), axis=-1)]


def _transformed(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
    """Rule of a Fourier transform: it mixes the last axes."""
    rank = np.ndim(inputs[0].value)
    return [m.merged(_marks_of(inputs), range(rank - len(params["fft_lengths"]), rank))]


def _sorted(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
    """Rule of sorting: it mixes one axis of all operands."""
    names = ("dimension", "axis", "reduction_dimension")
    axis = next((params[name] for name in names if name in params), -1) % np.ndim(inputs[0].value)
    return [m.merged(_marks_of(inputs), (axis,))] * len(outputs)


# ---- rows that are sorted, computed and put back


def is_by_row(params: Params) -> bool:
    """Returns whether an equation computes `experts.by_expert`."""
    return isinstance(params.get("policy"), ByRow)


def by_row(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
    """Rule of `by_expert`: an output has the marks of its token, its experts and all weights."""
    *weights, x, experts, shares = inputs
    if np.ndim(x.value) != 2:  # vmap has added axes
        return m.everything(params, inputs, outputs)
    rows = [m.merged(part.marks, (1,)) for part in (x, experts, shares) if part.marks is not None]
    whole = [m.merged(w.marks, range(w.marks.ndim - 1)) for w in weights if w.marks is not None]
    return [m.union(None, *rows, *(marks.reshape(1, 1, -1) for marks in whole))]


# ---- shapes alone


def _transposed(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
    return [m.permuted(_marks_of(inputs), params["permutation"])]


def _squeezed(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
    return [np.squeeze(_marks_of(inputs), axis=tuple(params["dimensions"]))]


def _broadcast(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
    marks, shape = _marks_of(inputs), [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], marks.shape, strict=False):
        shape[axis] = size
    return [marks.reshape(*shape, marks.shape[-1])]


def _reshaped(params: Params, inputs: Sequence[Marked], outputs: Sequence[Array]) -> Found:
    """Splits or merges groups of axes. Groups along which the marks are constant keep size 1."""
    marks, old, new = _marks_of(inputs), np.shape(inputs[0].value), np.shape(outputs[0])
    if params.get("dimensions") is not None:  # order="F": the axes are permuted first
        marks = m.permuted(marks, params["dimensions"])
        old = [old[axis] for axis in params["dimensions"]]
    shape, full = [], []
    for old_axes, new_axes in _groups(old, new):
        uniform = all(marks.shape[axis] == 1 for axis in old_axes)
        full += [1 if uniform else old[axis] for axis in old_axes]
        shape += [1 if uniform else new[axis] for axis in new_axes]
    return [m.expand(marks, full).reshape(*shape, marks.shape[-1])]


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the smallest groups of equal size: (axes of `old`, axes of `new`)."""
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


def _size(shape: Sequence[int], axes: Sequence[int]) -> int:
    return int(np.prod([shape[axis] for axis in axes]))


_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _union),
    **dict.fromkeys(("mul", "and"), _absorbed(is_zero)),
    **dict.fromkeys(("add", "sub", "add_any"), _absorbed(np.isinf)),
    "div": _quotient,
    "max": _extreme(1),
    "min": _extreme(-1),
    "select_n": _select,
    **dict.fromkeys(
        "bitcast_convert_type random_bits random_gamma random_split random_unwrap "
        "random_wrap".split(),
        _behind,
    ),
    **dict.fromkeys(("device_put", "optimization_barrier", "name", "pvary"), _each),
    **dict.fromkeys(
        "reduce_sum reduce_prod reduce_and reduce_or reduce_xor argmax argmin".split(), _reduced
    ),
    "reduce_max": _reduced_extreme(1),
    "reduce_min": _reduced_extreme(-1),
    **dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp".split(), _cumulated),
    **dict.fromkeys("reduce_window_sum reduce_window_max reduce_window_min".split(), _pooled),
    "fft": _transformed,
    **dict.fromkeys(("approx_top_k", "sort", "top_k"), _sorted),
    "transpose": _transposed,
    "squeeze": _squeezed,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    **dict.fromkeys(("debug_callback", "debug_print"), _nothing),
    "dot_general": product,
    "scatter": scattered,
    **{f"scatter{x}{y}": added_at for x in "-_" for y in "add sub mul min max".split()},
}
_MADE = dict.fromkeys(MOVED, moved) | {"gather": gathered, "conv_general_dilated": convolved}


# Primitives whose operands are aligned to the rank of the output.
ELEMENTWISE = frozenset([*_ELEMENTWISE, *"mul and add sub add_any div max min select_n".split()])
# Primitives whose output i is input i.
IDENTITIES = frozenset(
    "copy copy_p device_put layout_constraint mesh_cast name optimization_barrier pvary relayout "
    "reshard sharding_constraint stop_gradient".split()
)
# Primitives whose output has the elements of the first operand.
RESHAPED = frozenset("transpose squeeze broadcast_in_dim reshape".split())


def rule_of(primitive: Primitive) -> Rule | None:
    """Returns the rule of a primitive; None if it has none."""
    make = _MADE.get(primitive.name)
    return make(primitive) if make else _RULES.get(primitive.name)
