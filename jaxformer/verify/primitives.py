"""Taint rules of JAX primitives: how taint marks propagate from operands to outputs.

A taint rule maps an `Equation` to the taint marks of each output. Taint rules are called only if at
least one operand has taint marks. For a primitive without a taint rule, every output depends on
every operand (`marks.everything`). The analysis may therefore report too many dependencies, but
never too few.

The rules use the values of the operands. A factor that is a constant 0 removes the taint marks of
the other factor. A summand that is a constant −∞ removes the taint marks of the other summand;
masks work in this way. The rules assume that values with taint marks are finite, because 0 × ∞ is
NaN. Because 0 / 0 is NaN, the rules also assume that 0 is never divided by a 0 with taint marks.
The module `bounds` determines whether a finite number such as −10⁹ is low enough to mask a score.
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

# ---- elementwise primitives; a scalar operand affects every output element


def _union(equation: Equation) -> Found:
    return [equation.marks()]


def _absorbed(is_absorbing: Callable[[np.ndarray], Where]) -> Rule:
    """Returns the taint rule of a product or a sum.

    A constant absorbing element (0 or ±∞) of an operand removes the taint marks of the other
    operand.
    """

    def rule(equation: Equation) -> Found:
        a, b = equation.inputs
        return [m.union(_beside(b, is_absorbing, a), _beside(a, is_absorbing, b))]

    return rule


def _beside(other: Marked, is_absorbing: Callable[[np.ndarray], Where], x: Marked) -> Marks | None:
    """Returns the taint marks of x, except where `other` is a constant absorbing element."""
    return None if x.marks is None else m.only_where(x.marks, m.live_elements(other, is_absorbing))


def _quotient(equation: Equation) -> Found:
    """Taint rule of division: a constant dividend 0 removes the taint marks of the divisor."""
    a, b = equation.inputs
    return [m.union(a.marks, _beside(a, m.is_zero, b))]


def _extreme(sign: int) -> Rule:
    """Returns the taint rule of max (sign 1) or min (sign −1).

    An operand that is never the maximum (minimum) does not affect the result.
    """

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
    """Returns (upper bound, lower bound) of sign · x."""
    low, high = sure_bounds(x)
    return (high, low) if sign == 1 else (-low, -high)


def _select(equation: Equation) -> Found:
    """Taint rule of `select_n`: an output depends on the predicate and the selected case.

    If an input affects the predicate, the output has the taint marks of all cases.
    """
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


# Primitives that return their operands: output i is operand i.
IDENTITIES = frozenset(
    "copy copy_p device_put layout_constraint mesh_cast name optimization_barrier pvary relayout "
    "reshard sharding_constraint stop_gradient".split()
)


def _each(equation: Equation) -> Found:
    """Taint rule of `IDENTITIES`: output i has the taint marks of operand i."""
    return [x.marks for x in equation.inputs]


def _behind(equation: Equation) -> Found:
    """Taint rule of primitives that split each element along a new last axis, or do the inverse."""
    rank = np.ndim(equation.outputs[0])
    return [m.union(*(m.with_rank(x.marks, rank) for x in equation.inputs))]


def _nothing(equation: Equation) -> Found:
    """Taint rule of primitives without outputs, such as printing."""
    return []


# ---- reductions and other primitives that combine elements along axes


def _reduced(equation: Equation) -> Found:
    axes = tuple(equation.params["axes"])
    return [np.squeeze(m.merge(equation.marks(), axes), axis=axes)]


def _reduced_extreme(sign: int) -> Rule:
    """Returns the taint rule of reduce_max (sign 1) or reduce_min (sign −1).

    Elements that are never the maximum (minimum) do not affect the result.
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
    """Taint rule of window reductions: an output has the marks of all elements of its window."""
    names = "window_dimensions window_strides padding base_dilation window_dilation".split()
    options = {name: equation.params[name] for name in names}

    def pool(bits: Array) -> Array:
        return jax.lax.reduce_window(bits, np.uint8(0), jax.lax.max, **options)

    shape = np.shape(equation.inputs[0].value)
    return [m.map_bits(pool, equation.marks(), shape, np.uint8)]


def _transformed(equation: Equation) -> Found:
    """Taint rule of the Fourier transform, which mixes all elements of the last axes."""
    rank = np.ndim(equation.inputs[0].value)
    first = rank - len(equation.params["fft_lengths"])
    return [m.merge(equation.marks(), range(first, rank))]


def _sorted(equation: Equation) -> Found:
    """Taint rule of sorting, which mixes all elements along one axis of all operands."""
    names, params = ("dimension", "axis", "reduction_dimension"), equation.params
    axis = next((params[name] for name in names if name in params), -1)
    axis %= np.ndim(equation.inputs[0].value)
    return [m.merge(equation.marks(), (axis,))] * len(equation.outputs)


# ---- mixture of experts: tokens sorted by expert


def is_by_row(params: Mapping[str, Any]) -> bool:
    """Returns whether the parameters belong to a call of `expert_products.by_expert`."""
    return isinstance(params.get("policy"), ByRow)


def by_row(equation: Equation) -> Found:
    """Taint rule of `by_expert`.

    An output depends on its token, on the experts of this token and on all weights.
    """
    *weights, x, experts, shares = equation.inputs
    if np.ndim(x.value) != 2:  # Under vmap, x has additional axes.
        return m.everything(equation.inputs, equation.outputs)
    rows = [m.merge(part.marks, (1,)) for part in (x, experts, shares) if part.marks is not None]
    whole = [m.merge(w.marks, range(w.marks.ndim - 1)) for w in weights if w.marks is not None]
    return [m.union(None, *rows, *(marks.reshape(1, 1, -1) for marks in whole))]


# ---- changes of shape


def _transposed(equation: Equation) -> Found:
    return [m.permute(equation.marks(), equation.params["permutation"])]


def _squeezed(equation: Equation) -> Found:
    return [np.squeeze(equation.marks(), axis=tuple(equation.params["dimensions"]))]


def _broadcast(equation: Equation) -> Found:
    marks, shape = equation.marks(), [1] * len(equation.params["shape"])
    for axis, size in zip(equation.params["broadcast_dimensions"], marks.shape, strict=False):
        shape[axis] = size
    return [marks.reshape(*shape, marks.shape[-1])]


def _reshaped(equation: Equation) -> Found:
    """Taint rule of `reshape`.

    If taint marks are constant along a group of old axes, the new axes have size 1.
    """
    marks, new = equation.marks(), np.shape(equation.outputs[0])
    old, order = np.shape(equation.inputs[0].value), equation.params.get("dimensions")
    if order is not None:  # For example, jnp.reshape(order="F") permutes the axes first.
        marks, old = m.permute(marks, order), [old[axis] for axis in order]
    shape, full = [], []
    for old_axes, new_axes in _groups(old, new):
        uniform = all(marks.shape[axis] == 1 for axis in old_axes)
        full += [1 if uniform else old[axis] for axis in old_axes]
        shape += [1 if uniform else new[axis] for axis in new_axes]
    return [m.expand(marks, full).reshape(*shape, marks.shape[-1])]


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Splits two shapes into groups of neighbouring axes with equal numbers of elements.

    The groups are as small as possible.

    Yields:
        (axes of `old`, axes of `new`) of each group.
    """

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


# ---- products: an output depends on a factor where the other factor is not a constant 0


def _product(equation: Equation) -> Found:
    """Taint rule of `dot_general`: out[b, m, n] = Σ_k a[b, m, k] b[b, k, n]."""
    contracted, batch = equation.params["dimension_numbers"]
    a, b = map(_Side, equation.inputs, batch, contracted)
    passed = []  # [B, M, N, bytes]
    if a.x.marks is not None:
        passed.append(_through(a.grouped(a.x.marks), b.live()))
    if b.x.marks is not None:
        passed.append(_through(b.grouped(b.x.marks), a.live()).swapaxes(1, 2))
    groups = (a.sizes[0], a.sizes[1], b.sizes[1])
    return [m.compress(m.union(*(_ungrouped(marks, groups) for marks in passed)))]


class _Side:
    """Operand of `dot_general`, viewed as an array with the axes [batch, free, contracted].

    Attributes:
        x: The operand.
        order: The operand's axes: first the batch axes, then the free and the contracted axes.
        sizes: Three lists: the sizes of the batch axes, of the free and of the contracted axes.
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

        If the array has size 1 along all batch axes, the merged batch axis has size 1. The same
        holds for the free and the contracted axes.
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
        """Returns bool [batch, free, contracted], False where the operand is a constant 0.

        Returns None if no element is a constant 0. A zero with taint marks counts as True, because
        the element may be nonzero for other inputs.
        """
        live = m.live_elements(self.x, m.is_zero)
        return None if live is None else self.grouped(np.asarray(live))


def _ungrouped(marks: UInt8[np.ndarray, "B M N bytes"], groups: Sequence[Sequence[int]]) -> Marks:
    """Splits each of the axes B, M and N into the axes from which it was merged.

    If a merged axis has size 1, the new axes have size 1. Otherwise the new axes have the sizes in
    `groups`.
    """
    shape = []
    for size, sizes in zip(marks.shape, groups, strict=False):
        shape += [1] * len(sizes) if size == 1 else sizes
    return marks.reshape(*shape, marks.shape[-1])


def _through(
    marks: UInt8[np.ndarray, "#B M #K bytes"], live: Bool[np.ndarray, "#B N #K"] | None
) -> UInt8[np.ndarray, "#B M #N bytes"]:
    """Propagates taint marks through a product.

    Output element (m, n) gets the marks of element (m, k) for each k where `live` is True at (n,
    k).

    Args:
        marks: The taint marks of one factor: uint8 [B, M, K, bytes], where B, M and K may be 1.
        live: bool [B, N, K], False where the other factor is a constant 0.

    Returns:
        uint8 [B, M, N, bytes], where N may be 1.
    """
    if live is None:
        return m.merge(marks, (2,))
    if (live == live[:, :1]).all():
        return m.merge(np.where(live[:, :1, :, None], marks, np.uint8(0)), (2,))
    if marks.shape[2] == 1:
        return np.where(np.expand_dims(live.any(axis=2), (1, 3)), marks, np.uint8(0))
    paths = live.astype(np.float32)
    reached = []
    for row in range(marks.shape[1]):
        bits = np.unpackbits(marks[:, row], axis=-1).astype(np.float32)
        reached.append(np.packbits(paths @ bits > 0, axis=-1))
    return np.stack(reached, axis=1)


def _convolved(equation: Equation) -> Found:
    """Taint rule of convolutions: applies the convolution to each bit of the taint marks."""
    whole, params = [], {**equation.params, "preferred_element_type": None}
    for side, (x, other) in enumerate((equation.inputs, equation.inputs[::-1])):
        if x.marks is None:
            continue
        live = m.live_elements(other, m.is_zero)
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

# Primitives that rearrange or repeat the elements of the first operand.
RESHAPED = frozenset("transpose squeeze broadcast_in_dim reshape".split())


def marks_of_outputs(equation: Equation) -> Found | None:
    """Returns the taint marks of each output of an equation; None if no taint rule is known."""
    rule = by_row if is_by_row(equation.params) else _RULES.get(equation.primitive.name)
    return None if rule is None else rule(equation)
