"""Checkpoints of a run, written and read through Orbax.

Training continues during a save. SHA-256 digests of all files are written last. A later change to a
file, for example by a disk error, is detected by its digest. `Checkpoints.restore` reads the newest
undamaged checkpoint.

In files, {"lora_a": A, "lora_b": B} replaces {"kernel": `LowRankKernel`, …}, also in the optimizer
moments and the averages. Frozen arrays are represented by None in memory and are not saved.
"""

import errno
import hashlib
import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Generator
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

# In the folder of a checkpoint, `sha256sum --check SHA256SUMS` checks its files.
DIGESTS = "SHA256SUMS"

# Orbax logs every save. If a save fails, Orbax logs many tracebacks and also raises an exception.
logging.getLogger("absl").setLevel(logging.CRITICAL)


class Checkpoints:
    """Reader of the checkpoints in a folder.

    A checkpoint consists of the arrays `params` and `rest`, and of `progress`, a JSON object. A
    model can be loaded from `params` alone, without the optimizer state in `rest`.
    """

    def __init__(self, folder: Path):
        """Stores the path of the folder without reading it.

        Args:
            folder: The folder of the checkpoints.
        """
        self._folder = folder.absolute()

    def _numbered(self) -> list[Path]:
        """Returns the folders of all checkpoints, including damaged checkpoints, oldest first."""
        paths = self._folder.iterdir() if self._folder.exists() else ()
        return sorted((path for path in paths if path.name.isdecimal()), key=_step)

    def _by_trust(self) -> list[Path]:
        """Returns the checkpoints in the order in which `restore` tries to read them.

        Checkpoints with digests come first. Checkpoints without digests follow, because their saves
        were interrupted. Within each group, with or without digests, the newest checkpoint comes
        first.
        """
        return sorted(self._numbered(), key=lambda path: (_has_digests(path), _step(path)))[::-1]

    @property
    def is_empty(self) -> bool:
        """Whether the folder contains no checkpoints, damaged or undamaged."""
        return not self._numbered()

    def steps(self) -> list[int]:
        """Returns the steps of the completely written checkpoints, oldest first."""
        return [_step(path) for path in self._numbered() if _is_committed(path)]

    def progress(self) -> tuple[int, dict]:
        """Returns (step, progress) of the newest completely written checkpoint.

        This method does not read arrays. If there is no complete checkpoint, the result is (0, {}).
        """
        step = max(self.steps(), default=0)
        try:
            return step, dict(_progress(self._folder / str(step)))
        except (OSError, TypeError, ValueError):
            return step, {}

    def last(self) -> str:
        """Returns a sentence that names the newest undamaged checkpoint, for error messages."""
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
        return f"all checkpoints in {self._folder} are damaged or incomplete"

    def set_aside_after(self, step: int) -> list[Path]:
        """Renames the checkpoints of all steps above `step` and returns their new paths.

        The renamed checkpoints could not be read. A run that resumes from `step` saves new
        checkpoints under the original names.
        """
        return [
            path.rename(next_free(self._folder, f"{path.name}.unreadable"))
            for path in self._numbered()
            if _step(path) > step
        ]

    def restore(self, like_params: Any, like_rest: Any = None) -> tuple[int, dict, Any, dict]:
        """Reads the newest undamaged checkpoint.

        For each newer checkpoint that is damaged, a warning gives its path and the fault. If no
        undamaged checkpoint has digests, the function reads a checkpoint without digests and warns.

        Args:
            like_params: A tree of arrays or shapes like the stored parameters.
            like_rest: A tree of arrays or shapes like the stored `rest`, which contains the
                optimizer state. If None, the function does not read `rest`.

        Returns:
            (step, params, rest, progress); rest is None if `like_rest` is None.

        Raises:
            ValueError: No checkpoint can be read, or the tree, shapes or dtypes of the checkpoint
                differ from `like_params` or `like_rest`. The message names the first difference.
        """
        if self.is_empty:
            raise ValueError(f"{self._folder} has no complete checkpoint yet")
        unchecked = f"has no {DIGESTS}: its save was interrupted"
        faults = {x: f"{x} {unchecked}" for x in self._numbered() if not _has_digests(x)}
        for folder in self._by_trust():
            try:
                content = _read(folder, like_params, like_rest)
            except Unreadable as error:
                faults[folder] = str(error)
                continue
            _warn_about(faults, folder)
            return _step(folder), *content
        reasons = "; ".join(faults.values())
        raise ValueError(f"no checkpoint in {self._folder} can be read: {reasons}")

    def read(self, step: int, like_params: Any) -> dict:
        """Reads the parameters of the checkpoint of one step.

        Args:
            step: The step of the checkpoint. Must be in `self.steps()`.
            like_params: A tree of arrays or shapes like the stored parameters.

        Raises:
            ValueError: The checkpoint does not exist or is damaged, or its tree differs from
                `like_params`.
        """
        if step not in self.steps():
            known = ", ".join(map(str, self.steps())) or "none"
            raise ValueError(
                f"step is {step}, but {self._folder} has checkpoints of the steps {known}"
            )
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


def _warn_about(faults: dict[Path, str], used: Path) -> None:
    """Warns about unreadable checkpoints newer than `used`; warns if `used` has no digests."""
    for folder, fault in faults.items():
        if folder == used:
            warnings.warn(f"{fault}; this checkpoint is used without a check", stacklevel=3)
        elif _step(folder) > _step(used):
            warnings.warn(f"{fault}; the checkpoint of step {used.name} is used", stacklevel=3)


class Unreadable(Exception):
    """Error for a damaged or incomplete checkpoint."""


@contextmanager
def _unreadable(folder: Path) -> Generator[None]:
    """Converts every error, of whatever type, into an `Unreadable` that names the folder."""
    try:
        yield
    except Exception as error:
        raise Unreadable(f"{folder} cannot be read: {error}") from error


def _read(folder: Path, like_params: Any, like_rest: Any) -> tuple[dict, Any, dict]:
    """Reads (params, rest, progress) of a checkpoint; raises Unreadable if it is damaged."""
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
    """Reads the arrays of a folder; raises ValueError if their tree differs from `like`."""
    with ocp.StandardCheckpointer() as checkpointer, without_wildcards(folder) as path:
        with _unreadable(folder):
            metadata = checkpointer.metadata(path).item_metadata
        if not leaf_types(metadata):
            raise Unreadable(f"{folder} contains no arrays")
        stored = stored_form(like)
        check_equal(folder, metadata, stored)
        with _unreadable(folder):
            arrays = checkpointer.restore(path, as_shapes(stored))
    if (bad := not_finite(arrays)) is not None:
        raise Unreadable(f"{folder}: {bad} is not finite")
    return in_memory(arrays, like)


@contextmanager
def without_wildcards(folder: Path) -> Generator[Path]:
    """Yields a path that leads to `folder` and contains none of Orbax's wildcard characters."""
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
    """Returns the first file that was changed, removed or added since `write_digests`, or None.

    Raises:
        OSError: a file cannot be read.
    """
    recorded = (folder / DIGESTS).read_text(encoding="utf-8", errors="replace").splitlines()
    different = set(recorded) ^ _lines(folder)
    return min((line.partition("  ")[2] or DIGESTS for line in different), default=None)


def _lines(folder: Path) -> set[str]:
    """Returns a line for each file: its SHA-256 in hexadecimal, two spaces, its relative path."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {f"{_digest(folder / name)}  {name}" for name in names - {DIGESTS}}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- writing


class NotFinite(ValueError):
    """Error for an array with NaN or infinity that is about to be saved."""


class CheckpointWriter:
    """Context manager that writes checkpoints in the background, one at a time.

    If a save fails, its error is raised by the next call of `save` or `wait`, or at the end of the
    context. The end of the context waits for the last save.
    """

    def __init__(self, folder: Path, max_to_keep: int = 2, keep_period: int | None = None):
        """Stores the settings; entering the context checks that the folder is writable.

        Args:
            folder: The folder of the checkpoints.
            max_to_keep: The number of newest checkpoints to keep.
            keep_period: Checkpoints whose step is a multiple of this number are never deleted.
        """
        self._folder = folder.absolute()
        self._policies = [
            LatestN(max_to_keep),
            *([EveryNSteps(keep_period)] if keep_period else []),
        ]
        self._open = ExitStack()
        self._worker = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future | None = None

    def __enter__(self) -> "CheckpointWriter":
        """Creates the folder; raises ValueError if it is not writable."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._folder).close()
        except OSError as error:
            raise ValueError(
                f"checkpoints cannot be written into {self._folder}: {error.strerror}"
            ) from None
        return self

    def __exit__(self, *_) -> None:
        """Waits for the last save and raises its error, if it failed."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            self._open.close()

    def save(self, step: int, params: Any, rest: Any, progress: dict) -> None:
        """Starts to write a checkpoint in the background.

        After the return, the caller may modify or donate the arrays. Earlier checkpoints are
        deleted only after the new checkpoint is complete.

        Raises:
            NotFinite: An array contains NaN or infinity. Nothing is written.
            OSError: The disk has too little space for the arrays (ENOSPC; nothing is written), or
                the previous save failed.
        """
        self.wait()
        if step in Checkpoints(self._folder).steps():
            return
        params, rest = stored_form(params), stored_form(rest)
        if (bad := not_finite({"params": params, "rest": rest})) is not None:
            raise NotFinite(f"{bad} contains NaN or infinity, so the checkpoint was not written")
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves((params, rest)))
        free = shutil.disk_usage(self._folder).free
        # A failed save leaves incomplete files, so the free space is checked before the save.
        if free < needed:
            text = f"No space left for a checkpoint of {needed:,} bytes; {free:,} bytes are free"
            raise OSError(errno.ENOSPC, text, str(self._folder))
        saved = self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(params),
                rest=ocp.args.StandardSave(rest),
                progress=ocp.args.JsonSave(progress),
            ),
        )
        # Orbax does not save a step that is older than its latest checkpoint.
        if not saved:
            raise OSError(f"the checkpoint of step {step} in {self._folder} was not written")
        self._writing = self._worker.submit(self._finish, self._folder / str(step))

    def wait(self) -> None:
        """Waits until the current save is complete, and raises its error, if it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    @cached_property
    def _manager(self) -> ocp.CheckpointManager:
        """Orbax's checkpoint manager of the folder, created by the first save."""
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy(self._policies),
            # A process that is killed during a save leaves temporary folders.
            cleanup_tmp_directories=True,
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
    """Converts a tree to the structure of checkpoint files.

    Each `LowRankKernel` becomes the entries "lora_a" and "lora_b". Entries that are None or empty
    are omitted.
    """

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
    """Converts a tree from the structure in files to the structure of `like`.

    The structure in files and the structure of `like` have the same arrays in the same order.
    """
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(stored))


def not_finite(tree: Any) -> str | None:
    """Returns the path of the first array that contains NaN or infinity, or None."""
    floats = {x: y for x, y in _arrays(tree).items() if jnp.issubdtype(y.dtype, jnp.inexact)}
    are_finite = jax.device_get(_are_finite(list(floats.values())))
    return next((name for name, x in zip(floats, are_finite, strict=True) if not x), None)


@jax.jit
def _are_finite(leaves: list) -> list:
    """Returns, for each array, whether all its values are finite.

    The check runs on the arrays' devices, because a process may have only some of their shards.
    """
    return [jnp.isfinite(leaf).all() for leaf in leaves]


def as_shapes(tree: Any) -> Any:
    """Replaces each array of the tree by a jax.ShapeDtypeStruct with a sharding.

    An array without a sharding in `tree` gets a sharding on a single device, whatever its sharding
    was when it was saved.
    """
    one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        where = getattr(x, "sharding", None) or one
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return jax.tree.map(shape, tree)


def check_equal(where: Path, stored: Any, wanted: Any) -> None:
    """Raises ValueError for the first leaf that is missing or has another shape or dtype."""
    stored, wanted = leaf_types(stored), leaf_types(wanted)
    for name in sorted(stored.keys() | wanted.keys()):
        a, b = stored.get(name, "nothing"), wanted.get(name, "nothing")
        if a != b:
            raise ValueError(
                f"{where} does not fit this model: {name} is {a}, but the model needs {b}"
            )


def _arrays(tree: Any) -> dict[str, Any]:
    """Returns the leaves that have a shape, by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    name = partial(jax.tree_util.keystr, simple=True, separator="/")
    return {name(path): leaf for path, leaf in leaves if hasattr(leaf, "shape")}


def leaf_types(tree: Any) -> dict[str, str]:
    """Returns the dtype and the shape of each array of a tree, as text, by its path."""
    arrays = {x: y for x, y in _arrays(tree).items() if not isinstance(y, np.generic)}
    return {name: f"{x.dtype} {tuple(x.shape)}" for name, x in arrays.items()}
