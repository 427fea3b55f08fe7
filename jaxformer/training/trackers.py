"""Experiment trackers, which receive the lines of metrics.jsonl.

The names of trackers come from config.json, which may come from an untrusted source. So `TRACKERS`
is a closed table of constructors, and no module is imported by a name from the file.
"""

import re
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Protocol
from uuid import uuid4

from jaxformer.artifacts.files import write_whole
from jaxformer.artifacts.run import RunFolder
from jaxformer.models.config.check import shown


class Tracker(Protocol):
    """Interface of a tracker, which receives the figures of a run during training."""

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Records the figures of a step."""

    def close(self) -> None:
        """Finishes the run in the tracker."""


class TensorBoard:
    """Event files in a folder, for `tensorboard --logdir`."""

    def __str__(self) -> str:
        """Returns the name of the tracker."""
        return "tensorboard"

    def __init__(self, folder: Path):
        """Opens an event file in the folder."""
        self._writer = import_module("tensorboard.summary").Writer(str(folder))

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Records the figures of a step."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step=step)

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


class Service:
    """trackio or wandb, which share an interface. A resumed run continues its earlier record."""

    def __init__(self, package: ModuleType, folder: RunFolder, config: dict, **options: str):
        """Opens a run in the service.

        Args:
            package: The imported trackio or wandb.
            folder: The folder of the run.
            config: The settings to record.
            **options: Further options of the package's `init`.
        """
        self._package = package
        # The id distinguishes runs whose folders have the same name.
        name = f"{folder.path.resolve().name}-{_id_of(folder)}"
        options |= {"project": "jaxformer", "name": name, "resume": "allow"}
        package.init(config=config, **options)

    def __str__(self) -> str:
        """Returns the name of the tracker."""
        return self._package.__name__

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Records the figures of a step."""
        self._package.log(figures, step=step)

    def close(self) -> None:
        """Finishes the run in the service."""
        self._package.finish()


def _id_of(folder: RunFolder) -> str:
    """Returns the random id of a run, which is stored in its folder."""
    if not folder.tracker_id.exists():
        write_whole(folder.tracker_id, uuid4().hex[:8])
    text = folder.tracker_id.read_text()
    if not re.fullmatch("[0-9a-f]{8}", text):
        raise ValueError(f"{folder.tracker_id} holds {shown(text)}; it must be 8 hex digits")
    return text


def _wandb(folder: RunFolder, config: dict) -> Tracker:
    # wandb needs an id, and a folder for its files.
    return Service(import_module("wandb"), folder, config, id=_id_of(folder), dir=str(folder.path))


TRACKERS: dict[str, Callable[[RunFolder, dict], Tracker]] = {
    "tensorboard": lambda folder, config: TensorBoard(folder.path / "tensorboard"),
    "trackio": lambda folder, config: Service(import_module("trackio"), folder, config),
    "wandb": _wandb,
}


def open_trackers(names: tuple[str, ...], folder: RunFolder, config: dict) -> list[Tracker]:
    """Opens the trackers of these names.

    Raises:
        ValueError: See `require_trackers`.
    """
    require_trackers(names)
    return [TRACKERS[name](folder, config) for name in names]


def require_trackers(names: tuple[str, ...]) -> None:
    """Checks that each tracker is known and installed.

    Raises:
        ValueError: A tracker is unknown or not installed. The message gives the command that
            installs it.
    """
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"tracker is {name!r}; it must be one of {', '.join(TRACKERS)}")
        if find_spec(name) is None:
            raise ValueError(f"{name} is not installed; pip install {name}")
