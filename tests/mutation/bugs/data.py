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


def of_one_batch(rows):
    return lambda self, batch_size, accumulate=1: rows(self, batch_size * accumulate)


def of_own_key(hidden):
    def broken(self, key, tokens, is_text):
        return hidden(self, jax.random.fold_in(key, self._rows[0]), tokens, is_text)

    return broken


BUGS = (
    Bug(
        "a file with written separators is one document",
        "training.data.separators:with_separators",
        lambda divide: lambda source: source,
        f"{SEPARATORS}::test_a_written_end_of_text_separates_documents "
        f"{SEPARATORS}::test_a_run_learns_the_end_of_each_document",
    ),
    Bug(
        "a text that mentions the end of text is divided there",
        "training.data.separators:_is_mentioned",
        gives(False),
        f"{SEPARATORS}::test_a_text_that_mentions_the_end_of_text_is_one_document",
    ),
    Bug(
        "a separator at the end of a part of a text is missed",
        "training.data.separators:divided",
        Replace("len(text) - _LONGEST + 1", "len(text)"),
        f"{SEPARATORS}::test_a_text_is_divided_in_the_same_way_in_any_parts",
    ),
    Bug(
        "documents of a window see each other",
        "training.data.windows:document_segments",
        inside("places_in_documents", then(lambda places: places + 1)),
        f"{WINDOWS}::test_each_document_of_a_window_is_a_segment",
    ),
    Bug(
        "a masked window uses the previous tokens' documents",
        "training.data.windows:WindowBatches.places",
        then(lambda places: np.roll(places, 1, axis=-1)),
        f"{PACKING}::test_marks_and_special_tokens_are_never_hidden_nor_drawn",
    ),
    Bug(
        "document marks are masked like words",
        "training.tasks.hidden_tokens:HiddenBatches._hidden",
        takes(is_text=np.ones_like),
        f"{PACKING}::test_marks_and_special_tokens_are_never_hidden_nor_drawn",
    ),
    Bug(
        "special tokens are masked like words",
        "training.evaluate:never_hidden",
        gives(()),
        f"{PACKING}::test_marks_and_special_tokens_are_never_hidden_nor_drawn "
        "training/test_text.py::test_evaluate_scores_what_training_holds_out",
    ),
    Bug(
        "documents are split wherever the first token recurs",
        "training.data.tokens:open_tokens",
        then(lambda x: x._replace(starts=np.flatnonzero(x.ids == x.ids[0]))),
        f"{TOKENS}::test_documents_are_told_apart_whatever_their_words",
    ),
    Bug(
        "a held-out document is trained on in other letter case",
        "training.data.corpus:Documents.drop_alike",
        gives([]),
        "training/test_text.py::test_evaluate_scores_what_training_holds_out",
    ),
    Bug(
        "a held-out source is trained on in other letter case",
        "training.data.split:groups_of_alike",
        lambda groups_of_alike: lambda lines, tokenizer=None: list(lines),
        f"{PARALLEL}::test_no_source_held_out_has_the_tokens_of_one_that_is_learnt",
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
        f"{WINDOWS}::test_a_large_text_is_shuffled_in_blocks",
    ),
    Bug(
        "every block is shuffled with the same random words",
        "training.data.windows:WindowBatches._words",
        takes(start=lambda start: start % 4),
        f"{WINDOWS}::test_the_words_of_an_epoch_are_one_stream",
    ),
    Bug(
        "a process reads whole micro-batches, not a share of each",
        "training.batch:Share.rows",
        of_one_batch,
        f"{WINDOWS}::test_what_processes_read_together_is_the_batch_of_one",
    ),
    Bug(
        "each process masks with its own key",
        "training.tasks.hidden_tokens:HiddenBatches._hidden",
        of_own_key,
        f"{PACKING}::test_what_processes_read_together_is_the_batch_of_one",
    ),
    Bug(
        "duplicate documents are not removed",
        "training.data.corpus:Documents.drop_copies",
        gives([]),
        f"{RECORDS}::test_copies_and_empty_records_are_left_out_and_counted",
    ),
    Bug(
        "a changed file is read without an error",
        "training.data.corpus:Documents.__iter__",
        Replace("number != end", "False"),
        f"{RECORDS}::test_a_file_that_changes_meanwhile_is_noticed",
    ),
    Bug(
        "a damaged record ends the file silently",
        "training.data.records:_refused",
        takes(number=lambda _: 1),
        f"{RECORDS}::test_a_damaged_record_is_named",
    ),
    Bug(
        "a character is split at the end of a chunk",
        "training.data.documents:TextFile.pieces",
        Replace("decoder.decode(data, final=not data)", "data.decode(errors='replace')"),
        f"{RECORDS}::test_a_file_of_text_is_read_in_pieces",
    ),
    Bug(
        "a split document loses its line break",
        "training.data.split:_cut_position",
        Replace("at + line_break + 1", "at + line_break"),
        f"{SPLIT}::test_one_document_gives_its_end_from_a_line_break_on",
    ),
    Bug(
        "tokenized documents are tokenized again after a kill",
        "training.data.tokens:_Progress.read",
        lambda _: lambda cls, journal, header, unfinished: cls(),
        f"{TOKENS}::test_a_start_that_was_ended_is_gone_on_with",
    ),
    Bug(
        "half-written tokens stay after a kill",
        "training.data.tokens:write_tokens",
        Replace(WRITTEN, f"max({WRITTEN}, unfinished.stat().st_size)"),
        f"{TOKENS}::test_a_start_that_was_ended_is_gone_on_with",
    ),
    Bug(
        "the unfinished tokens of another text are continued",
        "training.data.tokens:_Progress.read",
        Replace('content["header"] == header', "True"),
        f"{TOKENS}::test_what_was_begun_of_another_text_is_begun_anew",
    ),
    Bug(
        "lines with other indentation count as new",
        "training.data.split:_long",
        Replace('" ".join(normalized(line).split())', "normalized(line)"),
        f"{HELD_OUT}::test_long_lines_that_stand_in_both_parts_are_counted",
    ),
)
