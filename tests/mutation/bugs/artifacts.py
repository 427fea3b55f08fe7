"""What lies on disk: checkpoints of another model, or lost while a new one is written;
damage that passes unnoticed; tokenizers that promise what they do not keep."""

import shutil

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives

TESTS = "artifacts/test_checkpoint.py"
DAMAGE = "artifacts/test_damage.py"
LOSSLESS = "artifacts/test_lossless.py"
RUN = "artifacts/test_run.py"


def deletes_first(save):
    def broken(self, step, params, rest, progress):
        for old in self._folder.glob("*"):
            shutil.rmtree(old)
        return save(self, step, params, rest, progress)

    return broken


def with_wildcards(without_wildcards):
    def broken(folder):
        yield folder

    return broken


def blind_to_normalizers(lossy_part):
    return lambda parts, token_bytes: lossy_part({**parts, "normalizer": None}, token_bytes)


BUGS = (
    Bug(
        "a checkpoint of another shape is taken",  # orbax#2972
        "artifacts.checkpoint:refuse_difference",
        gives(None),
        f"{TESTS}::test_another_tree_shape_or_dtype_is_refused_by_name",
    ),
    Bug(
        "the old checkpoints go before the new one is there",  # verl#4873
        "artifacts.checkpoint_writer:CheckpointWriter.save",
        deletes_first,
        f"{TESTS}::test_without_room_on_the_disk_nothing_is_begun",
    ),
    Bug(
        "what fails beside training is forgotten",
        "artifacts.checkpoint_writer:CheckpointWriter.wait",
        Replace("writing.result()", "writing.exception()"),
        f"{TESTS}::test_what_fails_beside_training_is_raised",
    ),
    Bug(
        "checkpoints of every so many steps are not kept",
        "artifacts.checkpoint_writer:CheckpointWriter.__init__",
        Replace("[EveryNSteps(keep_every)] if keep_every else []", "[]"),
        f"{TESTS}::test_the_newest_and_every_so_many_are_kept",
    ),
    Bug(
        "a checkpoint half deleted ends the run",
        "artifacts.checkpoint:Checkpoints.restore",
        Replace("Unreadable", "KeyError"),
        f"{TESTS}::test_one_that_a_kill_left_half_deleted_is_passed_over",
    ),
    Bug(
        "a folder's name is taken for a pattern",
        "artifacts.checkpoint:without_wildcards",
        with_wildcards,
        f"{TESTS}::test_the_newest_is_restored_and_the_newest_few_are_kept",
    ),
    # ---- damage
    Bug(
        "a damaged checkpoint is restored",
        "artifacts.checkpoint:_read",
        Replace("_refuse_damage(folder)", "None"),
        f"{DAMAGE}::test_the_checkpoint_before_is_restored_and_the_file_is_named",
    ),
    Bug(
        "a damaged checkpoint is called the last good one",
        "artifacts.checkpoint:Checkpoints.last",
        Replace("_refuse_damage(folder)", "None"),
        f"{DAMAGE}::test_whichever_file_is_damaged_the_checkpoint_before_is_the_last_good_one",
    ),
    Bug(
        "a damaged checkpoint is passed over in silence",
        "artifacts.checkpoint:_warn_of",
        Replace("_step(folder) > _step(used)", "False"),
        f"{DAMAGE}::test_the_checkpoint_before_is_restored_and_the_file_is_named "
        "cli/test_damage.py::test_it_is_named_and_the_one_before_is_used",
    ),
    Bug(
        "a lost file is no damage",
        "artifacts.digests:damaged_file",
        Replace("set(recorded) ^ _lines(folder)", "_lines(folder) - set(recorded)"),
        f"{DAMAGE}::test_the_checkpoint_before_is_restored_and_the_file_is_named",
    ),
    Bug(
        "an added file is no damage",
        "artifacts.digests:damaged_file",
        Replace("set(recorded) ^ _lines(folder)", "set(recorded) - _lines(folder)"),
        f"{DAMAGE}::test_a_file_that_no_save_left_is_damage",
    ),
    Bug(
        "a checkpoint without digests goes before one that has them",
        "artifacts.checkpoint:Checkpoints._by_trust",
        lambda by_trust: lambda self: self._numbered()[::-1],
        f"{DAMAGE}::test_one_without_digests_counts_only_where_none_has_them",
    ),
    Bug(
        "what is not finite is saved",
        "artifacts.checkpoint_writer:CheckpointWriter.save",
        Replace('not_finite({"params": params, "rest": rest})', "None"),
        f"{DAMAGE}::test_what_is_not_finite_is_not_saved "
        "cli/test_damage.py::test_parameters_that_are_not_finite_end_the_run",
    ),
    Bug(
        "what is not finite is restored",
        "artifacts.checkpoint:_read_arrays",
        Replace("not_finite(arrays)", "None"),
        f"{DAMAGE}::test_what_is_not_finite_is_not_restored",
    ),
    Bug(
        "a save that is refused does not name the last good checkpoint",
        "training.loop:Training.save",
        Replace("NotFinite", "KeyError"),
        "cli/test_damage.py::test_parameters_that_are_not_finite_end_the_run",
    ),
    # ---- tokenizers
    Bug(
        "a normaliser changes texts and nothing is said",
        "artifacts.lossless:lossy_part",
        blind_to_normalizers,
        f"{LOSSLESS}::test_what_may_change_a_text_is_named",
    ),
    Bug(
        "a pre-tokenizer that drops what it divides at is lossless",
        "artifacts.lossless:lossy_part",
        Replace('step["type"] not in _DIVIDES or removes', 'step["type"] not in _DIVIDES'),
        f"{LOSSLESS}::test_what_may_change_a_text_is_named",
    ),
    Bug(
        "an added token takes in spaces and nothing is said",
        "artifacts.lossless:lossy_part",
        Replace('token["lstrip"] or token["rstrip"]', "False"),
        f"{LOSSLESS}::test_what_may_change_a_text_is_named",
    ),
    Bug(
        "a text encodes to the end of text",
        "artifacts.tokenizer:Tokenizer._spell",
        lambda spell: lambda self, ids: ids,
        f"{LOSSLESS}::test_no_text_encodes_to_the_end_of_text_whoever_made_the_tokenizer "
        f"{LOSSLESS}::test_an_end_of_text_found_in_a_text_is_written_in_its_bytes",
    ),
    Bug(
        "without all bytes, what is unknown is the end of text",
        "artifacts.byte_tokens:spelled",
        Replace("{end_of_text: special[end_of_text]}", "{}"),
        f"{LOSSLESS}::test_no_text_encodes_to_the_end_of_text_whoever_made_the_tokenizer",
    ),
    Bug(
        "texts are cut whatever the tokenizer",
        "artifacts.tokenizer:Tokenizer.__init__",
        Replace("self.lossless and divides_at_spaces(parts)", "True"),
        f"{LOSSLESS}::test_no_text_is_cut_where_that_changes_its_tokens",
    ),
    Bug(
        "two tokens share an id",
        "artifacts.byte_tokens:token_bytes",
        Replace("len(set(vocabulary.values())) < len(vocabulary)", "False"),
        f"{LOSSLESS}::test_two_tokens_with_one_id_are_refused",
    ),
    # ---- a run's folder
    Bug(
        "two processes train in one folder",
        "artifacts.lock:_lock",
        gives(True),
        "cli/test_lock.py::test_a_second_process_is_refused_until_the_first_is_gone",
    ),
    Bug(
        "what a kill left of a line is read",
        "artifacts.run:_whole_lines",
        Replace('data[: data.rfind(b"\\n") + 1].decode(errors="replace")', "data.decode()"),
        f"{RUN}::test_a_file_of_samples_may_be_cut_at_any_byte "
        f"{RUN}::test_a_file_of_metrics_may_be_cut_at_any_byte",
    ),
)
