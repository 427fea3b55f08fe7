"""Preparation of a run folder: its lock, its config and the tokenized data."""

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from jaxformer.artifacts.files import check_utf8
from jaxformer.artifacts.run import RunFolder
from jaxformer.training.config import Inputs, TrainingConfig
from jaxformer.training.run_folders import locked, write_run

if TYPE_CHECKING:
    from jaxformer.training.screen import Screen


class Base(Protocol):
    """The checkpoint that a new run starts from."""

    def keep(self, folder: RunFolder, training: TrainingConfig) -> None:
        """Copies into the run's folder what the run needs from the checkpoint."""


def prepare_run(
    folder: RunFolder,
    inputs: Inputs,
    config: TrainingConfig,
    screen: "Screen",
    stack: ExitStack,
    resume: bool,
    base: Base | None,
) -> None:
    """Creates and locks the run folder, and writes the tokenized data unless it already exists.

    Args:
        folder: The run folder.
        inputs: The text or the pairs to read.
        config: The `TrainingConfig`.
        screen: Where progress is shown.
        stack: An `ExitStack` that holds the lock until it is closed.
        resume: Whether the run continues; otherwise the folder must not hold a run.
        base: The `Base` of a new run; None: the run starts from fresh parameters.

    Raises:
        ValueError: The folder is in use, or the data cannot be trained on.
    """
    from jaxformer.training.data.prepare import is_prepared
    from jaxformer.training.tasks import task_of

    kind, gathered, is_new = task_of(config), None, False
    if not resume:
        check_free(folder)
        gathered = kind.gather(inputs, config, screen)  # raises before the folder is created
        is_new = claim(folder)
    hold_lock(folder, screen.say, stack)
    if not is_prepared(folder):
        gathered = kind.gather(inputs, config, screen) if resume else gathered
        if base is not None:
            base.keep(folder, config)
        write_run(folder, inputs, config)
        screen.say("reading …")
        try:
            kind.write(folder, config, gathered, screen)
        except ValueError:
            if not resume:  # the data were rejected late: remove the new run
                _empty(folder.path, remove=is_new)
            raise
    screen.say(f"run folder: {folder.path}   documents: {folder.documents}")


def hold_lock(folder: RunFolder, say: Callable[[str], None], stack: ExitStack) -> None:
    """Locks the folder against other training processes until `stack` is closed."""
    try:
        if not stack.enter_context(locked(folder.lock)):
            say(
                f"warning: no locks for {folder.path} on this system; a second process that trains "
                "in this folder would not be detected"
            )
    except BlockingIOError:
        raise ValueError(
            f"{folder.path} is being trained by another process; wait until it ends, or "
            "choose another --out"
        ) from None
    except OSError as error:
        raise ValueError(f"{folder.path} cannot be written: {error.strerror}") from None


def claim(folder: RunFolder) -> bool:
    """Creates the run folder.

    Args:
        folder: The run folder, which was free when it was last checked.

    Returns:
        Whether this call created it; False if it was there and empty.

    Raises:
        ValueError: Another process has put a run or files into it in the meantime.
    """
    folder.path.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.path.mkdir()
    except FileExistsError:
        if not folder.path.is_dir() or not folder.is_free:
            raise ValueError(
                f"{folder.path} has just been created by another process; run the command again"
            ) from None
        return False
    return True


def _empty(path: Path, remove: bool) -> None:
    """Deletes the contents of the folder, and the folder itself if `remove` is true."""
    for inside in path.iterdir():
        shutil.rmtree(inside) if inside.is_dir() else inside.unlink()
    if remove:
        path.rmdir()


def check_free(folder: RunFolder) -> None:
    """Raises ValueError unless a new run may be put into the folder."""
    check_utf8(folder.path)
    if folder.holds_run:
        raise ValueError(
            f"{folder.path} already holds a run; continue it with --resume, or choose another --out"
        )
    if folder.path.exists() and not folder.path.is_dir():
        raise ValueError(f"{folder.path} is a file; --out must name a folder or a new path")
    if not folder.is_free:
        raise ValueError(f"{folder.path} is not empty and holds no run; choose another --out")
