"""What lies on disk: checkpoints of another model, or lost while a new one is written;
damage that passes unnoticed."""

from tests.mutation.bug import Bug

CHECKPOINT = "artifacts/checkpoint.py"
TESTS = "artifacts/test_checkpoint.py"
DAMAGE = "artifacts/test_damage.py"

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
)
