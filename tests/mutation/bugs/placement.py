"""Bugs of the placement of arrays, and of the reported resources of programs."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives

BUGS = (
    Bug(
        "the last matching rule of a table is used",
        "models.placement:partition_of",
        Replace(
            "(rule for rule in rules if fnmatchcase(path, rule.pattern))",
            "(rule for rule in reversed(rules) if fnmatchcase(path, rule.pattern))",
        ),
        "models/test_placement.py::test_the_first_rule_is_used",
    ),
    Bug(
        "an axis size that does not divide is accepted",
        "models.placement:partition_of",
        Replace("size % prod(mesh.shape[axis] for axis in _axes(axes))", "False"),
        "models/test_placement.py::test_a_size_that_does_not_divide_is_refused",
    ),
    Bug(
        "fused projections are sharded across their parts",
        "models.sharding:is_tensor_parallel",
        gives(False),
        "training/test_meshes.py::test_what_is_exchanged_is_what_the_placement_needs",
    ),
    Bug(
        "tensor parallelism splits a head",
        "models.placement:rules_of",
        Replace("any(num % tensor for num in stack.heads)", "False"),
        "models/test_placement.py::test_a_head_and_a_word_are_whole",
    ),
    Bug(
        "a checkpoint is loaded to one device",
        "hub.load:load",
        Replace("parameter_shapes(model, mesh)", "parameter_shapes(model, None)"),
        "hub/test_placed.py::test_parameters_are_loaded_to_where_they_live[run-how0]",
    ),
    Bug(
        "a foreign tensor lands on one device",
        "hub.table:read_leaves.leaves",
        Replace("like[name].sharding", "None"),
        "hub/test_placed.py::test_parameters_are_loaded_to_where_they_live[theirs-how0]",
    ),
    Bug(
        "a CLI verb runs outside its mesh",
        "cli.checkpoints:load_model",
        Replace("jax.set_mesh(mesh)", "__import__('contextlib').nullcontext()"),
        "hub/test_placed.py::test_a_verb_computes_on_its_mesh",
    ),
    # ---- resources of a program
    Bug(
        "collectives in a loop count once",
        "doctor.program:_trips",
        gives(1),
        "doctor/test_program.py::test_each_kind_in_a_loop_is_counted_as_often_as_it_is_run",
    ),
    Bug(
        "a loop's step of 2 is read as 1",
        "doctor.program:_trips",
        Replace("-(-_constant(bound) // step)", "_constant(bound)"),
        "doctor/test_program.py::test_each_kind_in_a_loop_is_counted_as_often_as_it_is_run",
    ),
    Bug(
        "an all-reduce counts as one pass around the ring",
        "doctor.program:Collective.sent",
        Replace('2 if self.kind == "all-reduce" else 1', "1"),
        "doctor/test_program.py::test_each_kind_in_a_loop_is_counted_as_often_as_it_is_run",
    ),
    Bug(
        "the parts of a collective are counted separately",
        "doctor.program:collectives",
        Replace("channel[0] if channel else instruction.name", "instruction.name"),
        "doctor/test_program.py::test_what_is_started_is_counted_once_with_what_it_gives",
    ),
    Bug(
        "the backward pass counts as much as the forward pass",
        "models.flops:training_flops",
        Replace(
            "3 * forward_flops(config, length, source_length)",
            "2 * forward_flops(config, length, source_length)",
        ),
        "models/test_flops.py::test_training_is_six_operations_a_parameter_and_token",
    ),
)
