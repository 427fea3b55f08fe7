"""Writer for the checkpoints of a run in progress, based on Orbax.

Training continues during a save. The digests of all files are written last. They show later whether
a disk error, a copy or a person changed a file; readers use the newest undamaged checkpoint.
"""

import errno
import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, EveryNSteps, LatestN

from jaxformer.artifacts.checkpoint import Checkpoints, without_wildcards, write_digests
from jaxformer.artifacts.checkpoint_form import stored_form
from jaxformer.artifacts.trees import not_finite


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
        self._manager: ocp.CheckpointManager | None = None
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
        manager = self._manager = self._manager or self._open_manager()
        saved = manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(params),
                rest=ocp.args.StandardSave(rest),
                progress=ocp.args.JsonSave(progress),
            ),
        )
        if not saved:  # Orbax believes that a newer checkpoint exists
            raise OSError(f"the checkpoint of step {step} in {self._folder} was not written")
        self._writing = self._worker.submit(self._finish, manager, self._folder / str(step))

    def wait(self) -> None:
        """Waits until the current save is complete, and raises its error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _open_manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy(self._policies),
            cleanup_tmp_directories=True,  # incomplete files of a killed process
        )
        items = ("params", "rest", "progress")
        path = self._open.enter_context(without_wildcards(self._folder))
        manager = ocp.CheckpointManager(path, item_names=items, options=options)
        return self._open.enter_context(manager)

    def _finish(self, manager: ocp.CheckpointManager, folder: Path) -> None:
        manager.wait_until_finished()
        if not folder.exists():
            raise OSError(f"{folder} was not written")
        if jax.process_index() == 0:
            write_digests(folder)
