"""Taint, which follows every path, wrong itself: too much, and too little."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, without

TAINT = "verify/test_taint.py::test_every_path_and_no_other"
NO_RULE = "verify/test_taint.py::test_what_has_no_rule_lets_everything_through_and_is_named"
PRIMITIVES = "verify/test_primitives.py::test_every_path_and_no_other"
REFERENCES = "verify/test_references.py"
COMPARED = "verify/test_dependency.py"

BUGS = (
    # ---- the run of a jaxpr
    Bug(
        "taint forgets what ends a loop",
        "verify.taint:_Run.while_",
        Replace("decided is None", "True"),
        TAINT,
    ),
    Bug(
        "the end of one row is the end of all",
        "verify.taint:_Run.while_",
        Replace("np.ndim(goes_on.value) == 0", "True"),
        PRIMITIVES,
    ),
    Bug(
        "taint loses what goes through a reference made outside",
        "verify.taint:_Run.equation",
        Replace("(*equation.invars, *equation.outvars)", "equation.outvars"),
        f"{REFERENCES}::test_a_reference_made_outside_is_refused",
    ),
    Bug(
        "taint loses what goes through a reference made inside",
        "verify.taint:_Run.equation",
        Replace("(*equation.invars, *equation.outvars)", "()"),
        f"{REFERENCES}::test_a_reference_made_inside_is_refused",
    ),
    Bug(
        "what has no rule stops taint",
        "verify.taint:_Run.equation",
        Replace(
            "rule = everything", "rule = lambda params, inputs, outputs: [None] * len(outputs)"
        ),
        NO_RULE,
    ),
    Bug(
        "any jaxpr among its parameters makes a call",
        "verify.taint:_Run.equation",
        Replace("name in _CALLS", '"jaxpr" in params or name in _CALLS'),
        NO_RULE,
    ),
    Bug(
        "taint takes one branch for all",
        "verify.taint:_Run.cond_",
        Replace("zip(*each, strict=True)", "zip(each[number])"),
        TAINT,
    ),
    # ---- loops of any length
    Bug(
        "a row reads what another is now, whenever that ends",
        "verify.loops:of_any_length",
        Replace("(marks[..., -1] & UNSURE) != 0", "m.expand(decided, shape).any(axis=-1)"),
        PRIMITIVES,
    ),
    Bug(
        "a later step brings what this one does",
        "verify.loops:of_any_length",
        Replace(
            "np.where(m.expand(decided, shape).any(axis=-1), VARIES | UNSURE, VARIES)",
            "np.where(m.expand(decided, shape).any(axis=-1), UNSURE, np.uint8(0))",
        ),
        "verify/test_primitives.py::test_a_step_that_is_not_taken_could_have_been_an_earlier_one",
    ),
    # ---- the rules of primitives
    Bug(
        "taint goes through a product with 0",
        "verify.products:product",
        Replace("_through(b.marks(), a.live())", "_through(b.marks(), None)"),
        f"{TAINT} {COMPARED}::test_three_witnesses_find_the_rule",
    ),
    Bug(
        "taint forgets what decides a choice",
        "verify.passing:_select",
        Replace("m.union(m.ranked(which, outputs[0]), *chosen)", "m.union(*chosen)"),
        TAINT,
    ),
    Bug(
        "taint takes the case at hand for all",
        "verify.passing:_select",
        Replace("m.marked(which.marks, choice.shape)", "np.zeros(choice.shape, bool)"),
        TAINT,
    ),
    Bug(
        "taint takes a mask of −10⁹ for a number",
        "verify.passing:_power",
        lambda power: lambda params, inputs, outputs: [inputs[0].marks],
        TAINT,
    ),
    Bug(
        "the largest of two is of the last axis",
        "verify.passing:_sorted",
        Replace('("dimension", "axis", "reduction_dimension")', '("dimension",)'),
        f"{TAINT} {PRIMITIVES}",
    ),
    Bug(
        "a pool is marked by what all of its window has",
        "verify.passing:_pooled",
        Replace(
            "jax.lax.reduce_window(jax.numpy.asarray(bits), np.uint8(0), jax.lax.max, **how)",
            "jax.lax.reduce_window(jax.numpy.asarray(bits), np.uint8(1), jax.lax.min, **how)",
        ),
        TAINT,
    ),
    Bug(
        "a device stops taint's rules",
        "verify.passing:_RULES",
        without("device_put"),
        PRIMITIVES,
    ),
    Bug(
        "bits are not what they are bits of",
        "verify.passing:_RULES",
        without("bitcast_convert_type"),
        PRIMITIVES,
    ),
    # ---- elements that are moved
    Bug(
        "a marked index moves what it happens to",
        "verify.moves:moved.rule",
        Replace("return everything(params, inputs, outputs)", "pass"),
        TAINT,
    ),
    Bug(
        "a marked index fetches what has no marks",
        "verify.moves:gathered.rule",
        Replace("m.union(each, _placed(operand.marks, rows, rank))", "each"),
        PRIMITIVES,
    ),
    Bug(
        "a marked index fetches from every row",
        "verify.moves:gathered.rule",
        Replace("_placed(operand.marks, rows, rank)", "_placed(operand.marks, {}, rank)"),
        PRIMITIVES,
    ),
    Bug(
        "where it is written has no say in what stands there",
        "verify.moves:_somewhere",
        Replace("_placed(indices.marks, rows, rank)", "None"),
        PRIMITIVES,
    ),
)
