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
from jaxformer.training.data.records import HubDataset, make_source
from jaxformer.training.data.separators import separators_in, with_separators

# Folders of the standard library with tests, third-party packages or machine-specific files.
_NOT_LIBRARY = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages"}
_NOT_LIBRARY |= {"__pycache__", "ensurepip", "lib-dynload"}
# The character tables in this folder are so similar that the training part would contain most lines
# of the held-out part.
_NOT_LIBRARY |= {"encodings"}
_MACHINE_MADE = ("config-", "_sysconfigdata")


# Data type of the record that `Documents` stores in memory for each document.
_MEASURED = np.dtype([("digest", ">u8", 2), ("num_bytes", "<i8"), ("num_characters", "<i8")])


class Documents:
    """Documents from several sources. Each iteration reads the documents from disk, one by one.

    Memory holds only the digest (16 bytes) and the length in bytes and in characters of each
    document.
    """

    def __init__(self, sources: Iterable[Source] = ()):
        """Reads each source once, to compute the digest and the lengths of its documents.

        Raises:
            ValueError: A source cannot be read.
        """
        self._sources: list[Source] = []
        # For each source, the number of documents in this source and all earlier sources.
        self._ends: list[int] = []
        self._measured, self._is_present = bytearray(), np.ones(0, bool)
        for source in sources:
            self.add(source)

    def add(self, source: Source, on_read: Callable[[int], None] = noop) -> None:
        """Reads another source. If reading fails, no document of the source is added.

        Args:
            source: The source.
            on_read: Called with the number of bytes of the current document that were read so far.
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
        """Drops documents that are empty or equal to an earlier document.

        Returns:
            A line of text for each source with dropped documents.
        """
        before = self._is_present
        self._is_present = before & (self._table["num_bytes"] > 0)
        return self._drop(before, self.digests, "a copy of", "empty or copies of earlier texts")

    def drop_alike(self, digests: np.ndarray) -> list[str]:
        """Drops documents whose tokens equal the tokens of an earlier document.

        Args:
            digests: A digest of each document's tokens, uint64 [documents, 2] (see
                `token_digests`).

        Returns:
            A line of text for each source with dropped documents.
        """
        same = "the same tokens as"
        return self._drop(self._is_present, digests, same, f"{same} others")

    def _drop(
        self, before: np.ndarray, digests: np.ndarray, of_file: str, of_records: str
    ) -> list[str]:
        """Drops documents whose digest equals the digest of an earlier document.

        Args:
            before: bool [documents], False for documents that were dropped earlier. Documents that
                were dropped earlier are not reported again.
            digests: A digest of each document that has not been dropped.
            of_file: Text of the message about a dropped file, such as "a copy of". The message ends
                with the path of the earlier file.
            of_records: Text of the message about dropped records, such as "copies of earlier
                texts".

        Returns:
            A line of text for each source with dropped documents.
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
            ValueError: The number of documents in a file has changed since the first reading.
        """
        number = 0
        for source, end in zip(self._sources, self._ends, strict=True):
            for document in source.documents():
                if number < end and self._is_present[number]:
                    yield document
                number += 1
            if number != end:
                raise ValueError(f"{source.path}: the file changed during reading; start again")

    def __len__(self) -> int:
        """Returns the number of documents."""
        return int(self._is_present.sum())

    def separators(self) -> str | None:
        """Returns a line of text about the separators in the sources, or None if there are none."""
        found = [(separators_in(source), end - begin) for source, begin, end in self._spans()]
        divided = [(names, number) for names, number in found if names]
        if not divided:
            return None
        names = sum((names for names, _ in divided), Counter()).most_common()
        counts = ", ".join(f"{name} ({number:,})" for name, number in names)
        files = "1 file" if len(divided) == 1 else f"{len(divided):,} files"
        documents = f"{sum(number for _, number in divided):,} documents"
        return f"separators in the text: {counts}; the separators split {files} into {documents}"

    def _spans(self) -> Iterator[tuple[Source, int, int]]:
        """Yields each source with the index range of its documents."""
        return zip(self._sources, [0, *self._ends], self._ends, strict=False)

    @property
    def _table(self) -> np.ndarray:
        """A record of each document, including dropped documents."""
        return np.frombuffer(self._measured, _MEASURED)

    @property
    def num_bytes(self) -> int:
        """Total length in UTF-8 bytes."""
        return int(self.sizes.sum())

    @property
    def digests(self) -> np.ndarray:
        """Digest of each document, uint64 [len, 2].

        The numbers are big-endian, so that they sort like the bytes of the digests.
        """
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
        (indices that sort the digests stably, the group number of each sorted digest). Equal
        digests, and only equal digests, have the same group number.
    """
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    is_new = (np.diff(digests[order], axis=0) != 0).any(axis=1)
    return order, np.append(0, np.cumsum(is_new))[: len(order)]


def standard_library() -> Documents:
    """Reads the source code of Python's standard library, without tests, sorted by name.

    The text has about 10 MB and is part of a normal Python installation. The function skips files
    that are not UTF-8, and files with build settings of this installation.

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
            f"{root}: this Python installation has no library source; name a TEXT to train on"
        )
    return documents


def read_documents(
    paths: Sequence[Path | str],
    text_field: str = "text",
    on_read: Callable[[int], None] = noop,
    *,
    drop_copies: bool = True,
) -> tuple[Documents, list[str]]:
    """Reads files and folders, without changing the text or its line endings.

    Each file is a document, except that each line of a .jsonl and each row of a .parquet is a
    document. Separators in the text split it into further documents (see `separators`). .gz and
    .zst files are decompressed. Folders are read recursively in sorted order, without hidden files
    and run folders. `hf:OWNER/NAME` is a dataset of the Hugging Face hub.

    Args:
        paths: Files, folders and datasets.
        text_field: The field or column of records that holds the text.
        on_read: Called with the total number of bytes read so far.
        drop_copies: Whether to drop documents that are empty or equal to an earlier document.

    Returns:
        (the documents, a line "path: reason" for each file that was skipped completely or partly).
        A file in a folder is skipped if it is empty, a copy, unreadable or not text. Links to
        folders are not followed.

    Raises:
        ValueError: A path does not exist, a named file is empty or not UTF-8 text, a folder has no
            text, or a record is damaged. The error message includes the line or row number.
    """
    documents, skipped, before = Documents(), [], 0
    for named in map(str, paths):
        is_empty = True
        for source in named_sources(named, text_field, skipped):
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
    """Returns the total size on disk of files and of the files in folders, in bytes."""
    return sum(
        _size(source) for named in map(str, paths) for source in named_sources(named, "", [])
    )


def named_sources(named: str, text_field: str, skipped: list[str]) -> Iterator[Source]:
    """Yields a `Source` for a named file, or for each file in a named folder.

    The function appends a line for each skipped file to ``skipped``.
    """
    if named.startswith(HUB):
        yield HubDataset("", named, text_field)
    elif os.path.isdir(named):
        for path in _files_below(named, skipped):
            yield make_source(named, os.path.relpath(path, named), text_field)
    else:
        yield make_source(*os.path.split(named), text_field)


def _size(source: Source) -> int:
    try:
        return os.path.getsize(source.path)
    except OSError:
        return 0


def _is_library(name: str) -> bool:
    return name not in _NOT_LIBRARY and not name.startswith(_MACHINE_MADE)


def _files_below(root: str, skipped: list[str]) -> Iterator[str]:
    """Yields the paths of all files below ``root`` that are not hidden, sorted.

    For each path that cannot be read, the function appends a line to ``skipped``.
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
            if os.path.isfile(path):  # Opening a named pipe would block.
                yield path
            else:
                skipped.append(f"{path}: not a file")
