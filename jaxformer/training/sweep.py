"""The runs of a sweep: their settings, their shared data, and the groups that train together.

A sweep is a folder with sweep.json and a run folder for each combination of settings.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer.artifacts.files import read_json, write_json
from jaxformer.artifacts.run import RunFolder
from jaxformer.training.config import Inputs, OptimizerConfig, TextTraining, TrainingConfig
from jaxformer.training.log import has_diverged
from jaxformer.training.run_folders import (
    file_name,
    hold_lock,
    inspect_run,
    prepare_run,
    write_run,
)
from jaxformer.training.screen import Screen

# The version of the format of sweep.json.
SWEEP_FORMAT = 1
# Together with the inputs and the vocabulary size, these settings determine the data of a run on
# text.
_OF_THE_TEXT = ("validation_fraction", "parse_special", "text_field")
# {flag name without its leading dashes: its value as text, as on the command line}.
Setting = dict[str, str]


def grid(varied: Mapping[str, Sequence[str]], listed: Sequence[Setting] = ()) -> list[Setting]:
    """Returns all combinations of the varied values with each of the listed settings.

    Args:
        varied: The values of each flag.
        listed: Settings whose flags vary together.

    Raises:
        ValueError: Two combinations are equal, or a flag is both listed and varied.
    """
    for setting in listed:
        if both := setting.keys() & varied.keys():
            raise ValueError(f"--{min(both)} is in --list and in --vary; give it in one of them")
    crossed = [dict(zip(varied, values, strict=True)) for values in product(*varied.values())]
    settings = [{**first, **then} for first in listed or [{}] for then in crossed]
    for n, setting in enumerate(settings):
        if setting in settings[:n]:
            raise ValueError(f"{said(setting)} is given twice; give each value once")
    return settings


def said(setting: Setting) -> str:
    """Returns a setting as it is written on the command line."""
    return " ".join(f"--{name} {value}".rstrip() for name, value in setting.items())


class Planned(NamedTuple):
    """A run of a sweep.

    Attributes:
        setting: The settings that distinguish this run from the other runs.
        folder: The run folder.
        inputs: The inputs.
        config: The settings of the run, before the vocabulary is known.
    """

    setting: Setting
    folder: RunFolder
    inputs: Inputs
    config: TrainingConfig

    @property
    def is_done(self) -> bool:
        """Whether the run has reached its last step, or has diverged."""
        return is_finished(self.folder) or self.has_diverged

    @property
    def has_diverged(self) -> bool:
        """Whether the run has ended because of losses that were not finite."""
        metrics = self.folder.read_metrics() if self.folder.metrics.exists() else []
        return has_diverged(self.config, metrics)

    def data_key(self) -> tuple:
        """Returns a key that is equal for runs with the same prepared data.

        The data of pairs depend on many settings, such as max_length and lowercase. Runs on pairs
        therefore share data only if they differ in nothing but the seed and the optimizer.
        """
        config = self.config
        if not isinstance(config, TextTraining):
            return self.inputs, replace(config, seed=0, optimizer=OptimizerConfig())
        values = (getattr(config, name) for name in _OF_THE_TEXT)
        return type(config), self.inputs, config.model.vocab_size, *values


def is_finished(folder: RunFolder) -> bool:
    """Returns whether the run of a folder has reached its last step and was evaluated."""
    run = inspect_run(folder) if folder.holds_run else None
    return run is not None and getattr(run, "is_finished", False)


def folder_name(setting: Setting) -> str:
    """Returns the name of the run folder of a setting, such as learning-rate-0.001_seed-3."""
    return file_name("_".join(f"{name}-{value}".strip("-") for name, value in setting.items()))


def claim_sweep(path: Path, command: list[str], settings: Sequence[Setting]) -> list[Path]:
    """Writes sweep.json into a new folder, or checks that a folder contains the same sweep.

    Args:
        path: The folder of the sweep.
        command: The flags that all runs share.
        settings: The settings that distinguish the runs.

    Returns:
        The paths that this call created, in the order in which `withdraw` removes them.

    Raises:
        ValueError: The folder contains another sweep, or other files.
    """
    runs = {folder_name(setting): setting for setting in settings}
    if len(runs) < len(settings):
        raise ValueError("two settings have the same folder name; shorten their values")
    content = {"format": SWEEP_FORMAT, "command": command, "runs": runs}
    file = path / "sweep.json"
    if file.exists():
        if (found := read_json(file)).get("format") != SWEEP_FORMAT:
            raise ValueError(
                f"{file} has format {found.get('format')!r}; jaxformer reads format {SWEEP_FORMAT}"
            )
        if found != content:
            raise ValueError(
                f"{path} contains a sweep with other settings; give the same flags as before, or "
                "choose another folder with --out"
            )
        return []
    if path.exists() and any(path.iterdir()):
        raise ValueError(f"{path} is not empty and contains no sweep; choose another --out")
    created = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    write_json(file, content)
    return [file, *created]


def withdraw(created: Sequence[Path]) -> None:
    """Removes the paths that `claim_sweep` created, if the inputs of the runs are invalid."""
    for path in created:
        path.rmdir() if path.is_dir() else path.unlink()


def prepare(run: Planned, like: RunFolder | None, screen: Screen) -> None:
    """Writes the data of a run into its folder, or links the data of another run.

    Args:
        run: The run.
        like: The folder of a run with the same data; None to read the inputs.
        screen: Shows progress.
    """
    if run.folder.baselines.exists():
        return
    with ExitStack() as stack:
        if like is None:
            is_begun = run.folder.holds_run
            prepare_run(run.folder, run.inputs, run.config, screen, stack, is_begun, None)
            return
        run.folder.path.mkdir(parents=True, exist_ok=True)
        hold_lock(run.folder, screen.say, stack)
        for path in (like.tokenizer, like.documents):
            if path.exists():
                shutil.copy2(path, run.folder.path)
        write_run(run.folder, run.inputs, run.config)
        _link_files(like.tokens, run.folder.tokens)


def _link_files(source: Path, target: Path) -> None:
    """Links the files of a folder, or copies them where the file system has no hard links."""
    target.mkdir(exist_ok=True)
    # The file of the baselines is last: if it exists, all other files are complete.
    for path in sorted(
        source.iterdir(), key=lambda path: path.name == RunFolder("").baselines.name
    ):
        try:
            os.link(path, target / path.name)
        except FileExistsError:
            continue
        except OSError:
            shutil.copy2(path, target)


def groups(
    runs: Sequence[Planned], key: Callable[[Planned], Any], most: int | None
) -> list[list[Planned]]:
    """Groups runs with equal keys, in order, into groups of at most `most` runs.

    Args:
        runs: The runs.
        key: Returns the key of a run, or None for a run that trains alone.
        most: The largest number of runs in a group; no limit if None.
    """
    found: dict[Any, list[Planned]] = {}
    for number, run in enumerate(runs):
        of_run = key(run)
        found.setdefault(("alone", number) if of_run is None else of_run, []).append(run)
    size = most or max(map(len, found.values()), default=1)
    return [
        group[start : start + size]
        for group in found.values()
        for start in range(0, len(group), size)
    ]
