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


def without_correction(moved_average):
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
        f"{LORA}::test_an_update_changes_nothing_at_first[lstm]",
    ),
    Bug(
        "the updates of fused projections overlap",
        "functional.linear.low_rank:_concatenated_updates",
        inside("jnp.pad", at_first_column),
        f"{LORA}::test_merged_is_unmerged[decoder]",
    ),
    Bug(
        "an unknown projection name is ignored",
        "models.lora:adapted_maps",
        Replace("not any((_ends(path, word) for path in kernels))", "False"),
        f"{LORA}::test_a_map_that_is_not_there_is_refused_with_those_that_are",
    ),
    Bug(
        "an adapter loses its scale",
        "models.lora:adapt",
        inside(
            "init_low_rank", lambda init: lambda key, kernel, rank, scale: init(key, kernel, rank)
        ),
        f"{LORA}::test_gradients_are_projections_of_the_dense_gradient",
    ),
    Bug(
        "weights beside an adapter are trained too",
        "models.trainable:partition",
        inside("any", gives(False)),  # whether there is an adapter
        f"{LORA}::test_the_adapter_alone_is_learnt_and_saved",
    ),
    Bug(
        "the frozen weights are checkpointed too",
        "training.step:TrainState.parts",
        inside("partition", lambda _: lambda params: (params, None)),
        f"{LORA}::test_the_adapter_alone_is_learnt_and_saved",
    ),
    Bug(
        "checkpoints store an adapter in another layout",
        "artifacts.checkpoint:stored_form",
        lambda stored_form: lambda tree: tree,
        f"{FORM}::test_files_have_a_and_b_at_the_path_of_each_map[decoder] "
        f"{FORM}::test_a_checkpoint_in_the_form_of_files_is_restored[lora-adamw]",
    ),
    Bug(
        "A and B have each other's sharding",
        "models.lora:low_rank_shardings",
        then(lambda parts: parts[::-1]),
        "models/test_mesh.py::test_updates_are_sharded_like_their_kernels",
    ),
    Bug(
        "the average is not corrected for its start",
        "training.step:moved_average",
        without_correction,
        f"{AVERAGE}::test_it_is_the_weighted_mean_of_what_was",
    ),
    Bug(
        "training continues from the average",
        "training.step:TrainState.restored",
        continues_from_average,
        f"{AVERAGE}::test_updates_do_not_depend_on_it_and_checkpoints_have_both",
    ),
    Bug(
        "an adapter accepts base weights that have changed",
        "hub.load:origin_params",
        Replace("digest_of(params) != origin.digest", "False"),
        f"{TUNING}::test_a_folder_that_an_adapter_is_of_is_noticed_when_it_changes",
    ),
    Bug(
        "an adapter does not keep its base checkpoint",
        "cli.checkpoints:Base.keep",
        inside("keep", gives(None)),
        f"{TUNING}::test_an_adapter_stays_what_it_is_when_its_run_goes_on",
    ),
    Bug(
        "flags may change a checkpoint's model",
        "training.presets:check_same_model",
        gives(None),
        f"{TUNING}::test_what_does_not_fit_is_refused",
    ),
    Bug(
        "the PEFT export fuses updates in a wrong order",
        "hub.peft:_joined",
        takes(entry=joined_backwards),
        "hub/test_peft.py::test_their_weights_with_the_adapter_are_ours_merged[gpt2]",
    ),
)
