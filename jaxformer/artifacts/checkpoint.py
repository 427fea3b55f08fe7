"""Checkpoints of a run, read through Orbax: the newest that is whole, by the digests beside it."""

import json
import logging
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxformer.artifacts.digests import DIGESTS, damaged_file
from jaxformer.artifacts.run import next_free

# Orbax tells every save to whoever listens, and a failed one, which is raised, in many tracebacks.
logging.getLogger("absl").setLevel(logging.CRITICAL)


class Checkpoints:
    """The checkpoints below a folder, each with `params`, `rest` (arrays) and `progress` (JSON).

    `params` lie apart so that a model can be loaded without its optimiser.
    """

    def __init__(self, folder: Path):
        self._folder = folder.absolute()

    def _numbered(self) -> list[Path]:
        """The folders of checkpoints, whole or not, oldest first."""
        paths = self._folder.iterdir() if self._folder.exists() else ()
        return sorted((path for path in paths if path.name.isdecimal()), key=_step)

    def _by_trust(self) -> list[Path]:
        """In the order in which they are tried: those with digests, then those without, which an
        earlier version wrote or whose save was cut short; of each the newest first."""
        return sorted(self._numbered(), key=lambda path: (_has_digests(path), _step(path)))[::-1]

    @property
    def is_empty(self) -> bool:
        """Whether there is no checkpoint, not even one that cannot be read."""
        return not self._numbered()

    def steps(self) -> list[int]:
        """Steps of the checkpoints that were written to the end, oldest first."""
        return [_step(path) for path in self._numbered() if _is_committed(path)]

    def last(self) -> str:
        """Which checkpoint is the last good one, in words."""
        if not self.steps():
            return "there is no checkpoint yet"
        for folder in self._by_trust():
            try:
                _refuse_damage(folder)
            except Unreadable:
                continue
            if _has_digests(folder):
                return f"the last good checkpoint is {folder}"
            return f"the last checkpoint is {folder}, which cannot be checked (no {DIGESTS})"
        return f"no checkpoint in {self._folder} is whole"

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename the checkpoints after `step`, which cannot be read, so that a run which goes on
        from `step` can save its own; returns what they are called now."""
        return [
            path.rename(next_free(self._folder, f"{path.name}.unreadable"))
            for path in self._numbered()
            if _step(path) > step
        ]

    def restore(self, like_params, like_rest=None) -> tuple[int, dict, object, dict]:
        """(step, params, rest, progress) of the newest checkpoint that is whole.

        like_params, like_rest: trees of arrays or shapes; a checkpoint of another tree, shape or
        dtype is a ValueError that names the first difference. like_rest None: rest is None. A
        warning says which newer checkpoints are passed over, and why; one without digests is used
        if none that has them is whole, with a warning. ValueError if no checkpoint can be read.
        """
        if self.is_empty:
            raise ValueError(f"{self._folder} holds no complete checkpoint yet")
        unchecked = f"has no {DIGESTS}: an earlier version saved it, or a kill cut the save short"
        faults = {
            folder: f"{folder} {unchecked}"
            for folder in self._numbered()
            if not _has_digests(folder)
        }
        for folder in self._by_trust():
            try:
                found = _read(folder, like_params, like_rest)
            except Unreadable as error:
                faults[folder] = str(error)
                continue
            _warn_of(faults, folder)
            return _step(folder), *found
        raise ValueError(
            f"no checkpoint in {self._folder} can be read: {'; '.join(faults.values())}"
        )


def _step(folder: Path) -> int:
    return int(folder.name)


def _is_committed(folder: Path) -> bool:
    return (folder / "_CHECKPOINT_METADATA").exists()


def _has_digests(folder: Path) -> bool:
    return (folder / DIGESTS).exists()


def _warn_of(faults: dict[Path, str], used: Path) -> None:
    """Say what is wrong with checkpoints newer than the one used, and that it cannot be checked."""
    for folder, fault in faults.items():
        if folder == used:
            warnings.warn(f"{fault}; it cannot be checked, and is used as it is", stacklevel=3)
        elif _step(folder) > _step(used):
            warnings.warn(f"{fault}; the checkpoint of step {used.name} is used", stacklevel=3)


class Unreadable(Exception):
    """A checkpoint, or a part of it, is not what a finished save leaves."""


def _read(folder: Path, like_params, like_rest):
    """(params, rest, progress) of a checkpoint; Unreadable if it is damaged."""
    _refuse_damage(folder)
    params = _read_arrays(folder / "params", like_params)
    rest = None if like_rest is None else _read_arrays(folder / "rest", like_rest)
    try:
        progress = json.loads((folder / "progress" / "metadata").read_text())
    except (OSError, ValueError) as error:
        raise Unreadable(f"{folder}: {error}") from error
    return params, rest, progress


def _refuse_damage(folder: Path) -> None:
    """Unreadable if the save was not finished, or a file is not what its digest says."""
    try:
        damaged = damaged_file(folder) if _has_digests(folder) else None
    except OSError as error:
        raise Unreadable(f"{folder} cannot be read: {error}") from error
    if damaged is not None:
        raise Unreadable(f"{folder} is damaged: {damaged} is not what its {DIGESTS} says")
    if not _is_committed(folder):
        raise Unreadable(f"{folder} was not written to the end")


def _read_arrays(folder: Path, like):
    """The arrays below a folder; ValueError if they are whole but not those of `like`."""
    with ocp.StandardCheckpointer() as checkpointer, without_wildcards(folder) as path:
        try:
            found = checkpointer.metadata(path).item_metadata
        except Exception as error:  # Orbax raises many kinds
            raise Unreadable(f"{folder}: {error}") from error
        if not _leaves(found):
            raise Unreadable(f"{folder}: nothing is in it")
        refuse_difference(folder, found, like)
        try:
            arrays = checkpointer.restore(path, as_shapes(like))
        except Exception as error:
            raise Unreadable(f"{folder}: {error}") from error
    bad = not_finite(arrays)
    if bad is not None:
        raise Unreadable(f"{folder}: {bad} is not finite")
    return arrays


@contextmanager
def without_wildcards(folder: Path):
    """A path to the folder that Orbax does not take for a pattern."""
    if not any(character in str(folder) for character in "[]*?"):
        yield folder
        return
    with tempfile.TemporaryDirectory() as elsewhere:
        link = Path(elsewhere) / "checkpoint"
        link.symlink_to(folder, target_is_directory=True)
        yield link


def not_finite(tree) -> str | None:
    """The path of the first array that holds NaN or an infinity; None if there is none."""
    leaves = [
        (path, leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    finite = jax.device_get(_are_finite([leaf for _, leaf in leaves]))
    for (path, _), is_finite in zip(leaves, finite, strict=True):
        if not is_finite:
            return jax.tree_util.keystr(path, simple=True, separator="/")
    return None


@jax.jit
def _are_finite(leaves: list) -> list:
    """Of each array; where the arrays are, since a process may hold parts of them alone."""
    return [jnp.isfinite(leaf).all() for leaf in leaves]


def as_shapes(tree):
    """The tree with a jax.ShapeDtypeStruct for each array, and where it is to be: on one device
    unless the tree says where, whatever it was saved from."""
    one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def shape(x):
        where = getattr(x, "sharding", None) or one
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return jax.tree.map(shape, tree)


def refuse_difference(where, found, wanted) -> None:
    """ValueError naming the first leaf in which two trees differ in presence, shape or dtype."""
    found, wanted = _leaves(found), _leaves(wanted)
    for name in sorted(found.keys() | wanted.keys()):
        a, b = found.get(name, "nothing"), wanted.get(name, "nothing")
        if a != b:
            raise ValueError(f"{where} does not fit this model: {name} is {a}, wanted {b}")


def _leaves(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype} {tuple(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if hasattr(leaf, "shape") and not isinstance(leaf, np.generic)
    }
