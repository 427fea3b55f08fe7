"""Baselines for scores: compressors, and held-out lines that also occur in training."""

import gzip
import lzma
import random
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.training.data import documents
from jaxformer.training.data import split as module
from jaxformer.training.data.corpus import standard_library
from jaxformer.training.data.documents import Document, TextFile
from jaxformer.training.data.split import DEFAULT_SPLIT, baselines, repeated_lines, split
from tests.errors import error_of


def test_compression_baselines_equal_gzip_and_xz_programs():
    documents = list(standard_library())[:20]
    data = "".join(document.text for document in documents).encode()
    bits = baselines(documents)
    extreme = lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)
    assert bits["gzip"] == 8 * len(gzip.compress(data, 9)) / len(data)
    assert bits["xz"] == 8 * len(extreme) / len(data)
    assert len(gzip.compress(data, 9)) < len(gzip.compress(data, 6))  # the level matters here
    assert len(extreme) < len(lzma.compress(data, preset=9))
    for program, options in ("gzip", ["-9"]), ("xz", ["-9e"]):
        if shutil.which(program):
            command = [program, *options, "--stdout"]
            output = subprocess.run(command, input=data, capture_output=True, check=True).stdout
            assert bits[program] == pytest.approx(8 * len(output) / len(data), rel=5e-3)


def test_compression_baselines_reject_empty_text():
    assert (
        error_of(baselines, [])
        == "held_out must contain text to compress, but all documents are empty"
    )


def test_compression_baselines_read_only_the_beginning_of_the_text(monkeypatch):
    """Compressors read only the beginning of a text, because xz takes hours for gigabytes."""
    texts = [random.Random(n).choices("abcdef \n", k=300) for n in range(9)]
    some = [Document("", "".join(text)) for text in texts]
    monkeypatch.setattr(module, "MOST_COMPRESSED", 1000)
    bits = baselines(some)
    whole = "".join(document.text for document in some)
    monkeypatch.undo()
    assert bits == baselines([Document("", whole[:1000])]) != baselines(some)


lines = st.lists(
    st.tuples(st.integers(0, 12), st.sampled_from(["", "  ", "\t"]), st.sampled_from([" ", "  "])),
    max_size=12,
)


def _text(drawn):
    """Returns long and short lines with various white space in and around them."""
    return "\n".join(
        indent + space.join([f"word{number}"] * (3 if number % 3 else 20))
        for number, indent, space in drawn
    )


@given(st.lists(lines, max_size=4), st.lists(lines, max_size=3), st.integers(1, 200))
def test_long_held_out_lines_that_occur_in_training_text_are_counted(train, held, together):
    """Every held-out occurrence counts. White space and short lines are ignored."""
    train, held = ([Document("", _text(drawn)) for drawn in part] for part in (train, held))

    def long(part):
        found = [" ".join(line.split()) for some in part for line in some.text.split("\n")]
        return [line for line in found if len(line) >= module.LONG_LINE]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_HASHED_TOGETHER", together)
        found = repeated_lines(train, held)
    known = set(long(train))
    assert found == (len(long(held)), sum(line in known for line in long(held)))


def test_repeated_lines_that_span_two_file_pieces_are_found(tmp_path, monkeypatch):
    line = "this line is long enough that to meet it twice cannot be an accident\n"
    (tmp_path / "a.txt").write_text("short\n" + line * 3 + "a short end")
    file = TextFile(str(tmp_path), "a.txt")
    monkeypatch.setattr(documents, "PIECE_BYTES", 10)
    assert repeated_lines([file], [Document("", line)]) == (1, 1)
    assert repeated_lines([Document("", "other")], [file]) == (3, 0)


def test_held_out_part_of_standard_library_repeats_some_training_lines():
    """Licences, signatures and idioms repeat, so the default run reports the number of such
    lines."""
    found = repeated_lines(*split(standard_library(), *DEFAULT_SPLIT))
    assert found.lines > 1000 and 0.03 < found.repeated / found.lines < 0.15
