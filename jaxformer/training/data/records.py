"""Sources with one document per record: .jsonl, .ndjson, .json, .parquet and hub datasets."""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from jaxformer.models.config.needs import Need
from jaxformer.optional import import_optional
from jaxformer.terminal import kind_of
from jaxformer.training.data import documents
from jaxformer.training.data.documents import HUB, Document, File, NotText, Source, TextFile

# Number of table rows to read at a time.
_ROWS = 256
# Largest accepted size, in MiB, of a .json file that contains a list. The file is read in pieces of
# 1 MiB.
_MOST_PIECES = 256


class Record(NamedTuple):
    """A record of a file or table.

    Attributes:
        fields: The values by field or column. In a damaged file, this may be a JSON value other
            than an object.
        where: The place in the file, such as "line 3".
        number: The number of the record, from 1.
    """

    fields: Any
    where: str
    number: int


@dataclass(frozen=True, slots=True)
class Records(File, ABC):
    """Base class of sources with one document per record.

    Attributes:
        text_field: The name of the field or column that holds the text.
    """

    text_field: str

    @abstractmethod
    def records(self, columns: tuple[str, ...] | None = None) -> Iterator[Record]:
        """Yields the records.

        Args:
            columns: The columns of a table to read; all columns if None. Records of JSON files
                always contain all fields.

        Raises:
            ValueError: The file is damaged after the first record. The error message includes the
                place.
            NotText: The first record is damaged, or the file is empty.
        """

    def documents(self) -> Iterator[Document]:
        """Yields the text of each record.

        Raises:
            ValueError: A record after the first has no text, or the file is damaged. The error
                message includes the place.
            NotText: The first record has no text, or the file is empty.
        """
        for record in self.records((self.text_field,)):
            yield self._document(record)

    def _document(self, record: Record) -> Document:
        """Checks the text of a record and returns its document."""
        fields, where, number = record
        if not isinstance(fields, dict):
            problem = f"{where} is {kind_of(fields)}, not an object"
            raise refused(self.path, problem, number)
        text = fields.get(self.text_field)
        if not isinstance(text, str):
            problem = (
                f"{where} has no text in {self.text_field!r}; set --text-field to the field with "
                "the text"
            )
            raise refused(self.path, problem, number)
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                problem = f"{where} has a text that is not Unicode (a lone surrogate)"
                raise refused(self.path, problem, number) from None
        return Document(self.name, text.removeprefix("\ufeff"))

    def _check_columns(self, names: list[str], columns: tuple[str, ...] | None) -> list[str]:
        """Returns the columns to read.

        Raises:
            NotText: The table lacks one of the columns.
        """
        for name in columns or ():
            if name not in names:
                raise NotText(
                    f"{self.path}: column {name!r} is missing; set --text-field to one of "
                    f"{', '.join(names)}"
                )
        return names if columns is None else list(columns)


class JsonLines(Records):
    """A .jsonl or .ndjson file (also .gz or .zst): each line is an object."""

    def records(self, columns: tuple[str, ...] | None = None) -> Iterator[Record]:
        """Yields the object in each line (see `Records.records`)."""
        number = 0
        for number, line in enumerate(documents.read_lines(self.path), 1):
            if line.strip():
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:
                    problem = f"line {number} is not valid JSON: {error}"
                    raise refused(self.path, problem, number) from None
                yield Record(record, f"line {number}", number)
        if not number:
            raise NotText(f"{self.path}: the file is empty")


class JsonArray(JsonLines):
    """A .json file (also .gz or .zst): a list of objects, or one object per line.

    The whole list is loaded into memory, so the size of the file is limited.
    """

    def records(self, columns: tuple[str, ...] | None = None) -> Iterator[Record]:
        """Yields each object (see `Records.records`).

        Raises:
            ValueError: A line after the first is not valid JSON.
            NotText: The list is larger than 256 MiB or empty, or the file has a different format.
        """
        pieces = documents.read_pieces(self.path)
        first = next(pieces, b"")
        if not first.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            pieces.close()
            yield from JsonLines.records(self, columns)
            return
        parts = [first, *islice(pieces, _MOST_PIECES)]
        if len(parts) > _MOST_PIECES:
            raise NotText(
                f"{self.path}: a .json list must not exceed 256 MiB; convert the file to .jsonl"
            )
        try:
            records = json.loads(b"".join(parts).decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise NotText(f"{self.path}: not valid JSON: {error}") from None
        if not records:
            raise NotText(f"{self.path}: the list is empty")
        for number, record in enumerate(records, 1):
            yield Record(record, f"record {number}", number)


class Parquet(Records):
    """A .parquet file."""

    def records(self, columns: tuple[str, ...] | None = None) -> Iterator[Record]:
        """Yields each row (see `Records.records`).

        Raises:
            ValueError: The file is damaged after the first row. The error message includes the row
                number.
            NotText: A column is missing, the file has no rows, or the first row is unreadable.
        """
        parquet = import_optional("pyarrow.parquet", f"read {self.path}", "data")
        pyarrow = import_optional("pyarrow", f"read {self.path}", "data")
        number = 0
        try:
            options = {"memory_map": True, "page_checksum_verification": True}
            with parquet.ParquetFile(self.path, **options) as file:
                names = self._check_columns(file.schema_arrow.names, columns)
                for batch in file.iter_batches(_ROWS, columns=names, use_threads=False):
                    for fields in batch.to_pylist():
                        number += 1
                        yield Record(fields, f"row {number}", number)
        except (OSError, pyarrow.ArrowException) as error:
            problem = f"damaged at row {number + 1} or after it: {error}"
            raise refused(self.path, problem, number + 1) from None
        if not number:
            raise NotText(f"{self.path}: the file has no rows")


class HubDataset(Records):
    """A dataset of the Hugging Face hub, downloaded on first use.

    The name is ``hf:owner/name`` or ``hf:owner/name/subset``, optionally followed by ``:split``.
    The default split is train.
    """

    def records(self, columns: tuple[str, ...] | None = None) -> Iterator[Record]:
        """Yields each row (see `Records.records`).

        Raises:
            ValueError: The dataset cannot be loaded, or a column is missing.
        """
        datasets = import_optional("datasets", f"read {self.name}", "datasets")
        name, _, split = self.name.removeprefix(HUB).partition(":")
        owner, *rest = name.split("/")
        if not 1 <= len(rest) <= 2 or not all((owner, *rest)):
            raise ValueError(f"{self.name}: it must be hf:OWNER/NAME or hf:OWNER/NAME/SUBSET")
        try:
            table = datasets.load_dataset(f"{owner}/{rest[0]}", *rest[1:], split=split or "train")
        except Exception as error:  # `datasets` may raise any exception.
            raise ValueError(f"{self.name}: {str(error).splitlines()[0]}") from error
        names = self._check_columns(table.column_names, columns)
        for start in range(0, len(table), _ROWS):
            rows = table[start : start + _ROWS]
            for number, values in enumerate(zip(*(rows[x] for x in names), strict=True), start + 1):
                yield Record(dict(zip(names, values, strict=True)), f"row {number}", number)


_READERS = {".jsonl": JsonLines, ".ndjson": JsonLines, ".json": JsonArray, ".parquet": Parquet}


def has_records(field: str) -> Need:
    """Returns the condition that at least one path in `field` may contain records."""
    text = f"a file of records ({', '.join(_READERS)}), a folder or {HUB}OWNER/NAME"
    return Need((), lambda given: any(map(_may_hold_records, map(str, given[field]))), text)


def _may_hold_records(path: str) -> bool:
    has_suffix = documents.format_suffix(path) in _READERS
    return has_suffix or path.startswith(HUB) or os.path.isdir(path)


def make_source(folder: str, name: str, text_field: str) -> Source:
    """Returns the `Source` for a file; the file's suffix determines its class.

    Args:
        folder: The folder that the user named, or the folder of the file that the user named.
        name: The path of the file within the folder.
        text_field: The field or column of records that holds the text.
    """
    reader = _READERS.get(documents.format_suffix(name))
    return TextFile(folder, name) if reader is None else reader(folder, name, text_field)


def refused(path: str, problem: str, number: int) -> ValueError:
    """Returns a `NotText` error for the first record, and a ValueError for a later record.

    If the first record is damaged, the file may not be a file of records at all.
    """
    return (NotText if number == 1 else ValueError)(f"{path}: {problem}")
