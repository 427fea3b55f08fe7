"""Comparison of runs: their configs, results and learning curves."""

import hashlib
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxformer.artifacts.files import write_figure
from jaxformer.artifacts.run import RunFolder
from jaxformer.models.config import architecture_name
from jaxformer.models.parameters import parameter_count
from jaxformer.training.config import Inputs, TrainingConfig
from jaxformer.training.log import finish, held_out_scores, smoothed
from jaxformer.training.run_folders import read_run
from jaxformer.training.tasks import task_class
from jaxformer.training.tasks.task import Measure


class Compared(NamedTuple):
    """A run in a comparison.

    Attributes:
        name: The name of the run's folder, or the path if two folders have the same name.
        inputs: The files that the run reads.
        config: The settings of the run.
        measure: The metric that the run's task reports in addition to the loss.
        metrics: The lines of metrics.jsonl.
        text: An identifier of the text: a digest of the run's list of documents, or the input paths
            if the run has no such list.
        vocabulary: A digest of the tokenizer, or None if the run folder has no tokenizer.
    """

    name: str
    inputs: Inputs
    config: TrainingConfig
    measure: Measure
    metrics: list[dict]
    text: object
    vocabulary: bytes | None


def read_runs(paths: list[Path]) -> list[Compared]:
    """Reads the configs and metrics of runs from their folders.

    Raises:
        ValueError: A folder is not a run folder, or a run has no training loss yet.
    """
    names = [path.resolve().name for path in paths]
    runs = []
    for path, name in zip(paths, names, strict=True):
        folder = RunFolder(path)
        inputs, config = read_run(folder)
        metrics = folder.read_metrics()
        if not any("loss" in line for line in metrics):
            raise ValueError(
                f"{path} has no losses yet ({folder.metrics.name} has no line with a loss); "
                "compare the run after its first updates"
            )
        name = name if names.count(name) == 1 else str(path)
        measure = task_class(config).measure
        documents, tokenizer = map(_digest, (folder.documents, folder.tokenizer))
        text = documents or (inputs.text, inputs.source, inputs.target)
        runs.append(Compared(name, inputs, config, measure, metrics, text, tokenizer))
    return runs


def _digest(path: Path) -> bytes | None:
    return hashlib.sha256(path.read_bytes()).digest() if path.exists() else None


def difference(runs: list[Compared]) -> str | None:
    """Returns why the losses of the runs are not comparable, or None if they are comparable.

    A loss in nats per token depends on the text and the tokenizer.
    """
    found = {
        "objectives": [run.measure for run in runs],
        "texts": [run.text for run in runs],
        "tokenizers": [run.vocabulary for run in runs],
    }
    names = [name for name, values in found.items() if any(x != values[0] for x in values)]
    return f"different {' and '.join(names)}" if names else None


def summary(run: Compared) -> dict:
    """Returns a run's number of parameters, last losses and training speed."""
    trained = [line for line in run.metrics if "loss" in line]
    speeds = [line["tokens_per_second"] for line in trained if "tokens_per_second" in line]
    seconds = [line["seconds"] for line in trained if "seconds" in line]
    figures = {"run": run.name, "parameters": parameter_count(run.config.model)}
    figures |= {"steps": trained[-1]["step"], "loss": smoothed([x["loss"] for x in trained])[-1]}
    if speeds:
        figures |= {"seconds": seconds[-1], "tokens_per_second": median(speeds)}
    scored = [line for line in run.metrics if "held_out_loss" in line]
    if scored:
        figures |= {name: scored[-1][name] for name in ("held_out_loss", run.measure.name)}
    return figures


def changed(runs: list[Compared]) -> dict[str, list]:
    """Returns the inputs and settings that differ between runs, with each run's value.

    A field that is missing from some run's config is omitted.
    """
    first, *others = settings = [_settings(run) for run in runs]
    names = [name for name in first if all(name in other for other in others)]
    values = {name: [each[name] for each in settings] for name in names}
    return {name: row for name, row in values.items() if any(x != row[0] for x in row)}


def _settings(run: Compared) -> dict:
    """Returns the inputs, the base checkpoint and the other settings of a run, by flag name."""
    config, (text, source, target, origin) = run.config, run.inputs
    paths = {"text": " ".join(map(str, text)) or None, "source": source, "target": target}
    paths["init_from"] = None if origin is None else origin.path
    parts = {name: getattr(config, name) for name in ("model", "optimizer", "execution", "lora")}
    plain = {x: getattr(config, x) for x in config.__dataclass_fields__ if x not in parts}
    inner = {x: getattr(part, x) for part in parts.values() for x in part.__dataclass_fields__}
    # In the config, None means the default learning rate.
    inner["learning_rate"] = config.optimizer.peak
    return {"model": architecture_name(config.model), **paths, **plain, **inner}


def draw(runs: list[Compared], path: Path) -> None:
    """Plots the training losses by step and by time, and the held-out losses by step.

    If the losses are not comparable, the title gives the reason. The y axes end just above the
    first losses, so that a diverged run does not hide the other curves. The legend entry of a
    diverged run shows the run's largest loss.
    """
    figure = Figure(figsize=(14, 4), layout="constrained")
    by_step, by_time, held_out = figure.subplots(1, 3)
    top = 1.1 * max(_curve(run)[1][0] for run in runs)
    for number, run in enumerate(runs):
        steps, curve = _curve(run)
        style = {"color": f"C{number}", "label": _label(run, top)}
        by_step.plot(steps, curve, **style)
        both = zip((x for x in run.metrics if "loss" in x), curve, strict=True)
        timed = [(line["seconds"] / 60, loss) for line, loss in both if "seconds" in line]
        # A line through a single point is invisible.
        marker = "." if len(timed) < 10 else None
        by_time.plot(*np.transpose(timed or np.empty((0, 2))), marker=marker, **style)
        for points in held_out_scores(run.metrics, run.measure.name).values():
            steps, losses, _ = zip(*points, strict=True)
            held_out.plot(steps, losses, marker="o", **style)
            # A run may have two curves, but it needs only one legend entry.
            style.pop("label", None)
    by_step.set(xlabel="step", ylabel="loss (nats per token)", title="training loss by step")
    by_time.set(xlabel="minutes of training", title="training loss by time")
    held_out.set(xlabel="step", title="held-out loss")
    for axes in (by_step, by_time, held_out):
        finish(axes)
        _limit(axes, top)
    why = difference(runs)
    title = f"The losses are not comparable: {why}" if why else ""
    write_figure(figure, title, path, dpi=120)


def _limit(axes: Axes, top: float) -> None:
    """Limits the y axis to `top` if a curve is higher."""
    losses = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines])
    if len(losses) and losses.max() > top:
        lowest = losses.min()
        axes.set_ylim(lowest - 0.05 * (top - lowest), top)


def _curve(run: Compared) -> tuple[list[int], list[float]]:
    """Returns the steps of a run and the smoothed training loss at each step."""
    trained = [line for line in run.metrics if "loss" in line]
    return [line["step"] for line in trained], smoothed([line["loss"] for line in trained])


def _label(run: Compared, top: float) -> str:
    """Returns the legend entry of a run: the name and, if the run diverged, the largest loss."""
    label = run.name if len(run.name) <= 32 else f"…{run.name[-31:]}"
    largest = max(_curve(run)[1])
    bad = [line["step"] for line in run.metrics if "not_finite" in line]
    notes = [f"loss up to {largest:,.4g}"] if largest > top else []
    notes += [f"not finite at step {bad[0]:,}"] if bad else []
    return "\n".join([label, *notes])
