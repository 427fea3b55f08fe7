"""Bounds of marked elements: how a finite number can work as a mask.

A mask by −∞ removes marks exactly. A mask by a large number such as −10⁹ removes them only if no
score can make up for it. Interval arithmetic decides that: each primitive in `_RULES` computes the
lowest and highest value of its output from those of its inputs. An element with two equal bounds
is a constant, so no input affects it. exp of a number that is always below −105 is the
constant 0 in float32.

One assumption enters: an element whose bounds are unknown is no larger than `reach`. Attention
scores of trained models can be below −10⁴. The limit for float32 and bfloat16 is therefore 2²⁰, and
at least 1,024 times the largest element of the array. Hence −10⁹ works as a mask, and −10⁴ does
not, unless the scores are capped (tanh, clip).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike

from jaxformer.verify.marks import Bounds, Equation, Limit, Marked, Where, marked

_Rule = Callable[[Equation], Bounds | None]

REACH = 2.0**20
_NOTABLE = 64.0  # smaller constants shift no score out of `reach`
_UNIT, _SIGNED, _POSITIVE = Bounds(0.0, 1.0), Bounds(-1.0, 1.0), Bounds(0.0, np.inf)


def is_float(x: Array | np.ndarray) -> bool:
    """Returns whether the array has a floating dtype."""
    return jnp.issubdtype(x.dtype, jnp.floating)


def reach(dtype: DTypeLike) -> float:
    """Returns the largest absolute value that elements with unknown bounds are assumed to have.

    For float16 this is a fifth of its largest number, so that its lowest number, and half of it,
    still count as masks.
    """
    return min(REACH, float(jnp.finfo(dtype).max) / 5)


def underflow(dtype: DTypeLike) -> float:
    """Returns a number below which exp is 0 in this dtype."""
    return float(np.log(float(jnp.finfo(dtype).smallest_subnormal))) - 1


def bounds_of(x: Marked) -> Bounds:
    """Returns the bounds of all elements; an unmarked element is a constant."""
    return _with_constants(x, x.bounds)


def sure_bounds(x: Marked) -> Bounds:
    """Returns the bounds of all elements without the assumption: unknown ones are infinite."""
    return _with_constants(x, x.bounds or Bounds(-np.inf, np.inf))


def _with_constants(x: Marked, bounds: Bounds | None) -> Bounds:
    value = np.asarray(x.value)
    where = marked(x.marks, value.shape)
    bounds = bounds or _assumed(value, where)
    if where.all():
        return bounds
    exact = value.astype(np.float64)
    low, high = (np.where(where, bound, exact) for bound in bounds)
    return Bounds(np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high))


def _assumed(value: np.ndarray, where: Where) -> Bounds:
    if value.dtype == bool:
        return _UNIT
    if not is_float(value):
        return Bounds(-np.inf, np.inf)
    sizes = np.abs(value.astype(np.float64))
    largest = sizes.max(where=where & np.isfinite(sizes), initial=0.0)
    limit = max(reach(value.dtype), 1024 * largest)
    return Bounds(-limit, limit)


def informative(x: Marked) -> bool:
    """Returns whether the bounds say more than the assumption.

    They do if they are known, or if an unmarked element is a large constant.
    """
    if x.bounds is not None:
        return True
    value = np.asarray(x.value)
    if not is_float(value):
        return False
    large = (np.abs(value) >= _NOTABLE) & np.isfinite(value)
    return bool(large.any() and (large & ~marked(x.marks, value.shape)).any())


def output_bounds(equation: Equation) -> Bounds | None:
    """Returns the bounds of the output of a primitive that has one; None if they are unknown."""
    rule, (output,) = _RULES.get(equation.primitive.name), equation.outputs
    if rule is None or not (is_float(output) or output.dtype == bool):
        return None
    return rule(equation)


def not_constant(bounds: Bounds | None, shape: Sequence[int]) -> Where | None:
    """Returns bool [*shape], false for elements whose two bounds are equal; None if there are none.

    Such an element has the same value for all inputs.
    """
    if bounds is None:
        return None
    differ = np.not_equal(*bounds)
    return None if differ.all() else np.broadcast_to(differ, shape)


def hull(*some: Marked) -> Bounds | None:
    """Returns bounds that hold for all of these arrays, which have one shape."""
    if not any(map(informative, some)):
        return None
    return _hull([bounds_of(x) for x in some])


def _hull(bounds: Iterable[Bounds]) -> Bounds:
    low, high = zip(*bounds, strict=True)
    return Bounds(reduce(np.minimum, low), reduce(np.maximum, high))


def _rounded(low: Limit, high: Limit, output: Array) -> Bounds:
    """Widens bounds by the rounding of the output's dtype. NaN (∞ − ∞) becomes unbounded."""
    epsilon = float(jnp.finfo(output.dtype).eps) if is_float(output) else 0.0
    low = np.where(np.isnan(low), -np.inf, low)
    high = np.where(np.isnan(high), np.inf, high)
    return Bounds(low - epsilon * np.abs(low), high + epsilon * np.abs(high))


def _added(sign: int) -> _Rule:
    """Makes the rule of a sum (sign 1) or a difference (−1)."""

    def rule(equation: Equation) -> Bounds | None:
        if not any(map(informative, equation.inputs)):
            return None
        a, b = map(bounds_of, equation.inputs)
        low, high = b if sign == 1 else (-b.high, -b.low)
        with np.errstate(invalid="ignore"):
            return _rounded(a.low + low, a.high + high, equation.outputs[0])

    return rule


def _multiplied(equation: Equation) -> Bounds | None:
    if all(x.bounds is None for x in equation.inputs):
        return None
    a, b = map(bounds_of, equation.inputs)
    with np.errstate(invalid="ignore"):
        corners = np.stack(np.broadcast_arrays(*(x * y for x in a for y in b)))
    corners = np.where(np.isnan(corners), 0.0, corners)  # 0 × ∞, of numbers that are finite
    return _rounded(corners.min(axis=0), corners.max(axis=0), equation.outputs[0])


def _divided(equation: Equation) -> Bounds | None:
    a, b = equation.inputs
    if a.bounds is None or b.marks is not None:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = 1 / np.asarray(b.value).astype(np.float64)
    return _multiplied(equation._replace(inputs=[a, Marked(inverse)]))


def _negated(equation: Equation) -> Bounds | None:
    (x,) = equation.inputs
    return None if x.bounds is None else Bounds(-x.bounds.high, -x.bounds.low)


def _even(equation: Equation) -> Bounds | None:
    return _POSITIVE if equation.params.get("y", 2) % 2 == 0 else None


def _exponential(base: float) -> _Rule:
    def rule(equation: Equation) -> Bounds | None:
        (x,), (output,) = equation.inputs, equation.outputs
        if not informative(x):
            return _POSITIVE
        floor = underflow(output.dtype)
        with np.errstate(over="ignore"):
            low, high = (np.exp(np.log(base) * bound) for bound in bounds_of(x))
        low, high = (np.where(bound <= np.exp(floor), 0.0, bound) for bound in (low, high))
        return _rounded(low, high, output)

    return rule


def _logistic(equation: Equation) -> Bounds | None:
    (x,), (output,) = equation.inputs, equation.outputs
    if not informative(x):
        return _UNIT
    return Bounds(0.0, np.where(bounds_of(x).high <= underflow(output.dtype), 0.0, 1.0))


def _monotone(function: Callable[..., Limit], *inputs: Marked) -> Bounds:
    """Applies a monotone function to the bounds. Assumed bounds make no element constant."""
    assumed, sure = (
        Bounds(*map(function, *map(limits, inputs))) for limits in (bounds_of, sure_bounds)
    )
    doubtful = np.equal(*assumed) & ~np.equal(*sure)
    return Bounds(*(np.where(doubtful, x, y) for x, y in zip(sure, assumed, strict=True)))


def _ordered(of_two: Callable[[Limit, Limit], Limit]) -> _Rule:
    def rule(equation: Equation) -> Bounds | None:
        if not any(informative(x) or x.marks is None for x in equation.inputs):
            return None
        return _monotone(of_two, *equation.inputs)

    return rule


def _clamped(equation: Equation) -> Bounds | None:
    lowest, x, highest = equation.inputs
    return Bounds(*map(np.clip, sure_bounds(x), bounds_of(lowest), bounds_of(highest)))


def _compared(equation: Equation) -> Bounds | None:
    """Rule of a comparison, which is constant if it holds for all inputs or for none."""
    name, inputs = equation.primitive.name, equation.inputs
    if all(x.bounds is None for x in inputs):
        return None
    a, b = map(bounds_of, inputs[::-1] if name in ("gt", "ge") else inputs)
    is_strict = name in ("lt", "gt")
    always = a.high < b.low if is_strict else a.high <= b.low
    never = a.low >= b.high if is_strict else a.low > b.high
    return Bounds(np.where(always, 1.0, 0.0), np.where(never, 0.0, 1.0))


def _selected(equation: Equation) -> Bounds | None:
    which, *cases = equation.inputs
    choice = np.asarray(which.value)
    undecided = marked(which.marks, choice.shape)
    large = undecided.any() and any(map(informative, cases))
    if not large and all(case.bounds is None for case in cases):
        return None
    bounds = [bounds_of(case) for case in cases]
    low, high = _hull(bounds)
    for number, case in enumerate(bounds):
        decided = ~undecided & (choice == number)
        low, high = np.where(decided, case.low, low), np.where(decided, case.high, high)
    return Bounds(low, high)


def _reduced(of_all: Callable[..., np.ndarray]) -> _Rule:
    def rule(equation: Equation) -> Bounds | None:
        (x,), axes = equation.inputs, tuple(equation.params["axes"])
        if not informative(x) or not np.size(x.value):
            return None
        shape = np.shape(x.value)
        return _monotone(lambda bound: of_all(np.broadcast_to(bound, shape), axis=axes), x)

    return rule


def _converted(equation: Equation) -> Bounds | None:
    (x,), (output,) = equation.inputs, equation.outputs
    value = np.asarray(x.value)
    if not is_float(output) or not (value.dtype == bool or is_float(value)):
        return None
    if x.bounds is None and is_float(value) and reach(value.dtype) >= reach(output.dtype):
        return None
    return bounds_of(x) if value.dtype == bool else _rounded(*bounds_of(x), output)


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("add", "add_any"), _added(1)),
    "sub": _added(-1),
    "mul": _multiplied,
    "div": _divided,
    "neg": _negated,
    **dict.fromkeys(("integer_pow", "square"), _even),
    **dict.fromkeys(("abs", "sqrt"), lambda _: _POSITIVE),
    **dict.fromkeys(("tanh", "erf", "sin", "cos", "sign"), lambda _: _SIGNED),
    "exp": _exponential(np.e),
    "exp2": _exponential(2.0),
    "logistic": _logistic,
    "max": _ordered(np.maximum),
    "min": _ordered(np.minimum),
    "clamp": _clamped,
    **dict.fromkeys(("lt", "le", "gt", "ge"), _compared),
    "select_n": _selected,
    "reduce_max": _reduced(np.max),
    "reduce_min": _reduced(np.min),
    "convert_element_type": _converted,
}
# Functions that are 0 for very negative inputs.
_FALLING = ("exp", "exp2", "logistic")


class Thresholds:
    """Counts of the elements of exp that are 0 because of a finite mask.

    Attributes:
        far: The number of elements that are 0 as long as scores stay within `reach`.
        near: The number of elements that are 0 for these inputs and may differ for others.
        number: The largest input of exp among the latter, which is about the number of their mask.
    """

    def __init__(self) -> None:
        """Sets all counts to 0."""
        self.far, self.near, self.number = 0, 0, -np.inf

    def see(self, equation: Equation, outputs: Sequence[Marked]) -> None:
        """Counts the elements of the outputs of an equation, given with their marks."""
        x = equation.inputs[0] if equation.primitive.name in _FALLING else None
        if x is None or x.bounds is None or not is_float(x.value):
            return
        (output,), shape = outputs, np.shape(x.value)
        low, high = (np.broadcast_to(bound, shape) for bound in bounds_of(x))
        affected = marked(x.marks, shape)
        zero = affected & (np.asarray(output.value) == 0)
        settled = zero & ~marked(output.marks, shape)
        with np.errstate(invalid="ignore"):
            middle = (low + high) / 2
            self.far += int((settled & (high - low >= reach(x.value.dtype))).sum())
        near = zero & ~settled & np.isfinite(middle) & (middle < underflow(x.value.dtype))
        if near.any():
            self.near += int(near.sum())
            self.number = max(self.number, float(np.asarray(x.value)[near].max()))

    def notes(self) -> Iterator[str]:
        """Yields a sentence for each count that is not 0."""
        if self.far:
            yield (
                f"{self.far} scores are masked by a finite number: that holds while no score "
                f"exceeds {REACH:,.0f} in size"
            )
        if self.near:
            number = float(f"{self.number:.2g}")
            yield (
                f"{self.near} scores are masked by about {number:,.0f}, which scores may reach "
                f"(up to {REACH:,.0f} in size is allowed for): they count as visible. Mask by "
                "-jnp.inf or jnp.finfo(dtype).min, or bound the scores by a cap (tanh, clip)"
            )
