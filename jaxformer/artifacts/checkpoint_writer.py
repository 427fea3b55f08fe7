"""Checkpoints of a run in progress, through Orbax: written while it trains, whole or not at all.

Beside what Orbax writes lie the digests of its files, written last: what a disk, a copy or a person
has changed since is seen, and the newest checkpoint that is whole is used.
"""

import errno
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, EveryNSteps, LatestN

from jaxformer.artifacts.checkpoint import Checkpoints, not_finite, without_wildcards
from jaxformer.artifacts.digests import write_digests


class NotFinite(ValueError):
    """An array that was to be saved holds NaN or an infinity."""


class CheckpointWriter:
    """Writes checkpoints below a folder while it is open; closing it waits for the last one.

    One is being written at a time. What is wrong with it is raised by the next `save` or `wait`, or
    at the end.
    """

    def __init__(self, folder: Path, keep: int = 2, keep_every: int | None = None):
        """keep: how many of the newest stay; keep_every: those whose step it divides stay too."""
        self._folder = folder.absolute()
        self._kept = [LatestN(keep), *([EveryNSteps(keep_every)] if keep_every else [])]
        self._open = ExitStack()
        self._manager: ocp.CheckpointManager | None = None
        self._worker = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future | None = None

    def __enter__(self) -> "CheckpointWriter":
        """ValueError if nothing can be written into the folder."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._folder).close()
        except OSError as error:
            raise ValueError(
                f"checkpoints cannot be written into {self._folder}: {error.strerror}"
            ) from None
        return self

    def __exit__(self, *_) -> None:
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            self._open.close()

    def save(self, step: int, params, rest, progress: dict) -> None:
        """Begin a checkpoint; the arrays may be changed or donated as soon as this returns.

        What was there stays until the new one is complete. Before anything is written: NotFinite if
        an array holds NaN or an infinity, OSError (ENOSPC) if the disk has no room for the arrays.
        """
        self.wait()
        if step in Checkpoints(self._folder).steps():
            return
        bad = not_finite({"params": params, "rest": rest})
        if bad is not None:
            raise NotFinite(f"{bad} is not finite; a checkpoint holds finite numbers alone")
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves((params, rest)))
        free = shutil.disk_usage(self._folder).free
        if free < needed:  # said before Orbax has begun, and left parts behind
            text = f"No space left for a checkpoint of {needed:,} bytes, {free:,} are free"
            raise OSError(errno.ENOSPC, text, str(self._folder))
        manager = self._manager = self._manager or self._open_manager()
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
        self._writing = self._worker.submit(self._finish, manager, self._folder / str(step))

    def wait(self) -> None:
        """Until what was begun is complete; raises what kept it from being so."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _open_manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy(self._kept),
            cleanup_tmp_directories=True,  # what a kill left half written
        )
        items = ("params", "rest", "progress")
        path = self._open.enter_context(without_wildcards(self._folder))
        return self._open.enter_context(
            ocp.CheckpointManager(path, item_names=items, options=options)
        )

    def _finish(self, manager: ocp.CheckpointManager, folder: Path) -> None:
        manager.wait_until_finished()
        if not folder.exists():
            raise OSError(f"{folder} was not written")
        if jax.process_index() == 0:
            write_digests(folder)
