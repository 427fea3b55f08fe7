"""Taint, which follows every path, wrong itself: too much, and too little."""

from tests.mutation.quoted import Bug

TAINT = "verify/test_taint.py::test_every_path_and_no_other"
PRIMITIVES = "verify/test_primitives.py::test_every_path_and_no_other"
REFERENCES = "verify/test_references.py"
COMPARED = "verify/test_dependency.py"

BUGS = (
    Bug(
        "taint goes through a product with 0",
        "verify/products.py",
        "passed = _through(b.marks(), a.live())",
        "passed = _through(b.marks(), None)",
        f"{TAINT} {COMPARED}::test_three_witnesses_find_the_rule",
    ),
    Bug(
        "taint forgets what decides a choice",
        "verify/passing.py",
        "return [m.union(m.ranked(which, outputs[0]), *chosen)]",
        "return [m.union(*chosen)]",
        TAINT,
    ),
    Bug(
        "taint forgets what ends a loop",
        "verify/taint.py",
        "        if decided is None:\n",
        "        if True:\n",
        TAINT,
    ),
    Bug(
        "taint takes a mask of −10⁹ for a number",
        "verify/passing.py",
        "    return [m.kept(x.marks, ~_negligible(params, x))]",
        "    return [x.marks]",
        TAINT,
    ),
    Bug(
        "taint loses what goes through a reference made outside",
        "verify/taint.py",
        "held = (*equation.invars, *equation.outvars)",
        "held = equation.outvars",
        f"{REFERENCES}::test_a_reference_made_outside_is_refused",
    ),
    Bug(
        "taint loses what goes through a reference made inside",
        "verify/taint.py",
        "held = (*equation.invars, *equation.outvars)",
        "held = ()",
        f"{REFERENCES}::test_a_reference_made_inside_is_refused",
    ),
    Bug(
        "what has no rule stops taint",
        "verify/taint.py",
        "            rule = everything\n",
        "            rule = lambda params, inputs, outputs: [None for _ in outputs]\n",
        "verify/test_taint.py::test_what_has_no_rule_lets_everything_through_and_is_named",
    ),
    Bug(
        "taint takes one branch for all",
        "verify/taint.py",
        "zip(each[number], zip(*each, strict=True), strict=True)",
        "zip(each[number], zip(each[number]), strict=True)",
        TAINT,
    ),
    Bug(
        "taint takes the case at hand for all",
        "verify/passing.py",
        "    undecided = m.marked(which.marks, choice.shape)\n",
        "    undecided = np.zeros(choice.shape, bool)\n",
        TAINT,
    ),
    Bug(
        "a marked index moves what it happens to",
        "verify/moves.py",
        "            return everything(params, inputs, outputs)  # where to is not known\n",
        "            pass\n",
        TAINT,
    ),
    Bug(
        "any jaxpr among its parameters makes a call",
        "verify/taint.py",
        "            if name in _CALLS:\n",
        '            if "jaxpr" in params or name in _CALLS:\n',
        "verify/test_taint.py::test_what_has_no_rule_lets_everything_through_and_is_named",
    ),
    Bug(
        "the largest of two is of the last axis",
        "verify/passing.py",
        'names = ("dimension", "axis", "reduction_dimension")',
        'names = ("dimension",)',
        f"{TAINT} {PRIMITIVES}",
    ),
    Bug(
        "a pool is marked by what all of its window has",
        "verify/passing.py",
        "np.uint8(0), jax.lax.max, **how)",
        "np.uint8(1), jax.lax.min, **how)",
        TAINT,
    ),
    Bug(
        "a device stops taint's rules",
        "verify/passing.py",
        '("device_put", "optimization_barrier"',
        '("optimization_barrier"',
        PRIMITIVES,
    ),
    Bug(
        "bits are not what they are bits of",
        "verify/passing.py",
        '"bitcast_convert_type random_bits',
        '"random_bits',
        PRIMITIVES,
    ),
    Bug(
        "a marked index fetches what has no marks",
        "verify/moves.py",
        "return [m.union(each, _placed(operand.marks, rows, rank))]",
        "return [each]",
        PRIMITIVES,
    ),
    Bug(
        "a marked index fetches from every row",
        "verify/moves.py",
        "return [m.union(each, _placed(operand.marks, rows, rank))]",
        "return [m.union(each, _placed(operand.marks, {}, rank))]",
        PRIMITIVES,
    ),
    Bug(
        "where it is written has no say in what stands there",
        "verify/moves.py",
        "            _placed(indices.marks, rows, rank),\n",
        "",
        PRIMITIVES,
    ),
    Bug(
        "the end of one row is the end of all",
        "verify/taint.py",
        "        if np.ndim(goes_on.value) == 0:\n",
        "        if True:\n",
        PRIMITIVES,
    ),
    Bug(
        "a row reads what another is now, whenever that ends",
        "verify/loops.py",
        "unsure = (marks[..., -1] & UNSURE) != 0",
        "unsure = m.expand(decided, shape).any(axis=-1)",
        PRIMITIVES,
    ),
    Bug(
        "a later step brings what this one does",
        "verify/loops.py",
        "VARIES | UNSURE, VARIES)",
        "UNSURE, np.uint8(0))",
        "verify/test_primitives.py::test_a_step_that_is_not_taken_could_have_been_an_earlier_one",
    ),
)
