"""Checkpoints of a run, through Orbax: written whole or not at all, the newest few kept."""

import errno
import json
import logging
import shutil
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxformer.artifacts.run import next_free

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells every save to whoever listens


class Checkpoints:
    """The checkpoints below a folder, each with `params`, `rest` (arrays) and `progress` (JSON).

    `params` lie apart so that a model can be loaded without its optimiser.
    """

    def __init__(self, folder: Path, keep: int = 2):
        self._folder = folder.absolute()
        self._keep = keep

    def _manager(self):
        return ocp.CheckpointManager(
            self._folder,
            item_names=("params", "rest", "progress"),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=self._keep, enable_async_checkpointing=False
            ),
        )

    def steps(self) -> list[int]:
        """Steps of the checkpoints that were written to the end, oldest first."""
        if not self._folder.exists():
            return []
        return sorted(
            int(path.name)
            for path in self._folder.iterdir()
            if path.name.isdecimal() and (path / "_CHECKPOINT_METADATA").exists()
        )

    def last(self) -> str:
        """Which checkpoint is the last good one, in words."""
        steps = self.steps()
        if not steps:
            return "there is no checkpoint yet"
        return f"the last good checkpoint is {self._folder / str(steps[-1])}"

    def save(self, step: int, params, rest, progress: dict) -> None:
        """Write a checkpoint; what was there stays until the new one is complete.

        OSError (ENOSPC) before anything is written if the disk has no room for the arrays.
        """
        if step in self.steps():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves((params, rest)))
        free = shutil.disk_usage(self._folder).free
        if free < needed:  # Orbax, once it has begun, ends in the tracebacks of its many threads
            text = f"No space left for a checkpoint of {needed:,} bytes, {free:,} are free"
            raise OSError(errno.ENOSPC, text, str(self._folder))
        with self._manager() as manager:
            saved = manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(params),
                    rest=ocp.args.StandardSave(rest),
                    progress=ocp.args.JsonSave(progress),
                ),
            )
        if not saved:  # Orbax thinks it has a newer one
            raise OSError(f"the checkpoint of step {step} in {self._folder} was not written")

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename the checkpoints after `step`, which cannot be read, so that a run which goes on
        from `step` can save its own; returns what they are called now."""
        numbered = [path for path in self._folder.iterdir() if path.name.isdecimal()]
        return [
            path.rename(next_free(self._folder, f"{path.name}.unreadable"))
            for path in sorted(numbered)
            if int(path.name) > step
        ]

    def restore(self, like_params, like_rest=None) -> tuple[int, dict, object, dict]:
        """(step, params, rest, progress) of the newest checkpoint that can be read.

        like_params, like_rest: trees of arrays or shapes; a checkpoint of another tree, shape or
        dtype is a ValueError that names the first difference. like_rest None: rest is None.
        """
        steps = self.steps()
        if not steps:
            raise ValueError(f"{self._folder} holds no complete checkpoint yet")
        for step in reversed(steps):
            try:
                return step, *self._read(step, like_params, like_rest)
            except Unreadable as error:
                unreadable = error  # half deleted by a kill: the one before may be whole
        raise ValueError(f"no checkpoint in {self._folder} can be read: {unreadable}")

    def _read(self, step, like_params, like_rest):
        folder = self._folder / str(step)
        params = _read_arrays(folder / "params", like_params)
        rest = None if like_rest is None else _read_arrays(folder / "rest", like_rest)
        try:
            progress = json.loads((folder / "progress" / "metadata").read_text())
        except (OSError, ValueError) as error:
            raise Unreadable(f"{folder}: {error}") from error
        return params, rest, progress


class Unreadable(Exception):
    """A checkpoint, or a part of it, is not what a finished save leaves."""


def _read_arrays(folder: Path, like):
    """The arrays below a folder; ValueError if they are whole but not those of `like`."""
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            found = checkpointer.metadata(folder).item_metadata
        except Exception as error:  # Orbax raises many kinds
            raise Unreadable(f"{folder}: {error}") from error
        if not _leaves(found):
            raise Unreadable(f"{folder}: nothing is in it")
        refuse_difference(folder, found, like)
        try:
            return checkpointer.restore(folder, as_shapes(like))
        except Exception as error:
            raise Unreadable(f"{folder}: {error}") from error


def as_shapes(tree):
    """The tree with a jax.ShapeDtypeStruct for each array."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)


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
