"""What a run writes down: metrics.jsonl, samples, and the picture of both; of several processes
the first does."""

import json
import warnings
from dataclasses import asdict

import jax
import numpy as np

from jaxformer.artifacts.run import RunFolder
from jaxformer.models.build import parameter_count
from jaxformer.training.config import TrainingConfig
from jaxformer.training.picture import draw_run
from jaxformer.training.processes import is_first
from jaxformer.training.step import Measured
from jaxformer.training.tasks.task import Score, Task
from jaxformer.training.trackers import Tracker, open_trackers


class RunLog:
    """metrics.jsonl, a line for each update and each evaluation, and what is drawn from it."""

    def __init__(
        self,
        folder: RunFolder,
        config: TrainingConfig,
        task: Task,
    ):
        self._folder, self._config, self._task = folder, config, task
        self._trackers: list[Tracker] = []
        self._pending: list[tuple[int, float, Measured]] = []

    def __enter__(self) -> "RunLog":
        if is_first():
            config = asdict(self._config)
            self._trackers = open_trackers(self._config.trackers, self._folder, config)
        return self

    def __exit__(self, *_) -> None:
        for tracker in self._trackers:
            tracker.close()

    def update(self, step: int, learning_rate: float, measured: Measured) -> None:
        """An update was begun; what is measured of it may still be computed."""
        self._pending.append((step, learning_rate, measured))

    def flush(self, pace: dict[str, float]) -> list[dict]:
        """Write the updates since the last flush, once they are computed; returns their lines.

        pace: what the newest line says beside. A figure that is not finite is named, and left out.
        """
        found: list[Measured] = jax.device_get([measured for *_, measured in self._pending])
        lines = [
            _line(step, rate, measured)
            for (step, rate, _), measured in zip(self._pending, found, strict=True)
        ]
        if lines:
            lines[-1] |= pace
        self._pending = []
        self._write(lines)
        return lines

    def evaluation(self, step: int, part: Score, whole: Score | None, sample: str) -> None:
        """Scores of the part that every evaluation scores and, at the end, of all that is held out;
        and what the model made of its own."""
        if not is_first():
            return
        line = score_line(self._task.measure.name, whole or part, part if whole else None)
        self._write([finite({"step": step, **line})])
        if sample:
            self._folder.add_sample(step, sample)
        self.draw()

    def draw(self) -> None:
        title = f"{self._folder.path.name}: {parameter_count(self._config.model) / 1e6:.1f} M"
        draw_run(
            self._folder.read_metrics(),
            self._folder.picture,
            f"{title} parameters",
            self._task.measure,
            self._task.baselines,
            self._task.num_targets,
        )

    def has_scored(self, step: int, least: int = 1) -> bool:
        """Whether so many targets have been scored after this very step."""
        lines = self._folder.read_metrics()
        return any(line["step"] == step and line.get("scored", 0) >= least for line in lines)

    def owes(self, step: int) -> bool:
        """Whether this step is to be evaluated, and is not yet."""
        due = step > 0 and step % self._config.evaluate_every == 0
        return due and not self.has_scored(step)

    def _write(self, lines: list[dict]) -> None:
        if not is_first():
            return
        with self._folder.metrics.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        for line in lines:
            figures = {k: v for k, v in line.items() if isinstance(v, int | float)}
            self._tell(figures.pop("step"), figures)

    def _tell(self, step: int, figures: dict[str, float]) -> None:
        """A tracker that fails is told nothing more; training goes on."""
        for tracker in tuple(self._trackers):
            try:
                tracker.log(step, figures)
            except Exception as error:  # of many kinds: a network that is away, a full disk
                self._trackers.remove(tracker)
                warnings.warn(f"{tracker} is told nothing more: {error}", stacklevel=2)


def _line(step: int, learning_rate: float, measured: Measured) -> dict:
    figures = {name: float(value) for name, value in measured._asdict().items()}
    return finite({"step": step, **figures, "learning_rate": learning_rate})


def finite(line: dict) -> dict:
    """The line without what is not finite, which JSON cannot say, but with its name."""
    bad = sorted(name for name, value in line.items() if not np.isfinite(value))
    if not bad:
        return line
    return {name: x for name, x in line.items() if name not in bad} | {"not_finite": bad}


def score_line(measure: str, score: Score, part: Score | None = None) -> dict:
    """What metrics.jsonl says of a score; part: that of the part which every evaluation scores,
    where `score` is of all."""
    line = {"held_out_loss": score.loss, measure: score.measure, "scored": score.targets}
    if part is not None:
        line |= {"part_loss": part.loss, f"part_{measure}": part.measure}
        line["part_scored"] = part.targets
    return line
