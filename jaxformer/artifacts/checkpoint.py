"""Checkpoints of a run, read through Orbax and verified by the digests stored with them."""

import hashlib
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from jaxformer.artifacts import trees
from jaxformer.artifacts.checkpoint_form import in_memory, stored_form
from jaxformer.artifacts.files import write_whole
from jaxformer.artifacts.run import next_free

DIGESTS = "SHA256SUMS"  # the format of `sha256sum --check SHA256SUMS`, run in the folder

# Orbax logs every save, and a failed save in many tracebacks although it also raises it.
logging.getLogger("absl").setLevel(logging.CRITICAL)


class Checkpoints:
    """Checkpoints in a folder, each with `params`, `rest` (arrays) and `progress` (JSON).

    `params` is separate so that a model can be loaded without its optimizer state.
    """

    def __init__(self, folder: Path):
        """Names the folder; nothing is read yet.

        Args:
            folder: The folder of the checkpoints.
        """
        self._folder = folder.absolute()

    def _numbered(self) -> list[Path]:
        """Returns the folders of all checkpoints, damaged ones too, oldest first."""
        paths = self._folder.iterdir() if self._folder.exists() else ()
        return sorted((path for path in paths if path.name.isdecimal()), key=_step)

    def _by_trust(self) -> list[Path]:
        """Returns the checkpoints in the order in which `restore` tries them.

        Checkpoints with digests come first, then those without, whose save was interrupted. Within
        each group the newest comes first.
        """
        return sorted(self._numbered(), key=lambda path: (_has_digests(path), _step(path)))[::-1]

    @property
    def is_empty(self) -> bool:
        """Whether there is no checkpoint at all, not even a damaged one."""
        return not self._numbered()

    def steps(self) -> list[int]:
        """Returns the steps of the completely written checkpoints, oldest first."""
        return [_step(path) for path in self._numbered() if _is_committed(path)]

    def progress(self) -> tuple[int, dict]:
        """Returns (step, progress) of the newest completely written checkpoint.

        The arrays are not read. Without such a checkpoint the result is (0, {}).
        """
        step = max(self.steps(), default=0)
        try:
            return step, dict(json.loads(_progress_file(self._folder / str(step)).read_text()))
        except (OSError, TypeError, ValueError):
            return step, {}

    def last(self) -> str:
        """Returns a message that says which checkpoint is the newest undamaged one."""
        if not self.steps():
            return "there is no checkpoint yet"
        for folder in self._by_trust():
            try:
                _check_damage(folder)
            except Unreadable:
                continue
            if _has_digests(folder):
                return f"the last good checkpoint is {folder}"
            return f"the last checkpoint is {folder}, which cannot be checked (no {DIGESTS})"
        return f"no checkpoint in {self._folder} is whole"

    def set_aside_after(self, step: int) -> list[Path]:
        """Renames the checkpoints after `step`, which cannot be read, and returns the new paths.

        A run that resumes from `step` can then save its own checkpoints.
        """
        return [
            path.rename(next_free(self._folder, f"{path.name}.unreadable"))
            for path in self._numbered()
            if _step(path) > step
        ]

    def restore(self, like_params: Any, like_rest: Any = None) -> tuple[int, dict, Any, dict]:
        """Reads the newest undamaged checkpoint.

        A warning names each damaged newer checkpoint and its fault. A checkpoint without digests is
        used, with a warning, only if no undamaged checkpoint has digests.

        Args:
            like_params: A tree of arrays or shapes like the stored parameters.
            like_rest: A tree of arrays or shapes like the stored `rest`; None: `rest` is not read.

        Returns:
            (step, params, rest, progress); rest is None if `like_rest` is None.

        Raises:
            ValueError: If no checkpoint can be read, or if its tree, shapes or dtypes differ from
                `like_params` or `like_rest`. The message names the first difference.
        """
        if self.is_empty:
            raise ValueError(f"{self._folder} holds no complete checkpoint yet")
        unchecked = f"has no {DIGESTS}: its save was interrupted"
        faults = {x: f"{x} {unchecked}" for x in self._numbered() if not _has_digests(x)}
        for folder in self._by_trust():
            try:
                content = _read(folder, like_params, like_rest)
            except Unreadable as error:
                faults[folder] = str(error)
                continue
            _warn_of(faults, folder)
            return _step(folder), *content
        reasons = "; ".join(faults.values())
        raise ValueError(f"no checkpoint in {self._folder} can be read: {reasons}")

    def read(self, step: int, like_params: Any) -> dict:
        """Reads the parameters of the checkpoint of one step.

        Args:
            step: One of `steps`.
            like_params: A tree of arrays or shapes like the stored parameters.

        Raises:
            ValueError: If there is no such checkpoint, it is damaged, or its tree differs from
                `like_params`.
        """
        if step not in self.steps():
            known = ", ".join(map(str, self.steps())) or "none"
            raise ValueError(f"step is {step}; the checkpoints in {self._folder} are {known}")
        try:
            return _read(self._folder / str(step), like_params, None)[0]
        except Unreadable as error:
            raise ValueError(str(error)) from None


def _step(folder: Path) -> int:
    return int(folder.name)


def _is_committed(folder: Path) -> bool:
    return (folder / "_CHECKPOINT_METADATA").exists()


def _progress_file(folder: Path) -> Path:
    return folder / "progress" / "metadata"


def _has_digests(folder: Path) -> bool:
    return (folder / DIGESTS).exists()


def _warn_of(faults: dict[Path, str], used: Path) -> None:
    """Warns of checkpoints newer than `used`, and of `used` itself if it has no digests."""
    for folder, fault in faults.items():
        if folder == used:
            warnings.warn(f"{fault}; it cannot be checked, but is used", stacklevel=3)
        elif _step(folder) > _step(used):
            warnings.warn(f"{fault}; the checkpoint of step {used.name} is used", stacklevel=3)


class Unreadable(Exception):
    """A checkpoint, or a part of it, is damaged or incomplete."""


def _read(folder: Path, like_params: Any, like_rest: Any) -> tuple[dict, Any, dict]:
    """Returns (params, rest, progress) of a checkpoint; raises Unreadable if it is damaged."""
    _check_damage(folder)
    params = _read_arrays(folder / "params", like_params)
    rest = None if like_rest is None else _read_arrays(folder / "rest", like_rest)
    try:
        progress = json.loads(_progress_file(folder).read_text())
    except (OSError, ValueError) as error:
        raise Unreadable(f"{folder}: {error}") from error
    return params, rest, progress


def _check_damage(folder: Path) -> None:
    """Raises Unreadable if the save is incomplete, or a file differs from its digest."""
    try:
        damaged = damaged_file(folder) if _has_digests(folder) else None
    except OSError as error:
        raise Unreadable(f"{folder} cannot be read: {error}") from error
    if damaged is not None:
        raise Unreadable(f"{folder} is damaged: {damaged} does not match {DIGESTS}")
    if not _is_committed(folder):
        raise Unreadable(f"{folder} was not completely written")


def _read_arrays(folder: Path, like: Any) -> Any:
    """Reads the arrays of a folder; raises ValueError if undamaged arrays differ from `like`."""
    with ocp.StandardCheckpointer() as checkpointer, without_wildcards(folder) as path:
        try:
            metadata = checkpointer.metadata(path).item_metadata
        except Exception as error:  # Orbax raises many kinds
            raise Unreadable(f"{folder}: {error}") from error
        if not trees.leaf_types(metadata):
            raise Unreadable(f"{folder}: it holds no arrays")
        stored = stored_form(like)
        trees.check_equal(folder, metadata, stored)
        try:
            arrays = checkpointer.restore(path, trees.as_shapes(stored))
        except Exception as error:
            raise Unreadable(f"{folder}: {error}") from error
    if (bad := trees.not_finite(arrays)) is not None:
        raise Unreadable(f"{folder}: {bad} is not finite")
    return in_memory(arrays, like)


@contextmanager
def without_wildcards(folder: Path) -> Iterator[Path]:
    """Yields a path to the folder without characters that Orbax reads as a wildcard pattern."""
    if not any(character in str(folder) for character in "[]*?"):
        yield folder
        return
    with tempfile.TemporaryDirectory() as elsewhere:
        link = Path(elsewhere) / "checkpoint"
        link.symlink_to(folder, target_is_directory=True)
        yield link


def write_digests(folder: Path) -> None:
    """Writes the digests of all files below `folder` to its SHA256SUMS, atomically."""
    write_whole(folder / DIGESTS, "".join(f"{line}\n" for line in sorted(_lines(folder))))


def damaged_file(folder: Path) -> str | None:
    """Returns the first file that was changed, lost or added since `write_digests`, or None.

    Raises:
        OSError: If a file cannot be read.
    """
    recorded = (folder / DIGESTS).read_text(encoding="utf-8", errors="replace").splitlines()
    different = set(recorded) ^ _lines(folder)
    return min((line.partition("  ")[2] or DIGESTS for line in different), default=None)


def _lines(folder: Path) -> set[str]:
    """Returns one line per file: SHA-256 in hexadecimal, two spaces, path below the folder."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {f"{_digest(folder / name)}  {name}" for name in names - {DIGESTS}}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
