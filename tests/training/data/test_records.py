"""Reading records and compressed files, and errors for damaged files."""

import gzip
import json
import sys
from types import SimpleNamespace

import pytest

from jaxformer.training.data import documents as module
from jaxformer.training.data.corpus import Documents, read_documents
from jaxformer.training.data.documents import Document, Excerpt, NotText, TextFile
from tests.errors import error_of

TEXTS = ["one", "zwei\nZeilen", "café 猫\r\n", 'a "quote" \\n', "one more " * 40]
LINES = [json.dumps({"id": n, "text": text}) for n, text in enumerate(TEXTS)]


def _compressed(suffix, data):
    if suffix == ".gz":
        return gzip.compress(data, mtime=0)
    if suffix == ".zst":
        return pytest.importorskip("pyarrow").compress(data, "zstd", asbytes=True)
    return data


def _write_table(path, columns, **options):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path, **options)


def _texts(documents):
    return [document.text for document in documents]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_each_json_or_parquet_record_is_read_as_one_document(tmp_path, name):
    path = tmp_path / name
    if name.endswith(".parquet"):
        _write_table(path, {"id": range(5), "text": TEXTS}, row_group_size=2)
    else:
        path.write_bytes(_compressed(path.suffix, "\n".join([*LINES, "", ""]).encode()))
    for given in (path, tmp_path):
        documents, skipped = read_documents([given])
        assert _texts(documents) == _texts(documents) == TEXTS and skipped == []
        assert {document.name for document in documents} == {name}
        assert documents.num_bytes == sum(len(text.encode()) for text in TEXTS)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_text_files_are_read_in_pieces_of_limited_size(tmp_path, monkeypatch, suffix):
    """A piece may end anywhere, even within a character."""
    monkeypatch.setattr(module, "PIECE_BYTES", 2)
    text = "".join(TEXTS)
    (tmp_path / f"a.txt{suffix}").write_bytes(_compressed(suffix, text.encode()))
    file = TextFile(str(tmp_path), f"a.txt{suffix}")
    assert max(map(len, file.pieces())) <= 2 and file.text == text
    for start, stop in ((0, 9), (9, None), (3, 3), (len(text), None)):
        assert Excerpt(file, start, stop).text == text[start:stop]


def test_text_field_option_selects_the_field_of_records(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "one"}\n{"content": "two", "text": 3}\n')
    assert _texts(read_documents([tmp_path], "content")[0]) == ["one", "two"]


def test_duplicate_and_empty_records_are_dropped_and_counted(tmp_path):
    lines = [json.dumps({"text": text}) for text in ["one", "two", "", "one", "one", "three"]]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "c.txt").write_text("four")
    (tmp_path / "d.txt").write_text("four")
    documents, skipped = read_documents([tmp_path])
    assert _texts(documents) == ["one", "two", "three", "four"]
    assert len(documents) == 4 and documents.sizes.tolist() == [3, 3, 5, 4]
    assert skipped == [
        f"{tmp_path / 'a.jsonl'}: 3 of 6 records, empty or copies of earlier texts",
        f"{tmp_path / 'b.txt'}: a copy of {tmp_path / 'a.jsonl'}",
        f"{tmp_path / 'd.txt'}: a copy of {tmp_path / 'c.txt'}",
    ]


@pytest.mark.parametrize(
    "line, problem",
    [
        ("{", "is not valid JSON: Expecting property name"),
        ("3", "is an int, not an object"),
        ('{"id": 1}', "has no text in 'text'; set --text-field to the field with the text"),
        ('{"text": null}', "has no text in 'text'"),
        ('{"text": "\\ud800"}', "has a text that is not Unicode (a lone surrogate)"),
        ('{"text": "\udcff"}', "is not valid JSON: 'utf-8' codec can't decode"),
    ],
)
def test_error_for_damaged_json_record_states_its_line_number(tmp_path, line, problem):
    """A damaged record raises an error, even in a folder.

    If the first line is damaged, the file may have a different format. A folder then skips the
    file.
    """
    path, other = tmp_path / "a.jsonl", tmp_path / "b.txt"
    other.write_text("text")
    path.write_bytes("\n".join([*LINES, "", line]).encode(errors="surrogateescape"))
    for given in (path, tmp_path):
        assert error_of(read_documents, [given]).startswith(f"{path}: line 7 {problem}")
    path.write_bytes(line.encode(errors="surrogateescape"))
    documents, skipped = read_documents([tmp_path])
    assert _texts(documents) == ["text"]
    assert len(skipped) == 1 and skipped[0].startswith(f"{path}: line 1 {problem}")
    assert error_of(read_documents, [path]) == skipped[0]


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.jsonl.zst", "a.txt.zst"])
def test_error_for_damaged_compressed_file_states_its_line_number(tmp_path, monkeypatch, name):
    monkeypatch.setattr(module, "PIECE_BYTES", 1 << 16)
    data = "".join(json.dumps({"text": f"{n * 7919 % 10007} " * 9}) + "\n" for n in range(20_000))
    path = tmp_path / name
    whole = _compressed(path.suffix, data.encode())
    path.write_bytes(whole[: len(whole) // 2])
    for given in (path, tmp_path):
        message = error_of(read_documents, [given])
        assert message.startswith(f"{path}: damaged at line ")
        assert 1 < int(message.split("line ")[1].split(":")[0]) < 20_000
    path.write_bytes(b"no such thing")
    assert error_of(read_documents, [path]).startswith(f"{path}: ")


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz"])
def test_damaged_small_compressed_file_raises_error_and_is_not_skipped(tmp_path, name):
    """A folder does not skip such a file, because its readable part was text."""
    (tmp_path / "b.txt").write_text("text")
    path = tmp_path / name
    whole = gzip.compress(b'{"text": "some"}\n{"text": "more"}\n')
    path.write_bytes(whole[:-8] + bytes(8))
    for given in (path, tmp_path):
        assert error_of(read_documents, [given]).startswith(f"{path}: damaged at line 3: ")


def test_a_damaged_parquet_file_is_reported_with_its_row(tmp_path):
    path = tmp_path / "a.parquet"
    values = [*TEXTS, None, "more"]
    _write_table(path, {"text": values})
    message = f"{path}: row 6 has no text in 'text'; set --text-field to the field with the text"
    assert error_of(read_documents, [path]) == error_of(read_documents, [tmp_path]) == message
    texts = [f"{n * 7919 % 10007}" * 9 for n in range(4000)]
    options = {"row_group_size": 1000, "compression": "gzip", "write_page_checksum": True}
    _write_table(path, {"text": texts}, **options)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    message = error_of(read_documents, [path])
    assert message.startswith(f"{path}: damaged at row ")
    assert 1000 <= int(message.split("row ")[1].split()[0]) <= 3001
    _write_table(path, {"content": TEXTS, "id": range(5)})
    message = f"{path}: column 'text' is missing; set --text-field to one of content, id"
    assert error_of(read_documents, [path]) == message


@pytest.mark.parametrize(
    "name, package", [("a.parquet", "pyarrow.parquet"), ("a.txt.zst", "pyarrow")]
)
def test_a_missing_package_is_reported_with_an_install_command(
    tmp_path, monkeypatch, name, package
):
    path = tmp_path / name
    path.touch()
    monkeypatch.setitem(sys.modules, package, None)
    message = f"to read {path}, install pyarrow: pip install -e '.[data]'"
    assert error_of(read_documents, [tmp_path]) == message


class _Table(list):
    """A table like a table of the datasets package: a slice is a dictionary of columns."""

    column_names = ("text",)

    def __getitem__(self, places):
        return {"text": list(self)[places]}


def test_a_hub_dataset_is_loaded_by_name(monkeypatch):
    asked = []

    def load_dataset(*names, split):
        asked.append((*names, split))
        if split == "none":
            raise ValueError('Unknown split "none"\nand more')
        return _Table(TEXTS * 200)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    documents, skipped = read_documents(["hf:owner/name"])
    assert _texts(documents) == TEXTS
    assert skipped == ["hf:owner/name: 995 of 1,000 records, empty or copies of earlier texts"]
    read_documents(["hf:owner/name/subset:test"])
    assert set(asked) == {("owner/name", "train"), ("owner/name", "subset", "test")}
    message = 'hf:owner/name:none: Unknown split "none"'
    assert error_of(read_documents, ["hf:owner/name:none"]) == message
    message = "hf:name: it must be hf:OWNER/NAME or hf:OWNER/NAME/SUBSET"
    assert error_of(read_documents, ["hf:name"]) == message
    message = "hf:a/b: column 'body' is missing; set --text-field to one of text"
    assert error_of(read_documents, ["hf:a/b"], "body") == message


def test_a_file_that_changes_during_reading_raises_an_error(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(LINES))
    documents, _ = read_documents([path])
    path.write_text("\n".join(LINES[:3]))
    message = f"{path}: the file changed during reading; start again"
    assert error_of(list, documents) == message


def test_adding_an_unreadable_document_leaves_documents_unchanged():
    class Broken(Document):
        def pieces(self):
            yield "half"
            raise NotText("broken")

    documents = Documents([Document("a", "one")])
    with pytest.raises(NotText):
        documents.add(Broken("b", ""))
    documents.add(Document("c", "two"))
    assert (len(documents), documents.num_bytes) == (2, 6)
    assert _texts(documents) == ["one", "two"]


@pytest.mark.parametrize(
    "name",
    ["a.ndjson", "a.JSONL", "a.Jsonl.GZ", "a.ndjson.zst", "a.json", "b.json", "a.JSON.gz"],
)
def test_record_files_are_recognized_by_suffix(name, tmp_path):
    """Records are read by line or as a list (b.json), never as plain text.

    A byte order mark is removed.
    """
    separator, (begin, end) = (",\n", "[]") if name == "b.json" else ("\n", ("", ""))
    text = "\ufeff" + begin + separator.join(LINES) + end
    path = tmp_path / name
    path.write_bytes(_compressed(path.suffix.lower(), text.encode()))
    for given in (path, tmp_path):
        documents, skipped = read_documents([given])
        assert _texts(documents) == TEXTS and skipped == []


NOT_RECORDS = {
    "a.json": '{"name": "a package",\n "text": "x"}',
    "b.ndjson": "plain",
    "c.JSON": "[3]",
}


@pytest.mark.parametrize("name", [*NOT_RECORDS, "d.json"])
def test_invalid_record_files_are_never_read_as_plain_text(name, tmp_path):
    (tmp_path / name).write_text(NOT_RECORDS.get(name, "[]"))
    assert name in error_of(read_documents, [tmp_path / name])
    (tmp_path / "e.txt").write_text("text")
    documents, skipped = read_documents([tmp_path])
    assert _texts(documents) == ["text"] and name in skipped[0]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".GZ"])
@pytest.mark.parametrize("piece_bytes", [1, 2, 100])
def test_byte_order_mark_at_the_start_of_a_file_is_removed(
    suffix, piece_bytes, tmp_path, monkeypatch
):
    """Only a byte order mark at the beginning is removed. A file without further bytes is empty."""
    monkeypatch.setattr(module, "PIECE_BYTES", piece_bytes)
    text = "\ufeffone\n\ufefftwo"
    for name, content in (("a.txt", "\ufeff" + text), ("b.txt", "\ufeff"), ("c.txt", text)):
        data = _compressed(suffix.lower(), content.encode())
        (tmp_path / f"{name}{suffix}").write_bytes(data)
    assert TextFile(str(tmp_path), f"a.txt{suffix}").text == text
    assert TextFile(str(tmp_path), f"c.txt{suffix}").text == text[1:]
    with pytest.raises(NotText, match="empty"):
        list(TextFile(str(tmp_path), f"b.txt{suffix}").pieces())
