"""Bugs of training data: reading, splitting, packing and sharing between processes."""

import jax
import numpy as np

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives, inside, takes, then

CORPUS, RECORDS = "training/data/test_corpus.py", "training/data/test_records.py"
SPLIT, HELD_OUT = "training/data/test_split.py", "training/data/test_held_out.py"
PACKING, PARALLEL = "training/data/test_packing.py", "training/data/test_parallel.py"
SEPARATORS = "training/data/test_separators.py"
TOKENS, WINDOWS = "training/data/test_tokens.py", "training/data/test_windows.py"

WRITTEN = "_size(header, done.num_tokens)"


def of_one_batch(indices):
    return lambda self, batch_size, accumulate=1: indices(self, batch_size * accumulate)


def of_own_key(hidden):
    def broken(self, key, tokens, is_text):
        return hidden(self, jax.random.fold_in(key, self._indices[0]), tokens, is_text)

    return broken


BUGS = (
    Bug(
        "a file with written separators is one document",
        "training.data.separators:with_separators",
        lambda divide: lambda source: source,
        f"{SEPARATORS}::test_end_of_text_token_in_a_text_file_separates_documents "
        f"{SEPARATORS}::test_every_document_of_a_split_text_begins_and_ends_with_end_of_text",
    ),
    Bug(
        "a text that mentions the end of text is divided there",
        "training.data.separators:_is_mentioned",
        gives(False),
        f"{SEPARATORS}::test_a_text_that_mentions_the_end_of_text_token_is_not_split",
    ),
    Bug(
        "a separator at the end of a part of a text is missed",
        "training.data.separators:divided",
        Replace("len(text) - _LONGEST + 1", "len(text)"),
        f"{SEPARATORS}::test_splitting_at_end_of_text_is_independent_of_chunk_sizes",
    ),
    Bug(
        "documents of a window see each other",
        "training.data.windows:document_segment_ids",
        inside("places_in_documents", then(lambda places: places + 1)),
        f"{WINDOWS}::test_each_document_of_a_packed_window_has_its_own_segment_id",
    ),
    Bug(
        "a masked window uses the previous tokens' documents",
        "training.data.windows:WindowBatches.places",
        then(lambda places: np.roll(places, 1, axis=-1)),
        f"{PACKING}::test_special_tokens_are_never_masked_or_inserted",
    ),
    Bug(
        "document marks are masked like words",
        "training.tasks.masked_tokens:MaskedBatches._hidden",
        takes(is_text=np.ones_like),
        f"{PACKING}::test_special_tokens_are_never_masked_or_inserted",
    ),
    Bug(
        "special tokens are masked like words",
        "training.evaluate:unmaskable_ids",
        gives(()),
        f"{PACKING}::test_special_tokens_are_never_masked_or_inserted "
        "training/test_text.py::test_evaluate_scores_the_same_held_out_targets_as_training",
    ),
    Bug(
        "documents are split wherever the first token recurs",
        "training.data.tokens:open_tokens",
        then(lambda x: x._replace(starts=np.flatnonzero(x.ids == x.ids[0]))),
        f"{TOKENS}::test_document_boundaries_are_independent_of_token_ids_in_the_text",
    ),
    Bug(
        "a held-out document is trained on in other letter case",
        "training.data.corpus:Documents.drop_alike",
        gives([]),
        "training/test_text.py::test_evaluate_scores_the_same_held_out_targets_as_training",
    ),
    Bug(
        "a held-out source is trained on in other letter case",
        "training.data.split:similarity_groups",
        lambda similarity_groups: lambda lines, tokenizer=None: list(lines),
        f"{PARALLEL}::test_held_out_sources_differ_in_tokens_from_training_sources",
    ),
    Bug(
        "the remainder of an epoch is trained on twice",
        "training.data.windows:WindowBatches._at",
        then(lambda found: (found[0], np.full_like(found[1], found[1].max()))),
        f"{WINDOWS}::test_each_token_of_packed_documents_is_a_target_once_per_epoch",
    ),
    Bug(
        "blocks of windows overlap",
        "training.data.windows:WindowBatches._window",
        Replace("blocks * int(order[inside])", "int(order[inside])"),
        f"{WINDOWS}::test_windows_of_a_large_text_are_shuffled_in_blocks",
    ),
    Bug(
        "every block is shuffled with the same random words",
        "training.data.windows:WindowBatches._words",
        takes(start=lambda start: start % 4),
        f"{WINDOWS}::test_random_numbers_of_a_range_equal_that_slice_of_the_whole_sequence",
    ),
    Bug(
        "a process reads whole micro-batches, not a share of each",
        "training.batch:Share.indices",
        of_one_batch,
        f"{WINDOWS}::test_concatenated_window_batches_of_processes_equal_the_batch_of_one_process",
    ),
    Bug(
        "each process masks with its own key",
        "training.tasks.masked_tokens:MaskedBatches._hidden",
        of_own_key,
        f"{PACKING}::test_concatenated_packed_batches_of_processes_equal_the_batch_of_one_process",
    ),
    Bug(
        "duplicate documents are not removed",
        "training.data.corpus:Documents.drop_copies",
        gives([]),
        f"{RECORDS}::test_duplicate_and_empty_records_are_dropped_and_counted",
    ),
    Bug(
        "a changed file is read without an error",
        "training.data.corpus:Documents.__iter__",
        Replace("number != end", "False"),
        f"{RECORDS}::test_a_file_that_changes_during_reading_raises_an_error",
    ),
    Bug(
        "a damaged record ends the file silently",
        "training.data.records:refused",
        takes(number=lambda _: 1),
        f"{RECORDS}::test_error_for_damaged_json_record_states_its_line_number",
    ),
    Bug(
        "a character is split at the end of a chunk",
        "training.data.documents:TextFile.pieces",
        Replace("decoder.decode(data, final=not data)", "data.decode(errors='replace')"),
        f"{RECORDS}::test_text_files_are_read_in_pieces_of_limited_size",
    ),
    Bug(
        "a split document loses its line break",
        "training.data.split:_cut_position",
        Replace("at + line_break + 1", "at + line_break"),
        f"{SPLIT}::test_a_single_document_is_split_at_a_line_break",
    ),
    Bug(
        "tokenized documents are tokenized again after a kill",
        "training.data.tokens:_Progress.read",
        lambda _: lambda cls, journal, header, unfinished: cls(),
        f"{TOKENS}::test_writing_a_token_file_continues_after_an_interruption",
    ),
    Bug(
        "half-written tokens stay after a kill",
        "training.data.tokens:write_tokens",
        Replace(WRITTEN, f"max({WRITTEN}, unfinished.stat().st_size)"),
        f"{TOKENS}::test_writing_a_token_file_continues_after_an_interruption",
    ),
    Bug(
        "the unfinished tokens of another text are continued",
        "training.data.tokens:_Progress.read",
        Replace('content["header"] == header', "True"),
        f"{TOKENS}::test_unfinished_token_file_of_another_text_is_discarded",
    ),
    Bug(
        "lines with other indentation count as new",
        "training.data.split:_long",
        Replace('" ".join(normalized(line).split())', "normalized(line)"),
        f"{HELD_OUT}::test_long_held_out_lines_that_occur_in_training_text_are_counted",
    ),
)
