"""What lies on disk: checkpoints of another model, or lost while a new one is written;
damage that passes unnoticed; tokenizers that promise what they do not keep."""

from tests.mutation.quoted import Bug

CHECKPOINT = "artifacts/checkpoint.py"
TESTS = "artifacts/test_checkpoint.py"
DAMAGE = "artifacts/test_damage.py"
LOSSLESS = "artifacts/test_lossless.py"

BUGS = (
    Bug(
        "a checkpoint of another shape is taken",  # orbax#2972
        CHECKPOINT,
        "        refuse_difference(folder, found, like)\n",
        "",
        f"{TESTS}::test_another_tree_shape_or_dtype_is_refused_by_name",
    ),
    Bug(
        "the old checkpoints go before the new one is there",  # verl#4873
        CHECKPOINT,
        "        needed = sum(leaf.nbytes",
        "        for old in self.steps():\n"
        "            shutil.rmtree(self._folder / str(old))\n"
        "        needed = sum(leaf.nbytes",
        f"{TESTS}::test_without_room_on_the_disk_nothing_is_begun",
    ),
    Bug(
        "a checkpoint half deleted ends the run",
        CHECKPOINT,
        "            except Unreadable as error:\n",
        "            except KeyError as error:\n",
        f"{TESTS}::test_one_that_a_kill_left_half_deleted_is_passed_over",
    ),
    Bug(
        "a folder's name is taken for a pattern",
        CHECKPOINT,
        'any(character in str(folder) for character in "[]*?")',
        "False",
        f"{TESTS}::test_the_newest_is_restored_and_the_newest_few_are_kept",
    ),
    # ---- damage
    Bug(
        "a damaged checkpoint is restored",
        CHECKPOINT,
        "    _refuse_damage(folder)\n    params = ",
        "    params = ",
        f"{DAMAGE}::test_the_checkpoint_before_is_restored_and_the_file_is_named",
    ),
    Bug(
        "a damaged checkpoint is called the last good one",
        CHECKPOINT,
        "                _refuse_damage(folder)\n            except Unreadable:\n",
        "                pass\n            except Unreadable:\n",
        f"{DAMAGE}::test_whichever_file_is_damaged_the_checkpoint_before_is_the_last_good_one",
    ),
    Bug(
        "a damaged checkpoint is passed over in silence",
        CHECKPOINT,
        "        elif _step(folder) > _step(used):\n",
        "        elif False:\n",
        f"{DAMAGE}::test_the_checkpoint_before_is_restored_and_the_file_is_named "
        "cli/test_damage.py::test_it_is_named_and_the_one_before_is_used",
    ),
    Bug(
        "a lost file is no damage",
        "artifacts/digests.py",
        "    different = set(recorded) ^ _lines(folder)\n",
        "    different = _lines(folder) - set(recorded)\n",
        f"{DAMAGE}::test_the_checkpoint_before_is_restored_and_the_file_is_named",
    ),
    Bug(
        "an added file is no damage",
        "artifacts/digests.py",
        "    different = set(recorded) ^ _lines(folder)\n",
        "    different = set(recorded) - _lines(folder)\n",
        f"{DAMAGE}::test_a_file_that_no_save_left_is_damage",
    ),
    Bug(
        "a checkpoint without digests goes before one that has them",
        CHECKPOINT,
        "key=lambda path: (_has_digests(path), _step(path))",
        "key=_step",
        f"{DAMAGE}::test_one_without_digests_counts_only_where_none_has_them",
    ),
    Bug(
        "what is not finite is saved",
        CHECKPOINT,
        '        bad = not_finite({"params": params, "rest": rest})\n',
        "        bad = None\n",
        f"{DAMAGE}::test_what_is_not_finite_is_not_saved "
        "cli/test_damage.py::test_parameters_that_are_not_finite_end_the_run",
    ),
    Bug(
        "what is not finite is restored",
        CHECKPOINT,
        "    bad = not_finite(arrays)\n",
        "    bad = None\n",
        f"{DAMAGE}::test_what_is_not_finite_is_not_restored",
    ),
    Bug(
        "a save that is refused does not name the last good checkpoint",
        "training/loop.py",
        "            except NotFinite as error:\n",
        "            except KeyError as error:\n",
        "cli/test_damage.py::test_parameters_that_are_not_finite_end_the_run",
    ),
    # ---- tokenizers
    Bug(
        "a normaliser changes texts and nothing is said",
        "artifacts/lossless.py",
        '    if parts["normalizer"] is not None:\n',
        "    if False:\n",
        f"{LOSSLESS}::test_what_may_change_a_text_is_named",
    ),
    Bug(
        "a pre-tokenizer that drops what it divides at is lossless",
        "artifacts/lossless.py",
        'step["type"] not in _DIVIDES or removes',
        'step["type"] not in _DIVIDES',
        f"{LOSSLESS}::test_what_may_change_a_text_is_named",
    ),
    Bug(
        "an added token takes in spaces and nothing is said",
        "artifacts/lossless.py",
        '        if token["lstrip"] or token["rstrip"]:\n',
        "        if False:\n",
        f"{LOSSLESS}::test_what_may_change_a_text_is_named",
    ),
    Bug(
        "a text encodes to the end of text",
        "artifacts/tokenizer.py",
        "        if self._spelled.keys().isdisjoint(ids):\n",
        "        if True:\n",
        f"{LOSSLESS}::test_no_text_encodes_to_the_end_of_text_whoever_made_the_tokenizer "
        f"{LOSSLESS}::test_an_end_of_text_found_in_a_text_is_written_in_its_bytes",
    ),
    Bug(
        "without all bytes, what is unknown is the end of text",
        "artifacts/tokenizer.py",
        "        special = {end_of_text: special[end_of_text]}\n",
        "        special = {}\n",
        f"{LOSSLESS}::test_no_text_encodes_to_the_end_of_text_whoever_made_the_tokenizer",
    ),
    Bug(
        "texts are cut whatever the tokenizer",
        "artifacts/tokenizer.py",
        "self._may_be_cut = self.lossless and divides_at_spaces(parts)",
        "self._may_be_cut = True",
        f"{LOSSLESS}::test_no_text_is_cut_where_that_changes_its_tokens",
    ),
    Bug(
        "two tokens share an id",
        "artifacts/tokenizer.py",
        "    if len(set(vocabulary.values())) < len(vocabulary):\n",
        "    if False:\n",
        f"{LOSSLESS}::test_two_tokens_with_one_id_are_refused",
    ),
    Bug(
        "two processes train in one folder",
        "artifacts/lock.py",
        "        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "        pass\n",
        "cli/test_lock.py::test_a_second_process_is_refused_until_the_first_is_gone",
    ),
    Bug(
        "what a kill left of a line is read",
        "artifacts/run.py",
        '    return data[: data.rfind(b"\\n") + 1].decode(errors="replace")\n',
        "    return data.decode()\n",
        "artifacts/test_run.py::test_a_file_of_samples_may_be_cut_at_any_byte "
        "artifacts/test_run.py::test_a_file_of_metrics_may_be_cut_at_any_byte",
    ),
)
