"""Bugs of the taint analysis: marks that are missing, and marks too many."""

import jax
import numpy as np

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives, inside, takes, unchanged, without

TAINT = "verify/test_taint.py::test_taint_analysis_finds_exactly_the_dependencies_of_a_function"
NO_RULE = "verify/test_taint.py::test_output_of_an_unknown_primitive_depends_on_all_operands"
PRIMITIVES = (
    "verify/test_primitives.py::test_taint_analysis_of_a_jax_primitive_finds_exact_dependencies"
)
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
        "taint ignores the dependence on the choice of experts",
        "verify.primitives:by_row",
        Replace("(x, experts, shares)", "(x,)"),
        "functional/layers/test_experts.py::test_taint_analysis_follows_tokens_through_sorting_by_expert",
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
        "taint accepts a reference from outside the function",
        "verify.taint:_Run.equation",
        Replace("(*equation.invars, *equation.outvars)", "equation.outvars"),
        f"{REFERENCES}::test_taint_analysis_rejects_mutable_array_created_outside_function",
    ),
    Bug(
        "taint accepts a reference created inside the function",
        "verify.taint:_Run.equation",
        Replace("(*equation.invars, *equation.outvars)", "()"),
        f"{REFERENCES}::test_taint_analysis_rejects_mutable_array_created_inside_function",
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
        "an element that reads an uncertain loop element stays certain",
        "verify.loops:marks_of_any_length",
        Replace("(marks[..., -1] & UNSURE) != 0", "m.expand(decided, shape).any(axis=-1)"),
        PRIMITIVES,
    ),
    Bug(
        "a current 0 stops the marks of later loop steps",
        "verify.loops:marks_of_any_length",
        inside("VARIES", np.zeros_like),
        "verify/test_primitives.py::test_taint_analysis_finds_a_dependency_that_a_zero_blocks_in_only_one_loop_step",
    ),
    # ---- the rules of primitives
    Bug(
        "taint passes through a product with 0",
        "verify.primitives:_product",
        Replace("_through(b.grouped(b.x.marks), a.live())", "_through(b.grouped(b.x.marks), None)"),
        f"{TAINT} {COMPARED}::test_all_dependency_analyses_agree_with_the_masks_of_each_model",
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
        "verify.bounds:assumed_limit",
        lambda reach: lambda dtype: 4000.0,
        "verify/test_bounds.py::test_taint_analysis_finds_leak_if_scores_can_be_below_mask_value",
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
        "verify/test_weights.py::test_taint_analysis_finds_dependency_through_zero_weights",
    ),
    Bug(
        "the axis parameters of reductions are ignored",
        "verify.primitives:_sorted",
        takes(equation=with_params(without("axis", "reduction_dimension"))),
        f"{TAINT} {PRIMITIVES}",
    ),
    Bug(
        "a window reduction needs the taint mark on every element",
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
        "a gather at an unknown index depends only on the current element",
        "verify.indexing:moved",
        Replace("return everything(equation.inputs, equation.outputs)", "pass"),
        TAINT,
    ),
    Bug(
        "a gather at an unknown index ignores the taint marks of its operand",
        "verify.indexing:gathered",
        inside("m.union", unchanged),
        PRIMITIVES,
    ),
    Bug(
        "a gather at an unknown index ignores batch dimensions",
        "verify.indexing:gathered",
        Replace(
            "_move_axes(operand.marks, batch_axes, rank)", "_move_axes(operand.marks, {}, rank)"
        ),
        PRIMITIVES,
    ),
    Bug(
        "a write at an unknown index ignores the taint marks of the index",
        "verify.indexing:_somewhere",
        takes(equation=without_marked_indices),
        PRIMITIVES,
    ),
)
