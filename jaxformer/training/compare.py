"""Runs beside one another: what differs in their configs, and how each learnt."""

from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from jaxformer.artifacts.picture import write_figure
from jaxformer.artifacts.run import RunFolder
from jaxformer.models.build import parameter_count
from jaxformer.training.config import TrainingConfig, differences
from jaxformer.training.picture import held_out_scores, smoothed
from jaxformer.training.run_config import read_run
from jaxformer.training.tasks import task_of
from jaxformer.training.tasks.task import Measure


class Compared(NamedTuple):
    """A run, as it is drawn and told. name: of its folder, or its path where two folders share
    one."""

    name: str
    config: TrainingConfig
    measure: Measure
    metrics: list[dict]


def read_runs(paths: list[Path]) -> list[Compared]:
    """ValueError for a folder without a run, or a run that has not trained yet."""
    names = [path.resolve().name for path in paths]
    runs = []
    for path, name in zip(paths, names, strict=True):
        folder = RunFolder(path)
        _, config = read_run(folder)
        metrics = folder.read_metrics()
        if not any("loss" in line for line in metrics):
            raise ValueError(f"{path} has no figures yet ({folder.metrics.name} has no loss)")
        name = name if names.count(name) == 1 else str(path)
        runs.append(Compared(name, config, task_of(config).measure, metrics))
    return runs


def summary(run: Compared) -> dict:
    """What became of a run."""
    trained = [line for line in run.metrics if "loss" in line]
    speeds = [line["tokens_per_second"] for line in trained if "tokens_per_second" in line]
    seconds = [line["seconds"] for line in trained if "seconds" in line]
    found = {"run": run.name, "parameters": parameter_count(run.config.model)}
    found |= {"steps": trained[-1]["step"], "loss": smoothed([x["loss"] for x in trained])[-1]}
    if speeds:
        found |= {"seconds": seconds[-1], "tokens_per_second": median(speeds)}
    scored = [line for line in run.metrics if "held_out_loss" in line]
    if scored:
        found |= {name: scored[-1][name] for name in ("held_out_loss", run.measure.name)}
    return found


def changed(runs: list[Compared]) -> dict[str, list]:
    """Fields in which not all runs agree: the value of each, None where its kind has no such
    field."""
    first, *others = (run.config for run in runs)
    names = {}
    for other in others:
        if type(other.model) is not type(first.model):
            names["model"] = None
        else:
            names |= dict.fromkeys(differences(first, other))
    return {name: [_value(run.config, name) for run in runs] for name in names}


def _value(config: TrainingConfig, name: str):
    if name == "model":
        return type(config.model).__name__.removesuffix("Config").lower()
    for part in (config.model, config.optimizer, config.execution, config):
        if name in part.__dataclass_fields__:
            return getattr(part, name)
    return None


def draw(runs: list[Compared], path: Path) -> None:
    """The losses by step and by time, and what each task measures beside."""
    figure = Figure(figsize=(14, 4), layout="constrained")
    by_step, by_time, held_out = figure.subplots(1, 3)
    for number, run in enumerate(runs):
        label = run.name if len(run.name) <= 32 else f"…{run.name[-31:]}"
        style = {"color": f"C{number}", "label": label}
        trained = [line for line in run.metrics if "loss" in line]
        curve = smoothed([line["loss"] for line in trained])
        by_step.plot([line["step"] for line in trained], curve, **style)
        both = zip(trained, curve, strict=True)
        timed = [(line["seconds"] / 60, loss) for line, loss in both if "seconds" in line]
        by_time.plot(*np.transpose(timed or np.empty((0, 2))), **style)
        for points in held_out_scores(run.metrics, run.measure.name).values():
            steps, losses, _ = zip(*points, strict=True)
            held_out.plot(steps, losses, marker="o", **style)
            style.pop("label", None)  # one entry for a run, of which two parts may be scored
    by_step.set(xlabel="step", ylabel="loss (nats per token)", title="training loss by step")
    by_time.set(xlabel="minutes of training", title="training loss by time")
    held_out.set(xlabel="step", title="held-out loss")
    for axes in (by_step, by_time, held_out):
        axes.legend()
        axes.grid(alpha=0.2)
    write_figure(figure, "", path, dpi=120)
