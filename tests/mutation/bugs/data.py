"""What is read, held out, packed and shared."""

from tests.mutation.bug import Bug
from tests.mutation.changes import Replace, gives

CORPUS, RECORDS = "training/data/test_corpus.py", "training/data/test_records.py"
SPLIT, HELD_OUT = "training/data/test_split.py", "training/data/test_held_out.py"
TOKENS, WINDOWS = "training/data/test_tokens.py", "training/data/test_windows.py"

BUGS = (
    Bug(
        "documents of a window see one another",
        "training.data.windows:document_segments",
        Replace("ids == end_of_text", "ids < 0"),
        f"{WINDOWS}::test_each_document_of_a_window_is_a_segment",
    ),
    Bug(
        "hidden tokens are packed by the documents of the tokens before them",
        "training.tasks.hidden_tokens:HiddenBatches.__next__",
        Replace(
            "tokens.reshape(-1, tokens.shape[-1])", "windows.inputs.reshape(-1, tokens.shape[-1])"
        ),
        "training/data/test_packing.py::test_the_segments_of_hidden_tokens_are_their_own",
    ),
    Bug(
        "the remainder of an epoch is learnt from twice",
        "training.data.windows:WindowBatches._read",
        Replace("np.arange(self._length) < left[:, None]", "np.arange(self._length) < left.max()"),
        f"{WINDOWS}::test_each_token_of_packed_documents_is_a_target_once_per_epoch",
    ),
    Bug(
        "blocks of windows overlap",
        "training.data.windows:WindowBatches._window",
        Replace("blocks * int(order[inside])", "int(order[inside])"),
        f"{WINDOWS}::test_a_large_text_is_shuffled_in_blocks",
    ),
    Bug(
        "each block is shuffled by the same words",
        "training.data.windows:WindowBatches._words",
        Replace("random.advance(start // 4)", "start % 4"),
        f"{WINDOWS}::test_the_words_of_an_epoch_are_one_stream",
    ),
    Bug(
        "a process reads a stretch of all micro-batches instead of a share of each",
        "training.batch:Share.rows",
        Replace("rows[:, self.index].ravel()", "rows.reshape(self.count, -1)[self.index]"),
        f"{WINDOWS}::test_what_processes_read_together_is_the_batch_of_one",
    ),
    Bug(
        "each process hides by a noise of its own",
        "training.tasks.hidden_tokens:HiddenBatches.__next__",
        Replace(
            "jax.random.fold_in(self._key, self._number)",
            "jax.random.fold_in(self._key, self._rows[0])",
        ),
        "training/data/test_packing.py::test_what_processes_read_together_is_the_batch_of_one",
    ),
    Bug(
        "copies are learnt from as often as they stand there",
        "training.data.corpus:Documents.drop_copies",
        gives([]),
        f"{RECORDS}::test_copies_and_empty_records_are_left_out_and_counted",
    ),
    Bug(
        "a file that has changed is read as if it had not",
        "training.data.corpus:Documents.__iter__",
        Replace("number != end", "False"),
        f"{RECORDS}::test_a_file_that_changes_meanwhile_is_noticed",
    ),
    Bug(
        "a record that is damaged ends the file silently",
        "training.data.records:_refused",
        Replace("NotText if number == 1 else ValueError", "NotText"),
        f"{RECORDS}::test_a_damaged_record_is_named",
    ),
    Bug(
        "a character is cut where a piece of a file ends",
        "training.data.documents:TextFile.pieces",
        Replace("decoder.decode(data, final=not data)", "data.decode(errors='replace')"),
        f"{RECORDS}::test_a_file_of_text_is_read_in_pieces",
    ),
    Bug(
        "a document that is cut loses its line break",
        "training.data.split:_cut_position",
        Replace("at + line_break + 1", "at + line_break"),
        f"{SPLIT}::test_one_document_gives_its_end_from_a_line_break_on",
    ),
    Bug(
        "what was tokenised is tokenised again after a kill",
        "training.data.tokens:_Progress.read",
        Replace('found["header"] == header', "False"),
        f"{TOKENS}::test_a_start_that_was_ended_is_gone_on_with",
    ),
    Bug(
        "what a kill left half written stays in the tokens",
        "training.data.tokens:write_tokens",
        Replace("_HEADER_BYTES + done.num_tokens * np.dtype(header['dtype']).itemsize", "0, 2"),
        f"{TOKENS}::test_a_start_that_was_ended_is_gone_on_with",
    ),
    Bug(
        "what was begun of another text is gone on with",
        "training.data.tokens:_Progress.read",
        Replace('found["header"] == header', "True"),
        f"{TOKENS}::test_what_was_begun_of_another_text_is_begun_anew",
    ),
    Bug(
        "lines that are indented otherwise count as new",
        "training.data.held_out:_long",
        Replace('" ".join(line.split())', "line"),
        f"{HELD_OUT}::test_long_lines_that_stand_in_both_parts_are_counted",
    ),
)
