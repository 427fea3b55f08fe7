"""Checkpoints of a run, written and read through Orbax.

Training continues during a save. The digests of all files are written last. They show later whether
a disk error, a copy or a person changed a file; readers use the newest undamaged checkpoint.

Files hold {"lora_a": A, "lora_b": B} in place of {"kernel": `LowRankKernel`, …}, and no entry for a
frozen array, which is None in memory. The moments and averages of a kernel have the same form.
"""

import errno
import hashlib
import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, EveryNSteps, LatestN

from jaxformer.artifacts.files import next_free, write_whole
from jaxformer.functional.linear.low_rank import LowRankKernel

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
            return step, dict(_progress(self._folder / str(step)))
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


def _progress(folder: Path) -> dict:
    return json.loads((folder / "progress" / "metadata").read_text())


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


@contextmanager
def _unreadable(folder: Path) -> Iterator[None]:
    """Turns every error into an `Unreadable` that names the folder. Orbax raises many kinds."""
    try:
        yield
    except Exception as error:
        raise Unreadable(f"{folder} cannot be read: {error}") from error


def _read(folder: Path, like_params: Any, like_rest: Any) -> tuple[dict, Any, dict]:
    """Returns (params, rest, progress) of a checkpoint; raises Unreadable if it is damaged."""
    _check_damage(folder)
    params = _read_arrays(folder / "params", like_params)
    rest = None if like_rest is None else _read_arrays(folder / "rest", like_rest)
    with _unreadable(folder):
        return params, rest, _progress(folder)


def _check_damage(folder: Path) -> None:
    """Raises Unreadable if the save is incomplete, or a file differs from its digest."""
    with _unreadable(folder):
        damaged = damaged_file(folder) if _has_digests(folder) else None
    if damaged is not None:
        raise Unreadable(f"{folder} is damaged: {damaged} does not match {DIGESTS}")
    if not _is_committed(folder):
        raise Unreadable(f"{folder} was not completely written")


def _read_arrays(folder: Path, like: Any) -> Any:
    """Reads the arrays of a folder; raises ValueError if undamaged arrays differ from `like`."""
    with ocp.StandardCheckpointer() as checkpointer, without_wildcards(folder) as path:
        with _unreadable(folder):
            metadata = checkpointer.metadata(path).item_metadata
        if not leaf_types(metadata):
            raise Unreadable(f"{folder}: it holds no arrays")
        stored = stored_form(like)
        check_equal(folder, metadata, stored)
        with _unreadable(folder):
            arrays = checkpointer.restore(path, as_shapes(stored))
    if (bad := not_finite(arrays)) is not None:
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


# ---- digests


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


# ---- writing


class NotFinite(ValueError):
    """An array to save holds NaN or an infinity."""


class CheckpointWriter:
    """Writes checkpoints into a folder, one at a time, in the background.

    An error of a save is raised by the next `save` or `wait`, or at the end of the context, which
    waits for the last save.
    """

    def __init__(self, folder: Path, keep: int = 2, keep_every: int | None = None):
        """Prepares a writer; entering the context checks the folder.

        Args:
            folder: The folder of the checkpoints.
            keep: Number of the newest checkpoints that are not deleted.
            keep_every: Checkpoints whose step is a multiple of this are never deleted.
        """
        self._folder = folder.absolute()
        self._policies = [LatestN(keep), *([EveryNSteps(keep_every)] if keep_every else [])]
        self._open = ExitStack()
        self._worker = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future | None = None

    def __enter__(self) -> "CheckpointWriter":
        """Creates the folder; raises ValueError if nothing can be written into it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._folder).close()
        except OSError as error:
            raise ValueError(
                f"checkpoints cannot be written into {self._folder}: {error.strerror}"
            ) from None
        return self

    def __exit__(self, *_) -> None:
        """Waits for the last save, and raises its error."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            self._open.close()

    def save(self, step: int, params: Any, rest: Any, progress: dict) -> None:
        """Starts to write a checkpoint. The arrays may be changed or donated after the return.

        The earlier checkpoints are not deleted before the new one is complete.

        Raises:
            NotFinite: If an array holds NaN or an infinity. Nothing is written.
            OSError: If the disk has no room for the arrays (ENOSPC; nothing is written), or if the
                previous save failed.
        """
        self.wait()
        if step in Checkpoints(self._folder).steps():
            return
        params, rest = stored_form(params), stored_form(rest)
        if (bad := not_finite({"params": params, "rest": rest})) is not None:
            raise NotFinite(f"{bad} is not finite; a checkpoint may hold finite numbers only")
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves((params, rest)))
        free = shutil.disk_usage(self._folder).free
        if free < needed:  # checked before Orbax starts, which would leave incomplete files
            text = f"No space left for a checkpoint of {needed:,} bytes, {free:,} are free"
            raise OSError(errno.ENOSPC, text, str(self._folder))
        saved = self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(params),
                rest=ocp.args.StandardSave(rest),
                progress=ocp.args.JsonSave(progress),
            ),
        )
        if not saved:  # Orbax believes that a newer checkpoint exists
            raise OSError(f"the checkpoint of step {step} in {self._folder} was not written")
        self._writing = self._worker.submit(self._finish, self._folder / str(step))

    def wait(self) -> None:
        """Waits until the current save is complete, and raises its error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    @cached_property
    def _manager(self) -> ocp.CheckpointManager:
        """Orbax's manager of the folder, which the first save opens."""
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy(self._policies),
            cleanup_tmp_directories=True,  # incomplete files of a killed process
        )
        items = ("params", "rest", "progress")
        path = self._open.enter_context(without_wildcards(self._folder))
        manager = ocp.CheckpointManager(path, item_names=items, options=options)
        return self._open.enter_context(manager)

    def _finish(self, folder: Path) -> None:
        self._manager.wait_until_finished()
        if not folder.exists():
            raise OSError(f"{folder} was not written")
        if jax.process_index() == 0:
            write_digests(folder)


# ---- trees in memory and in files


def stored_form(tree: Any) -> Any:
    """Returns a tree in the form of files. Trees without low-rank updates are unchanged."""

    def converted(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        parts = {}
        for name, branch in node.items():
            if isinstance(branch, LowRankKernel):
                parts |= {"lora_a": branch.down, "lora_b": branch.up}
            else:
                parts[name] = stored_form(branch)
        none = [name for name, x in parts.items() if x is None or (isinstance(x, dict) and not x)]
        return {name: x for name, x in parts.items() if name not in none}

    return jax.tree.map(converted, tree, is_leaf=lambda x: isinstance(x, dict))


def in_memory(stored: Any, like: Any) -> Any:
    """Returns the arrays of a tree in the form of files, in the structure of `like`.

    Both forms have the same arrays in the same order.
    """
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(stored))


def not_finite(tree: Any) -> str | None:
    """Returns the path of the first array that holds NaN or an infinity, or None."""
    floats = {x: y for x, y in _arrays(tree).items() if jnp.issubdtype(y.dtype, jnp.inexact)}
    are_finite = jax.device_get(_are_finite(list(floats.values())))
    return next((name for name, x in zip(floats, are_finite, strict=True) if not x), None)


@jax.jit
def _are_finite(leaves: list) -> list:
    """Returns, for each array, whether all its values are finite.

    It runs on the devices of the arrays, since a process may hold only parts of them.
    """
    return [jnp.isfinite(leaf).all() for leaf in leaves]


def as_shapes(tree: Any) -> Any:
    """Returns the tree with a jax.ShapeDtypeStruct, with a sharding, for each array.

    An array without a sharding in `tree` is placed on one device, whatever sharding it was saved
    with.
    """
    one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        where = getattr(x, "sharding", None) or one
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return jax.tree.map(shape, tree)


def check_equal(where: Path, stored: Any, wanted: Any) -> None:
    """Raises ValueError naming the first leaf that differs in presence, shape or dtype."""
    stored, wanted = leaf_types(stored), leaf_types(wanted)
    for name in sorted(stored.keys() | wanted.keys()):
        a, b = stored.get(name, "nothing"), wanted.get(name, "nothing")
        if a != b:
            raise ValueError(f"{where} does not fit this model: {name} is {a}, expected {b}")


def _arrays(tree: Any) -> dict[str, Any]:
    """Returns the leaves that have a shape, by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    name = partial(jax.tree_util.keystr, simple=True, separator="/")
    return {name(path): leaf for path, leaf in leaves if hasattr(leaf, "shape")}


def leaf_types(tree: Any) -> dict[str, str]:
    """Returns the dtype and the shape of each array of a tree, as text, by its path."""
    arrays = {x: y for x, y in _arrays(tree).items() if not isinstance(y, np.generic)}
    return {name: f"{x.dtype} {tuple(x.shape)}" for name, x in arrays.items()}
