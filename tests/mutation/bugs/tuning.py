"""Bugs of fine-tuning, adapters, and averages of weights."""

import jax.numpy as jnp
import optax

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives, inside, takes, then

LORA, AVERAGE = "training/test_lora.py", "training/test_average.py"
TUNING, FORM = "cli/test_fine_tuning.py", "artifacts/test_checkpoint_form.py"


def at_first_column(pad):
    def broken(array, widths):
        *others, (before, after) = widths
        return pad(array, [*others, (0, before + after)])

    return broken


def without_correction(update_average):
    def broken(average, params, step, decay):
        return optax.incremental_update(params, average, 1 - decay)

    return broken


def continues_from_average(restored):
    def broken(self, step, params, rest):
        return restored(self, step, params, {**rest, "params": params})

    return broken


def joined_backwards(entry):
    def join(parts, num_groups):
        return entry.layout.join(parts[::-1], 1)

    return entry._replace(layout=entry.layout._replace(join=join))


BUGS = (
    Bug(
        "a new low-rank update is not 0",
        "functional.linear.low_rank:init_low_rank",
        inside("jnp.zeros", lambda _: jnp.ones),
        f"{LORA}::test_an_initial_lora_update_does_not_change_the_logits[lstm]",
    ),
    Bug(
        "the updates of fused projections overlap",
        "functional.linear.low_rank:_concatenated_updates",
        inside("jnp.pad", at_first_column),
        f"{LORA}::test_merging_lora_weights_does_not_change_the_logits[decoder]",
    ),
    Bug(
        "an unknown projection name is ignored",
        "models.lora:adapted_maps",
        Replace("not any((_ends(path, word) for path in kernels))", "False"),
        f"{LORA}::test_an_unknown_lora_target_is_rejected_with_a_list_of_targets",
    ),
    Bug(
        "an adapter loses its scale",
        "models.lora:adapt",
        inside(
            "init_low_rank", lambda init: lambda key, kernel, rank, scale: init(key, kernel, rank)
        ),
        f"{LORA}::test_lora_gradients_are_projections_of_the_dense_gradient",
    ),
    Bug(
        "weights beside an adapter are trained too",
        "models.trainable:partition",
        inside("any", gives(False)),  # whether there is an adapter
        f"{LORA}::test_only_the_adapter_is_trained_and_saved",
    ),
    Bug(
        "the frozen weights are checkpointed too",
        "training.step:TrainState.parts",
        inside("partition", lambda _: lambda params: (params, None)),
        f"{LORA}::test_only_the_adapter_is_trained_and_saved",
    ),
    Bug(
        "checkpoints store an adapter in another layout",
        "artifacts.checkpoint:stored_form",
        lambda stored_form: lambda tree: tree,
        f"{FORM}::test_lora_checkpoint_contains_lora_a_and_b_of_each_linear_layer[decoder] "
        f"{FORM}::test_checkpoint_restores_adapter_with_optimizer_moments_and_average[lora-adamw]",
    ),
    Bug(
        "A and B have each other's sharding",
        "models.lora:low_rank_shardings",
        then(lambda parts: parts[::-1]),
        "models/sharding/test_parameters.py::test_lora_updates_are_sharded_like_their_kernels",
    ),
    Bug(
        "the weight average is not bias-corrected",
        "training.step:update_average",
        without_correction,
        f"{AVERAGE}::test_moving_average_of_parameters_equals_the_weighted_mean",
    ),
    Bug(
        "training continues from the averaged weights",
        "training.step:TrainState.restored",
        continues_from_average,
        f"{AVERAGE}::test_parameter_average_is_saved_and_leaves_updates_unchanged",
    ),
    Bug(
        "an adapter accepts base weights that have changed",
        "hub.load:origin_params",
        Replace("compute_digest(params) != origin.digest", "False"),
        f"{TUNING}::test_a_changed_base_folder_of_an_adapter_is_detected",
    ),
    Bug(
        "an adapter does not keep its base checkpoint",
        "cli.checkpoints:Base.keep",
        inside("keep", gives(None)),
        f"{TUNING}::test_adapter_is_unchanged_if_its_base_run_is_trained_or_deleted",
    ),
    Bug(
        "flags may change a checkpoint's model",
        "training.presets:check_same_model",
        gives(None),
        f"{TUNING}::test_fine_tuning_refuses_incompatible_settings",
    ),
    Bug(
        "the PEFT export fuses updates in a wrong order",
        "hub.peft:_joined",
        takes(entry=joined_backwards),
        "hub/test_peft.py::test_base_weights_plus_exported_update_equal_merged_weights[gpt2]",
    ),
)
