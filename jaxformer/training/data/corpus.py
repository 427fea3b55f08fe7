"""Which text there is to train on."""

from __future__ import annotations

import os
import sysconfig
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxformer.artifacts.run import RunFolder
from jaxformer.training.data.documents import (
    HUB,
    Document,
    NotText,
    Source,
    TextFile,
    measure,
)
from jaxformer.training.data.records import HubDataset, source_of

# Folders of the standard library that are tests, other people's packages or built for one machine.
_NOT_LIBRARY = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages"}
_NOT_LIBRARY |= {"__pycache__", "ensurepip", "lib-dynload"}
# Character tables, near copies of one another: what is held out would stand in what is trained on.
_NOT_LIBRARY |= {"encodings"}
_MACHINE_MADE = ("config-", "_sysconfigdata")


class Documents:
    """Documents at some sources, which are read anew on each walk and are never in memory at once.

    What is kept of each is a digest of its text (bytes [16]), its UTF-8 bytes and its characters.
    """

    def __init__(self, sources: Iterable[Source] = ()):
        """Reads all sources once; errors are theirs."""
        self._sources: list[Source] = []
        self._ends: list[int] = []  # number of documents up to the end of each source
        self._digests, self._sizes, self._characters = bytearray(), array("q"), array("q")
        self._kept = np.ones(0, bool)
        for source in sources:
            self.add(source)

    def add(self, source: Source, on_read: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Reads one more source; what cannot be read leaves no trace."""
        begin = len(self._sizes)
        try:
            for document in source.documents():
                digest, num_bytes, num_characters = measure(document, on_read)
                self._digests += digest
                self._sizes.append(num_bytes)
                self._characters.append(num_characters)
        except ValueError:
            del self._digests[16 * begin :], self._sizes[begin:], self._characters[begin:]
            raise
        self._sources.append(source)
        self._ends.append(len(self._sizes))
        self._kept = np.ones(len(self._sizes), bool)

    def drop_copies(self) -> list[str]:
        """Leaves out documents that are empty, or the same as one before them; one line for each
        source that has such documents."""
        if not self._sizes:
            return []
        order, group = grouped(self._all_digests())
        first = np.empty(len(order), int)
        first[order] = order[np.append(0, np.flatnonzero(np.diff(group)) + 1)][group]
        copies = first != np.arange(len(first))
        self._kept = ~copies & (np.array(self._sizes) > 0)
        found = []
        for source, begin, end in zip(self._sources, [0, *self._ends], self._ends, strict=False):
            if isinstance(source, TextFile):
                if copies[begin]:
                    original = self._sources[np.searchsorted(self._ends, first[begin], "right")]
                    found.append(f"{source.path}: a copy of {original.path}")
            elif dropped := int((~self._kept[begin:end]).sum()):
                found.append(
                    f"{source.path}: {dropped:,} of {end - begin:,} records, copies of others or "
                    "empty"
                )
        return found

    def __iter__(self) -> Iterator[Document | TextFile]:
        number = 0
        for source, end in zip(self._sources, self._ends, strict=True):
            for document in source.documents():
                if number < end and self._kept[number]:
                    yield document
                number += 1
            if number != end:
                raise ValueError(f"{source.path}: the file was changed while it was read")

    def __len__(self) -> int:
        return int(self._kept.sum())

    @property
    def num_sources(self) -> int:
        return len(self._sources)

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return int(self.sizes.sum())

    @property
    def digests(self) -> np.ndarray:
        """Big-endian uint64 [len, 2]: they sort as the bytes do."""
        return self._all_digests()[self._kept]

    @property
    def sizes(self) -> np.ndarray:
        """UTF-8 bytes, int64 [len]."""
        return np.array(self._sizes)[self._kept]

    @property
    def characters(self) -> np.ndarray:
        """Lengths in characters, int64 [len]."""
        return np.array(self._characters)[self._kept]

    def _all_digests(self) -> np.ndarray:
        return np.frombuffer(bytes(self._digests), ">u8").reshape(-1, 2)


def grouped(digests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The order that sorts digests, equal ones as they come, and in that order the number of the
    group of equal ones that each is in."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    is_new = (np.diff(digests[order], axis=0) != 0).any(axis=1)
    return order, np.append(0, np.cumsum(is_new))[: len(order)]


def standard_library() -> Documents:
    """The source of this Python's own standard library, without its tests, sorted by name.

    About 10 MB that every machine with Python has. Files that are not UTF-8, and files that
    describe the machine, are left out.

    Errors: ``ValueError`` if this Python came without its source.
    """
    root = sysconfig.get_path("stdlib")
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if _is_library(name)]
        for name in files:
            if name.endswith(".py") and _is_library(name):
                names.append(Path(folder, name).relative_to(root).as_posix())
    documents = Documents()
    for name in sorted(names):
        try:
            documents.add(TextFile(root, name))
        except NotText:
            continue
    if not documents.num_sources:
        raise ValueError(f"{root}: this Python has no library source; name files to train on")
    return documents


def read_documents(
    paths: Sequence[Path | str],
    text_field: str = "text",
    on_read: Callable[[int], None] = lambda num_bytes: None,
    *,
    drop_copies: bool = True,
) -> tuple[Documents, list[str]]:
    """What is in files, and in the files in folders, as it is: line ends are kept.

    A file is one document, but each line of a .jsonl, and each row of a .parquet, is one; .gz and
    .zst are decompressed. Folders are read to the bottom in sorted order without hidden files and
    without the folders of runs. `hf:OWNER/NAME` is a dataset of the hub.

    text_field: the field, or the column, of records that has the text. on_read: is told how many
    bytes of the files' have been read. drop_copies: of documents that are the same the first
    counts.

    Returns:
      The documents, and one line "path: why" for each file in a folder that was left out: it is
      empty, not text, unreadable, a copy, or a link to a folder (these are not followed, so no
      loop); and for each file of which records were.

    Errors: ``ValueError`` for a path that does not exist, a named file that is empty or not
    UTF-8 text, a folder without text, or, naming the line or row, for records that are damaged.
    """
    documents, skipped, before = Documents(), [], 0
    for named in map(str, paths):
        sources_before = documents.num_sources
        for source in _sources(named, text_field, skipped):
            size = _size(source)

            def advance(num_bytes, before=before, size=size):
                on_read(before + min(num_bytes, size))

            try:
                documents.add(source, advance)
            except NotText as error:
                if not os.path.isdir(named):
                    raise
                skipped.append(str(error))
            before += size
        if documents.num_sources == sources_before:
            raise ValueError(f"{named}: the folder has no UTF-8 text files")
    skipped += documents.drop_copies() if drop_copies else ()
    return documents, skipped


def total_size(paths: Sequence[Path | str]) -> int:
    """Bytes that files, and the files in folders, have on disk."""
    return sum(_size(source) for named in map(str, paths) for source in _sources(named, "", []))


def _sources(named: str, text_field: str, skipped: list[str]) -> Iterator[Source]:
    """What reads a named file or the files of a folder; why others are left out is ``skipped``."""
    if named.startswith(HUB):
        yield HubDataset(named, text_field)
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
    """Every file below ``root`` that is not hidden, sorted; what cannot be read is ``skipped``."""
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
            if os.path.isfile(path):  # to open a pipe would wait for ever
                yield path
            else:
                skipped.append(f"{path}: not a file")
