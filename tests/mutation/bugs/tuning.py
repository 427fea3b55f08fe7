"""Runs that begin from a checkpoint, adapters, and averages of weights."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace

LORA, AVERAGE = "training/test_lora.py", "training/test_average.py"
TUNING = "cli/test_fine_tuning.py"

BUGS = (
    Bug(
        "an update is something at first",
        "functional.kernels:init_low_rank",
        Replace("jnp.zeros((*layers, rank, out_dim))", "jnp.ones((*layers, rank, out_dim))"),
        f"{LORA}::test_an_update_changes_nothing_at_first[lstm]",
    ),
    Bug(
        "the updates of fused maps stand one on another",
        "functional.kernels:_concatenated_updates",
        Replace("int(end) - kernel.shape[-1], int(ends[-1] - end)", "0, ends[-1] - ends[0]"),
        f"{LORA}::test_merged_is_unmerged[decoder]",
    ),
    Bug(
        "a name that no map has is passed over",
        "models.lora:adapted_maps",
        Replace("not any((_ends(path, word) for path in kernels))", "False"),
        f"{LORA}::test_a_map_that_is_not_there_is_refused_with_those_that_are",
    ),
    Bug(
        "an adapter is scored without its scale",
        "training.step:TrainState.weights",
        Replace("adapted(self.frozen, params, lora_scale)", "adapted(self.frozen, params, 1.0)"),
        f"{LORA}::test_the_adapter_alone_is_learnt_and_saved",
    ),
    Bug(
        "the frozen weights are checkpointed too",
        "training.step:TrainState.parts",
        Replace(
            '{"optimizer": self.optimizer, "key": jax.random.key_data(self.key)}',
            '{"optimizer": self.optimizer, "key": jax.random.key_data(self.key), '
            '"frozen": self.frozen}',
        ),
        f"{LORA}::test_the_adapter_alone_is_learnt_and_saved",
    ),
    Bug(
        "the average keeps what it began with",
        "training.step:moved_average",
        Replace("(1 - decay) / correction", "1 - decay"),
        f"{AVERAGE}::test_it_is_the_weighted_mean_of_what_was",
    ),
    Bug(
        "learning goes on from the average",
        "training.step:TrainState.restored",
        Replace(
            '{"params": rest["params"], "average": params}', '{"params": params, "average": params}'
        ),
        f"{AVERAGE}::test_updates_do_not_depend_on_it_and_checkpoints_have_both",
    ),
    Bug(
        "weights that have changed are taken for those an adapter is of",
        "hub.load:origin_params",
        Replace("digest_of(params) != origin.digest", "False"),
        f"{TUNING}::test_a_folder_that_an_adapter_is_of_is_noticed_when_it_changes",
    ),
    Bug(
        "an adapter is of a run that goes on",
        "cli.base:Base.keep",
        Replace("training.lora.lora_rank is not None", "False"),
        f"{TUNING}::test_an_adapter_stays_what_it_is_when_its_run_goes_on",
    ),
    Bug(
        "flags make another model of a checkpoint's",
        "training.fine_tuning:refuse_another_model",
        Replace("name not in CHANGEABLE", "False"),
        f"{TUNING}::test_what_does_not_fit_is_refused",
    ),
    Bug(
        "PEFT has the updates of a fused map in another order",
        "hub.peft:_joined",
        Replace("entry.layout.join(parts, entry.num_heads)", "entry.layout.join(parts[::-1], 1)"),
        "hub/test_peft.py::test_their_weights_with_the_adapter_are_ours_merged[gpt2]",
    ),
)
