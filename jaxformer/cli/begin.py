"""How a run comes to its folder, and the folder to what is read from."""

import shutil
from contextlib import ExitStack
from pathlib import Path

from jaxformer.artifacts.lock import locked
from jaxformer.artifacts.run import RunFolder
from jaxformer.training.config import Inputs
from jaxformer.training.run_config import write_run


def begin(folder, inputs: Inputs, config, screen, held, resume: bool, base) -> None:
    """The folder is this run's own while `held` is open, and what it learns from is read, unless an
    earlier start has."""
    from jaxformer.training.data.prepare import is_prepared
    from jaxformer.training.tasks import task_of

    kind, gathered, made = task_of(config), None, False
    if not resume:
        _refuse_taken(folder)
        gathered = kind.gather(inputs, config, screen)  # nothing is created before it is accepted
        made = claim(folder)
    _hold_alone(folder, screen.say, held)
    if not is_prepared(folder):
        gathered = kind.gather(inputs, config, screen) if resume else gathered
        if base is not None:
            base.keep(folder, config)
        write_run(folder, inputs, config)
        screen.say("reading …")
        try:
            kind.write(folder, config, gathered, screen)
        except ValueError:
            if not resume:  # refused after all: there is no run
                _empty(folder.path, remove=made)
            raise
    screen.say(f"run folder: {folder.path}   documents: {folder.documents}")


def _hold_alone(folder: RunFolder, say, held: ExitStack) -> None:
    """No other process trains in the folder while `held` is open."""
    try:
        if not held.enter_context(locked(folder.lock)):
            say(f"no locks for {folder.path}: a second start on it would not be noticed")
    except BlockingIOError:
        raise ValueError(
            f"{folder.path} is being trained by another process; wait until it ends, or "
            "choose another --out"
        ) from None
    except OSError as error:
        raise ValueError(f"{folder.path} cannot be written: {error.strerror}") from None


def claim(folder: RunFolder) -> bool:
    """Make the folder, which another start may have done since it was found free; False: it was
    there."""
    folder.path.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.path.mkdir()
    except FileExistsError:
        if not folder.path.is_dir() or not folder.is_free:
            raise ValueError(
                f"{folder.path} was taken by another start meanwhile; start again"
            ) from None
        return False
    return True


def _empty(path: Path, remove: bool) -> None:
    """Take away what this start put into the folder, and the folder if it made that too."""
    for inside in path.iterdir():
        shutil.rmtree(inside) if inside.is_dir() else inside.unlink()
    if remove:
        path.rmdir()


def _refuse_taken(folder: RunFolder) -> None:
    if folder.holds_run:
        raise ValueError(
            f"{folder.path} already holds a run; go on with it by --resume, or choose another --out"
        )
    if folder.path.exists() and not folder.path.is_dir():
        raise ValueError(f"{folder.path} is a file; --out must be a folder or not exist yet")
    if not folder.is_free:
        raise ValueError(f"{folder.path} is not empty and holds no run; choose another --out")
