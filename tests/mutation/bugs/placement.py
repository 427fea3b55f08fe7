"""Bugs of the placement of arrays, and of the reported resources of programs."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives, inside, takes, then


def as_all_gather(collective):
    is_one = collective.kind == "all-reduce"
    return collective._replace(kind="all-gather") if is_one else collective


BUGS = (
    Bug(
        "the last matching rule of a table is used",
        "models.sharding.parameters:find_partition",
        takes(rules=lambda rules: rules[::-1]),
        "models/sharding/test_parameters.py::test_first_matching_partition_rule_is_used",
    ),
    Bug(
        "an axis size that does not divide is accepted",
        "models.sharding.parameters:find_partition",
        inside("prod", gives(1)),  # the number of devices along an axis
        "models/sharding/test_parameters.py::test_sharding_rejects_parameter_sizes_not_divisible_by_the_mesh",
    ),
    Bug(
        "fused projections are sharded across their parts",
        "models.sharding.activations:is_tensor_parallel",
        gives(False),
        "training/test_meshes.py::test_compiled_training_step_has_no_superfluous_collectives",
    ),
    Bug(
        "tensor parallelism splits a head",
        "models.sharding.parameters:_rules_of_stack",
        inside("any", gives(False)),  # whether it would split a head
        "models/sharding/test_parameters.py::test_sharding_never_splits_a_head_or_a_token_embedding",
    ),
    Bug(
        "a checkpoint is loaded to one device",
        "hub.load:load",
        takes(mesh=lambda _: None),
        "hub/test_placed.py::test_parameters_are_loaded_with_their_shardings[run-how0]",
    ),
    Bug(
        "an imported tensor is loaded to one device",
        "hub.table:read_leaves.leaves",
        inside("place_array", lambda put: lambda array, _: put(array, None)),
        "hub/test_placed.py::test_parameters_are_loaded_with_their_shardings[theirs-how0]",
    ),
    Bug(
        "a CLI verb runs outside its mesh",
        "cli.checkpoints:load_model",
        Replace("jax.set_mesh(mesh)", "__import__('contextlib').nullcontext()"),
        "hub/test_placed.py::test_command_loads_a_checkpoint_on_the_requested_mesh",
    ),
    Bug(
        "the kernels of experts are sharded like those of other layers",
        "functional.layers.experts:Experts.weight_axes",
        Replace("('experts', *axes)", "axes"),
        "models/sharding/test_parameters.py::test_expert_parameters_are_sharded_over_the_expert_axis",
    ),
    Bug(
        "an axis of experts is accepted for a model without experts",
        "models.sharding.parameters:shardings",
        inside("any", gives(True)),
        "models/sharding/test_parameters.py::test_indivisible_expert_count_is_rejected",
    ),
    Bug(
        "each device computes the first experts",
        "models.sharding.activations:MeshPlacement.per_expert",
        Replace("experts - first", "experts"),
        "models/test_expert_axis.py::test_expert_parallelism_on_eight_devices_is_exact_and_exchanges_no_kernels[one]",
    ),
    # ---- resources of a program
    Bug(
        "doctor: the collectives of `shard_map` count as one",
        "doctor.program:_merge_pieces",
        Replace("len(kinds) > 1", "False"),
        "doctor/test_program.py::test_different_collectives_on_one_channel_are_counted_separately",
    ),
    Bug(
        "doctor: the gradients of experts are summed over their axis",
        "doctor.exchange:least_exchange",
        Replace("'expert' not in alone", "True"),
        "doctor/test_program.py::test_lower_bound_on_expert_parallel_communication_equals_known_bytes",
    ),
    Bug(
        "doctor: only one row per token counts as dense",
        "doctor.experts:_is_dense",
        Replace("(1, sizes.chosen)", "(1,)"),
        "doctor/test_experts.py::test_arrays_over_all_experts_are_found_in_hlo_by_their_sizes",
    ),
    Bug(
        "doctor: the kernels of several layers count as a dense mixture",
        "doctor.experts:_is_kernel",
        gives(False),
        "doctor/test_experts.py::test_arrays_over_all_experts_are_found_in_hlo_by_their_sizes",
    ),
    Bug(
        "doctor: what a scan stores for each layer counts as a dense mixture",
        "doctor.experts:_is_dense",
        Replace("experts in sizes.layers and not is_of_product", "False"),
        "doctor/test_experts.py::test_mixture_of_experts_computes_only_the_chosen_experts",
    ),
    Bug(
        "doctor: all layers have the attention of the first one",
        "doctor.attention:_by_part",
        Replace("choices[call]", "choices[0]"),
        "doctor/test_attention.py::test_number_of_layers_reported_as_fused_equals_fused_kernel_calls",
    ),
    Bug(
        "collectives in a loop count once",
        "doctor.program:_trips",
        gives(1),
        "doctor/test_program.py::test_collectives_in_a_loop_are_counted_in_each_iteration",
    ),
    Bug(
        "a loop's step of 2 is read as 1",
        "doctor.program:_trips",
        inside("_offset", then(lambda step: step and 1)),
        "doctor/test_program.py::test_collectives_in_a_loop_are_counted_in_each_iteration",
    ),
    Bug(
        "an all-reduce counts as one pass around the ring",
        "doctor.program:Collective.sent",
        takes(self=as_all_gather),
        "doctor/test_program.py::test_collectives_in_a_loop_are_counted_in_each_iteration",
    ),
    Bug(
        "the parts of a collective are counted separately",
        "doctor.program:collectives",
        takes(text=lambda text: text.replace("channel_id=", "")),
        "doctor/test_program.py::test_asynchronous_collectives_are_counted_once",
    ),
    Bug(
        "a move into a faster memory counts as a copy",
        "doctor.program:_changes_memory",
        gives(False),
        "doctor/test_program.py::test_hlo_copies_of_a_shape_are_counted_in_each_loop_iteration",
    ),
    Bug(
        "the backward pass counts as much as the forward pass",
        "models.flops:training_flops",
        inside("forward_flops", then(lambda flops: flops * 2 // 3)),
        "models/test_flops.py::test_training_flops_are_six_per_parameter_and_token",
    ),
    Bug(
        "iterators among the arguments are flattened as pytrees",
        "models.sharding.explicit_axes:_is_opaque",
        gives(False),
        "decoding/test_generation.py::test_stop_tokens_may_be_any_iterable",
    ),
    Bug(
        "the results of a pass on explicit axes are on all devices",
        "models.sharding.explicit_axes:_find_batch",
        gives((None, None)),
        "models/sharding/test_explicit_axes.py::"
        "test_loss_and_gradient_on_explicit_axes_equal_those_without_a_mesh",
    ),
)
