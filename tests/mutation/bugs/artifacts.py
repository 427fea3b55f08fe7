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
        "artifacts/test_figure_files.py::test_figure_replaces_lone_surrogates",
    ),
    Bug(
        "a checkpoint with other shapes is accepted",  # orbax#2972
        "artifacts.checkpoint:check_equal",
        gives(None),
        f"{TESTS}::test_checkpoint_with_different_structure_or_shapes_or_dtypes_is_rejected",
    ),
    Bug(
        "old checkpoints are deleted before the new one is written",  # verl#4873
        "artifacts.checkpoint:CheckpointWriter.save",
        deletes_first,
        f"{TESTS}::test_full_disk_prevents_save_from_starting",
    ),
    Bug(
        "an error of the background writer is dropped",
        "artifacts.checkpoint:CheckpointWriter.wait",
        drops_errors,
        f"{TESTS}::test_error_of_a_background_save_is_raised_at_the_next_save_or_wait_or_exit",
    ),
    Bug(
        "keep_period is ignored",
        "artifacts.checkpoint:CheckpointWriter.__init__",
        takes(keep_period=lambda _: None),
        f"{TESTS}::test_checkpoint_writer_keeps_periodic_and_newest_checkpoints",
    ),
    Bug(
        "a half-deleted checkpoint ends the run",
        "artifacts.checkpoint:Checkpoints.restore",
        inside("Unreadable", lambda _: KeyError),
        f"{TESTS}::test_half_deleted_checkpoint_is_skipped",
    ),
    Bug(
        "a folder's name is read as a glob pattern",
        "artifacts.checkpoint:without_wildcards",
        with_wildcards,
        f"{TESTS}::test_old_checkpoints_are_deleted_and_the_newest_checkpoint_is_restored",
    ),
    # ---- damage
    Bug(
        "a damaged checkpoint is restored",
        "artifacts.checkpoint:_read",
        inside("_check_damage", gives(None)),
        f"{DAMAGE}::test_damaged_checkpoint_is_skipped_with_warning",
    ),
    Bug(
        "a damaged checkpoint is called the last good one",
        "artifacts.checkpoint:Checkpoints.last",
        inside("_check_damage", gives(None)),
        f"{DAMAGE}::test_damage_to_any_checkpoint_file_is_detected",
    ),
    Bug(
        "a damaged checkpoint is skipped without a warning",
        "artifacts.checkpoint:_warn_about",
        inside("_step", gives(0)),  # no checkpoint counts as newer
        f"{DAMAGE}::test_damaged_checkpoint_is_skipped_with_warning "
        "cli/test_damage.py::test_generate_and_evaluate_name_a_damaged_checkpoint_and_use_the_previous_one",
    ),
    Bug(
        "a missing file does not count as damage",
        "artifacts.checkpoint:damaged_file",
        Replace("set(recorded) ^ _lines(folder)", "_lines(folder) - set(recorded)"),
        f"{DAMAGE}::test_damaged_checkpoint_is_skipped_with_warning",
    ),
    Bug(
        "an added file does not count as damage",
        "artifacts.checkpoint:damaged_file",
        Replace("set(recorded) ^ _lines(folder)", "set(recorded) - _lines(folder)"),
        f"{DAMAGE}::test_checkpoint_with_a_file_added_after_saving_counts_as_damaged",
    ),
    Bug(
        "a checkpoint without digests is preferred",
        "artifacts.checkpoint:Checkpoints._by_trust",
        lambda by_trust: lambda self: self._numbered()[::-1],
        f"{DAMAGE}::test_checkpoint_without_digests_is_restored_only_as_last_resort",
    ),
    Bug(
        "non-finite arrays are saved",
        "artifacts.checkpoint:CheckpointWriter.save",
        inside("not_finite", gives(None)),
        f"{DAMAGE}::test_checkpoint_with_nan_is_not_saved "
        "cli/test_damage.py::test_non_finite_parameters_stop_training",
    ),
    Bug(
        "non-finite arrays are restored",
        "artifacts.checkpoint:_read_arrays",
        inside("not_finite", gives(None)),
        f"{DAMAGE}::test_checkpoint_with_nan_is_not_restored",
    ),
    Bug(
        "a refused save does not name the last good checkpoint",
        "training.loop:Training.save",
        inside("NotFinite", lambda _: KeyError),
        "cli/test_damage.py::test_non_finite_parameters_stop_training",
    ),
    # ---- tokenizers
    Bug(
        "a lossy normalizer is not reported",
        "artifacts.byte_tokenizer:lossy_part",
        blind_to_normalizers,
        f"{LOSSLESS}::test_reason_for_a_lossy_tokenizer_names_the_lossy_component",
    ),
    Bug(
        "a pre-tokenizer that drops separators counts as lossless",
        "artifacts.byte_tokenizer:lossy_part",
        inside("list_steps", then(lambda steps: [{"type": step["type"]} for step in steps])),
        f"{LOSSLESS}::test_reason_for_a_lossy_tokenizer_names_the_lossy_component",
    ),
    Bug(
        "an added token that strips spaces is not reported",
        "artifacts.byte_tokenizer:lossy_part",
        inside("_plain", then(lambda all: [{**x, "lstrip": False, "rstrip": False} for x in all])),
        f"{LOSSLESS}::test_reason_for_a_lossy_tokenizer_names_the_lossy_component",
    ),
    Bug(
        "a text can encode to the end-of-text token",
        "artifacts.byte_tokenizer:ByteTokenizer._spell",
        lambda spell: lambda self, ids, text: ids,
        f"{LOSSLESS}::test_end_of_text_token_never_results_from_encoding "
        f"{LOSSLESS}::test_spelled_out_end_of_text_token_is_encoded_as_bytes",
    ),
    Bug(
        "unknown bytes can encode to the end-of-text token",
        "artifacts.byte_tokenizer:spellings",
        Replace("{end_of_text: special[end_of_text]}", "{}"),
        f"{LOSSLESS}::test_end_of_text_token_never_results_from_encoding",
    ),
    Bug(
        "a special token in a text is plain text even if the caller allows it",
        "artifacts.tokenizer:Tokenizer._encode_whole",
        Replace("self._parser if allow_special else self._backend", "self._backend"),
        f"{SPECIAL}::test_encoding_with_special_tokens_allowed_equals_tokenizers_library",
    ),
    Bug(
        "a long text is divided where its tokens depend on the text before",
        "artifacts.untrusted:_division",
        Replace("length >= 0 and whole[length:] == after", "True"),
        f"{PATTERNS}::test_splitting_long_text_gives_the_tokens_of_tokenizers_library",
    ),
    Bug(
        "a long text is divided where its tokens depend on the text after",
        "artifacts.untrusted:_division",
        Replace("apply(piece[start : place + more])[: len(near)] == near", "True"),
        f"{PATTERNS}::test_encoding_rejects_long_text_that_cannot_be_split",
    ),
    Bug(
        "a pattern of quadratic time gets a whole text",
        "artifacts.tokenizer:Tokenizer._encode_in_pieces",
        gives_whole_texts,
        f"{PATTERNS}::test_quadratic_regex_is_matched_on_bounded_pieces_of_text",
    ),
    Bug(
        "a pattern is not timed on repetitions of its own strings",
        "artifacts.untrusted:_units",
        gives([]),
        f"{PATTERNS}::test_tokenizer_regex_of_more_than_quadratic_time_is_rejected",
    ),
    Bug(
        "a special token at the end of a part of a text is not counted",
        "artifacts.spelled_tokens:spelled_tokens",
        Replace("len(text) - overlap", "len(text)"),
        f"{SPECIAL}::test_special_tokens_split_across_text_pieces_are_counted",
    ),
    Bug(
        "a run forgets that it reads special tokens in a text",
        "artifacts.saved:_parses_special",
        gives(False),
        f"{SPECIAL}::test_runs_and_saved_models_store_the_parse_special_setting",
    ),
    Bug(
        "long texts are split for every tokenizer",
        "artifacts.byte_tokenizer:ByteTokenizer.__init__",
        splits_always,
        f"{LOSSLESS}::test_splitting_long_text_does_not_change_tokens",
    ),
    Bug(
        "two tokens share an id",
        "artifacts.token_bytes:byte_level_bytes",
        Replace("len(set(vocabulary.values())) < len(vocabulary)", "False"),
        f"{LOSSLESS}::test_tokenizer_with_two_tokens_of_one_id_is_rejected",
    ),
    # ---- run folders
    Bug(
        "two processes train in one folder",
        "training.run_folders:_lock",
        gives(True),
        "cli/test_lock.py::test_a_second_process_cannot_train_in_a_locked_run_folder",
    ),
    Bug(
        "a line cut off by a kill is read",
        "artifacts.run:_whole_lines",
        lambda _: lambda path: path.read_text() if path.exists() else "",
        f"{RUN}::test_complete_lines_of_a_truncated_samples_file_are_kept "
        f"{RUN}::test_complete_lines_of_a_truncated_metrics_file_are_read",
    ),
    Bug(
        "a text begins with a token that the tokenizer does not add",
        "artifacts.subwords:Subwords.text_opening",
        then(lambda ids: ids or [1]),
        "artifacts/test_tokenizer.py::test_tokens_before_a_text_are_added_only_by_the_template_of_the_post_processor",
    ),
    Bug(
        "a line of a sample counts as the header of the next sample",
        "artifacts.run:_section",
        Replace("_LIKE_HEADER.sub(' ', text)", "text"),
        "artifacts/test_run.py::test_written_text_samples_are_read_unchanged",
    ),
)
