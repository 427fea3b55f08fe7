"""Which inputs may have had a say in an output: a function run with marks on its inputs.

    outputs, marks = taint(function, inputs, positions, chosen)

The function is traced to a jaxpr, JAX's own list of what it computes, and that is run step by step,
values and marks together (`passing` says how each primitive passes marks on). No derivative is
taken and nothing is perturbed, so neither saturation nor rounding hides a path.
"""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxformer.verify import marks as m
from jaxformer.verify.marks import Marked, everything
from jaxformer.verify.passing import rule_of


def taint(function, inputs, num_positions: int, chosen):
    """(bool [*output shape, chosen], Counter of primitives that have no rule).

    function: an array to an array; the first num_positions axes of inputs are positions, of which
    `chosen`, by their numbers, are marked.
    """
    closed = jax.make_jaxpr(function)(inputs)
    marks = m.unit_marks(np.shape(inputs)[:num_positions], np.asarray(chosen), np.ndim(inputs))
    run = _Run()
    (output,) = run.closed(closed, [Marked(jnp.asarray(inputs), marks)])
    return m.bits_of(output.marks, np.shape(output.value), len(chosen)), run.unknown


class _Run:
    """One run; `unknown` counts the primitives without a rule."""

    def __init__(self):
        self.unknown = Counter()

    def closed(self, closed, inputs):
        """A jaxpr with its constants, or one that has none."""
        jaxpr = getattr(closed, "jaxpr", closed)
        return self.jaxpr(jaxpr, getattr(closed, "consts", ()), inputs)

    def jaxpr(self, jaxpr, consts, inputs) -> list[Marked]:
        known, last = {}, {}
        for number, equation in enumerate(jaxpr.eqns):
            last |= {x: number for x in equation.invars if not isinstance(x, Literal)}
        kept = {x for x in jaxpr.outvars if not isinstance(x, Literal)}

        def read(x):
            return Marked(x.val) if isinstance(x, Literal) else known[x]

        known |= zip(jaxpr.constvars, map(Marked, consts), strict=True)
        known |= zip(jaxpr.invars, inputs, strict=True)
        for number, equation in enumerate(jaxpr.eqns):
            outputs = self.equation(equation, [read(x) for x in equation.invars])
            known |= zip(equation.outvars, outputs, strict=True)
            for x in {x for x in equation.invars if not isinstance(x, Literal)} - kept:
                if last[x] == number:  # marks are large
                    known.pop(x, None)
        return [read(x) for x in jaxpr.outvars]

    def equation(self, equation, inputs) -> list[Marked]:
        name, params = equation.primitive.name, equation.params
        if any(x.marks is not None for x in inputs):
            if name in ("scan", "while", "cond"):
                return getattr(self, f"{name}_")(params, inputs)
            inner = params.get("jaxpr", params.get("call_jaxpr"))
            if inner is not None:  # jit, checkpoint, custom derivatives
                return self.closed(inner, inputs)
        given = equation.primitive.get_bind_params(params)
        values = equation.primitive.bind(*(x.value for x in inputs), **given)
        values = values if equation.primitive.multiple_results else [values]
        if all(x.marks is None for x in inputs):
            return list(map(Marked, values))
        rule = rule_of(equation.primitive)
        if rule is None:
            self.unknown[name] += 1
            rule = everything
        marks = rule(params, inputs, values)
        return [
            Marked(value, some if np.size(value) else None)
            for value, some in zip(values, marks, strict=True)
        ]

    def scan_(self, params, inputs):
        """Step by step, as it would be unrolled."""
        num_consts, num_carry = params["num_consts"], params["num_carry"]
        consts, inputs = inputs[:num_consts], inputs[num_consts:]
        carry, over = inputs[:num_carry], inputs[num_carry:]
        steps = range(params["length"])
        collected = []
        for step in reversed(steps) if params["reverse"] else steps:
            outputs = self.closed(params["jaxpr"], [*consts, *carry, *(_at(x, step) for x in over)])
            carry = outputs[:num_carry]
            collected.append(outputs[num_carry:])
        if params["reverse"]:
            collected.reverse()
        return [*carry, *(_stacked(some) for some in zip(*collected, strict=True))]

    def while_(self, params, inputs):
        """For as long as it goes on; what decides that marks all that it carries."""
        first, second = params["cond_nconsts"], params["body_nconsts"]
        deciding, consts = inputs[:first], inputs[first : first + second]
        carry = inputs[first + second :]
        while True:
            (goes_on,) = self.closed(params["cond_jaxpr"], [*deciding, *carry])
            carry = [_also(x, goes_on) for x in carry]
            if not goes_on.value:
                return carry
            carry = self.closed(params["body_jaxpr"], [*consts, *carry])

    def cond_(self, params, inputs):
        """The branch that is taken; what decides marks all that comes of it."""
        which, *operands = inputs
        branches = params["branches"]
        taken = branches[min(max(int(which.value), 0), len(branches) - 1)]
        return [_also(x, which) for x in self.closed(taken, operands)]


def _also(x: Marked, decided_by: Marked) -> Marked:
    """x, marked by what decided (a single number) too."""
    if decided_by.marks is None:
        return x
    shape = (1,) * np.ndim(x.value)
    return Marked(x.value, m.union(x.marks, decided_by.marks.reshape(*shape, -1)))


def _at(x: Marked, step: int) -> Marked:
    marks = x.marks
    if marks is not None:
        marks = marks[step if marks.shape[0] > 1 else 0]
    return Marked(x.value[step], marks)


def _stacked(some) -> Marked:
    value = jnp.stack([x.value for x in some])
    known = [x.marks for x in some if x.marks is not None]
    if not known:
        return Marked(value)
    shape = np.broadcast_shapes(*(marks.shape for marks in known))
    empty = np.zeros(shape, np.uint8)
    rows = [empty if x.marks is None else np.broadcast_to(x.marks, shape) for x in some]
    return Marked(value, np.stack(rows))
