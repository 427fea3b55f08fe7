"""Which text is trained on, and which of it is held out."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

# Folders of the standard library that are tests, other people's packages or built for one machine.
_NOT_LIBRARY = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages"}
_NOT_LIBRARY |= {"__pycache__", "ensurepip", "lib-dynload"}
# Character tables, near copies of one another: what is held out would stand in what is trained on.
_NOT_LIBRARY |= {"encodings"}
_MACHINE_MADE = ("config-", "_sysconfigdata")

# Unless told otherwise: (fraction, minimum_bytes) of `split`. Of a small text the fraction alone is
# too little to tell two models apart.
DEFAULT_SPLIT = (0.05, 500_000)

# A document may be at most this part of the held-out text; one that is larger gives its end.
_LARGEST_SHARE = 1 / 4


class Document(NamedTuple):
    """One text; ``name`` is its path relative to the folder in which it was found."""

    name: str
    text: str

    @property
    def num_bytes(self) -> int:
        """Length in UTF-8 bytes."""
        return len(self.text.encode())


def standard_library() -> list[Document]:
    """The source of this Python's own standard library, without its tests, sorted by name.

    About 10 MB that every machine with Python has. Files that are not UTF-8, and files that
    describe the machine, are left out.

    Errors: ``ValueError`` if this Python came without its source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if _is_library(name)]
        for name in files:
            if name.endswith(".py") and _is_library(name):
                path = Path(folder, name)
                text, problem = _read(path)
                if problem is None:
                    documents.append(Document(path.relative_to(root).as_posix(), text))
    if not documents:
        raise ValueError(f"{root}: this Python has no library source; name files to train on")
    return sorted(documents)


def read_documents(paths: Sequence[Path | str]) -> tuple[list[Document], list[str]]:
    """Reads files, and the files in folders, as they are: line ends are kept.

    Folders are read to the bottom in sorted order without hidden files. A file met twice counts
    once.

    Returns:
      The documents, and one line "path: why" for each file in a folder that was left out: it is
      empty, not text, unreadable, or a link to a folder (these are not followed, so no loop).

    Errors: ``ValueError`` for a path that does not exist, a named file that is empty or not
    UTF-8 text, or a folder without text.
    """
    documents, skipped, seen = [], [], set()
    for named in map(Path, paths):
        is_folder = named.is_dir()
        texts_found = 0
        for path in _files_below(named, skipped) if is_folder else [named]:
            text, problem = _read(path)
            if problem is None:
                texts_found += 1
                if (identity := path.resolve()) not in seen:
                    seen.add(identity)
                    name = path.relative_to(named).as_posix() if is_folder else path.name
                    documents.append(Document(name, text))
            elif is_folder:
                skipped.append(f"{path}: {problem}")
            else:
                raise ValueError(f"{path}: {problem}")
        if not texts_found:
            raise ValueError(f"{named}: the folder has no UTF-8 text files")
    return documents, skipped


def split(
    documents: Sequence[Document], fraction: float = 0.05, minimum_bytes: int = 0
) -> tuple[list[Document], list[Document]]:
    """Divides the text into a part to train on and a part held out; both keep the order given.

    The held-out part aims at ``fraction`` of the bytes, or at ``minimum_bytes`` where that is
    more, though not at more than a tenth for the sake of the minimum. Whole documents are taken
    in the order of a digest of their content until it is reached. A document that would be more
    than a quarter of the held-out part (every document, when there are few) is not taken: its
    end, cut at a line break, is. So the held-out part is never more than 1.25 times its aim
    (and a line break or so), and ``split([book], 0.1)`` holds out the last tenth of a book.

    The digest is of the content, not of the name: copies fall on the same side, so that nothing
    held out was trained on under another name, and neither the machine nor where the folder lies
    nor the order matters. Every character is in exactly one part.

    Errors: ``ValueError`` for a fraction outside (0, 0.5] or text too short to divide.
    """
    if not 0 < fraction <= 0.5:
        raise ValueError(f"fraction: {fraction} is not accepted; more than 0 and at most 0.5 is")
    total = sum(document.num_bytes for document in documents)
    aim = max(fraction * total, min(minimum_bytes, total / 10))
    cut, taken = _choose(documents, aim, aim / max(total, 1))

    train, held_out = [], []
    for document in documents:
        digest = _digest(document)
        if digest in cut:
            position = _cut_position(document.text, aim / total)
            train.append(Document(document.name, document.text[:position]))
            held_out.append(Document(document.name, document.text[position:]))
        else:
            (held_out if digest in taken else train).append(document)
    train, held_out = ([part for part in side if part.text] for side in (train, held_out))
    if not train or not held_out:
        raise ValueError(f"documents: {total} bytes of text are too few to hold some of them out")
    return train, held_out


def baselines(held_out: Iterable[Document]) -> dict[str, float]:
    """Bits per byte of ``gzip -9`` and ``xz -9e`` on the documents concatenated.

    What a model's bits per byte must beat to have learnt anything beyond repetition.

    Errors: ``ValueError`` if there is no text.
    """
    data = "".join(document.text for document in held_out).encode()
    if not data:
        raise ValueError("held_out: there is no text to compress")
    compressed = {
        "gzip": gzip.compress(data, compresslevel=9, mtime=0),
        "xz": lzma.compress(data, preset=9 | lzma.PRESET_EXTREME),
    }
    return {name: 8 * len(output) / len(data) for name, output in compressed.items()}


def _is_library(name: str) -> bool:
    return name not in _NOT_LIBRARY and not name.startswith(_MACHINE_MADE)


def _files_below(root: Path, skipped: list[str]) -> Iterator[Path]:
    """Every file below ``root`` that is not hidden, sorted; what cannot be read is ``skipped``."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for path in (Path(folder, name) for name in subfolders):
            if path.is_symlink():
                skipped.append(f"{path}: a link to a folder")
        for path in (Path(folder, name) for name in sorted(files) if not name.startswith(".")):
            if path.is_file():  # to open a pipe would wait for ever
                yield path
            else:
                skipped.append(f"{path}: not a file")


def _read(path: Path) -> tuple[str, str | None]:
    """The text of a file and None, or "" and why there is none."""
    try:
        data = path.read_bytes()
    except OSError as error:
        return "", (error.strerror or str(error)).lower()
    if not data:
        return "", "the file is empty"
    if b"\0" in data:
        return "", "not a text file (it has NUL bytes)"
    try:
        return data.decode("utf-8"), None
    except UnicodeDecodeError as error:
        return "", f"not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x})"


def _digest(document: Document) -> bytes:
    return hashlib.blake2b(document.text.encode(), digest_size=16).digest()


def _choose(documents: Sequence[Document], aim: float, share: float) -> tuple[set, set]:
    """Digests of the documents to cut, and of those to hold out whole."""
    sizes: dict[bytes, int] = {}
    for document in documents:
        digest = _digest(document)
        sizes[digest] = sizes.get(digest, 0) + document.num_bytes
    cut = {digest for digest, size in sizes.items() if size > _LARGEST_SHARE * aim}
    missing = aim - share * sum(sizes[digest] for digest in cut)
    taken = set()
    for digest in sorted(sizes.keys() - cut):
        if missing <= 0:
            break
        taken.add(digest)
        missing -= sizes[digest]
    return cut, taken


def _cut_position(text: str, share: float) -> int:
    """Where the last ``share`` of a text begins: after a line break if one is near, or as is."""
    position = max(1, min(round((1 - share) * len(text)), len(text) - 1))
    line_break = text.find("\n", position - 1, position + (len(text) - position) // 4)
    return position if line_break < 0 else line_break + 1
