"""How each primitive of JAX passes marks on: a table from its name to a rule.

rule(params, inputs, outputs) → the marks of each output. Inputs are `Marked`, a value and its
marks; outputs are the values that the primitive gave. What has no rule here marks all of its
outputs with all that any of its inputs has (`marks.everything`): too much, never too little.

Values count: an element that is exactly 0, and marked by nothing, takes the marks away from what it
multiplies, and a −∞ from what is added to it. That is how a mask works, and why what is found is
exact where a look at the shapes alone would say that attention depends on everything. It supposes
that what is marked is finite: 0 × ∞ is NaN.

A mask by a large number (−10⁴, −10⁹) needs another supposition, that a float which lies 5000 below
others stays below them: exp of less than −5000 is 0 and stays 0, and such an element is not the
largest of a row. Where that takes a mark away, `assumed` counts it, and taint remarks on it.
"""

import jax
import numpy as np

from jaxformer.verify import marks as m
from jaxformer.verify.marks import Marked, counts, is_zero
from jaxformer.verify.moves import MOVED, added_at, gathered, moved, scattered
from jaxformer.verify.products import convolved, product

FAR = 5000.0

# ---- element by element


def _union(params, inputs, outputs):
    return [m.union(*(m.ranked(x, outputs[0]) for x in inputs))]


def _absorbed(is_absorbing):
    """A rule of two operands, either of which may settle the result."""

    def rule(params, inputs, outputs):
        a, b = inputs
        return [m.union(_kept(a.marks, b), _kept(b.marks, a))]

    def _kept(marks, other):
        return m.kept(marks, None if marks is None else counts(other, is_absorbing))

    return rule


def _quotient(params, inputs, outputs):
    a, b = inputs
    below = m.kept(b.marks, None if b.marks is None else counts(a, is_zero))
    return [m.union(a.marks, below)]


def _power(params, inputs, outputs):
    """exp(x), of which nothing is left far below 0."""
    (x,) = inputs
    return [m.kept(x.marks, ~_negligible(params, x))]


def _negligible(params, x: Marked):
    """bool [*shape]: too far below 0, for exp, or below the largest along the axes."""
    value = np.asarray(x.value)
    if not jax.numpy.issubdtype(value.dtype, jax.numpy.floating):
        return np.zeros(value.shape, bool)
    value, top = value.astype(np.float64), 0.0
    if "axes" in params and value.size:
        top = value.max(axis=tuple(params["axes"]), keepdims=True)
    return value < top - FAR


def assumed(name: str, params, inputs) -> int:
    """Of how many marked elements the rules of this primitive say that they do not count."""
    if name not in ("exp", "exp2", "reduce_max") or inputs[0].marks is None:
        return 0
    (x,) = inputs
    gone = _negligible(params, x)
    return int((gone & m.marked(x.marks, gone.shape)).sum())


def _select(params, inputs, outputs):
    """The marks of what decides, and of what was chosen; where that is marked, of all cases."""
    which, *cases = inputs
    choice = np.asarray(which.value)
    undecided = m.marked(which.marks, choice.shape)
    chosen = [m.kept(case.marks, undecided | (choice == i)) for i, case in enumerate(cases)]
    return [m.union(m.ranked(which, outputs[0]), *chosen)]


_ELEMENTWISE = """
    abs acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex
    conj convert_element_type copy copy_p cos cosh digamma eq eq_to erf erf_inv erfc expm1 floor ge
    gt igamma igamma_grad_a igammac imag integer_pow is_finite layout_constraint le le_to lgamma log
    log1p log2 logistic lt lt_to max mesh_cast min mulhi ne neg nextafter not or polygamma
    population_count pow random_clone random_fold_in random_seed real reduce_precision
    regularized_incomplete_beta relayout rem reshard round rsqrt sharding_constraint shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient tan tanh
    xor zeta
""".split()


def _each(params, inputs, outputs):
    """As many outputs as inputs, each what it was."""
    return [x.marks for x in inputs]


def _behind(params, inputs, outputs):
    """Axes more or fewer behind: one element is made of all of those, or all of those of it."""
    rank = np.ndim(outputs[0])
    return [m.union(*(_of_rank(x.marks, rank) for x in inputs))]


def _of_rank(marks, rank: int):
    if marks is None:
        return None
    whole = m.merged(marks, range(rank, marks.ndim - 1))
    same = whole.shape[: min(rank, marks.ndim - 1)]
    return whole.reshape(*same, *(1,) * (rank - len(same)), -1)


def _nothing(params, inputs, outputs):
    """What is printed gives nothing back."""
    return []


# ---- over axes


def _reduced(params, inputs, outputs):
    (x,) = inputs
    axes = tuple(params["axes"])
    whole = m.merged(x.marks, axes)
    return [np.squeeze(whole, axis=axes)] if axes else [whole]


def _largest(params, inputs, outputs):
    """Those that are not, nor might be, the largest affect nothing."""
    (x,) = inputs
    some = Marked(x.value, m.kept(x.marks, ~_negligible(params, x)))
    return [None] if some.marks is None else _reduced(params, [some], outputs)


def _cumulated(params, inputs, outputs):
    (x,) = inputs
    axis, whole = params["axis"], m.expand(x.marks, np.shape(x.value))
    if params["reverse"]:
        whole = np.flip(whole, axis)
    whole = np.bitwise_or.accumulate(whole, axis=axis)
    return [np.flip(whole, axis) if params["reverse"] else whole]


def _pooled(params, inputs, outputs):
    """The largest of ones and zeros in the same windows, bit by bit."""
    (x,) = inputs
    bits = np.unpackbits(m.expand(x.marks, np.shape(x.value)), axis=-1)
    names = "window_dimensions window_strides padding base_dilation window_dilation".split()
    how = {name: (*params[name], (0, 0) if name == "padding" else 1) for name in names}
    found = jax.lax.reduce_window(jax.numpy.asarray(bits), np.uint8(0), jax.lax.max, **how)
    return [np.packbits(np.asarray(found), axis=-1)]


def _transformed(params, inputs, outputs):
    """Fourier's, over the last axes."""
    (x,) = inputs
    rank = np.ndim(x.value)
    return [m.merged(x.marks, range(rank - len(params["fft_lengths"]), rank))]


def _sorted(params, inputs, outputs):
    names = ("dimension", "axis", "reduction_dimension")
    axis = next((params[name] for name in names if name in params), -1) % np.ndim(inputs[0].value)
    whole = m.merged(m.union(*(x.marks for x in inputs)), (axis,))
    return [whole] * len(outputs)


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
    """Axes that are split or merged in groups; a group of which all axes are of size 1 stays so."""
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


_RULES = {
    **dict.fromkeys(_ELEMENTWISE, _union),
    **dict.fromkeys(("mul", "and"), _absorbed(is_zero)),
    **dict.fromkeys(("add", "sub", "add_any"), _absorbed(np.isinf)),
    "div": _quotient,
    **dict.fromkeys(("exp", "exp2"), _power),
    "select_n": _select,
    **dict.fromkeys(
        "bitcast_convert_type random_bits random_gamma random_split random_unwrap "
        "random_wrap".split(),
        _behind,
    ),
    **dict.fromkeys(("device_put", "optimization_barrier", "name", "pvary"), _each),
    **dict.fromkeys(
        "reduce_sum reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin".split(),
        _reduced,
    ),
    "reduce_max": _largest,
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
    **{
        f"scatter{sign}{how}": added_at
        for sign in "-_"
        for how in ("add", "sub", "mul", "min", "max")
    },
}
_MADE = {"gather": gathered, "conv_general_dilated": convolved}


def rule_of(primitive):
    """The rule of a primitive; None: it has none of its own."""
    if primitive.name in _RULES:
        return _RULES[primitive.name]
    if primitive.name in _MADE:
        return _MADE[primitive.name](primitive)
    return moved(primitive) if primitive.name in MOVED else None
