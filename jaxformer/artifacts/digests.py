"""Digests of the files of a folder: whether they are still what was written."""

import hashlib
from pathlib import Path

from jaxformer.artifacts.run import write_whole

DIGESTS = "SHA256SUMS"  # `sha256sum --check SHA256SUMS`, in the folder, checks it too


def write_digests(folder: Path) -> None:
    """Write down, in the folder itself and at once, the digest of every file below it."""
    write_whole(folder / DIGESTS, "".join(f"{line}\n" for line in sorted(_lines(folder))))


def damaged_file(folder: Path) -> str | None:
    """The first file that was changed, lost or added since the digests; None if there is none.

    OSError if a file cannot be read.
    """
    recorded = (folder / DIGESTS).read_text(encoding="utf-8", errors="replace").splitlines()
    different = set(recorded) ^ _lines(folder)
    return min((line.partition("  ")[2] or DIGESTS for line in different), default=None)


def _lines(folder: Path) -> set[str]:
    """A line for each file: SHA-256 in hexadecimal, two spaces, path below the folder."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {f"{_digest(folder / name)}  {name}" for name in names - {DIGESTS}}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
