"""The log of a run: metrics.jsonl, samples and the loss curve. Only process 0 writes files."""

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple
from uuid import uuid4

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxformer.artifacts.files import json_text, write_figure, write_whole
from jaxformer.artifacts.run import RunFolder
from jaxformer.models.config.check import shown
from jaxformer.models.parameters import parameter_count
from jaxformer.training.config import RunConfig
from jaxformer.training.processes import is_first
from jaxformer.training.run_folders import run_title
from jaxformer.training.step import Measured
from jaxformer.training.tasks.task import Measure, Score, Task

# The run ends after this number of consecutive skipped updates.
MOST_SKIPPED = 100
# The log reports this measure if the task defines no measure.
_LOSS = Measure("held_out_loss", "held-out loss")


class RunLog:
    """Log of a run: metrics.jsonl, experiment trackers and loss curve.

    metrics.jsonl has a line per update and per evaluation.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, task: Task, *, draws: bool = True):
        """Creates a log in a run folder.

        Args:
            folder: The run folder.
            config: The settings of the run.
            task: The task of the run, which defines the measure to plot and its baselines.
            draws: Whether each evaluation draws the loss curve.
        """
        self._folder, self._config, self._task, self._draws = folder, config, task, draws
        self._trackers: list[Tracker] = []
        self._pending: list[tuple[int, float, Measured]] = []

    def __enter__(self) -> "RunLog":
        """Opens the trackers."""
        if is_first():
            config = asdict(self._config)
            names = self._config.trackers
            self._trackers = [TRACKERS[name](self._folder, config) for name in names]
        return self

    def __exit__(self, *_) -> None:
        """Closes the trackers."""
        for tracker in self._trackers:
            tracker.close()

    def update(self, step: int, learning_rate: float, measured: Measured) -> None:
        """Records an update. The device may still be computing the measurements."""
        self._pending.append((step, learning_rate, measured))

    def flush(self, pace: dict[str, float]) -> list[dict]:
        """Waits for all recorded updates, and writes a line for each update to metrics.jsonl.

        A line omits metrics that are not finite and lists their names in "not_finite".

        Args:
            pace: Further metrics for the newest line, such as the training speed.

        Returns:
            The written lines.
        """
        updates = jax.device_get(self._pending)
        lines = [_line(*update) for update in updates]
        if lines:
            lines[-1] |= pace
        self._pending = []
        self._write(lines)
        return lines

    def evaluation(self, step: int, part: Score, whole: Score | None, sample: str) -> None:
        """Writes the scores and the sample of an evaluation, and redraws the loss curve.

        Args:
            step: The step of the evaluation.
            part: The score on the fixed part of the held-out data that every evaluation uses.
            whole: The score on all held-out data; None if this evaluation used only the fixed part.
            sample: The generated sample; empty if the task writes no sample.
        """
        if not is_first():
            return
        folder, task = self._folder, self._task
        measure = (task.measure or _LOSS).name
        line = score_line(measure, whole or part, part if whole else None)
        self._write([finite({"step": step, **line})])
        if sample:
            folder.add_sample(step, sample)
        if self._draws:
            self._draw()

    def _draw(self) -> None:
        folder, task = self._folder, self._task
        size = f"{parameter_count(self._config.model) / 1e6:.1f} M parameters"
        metrics = folder.read_metrics()
        figure = plot_losses(metrics, task.measure, task.baselines, task.num_targets)
        write_figure(figure, f"{run_title(folder)}: {size}", folder.picture, dpi=120)

    def has_scored(self, step: int, least: int = 1) -> bool:
        """Returns whether the log has an evaluation of this step with at least `least` targets."""
        lines = self._folder.read_metrics()
        return any(line["step"] == step and line.get("scored", 0) >= least for line in lines)

    def owes(self, step: int) -> bool:
        """Returns whether an evaluation is due at this step but missing in the log."""
        return step > 0 and step % self._config.evaluate_every == 0 and not self.has_scored(step)

    def _write(self, lines: list[dict]) -> None:
        if not is_first():
            return
        with self._folder.metrics.open("a") as file:
            file.writelines(json_text(line) + "\n" for line in lines)
        for line in lines:
            figures = {k: v for k, v in line.items() if isinstance(v, int | float)}
            self._track(int(figures.pop("step")), figures)

    def _track(self, step: int, figures: dict[str, float]) -> None:
        """Sends metrics to the trackers. A tracker that fails is removed and training continues."""
        for tracker in tuple(self._trackers):
            try:
                tracker.log(step, figures)
            except Exception as error:  # A tracker may raise any exception.
                self._trackers.remove(tracker)
                message = (
                    f"warning: the tracker {tracker.name} failed and was switched off: {error}"
                )
                warnings.warn(message, stacklevel=2)


def _line(step: int, learning_rate: float, measured: Measured) -> dict:
    figures = {**measured.figures, "gradient_norm": measured.gradient_norm}
    figures = {name: float(value) for name, value in figures.items()}
    return finite({"step": step, **figures, "learning_rate": learning_rate})


def finite(line: dict) -> dict:
    """Removes the metrics that are not finite from a line, and lists their names in "not_finite".

    JSON cannot represent infinity and NaN.
    """
    bad = sorted(name for name, value in line.items() if not np.isfinite(value))
    if not bad:
        return line
    return {name: x for name, x in line.items() if name not in bad} | {"not_finite": bad}


def has_diverged(config: RunConfig, metrics: list[dict]) -> bool:
    """Returns whether a run has ended because of losses or gradients that were not finite.

    A run with `non_finite="skip"` continues after such a loss, so it counts as diverged only if all
    its last `MOST_SKIPPED` updates were skipped.
    """
    trained = [line for line in metrics if "scored" not in line]
    if config.non_finite == "stop":
        return any("not_finite" in line for line in trained)
    last = trained[-MOST_SKIPPED:]
    return len(last) == MOST_SKIPPED and all("not_finite" in line for line in last)


def score_line(measure: str, score: Score, part: Score | None = None) -> dict:
    """Returns the entries of metrics.jsonl for an evaluation.

    Args:
        measure: The name of the metric that the task reports in addition to the loss.
        score: The score of the evaluation.
        part: The score on the fixed part of the held-out data that every evaluation uses. None if
            `score` is already this score.
    """
    line = {"held_out_loss": score.loss, measure: score.measure, "scored": score.targets}
    if part is not None:
        line |= {"part_loss": part.loss, f"part_{measure}": part.measure}
        line["part_scored"] = part.targets
    return line


def plot_losses(
    metrics: list[dict], measure: Measure | None, baselines: dict[str, float], whole: int
) -> Figure:
    """Plots the training loss, the held-out loss and the task's measure over the steps.

    A curve connects only scores of the same number of tokens, because other scores are not
    comparable. Scores of all held-out text are drawn as diamonds.

    Args:
        metrics: The lines of metrics.jsonl.
        measure: The task's measure. If None, the held-out loss is plotted without a unit.
        baselines: Baseline values of the measure by name, such as the bits per byte of gzip.
        whole: The number of targets in all held-out text.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    unit = f" (nats per {measure.target})" if measure else ""
    measure = measure or _LOSS
    trained = [(line["step"], line["loss"]) for line in metrics if "loss" in line]
    if trained:
        steps, losses = zip(*trained, strict=True)
        left.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
        left.plot(steps, smoothed(losses), color="tab:blue", label="training")

    scores = held_out_scores(metrics, measure.name)
    for tokens, points in scores.items():
        steps, losses, figures = zip(*points, strict=True)
        if tokens == whole:
            style = {"marker": "D", "color": "tab:red", "label": "all held-out text", "zorder": 3}
            style["linestyle"] = "none" if len(scores) > 1 else "-"
        else:
            number = "" if tokens is None else f", {tokens:,} tokens"
            style = {"marker": "o", "color": "tab:orange", "label": f"held out{number}"}
        left.plot(steps, losses, **style)
        right.plot(steps, figures, **style)
    for (name, value), dashes in zip(baselines.items(), ("--", ":", "-."), strict=False):
        right.axhline(value, color="grey", linestyle=dashes, label=f"{name} ({value:.2f})")

    title = "held-out text"
    if whole in scores:
        step, _, value = scores[whole][-1]
        title = f"all held-out text at step {step}: {value:.3f} {measure.label}"
    left.set(xlabel="step", ylabel=f"loss{unit}", title="loss")
    right.set(xlabel="step", ylabel=measure.label, title=title)
    for axes in (left, right):
        finish(axes)
    return figure


def finish(axes: Axes) -> None:
    """Starts the x axis at 0 with whole-number labels, and adds a legend if there are entries."""
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(alpha=0.2)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def held_out_scores(
    metrics: list[dict], measure: str
) -> dict[int | None, list[tuple[int, float, float]]]:
    """Returns (step, loss, measure) of each evaluation, grouped by the number of scored tokens."""
    names = (("held_out_loss", measure, "scored"), ("part_loss", f"part_{measure}", "part_scored"))
    scores = {}
    for line in metrics:
        for loss, figure, scored in names:
            if loss in line:
                point = (line["step"], line[loss], line[figure])
                scores.setdefault(line.get(scored), []).append(point)
    return scores


def smoothed(losses: Sequence[float]) -> list[float]:
    """Returns the bias-corrected exponential moving average of losses.

    The average extends over about 20 losses, or a twentieth of all losses if that is less.
    """
    decay = max(0.0, 1 - 20 / max(20, min(len(losses), 400)))
    average, weight, smooth = 0.0, 0.0, []
    for loss in losses:
        average, weight = decay * average + (1 - decay) * loss, decay * weight + 1 - decay
        smooth.append(average / weight)
    return smooth


class Tracker(NamedTuple):
    """An experiment tracker that receives the metrics of a run.

    Attributes:
        name: The tracker's name, a key of `TRACKERS`.
        log: Records the metrics of a step.
        close: Ends the run in the tracker.
    """

    name: str
    log: Callable[[int, dict[str, float]], None]
    close: Callable[[], None]


def _tensorboard(folder: RunFolder, config: dict) -> Tracker:
    """Opens an event file in the run folder, for `tensorboard --logdir`."""
    writer = import_module("tensorboard.summary").Writer(str(folder.path / "tensorboard"))

    def log(step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            writer.add_scalar(name, value, step=step)

    return Tracker("tensorboard", log, writer.close)


def _service(package: str, folder: RunFolder, config: dict, **options: str) -> Tracker:
    """Opens a run in trackio or wandb, and continues the tracker's run if training resumes.

    Args:
        package: The name of the package.
        folder: The run folder.
        config: The settings to record.
        **options: Further arguments of the package's `init`.
    """
    service = import_module(package)
    # The id distinguishes runs whose folders have the same name.
    name = f"{folder.path.resolve().name}-{_tracker_run_id(folder)}"
    service.init(config=config, project="jaxformer", name=name, resume="allow", **options)
    return Tracker(package, lambda step, figures: service.log(figures, step=step), service.finish)


def _tracker_run_id(folder: RunFolder) -> str:
    """Returns the random id of a run, which is stored in the run folder."""
    if not folder.tracker_id.exists():
        write_whole(folder.tracker_id, uuid4().hex[:8])
    text = folder.tracker_id.read_text()
    if not re.fullmatch("[0-9a-f]{8}", text):
        raise ValueError(
            f"{folder.tracker_id} contains {shown(text)}; it must contain 8 hexadecimal digits"
        )
    return text


def _wandb(folder: RunFolder, config: dict) -> Tracker:
    # wandb needs the id of the run, and a folder for wandb's own files.
    return _service("wandb", folder, config, id=_tracker_run_id(folder), dir=str(folder.path))


# A config.json from an untrusted source may contain any tracker name. Only the packages in this
# table can be imported.
TRACKERS: dict[str, Callable[[RunFolder, dict], Tracker]] = {
    "tensorboard": _tensorboard,
    "trackio": partial(_service, "trackio"),
    "wandb": _wandb,
}


def require_trackers(names: tuple[str, ...]) -> None:
    """Checks that each tracker is known and installed.

    Raises:
        ValueError: A tracker is unknown or not installed. The error message includes the command
            that installs the tracker.
    """
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"tracker is {name!r}; it must be one of {', '.join(TRACKERS)}")
        if find_spec(name) is None:
            raise ValueError(f"the tracker {name} is not installed; run: pip install {name}")
