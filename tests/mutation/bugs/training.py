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
        f"{STEP}::test_micro_batches_give_the_full_batch_whatever_their_token_counts",
    ),
    Bug(
        "the loss of an objective of one's own is a mean of means",
        "training.objectives:Objective.scaled_loss",
        lambda _: (
            lambda self, model, params, batch, key, scale: jax.tree.map(
                lambda x: x / self.count(batch) / 3, self.loss(model, params, batch, key)
            )
        ),
        f"{OBJECTIVES}::test_an_objective_of_a_users_file_has_the_gradient_of_the_whole_batch",
    ),
    Bug(
        "the outputs of layers are added without the scale of the losses",
        "training.objectives:CrossEntropy.scaled_loss",
        Replace("passed.auxiliary[name] * scale", "passed.auxiliary[name]"),
        f"{OBJECTIVES}::test_the_outputs_of_layers_are_added_to_the_loss_only_if_named",
    ),
    Bug(
        "the logged loss includes label smoothing",
        "functional.losses.cross_entropy:smoothed_and_plain",
        lambda function: lambda *options: (function(*options)[0],) * 2,
        f"{STEP}::test_the_loss_is_measured_with_and_without_label_smoothing",
    ),
    Bug(
        "padding counted in the denominator",
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
        f"{X64}::test_the_flag_changes_no_result[dropout]",
    ),
    Bug(
        "targets not shifted",
        "training.data.windows:WindowBatches._read",
        then(lambda batch: batch._replace(targets=batch.inputs)),
        "training/data/test_windows.py::test_targets_are_the_inputs_moved_by_one",
    ),
    Bug(
        "weight decay by rank: stacked biases decay",
        "training.optimizer:is_matrix",
        lambda is_matrix: lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        "training/test_optimizer.py::test_decay_is_for_matrices_alone",
    ),
    # ---- randomness: nanoGPT#240, flash-attention#314
    Bug(
        "the same dropout key in each step",
        "training.step:make_step.step",
        inside("jax.random.fold_in", unchanged),
        f"{STEP}::test_dropout_differs_from_step_to_step_and_repeats_with_the_seed",
    ),
    Bug(
        "dropout without a key",
        "functional.dropout:dropout",
        always_with_a_key,
        f"{DISCIPLINE}::test_without_a_key_dropout_is_off",
    ),
    Bug(
        "an explicit held-out fraction has a minimum",
        "training.tasks.text:_how_much",
        then(lambda found: (found[0], max(found[1], 500_000), found[2])),
        "training/test_text.py::test_the_flag_says_how_much_is_held_out",
    ),
    Bug(
        "a carriage return within a line ends it",
        "training.data.pairs:_read_lines",
        inside("read_lines", lambda _: lambda path: Path(path).read_bytes().splitlines()),
        "training/data/test_parallel.py::test_a_line_ends_at_a_line_feed_alone",
    ),
    Bug(
        "the last evaluation scores only the whole text",
        "training.log:score_line",
        lambda score_line: lambda measure, score, part=None: score_line(measure, score),
        "cli/test_verbs.py::test_every_evaluation_scores_the_same_windows",
    ),
    Bug(
        "only the first windows are scored",
        "training.evaluate:spread",
        inside("np.linspace", lambda _: lambda first, last, number: np.arange(number)),
        "training/test_evaluate.py::test_windows_are_spread_over_the_whole_text",
    ),
    Bug(
        "a loss curve joins scores of different tokens",
        "training.log:held_out_scores",
        takes(metrics=lambda lines: list(map(without("scored", "part_scored"), lines))),
        "training/test_picture.py::test_a_curve_connects_scores_of_the_same_tokens",
    ),
    Bug(
        "a seed beyond 32 bits is accepted",
        "training.config:check_seed",
        takes(seed=lambda seed: min(seed, 0)),
        "training/test_config.py::test_a_seed_without_a_key_of_its_own_is_refused",
    ),
    Bug(
        "a count beyond 32 bits is accepted",
        "models.config.check:_check_entry",
        gives(None),
        "training/test_config.py::test_a_count_that_no_device_holds_is_refused",
    ),
    # ---- output: rich interprets markup, matplotlib interprets mathematics
    Bug(
        "a sample is read as markup",
        "training.screen:Screen.say",
        inside("Segments", lambda _: lambda segments: segments[0].text),
        "training/test_screen.py::test_text_is_shown_as_it_is",
    ),
    Bug(
        "a run's name is read as mathematics",
        "artifacts.files:write_figure",
        Replace("figure.suptitle(title, parse_math=False)", "figure.suptitle(title)"),
        "training/test_screen.py::test_a_picture_of_any_title",
    ),
    Bug(
        "a character that a terminal lacks ends the run",
        "cli:main",
        inside("isinstance", gives(False)),  # sys.stdout is no TextIOWrapper
        "cli/test_errors.py::test_text_that_a_terminal_cannot_show_does_not_end_a_verb",
    ),
    Bug(
        "a script that is run again begins with its first batch",
        "training.tasks.own_batches:NumberedBatches.restore",
        gives(None),
        f"{FIT}::test_a_run_that_ended_early_continues_as_if_it_had_not",
    ),
    Bug(
        "a script continues a run of another objective",
        "training.fit:_prepare",
        inside("repr", gives("the objective")),
        f"{FIT}::test_a_run_keeps_its_objective_and_settings",
    ),
    # ---- checkpoints: orbax#2972, gpt-neox#308
    Bug(
        "metrics after the restored step are kept",
        "artifacts.run:RunFolder.cut_after",
        gives(None),
        "training/test_resume.py::test_ended_and_resumed_equals_uninterrupted",
    ),
    Bug(
        "the data position is not restored",
        "training.data.windows:WindowBatches.restore",
        gives(None),
        "training/test_resume.py::test_ended_and_resumed_equals_uninterrupted",
    ),
    Bug(
        "a scheduler's signal ends a run at once",
        "training.processes:_USUAL",
        lambda usual: {SIGINT: usual[SIGINT]},
        "training/test_resume.py::test_ended_and_resumed_equals_uninterrupted",
    ),
    Bug(
        "a non-finite update is applied",
        "training.step:make_step",
        takes(skip_non_finite=lambda _: False),
        f"{STEP}::test_an_update_that_is_not_finite_is_left_out",
    ),
    Bug(
        "a non-finite gradient with a finite loss is applied",
        "training.step:make_step.step",
        Replace(
            "jnp.isfinite(loss) & jnp.isfinite(measured.gradient_norm)",
            "jnp.isfinite(loss)",
        ),
        f"{STEP}::test_a_gradient_that_is_not_finite_is_left_out_too",
    ),
    Bug(
        "small gradients are scaled up to the norm for clipping",
        "training.optimizer:clipped_to",
        Replace("jnp.where(norm < largest_norm, 1.0, largest_norm / norm)", "largest_norm / norm"),
        "training/test_optimizer.py::test_gradients_are_clipped_as_optax_clips_them",
    ),
    Bug(
        "the reported gradient norm is the clipped one",
        "training.step:make_step.step",
        inside("optax.tree.norm", then(lambda norm: jnp.minimum(norm, 1))),
        f"{STEP}::test_the_gradient_norm_is_of_the_gradient_before_it_is_clipped",
    ),
    Bug(
        "a non-finite value is written to metrics.jsonl",
        "training.log:finite",
        lambda _: lambda line: line,
        "training/test_log.py::test_what_is_not_finite_is_named_and_left_out",
    ),
    Bug(
        "a signal waits for the evaluation to finish",
        "training.loop:Training._score",
        inside("processes.are_several", gives(True)),
        "cli/test_signals.py::test_the_step_is_saved_and_scored_when_the_run_goes_on",
    ),
    Bug(
        "a run with unreadable checkpoints starts again",
        "artifacts.checkpoint:Checkpoints.is_empty",
        lambda _: lambda self: not self.steps(),
        "cli/test_damage.py::test_a_run_whose_checkpoints_have_lost_their_marks_does_not_begin_again",
    ),
    Bug(
        "BLEU references are decoded tokens, not the text",
        "training.evaluate:score_pairs",
        takes_decoded,
        "training/test_bleu.py::test_translations_are_compared_with_what_was_written",
    ),
    # ---- tasks and time
    Bug(
        "masked tokens remain visible in the input",
        "training.evaluate:hidden_rows",
        then(lambda rows: [row._replace(inputs=row.targets) for row in rows]),
        "training/test_hidden.py::test_every_token_stands_once_and_targets_are_what_is_hidden",
    ),
    Bug(
        "a resumed run restarts the masking noise",
        "training.tasks.hidden_tokens:HiddenBatches._read",
        Replace(
            "jax.random.fold_in(self._key, index)",
            "jax.random.fold_in("
            "self._key, next(self.__dict__.setdefault('_reads', iter(range(1000)))))",
        ),
        "cli/test_kinds.py::test_a_run_ended_at_any_step_goes_on_as_if_it_had_not_been[encoder]",
    ),
    Bug(
        "the space before a mask is kept",
        "cli.fill:around",
        Replace('part.removesuffix(" ")', "part"),
        "cli/test_fill.py::test_a_mask_stands_in_the_place_of_one_token[x]",
    ),
    Bug(
        "translations are returned in order of length",
        "decoding.translate:translate_ids",
        Replace("found[row] = tokenizer.decode(ids)", "found.append(tokenizer.decode(ids))"),
        "decoding/test_translate.py::test_translations_come_in_the_order_of_the_texts",
    ),
    Bug(
        "a training source is also held out",
        "training.data.split:groups_of_alike",
        lambda groups_of_alike: lambda lines, tokenizer=None: list(range(len(lines))),
        "training/data/test_parallel.py::test_what_is_held_out_has_no_source_that_is_learnt",
    ),
    Bug(
        "a run of one minute compiles six batch lengths",
        "training.fitting:_lengths",
        gives(None),
        "training/test_fitting.py::test_a_run_of_few_minutes_has_few_batch_lengths",
    ),
    Bug(
        "the remaining time omits the evaluations before the last one",
        "training.speed:ScoringTime.remaining",
        Replace("self._targets(parts, 1)", "self._targets(1, 1)"),
        "training/test_speed.py::test_the_remaining_time_of_evaluations_is_what_they_take",
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
        "training/test_bleu.py::test_a_translation_is_at_most_as_long_as_the_longest_target",
    ),
    Bug(
        "evaluation time counts as training time",
        "training.speed:Clock.paused",
        Replace(
            "(self._since is not None, self.seconds, None)",
            "(self._since is not None, self.seconds, self._since)",
        ),
        "training/test_speed.py::test_seconds_are_those_of_training",
    ),
    Bug(
        "the feed-forward width does not follow embed_dim",
        "training.fitting:_feedforward_widths",
        Replace("max(1, round(scaled))", "width"),
        "training/test_fitted_sizes.py::"
        "test_a_multiple_of_embed_dim_multiplies_all_widths[2-llama-1.1b]",
    ),
    Bug(
        "the number of heads does not follow embed_dim",
        "training.fitting:_heads",
        Replace("before['head_dim'] is None", "False"),
        "training/test_fitted_sizes.py::"
        "test_a_multiple_of_embed_dim_multiplies_all_widths[2-llama-1.1b]",
    ),
    Bug(
        "a flag that nothing reads is accepted",
        "models.config.needs:check_read",
        Replace("not need.holds(values)", "False"),
        "cli/test_every_option.py::test_an_option_is_refused_where_nothing_reads_it",
    ),
    Bug(
        "the updates omit the learning rate",
        "training.step:make_step.step",
        takes(learning_rate=lambda _: 1.0),
        "training/test_optimizer.py::test_the_learning_rate_multiplies_the_updates",
    ),
    Bug(
        "the decay starts during the warm-up",
        "training.optimizer:Schedule._left",
        Replace("min(length, 1 - self.warmup / self.steps)", "length"),
        "training/test_optimizer.py::test_the_cosine_is_optax_own",
    ),
    Bug(
        "decay_fraction is a share of the steps after the warm-up",
        "training.optimizer:Schedule._left",
        Replace(
            "min(length, 1 - self.warmup / self.steps)",
            "length * (1 - self.warmup / self.steps)",
        ),
        "training/test_optimizer.py::test_decay_fraction_is_a_fraction_of_the_whole_run",
    ),
    Bug(
        "a resumed run jumps to the learning rate of its new end",
        "training.optimizer:Schedule.rate",
        takes(last=lambda _: None),
        "training/test_optimizer.py::test_the_learning_rate_changes_smoothly_whatever_the_updates_"
        "last",
    ),
    Bug(
        "the learning rate follows the clock of updates that still run",
        "training.loop:Training._update",
        Replace("jax.block_until_ready(self._unfinished)", "None"),
        "training/test_run_schedule.py::test_learning_rate_of_slow_updates_changes_smoothly",
    ),
    Bug(
        "processes exchange the time of slow updates every ten steps",
        "training.processes:Agreement.signal",
        Replace("min(MOST_STEPS, int(1 / per_step))", "MOST_STEPS"),
        "training/test_run_schedule.py::test_processes_exchange_the_time_of_slow_updates_at_each_"
        "step",
    ),
    Bug(
        "an optimizer takes stacked layers for one array",
        "training.optimizer:_over_layers",
        lambda _: lambda function, *trees: function(*trees),
        "training/test_per_layer.py::test_stacked_layers_are_updated_like_separate_arrays[lamb]",
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
        "training/test_fitting.py::test_the_learning_rate_of_a_preset_follows_the_optimizer",
    ),
    Bug(
        "a buffer occurs twice in the donated state",
        "training.step:_with_own_buffers",
        unchanged,
        "training/test_optax_optimizers.py::test_every_optimizer_makes_three_steps[prodigy]",
    ),
    # ---- the process
    Bug(
        "XLA allocates in its own threads",
        "runtime:keep_freed_memory",
        Replace("False", "True"),
        "test_runtime.py::test_a_call_uses_the_memory_of_the_call_before",
    ),
    Bug(
        "malloc returns freed memory to the kernel",
        "runtime:_MALLOC_OPTIONS",
        gives({}),
        "test_runtime.py::test_a_call_uses_the_memory_of_the_call_before",
    ),
    Bug(
        "resuming continues an older run if the newest one is damaged",
        "training.run_folders:_check_certain",
        Replace("isinstance(first, UnreadableRun)", "False"),
        "training/test_run_folders.py::"
        "test_resume_names_an_unreadable_run_and_never_replaces_a_newer_one",
    ),
    Bug(
        "resuming continues a copy of a run",
        "training.run_folders:_check_certain",
        Replace("len(copies) > 1", "False"),
        "training/test_run_folders.py::test_resume_asks_for_the_name_of_a_run_that_has_a_copy",
    ),
    # ---- comparison of runs
    Bug(
        "runs of different texts are drawn without a word",
        "training.compare:difference",
        gives(None),
        "cli/test_compare.py::test_runs_of_different_texts_or_tokenizers_are_said_not_to_be_"
        "comparable",
    ),
    Bug(
        "a run that diverged hides the others",
        "training.compare:_limit",
        gives(None),
        "cli/test_compare.py::test_a_run_that_diverged_does_not_hide_the_others",
    ),
)
