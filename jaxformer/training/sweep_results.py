"""Results of a sweep: means and standard errors over seeds, a table and a picture."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxformer.artifacts.files import write_figure
from jaxformer.training.curves import Curve, draw_mean, limit
from jaxformer.training.log import finish, smoothed
from jaxformer.training.sweep import Planned, Setting, is_finished, said


class Average(NamedTuple):
    """The runs of one setting, which differ only in the seed.

    Attributes:
        setting: The setting without the seed.
        losses: The last held-out loss of each run that reached its last step. If the last
            evaluations of the sweep's runs scored different numbers of tokens, the losses are on
            the fixed part of the held-out data.
        num_runs: The number of runs.
        num_diverged: The number of runs that ended early, because a loss was not finite.
        training: The smoothed training losses of each run that did not diverge.
        held_out: The held-out losses of these runs, on the fixed part of the held-out data.
    """

    setting: Setting
    losses: list[float]
    num_runs: int
    num_diverged: int
    training: list[Curve]
    held_out: list[Curve]

    @property
    def name(self) -> str:
        """The setting as text, such as "norm rms"."""
        return said(self.setting).replace("--", "") or "all runs"

    @property
    def mean(self) -> float | None:
        """The mean of the losses, or None without losses."""
        return fmean(self.losses) if self.losses else None

    @property
    def error(self) -> float | None:
        """The standard error of the mean, or None with fewer than two losses."""
        number = len(self.losses)
        return stdev(self.losses) / number**0.5 if number > 1 else None

    def as_json(self) -> dict[str, Any]:
        """Returns the numbers as JSON values."""
        return {
            "setting": self.setting,
            "held_out_loss": self.mean,
            "standard_error": self.error,
            "losses": self.losses,
            "runs": self.num_runs,
            "diverged": self.num_diverged,
        }


def averages(runs: Sequence[Planned]) -> list[Average]:
    """Returns the average of each setting, in the order of the runs."""
    found: dict[tuple, list[Planned]] = {}
    for run in runs:
        found.setdefault(tuple(_without_seed(run.setting).items()), []).append(run)
    last = [_scored(run)[-1] for run in runs if is_finished(run.folder)]
    # Losses on different numbers of tokens cannot be compared.
    uses_all = len({line["scored"] for line in last}) <= 1
    return [_average(dict(setting), members, uses_all) for setting, members in found.items()]


def _scored(run: Planned) -> list[dict]:
    return [line for line in run.folder.read_metrics() if "held_out_loss" in line]


def _without_seed(setting: Setting) -> Setting:
    return {name: value for name, value in setting.items() if name != "seed"}


def _average(setting: Setting, runs: list[Planned], uses_all: bool) -> Average:
    training, held_out, losses = [], [], []
    good = [run for run in runs if not run.has_diverged]
    for run in good:
        lines = run.folder.read_metrics()
        trained = [line for line in lines if "loss" in line]
        steps, curve = [x["step"] for x in trained], smoothed([x["loss"] for x in trained])
        training.append(list(zip(steps, curve, strict=True)))
        # An evaluation of all held-out data also writes `part_loss`, the loss on the fixed part
        # that every evaluation scores.
        scored = _scored(run)
        parts = [(x["step"], x.get("part_loss", x["held_out_loss"])) for x in scored]
        held_out.append(parts)
        if is_finished(run.folder):
            losses.append(scored[-1]["held_out_loss"] if uses_all else parts[-1][1])
    return Average(setting, losses, len(runs), len(runs) - len(good), training, held_out)


def table(found: Sequence[Average]) -> list[str]:
    """Returns a header, and a line with the mean loss, standard error and runs of each setting.

    The best mean is marked by an asterisk.
    """
    best = min((x.mean for x in found if x.mean is not None), default=None)
    width = max(len("setting"), *(len(x.name) for x in found))
    lines = [f"  {'setting':{width}}  held-out loss ± standard error   runs"]
    for x in found:
        mark = "*" if x.mean is not None and x.mean == best else " "
        loss = "–" if x.mean is None else f"{x.mean:.4f}"
        error = "" if x.error is None else f"± {x.error:.4f}"
        ended = f", {x.num_diverged} diverged" if x.num_diverged else ""
        lines.append(f"{mark} {x.name:{width}}  {loss:>13} {error:<16}   {x.num_runs}{ended}")
    return lines


def draw_sweep(found: Sequence[Average], path: Path) -> None:
    """Draws two plots: losses against steps, and last losses against the first numeric flag.

    The second plot shows held-out losses. Its flag is the first one with several numeric values.

    A line is the mean over the seeds, and the band around it is the standard error. Diverged runs
    are not drawn, but the legend shows their number. The y axes end just above the first losses.
    """
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    trained, scored, last = figure.subplots(1, 3)
    first = [curve[0][1] for x in found for curve in x.training if curve]
    for number, x in enumerate(found):
        style = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10 % 3]}
        ended = f" ({x.num_diverged} of {x.num_runs} diverged)" if x.num_diverged else ""
        draw_mean(trained, x.training, label=f"{x.name}{ended}", **style)
        draw_mean(scored, x.held_out, marker=".", **style)
    trained.set(xlabel="step", ylabel="loss (nats per token)", title="training loss")
    scored.set(xlabel="step", title="held-out loss")
    for axes in (trained, scored):
        finish(axes)
        if first:
            limit(axes, 1.1 * max(first))
    _draw_last(last, found)
    seeds = max(x.num_runs for x in found)
    write_figure(figure, f"{len(found)} settings, {seeds} runs each", path, dpi=120)


def _draw_last(axes: Axes, found: Sequence[Average]) -> None:
    """Draws the last held-out loss of each setting with its standard error."""
    scored = [x for x in found if x.mean is not None]
    name = _number_that_varies(found)
    axes.set(title="last held-out loss ± standard error")
    axes.grid(alpha=0.2)
    if name is None:
        for number, x in enumerate(found):
            if x.mean is not None:
                axes.errorbar(x.mean, number, xerr=x.error or 0, fmt="o", color=f"C{number % 10}")
        axes.set_yticks(range(len(found)), [x.name for x in found])
        axes.invert_yaxis()
        return
    lines: dict[str, list[Average]] = {}
    for x in scored:
        others = {key: value for key, value in x.setting.items() if key != name}
        lines.setdefault(said(others).replace("--", ""), []).append(x)
    for label, points in lines.items():
        points = sorted(points, key=lambda x: float(x.setting[name]))
        at = [float(x.setting[name]) for x in points]
        means, errors = [x.mean or 0 for x in points], [x.error or 0 for x in points]
        axes.errorbar(at, means, yerr=errors, marker="o", capsize=3, label=label or None)
    at = [float(x.setting[name]) for x in found]
    if min(at) > 0 and max(at) / min(at) > 5:
        axes.set_xscale("log")
    axes.set_xlabel(name)
    if any(lines):
        axes.legend()


def _number_that_varies(found: Sequence[Average]) -> str | None:
    """Returns the first flag with several values that are all numbers, or None."""
    for name in found[0].setting:
        values = {x.setting.get(name, "") for x in found}
        if len(values) > 1 and all(map(_is_number, values)):
            return name
    return None


def _is_number(word: str) -> bool:
    try:
        return bool(np.isfinite(float(word)))
    except ValueError:
        return False
