"""Comparison of runs: their configs, results and learning curves."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxformer.artifacts.files import write_figure
from jaxformer.artifacts.run import RunFolder
from jaxformer.models.config import architecture_name
from jaxformer.models.parameters import parameter_count
from jaxformer.training.config import Inputs, TrainingConfig
from jaxformer.training.curves import Curve, draw_mean, limit
from jaxformer.training.log import finish, has_diverged, held_out_scores, smoothed
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


class Class(NamedTuple):
    """Properties that runs must share for their losses to be comparable.

    A loss in nats per token depends on the text and the tokenizer.
    """

    objective: Measure
    text: object
    tokenizer: bytes | None


def comparable(runs: list[Compared]) -> list[list[Compared]]:
    """Groups runs with comparable losses: the same objective, text and tokenizer."""
    found: dict[Class, list[Compared]] = {}
    for run in runs:
        found.setdefault(_class_of(run), []).append(run)
    return list(found.values())


def _class_of(run: Compared) -> Class:
    return Class(run.measure, run.text, run.vocabulary)


def difference(runs: list[Compared]) -> str | None:
    """Returns why the losses of the runs are not comparable, or None if they are comparable."""
    found = [_class_of(run) for run in runs]
    columns = zip(Class._fields, zip(*found, strict=True), strict=True)
    names = [f"{name}s" for name, values in columns if any(x != values[0] for x in values)]
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


# The fields of a config whose values are dataclasses of settings.
_SECTIONS = ("model", "optimizer", "execution", "lora", "own")


def _settings(run: Compared) -> dict:
    """Returns the inputs, the base checkpoint and the other settings of a run, by flag name."""
    config, (text, source, target, origin) = run.config, run.inputs
    paths = {"text": " ".join(map(str, text)) or None, "source": source, "target": target}
    paths["init_from"] = None if origin is None else origin.path
    parts = {name: getattr(config, name) for name in _SECTIONS}
    plain = {x: getattr(config, x) for x in config.__dataclass_fields__ if x not in parts}
    inner = {x: getattr(part, x) for part in parts.values() for x in part.__dataclass_fields__}
    # In the config, None means the default learning rate.
    inner["learning_rate"] = config.optimizer.peak
    return {"model": architecture_name(config.model), **paths, **plain, **inner}


def draw(runs: list[Compared], path: Path) -> None:
    """Plots the training losses by step and by time, and the held-out losses by step.

    Each row of the figure shows one group of comparable runs. Runs that differ only in the seed are
    drawn as one curve, the mean, with a band for the standard error of the mean. The y axes end
    just above the first losses, so that a diverged run does not hide the other curves. The legend
    entry of a diverged run shows the run's largest loss.
    """
    rows = comparable(runs)
    figure = Figure(figsize=(14, 4 * len(rows)), layout="constrained")
    for axes, members in zip(figure.subplots(len(rows), 3, squeeze=False), rows, strict=True):
        _draw_row(axes, by_seed(members))
    why = difference(runs)
    title = f"One row for each group of comparable runs, because the runs have {why}" if why else ""
    write_figure(figure, title, path, dpi=120)


def by_seed(runs: list[Compared]) -> list[list[Compared]]:
    """Groups runs that differ only in the seed. A diverged run is a group of its own."""
    found: dict[tuple, list[Compared]] = {}
    for number, run in enumerate(runs):
        settings = _settings(run)
        seed = settings.pop("seed")
        key = (repr(settings), number if has_diverged(run.config, run.metrics) else None)
        # Runs with equal settings and seeds are copies or repetitions, so they are not averaged.
        while any(other.config.seed == seed for other in found.get(key, ())):
            key = (*key, None)
        found.setdefault(key, []).append(run)
    return list(found.values())


def _draw_row(axes: Sequence[Axes], groups: list[list[Compared]]) -> None:
    """Draws a row of panels: losses by step, losses by time, and held-out losses."""
    by_step, by_time, held_out = axes
    top = 1.1 * max(_curve(run)[0][1] for runs in groups for run in runs)
    for number, runs in enumerate(groups):
        style = {"color": f"C{number % 10}"}
        draw_mean(by_step, [_curve(run) for run in runs], label=_label(runs, top), **style)
        timed = [_timed(run) for run in runs]
        if len(runs) == 1:
            # A line through a single point is invisible.
            draw_mean(by_time, timed, marker="." if len(timed[0]) < 10 else None, **style)
        else:
            # The runs record losses at different times, so losses cannot be averaged by time.
            for points in timed:
                draw_mean(by_time, [points], alpha=0.6, linewidth=0.8, **style)
        for curves in _held_out(runs):
            draw_mean(held_out, curves, marker="o", **style)
    by_step.set(xlabel="step", ylabel="loss (nats per token)", title="training loss by step")
    by_time.set(xlabel="minutes of training", title="training loss by time")
    held_out.set(xlabel="step", title="held-out loss")
    for each in axes:
        finish(each)
        limit(each, top)


def _curve(run: Compared) -> Curve:
    """Returns the smoothed training loss of a run at each step."""
    trained = [line for line in run.metrics if "loss" in line]
    losses = smoothed([line["loss"] for line in trained])
    return [(line["step"], loss) for line, loss in zip(trained, losses, strict=True)]


def _timed(run: Compared) -> Curve:
    """Returns the smoothed training loss of a run by minutes of training."""
    both = zip((x for x in run.metrics if "loss" in x), _curve(run), strict=True)
    return [(line["seconds"] / 60, loss) for line, (_, loss) in both if "seconds" in line]


def _held_out(runs: list[Compared]) -> list[list[Curve]]:
    """Returns the held-out losses of each run, grouped by the number of scored tokens."""
    found: dict[int | None, list[Curve]] = {}
    for run in runs:
        for tokens, points in held_out_scores(run.metrics, run.measure.name).items():
            found.setdefault(tokens, []).append([(step, loss) for step, loss, _ in points])
    return list(found.values())


def _label(runs: list[Compared], top: float) -> str:
    """Returns the legend entry of runs: the name and, if a run diverged, the largest loss."""
    name = runs[0].name
    label = name if len(name) <= 32 else f"…{name[-31:]}"
    notes = [f"mean of {len(runs)} seeds"] if len(runs) > 1 else []
    largest = max(loss for run in runs for _, loss in _curve(run))
    bad = [line["step"] for run in runs for line in run.metrics if "not_finite" in line]
    notes += [f"loss up to {largest:,.4g}"] if largest > top else []
    notes += [f"not finite at step {min(bad):,}"] if bad else []
    return "\n".join([label, *notes])
