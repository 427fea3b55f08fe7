"""Losses, updates, dropout and what a run keeps."""

from tests.mutation.quoted import (
    BLOCKS,
    DISCIPLINE,
    LOSSES,
    LOSSES_FILE,
    STEP,
    Bug,
)

BUGS = (
    # ---- losses and updates: transformers#34191, prime-rl#1961, optax#1185, flax#677
    Bug(
        "micro-batches average their averages",
        "training/step.py",
        "        return mean * count, count\n",
        "        return mean, jnp.float32(1)\n",
        f"{STEP}::test_micro_batches_give_the_full_batch_whatever_their_token_counts",
    ),
    Bug(
        "padding counted in the denominator",
        LOSSES_FILE,
        "jnp.where(weights != 0, losses, 0.0)).sum(), weights.sum()",
        "jnp.where(weights != 0, losses, 0.0)).sum(), jnp.float32(weights.size)",
        LOSSES,
    ),
    Bug(
        "label −100 wraps to a real class",
        LOSSES_FILE,
        "    picked = jnp.where(known, picked, jnp.nan)\n",
        "    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]\n",
        LOSSES,
    ),
    Bug(
        "the loss is taken in bfloat16",
        LOSSES_FILE,
        "    logits = logits.astype(jnp.float32)\n    total",
        "    total",
        LOSSES,
    ),
    Bug(
        "targets not shifted",
        "training/data.py",
        "        return Batch(rows[:, :-1], rows[:, 1:])",
        "        return Batch(rows[:, :-1], rows[:, :-1])",
        "training/test_data.py::test_targets_are_the_inputs_moved_by_one",
    ),
    Bug(
        "weight decay by rank: stacked biases decay",
        "training/optimizer.py",
        "lambda path, _: path[-1].key not in _VECTORS",
        "lambda path, leaf: leaf.ndim > 1",
        f"{STEP}::test_decay_is_for_matrices_alone",
    ),
    # ---- randomness: nanoGPT#240, flash-attention#314
    Bug(
        "the same dropout key in each layer",
        BLOCKS,
        "jax.random.split(dropout_key, config.num_layers)",
        "jax.random.split(dropout_key, 1)[jnp.zeros(config.num_layers, int)]",
        f"{DISCIPLINE}::test_each_layer_and_each_place_has_its_own_noise",
    ),
    Bug(
        "the same dropout key in each step",
        "training/step.py",
        "        key = jax.random.fold_in(state.key, state.step)\n",
        "        key = state.key\n",
        f"{STEP}::test_dropout_differs_from_step_to_step_and_repeats_with_the_seed",
    ),
    Bug(
        "dropout without a key",
        "functional/dropout.py",
        "    if key is None or rate == 0.0:\n        return x\n",
        "    if rate == 0.0:\n        return x\n    key = jax.random.key(0) if key is None else key\n",
        f"{DISCIPLINE}::test_without_a_key_dropout_is_off",
    ),
    Bug(
        "a fraction that is given has a minimum",
        "training/prepare.py",
        "    return DEFAULT_SPLIT if config.held_out is None else (config.held_out, 0)\n",
        "    return DEFAULT_SPLIT if config.held_out is None else (config.held_out, 500_000)\n",
        "training/test_prepare.py::test_the_flag_says_how_much_is_held_out",
    ),
    Bug(
        "a carriage return within a line ends it",
        "training/pairs.py",
        'encoding="utf-8", newline="\\n")',
        'encoding="utf-8")',
        "training/test_pairs.py::test_a_line_ends_at_a_line_feed_alone",
    ),
    Bug(
        "the last evaluation scores the whole text alone",
        "training/loop.py",
        "                line = _held_out_line(self._score_all(variables), score)\n",
        "                line = _held_out_line(self._score_all(variables))\n",
        "cli/test_verbs.py::test_every_evaluation_scores_the_same_windows",
    ),
    Bug(
        "the first windows alone are scored",
        "training/evaluate.py",
        "np.linspace(0, len(rows) - 1, min(number, len(rows)))",
        "np.arange(min(number, len(rows)))",
        "training/test_evaluate.py::test_windows_are_spread_over_the_whole_text",
    ),
    Bug(
        "a curve connects scores of few tokens and of all",
        "training/picture.py",
        "                found.setdefault(line.get(scored), []).append(point)\n",
        "                found.setdefault(None, []).append(point)\n",
        "training/test_picture.py::test_a_curve_connects_scores_of_the_same_tokens",
    ),
    Bug(
        "a seed beyond 32 bits is taken",
        "training/config.py",
        "    if not 0 <= seed < 2**32:\n",
        "    if seed < 0:\n",
        "training/test_config.py::test_a_seed_without_a_key_of_its_own_is_refused",
    ),
    Bug(
        "a count beyond 32 bits is taken",
        "training/config.py",
        "            _refuse_huge(config)\n",
        "            pass\n",
        "training/test_config.py::test_a_count_that_no_device_holds_is_refused",
    ),
    # ---- what is shown: rich reads markup, matplotlib mathematics
    Bug(
        "a sample is read as markup",
        "training/screen.py",
        "        self._console.print(_Verbatim(text))\n",
        "        self._console.print(text)\n",
        "training/test_screen.py::test_text_is_shown_as_it_is",
    ),
    Bug(
        "a run's name is read as mathematics",
        "artifacts/picture.py",
        "    figure.suptitle(title, parse_math=False)\n",
        "    figure.suptitle(title)\n",
        "training/test_screen.py::test_a_picture_of_any_title",
    ),
    Bug(
        "a character that a terminal lacks ends the run",
        "cli/__init__.py",
        '        sys.stdout.reconfigure(errors="backslashreplace")\n',
        "        pass\n",
        "cli/test_errors.py::test_text_that_a_terminal_cannot_show_does_not_end_a_verb",
    ),
    # ---- checkpoints: orbax#2972, gpt-neox#308
    Bug(
        "metrics after the restored step are kept",
        "training/loop.py",
        "        self.folder.cut_after(self.step)\n",
        "",
        "training/test_resume.py::test_ended_twice_and_resumed_equals_uninterrupted",
    ),
    Bug(
        "the data position is not restored",
        "training/loop.py",
        '            self.batches.restore(progress["data"])\n',
        "",
        "training/test_resume.py::test_ended_twice_and_resumed_equals_uninterrupted",
    ),
)
