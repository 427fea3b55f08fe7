"""Readers of records: .jsonl, .ndjson, .json, .parquet and hub datasets. A record is a document."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from jaxformer.models.config.needs import Need
from jaxformer.training.data import documents
from jaxformer.training.data.documents import HUB, Document, File, NotText, Source, TextFile

_ROWS = 256  # rows of a table in memory at a time
_MOST_PIECES = 256  # pieces of 1 MiB: the largest .json list


@dataclass(frozen=True, slots=True)
class Records(File):
    """Base class of sources with one document per record.

    Attributes:
        text_field: The name of the field or column that holds the text.
    """

    text_field: str

    def _of_object(self, record: Any, where: str, number: int) -> Document:
        """Returns the document of a record, which must be an object."""
        if not isinstance(record, dict):
            problem = f"{where} is a {type(record).__name__}, not an object"
            raise _refused(self.path, problem, number)
        return self._of_text(record.get(self.text_field), where, number)

    def _of_text(self, text: Any, where: str, number: int) -> Document:
        """Checks a record's text and returns its document. An error names the record's place."""
        if not isinstance(text, str):
            problem = f"{where} has no text in {self.text_field!r}; set --text-field to its field"
            raise _refused(self.path, problem, number)
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                problem = f"{where} has a text that is not Unicode (a lone surrogate)"
                raise _refused(self.path, problem, number) from None
        return Document(self.name, text.removeprefix("\ufeff"))

    def _check_column(self, names: list[str]) -> None:
        """Raises NotText unless one of the columns of a table holds the text."""
        if self.text_field not in names:
            raise NotText(
                f"{self.path}: it has no column {self.text_field!r}; set --text-field to one of "
                f"{', '.join(names)}"
            )


class JsonLines(Records):
    """A .jsonl or .ndjson file (also .gz or .zst): each line is an object with a text field."""

    def documents(self) -> Iterator[Document]:
        """Yields the text of each line.

        Raises:
            ValueError: A line is no such object, or the compressed file is damaged at a line. The
                message names the line.
            NotText: The same for the first line, or the file is empty.
        """
        number = 0
        for number, line in enumerate(documents.read_lines(self.path), 1):
            if line.strip():
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:
                    problem = f"line {number} is not valid JSON: {error}"
                    raise _refused(self.path, problem, number) from None
                yield self._of_object(record, f"line {number}", number)
        if not number:
            raise NotText(f"{self.path}: the file is empty")


class JsonArray(JsonLines):
    """A .json file (also .gz or .zst): a list of objects with a text field, or one object per line.

    A list is loaded into memory as a whole, so its size is limited.
    """

    def documents(self) -> Iterator[Document]:
        """Yields the text of each object.

        Raises:
            ValueError: An entry is no such object. The message names its number.
            NotText: The first entry is no such object, the list is larger than 256 MiB, or the
                file holds anything else.
        """
        pieces = documents.read_pieces(self.path)
        first = next(pieces, b"")
        if not first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            pieces.close()
            yield from JsonLines.documents(self)
            return
        parts = [first, *islice(pieces, _MOST_PIECES)]
        if len(parts) > _MOST_PIECES:
            raise NotText(
                f"{self.path}: a .json list may have at most 256 MiB; convert it to .jsonl"
            )
        try:
            records = json.loads(b"".join(parts).decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise NotText(f"{self.path}: not valid JSON: {error}") from None
        if not records:
            raise NotText(f"{self.path}: the list is empty")
        for number, record in enumerate(records, 1):
            yield self._of_object(record, f"record {number}", number)


class Parquet(Records):
    """A .parquet file with a column of texts."""

    def documents(self) -> Iterator[Document]:
        """Yields the text of each row.

        Raises:
            ValueError: A row holds no text, or the file is damaged from a row on. The message
                names the row.
            NotText: There is no such column, no row, or no readable first row.
        """
        parquet = documents.needed("pyarrow.parquet", f"read {self.path}", "data")
        pyarrow = documents.needed("pyarrow", f"read {self.path}", "data")
        number = 0
        try:
            options = {"memory_map": True, "page_checksum_verification": True}
            with parquet.ParquetFile(self.path, **options) as file:
                self._check_column(file.schema_arrow.names)
                columns = {"columns": [self.text_field], "use_threads": False}
                for batch in file.iter_batches(_ROWS, **columns):
                    for value in batch.column(0).to_pylist():
                        number += 1
                        yield self._of_text(value, f"row {number}", number)
        except (OSError, pyarrow.ArrowException) as error:
            problem = f"damaged at row {number + 1} or after it: {error}"
            raise _refused(self.path, problem, number + 1) from None
        if not number:
            raise NotText(f"{self.path}: it has no rows")


class HubDataset(Records):
    """A dataset of the Hugging Face hub, which is downloaded on first use.

    Its name is ``hf:owner/name`` or ``hf:owner/name/subset``, with an optional ``:split`` at the
    end. The default split is train.
    """

    def documents(self) -> Iterator[Document]:
        """Yields the text of each row.

        Raises:
            ValueError: The dataset cannot be loaded, or has no such column, or a row has no text.
        """
        datasets = documents.needed("datasets", f"read {self.name}", "datasets")
        name, _, split = self.name.removeprefix(HUB).partition(":")
        owner, *rest = name.split("/")
        if not 1 <= len(rest) <= 2 or not all((owner, *rest)):
            raise ValueError(f"{self.name}: it must be hf:OWNER/NAME or hf:OWNER/NAME/SUBSET")
        try:
            table = datasets.load_dataset(f"{owner}/{rest[0]}", *rest[1:], split=split or "train")
        except Exception as error:  # of any type: unknown name, no network, unknown split
            raise ValueError(f"{self.name}: {str(error).splitlines()[0]}") from error
        self._check_column(table.column_names)
        for start in range(0, len(table), _ROWS):
            rows = table[start : start + _ROWS][self.text_field]
            for number, value in enumerate(rows, start + 1):
                yield self._of_text(value, f"row {number}", number)


_READERS = {".jsonl": JsonLines, ".ndjson": JsonLines, ".json": JsonArray, ".parquet": Parquet}


def has_records(field: str) -> Need:
    """Returns the need that a path of the field may hold records."""
    text = f"a file of records ({', '.join(_READERS)}), a folder or {HUB}OWNER/NAME"
    return Need((), lambda given: any(map(_may_hold_records, map(str, given[field]))), text)


def _may_hold_records(path: str) -> bool:
    has_suffix = documents.suffix_of(path) in _READERS
    return has_suffix or path.startswith(HUB) or os.path.isdir(path)


def source_of(folder: str, name: str, text_field: str) -> Source:
    """Returns the reader for a file, by its suffix.

    Args:
        folder: The folder that the user named.
        name: The path of the file in it.
        text_field: The field or column of records that holds the text.
    """
    reader = _READERS.get(documents.suffix_of(name))
    return TextFile(folder, name) if reader is None else reader(folder, name, text_field)


def _refused(path: str, problem: str, number: int) -> ValueError:
    """Returns an error: `NotText` for the first record, as the file may have another format."""
    return (NotText if number == 1 else ValueError)(f"{path}: {problem}")
