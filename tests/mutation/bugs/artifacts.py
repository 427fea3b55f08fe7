"""Bugs of files: checkpoints lost or mixed up, undetected damage, and lossy tokenizers."""

import shutil
from contextlib import suppress

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives, inside, takes, then, unchanged

TESTS = "artifacts/test_checkpoint.py"
DAMAGE = "artifacts/test_damage.py"
LOSSLESS = "artifacts/test_lossless.py"
SPECIAL = "artifacts/test_special_words.py"
RUN = "artifacts/test_run.py"
PATTERNS = "artifacts/test_patterns.py"


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
    return lambda parts, *others: lossy_part({**parts, "normalizer": None}, *others)


def gives_whole_texts(encode_in_pieces):
    return lambda self, texts, allow_special: self._encode_whole(texts, allow_special)


def drops_errors(wait):
    def broken(self):
        with suppress(Exception):
            wait(self)

    return broken


def splits_always(init):
    def broken(self, backend):
        init(self, backend)
        self._may_be_cut = True

    return broken


BUGS = (
    Bug(
        "pictures and pages keep lone surrogates",
        "artifacts.files:without_surrogates",
        unchanged,
        "artifacts/test_figure_files.py::test_a_picture_shows_a_replacement_character",
    ),
    Bug(
        "a checkpoint with other shapes is accepted",  # orbax#2972
        "artifacts.checkpoint:check_equal",
        gives(None),
        f"{TESTS}::test_another_tree_shape_or_dtype_is_refused_by_name",
    ),
    Bug(
        "old checkpoints are deleted before the new one is written",  # verl#4873
        "artifacts.checkpoint:CheckpointWriter.save",
        deletes_first,
        f"{TESTS}::test_without_room_on_the_disk_nothing_is_begun",
    ),
    Bug(
        "an error of the background writer is dropped",
        "artifacts.checkpoint:CheckpointWriter.wait",
        drops_errors,
        f"{TESTS}::test_what_fails_beside_training_is_raised",
    ),
    Bug(
        "keep_every is ignored",
        "artifacts.checkpoint:CheckpointWriter.__init__",
        takes(keep_every=lambda _: None),
        f"{TESTS}::test_the_newest_and_every_so_many_are_kept",
    ),
    Bug(
        "a half-deleted checkpoint ends the run",
        "artifacts.checkpoint:Checkpoints.restore",
        inside("Unreadable", lambda _: KeyError),
        f"{TESTS}::test_one_that_a_kill_left_half_deleted_is_passed_over",
    ),
    Bug(
        "a folder's name is read as a glob pattern",
        "artifacts.checkpoint:without_wildcards",
        with_wildcards,
        f"{TESTS}::test_the_newest_is_restored_and_the_newest_few_are_kept",
    ),
    # ---- damage
    Bug(
        "a damaged checkpoint is restored",
        "artifacts.checkpoint:_read",
        inside("_check_damage", gives(None)),
        f"{DAMAGE}::test_the_checkpoint_before_is_restored_and_the_file_is_named",
    ),
    Bug(
        "a damaged checkpoint is called the last good one",
        "artifacts.checkpoint:Checkpoints.last",
        inside("_check_damage", gives(None)),
        f"{DAMAGE}::test_whichever_file_is_damaged_the_checkpoint_before_is_the_last_good_one",
    ),
    Bug(
        "a damaged checkpoint is skipped without a warning",
        "artifacts.checkpoint:_warn_of",
        inside("_step", gives(0)),  # no checkpoint counts as newer
        f"{DAMAGE}::test_the_checkpoint_before_is_restored_and_the_file_is_named "
        "cli/test_damage.py::test_it_is_named_and_the_one_before_is_used",
    ),
    Bug(
        "a missing file does not count as damage",
        "artifacts.checkpoint:damaged_file",
        Replace("set(recorded) ^ _lines(folder)", "_lines(folder) - set(recorded)"),
        f"{DAMAGE}::test_the_checkpoint_before_is_restored_and_the_file_is_named",
    ),
    Bug(
        "an added file does not count as damage",
        "artifacts.checkpoint:damaged_file",
        Replace("set(recorded) ^ _lines(folder)", "set(recorded) - _lines(folder)"),
        f"{DAMAGE}::test_a_file_that_no_save_left_is_damage",
    ),
    Bug(
        "a checkpoint without digests is preferred",
        "artifacts.checkpoint:Checkpoints._by_trust",
        lambda by_trust: lambda self: self._numbered()[::-1],
        f"{DAMAGE}::test_one_without_digests_counts_only_where_none_has_them",
    ),
    Bug(
        "non-finite arrays are saved",
        "artifacts.checkpoint:CheckpointWriter.save",
        inside("not_finite", gives(None)),
        f"{DAMAGE}::test_what_is_not_finite_is_not_saved "
        "cli/test_damage.py::test_parameters_that_are_not_finite_end_the_run",
    ),
    Bug(
        "non-finite arrays are restored",
        "artifacts.checkpoint:_read_arrays",
        inside("not_finite", gives(None)),
        f"{DAMAGE}::test_what_is_not_finite_is_not_restored",
    ),
    Bug(
        "a refused save does not name the last good checkpoint",
        "training.loop:Training.save",
        inside("NotFinite", lambda _: KeyError),
        "cli/test_damage.py::test_parameters_that_are_not_finite_end_the_run",
    ),
    # ---- tokenizers
    Bug(
        "a lossy normalizer is not reported",
        "artifacts.byte_tokenizer:lossy_part",
        blind_to_normalizers,
        f"{LOSSLESS}::test_what_may_change_a_text_is_named",
    ),
    Bug(
        "a pre-tokenizer that drops separators counts as lossless",
        "artifacts.byte_tokenizer:lossy_part",
        inside("steps_of", then(lambda steps: [{"type": step["type"]} for step in steps])),
        f"{LOSSLESS}::test_what_may_change_a_text_is_named",
    ),
    Bug(
        "an added token that strips spaces is not reported",
        "artifacts.byte_tokenizer:lossy_part",
        inside("_plain", then(lambda all: [{**x, "lstrip": False, "rstrip": False} for x in all])),
        f"{LOSSLESS}::test_what_may_change_a_text_is_named",
    ),
    Bug(
        "a text can encode to the end-of-text token",
        "artifacts.byte_tokenizer:ByteTokenizer._spell",
        lambda spell: lambda self, ids, text: ids,
        f"{LOSSLESS}::test_no_text_encodes_to_the_end_of_text_whoever_made_the_tokenizer "
        f"{LOSSLESS}::test_an_end_of_text_found_in_a_text_is_written_in_its_bytes",
    ),
    Bug(
        "unknown bytes can encode to the end-of-text token",
        "artifacts.byte_tokenizer:spellings",
        Replace("{end_of_text: special[end_of_text]}", "{}"),
        f"{LOSSLESS}::test_no_text_encodes_to_the_end_of_text_whoever_made_the_tokenizer",
    ),
    Bug(
        "a special token in a text is plain text even if the caller allows it",
        "artifacts.tokenizer:Tokenizer._encode_whole",
        Replace("self._parser if allow_special else self._backend", "self._backend"),
        f"{SPECIAL}::test_allowed_special_tokens_get_the_ids_of_the_library",
    ),
    Bug(
        "a long text is divided where its tokens depend on the text before",
        "artifacts.untrusted:_division",
        Replace("length >= 0 and whole[length:] == after", "True"),
        f"{PATTERNS}::test_the_pieces_of_a_long_text_have_the_tokens_of_the_library",
    ),
    Bug(
        "a long text is divided where its tokens depend on the text after",
        "artifacts.untrusted:_division",
        Replace("apply(piece[start : place + more])[: len(near)] == near", "True"),
        f"{PATTERNS}::test_a_text_without_a_place_to_divide_is_refused",
    ),
    Bug(
        "a pattern of quadratic time gets a whole text",
        "artifacts.tokenizer:Tokenizer._encode_in_pieces",
        gives_whole_texts,
        f"{PATTERNS}::test_a_pattern_of_quadratic_time_gets_bounded_pieces",
    ),
    Bug(
        "a pattern is not timed on repetitions of its own strings",
        "artifacts.untrusted:_units",
        gives([]),
        f"{PATTERNS}::test_a_pattern_of_more_than_quadratic_time_is_refused",
    ),
    Bug(
        "a special token at the end of a part of a text is not counted",
        "artifacts.tokenizer:spelled_tokens",
        Replace("len(text) - overlap", "len(text)"),
        f"{SPECIAL}::test_spelled_out_special_tokens_are_counted_in_any_parts_of_a_text",
    ),
    Bug(
        "a run forgets that it reads special tokens in a text",
        "artifacts.saved:_parses_special",
        gives(False),
        f"{SPECIAL}::test_runs_and_saved_folders_remember_how_special_tokens_are_read",
    ),
    Bug(
        "long texts are split for every tokenizer",
        "artifacts.byte_tokenizer:ByteTokenizer.__init__",
        splits_always,
        f"{LOSSLESS}::test_no_text_is_cut_where_that_changes_its_tokens",
    ),
    Bug(
        "two tokens share an id",
        "artifacts.byte_tokenizer:vocabulary_bytes",
        Replace("len(set(vocabulary.values())) < len(vocabulary)", "False"),
        f"{LOSSLESS}::test_two_tokens_with_one_id_are_refused",
    ),
    # ---- run folders
    Bug(
        "two processes train in one folder",
        "training.run_folders:_lock",
        gives(True),
        "cli/test_lock.py::test_a_second_process_is_refused_until_the_first_is_gone",
    ),
    Bug(
        "a line cut off by a kill is read",
        "artifacts.run:_whole_lines",
        lambda _: lambda path: path.read_text() if path.exists() else "",
        f"{RUN}::test_a_file_of_samples_may_be_cut_at_any_byte "
        f"{RUN}::test_a_file_of_metrics_may_be_cut_at_any_byte",
    ),
    Bug(
        "a text begins with a token that the tokenizer does not add",
        "artifacts.subwords:Subwords.text_opening",
        then(lambda ids: ids or [1]),
        "artifacts/test_tokenizer.py::"
        "test_only_the_template_of_a_tokenizer_puts_tokens_before_a_text",
    ),
    Bug(
        "a line of a sample counts as the header of the next sample",
        "artifacts.run:_section",
        Replace("_LIKE_HEADER.sub(' ', text)", "text"),
        "artifacts/test_run.py::test_samples_are_read_as_they_were_written",
    ),
)
