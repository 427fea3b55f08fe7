"""Taint analysis: runs a function with marks on its inputs.

    bits, remarks = taint(function, inputs, num_positions)

The function is traced to a jaxpr, JAX's list of primitive operations. The jaxpr is evaluated
equation by equation, on values and marks together; `primitives` has the rule for the marks of each
primitive. The analysis needs no derivative and no perturbation, so neither saturation nor rounding
hides a path. An input that decides between branches, or how long a loop runs, marks everything that
may come out of it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
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

# Primitives that evaluate a jaxpr once on their operands.
_CALLS = frozenset(
    "jit pjit closed_call core_call remat2 checkpoint custom_jvp_call custom_vjp_call "
    "custom_vjp_call_jaxpr custom_vmap_call composite".split()
)
_CALLED = ("jaxpr", "call_jaxpr", "call")  # the parameter that holds this jaxpr
NO_RULE = "taint has no rule for"

Atom = Var | Literal
Varies = Callable[[AnyArray], Bool[np.ndarray, "..."]]


class Taint(NamedTuple):
    """The result of a taint analysis.

    Attributes:
        bits: bool [*output shape, positions], true where the input position may affect the output.
        remarks: Doubts, such as primitives without a rule.
        notes: Assumptions, such as finite numbers that count as masks.
    """

    bits: Bool[np.ndarray, "*output positions"]
    remarks: tuple[str, ...]
    notes: tuple[str, ...]


def taint(
    function: Callable[[Array], Array], inputs: AnyArray, num_positions: int
) -> tuple[Bool[np.ndarray, "*output positions"], tuple[str, ...]]:
    """Follows every position of the inputs through a function.

    Args:
        function: Maps one array to one array. Captured arrays are constants.
        inputs: An array whose first `num_positions` axes are positions, numbered in row-major
            order.
        num_positions: The number of position axes.

    Returns:
        bool [*output shape, positions], and remarks about primitives without a rule.

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
        closed: The closed jaxpr, a function of the weights and the inputs.
        inputs: An array whose first `num_positions` axes are positions.
        num_positions: The number of position axes.
        weights: A list of arrays. They may have other values, so their zeros stop no path.
        varies: Maps a captured array to bool [*shape], true for elements that are treated like
            weights; None: captured arrays are constants.
    """
    positions = np.shape(inputs)[:num_positions]
    unit = m.widened(m.unit_marks(positions, np.ndim(inputs)))
    run = _Run(unit.shape[-1], varies)
    arguments = [run.varying(x, np.ones(np.shape(x), bool)) for x in weights]
    (output,) = run.closed(closed, [*arguments, Marked(jnp.asarray(inputs), unit)])
    bits = m.bits_of(output.marks, np.shape(output.value), int(np.prod(positions)))
    names = ", ".join(sorted(run.unknown))
    remark = f"{NO_RULE} {names}: each output is marked by all inputs of it"
    return Taint(bits, (remark,) if names else (), tuple(run.thresholds.notes()))


class _Run:
    """The state of one evaluation of a jaxpr.

    Attributes:
        width: The number of bytes of the marks; the last byte holds `loops.VARIES`.
        varies: See `follow`.
        unknown: The names of primitives without a rule.
        thresholds: Counts of finite masks.
        imagined: Whether the current values belong to a branch that is not taken or to a step that
            is not made.
    """

    def __init__(self, width: int, varies: Varies | None = None):
        self.width, self.varies = width, varies
        self.unknown, self.thresholds, self.imagined = set(), Thresholds(), False

    def varying(self, value: AnyArray, where: Bool[np.ndarray, "..."]) -> Marked:
        """Marks the elements where `where` is true as values that may change."""
        if not where.any():
            return Marked(value)
        mark = np.zeros((1,) * np.ndim(value) + (self.width,), np.uint8)
        mark[..., -1] = loops.VARIES
        return Marked(value, m.only_where(mark, where))

    def captured(self, value: AnyArray) -> Marked:
        """Returns a constant of the jaxpr, an array that the function has captured, with marks."""
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
                if last_use[x] == number:  # free the marks, which are large
                    del environment[x]
        return [read(x) for x in jaxpr.outvars]

    def equation(self, equation: JaxprEqn, inputs: list[Marked]) -> list[Marked]:
        name, params = equation.primitive.name, equation.params
        # References from inside the function are outputs; references from outside are inputs.
        variables = (*equation.invars, *equation.outvars)
        if any(type(x.aval).__name__ == "AbstractRef" for x in variables):
            raise ValueError(
                f"the function has a reference ({name}), which taint cannot follow; leave taint "
                "out of witnesses"
            )
        # A call whose operands are unmarked may still capture weights.
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
        """Applies the primitive's rules for marks and bounds to the values that it computed."""
        name = equation.primitive.name
        marks_of_each = marks_of_outputs(equation)
        if marks_of_each is None:
            self.unknown.add(name)
            marks_of_each = everything(equation.inputs, equation.outputs)
        outputs, bounds = [], _bounds(equation)
        for value, marks, limits in zip(equation.outputs, marks_of_each, bounds, strict=True):
            shape = np.shape(value)
            if marks is not None and marks.ndim == 1:  # the marks of a scalar hold for all elements
                marks = m.of_rank(marks, len(shape))
            if not m.fits(marks, shape):
                raise RuntimeError(f"taint's rule for {name} gave marks of another shape")
            marks = m.only_where(marks, not_constant(limits, shape)) if np.size(value) else None
            outputs.append(Marked(value, marks, None if marks is None else limits))
        self.thresholds.see(equation, outputs)
        return outputs

    def scan_(self, equation: JaxprEqn, inputs: list[Marked]) -> list[Marked]:
        """Evaluates a scan step by step."""
        params, body = equation.params, equation.params["jaxpr"]
        # Scanned and stacked arrays have one more axis outside the body than inside.
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
        """Evaluates a while loop; its condition may have rows (`vmap`).

        If inputs affect the condition, they affect the outputs. With rows, `loops` marks the
        outputs row by row. Without rows, every output is marked by every input.
        """
        params = equation.params
        first, second = params["cond_nconsts"], params["body_nconsts"]
        consts, begin = inputs[: first + second], inputs[first + second :]
        if self.imagined:  # the loop may never end
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
        with_room = list(map(loops.widened, consts))
        with self.imagining(entered is None):
            return loops.of_any_length(
                lambda carry: (decide(with_room, carry), step(with_room, carry)),
                decided,
                begin,
                begin if entered is None else entered,
                carry,
            )

    def cond_(self, equation: JaxprEqn, inputs: list[Marked]) -> list[Marked]:
        """Evaluates the taken branch, or all branches if inputs affect the choice."""
        which, *operands = inputs
        branches = equation.params["branches"]
        number = min(max(int(which.value), 0), len(branches) - 1)
        if which.marks is None and not self.imagined:
            return self.closed(branches[number], operands)
        each = []
        for other, branch in enumerate(branches):
            with self.imagining(self.imagined or other != number):
                each.append(self.closed(branch, operands))
        outputs = []
        for x, others in zip(each[number], zip(*each, strict=True), strict=True):
            choice = m.of_rank(which.marks, np.ndim(x.value))
            marks = m.union(choice, *(y.marks for y in others))
            outputs.append(Marked(x.value, marks, None if marks is None else hull(*others)))
        return outputs

    @contextmanager
    def imagining(self, imagined: bool) -> Iterator[None]:
        """Sets `imagined` in the block, which evaluates a branch that may not be the taken one."""
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
    """Returns how many values (or variables) have more axes than their abstract values."""
    shapes: Iterator[Any] = (x.value if isinstance(x, Marked) else x.aval for x in some)
    return sum(np.ndim(x) > len(aval.shape) for x, aval in zip(shapes, avals, strict=True))
