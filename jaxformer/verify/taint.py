"""Which inputs may have had a say in an output: a function run with marks on its inputs.

    marks, remarks = taint(function, inputs, num_positions)

The function is traced to a jaxpr, JAX's own list of what it computes, and that is run step by step,
values and marks together (`passing` says how each primitive passes marks on). No derivative is
taken and nothing is perturbed, so neither saturation nor rounding hides a path; what an input might
decide otherwise (a branch, an index, how long a loop goes on) marks whatever might then come out.
"""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jaxformer.verify import marks as m
from jaxformer.verify.loops import of_any_length, widened
from jaxformer.verify.marks import Marked, everything
from jaxformer.verify.passing import FAR, assumed, rule_of

# Primitives that run a jaxpr of theirs once, on their operands as they are.
_CALLS = frozenset(
    "jit pjit closed_call core_call remat2 checkpoint custom_jvp_call custom_vjp_call "
    "custom_vjp_call_jaxpr composite".split()
)


def taint(function, inputs, num_positions: int):
    """(bool [*output shape, positions], remarks on what had no rule or was assumed).

    function: an array to an array; the first num_positions axes of inputs are positions, numbered
    along their rows. ValueError: a function that has references, made in it or outside.
    """
    closed = jax.make_jaxpr(function)(inputs)
    positions = np.shape(inputs)[:num_positions]
    run = _Run()
    (output,) = run.closed(
        closed, [Marked(jnp.asarray(inputs), m.unit_marks(positions, np.ndim(inputs)))]
    )
    bits = m.bits_of(output.marks, np.shape(output.value), int(np.prod(positions)))
    return bits, tuple(run.remarks())


class _Run:
    """One run; `unknown` counts the primitives without a rule, `assumed` what `passing` took to be
    too small to count."""

    def __init__(self):
        self.unknown, self.assumed = Counter(), 0

    def remarks(self):
        if self.unknown:
            names = ", ".join(sorted(self.unknown))
            yield f"taint has no rule for {names}, and let all that went in come out"
        if self.assumed:
            yield (
                f"taint took {self.assumed} numbers that inputs affect to be too far "
                f"below others ({FAR:g}) to count: a mask by a large number, or a path that it "
                "misses"
            )

    def closed(self, closed, inputs):
        """A jaxpr with its constants, or one that has none."""
        jaxpr = getattr(closed, "jaxpr", closed)
        return self.jaxpr(jaxpr, getattr(closed, "consts", ()), inputs)

    def jaxpr(self, jaxpr, consts, inputs) -> list[Marked]:
        environment, last = {}, {}
        for number, equation in enumerate(jaxpr.eqns):
            last |= {x: number for x in equation.invars if not isinstance(x, Literal)}
        kept = {x for x in jaxpr.outvars if not isinstance(x, Literal)}

        def read(x):
            return Marked(x.val) if isinstance(x, Literal) else environment[x]

        environment |= zip(jaxpr.constvars, map(Marked, consts), strict=True)
        environment |= zip(jaxpr.invars, inputs, strict=True)
        for number, equation in enumerate(jaxpr.eqns):
            outputs = self.equation(equation, [read(x) for x in equation.invars])
            environment |= zip(equation.outvars, outputs, strict=True)
            for x in {x for x in equation.invars if not isinstance(x, Literal)} - kept:
                if last[x] == number:  # marks are large
                    environment.pop(x, None)
        return [read(x) for x in jaxpr.outvars]

    def equation(self, equation, inputs) -> list[Marked]:
        name, params = equation.primitive.name, equation.params
        # Made here, or outside and closed over: then it is among what goes in.
        held = (*equation.invars, *equation.outvars)
        if any(type(x.aval).__name__ == "AbstractRef" for x in held):
            raise ValueError(
                f"the function has a reference ({name}); taint follows values only: leave it out "
                "of witnesses"
            )
        if any(x.marks is not None for x in inputs):
            if name in ("scan", "while", "cond"):
                return getattr(self, f"{name}_")(equation, inputs)
            if name in _CALLS:
                return self.closed(params.get("jaxpr", params.get("call_jaxpr")), inputs)
        given = equation.primitive.get_bind_params(params)
        values = equation.primitive.bind(*(x.value for x in inputs), **given)
        values = values if equation.primitive.multiple_results else [values]
        if all(x.marks is None for x in inputs):
            return list(map(Marked, values))
        rule = rule_of(equation.primitive)
        if rule is None:
            self.unknown[name] += 1
            rule = everything
        self.assumed += assumed(name, params, inputs)
        marks = rule(params, inputs, values)
        return [
            Marked(value, some if np.size(value) else None)
            for value, some in zip(values, marks, strict=True)
        ]

    def scan_(self, equation, inputs):
        """Step by step, as it would be unrolled."""
        params, body = equation.params, equation.params["jaxpr"]
        # What is run over, and what is collected, has an axis more outside than inside.
        num_over = _longer(inputs, body.in_avals)
        num_carry = len(body.out_avals) - _longer(equation.outvars, body.out_avals)
        num_consts = len(inputs) - num_over - num_carry
        consts, inputs = inputs[:num_consts], inputs[num_consts:]
        carry, over = inputs[:num_carry], inputs[num_carry:]
        steps = range(params["length"])
        collected = []
        for step in reversed(steps) if params["reverse"] else steps:
            outputs = self.closed(body, [*consts, *carry, *(_at(x, step) for x in over)])
            carry = outputs[:num_carry]
            collected.append(outputs[num_carry:])
        if not collected:
            empty = [jnp.zeros(x.aval.shape, x.aval.dtype) for x in equation.outvars[num_carry:]]
            return [*carry, *map(Marked, empty)]
        if params["reverse"]:
            collected.reverse()
        return [*carry, *(_stacked(some) for some in zip(*collected, strict=True))]

    def while_(self, equation, inputs):
        """For as long as it goes on; row by row, if what decides has rows (vmap). If inputs have a
        say in that, so they have in what might then come out: in rows, see `loops`; without, every
        one that affects any affects all."""
        params = equation.params
        first, second = params["cond_nconsts"], params["body_nconsts"]
        consts, begin = inputs[: first + second], inputs[first + second :]

        def decide(consts, carry):
            return self.closed(params["cond_jaxpr"], [*consts[:first], *carry])[0]

        def step(consts, carry):
            return self.closed(params["body_jaxpr"], [*consts[first:], *carry])

        carry, entered, decided = begin, begin, None
        while True:
            goes_on = decide(consts, carry)
            decided = m.union(decided, goes_on.marks)
            if not np.any(goes_on.value):
                break
            entered, following = carry, step(consts, carry)
            carry = [_where(goes_on.value, x, y) for x, y in zip(following, carry, strict=True)]
        if decided is None:
            return carry
        if np.ndim(goes_on.value) == 0:
            values = [x.value for x in carry]
            return list(map(Marked, values, everything(params, [*inputs, *carry], values)))
        with_room = list(map(widened, consts))
        return of_any_length(
            lambda carry: (decide(with_room, carry), step(with_room, carry)),
            decided,
            begin,
            entered,
            carry,
        )

    def cond_(self, equation, inputs):
        """The branch that is taken; if inputs affect which, all that any would give."""
        which, *operands = inputs
        branches = equation.params["branches"]
        number = min(max(int(which.value), 0), len(branches) - 1)
        if which.marks is None:
            return self.closed(branches[number], operands)
        each = [self.closed(branch, operands) for branch in branches]
        return [
            Marked(x.value, m.union(m.ranked(which, x.value), *(y.marks for y in others)))
            for x, others in zip(each[number], zip(*each, strict=True), strict=True)
        ]


def _longer(some, avals) -> int:
    """How many of these (values, or variables) have more axes than their abstract values."""
    shapes = (x.value if isinstance(x, Marked) else x.aval for x in some)
    return sum(np.ndim(x) > len(aval.shape) for x, aval in zip(shapes, avals, strict=True))


def _where(goes_on, x: Marked, y: Marked) -> Marked:
    """x in the rows that go on, y in the others; what marks that decision comes later."""
    if np.ndim(goes_on) == 0:
        return x
    rows = np.reshape(goes_on, np.shape(goes_on) + (1,) * (np.ndim(x.value) - np.ndim(goes_on)))
    where = np.broadcast_to(rows, np.shape(x.value))
    marks = m.union(m.kept(x.marks, where), m.kept(y.marks, ~where))
    return Marked(jnp.where(where, x.value, y.value), marks)


def _at(x: Marked, step: int) -> Marked:
    marks = x.marks
    if marks is not None:
        marks = marks[step if marks.shape[0] > 1 else 0]
    return Marked(x.value[step], marks)


def _stacked(some) -> Marked:
    value = jnp.stack([x.value for x in some])
    present = [x.marks for x in some if x.marks is not None]
    if not present:
        return Marked(value)
    shape = np.broadcast_shapes(*(marks.shape for marks in present))
    empty = np.zeros(shape, np.uint8)
    rows = [empty if x.marks is None else np.broadcast_to(x.marks, shape) for x in some]
    return Marked(value, np.stack(rows))
