"""Paths of files that verbs write."""

from itertools import chain, count
from pathlib import Path


def check_out(out: Path | None, suffix: str) -> None:
    """Raises ValueError unless `out` is None or a file with this suffix in an existing folder."""
    if out is not None and (out.suffix != suffix or not out.parent.is_dir()):
        raise ValueError(f"out is {out}; it must be a {suffix} file in an existing folder")


def free_path(path: Path) -> Path:
    """Returns the first of name.ext, name-2.ext, … that does not exist yet."""
    others = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    return next(x for x in chain([path], others) if not x.exists())
