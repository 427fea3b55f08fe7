"""Readers of records: .jsonl, .ndjson, .json, .parquet and hub datasets. A record is a document."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxformer.models.config.needs import Need
from jaxformer.training.data import reading
from jaxformer.training.data.documents import HUB, Document, File, Source, TextFile
from jaxformer.training.data.reading import NotText

_ROWS = 256  # rows of a table in memory at a time
_MOST_PIECES = 256  # pieces of 1 MiB: the largest .json list


@dataclass(frozen=True, slots=True)
class JsonLines(File):
    """A .jsonl or .ndjson file (also .gz or .zst): each line is an object with a text field.

    Attributes:
        text_field: The name of the field.
    """

    text_field: str

    def documents(self) -> Iterator[Document]:
        """Yields the text of each line.

        Raises:
            ValueError: A line is no such object, or the compressed file is damaged at a line. The
                message names the line.
            NotText: The same for the first line, or the file is empty.
        """
        number = 0
        for number, line in enumerate(reading.read_lines(self.path), 1):
            if line.strip():
                yield Document(self.name, self._text(number, line))
        if not number:
            raise NotText(f"{self.path}: the file is empty")

    def _text(self, number: int, line: bytes) -> str:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _refused(self.path, f"line {number} is not valid JSON: {error}", number) from None
        return _of_record(record, self, f"line {number}", number)


@dataclass(frozen=True, slots=True)
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
        with reading.open_stream(self.path) as file:
            data, error = reading.read_piece(file)
            first = data.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
            if error is not None or first != b"[":
                yield from JsonLines.documents(self)
                return
            records = self._records(data, file)
        for number, record in enumerate(records, 1):
            yield Document(self.name, _of_record(record, self, f"record {number}", number))

    def _records(self, data: bytes, file: reading.Stream) -> list:
        parts = [data]
        while parts[-1] and len(parts) <= _MOST_PIECES:
            part, error = reading.read_piece(file)
            if error is not None:
                raise reading.damaged(self.path, "its end", True, error)
            parts.append(part)
        if parts[-1]:
            raise NotText(
                f"{self.path}: a .json list may have at most 256 MiB; convert it to .jsonl"
            )
        try:
            records = json.loads(b"".join(parts).decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise NotText(f"{self.path}: not valid JSON: {error}") from None
        if not records:
            raise NotText(f"{self.path}: the list is empty")
        return records


@dataclass(frozen=True, slots=True)
class Parquet(File):
    """A .parquet file with a column of texts.

    Attributes:
        text_field: The name of the column.
    """

    text_field: str

    def documents(self) -> Iterator[Document]:
        """Yields the text of each row.

        Raises:
            ValueError: A row holds no text, or the file is damaged from a row on. The message
                names the row.
            NotText: There is no such column, no row, or no readable first row.
        """
        parquet = reading.needed("pyarrow.parquet", f"read {self.path}", "data")
        pyarrow = reading.needed("pyarrow", f"read {self.path}", "data")
        number = 0
        try:
            options = {"memory_map": True, "page_checksum_verification": True}
            with parquet.ParquetFile(self.path, **options) as file:
                if self.text_field not in file.schema_arrow.names:
                    raise _without_field(self, file.schema_arrow.names)
                columns = {"columns": [self.text_field], "use_threads": False}
                for batch in file.iter_batches(_ROWS, **columns):
                    for value in batch.column(0).to_pylist():
                        number += 1
                        yield Document(self.name, _text_of(value, self, f"row {number}", number))
        except (OSError, pyarrow.ArrowException) as error:
            problem = f"damaged at row {number + 1} or after it: {error}"
            raise _refused(self.path, problem, number + 1) from None
        if not number:
            raise NotText(f"{self.path}: it has no rows")


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A dataset of the Hugging Face hub, which is downloaded on first use.

    Attributes:
        name: ``hf:owner/name`` or ``hf:owner/name/subset``, with an optional ``:split`` at the
            end. The default split is train.
        text_field: The name of the column with the text.
    """

    name: str
    text_field: str

    @property
    def path(self) -> str:
        """The name, which messages show like the path of a file."""
        return self.name

    def documents(self) -> Iterator[Document]:
        """Yields the text of each row.

        Raises:
            ValueError: The dataset cannot be loaded, or has no such column, or a row has no text.
        """
        datasets = reading.needed("datasets", f"read {self.name}", "datasets")
        name, _, split = self.name.removeprefix(HUB).partition(":")
        owner, *rest = name.split("/")
        if not 1 <= len(rest) <= 2 or not all((owner, *rest)):
            raise ValueError(f"{self.name}: it must be hf:OWNER/NAME or hf:OWNER/NAME/SUBSET")
        try:
            table = datasets.load_dataset(f"{owner}/{rest[0]}", *rest[1:], split=split or "train")
        except Exception as error:  # of any type: unknown name, no network, unknown split
            raise ValueError(f"{self.name}: {str(error).splitlines()[0]}") from error
        if self.text_field not in table.column_names:
            raise _without_field(self, table.column_names)
        for start in range(0, len(table), _ROWS):
            rows = table[start : start + _ROWS][self.text_field]
            for number, value in enumerate(rows, start + 1):
                yield Document(self.name, _text_of(value, self, f"row {number}", number))


Records = JsonLines | Parquet | HubDataset
_READERS = {".jsonl": JsonLines, ".ndjson": JsonLines, ".json": JsonArray, ".parquet": Parquet}


@dataclass(frozen=True)
class HasRecords(Need):
    """Condition that a path of the field may hold records."""

    field: str

    @property
    def fields(self) -> tuple[str, ...]:
        """See `Need`."""
        return ()

    def holds(self, values: Mapping[str, Any]) -> bool:
        """See `Need`."""
        return any(map(_may_hold_records, map(str, values[self.field])))

    def __str__(self) -> str:
        """See `Need`."""
        return f"a file of records ({', '.join(_READERS)}), a folder or {HUB}OWNER/NAME"


def _may_hold_records(path: str) -> bool:
    has_suffix = reading.suffix_of(path) in _READERS
    return has_suffix or path.startswith(HUB) or os.path.isdir(path)


def source_of(folder: str, name: str, text_field: str) -> Source:
    """Returns the reader for a file, by its suffix.

    Args:
        folder: The folder that the user named.
        name: The path of the file in it.
        text_field: The field or column of records that holds the text.
    """
    reader = _READERS.get(reading.suffix_of(name))
    return TextFile(folder, name) if reader is None else reader(folder, name, text_field)


def _of_record(record: Any, source: Records, where: str, number: int) -> str:
    """Returns the text of a record, which must be an object."""
    if not isinstance(record, dict):
        raise _refused(source.path, f"{where} is a {type(record).__name__}, not an object", number)
    return _text_of(record.get(source.text_field), source, where, number)


def _text_of(value: Any, source: Records, where: str, number: int) -> str:
    """Checks and returns the text of a record. An error names the place of the record."""
    if not isinstance(value, str):
        problem = f"{where} has no text in {source.text_field!r}; set --text-field to its field"
        raise _refused(source.path, problem, number)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            problem = f"{where} has a text that is not Unicode (a lone surrogate)"
            raise _refused(source.path, problem, number) from None
    return value.removeprefix("\ufeff")


def _refused(path: str, problem: str, number: int) -> ValueError:
    """Returns an error: `NotText` for the first record, as the file may have another format."""
    return (NotText if number == 1 else ValueError)(f"{path}: {problem}")


def _without_field(source: Records, names: list[str]) -> NotText:
    return NotText(
        f"{source.path}: it has no column {source.text_field!r}; set --text-field to one of "
        f"{', '.join(names)}"
    )
