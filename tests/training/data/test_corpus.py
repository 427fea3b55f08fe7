"""Reading of files and folders with any content."""

import os

from jaxformer.training.data import corpus
from jaxformer.training.data.corpus import read_documents, standard_library
from jaxformer.training.data.split import DEFAULT_SPLIT, baselines, split
from tests.errors import error_of


def _texts(documents):
    return [(document.name, document.text) for document in documents]


def _size(documents):
    return sum(document.num_bytes for document in documents)


def test_standard_library_corpus_has_over_8_mb_and_no_test_files():
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


def test_reading_a_folder_skips_files_of_earlier_training_runs(tmp_path):
    """The tokenizer, samples and metrics of runs in a named folder are skipped."""
    run = tmp_path / "runs" / "stdlib"
    (run / "tokens").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "samples.txt"):
        (run / name).write_text("{}")
    (tmp_path / "config.json").write_text('[{"text": "mine"}]')
    documents, skipped = read_documents([tmp_path])
    assert _texts(documents) == [("config.json", "mine")]
    assert skipped == [f"{run}: a run"]


def test_missing_standard_library_source_raises_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    message = f"{tmp_path}: this Python installation has no library source; name a TEXT to train on"
    assert error_of(standard_library) == message


def test_folders_are_read_recursively_in_sorted_order(tmp_path):
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "c" / "deep.txt").write_bytes("\ufeffcafé\r\n\rend".encode())
    (tmp_path / "b" / "a.txt").write_text("a")
    (tmp_path / "z.txt").write_text("z")
    (tmp_path / ".hidden").write_text("h")
    (tmp_path / ".git" / "config").write_text("g")
    documents, skipped = read_documents([tmp_path, str(tmp_path / "z.txt")])  # z.txt counts once
    assert _texts(documents) == [
        ("z.txt", "z"),
        ("b/a.txt", "a"),
        ("b/c/deep.txt", "café\r\n\rend"),
    ]
    assert skipped == [f"{tmp_path / 'z.txt'}: a copy of {tmp_path / 'z.txt'}"]
    documents, skipped = read_documents([tmp_path / "z.txt"])
    assert (_texts(documents), skipped) == ([("z.txt", "z")], [])


def test_reading_a_folder_skips_and_lists_files_without_text(tmp_path):
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "zeros.bin").write_bytes(b"a\0b")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "self").symlink_to(tmp_path / "self")
    os.mkfifo(tmp_path / "pipe")
    documents, skipped = read_documents([tmp_path])
    assert _texts(documents) == [("text.txt", "text")]
    assert sorted(skipped) == [
        f"{tmp_path / 'empty.txt'}: the file is empty",
        f"{tmp_path / 'latin.txt'}: not UTF-8 text (byte 3 is 0xe9)",
        f"{tmp_path / 'loop'}: a link to a folder",
        f"{tmp_path / 'pipe'}: not a file",
        f"{tmp_path / 'self'}: not a file",
        f"{tmp_path / 'zeros.bin'}: not a text file (it contains NUL bytes)",
    ]


def test_read_documents_rejects_a_path_without_readable_text(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\x7fELF\0")
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "data.bin").write_bytes(b"\0")
    (tmp_path / "self").symlink_to(tmp_path / "self")
    for name, problem in {
        "missing": "no such file or directory",
        "empty": "the file is empty",
        "binary": "not a text file (it contains NUL bytes)",
        "latin": "not UTF-8 text (byte 0 is 0xff)",
        "folder": "the folder has no UTF-8 text files",
        "self": "too many levels of symbolic links",
    }.items():
        assert error_of(read_documents, [tmp_path / name]) == f"{tmp_path / name}: {problem}"
