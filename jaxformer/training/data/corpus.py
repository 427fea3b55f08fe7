"""The text of a run: documents from files, folders, hub datasets or the standard library."""

import os
import struct
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from jaxformer.artifacts.run import RunFolder
from jaxformer.training.batch import noop
from jaxformer.training.data.documents import HUB, Document, NotText, Source, TextFile, measure
from jaxformer.training.data.records import HubDataset, source_of
from jaxformer.training.data.separators import separators_in, with_separators

# Folders of the standard library with tests, third-party packages or machine-specific files.
_NOT_LIBRARY = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages"}
_NOT_LIBRARY |= {"__pycache__", "ensurepip", "lib-dynload"}
# Character tables are near copies of each other: the training part would contain the held-out part.
_NOT_LIBRARY |= {"encodings"}
_MACHINE_MADE = ("config-", "_sysconfigdata")


# What is known of each document in memory.
_MEASURED = np.dtype([("digest", ">u8", 2), ("num_bytes", "<i8"), ("num_characters", "<i8")])


class Documents:
    """Documents of several sources. Each iteration reads them from disk, one at a time.

    Only the digest (16 bytes) and the length in bytes and in characters of each document are in
    memory.
    """

    def __init__(self, sources: Iterable[Source] = ()):
        """Reads all sources once. Errors of the sources are not caught."""
        self._sources: list[Source] = []
        self._ends: list[int] = []  # number of documents up to the end of each source
        self._measured, self._is_present = bytearray(), np.ones(0, bool)
        for source in sources:
            self.add(source)

    def add(self, source: Source, on_read: Callable[[int], None] = noop) -> None:
        """Reads one more source. If that raises an error, nothing of the source is added.

        Args:
            source: The source.
            on_read: Called with the number of bytes read so far of the current document.
        """
        begin = len(self._measured)
        try:
            for document in source.documents():
                digest, *lengths = measure(document, on_read)
                self._measured += digest + struct.pack("<2q", *lengths)
        except ValueError:
            del self._measured[begin:]
            raise
        self._sources.append(source)
        self._ends.append(len(self._measured) // _MEASURED.itemsize)
        self._is_present = np.ones(self._ends[-1], bool)

    def drop_copies(self) -> list[str]:
        """Drops documents that are empty or equal to an earlier one.

        Returns:
            A line for each source that has such documents.
        """
        before = self._is_present
        self._is_present = before & (self._table["num_bytes"] > 0)
        return self._drop(before, self.digests, "a copy of", "copies of others or empty")

    def drop_alike(self, digests: np.ndarray) -> list[str]:
        """Drops documents whose tokens equal those of an earlier one.

        Args:
            digests: A digest of each document's tokens, uint64 [documents, 2] (see
                `token_digests`).

        Returns:
            A line for each source that has such documents.
        """
        same = "the same tokens as"
        return self._drop(self._is_present, digests, same, f"{same} others")

    def _drop(
        self, before: np.ndarray, digests: np.ndarray, of_file: str, of_records: str
    ) -> list[str]:
        """Drops documents whose digest equals that of an earlier one.

        Args:
            before: Whether each document was present before. Documents that were dropped earlier
                are not reported.
            digests: A digest for each document that is present.
            of_file: The reason for dropping a file, before the path of the earlier file.
            of_records: The reason for dropping records.

        Returns:
            A line for each source that had such documents.
        """
        present, first = np.flatnonzero(self._is_present), np.arange(len(before))
        if len(present):
            order, group = grouped(digests)
            begins = np.append(0, np.flatnonzero(np.diff(group)) + 1)
            first[present[order]] = present[order[begins][group]]
            self._is_present = self._is_present & (first == np.arange(len(before)))
        dropped, reports = before & ~self._is_present, []
        for source, begin, end in self._spans():
            if not (number := int(dropped[begin:end].sum())):
                continue
            if isinstance(source, TextFile):
                original = self._sources[np.searchsorted(self._ends, first[begin], "right")]
                reports.append(f"{source.path}: {of_file} {original.path}")
            else:
                noun = "documents" if separators_in(source) else "records"
                records = f"{number:,} of {end - begin:,} {noun}"
                reports.append(f"{source.path}: {records}, {of_records}")
        return reports

    def __iter__(self) -> Iterator[Document | TextFile]:
        """Yields the documents in order.

        Raises:
            ValueError: A file has another number of documents than before.
        """
        number = 0
        for source, end in zip(self._sources, self._ends, strict=True):
            for document in source.documents():
                if number < end and self._is_present[number]:
                    yield document
                number += 1
            if number != end:
                raise ValueError(f"{source.path}: the file was changed while it was read")

    def __len__(self) -> int:
        """Returns the number of documents."""
        return int(self._is_present.sum())

    def separators(self) -> str | None:
        """Returns a line about the separators that are written in the sources, or None."""
        found = [(separators_in(source), end - begin) for source, begin, end in self._spans()]
        divided = [(names, number) for names, number in found if names]
        if not divided:
            return None
        names = sum((names for names, _ in divided), Counter()).most_common()
        counts = ", ".join(f"{name} ({number:,})" for name, number in names)
        files = "1 file" if len(divided) == 1 else f"{len(divided):,} files"
        documents = f"{sum(number for _, number in divided):,} documents"
        return f"separators in the text: {counts}; they divide {files} into {documents}"

    def _spans(self) -> Iterator[tuple[Source, int, int]]:
        """Yields each source with the numbers where its documents begin and end."""
        return zip(self._sources, [0, *self._ends], self._ends, strict=False)

    @property
    def _table(self) -> np.ndarray:
        """`_MEASURED` of each document, also of those that were dropped."""
        return np.frombuffer(self._measured, _MEASURED)

    @property
    def num_bytes(self) -> int:
        """Total length in UTF-8 bytes."""
        return int(self.sizes.sum())

    @property
    def digests(self) -> np.ndarray:
        """Digest of each document, big-endian uint64 [len, 2], which sorts like the bytes."""
        return self._table["digest"][self._is_present]

    @property
    def sizes(self) -> np.ndarray:
        """Length of each document in UTF-8 bytes, int64 [len]."""
        return self._table["num_bytes"][self._is_present]

    @property
    def characters(self) -> np.ndarray:
        """Length of each document in characters, int64 [len]."""
        return self._table["num_characters"][self._is_present]


def grouped(digests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Groups equal digests.

    Args:
        digests: uint64 [number, 2].

    Returns:
        (the stable order that sorts the digests, the number of the group of each digest in that
        order).
    """
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    is_new = (np.diff(digests[order], axis=0) != 0).any(axis=1)
    return order, np.append(0, np.cumsum(is_new))[: len(order)]


def standard_library() -> Documents:
    """Reads the source code of this Python's standard library, without tests, sorted by name.

    These are about 10 MB that every machine with Python has. Files that are not UTF-8 or that
    describe the machine are skipped.

    Raises:
        ValueError: This Python installation has no source code.
    """
    root = sysconfig.get_path("stdlib")
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = filter(_is_library, subfolders)
        sources = (name for name in filter(_is_library, files) if name.endswith(".py"))
        names += [Path(folder, name).relative_to(root).as_posix() for name in sources]
    documents = Documents()
    for name in sorted(names):
        with suppress(NotText):
            documents.add(TextFile(root, name))
    if not len(documents):
        raise ValueError(
            f"{root}: this Python installation has no library source; give TEXT to train on"
        )
    return documents


def read_documents(
    paths: Sequence[Path | str],
    text_field: str = "text",
    on_read: Callable[[int], None] = noop,
    *,
    drop_copies: bool = True,
) -> tuple[Documents, list[str]]:
    """Reads files and the files in folders, without changing the text or its line ends.

    A file is one document; a line of a .jsonl and a row of a .parquet is also one document.
    Separators that are written in them divide them (see `separators`). .gz and .zst are
    decompressed. Folders are read recursively in sorted order, without hidden files and without the
    folders of runs. `hf:OWNER/NAME` is a dataset of the hub.

    Args:
        paths: Files, folders and datasets.
        text_field: The field or column of records that holds the text.
        on_read: Called with the number of bytes of all files read so far.
        drop_copies: Whether to drop documents that are empty or equal to an earlier one.

    Returns:
        (the documents, a line "path: reason" for each skipped file and for each file with skipped
        records). A file in a folder is skipped if it is empty, not text, unreadable or a copy.
        Links to folders are not followed.

    Raises:
        ValueError: A path does not exist, a named file is empty or not UTF-8 text, a folder has no
            text, or a record is damaged. The message names the line or row of the record.
    """
    documents, skipped, before = Documents(), [], 0
    for named in map(str, paths):
        is_empty = True
        for source in _sources(named, text_field, skipped):
            size = _size(source)

            def advance(num_bytes: int, before: int = before, size: int = size) -> None:
                on_read(before + min(num_bytes, size))

            try:
                documents.add(with_separators(source), advance)
                is_empty = False
            except NotText as error:
                if not os.path.isdir(named):
                    raise
                skipped.append(str(error))
            before += size
        if is_empty:
            raise ValueError(f"{named}: the folder has no UTF-8 text files")
    skipped += documents.drop_copies() if drop_copies else ()
    return documents, skipped


def total_size(paths: Sequence[Path | str]) -> int:
    """Returns the bytes on disk of files and of the files in folders."""
    return sum(_size(source) for named in map(str, paths) for source in _sources(named, "", []))


def _sources(named: str, text_field: str, skipped: list[str]) -> Iterator[Source]:
    """Yields the readers of a named file or of the files in a folder.

    A line for each skipped file is appended to ``skipped``.
    """
    if named.startswith(HUB):
        yield HubDataset("", named, text_field)
    elif os.path.isdir(named):
        for path in _files_below(named, skipped):
            yield source_of(named, os.path.relpath(path, named), text_field)
    else:
        yield source_of(*os.path.split(named), text_field)


def _size(source: Source) -> int:
    try:
        return os.path.getsize(source.path)
    except OSError:
        return 0


def _is_library(name: str) -> bool:
    return name not in _NOT_LIBRARY and not name.startswith(_MACHINE_MADE)


def _files_below(root: str, skipped: list[str]) -> Iterator[str]:
    """Yields the paths of all files below ``root`` that are not hidden, sorted.

    A line for each path that cannot be read is appended to ``skipped``.
    """
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in tuple(subfolders):
            path = os.path.join(folder, name)
            if os.path.islink(path):
                skipped.append(f"{path}: a link to a folder")
            elif RunFolder(path).holds_run and os.path.isdir(RunFolder(path).tokens):
                skipped.append(f"{path}: a run")
                subfolders.remove(name)
        for path in (os.path.join(folder, n) for n in sorted(files) if not n.startswith(".")):
            if os.path.isfile(path):  # opening a pipe would block
                yield path
            else:
                skipped.append(f"{path}: not a file")
