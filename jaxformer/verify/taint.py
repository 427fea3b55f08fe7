"""Taint analysis: evaluates a function and tracks which inputs may affect each element.

    bits, remarks = taint(function, inputs, num_positions)

The function is traced to a jaxpr, JAX's list of primitive operations. The jaxpr is evaluated
equation by equation. Each array carries *taint marks*: for every element, the set of inputs that
may affect it (see `marks`). The module `primitives` defines how each primitive propagates taint
marks. The analysis does not use derivatives or perturbations, so saturation and rounding cannot
hide a path. If an input selects a branch or the length of a loop, all outputs of the branches or of
the loop depend on it.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxtyping import Array, Bool

from jaxformer.models.check import AnyArray
from jaxformer.verify import loops
from jaxformer.verify import marks as m
from jaxformer.verify.bounds import Thresholds, hull, not_constant, output_bounds
from jaxformer.verify.indexing import MOVED, moved_bounds
from jaxformer.verify.marks import Bounds, Equation, Marked, everything
from jaxformer.verify.primitives import (
    IDENTITIES,
    RESHAPED,
    is_by_row,
    marks_of_outputs,
)

# Primitives that evaluate an inner jaxpr once on their operands.
_CALLS = frozenset(
    "jit pjit closed_call core_call remat2 checkpoint custom_jvp_call custom_vjp_call "
    "custom_vjp_call_jaxpr custom_vmap_call composite".split()
)
# The inner jaxpr is the parameter with one of these names.
_CALLED = ("jaxpr", "call_jaxpr", "call")
NO_RULE = "taint analysis has no rule for"

Atom = Var | Literal
Varies = Callable[[AnyArray], Bool[np.ndarray, "..."]]


class Taint(NamedTuple):
    """The result of a taint analysis.

    Attributes:
        bits: bool [*output shape, positions], True where the input position may affect the output.
        remarks: Reasons why the result may be wrong, such as primitives without a taint rule.
        notes: Assumptions of the analysis, for example that a finite number acts as a mask.
    """

    bits: Bool[np.ndarray, "*output positions"]
    remarks: tuple[str, ...]
    notes: tuple[str, ...]


def taint(
    function: Callable[[Array], Array], inputs: AnyArray, num_positions: int
) -> tuple[Bool[np.ndarray, "*output positions"], tuple[str, ...]]:
    """Finds which input positions may affect each element of a function's output.

    Args:
        function: Maps one array to one array. Arrays in its closure are treated as constants.
        inputs: An array whose first `num_positions` axes are positions, numbered in row-major
            order.
        num_positions: The number of position axes.

    Returns:
        (bool [*output shape, positions], remarks about primitives without a taint rule).

    Raises:
        ValueError: The function uses references (`jax.new_ref`).
    """
    return follow(jax.make_jaxpr(function)(inputs), inputs, num_positions)[:2]


def follow(
    closed: ClosedJaxpr,
    inputs: AnyArray,
    num_positions: int,
    weights: Sequence[AnyArray] = (),
    varies: Varies | None = None,
) -> Taint:
    """Runs the taint analysis of a jaxpr.

    Args:
        closed: The closed jaxpr, whose arguments are the weights and the inputs.
        inputs: An array whose first `num_positions` axes are positions.
        num_positions: The number of position axes.
        weights: Arrays whose values may change, so that zeros in them do not end a dependency.
        varies: Maps an array from the function's closure (a constant of the jaxpr) to bool
            [*shape], True for elements that are treated like weights. If None, these arrays are
            treated as constants.
    """
    positions = np.shape(inputs)[:num_positions]
    unit = m.with_extra_byte(m.unit_marks(positions, np.ndim(inputs)))
    run = _Run(unit.shape[-1], varies)
    arguments = [run.varying(x, np.ones(np.shape(x), bool)) for x in weights]
    (output,) = run.closed(closed, [*arguments, Marked(jnp.asarray(inputs), unit)])
    bits = m.unpack_bits(output.marks, np.shape(output.value), int(np.prod(positions)))
    names = ", ".join(sorted(run.unknown))
    remark = (
        f"{NO_RULE} {names}: the analysis assumes that each output of these primitives depends on "
        "all operands"
    )
    return Taint(bits, (remark,) if names else (), tuple(run.thresholds.notes()))


class _Run:
    """The state of one evaluation of a jaxpr.

    Attributes:
        width: The number of bytes of taint marks per element. The last byte contains the flag
            `loops.VARIES`.
        varies: See `follow`.
        unknown: The names of primitives without a taint rule.
        thresholds: Counts of the attention weights that are 0 because of a finite mask.
        imagined: Whether the current equations belong to a branch or a loop step that the function
            does not execute for these inputs.
    """

    def __init__(self, width: int, varies: Varies | None = None):
        self.width, self.varies = width, varies
        self.unknown, self.thresholds, self.imagined = set(), Thresholds(), False

    def varying(self, value: AnyArray, where: Bool[np.ndarray, "..."]) -> Marked:
        """Flags the elements where `where` is True as values that may change."""
        if not where.any():
            return Marked(value)
        mark = np.zeros((1,) * np.ndim(value) + (self.width,), np.uint8)
        mark[..., -1] = loops.VARIES
        return Marked(value, m.only_where(mark, where))

    def captured(self, value: AnyArray) -> Marked:
        """Adds taint marks to an array from the function's closure, a constant of the jaxpr."""
        if self.varies is None:
            return Marked(value)
        return self.varying(value, self.varies(value))

    def closed(self, closed: ClosedJaxpr | Jaxpr, inputs: Sequence[Marked]) -> list[Marked]:
        """Evaluates a closed jaxpr, or a jaxpr without constants."""
        jaxpr, captured = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
        environment = dict(zip(jaxpr.constvars, map(self.captured, captured), strict=True))
        environment |= zip(jaxpr.invars, inputs, strict=True)
        last_use = {}
        for number, equation in enumerate(jaxpr.eqns):
            last_use |= dict.fromkeys(_variables(equation.invars), number)
        last_use |= dict.fromkeys(_variables(jaxpr.outvars))

        def read(x: Atom) -> Marked:
            if not isinstance(x, Literal):
                return environment[x]
            return self.captured(x.val) if isinstance(x.val, jax.Array) else Marked(x.val)

        for number, equation in enumerate(jaxpr.eqns):
            outputs = self.equation(equation, [read(x) for x in equation.invars])
            environment |= zip(equation.outvars, outputs, strict=True)
            for x in _variables(equation.invars):
                # Arrays are deleted after their last use, to free memory.
                if last_use[x] == number:
                    del environment[x]
        return [read(x) for x in jaxpr.outvars]

    def equation(self, equation: JaxprEqn, inputs: list[Marked]) -> list[Marked]:
        name, params = equation.primitive.name, equation.params
        # References that the function creates are outputs of an equation; other references are
        # inputs.
        variables = (*equation.invars, *equation.outvars)
        if any(type(x.aval).__name__ == "AbstractRef" for x in variables):
            raise ValueError(
                f"the function uses a reference ({name}), which taint analysis does not support; "
                'pass witnesses=("derivative", "change")'
            )
        # Even if no input affects the operands of a call, the called function may capture weights.
        is_followed = self.imagined or self.varies is not None
        if is_followed or any(x.marks is not None for x in inputs):
            if name in ("scan", "while", "cond"):
                return getattr(self, f"{name}_")(equation, inputs)
            if name in _CALLS and not is_by_row(params):
                (called,) = (params[key] for key in _CALLED if key in params)
                return self.closed(called, inputs)
        bound = equation.primitive.get_bind_params(params)
        values = equation.primitive.bind(*(x.value for x in inputs), **bound)
        values = values if equation.primitive.multiple_results else [values]
        if all(x.marks is None for x in inputs):
            return list(map(Marked, values))
        return self.passed(Equation(equation.primitive, params, inputs, values))

    def passed(self, equation: Equation) -> list[Marked]:
        """Computes the taint marks and bounds of an equation's outputs by its primitive's rules."""
        name = equation.primitive.name
        marks_of_each = marks_of_outputs(equation)
        if marks_of_each is None:
            self.unknown.add(name)
            marks_of_each = everything(equation.inputs, equation.outputs)
        outputs, bounds = [], _bounds(equation)
        for value, marks, limits in zip(equation.outputs, marks_of_each, bounds, strict=True):
            shape = np.shape(value)
            # If the marks have only their last axis (bytes), they apply to all output elements.
            if marks is not None and marks.ndim == 1:
                marks = m.with_rank(marks, len(shape))
            if not m.fits(marks, shape):
                raise RuntimeError(
                    f"the taint rule of the primitive {name} returned an array of the wrong shape"
                )
            marks = m.only_where(marks, not_constant(limits, shape)) if np.size(value) else None
            outputs.append(Marked(value, marks, None if marks is None else limits))
        self.thresholds.see(equation, outputs)
        return outputs

    def scan_(self, equation: JaxprEqn, inputs: list[Marked]) -> list[Marked]:
        """Evaluates a `scan` step by step."""
        params, body = equation.params, equation.params["jaxpr"]
        # Inside the body, the scanned inputs and the stacked outputs lack their first axis.
        num_over = _longer(inputs, body.in_avals)
        num_carry = len(body.out_avals) - _longer(equation.outvars, body.out_avals)
        num_consts = len(inputs) - num_over - num_carry
        consts, inputs = inputs[:num_consts], inputs[num_consts:]
        carry, over = inputs[:num_carry], inputs[num_carry:]
        steps = range(params["length"])
        collected = []
        for step in reversed(steps) if params["reverse"] else steps:
            outputs = self.closed(body, [*consts, *carry, *(loops.at(x, step) for x in over)])
            carry = outputs[:num_carry]
            collected.append(outputs[num_carry:])
        if not collected:
            avals: list[Any] = [x.aval for x in equation.outvars[num_carry:]]
            empty = [jnp.zeros(aval.shape, aval.dtype) for aval in avals]
            return [*carry, *map(Marked, empty)]
        if params["reverse"]:
            collected.reverse()
        return [*carry, *(loops.stacked(some) for some in zip(*collected, strict=True))]

    def while_(self, equation: JaxprEqn, inputs: list[Marked]) -> list[Marked]:
        """Evaluates a while loop, whose condition is an array under `vmap`.

        If an input affects a scalar condition, every output depends on every input. If an input
        affects a condition with batch axes, `loops` handles each batch element separately.
        """
        params = equation.params
        first, second = params["cond_nconsts"], params["body_nconsts"]
        consts, begin = inputs[: first + second], inputs[first + second :]
        if self.imagined:
            # The program never executes the branch with this loop, so the loop might never end if
            # it were executed here.
            varying = self.varying(np.zeros(()), np.ones((), bool))
            return m.marked_by([*inputs, varying], begin)

        def decide(consts: list[Marked], carry: list[Marked]) -> Marked:
            return self.closed(params["cond_jaxpr"], [*consts[:first], *carry])[0]

        def step(consts: list[Marked], carry: list[Marked]) -> list[Marked]:
            return self.closed(params["body_jaxpr"], [*consts[first:], *carry])

        carry, entered, decided = begin, None, None
        while True:
            goes_on = decide(consts, carry)
            decided = m.union(decided, goes_on.marks)
            if not np.any(goes_on.value):
                break
            entered, after = carry, step(consts, carry)
            carry = [loops.where(goes_on.value, x, y) for x, y in zip(after, carry, strict=True)]
        if decided is None:
            return carry
        if np.ndim(goes_on.value) == 0:
            return m.marked_by([*inputs, *carry], carry)
        with_room = list(map(loops.with_extra_byte, consts))
        with self.as_if_on(entered is None):
            return loops.marks_of_any_length(
                lambda carry: (decide(with_room, carry), step(with_room, carry)),
                decided,
                begin,
                begin if entered is None else entered,
                carry,
            )

    def cond_(self, equation: JaxprEqn, inputs: list[Marked]) -> list[Marked]:
        """Evaluates the selected branch, or all branches if an input affects the selection."""
        which, *operands = inputs
        branches = equation.params["branches"]
        number = min(max(int(which.value), 0), len(branches) - 1)
        if which.marks is None and not self.imagined:
            return self.closed(branches[number], operands)
        each = []
        for other, branch in enumerate(branches):
            with self.as_if_on(self.imagined or other != number):
                each.append(self.closed(branch, operands))
        outputs = []
        for x, others in zip(each[number], zip(*each, strict=True), strict=True):
            choice = m.with_rank(which.marks, np.ndim(x.value))
            marks = m.union(choice, *(y.marks for y in others))
            outputs.append(Marked(x.value, marks, None if marks is None else hull(*others)))
        return outputs

    @contextmanager
    def as_if_on(self, imagined: bool) -> Generator[None]:
        """Sets the attribute `imagined` to the argument while the context is open."""
        before, self.imagined = self.imagined, imagined
        try:
            yield
        finally:
            self.imagined = before


def _variables(atoms: Iterable[Atom]) -> set[Var]:
    return {x for x in atoms if not isinstance(x, Literal)}


def _bounds(equation: Equation) -> Sequence[Bounds | None]:
    name, unknown = equation.primitive.name, [None] * len(equation.outputs)
    if name in MOVED or name in RESHAPED:
        return moved_bounds(equation) or unknown
    if name in IDENTITIES:
        return [x.bounds for x in equation.inputs]
    return [output_bounds(equation)] if len(unknown) == 1 else unknown


def _longer(some: Sequence[Marked | Var], avals: Sequence[jax.core.ShapedArray]) -> int:
    """Counts the arrays that have more axes than their abstract value in `avals`."""
    shapes: Iterator[Any] = (x.value if isinstance(x, Marked) else x.aval for x in some)
    return sum(np.ndim(x) > len(aval.shape) for x, aval in zip(shapes, avals, strict=True))
