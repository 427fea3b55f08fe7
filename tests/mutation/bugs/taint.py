"""Bugs of the taint analysis: marks that are missing, and marks too many."""

import jax
import numpy as np

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives, inside, takes, unchanged, without

TAINT = "verify/test_taint.py::test_every_path_and_no_other"
NO_RULE = "verify/test_taint.py::test_what_has_no_rule_lets_everything_through_and_is_named"
PRIMITIVES = "verify/test_primitives.py::test_every_path_and_no_other"
REFERENCES = "verify/test_references.py"
COMPARED = "verify/test_dependency.py"


def without_marks(varying):
    def broken(self, value, where):
        from jaxformer.verify.marks import Marked

        return Marked(value)

    return broken


def with_params(change):
    return lambda equation: equation._replace(params=change(equation.params))


def without_marked_indices(equation):
    operand, indices, updates = equation.inputs
    return equation._replace(inputs=[operand, indices._replace(marks=None), updates])


def on_whole_windows(reduce_window):
    return lambda bits, _, largest, **how: reduce_window(bits, np.uint8(1), jax.lax.min, **how)


BUGS = (
    Bug(
        "taint forgets who chose the expert of a token",
        "verify.primitives:by_row",
        Replace("(x, experts, shares)", "(x,)"),
        "functional/layers/test_experts.py::test_taint_follows_each_token_through_the_sort",
    ),
    # ---- interpreting a jaxpr
    Bug(
        "taint ignores the condition of a loop",
        "verify.taint:_Run.while_",
        Replace("decided is None", "True"),
        TAINT,
    ),
    Bug(
        "a batched loop condition is treated as a scalar",
        "verify.taint:_Run.while_",
        inside("np.ndim", gives(0)),
        PRIMITIVES,
    ),
    Bug(
        "taint loses values in a reference from outside",
        "verify.taint:_Run.equation",
        Replace("(*equation.invars, *equation.outvars)", "equation.outvars"),
        f"{REFERENCES}::test_a_reference_made_outside_is_refused",
    ),
    Bug(
        "taint loses values in a reference created inside",
        "verify.taint:_Run.equation",
        Replace("(*equation.invars, *equation.outvars)", "()"),
        f"{REFERENCES}::test_a_reference_made_inside_is_refused",
    ),
    Bug(
        "a primitive without a rule stops taint",
        "verify.taint:_Run.passed",
        inside("everything", lambda _: lambda inputs, values: [None] * len(values)),
        NO_RULE,
    ),
    Bug(
        "any primitive with a jaxpr parameter counts as a call",
        "verify.taint:_Run.equation",
        Replace("name in _CALLS", '"jaxpr" in params or name in _CALLS'),
        NO_RULE,
    ),
    Bug(
        "taint follows only one branch of a cond",
        "verify.taint:_Run.cond_",
        Replace("zip(*each, strict=True)", "zip(each[number])"),
        TAINT,
    ),
    # ---- loops of unknown length
    Bug(
        "reading an unsure loop element does not make it unsure",
        "verify.loops:of_any_length",
        Replace("(marks[..., -1] & UNSURE) != 0", "m.expand(decided, shape).any(axis=-1)"),
        PRIMITIVES,
    ),
    Bug(
        "a current 0 stops the marks of later loop steps",
        "verify.loops:of_any_length",
        inside("VARIES", np.zeros_like),
        "verify/test_primitives.py::test_a_step_that_is_not_taken_could_have_been_an_earlier_one",
    ),
    # ---- the rules of primitives
    Bug(
        "taint passes through a product with 0",
        "verify.primitives:_product",
        Replace("_through(b.grouped(b.x.marks), a.live())", "_through(b.grouped(b.x.marks), None)"),
        f"{TAINT} {COMPARED}::test_three_witnesses_find_the_rule",
    ),
    Bug(
        "taint ignores the condition of a select",
        "verify.primitives:_select",
        inside("m.union", lambda union: lambda which, *chosen: union(*chosen)),
        TAINT,
    ),
    Bug(
        "taint follows only the selected case",
        "verify.primitives:_select",
        inside("m.marked", gives(False)),
        TAINT,
    ),
    Bug(
        "taint treats a mask of −10⁹ as a number",
        "verify.bounds:not_constant",
        lambda not_constant: lambda bounds, shape: None,
        TAINT,
    ),
    Bug(
        "taint treats a score of −10⁴ as a mask",
        "verify.bounds:reach",
        lambda reach: lambda dtype: 4000.0,
        "verify/test_bounds.py::test_a_number_that_scores_may_reach_is_no_mask",
    ),
    Bug(
        "a column-major reshape is treated as row-major",
        "verify.primitives:_reshaped",
        takes(equation=with_params(lambda params: {**params, "dimensions": None})),
        TAINT,
    ),
    Bug(
        "a weight that happens to be 0 stops taint",
        "verify.taint:_Run.varying",
        without_marks,
        "verify/test_weights.py::test_a_leak_behind_zeros_is_found",
    ),
    Bug(
        "the axis parameters of reductions are ignored",
        "verify.primitives:_sorted",
        takes(equation=with_params(without("axis", "reduction_dimension"))),
        f"{TAINT} {PRIMITIVES}",
    ),
    Bug(
        "a pool needs the mark on its whole window",
        "verify.primitives:_pooled",
        inside("jax.lax.reduce_window", on_whole_windows),
        TAINT,
    ),
    Bug(
        "taint has no rule for device_put",
        "verify.primitives:_RULES",
        without("device_put"),
        PRIMITIVES,
    ),
    Bug(
        "taint has no rule for bitcast_convert_type",
        "verify.primitives:_RULES",
        without("bitcast_convert_type"),
        PRIMITIVES,
    ),
    # ---- moved elements
    Bug(
        "a marked index moves only the current element",
        "verify.indexing:moved",
        Replace("return everything(equation.inputs, equation.outputs)", "pass"),
        TAINT,
    ),
    Bug(
        "a marked index ignores the marks of its operand",
        "verify.indexing:gathered",
        inside("m.union", unchanged),
        PRIMITIVES,
    ),
    Bug(
        "a marked index ignores batch dimensions",
        "verify.indexing:gathered",
        Replace("_placed(operand.marks, rows, rank)", "_placed(operand.marks, {}, rank)"),
        PRIMITIVES,
    ),
    Bug(
        "a marked write index leaves the result unmarked",
        "verify.indexing:_somewhere",
        takes(equation=without_marked_indices),
        PRIMITIVES,
    ),
)
