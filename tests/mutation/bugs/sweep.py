"""Bugs of sweeps, and of the curves of several seeds."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives

SWEEP, RESULTS, COMPARE = "cli/test_sweep.py", "training/test_sweep.py", "cli/test_compare.py"
EQUAL = f"{SWEEP}::test_runs_of_a_sweep_equal_single_runs"
CONTINUES = f"{SWEEP}::test_an_interrupted_sweep_continues_and_ends_with_the_same_losses"
DIVERGED = f"{SWEEP}::test_diverged_run_does_not_affect_other_runs_of_a_sweep"
DEVICES = f"{SWEEP}::test_runs_on_several_devices_equal_runs_on_one_device"
SEEDS = (
    f"{COMPARE}::test_runs_that_differ_only_in_the_seed_are_drawn_as_their_mean_and_standard_error"
)

BUGS = (
    Bug(
        "all runs of a group start from the same weights",
        "training.group:_initial_states",
        Replace("np.array(seeds, np.uint32)", "np.array(seeds[:1] * len(seeds), np.uint32)"),
        EQUAL,
    ),
    Bug(
        "all runs of a group have the learning rate of the first one",
        "training.group:RunGroup._update",
        Replace("_padded(rates, self._mesh)", "_padded(rates[:1] * len(rates), self._mesh)"),
        EQUAL,
    ),
    Bug(
        "all runs of a group read the batches of the first one",
        "training.group:RunGroup._update",
        Replace("_padded(batches, self._mesh)", "_padded(batches[:1] * len(batches), self._mesh)"),
        EQUAL,
    ),
    Bug(
        "runs of different weight decays share a program",
        "training.group:shared_settings",
        Replace("_OF_THE_RATE", "(*_OF_THE_RATE, 'weight_decay')"),
        f"{RESULTS}::test_runs_share_a_program_only_if_they_differ_in_nothing_but_seed_and_learning_rate",
    ),
    Bug(
        "a diverged run ends the sweep",
        "training.group:RunGroup._unless_ended",
        Replace("processes.Ended", "ZeroDivisionError"),
        DIVERGED,
    ),
    Bug("a diverged run is repeated", "training.log:has_diverged", gives(False), DIVERGED),
    Bug(
        "a continued group starts anew",
        "training.group:RunGroup.resume",
        gives(None),
        CONTINUES,
    ),
    Bug(
        "a stop signal saves no checkpoint of a group",
        "training.group:RunGroup._follow_up",
        Replace("bool(signal)", "False"),
        CONTINUES,
    ),
    Bug(
        "runs get the states of another device",
        "training.group:_by_run",
        Replace("shard.index[0].start or 0", "-(shard.index[0].start or 0)"),
        DEVICES,
    ),
    Bug(
        "a sweep without data leaves its folder behind",
        "training.sweep:withdraw",
        gives(None),
        f"{SWEEP}::test_invalid_sweeps_are_rejected_before_any_folder_is_written",
    ),
    Bug(
        "runs with different vocabularies share a tokenizer",
        "training.sweep:Planned.data_key",
        Replace("config.model.vocab_size", "0"),
        f"{SWEEP}::test_sweep_trains_settings_listed_in_a_file_and_models_of_different_sizes",
    ),
    Bug(
        "runs on pairs share data of another case or length",
        "training.sweep:Planned.data_key",
        Replace("not isinstance(config, TextTraining)", "False"),
        f"{RESULTS}::test_runs_share_their_data_only_if_their_data_settings_are_equal",
    ),
    Bug(
        "a skipped update counts as the end of a run",
        "training.log:has_diverged",
        Replace("config.non_finite == 'stop'", "True"),
        f"{RESULTS}::test_run_with_skipped_updates_counts_as_diverged_only_if_it_ended_with_them",
    ),
    Bug(
        "the standard error is that of a single run",
        "training.sweep_results:Average.error",
        Replace("stdev(self.losses) / number**0.5", "stdev(self.losses)"),
        f"{RESULTS}::test_sweep_results_are_means_and_standard_errors_over_the_seeds",
    ),
    Bug(
        "the largest loss is marked as the best",
        "training.sweep_results:table",
        Replace("min", "max"),
        f"{RESULTS}::test_sweep_table_marks_the_best_mean_and_counts_diverged_runs",
    ),
    Bug(
        "a diverged run is part of the mean curve",
        "training.sweep_results:_average",
        Replace("not run.has_diverged", "True"),
        f"{RESULTS}::test_sweep_picture_shows_means_that_exclude_diverged_runs",
    ),
    Bug(
        "the band of a curve is the deviation of the population",
        "training.curves:_standard_error",
        Replace("np.std(values, ddof=1)", "np.std(values)"),
        SEEDS,
    ),
    Bug(
        "runs of different texts share their axes",
        "training.compare:comparable",
        Replace("_class_of(run)", "_class_of(runs[0])"),
        f"{COMPARE}::test_compare_warns_about_different_texts_or_tokenizers",
    ),
    Bug(
        "repetitions of a seed are averaged",
        "training.compare:by_seed",
        Replace("other.config.seed == seed", "False"),
        f"{COMPARE}::test_diverged_runs_and_repeated_seeds_are_not_averaged",
    ),
)
