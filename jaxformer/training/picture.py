"""The picture of a run: loss, and the task's measure of held-out text, against steps."""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxformer.artifacts.picture import write_figure
from jaxformer.training.tasks.task import Measure


def draw_run(
    metrics: list[dict],
    path: Path,
    title: str,
    measure: Measure,
    baselines: dict[str, float],
    whole: int,
) -> None:
    """Draw metrics.jsonl's lines to a PNG; the rest as for `figure_of`."""
    write_figure(figure_of(metrics, measure, baselines, whole), title, path, dpi=120)


def figure_of(
    metrics: list[dict], measure: Measure, baselines: dict[str, float], whole: int
) -> Figure:
    """Scores of other tokens cannot be compared, so a curve joins those of the same ones; scores of
    the whole text, once at the end of a run, are marks of their own.

    baselines: what others reach by the measure; whole: targets in all that is held out.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
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

    said = "held-out text"
    if whole in scores:
        step, _, value = scores[whole][-1]
        said = f"all held-out text at step {step}: {value:.3f} {measure.label}"
    left.set(xlabel="step", ylabel="loss (nats per token)", title="loss")
    right.set(xlabel="step", ylabel=measure.label, title=said)
    for axes in (left, right):
        finish(axes)
    return figure


def finish(axes) -> None:
    """Steps from 0, in whole numbers; a legend, if there is anything to tell apart."""
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(alpha=0.2)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def held_out_scores(
    metrics: list[dict], measure: str
) -> dict[int | None, list[tuple[int, float, float]]]:
    """(step, loss, the measure's figure) of each evaluation, by how many tokens were scored."""
    names = (("held_out_loss", measure, "scored"),)
    names += (("part_loss", f"part_{measure}", "part_scored"),)
    found = {}
    for line in metrics:
        for loss, figure, scored in names:
            if loss in line:
                point = (line["step"], line[loss], line[figure])
                found.setdefault(line.get(scored), []).append(point)
    return found


def smoothed(losses):
    """Exponential moving average, corrected for its start, over 20 losses or, if there are fewer
    than 400, a twentieth of them."""
    decay = max(0.0, 1 - 20 / max(20, min(len(losses), 400)))
    average, weight, smooth = 0.0, 0.0, []
    for loss in losses:
        average, weight = decay * average + (1 - decay) * loss, decay * weight + 1 - decay
        smooth.append(average / weight)
    return smooth
