"""Rules for the marks of JAX primitives: a table from a primitive's name to its rule.

A rule maps an `Equation`, of which at least one operand is marked, to the marks of each output. A
primitive without a rule marks every output by every input (`marks.everything`). This may mark too
much, but never too little.

Rules depend on values. An unmarked 0 removes the marks of its factor. An unmarked −∞ removes the
marks of the number to which it is added; masks work in this way. The rules assume that marked
values are finite and that 0 is never divided by a marked 0, because 0 × ∞ and 0 / 0 are NaN.
`bounds` decides when a large finite number works as a mask.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt8

from jaxformer.functional.layers.expert_products import ByRow
from jaxformer.verify import marks as m
from jaxformer.verify.bounds import informative, sure_bounds
from jaxformer.verify.indexing import MOVED, added_at, gathered, moved, scattered
from jaxformer.verify.marks import Equation, Found, Limit, Marked, Marks, Rule, Where

# ---- element by element; the marks of a scalar broadcast to the elements of the other operands


def _union(equation: Equation) -> Found:
    return [equation.marks()]


def _absorbed(is_absorbing: Callable[[np.ndarray], Where]) -> Rule:
    """Makes a rule in which an absorbing element of one operand removes the other's marks."""

    def rule(equation: Equation) -> Found:
        a, b = equation.inputs
        return [m.union(_beside(b, is_absorbing, a), _beside(a, is_absorbing, b))]

    return rule


def _beside(other: Marked, is_absorbing: Callable[[np.ndarray], Where], x: Marked) -> Marks | None:
    """Returns the marks of x without those beside an unmarked absorbing element of `other`."""
    return None if x.marks is None else m.only_where(x.marks, m.counts(other, is_absorbing))


def _quotient(equation: Equation) -> Found:
    """Rule of a division: an unmarked 0 as the dividend removes the marks of the divisor."""
    a, b = equation.inputs
    return [m.union(a.marks, _beside(a, m.is_zero, b))]


def _extreme(sign: int) -> Rule:
    """Makes the rule of max (sign 1) or min (−1): an operand that never wins affects nothing."""

    def rule(equation: Equation) -> Found:
        if not any(map(informative, equation.inputs)):
            return _union(equation)
        a, b = equation.inputs
        (a_top, a_bottom), (b_top, b_bottom) = _ordered(sign, a), _ordered(sign, b)
        shape = np.shape(equation.outputs[0])
        a_loses = np.broadcast_to(a_top < b_bottom, shape)
        b_loses = np.broadcast_to(b_top < a_bottom, shape)
        return [m.union(m.only_where(a.marks, ~a_loses), m.only_where(b.marks, ~b_loses))]

    return rule


def _ordered(sign: int, x: Marked) -> tuple[Limit, Limit]:
    """Returns (highest, lowest) value of each element or, if sign is −1, of its negative."""
    low, high = sure_bounds(x)
    return (high, low) if sign == 1 else (-low, -high)


def _select(equation: Equation) -> Found:
    """Returns the marks of the predicate and of the chosen case (all cases, if it is marked)."""
    which, *cases = equation.inputs
    choice = np.asarray(which.value)
    undecided = m.marked(which.marks, choice.shape)
    chosen = [m.only_where(case.marks, undecided | (choice == i)) for i, case in enumerate(cases)]
    return [m.union(which.marks, *chosen)]


_UNIONS = """
    abs acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex
    conj convert_element_type cos cosh digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt
    igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic
    lt lt_to mulhi ne neg nextafter not or polygamma population_count pow random_clone
    random_fold_in random_seed real reduce_precision regularized_incomplete_beta rem round rsqrt
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan tanh xor
    zeta
""".split()


# Primitives whose output i is input i.
IDENTITIES = frozenset(
    "copy copy_p device_put layout_constraint mesh_cast name optimization_barrier pvary relayout "
    "reshard sharding_constraint stop_gradient".split()
)


def _each(equation: Equation) -> Found:
    """Rule of identities."""
    return [x.marks for x in equation.inputs]


def _behind(equation: Equation) -> Found:
    """Rule of primitives that split an element into new last axes, or merge the last axes."""
    rank = np.ndim(equation.outputs[0])
    return [m.union(*(m.of_rank(x.marks, rank) for x in equation.inputs))]


def _nothing(equation: Equation) -> Found:
    """Rule of primitives without outputs, such as printing."""
    return []


# ---- over axes


def _reduced(equation: Equation) -> Found:
    axes = tuple(equation.params["axes"])
    return [np.squeeze(m.merged(equation.marks(), axes), axis=axes)]


def _reduced_extreme(sign: int) -> Rule:
    """Makes the rule of reduce_max (sign 1) or reduce_min (−1).

    Elements that are never the largest (smallest) affect nothing.
    """

    def rule(equation: Equation) -> Found:
        (x,) = equation.inputs
        if informative(x) and np.size(x.value):
            top, bottom = (np.broadcast_to(y, np.shape(x.value)) for y in _ordered(sign, x))
            largest = bottom.max(axis=tuple(equation.params["axes"]), keepdims=True)
            x = x._replace(marks=m.only_where(x.marks, ~(top < largest)))
        return [None] if x.marks is None else _reduced(equation._replace(inputs=[x]))

    return rule


def _cumulated(equation: Equation) -> Found:
    axis, is_reversed = equation.params["axis"], equation.params["reverse"]
    whole = m.expand(equation.marks(), np.shape(equation.outputs[0]))
    whole = np.flip(whole, axis) if is_reversed else whole
    whole = np.bitwise_or.accumulate(whole, axis=axis)
    return [np.flip(whole, axis) if is_reversed else whole]


def _pooled(equation: Equation) -> Found:
    """Pools each bit with max over the primitive's windows."""
    names = "window_dimensions window_strides padding base_dilation window_dilation".split()
    options = {name: equation.params[name] for name in names}

    def pool(bits: Array) -> Array:
        return jax.lax.reduce_window(bits, np.uint8(0), jax.lax.max, **options)

    shape = np.shape(equation.inputs[0].value)
    return [m.map_bits(pool, equation.marks(), shape, np.uint8)]


def _transformed(equation: Equation) -> Found:
    """Rule of a Fourier transform: it mixes the last axes."""
    rank = np.ndim(equation.inputs[0].value)
    first = rank - len(equation.params["fft_lengths"])
    return [m.merged(equation.marks(), range(first, rank))]


def _sorted(equation: Equation) -> Found:
    """Rule of sorting: it mixes one axis of all operands."""
    names, params = ("dimension", "axis", "reduction_dimension"), equation.params
    axis = next((params[name] for name in names if name in params), -1)
    axis %= np.ndim(equation.inputs[0].value)
    return [m.merged(equation.marks(), (axis,))] * len(equation.outputs)


# ---- rows that are sorted, computed and put back


def is_by_row(params: Mapping[str, Any]) -> bool:
    """Returns whether an equation computes `experts.by_expert`."""
    return isinstance(params.get("policy"), ByRow)


def by_row(equation: Equation) -> Found:
    """Rule of `by_expert`: an output has the marks of its token, its experts and all weights."""
    *weights, x, experts, shares = equation.inputs
    if np.ndim(x.value) != 2:  # vmap has added axes
        return m.everything(equation.inputs, equation.outputs)
    rows = [m.merged(part.marks, (1,)) for part in (x, experts, shares) if part.marks is not None]
    whole = [m.merged(w.marks, range(w.marks.ndim - 1)) for w in weights if w.marks is not None]
    return [m.union(None, *rows, *(marks.reshape(1, 1, -1) for marks in whole))]


# ---- shapes alone


def _transposed(equation: Equation) -> Found:
    return [m.permuted(equation.marks(), equation.params["permutation"])]


def _squeezed(equation: Equation) -> Found:
    return [np.squeeze(equation.marks(), axis=tuple(equation.params["dimensions"]))]


def _broadcast(equation: Equation) -> Found:
    marks, shape = equation.marks(), [1] * len(equation.params["shape"])
    for axis, size in zip(equation.params["broadcast_dimensions"], marks.shape, strict=False):
        shape[axis] = size
    return [marks.reshape(*shape, marks.shape[-1])]


def _reshaped(equation: Equation) -> Found:
    """Splits or merges groups of axes. Groups along which the marks are constant keep size 1."""
    marks, new = equation.marks(), np.shape(equation.outputs[0])
    old, order = np.shape(equation.inputs[0].value), equation.params.get("dimensions")
    if order is not None:  # order="F": the axes are permuted first
        marks, old = m.permuted(marks, order), [old[axis] for axis in order]
    shape, full = [], []
    for old_axes, new_axes in _groups(old, new):
        uniform = all(marks.shape[axis] == 1 for axis in old_axes)
        full += [1 if uniform else old[axis] for axis in old_axes]
        shape += [1 if uniform else new[axis] for axis in new_axes]
    return [m.expand(marks, full).reshape(*shape, marks.shape[-1])]


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the smallest groups of equal size: (axes of `old`, axes of `new`)."""

    def size(shape: Sequence[int], axes: Sequence[int]) -> int:
        return prod(shape[axis] for axis in axes)

    i = j = 0
    while i < len(old) or j < len(new):
        first, second = [*range(i, len(old))][:1], [*range(j, len(new))][:1]
        while (before := size(old, first)) != (after := size(new, second)):
            if before < after:
                first.append(first[-1] + 1 if first else i)
            else:
                second.append(second[-1] + 1 if second else j)
        i, j = i + len(first), j + len(second)
        yield first, second


# ---- products: the marks of a factor pass where the other factor is not 0


def _product(equation: Equation) -> Found:
    """Rule of `dot_general`: out[b, m, n] = Σ_k a[b, m, k] b[b, k, n]."""
    contracted, batch = equation.params["dimension_numbers"]
    a, b = map(_Side, equation.inputs, batch, contracted)
    passed = []  # [B, M, N, bytes]
    if a.x.marks is not None:
        passed.append(_through(a.grouped(a.x.marks), b.live()))
    if b.x.marks is not None:
        passed.append(_through(b.grouped(b.x.marks), a.live()).swapaxes(1, 2))
    groups = (a.sizes[0], a.sizes[1], b.sizes[1])
    return [m.compressed(m.union(*(_ungrouped(marks, groups) for marks in passed)))]


class _Side:
    """An operand of a product, viewed as an array with the axes [batch, free, contracted].

    Attributes:
        x: The operand.
        order: Its axes in the order of the three groups.
        sizes: The sizes of the axes of each group.
    """

    def __init__(self, x: Marked, batch: Sequence[int], contracted: Sequence[int]) -> None:
        shape = np.shape(x.value)
        groups = (
            batch,
            [i for i in range(len(shape)) if i not in (*batch, *contracted)],
            contracted,
        )
        self.x, self.order = x, [axis for group in groups for axis in group]
        self.sizes = [[shape[axis] for axis in group] for group in groups]

    def grouped(self, x: np.ndarray) -> np.ndarray:
        """Reshapes an array [*shape, …] to [batch, free, contracted, …].

        A group whose axes all have size 1 in the array, because it is constant there, keeps size 1.
        """
        rest = x.shape[len(self.order) :]
        x = np.transpose(x, (*self.order, *range(len(self.order), x.ndim)))
        full, merged, first = [], [], 0
        for sizes in self.sizes:
            own = x.shape[first : first + len(sizes)]
            full += own if prod(own) == 1 else sizes
            merged.append(1 if prod(own) == 1 else prod(sizes))
            first += len(sizes)
        return np.broadcast_to(x, (*full, *rest)).reshape(*merged, *rest)

    def live(self) -> Bool[np.ndarray, "batch free contracted"] | None:
        """Returns bool [batch, free, contracted], false at unmarked zeros; None if there are none.

        A marked zero counts as true, because other inputs may change it.
        """
        live = m.counts(self.x, m.is_zero)
        return None if live is None else self.grouped(np.asarray(live))


def _ungrouped(marks: UInt8[np.ndarray, "B M N bytes"], groups: Sequence[Sequence[int]]) -> Marks:
    """Splits each axis into axes with the sizes of its group; size 1 becomes sizes of 1."""
    shape = []
    for size, sizes in zip(marks.shape, groups, strict=False):
        shape += [1] * len(sizes) if size == 1 else sizes
    return marks.reshape(*shape, marks.shape[-1])


def _through(
    marks: UInt8[np.ndarray, "#B M #K bytes"], live: Bool[np.ndarray, "#B N #K"] | None
) -> UInt8[np.ndarray, "#B M #N bytes"]:
    """Passes marks along the contracted axis: element n gets the marks of each k that is live at n.

    Args:
        marks: uint8 [B, M, K, bytes], where B, M and K may be 1.
        live: bool [B, N, K].

    Returns:
        uint8 [B, M, N, bytes], where N may be 1.
    """
    if live is None:
        return m.merged(marks, (2,))
    if (live == live[:, :1]).all():  # the same for each n
        return m.merged(np.where(live[:, :1, :, None], marks, np.uint8(0)), (2,))
    if marks.shape[2] == 1:
        return np.where(np.expand_dims(live.any(axis=2), (1, 3)), marks, np.uint8(0))
    paths = live.astype(np.float32)
    reached = []
    for row in range(marks.shape[1]):
        bits = np.unpackbits(marks[:, row], axis=-1).astype(np.float32)
        reached.append(np.packbits(paths @ bits > 0, axis=-1))
    return np.stack(reached, axis=1)


def _convolved(equation: Equation) -> Found:
    """Runs the convolution on each bit of the marks."""
    whole, params = [], {**equation.params, "preferred_element_type": None}
    for side, (x, other) in enumerate((equation.inputs, equation.inputs[::-1])):
        if x.marks is None:
            continue
        live = m.counts(other, m.is_zero)
        paths = jnp.asarray(np.ones(np.shape(other.value)) if live is None else live, np.float32)

        def convolve(bits: Array, paths: Array = paths, side: int = side) -> Array:
            operands = (bits, paths) if side == 0 else (paths, bits)
            return equation.primitive.bind(*operands, **params)

        whole.append(m.map_bits(convolve, x.marks, np.shape(x.value), np.float32))
    return [m.union(*whole)]


_RULES: dict[str, Rule] = {
    **dict.fromkeys(_UNIONS, _union),
    **dict.fromkeys(("mul", "and"), _absorbed(m.is_zero)),
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
    **dict.fromkeys(IDENTITIES, _each),
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
    "dot_general": _product,
    "conv_general_dilated": _convolved,
    **dict.fromkeys(MOVED, moved),
    "gather": gathered,
    "scatter": scattered,
    **{f"scatter{x}{y}": added_at for x in "-_" for y in "add sub mul min max".split()},
}

# Primitives whose output has the elements of the first operand.
RESHAPED = frozenset("transpose squeeze broadcast_in_dim reshape".split())


def marks_of_outputs(equation: Equation) -> Found | None:
    """Returns the marks of each output of an equation; None if its primitive has no rule."""
    rule = by_row if is_by_row(equation.params) else _RULES.get(equation.primitive.name)
    return None if rule is None else rule(equation)
