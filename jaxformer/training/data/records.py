"""Files of records, each of which is a document: .jsonl, .parquet, and datasets of the hub."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxformer.training.data.documents import (
    HUB,
    Document,
    File,
    NotText,
    Source,
    TextFile,
    needed,
    opened,
    read_lines,
)

_ROWS = 256  # of a table that are in memory at a time


@dataclass(frozen=True, slots=True)
class JsonLines(File):
    """A .jsonl (.jsonl.gz, .jsonl.zst): each line an object with a text in one field.

    Errors, while it is read: ``ValueError`` naming the line that is no such object, or at which
    what was compressed is damaged; ``NotText`` if that is the first.
    """

    text_field: str

    def documents(self) -> Iterator[Document]:
        number = 0
        with opened(self.path) as file:
            for number, line in enumerate(read_lines(self.path, file), 1):
                if line.strip():
                    yield Document(self.name, self._text(number, line))
        if not number:
            raise NotText(f"{self.path}: the file is empty")

    def _text(self, number: int, line: bytes) -> str:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _refused(self.path, f"line {number} is no JSON: {error}", number) from None
        if not isinstance(record, dict):
            problem = f"line {number} is a {type(record).__name__}, not an object"
            raise _refused(self.path, problem, number)
        return _text_of(record.get(self.text_field), self, f"line {number}", number)


@dataclass(frozen=True, slots=True)
class Parquet(File):
    """A .parquet with a column of texts.

    Errors, while it is read: ``ValueError`` naming the row that holds no text or from which on the
    file is damaged; ``NotText`` if there is no such column, or nothing can be read.
    """

    text_field: str

    def documents(self) -> Iterator[Document]:
        parquet = needed("pyarrow.parquet", f"read {self.path}", "data")
        pyarrow = needed("pyarrow", f"read {self.path}", "data")
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
                        text = _text_of(value, self, f"row {number}", number)
                        yield Document(self.name, text)
        except (OSError, pyarrow.ArrowException) as error:
            problem = f"damaged at row {number + 1} or after it: {error}"
            raise _refused(self.path, problem, number + 1) from None
        if not number:
            raise NotText(f"{self.path}: it has no rows")


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A dataset of the Hugging Face hub: ``hf:owner/name``, ``hf:owner/name/subset``, with
    ``:split`` after it (none: train). It is downloaded when it is first read."""

    name: str
    text_field: str

    @property
    def path(self) -> str:
        return self.name

    def documents(self) -> Iterator[Document]:
        datasets = needed("datasets", f"read {self.name}", "datasets")
        name, _, split = self.name.removeprefix(HUB).partition(":")
        owner, *rest = name.split("/")
        if not 1 <= len(rest) <= 2 or not all((owner, *rest)):
            raise ValueError(f"{self.name}: it must be hf:OWNER/NAME or hf:OWNER/NAME/SUBSET")
        try:
            table = datasets.load_dataset(f"{owner}/{rest[0]}", *rest[1:], split=split or "train")
        except Exception as error:  # of many kinds: no such name, no network, no such split
            raise ValueError(f"{self.name}: {str(error).splitlines()[0]}") from error
        if self.text_field not in table.column_names:
            raise _without_field(self, table.column_names)
        for start in range(0, len(table), _ROWS):
            for number, value in enumerate(table[start : start + _ROWS][self.text_field], start):
                yield Document(self.name, _text_of(value, self, f"row {number + 1}", number + 1))


def source_of(folder: str, name: str, text_field: str) -> Source:
    """What reads a file, by how its name ends. text_field: of records, the one with the text."""
    suffix = os.path.splitext(name.removesuffix(".gz").removesuffix(".zst"))[1]
    if suffix == ".jsonl":
        return JsonLines(folder, name, text_field)
    if name.endswith(".parquet"):
        return Parquet(folder, name, text_field)
    return TextFile(folder, name)


def _text_of(value: Any, source, where: str, number: int) -> str:
    """The text of a record; an error that names its place if it is none."""
    if not isinstance(value, str):
        problem = f"{where} has no text in {source.text_field!r}; --text-field names the field"
        raise _refused(source.path, problem, number)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            problem = f"{where} has a text that is not Unicode (a lone surrogate)"
            raise _refused(source.path, problem, number) from None
    return value


def _refused(path: str, problem: str, number: int) -> ValueError:
    """Of the first record: then the file may be another kind of file altogether."""
    return (NotText if number == 1 else ValueError)(f"{path}: {problem}")


def _without_field(source, names: list[str]) -> NotText:
    return NotText(
        f"{source.path}: it has no column {source.text_field!r}; --text-field names one of "
        f"{', '.join(names)}"
    )
