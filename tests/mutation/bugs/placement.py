"""Bugs of the placement of arrays, and of the reported resources of programs."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives, inside, takes, then


def as_all_gather(collective):
    is_one = collective.kind == "all-reduce"
    return collective._replace(kind="all-gather") if is_one else collective


BUGS = (
    Bug(
        "the last matching rule of a table is used",
        "models.mesh:partition_of",
        takes(rules=lambda rules: rules[::-1]),
        "models/test_mesh.py::test_the_first_rule_is_used",
    ),
    Bug(
        "an axis size that does not divide is accepted",
        "models.mesh:partition_of",
        inside("prod", gives(1)),  # the number of devices along an axis
        "models/test_mesh.py::test_a_size_that_does_not_divide_is_refused",
    ),
    Bug(
        "fused projections are sharded across their parts",
        "models.activation_sharding:is_tensor_parallel",
        gives(False),
        "training/test_meshes.py::test_what_is_exchanged_is_what_the_placement_needs",
    ),
    Bug(
        "tensor parallelism splits a head",
        "models.mesh:_rules_of_stack",
        inside("any", gives(False)),  # whether it would split a head
        "models/test_mesh.py::test_a_head_and_a_word_are_whole",
    ),
    Bug(
        "a checkpoint is loaded to one device",
        "hub.load:load",
        takes(mesh=lambda _: None),
        "hub/test_placed.py::test_parameters_are_loaded_to_where_they_live[run-how0]",
    ),
    Bug(
        "a foreign tensor lands on one device",
        "hub.table:read_leaves.leaves",
        inside("jax.device_put", lambda put: lambda array, sharding: put(array)),
        "hub/test_placed.py::test_parameters_are_loaded_to_where_they_live[theirs-how0]",
    ),
    Bug(
        "a CLI verb runs outside its mesh",
        "cli.checkpoints:load_model",
        Replace("jax.set_mesh(mesh)", "__import__('contextlib').nullcontext()"),
        "hub/test_placed.py::test_a_verb_computes_on_its_mesh",
    ),
    Bug(
        "the kernels of experts are sharded like those of other layers",
        "functional.layers.experts:Experts.weight_axes",
        Replace("('experts', *axes)", "axes"),
        "models/test_mesh.py::test_experts_are_sharded_over_their_axis",
    ),
    Bug(
        "an axis of experts is accepted for a model without experts",
        "models.mesh:shardings",
        inside("any", gives(True)),
        "models/test_mesh.py::test_experts_that_the_axis_does_not_divide_are_refused",
    ),
    Bug(
        "each device computes the first experts",
        "models.activation_sharding:MeshPlacement.per_expert",
        Replace("experts - first", "experts"),
        "models/test_expert_axis.py::test_eight_devices[one]",
    ),
    # ---- resources of a program
    Bug(
        "doctor: the collectives of `shard_map` count as one",
        "doctor.program:_of_one_exchange",
        Replace("len(kinds) > 1", "False"),
        "doctor/test_program.py::test_exchanges_of_several_kinds_on_one_channel_are_counted_each",
    ),
    Bug(
        "doctor: the gradients of experts are summed over their axis",
        "doctor.exchange:least_exchange",
        Replace("'expert' not in alone", "True"),
        "doctor/test_program.py::test_the_lower_bound_of_experts",
    ),
    Bug(
        "doctor: only one row per token counts as dense",
        "doctor.experts:_is_dense",
        Replace("(1, sizes.chosen)", "(1,)"),
        "doctor/test_experts.py::test_arrays_are_recognised_by_their_sizes",
    ),
    Bug(
        "doctor: the kernels of several layers count as a dense mixture",
        "doctor.experts:_is_kernel",
        gives(False),
        "doctor/test_experts.py::test_arrays_are_recognised_by_their_sizes",
    ),
    Bug(
        "doctor: what a scan stores for each layer counts as a dense mixture",
        "doctor.experts:_is_dense",
        Replace("experts in sizes.layers and not is_of_product", "False"),
        "doctor/test_experts.py::test_the_mixture_computes_the_chosen_experts_only",
    ),
    Bug(
        "doctor: all layers have the attention of the first one",
        "doctor.attention:_by_part",
        Replace("choices[call]", "choices[0]"),
        "doctor/test_attention.py::test_layers_with_a_kernel_are_those_that_call_it",
    ),
    Bug(
        "collectives in a loop count once",
        "doctor.program:_trips",
        gives(1),
        "doctor/test_program.py::test_each_kind_in_a_loop_is_counted_as_often_as_it_is_run",
    ),
    Bug(
        "a loop's step of 2 is read as 1",
        "doctor.program:_trips",
        inside("_offset", then(lambda step: step and 1)),
        "doctor/test_program.py::test_each_kind_in_a_loop_is_counted_as_often_as_it_is_run",
    ),
    Bug(
        "an all-reduce counts as one pass around the ring",
        "doctor.program:Collective.sent",
        takes(self=as_all_gather),
        "doctor/test_program.py::test_each_kind_in_a_loop_is_counted_as_often_as_it_is_run",
    ),
    Bug(
        "the parts of a collective are counted separately",
        "doctor.program:collectives",
        takes(text=lambda text: text.replace("channel_id=", "")),
        "doctor/test_program.py::test_what_is_started_is_counted_once_with_what_it_gives",
    ),
    Bug(
        "a move into a faster memory counts as a copy",
        "doctor.program:_changes_memory",
        gives(False),
        "doctor/test_program.py::test_copies_of_a_shape_are_counted",
    ),
    Bug(
        "the backward pass counts as much as the forward pass",
        "models.flops:training_flops",
        inside("forward_flops", then(lambda flops: flops * 2 // 3)),
        "models/test_flops.py::test_training_is_six_operations_a_parameter_and_token",
    ),
    Bug(
        "iterators among the arguments are flattened as pytrees",
        "models.explicit_axes:_is_opaque",
        gives(False),
        "decoding/test_generation.py::test_stop_tokens_may_be_any_iterable",
    ),
    Bug(
        "the results of a pass on explicit axes are on all devices",
        "models.explicit_axes:_batch_of",
        gives((None, None)),
        "models/test_explicit_axes.py::"
        "test_a_pass_and_its_gradient_on_explicit_axes_are_those_without_a_mesh",
    ),
)
