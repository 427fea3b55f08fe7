"""What lies on disk: checkpoints of another model, or lost while a new one is written."""

from tests.mutation.bug import Bug

CHECKPOINT = "artifacts/checkpoint.py"
TESTS = "artifacts/test_checkpoint.py"

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
)
