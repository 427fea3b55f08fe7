"""Bugs of losses, updates, dropout, and the files of a run."""

from pathlib import Path
from signal import SIGINT

import jax
import jax.numpy as jnp
import numpy as np

from tests.mutation.bug import DISCIPLINE, LOSSES, STEP, Bug
from tests.mutation.changes import Replace, gives, inside, takes, then, unchanged, without

X64 = "test_x64.py"
OBJECTIVES = "training/test_objectives.py"
FIT = "training/test_fit.py"
EXPLICIT = "models/sharding/test_explicit_axes.py"


def counts_padding(weighted_sum):
    return lambda losses, weights: (weighted_sum(losses, weights)[0], jnp.float32(losses.size))


def averages(head_losses):
    def broken(model, params, hidden, batch, *options):
        count = batch.weights.sum()
        losses = head_losses(model, params, hidden, batch, *options)
        return jax.tree.map(lambda x: x / jnp.where(count == 0, 1.0, count), losses)

    return broken


def wraps_targets(token_losses):
    def broken(logits, targets, label_smoothing=0.0):
        return token_losses(logits, targets % logits.shape[-1], label_smoothing)

    return broken


def always_with_a_key(dropout):
    return lambda key, x, rate: dropout(jax.random.key(0) if key is None else key, x, rate)


def takes_decoded(score_pairs):
    def broken(model, variables, tokenizer, pairs, *_, **options):
        references = [tokenizer.decode(ids) for _, ids in pairs]
        return score_pairs(model, variables, tokenizer, pairs, references, **options)

    return broken


BUGS = (
    # ---- losses and updates: transformers#34191, prime-rl#1961, optax#1185, flax#677
    Bug(
        "micro-batches are averaged, not summed",
        "training.objectives:head_losses",
        averages,
        f"{STEP}::test_unequal_micro_batches_give_the_gradient_of_the_full_batch",
    ),
    Bug(
        "the loss of a user's objective is a mean of means",
        "training.objectives:Objective.scaled_loss",
        lambda _: (
            lambda self, model, params, batch, key, scale: jax.tree.map(
                lambda x: x / self.count(batch) / 3, self.loss(model, params, batch, key)
            )
        ),
        f"{OBJECTIVES}::test_micro_batches_do_not_change_gradient_of_user_defined_objective",
    ),
    Bug(
        "the outputs of layers are added without the scale of the losses",
        "training.objectives:CrossEntropy.scaled_loss",
        Replace("passed.auxiliary[name] * scale", "passed.auxiliary[name]"),
        f"{OBJECTIVES}::test_auxiliary_losses_are_added_only_if_the_objective_uses_them",
    ),
    Bug(
        "the logged loss includes label smoothing",
        "functional.losses.cross_entropy:smoothed_and_plain",
        lambda function: lambda *options: (function(*options)[0],) * 2,
        f"{STEP}::test_the_loss_is_measured_with_and_without_label_smoothing",
    ),
    Bug(
        "padding counts in the denominator of the loss",
        "functional.losses.cross_entropy:weighted_sum",
        counts_padding,
        LOSSES,
    ),
    Bug(
        "label −100 wraps to a real class",
        "functional.losses.cross_entropy:token_losses",
        wraps_targets,
        LOSSES,
    ),
    Bug(
        "the loss is computed in bfloat16",
        "functional.losses.cross_entropy:smoothed_and_plain",
        Replace("logits.astype(jnp.float32)", "logits"),
        LOSSES,
    ),
    Bug(
        "kernels are drawn in JAX's default dtype",
        "functional.linear.affine:init_linear",
        Replace(
            "jax.random.normal(key, (in_dim, out_dim), jnp.float32)",
            "jax.random.normal(key, (in_dim, out_dim))",
        ),
        f"{X64}::test_no_value_of_a_model_or_its_gradient_is_float64",
    ),
    Bug(
        "dropout draws in JAX's default dtype",
        "functional.dropout:dropout",
        Replace("jnp.float32(1.0 - rate)", "1.0 - rate"),
        f"{X64}::test_library_results_do_not_change_under_enable_x64[dropout]",
    ),
    Bug(
        "targets are not shifted by one token",
        "training.data.windows:WindowBatches._read",
        then(lambda batch: batch._replace(targets=batch.inputs)),
        "training/data/test_windows.py::test_targets_of_training_windows_are_the_inputs_shifted_by_one",
    ),
    Bug(
        "weight decay by rank also decays stacked biases",
        "training.optimizer:is_matrix",
        lambda is_matrix: lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        "training/test_optimizer.py::test_weight_decay_applies_to_matrices_only",
    ),
    # ---- randomness: nanoGPT#240, flash-attention#314
    Bug(
        "the same dropout key in each step",
        "training.step:make_step.step",
        inside("jax.random.fold_in", unchanged),
        f"{STEP}::test_dropout_differs_from_step_to_step_and_repeats_with_the_seed",
    ),
    Bug(
        "dropout without a key is accepted",
        "functional.dropout:dropout",
        always_with_a_key,
        f"{DISCIPLINE}::test_dropout_is_inactive_without_a_random_key",
    ),
    Bug(
        "an explicit held-out fraction has a minimum",
        "training.tasks.text:_how_much",
        then(lambda found: (found[0], max(found[1], 500_000), found[2])),
        "training/test_text.py::test_validation_fraction_sets_the_held_out_size",
    ),
    Bug(
        "a carriage return within a line ends it",
        "training.data.pairs:_read_lines",
        inside("read_lines", lambda _: lambda path: Path(path).read_bytes().splitlines()),
        "training/data/test_parallel.py::test_only_line_feeds_end_a_line_of_parallel_text",
    ),
    Bug(
        "the last evaluation scores only the whole text",
        "training.log:score_line",
        lambda score_line: lambda measure, score, part=None: score_line(measure, score),
        "cli/test_verbs.py::test_every_evaluation_uses_the_same_windows",
    ),
    Bug(
        "only the first windows are scored",
        "training.evaluate:spread",
        inside("np.linspace", lambda _: lambda first, last, number: np.arange(number)),
        "training/test_evaluate.py::test_evaluation_windows_are_evenly_spaced",
    ),
    Bug(
        "a loss curve joins scores of different tokens",
        "training.log:held_out_scores",
        takes(metrics=lambda lines: list(map(without("scored", "part_scored"), lines))),
        "training/test_picture.py::test_loss_curve_connects_only_losses_of_the_same_held_out_tokens",
    ),
    Bug(
        "a seed beyond 32 bits is accepted",
        "training.config:check_seed",
        takes(seed=lambda seed: min(seed, 0)),
        "training/test_config.py::test_training_config_rejects_seed_of_more_than_32_bits",
    ),
    Bug(
        "a count beyond 32 bits is accepted",
        "models.config.check:_check_entry",
        gives(None),
        "training/test_config.py::test_training_config_rejects_counts_above_the_integer_limit",
    ),
    # ---- output: rich interprets markup, matplotlib interprets mathematics
    Bug(
        "a sample is read as markup",
        "training.screen:Screen.say",
        inside("Segments", lambda _: lambda segment_ids: segment_ids[0].text),
        "training/test_screen.py::test_screen_shows_text_unchanged_except_control_characters",
    ),
    Bug(
        "a run's name is read as mathematics",
        "artifacts.files:write_figure",
        Replace("figure.suptitle(title, parse_math=False)", "figure.suptitle(title)"),
        "training/test_screen.py::test_loss_plot_accepts_any_title",
    ),
    Bug(
        "a character that the terminal cannot encode ends the run",
        "cli:main",
        inside("isinstance", gives(False)),  # sys.stdout is no TextIOWrapper
        "cli/test_errors.py::test_characters_that_a_terminal_cannot_encode_are_replaced",
    ),
    Bug(
        "a restarted script begins with the first batch",
        "training.tasks.own_batches:NumberedBatches.restore",
        gives(None),
        f"{FIT}::test_rerunning_an_interrupted_training_script_equals_uninterrupted_training",
    ),
    Bug(
        "a script continues a run of another objective",
        "training.fit:_settings",
        Replace("('objective', *OWN)", "OWN"),
        f"{FIT}::test_run_can_be_resumed_only_with_the_same_settings",
    ),
    Bug(
        "a script continues a run of other layers",
        "training.fit:_settings",
        Replace("('objective', *OWN)", "('objective',)"),
        f"{FIT}::test_run_cannot_be_resumed_with_different_layers",
    ),
    Bug(
        "a model with its own layers is fine-tuned as the model of its config",
        "cli.checkpoints:open_base",
        Replace("stored = opened(path)", "stored = opened(path)._replace(own={})"),
        f"{FIT}::test_run_cannot_be_resumed_with_different_layers",
    ),
    # ---- checkpoints: orbax#2972, gpt-neox#308
    Bug(
        "metrics after the restored step are kept",
        "artifacts.run:RunFolder.cut_after",
        gives(None),
        "training/test_resume.py::test_a_run_resumed_after_signals_equals_an_uninterrupted_run",
    ),
    Bug(
        "the data position is not restored",
        "training.data.windows:WindowBatches.restore",
        gives(None),
        "training/test_resume.py::test_a_run_resumed_after_signals_equals_an_uninterrupted_run",
    ),
    Bug(
        "a scheduler's signal ends a run at once",
        "training.processes:_USUAL",
        lambda usual: {SIGINT: usual[SIGINT]},
        "training/test_resume.py::test_a_run_resumed_after_signals_equals_an_uninterrupted_run",
    ),
    Bug(
        "a non-finite update is applied",
        "training.step:make_step",
        takes(skip_non_finite=lambda _: False),
        f"{STEP}::test_an_update_with_a_non_finite_loss_is_skipped",
    ),
    Bug(
        "a non-finite gradient with a finite loss is applied",
        "training.step:make_step.step",
        Replace(
            "jnp.isfinite(loss) & jnp.isfinite(measured.gradient_norm)",
            "jnp.isfinite(loss)",
        ),
        f"{STEP}::test_an_update_with_a_non_finite_gradient_is_skipped",
    ),
    Bug(
        "small gradients are scaled up to the norm for clipping",
        "training.optimizer:clip_by_norm",
        Replace("jnp.where(norm < largest_norm, 1.0, largest_norm / norm)", "largest_norm / norm"),
        "training/test_optimizer.py::test_gradients_are_clipped_as_optax_clips_them",
    ),
    Bug(
        "the reported gradient norm is the clipped one",
        "training.step:make_step.step",
        inside("optax.tree.norm", then(lambda norm: jnp.minimum(norm, 1))),
        f"{STEP}::test_the_gradient_norm_is_measured_before_clipping",
    ),
    Bug(
        "a non-finite value is written to metrics.jsonl",
        "training.log:finite",
        lambda _: lambda line: line,
        "training/test_log.py::test_log_lists_names_of_non_finite_training_values_instead_of_the_values",
    ),
    Bug(
        "a signal waits for the evaluation to finish",
        "training.loop:Training._score",
        inside("processes.are_several", gives(True)),
        "cli/test_signals.py::test_checkpoint_saved_after_a_signal_is_evaluated_when_the_run_resumes",
    ),
    Bug(
        "a run with unreadable checkpoints starts again",
        "artifacts.checkpoint:Checkpoints.is_empty",
        lambda _: lambda self: not self.steps(),
        "cli/test_damage.py::test_resume_refuses_run_without_a_complete_checkpoint",
    ),
    Bug(
        "BLEU references are decoded tokens, not the text",
        "training.evaluate:score_pairs",
        takes_decoded,
        "training/test_bleu.py::test_bleu_uses_reference_texts_unchanged_by_the_tokenizer",
    ),
    # ---- tasks and time
    Bug(
        "masked tokens remain visible in the input",
        "training.evaluate:masked_windows",
        then(lambda windows: [x._replace(inputs=x.targets) for x in windows]),
        "training/test_masked_tokens.py::test_masked_windows_contain_each_token_once_and_mask_only_targets",
    ),
    Bug(
        "a resumed run restarts the masking noise",
        "training.tasks.masked_tokens:MaskedBatches._read",
        Replace(
            "jax.random.fold_in(self._key, index)",
            "jax.random.fold_in("
            "self._key, next(self.__dict__.setdefault('_reads', iter(range(1000)))))",
        ),
        "cli/test_kinds.py::test_a_run_interrupted_at_any_step_resumes_exactly[encoder]",
    ),
    Bug(
        "the space before a mask is kept",
        "cli.fill_mask:around",
        Replace('part.removesuffix(" ")', "part"),
        "cli/test_fill_mask.py::test_fill_mask_replaces_each_mask_by_one_token[x]",
    ),
    Bug(
        "translations are returned in order of length",
        "decoding.translate:translate_ids",
        Replace("found[i] = tokenizer.decode(ids)", "found.append(tokenizer.decode(ids))"),
        "decoding/test_translate.py::test_translations_are_in_input_order",
    ),
    Bug(
        "a training source is also held out",
        "training.data.split:similarity_groups",
        lambda similarity_groups: lambda lines, tokenizer=None: list(range(len(lines))),
        "training/data/test_parallel.py::test_all_pairs_of_a_source_are_in_the_same_split",
    ),
    Bug(
        "a run of one minute compiles six batch lengths",
        "training.fitting:_lengths",
        gives(None),
        "training/test_fitting.py::test_short_translation_runs_use_few_sequence_lengths",
    ),
    Bug(
        "the remaining time omits the evaluations before the last one",
        "training.speed:ScoringTime.remaining",
        Replace("self._targets(parts, 1)", "self._targets(1, 1)"),
        "training/test_speed.py::test_estimated_duration_of_an_evaluation_equals_actual_duration",
    ),
    Bug(
        "the remaining time extrapolates compilation",
        "training.speed:Clock._since_start",
        Replace("self.seconds - self._started[0]", "time.perf_counter()"),
        "training/test_speed.py::test_the_remaining_time_of_training_excludes_pauses",
    ),
    Bug(
        "translations of an untrained model fill max_length",
        "training.evaluate:score_pairs",
        Replace("max(len(target) + 1 for _, target in pairs)", "model.config.max_length"),
        "training/test_bleu.py::test_bleu_translations_are_at_most_as_long_as_the_longest_target",
    ),
    Bug(
        "evaluation time counts as training time",
        "training.speed:Clock.paused",
        Replace(
            "(self._since is not None, self.seconds, None)",
            "(self._since is not None, self.seconds, self._since)",
        ),
        "training/test_speed.py::test_elapsed_time_includes_training_but_not_compilation_or_pauses",
    ),
    Bug(
        "the feed-forward width does not follow embed_dim",
        "training.fitting:_feedforward_widths",
        Replace("max(1, round(scaled))", "width"),
        "training/test_fitted_sizes.py::"
        "test_multiplying_embed_dim_of_a_preset_multiplies_all_widths[2-llama-1.1b]",
    ),
    Bug(
        "the number of heads does not follow embed_dim",
        "training.fitting:_heads",
        Replace("before['head_dim'] is None", "False"),
        "training/test_fitted_sizes.py::"
        "test_multiplying_embed_dim_of_a_preset_multiplies_all_widths[2-llama-1.1b]",
    ),
    Bug(
        "a flag without effect is accepted",
        "models.config.needs:check_read",
        Replace("not need.holds(values)", "False"),
        "cli/test_every_option.py::test_commands_reject_options_that_have_no_effect",
    ),
    Bug(
        "the updates omit the learning rate",
        "training.step:make_step.step",
        takes(learning_rate=lambda _: 1.0),
        "training/test_optimizer.py::test_explicit_learning_rates_give_the_updates_of_an_optax_schedule",
    ),
    Bug(
        "the decay starts during the warm-up",
        "training.optimizer:Schedule._left",
        Replace("min(length, 1 - self.warmup / self.steps)", "length"),
        "training/test_optimizer.py::test_the_cosine_schedule_equals_optax",
    ),
    Bug(
        "decay_fraction counts only the steps after the warm-up",
        "training.optimizer:Schedule._left",
        Replace(
            "min(length, 1 - self.warmup / self.steps)",
            "length * (1 - self.warmup / self.steps)",
        ),
        "training/test_optimizer.py::test_decay_fraction_is_relative_to_all_steps_of_the_run",
    ),
    Bug(
        "a resumed run jumps to the learning rate of its new end",
        "training.optimizer:Schedule.rate",
        takes(last=lambda _: None),
        "training/test_optimizer.py::test_learning_rate_changes_smoothly_however_long_updates_take",
    ),
    Bug(
        "the learning rate follows the clock of updates that still run",
        "training.loop:Training._update",
        Replace("jax.block_until_ready(self._unfinished)", "None"),
        "training/test_run_schedule.py::test_learning_rate_of_a_resumed_run_with_slow_updates_is_smooth",
    ),
    Bug(
        "processes exchange the time of slow updates every ten steps",
        "training.processes:Agreement.signal",
        Replace("min(MOST_STEPS, int(1 / per_step))", "MOST_STEPS"),
        "training/test_run_schedule.py::test_processes_synchronize_elapsed_time_after_each_slow_update",
    ),
    Bug(
        "an optimizer takes stacked layers for one array",
        "training.optimizer:_over_layers",
        lambda _: lambda function, *trees: function(*trees),
        "training/test_per_layer.py::test_per_layer_optimizer_updates_stacked_layers_like_separate_arrays[lamb]",
    ),
    Bug(
        "Adafactor takes stacked layers for one matrix",
        "training.optimizer:_adafactor",
        inside("per_layer", unchanged),
        "training/test_per_layer.py::test_adafactor_updates_each_layer_relative_to_its_own_size",
    ),
    Bug(
        "every optimizer has AdamW's default learning rate",
        "training.config:LEARNING_RATES",
        lambda rates: dict.fromkeys(rates, 6e-4),
        "training/test_fitting.py::test_the_learning_rate_of_a_preset_depends_on_the_optimizer",
    ),
    Bug(
        "a buffer occurs twice in the donated state",
        "training.step:_with_own_buffers",
        unchanged,
        "training/test_optax_optimizers.py::test_every_optax_optimizer_makes_three_training_steps[prodigy]",
    ),
    # ---- scores on explicit axes, and the profile
    Bug(
        "a user's objective is scored with explicit axes",
        "training.tasks.own_batches:_scored",
        inside("in_auto_axes", lambda _: lambda function: function),
        f"{EXPLICIT}::test_losses_on_explicit_axes_equal_those_without_a_mesh",
    ),
    Bug(
        "a profile begins before the updates are warm",
        "training.speed:profile.update",
        Replace("number == WARM + 1", "number == WARM"),
        "training/test_speed.py::test_profile_of_training_contains_updates_6_to_10",
    ),
    # ---- the process
    Bug(
        "XLA allocates in its own threads",
        "runtime:tune_cpu_runtime",
        Replace("False", "True"),
        "test_runtime.py::test_tune_cpu_runtime_lets_jitted_calls_reuse_memory",
    ),
    Bug(
        "malloc returns freed memory to the kernel",
        "runtime:_MALLOC_OPTIONS",
        gives({}),
        "test_runtime.py::test_tune_cpu_runtime_lets_jitted_calls_reuse_memory",
    ),
    Bug(
        "resuming continues an older run if the newest one is damaged",
        "training.run_folders:_check_certain",
        Replace("isinstance(first, UnreadableRun)", "False"),
        "training/test_run_folders.py::"
        "test_resume_rejects_an_unreadable_newest_run_but_skips_unreadable_older_runs",
    ),
    Bug(
        "resuming continues a copy of a run",
        "training.run_folders:_check_certain",
        Replace("len(copies) > 1", "False"),
        "training/test_run_folders.py::test_resume_rejects_an_ambiguous_choice_between_copies_of_a_run",
    ),
    # ---- comparison of runs
    Bug(
        "runs of different texts are compared without a warning",
        "training.compare:difference",
        gives(None),
        "cli/test_compare.py::test_compare_warns_about_different_texts_or_tokenizers",
    ),
    Bug(
        "a diverged run hides the other loss curves",
        "training.curves:limit",
        gives(None),
        "cli/test_compare.py::test_a_diverged_run_does_not_dominate_the_loss_curves",
    ),
)
