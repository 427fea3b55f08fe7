"""Who else is told what metrics.jsonl says: TensorBoard, trackio, Weights & Biases."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from jaxformer.artifacts.run import RunFolder, write_whole

INSTALLED_BY = {
    "tensorboard": "pip install tensorboard",
    "trackio": "pip install trackio",
    "wandb": "pip install wandb",
}


class Tracker(Protocol):
    """Is told of a run's figures as they come."""

    def log(self, step: int, figures: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in a folder, for `tensorboard --logdir`."""

    def __str__(self) -> str:
        return "tensorboard"

    def __init__(self, folder: Path):
        from tensorboard.summary import Writer

        self._writer = Writer(str(folder))

    def log(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step=step)

    def close(self) -> None:
        self._writer.close()


class Service:
    """trackio, and wandb, whose interface it shares. A run that is resumed goes on there too."""

    def __init__(self, package: str, folder: RunFolder, config: dict):
        self._name, self._package = package, import_module(package)
        own = _id_of(folder)  # folders of one name, on two machines perhaps, are two runs
        run = {"project": "jaxformer", "name": f"{folder.path.resolve().name}-{own}"}
        if package == "wandb":  # it asks for a key of its own, and for a place for its files
            run |= {"id": own, "dir": str(folder.path)}
        self._run = self._package.init(config=config, resume="allow", **run)

    def __str__(self) -> str:
        return self._name

    def log(self, step: int, figures: dict[str, float]) -> None:
        self._package.log(figures, step=step)

    def close(self) -> None:
        self._package.finish()


def _id_of(folder: RunFolder) -> str:
    """Of a run, drawn once and kept in its folder."""
    if not folder.tracker_id.exists():
        write_whole(folder.tracker_id, uuid4().hex[:8])
    return folder.tracker_id.read_text()


def open_trackers(names: tuple[str, ...], folder: RunFolder, config: dict) -> list[Tracker]:
    """ValueError, and how to install it, if one is not there."""
    require_trackers(names)
    return [
        TensorBoard(folder.path / "tensorboard")
        if name == "tensorboard"
        else Service(name, folder, config)
        for name in names
    ]


def require_trackers(names: tuple[str, ...]) -> None:
    """ValueError for one that is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise ValueError(f"{name} is not installed; {INSTALLED_BY[name]}")
