"""Every character is trained on or held out, never both, whatever the order or the machine."""

import gzip
import lzma
import os
import random
import shutil
import subprocess
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.training import corpus
from jaxformer.training.corpus import (
    DEFAULT_SPLIT,
    Document,
    baselines,
    read_documents,
    split,
    standard_library,
)
from tests.errors import error_of

many_cases = settings(max_examples=5 * settings().max_examples)

# From many documents of a few characters to few of thousands, some of them copies of one another.
lengths = st.one_of(st.integers(1, 30), st.integers(100, 5000))
contents = st.builds(
    lambda length, seed: "".join(random.Random(seed).choices("abcé猫 \n", k=length)),
    lengths,
    st.integers(0, 20),
)
collections = st.lists(contents, min_size=2, max_size=40).map(
    lambda texts: [Document(f"{number:03}", text) for number, text in enumerate(texts)]
)
fractions = st.sampled_from([0.01, 0.05, 0.1, 0.5])


def _size(documents):
    return sum(len(document.text.encode()) for document in documents)


@many_cases
@given(collections, fractions, st.sampled_from([0, 100, 500_000]))
def test_every_character_is_in_exactly_one_part(documents, fraction, minimum_bytes):
    try:
        train, held_out = split(documents, fraction, minimum_bytes)
    except ValueError:
        assert _size(documents) < 100
        return
    assert train and held_out
    assert all(document.text for document in train + held_out)
    rejoined = {document.name: "" for document in documents}
    for document in train + held_out:
        rejoined[document.name] += document.text
    assert rejoined == dict(documents)
    names = [document.name for document in documents]
    for part in train, held_out:
        assert [document.name for document in part] == [
            name for name in names if name in {document.name for document in part}
        ]


@many_cases
@given(collections, fractions, st.randoms())
def test_neither_order_nor_names_change_the_parts(documents, fraction, shuffler):
    shuffled = [Document("renamed " + document.name, document.text) for document in documents]
    shuffler.shuffle(shuffled)
    try:
        parts = split(documents, fraction)
    except ValueError:
        with pytest.raises(ValueError):
            split(shuffled, fraction)
        return
    for part, other in zip(parts, split(shuffled, fraction), strict=True):
        assert Counter(text for _, text in part) == Counter(text for _, text in other)


@many_cases
@given(collections, fractions)
def test_copies_fall_on_the_same_side(documents, fraction):
    try:
        train, held_out = split(documents, fraction)
    except ValueError:
        return
    texts = dict(documents)
    whole = [
        {document.text for document in part if document.text == texts[document.name]}
        for part in (train, held_out)
    ]
    assert not whole[0] & whole[1]
    cut = {name for name, _ in train} & {name for name, _ in held_out}
    assert not {texts[name] for name in cut} & (whole[0] | whole[1])


@given(st.integers(0, 1000), st.sampled_from([0.05, 0.1, 0.5]))
def test_the_held_out_part_is_as_large_as_it_was_asked_to_be(seed, fraction):
    sizes = random.Random(seed).choices(range(1, 100), k=500)
    documents = [Document("", f"{number} {'x' * size}") for number, size in enumerate(sizes)]
    total = _size(documents)
    _, held_out = split(documents, fraction, minimum_bytes=0)
    assert fraction * total <= _size(held_out) <= 1.25 * fraction * total
    _, held_out = split(documents, fraction, minimum_bytes=10**9)
    aim = max(fraction, 0.1) * total
    assert aim <= _size(held_out) <= 1.25 * aim


def test_no_document_is_held_out_whole_when_it_is_too_large():
    small = [Document(f"small {number}", f"{number} " * 50) for number in range(200)]
    book = Document("book", "one line\n" * 10_000)
    _, held_out = split([*small, book], 0.1, 0)
    assert 0.08 < len(dict(held_out)["book"]) / len(book.text) <= 0.1
    assert any(name.startswith("small") for name, _ in held_out)


def test_one_document_gives_its_end_from_a_line_break_on():
    lines = [f"line {number} of the book\n" for number in range(1000)]
    (train,), (held_out,) = split([Document("book", "".join(lines))], fraction=0.1, minimum_bytes=0)
    assert train.text + held_out.text == "".join(lines)
    assert train.text.endswith("\n")
    assert 0.099 < len(held_out.text) / len("".join(lines)) <= 0.1


def test_one_long_line_is_cut_all_the_same():
    (train,), (held_out,) = split([Document("line", "x" * 1000)], fraction=0.1, minimum_bytes=0)
    assert (len(train.text), len(held_out.text)) == (900, 100)


def test_the_minimum_takes_up_to_a_tenth():
    book = [Document("book", "x" * 1_000_000)]
    sizes = [_size(split(book, 0.02, minimum)[1]) for minimum in (0, 50_000, 500_000)]
    assert sizes == [20_000, 50_000, 100_000]


@many_cases
@given(st.integers(0, 1000), st.integers(30, 400), st.sampled_from([0.01, 0.03, 0.2]))
def test_a_fraction_that_is_given_is_held_out_exactly(seed, number, fraction):
    """However small the text: whole documents up to 1.25 times as much, else the end of each."""
    sizes = random.Random(seed).choices(range(2, 2000), k=number)
    documents = [Document("", f"{number} {'x' * size}") for number, size in enumerate(sizes)]
    aim = fraction * _size(documents)
    assert aim - number <= _size(split(documents, fraction)[1]) <= 1.25 * aim + number


@pytest.mark.parametrize("fraction", [0, -0.1, 0.51, float("nan")])
def test_a_fraction_out_of_range_is_refused(fraction):
    message = f"fraction: {fraction} is not accepted; more than 0 and at most 0.5 is"
    assert error_of(split, [Document("a", "text")], fraction) == message


@pytest.mark.parametrize("documents", [[], [Document("a", "x")]])
def test_too_little_text_to_divide_is_refused(documents):
    message = f"documents: {len(documents)} bytes of text are too few to hold some of them out"
    assert error_of(split, documents) == message


def test_the_standard_library_is_large_enough_and_has_no_tests():
    documents = standard_library()
    names = [document.name for document in documents]
    assert names == sorted(set(names))
    assert {"ast.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    outside = {"test", "tests", "idlelib", "site-packages", "ensurepip", "__pycache__"}
    assert not any(outside & set(name.split("/")) for name in names)
    assert not any("sysconfigdata" in name for name in names)
    assert 8e6 < _size(documents) < 16e6

    train, held_out = split(documents, *DEFAULT_SPLIT)
    assert _size(train) + _size(held_out) == _size(documents)
    assert 500_000 <= _size(held_out) <= 0.07 * _size(documents)
    bits = baselines(held_out)
    assert 1.4 < bits["xz"] < bits["gzip"] < 2.2


def test_a_python_without_its_source_is_told_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    message = f"{tmp_path}: this Python has no library source; name files to train on"
    assert error_of(standard_library) == message


def test_baselines_are_those_of_the_programs():
    documents = standard_library()[:20]
    data = "".join(document.text for document in documents).encode()
    bits = baselines(documents)
    extreme = lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)
    assert bits["gzip"] == 8 * len(gzip.compress(data, 9)) / len(data)
    assert bits["xz"] == 8 * len(extreme) / len(data)
    assert len(gzip.compress(data, 9)) < len(gzip.compress(data, 6))  # so the levels matter here
    assert len(extreme) < len(lzma.compress(data, preset=9))
    for program, options in ("gzip", ["-9"]), ("xz", ["-9e"]):
        if shutil.which(program):
            command = [program, *options, "--stdout"]
            output = subprocess.run(command, input=data, capture_output=True, check=True).stdout
            assert bits[program] == pytest.approx(8 * len(output) / len(data), rel=5e-3)


def test_baselines_of_no_text_are_refused():
    assert error_of(baselines, []) == "held_out: there is no text to compress"


def test_folders_are_read_to_the_bottom_in_order_as_they_are(tmp_path):
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "c" / "deep.txt").write_bytes("\ufeffcafé\r\n\rend".encode())
    (tmp_path / "b" / "a.txt").write_text("a")
    (tmp_path / "z.txt").write_text("z")
    (tmp_path / ".hidden").write_text("h")
    (tmp_path / ".git" / "config").write_text("g")
    documents, skipped = read_documents([tmp_path, str(tmp_path / "z.txt")])  # z.txt counts once
    assert documents == [
        ("z.txt", "z"),
        ("b/a.txt", "a"),
        ("b/c/deep.txt", "\ufeffcafé\r\n\rend"),
    ]
    assert skipped == []
    assert read_documents([tmp_path / "z.txt"]) == ([("z.txt", "z")], [])


def test_what_is_no_text_in_a_folder_is_skipped_and_listed(tmp_path):
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "zeros.bin").write_bytes(b"a\0b")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "self").symlink_to(tmp_path / "self")
    os.mkfifo(tmp_path / "pipe")
    documents, skipped = read_documents([tmp_path])
    assert documents == [("text.txt", "text")]
    assert sorted(skipped) == [
        f"{tmp_path / 'empty.txt'}: the file is empty",
        f"{tmp_path / 'latin.txt'}: not UTF-8 text (byte 3 is 0xe9)",
        f"{tmp_path / 'loop'}: a link to a folder",
        f"{tmp_path / 'pipe'}: not a file",
        f"{tmp_path / 'self'}: not a file",
        f"{tmp_path / 'zeros.bin'}: not a text file (it has NUL bytes)",
    ]


def test_a_named_path_that_gives_no_text_is_refused(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\x7fELF\0")
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "data.bin").write_bytes(b"\0")
    (tmp_path / "self").symlink_to(tmp_path / "self")
    for name, problem in {
        "missing": "no such file or directory",
        "empty": "the file is empty",
        "binary": "not a text file (it has NUL bytes)",
        "latin": "not UTF-8 text (byte 0 is 0xff)",
        "folder": "the folder has no UTF-8 text files",
        "self": "too many levels of symbolic links",
    }.items():
        assert error_of(read_documents, [tmp_path / name]) == f"{tmp_path / name}: {problem}"
