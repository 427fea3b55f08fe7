"""Interval arithmetic for taint analysis: decides whether a finite mask value hides a score.

A mask value of −∞ always hides a score. A large negative number such as −10⁹ hides a score only if
no score can compensate for this number. To decide whether a number hides a score, the rules in
`_RULES` compute the bounds of each output from the bounds of the inputs. An element with equal
lower and upper bound is a constant, so no input affects it. For example, exp(x) is the constant 0
in float32 if x is always below −105.

The analysis makes one assumption: the absolute value of an element with unknown bounds is at most
`assumed_limit`. Attention scores of trained models can be below −10⁴, so this limit is 2²⁰ for
float32 and bfloat16. For each array, the assumed limit is at least 1,024 times the largest
absolute value of an element. With these limits, the mask value −10⁹ hides every score. The mask
value −10⁴ hides the scores only if they are capped (tanh, clip).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike

from jaxformer.verify.marks import Bounds, Equation, Limit, Marked, Where, marked

_Rule = Callable[[Equation], Bounds | None]

REACH = 2.0**20
# Constants with a smaller absolute value cannot act as a mask.
_NOTABLE = 64.0
_UNIT, _SIGNED, _POSITIVE = Bounds(0.0, 1.0), Bounds(-1.0, 1.0), Bounds(0.0, np.inf)


def is_float(x: Array | np.ndarray) -> bool:
    """Returns whether the array has a floating dtype."""
    return jnp.issubdtype(x.dtype, jnp.floating)


def assumed_limit(dtype: DTypeLike) -> float:
    """Returns the assumed maximum of the absolute value of elements with unknown bounds.

    For float16 this limit is a fifth of the largest finite number. With this limit, the lowest
    finite number and half of it still work as masks.
    """
    return min(REACH, float(jnp.finfo(dtype).max) / 5)


def underflow(dtype: DTypeLike) -> float:
    """Returns a number below which exp underflows to 0 in the given dtype."""
    return float(np.log(float(jnp.finfo(dtype).smallest_subnormal))) - 1


def element_bounds(x: Marked) -> Bounds:
    """Returns the bounds of all elements; for a constant, both bounds are its value."""
    return _with_constants(x, x.bounds)


def sure_bounds(x: Marked) -> Bounds:
    """Returns the bounds of all elements like `element_bounds`, but ±∞ where they are unknown."""
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
    limit = max(assumed_limit(value.dtype), 1024 * largest)
    return Bounds(-limit, limit)


def informative(x: Marked) -> bool:
    """Returns whether an array has known bounds, or has constant elements that may be a mask."""
    if x.bounds is not None:
        return True
    value = np.asarray(x.value)
    if not is_float(value):
        return False
    large = (np.abs(value) >= _NOTABLE) & np.isfinite(value)
    return bool(large.any() and (large & ~marked(x.marks, value.shape)).any())


def output_bounds(equation: Equation) -> Bounds | None:
    """Returns the bounds of the output of a primitive with one output; None if unknown."""
    rule, (output,) = _RULES.get(equation.primitive.name), equation.outputs
    if rule is None or not (is_float(output) or output.dtype == bool):
        return None
    return rule(equation)


def not_constant(bounds: Bounds | None, shape: Sequence[int]) -> Where | None:
    """Returns bool [*shape]: False for elements that are constant because their bounds are equal.

    Returns None if no element has equal lower and upper bounds.
    """
    if bounds is None:
        return None
    differ = np.not_equal(*bounds)
    return None if differ.all() else np.broadcast_to(differ, shape)


def hull(*some: Marked) -> Bounds | None:
    """Returns bounds that hold for several arrays of the same shape."""
    if not any(map(informative, some)):
        return None
    return _hull([element_bounds(x) for x in some])


def _hull(bounds: Iterable[Bounds]) -> Bounds:
    low, high = zip(*bounds, strict=True)
    return Bounds(reduce(np.minimum, low), reduce(np.maximum, high))


def _rounded(low: Limit, high: Limit, output: Array) -> Bounds:
    """Widens bounds by the rounding of the output's dtype. A bound that is NaN becomes ±∞."""
    epsilon = float(jnp.finfo(output.dtype).eps) if is_float(output) else 0.0
    low = np.where(np.isnan(low), -np.inf, low)
    high = np.where(np.isnan(high), np.inf, high)
    return Bounds(low - epsilon * np.abs(low), high + epsilon * np.abs(high))


def _added(sign: int) -> _Rule:
    """Returns the rule for the bounds of a sum (sign 1) or a difference (sign −1)."""

    def rule(equation: Equation) -> Bounds | None:
        if not any(map(informative, equation.inputs)):
            return None
        a, b = map(element_bounds, equation.inputs)
        low, high = b if sign == 1 else (-b.high, -b.low)
        with np.errstate(invalid="ignore"):
            return _rounded(a.low + low, a.high + high, equation.outputs[0])

    return rule


def _multiplied(equation: Equation) -> Bounds | None:
    if all(x.bounds is None for x in equation.inputs):
        return None
    a, b = map(element_bounds, equation.inputs)
    with np.errstate(invalid="ignore"):
        corners = np.stack(np.broadcast_arrays(*(x * y for x in a for y in b)))
    # 0 × ∞ is NaN, but the factors are finite, so the product is 0.
    corners = np.where(np.isnan(corners), 0.0, corners)
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
            low, high = (np.exp(np.log(base) * bound) for bound in element_bounds(x))
        low, high = (np.where(bound <= np.exp(floor), 0.0, bound) for bound in (low, high))
        return _rounded(low, high, output)

    return rule


def _logistic(equation: Equation) -> Bounds | None:
    (x,), (output,) = equation.inputs, equation.outputs
    if not informative(x):
        return _UNIT
    return Bounds(0.0, np.where(element_bounds(x).high <= underflow(output.dtype), 0.0, 1.0))


def _monotone(function: Callable[..., Limit], *inputs: Marked) -> Bounds:
    """Applies a monotone function to bounds.

    If an element's bounds are equal only because of the assumed limit, the bounds without this
    limit are returned.
    """
    assumed, sure = (
        Bounds(*map(function, *map(limits, inputs))) for limits in (element_bounds, sure_bounds)
    )
    doubtful = np.equal(*assumed) & ~np.equal(*sure)
    return Bounds(*(np.where(doubtful, x, y) for x, y in zip(sure, assumed, strict=True)))


def _ordered(choose: Callable[[Limit, Limit], Limit]) -> _Rule:
    def rule(equation: Equation) -> Bounds | None:
        if not any(informative(x) or x.marks is None for x in equation.inputs):
            return None
        return _monotone(choose, *equation.inputs)

    return rule


def _clamped(equation: Equation) -> Bounds | None:
    lowest, x, highest = equation.inputs
    return Bounds(*map(np.clip, sure_bounds(x), element_bounds(lowest), element_bounds(highest)))


def _compared(equation: Equation) -> Bounds | None:
    """Returns the bounds of a comparison, which are equal if its result is always the same."""
    name, inputs = equation.primitive.name, equation.inputs
    if all(x.bounds is None for x in inputs):
        return None
    a, b = map(element_bounds, inputs[::-1] if name in ("gt", "ge") else inputs)
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
    bounds = [element_bounds(case) for case in cases]
    low, high = _hull(bounds)
    for number, case in enumerate(bounds):
        decided = ~undecided & (choice == number)
        low, high = np.where(decided, case.low, low), np.where(decided, case.high, high)
    return Bounds(low, high)


def _reduced(reduce_axes: Callable[..., np.ndarray]) -> _Rule:
    def rule(equation: Equation) -> Bounds | None:
        (x,), axes = equation.inputs, tuple(equation.params["axes"])
        if not informative(x) or not np.size(x.value):
            return None
        shape = np.shape(x.value)
        return _monotone(lambda bound: reduce_axes(np.broadcast_to(bound, shape), axis=axes), x)

    return rule


def _converted(equation: Equation) -> Bounds | None:
    (x,), (output,) = equation.inputs, equation.outputs
    value = np.asarray(x.value)
    if not is_float(output) or not (value.dtype == bool or is_float(value)):
        return None
    if (
        x.bounds is None
        and is_float(value)
        and assumed_limit(value.dtype) >= assumed_limit(output.dtype)
    ):
        return None
    return element_bounds(x) if value.dtype == bool else _rounded(*element_bounds(x), output)


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
# Primitives whose output is 0 for very negative inputs.
_FALLING = ("exp", "exp2", "logistic")


class Thresholds:
    """Counts of the attention weights that are 0 because of a finite mask.

    Attributes:
        far: The number of elements that are 0 if no score has an absolute value above
            `assumed_limit`.
        near: The number of elements that are 0 for these inputs but might be nonzero for other
            inputs.
        number: The largest input of exp at the elements that `near` counts. This value is close to
            the finite number in the mask.
    """

    def __init__(self) -> None:
        """Sets all counts to 0."""
        self.far, self.near, self.number = 0, 0, -np.inf

    def see(self, equation: Equation, outputs: Sequence[Marked]) -> None:
        """Counts the masked elements in the outputs of an equation."""
        x = equation.inputs[0] if equation.primitive.name in _FALLING else None
        if x is None or x.bounds is None or not is_float(x.value):
            return
        (output,), shape = outputs, np.shape(x.value)
        low, high = (np.broadcast_to(bound, shape) for bound in element_bounds(x))
        affected = marked(x.marks, shape)
        zero = affected & (np.asarray(output.value) == 0)
        settled = zero & ~marked(output.marks, shape)
        with np.errstate(invalid="ignore"):
            middle = (low + high) / 2
            self.far += int((settled & (high - low >= assumed_limit(x.value.dtype))).sum())
        near = zero & ~settled & np.isfinite(middle) & (middle < underflow(x.value.dtype))
        if near.any():
            self.near += int(near.sum())
            self.number = max(self.number, float(np.asarray(x.value)[near].max()))

    def notes(self) -> Iterator[str]:
        """Yields a sentence for each count that is not 0."""
        if self.far:
            yield (
                f"{self.far} scores are masked by a finite number. This mask hides them only if "
                f"the absolute value of every score is at most {REACH:,.0f}"
            )
        if self.near:
            number = float(f"{self.number:.2g}")
            yield (
                f"{self.near} scores are masked by about {number:,.0f}. Taint analysis treats "
                f"these scores as visible, because scores may be as large as {REACH:,.0f}. Mask by "
                "-jnp.inf or jnp.finfo(dtype).min, or cap the scores (tanh, clip)"
            )
