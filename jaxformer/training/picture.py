"""The picture of a run: loss and held-out bits per byte against steps."""

from pathlib import Path

from matplotlib.figure import Figure

from jaxformer.artifacts.picture import write_figure


def draw_run(
    metrics: list[dict], path: Path, title: str, baselines: dict[str, float], whole_text: int
) -> None:
    """Draw metrics.jsonl's lines to a PNG; baselines: bits per byte of compressors; whole_text:
    tokens of the held-out text."""
    write_figure(figure_of(metrics, baselines, whole_text), title, path, dpi=120)


def figure_of(metrics: list[dict], baselines: dict[str, float], whole_text: int) -> Figure:
    """Scores of other tokens cannot be compared, so a curve joins those of the same ones; scores of
    the whole text, once at the end of a run, are marks of their own."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    trained = [(line["step"], line["loss"]) for line in metrics if "loss" in line]
    if trained:
        steps, losses = zip(*trained, strict=True)
        left.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
        left.plot(steps, _smoothed(losses), color="tab:blue", label="training")

    scores = held_out_scores(metrics)
    for tokens, points in scores.items():
        steps, losses, bits = zip(*points, strict=True)
        if tokens == whole_text:
            style = {"marker": "D", "color": "tab:red", "label": "all held-out text", "zorder": 3}
            style["linestyle"] = "none" if len(scores) > 1 else "-"
        else:
            number = "" if tokens is None else f", {tokens:,} tokens"
            style = {"marker": "o", "color": "tab:orange", "label": f"held out{number}"}
        left.plot(steps, losses, **style)
        right.plot(steps, bits, **style)
    for (name, value), dashes in zip(baselines.items(), ("--", ":", "-."), strict=False):
        right.axhline(value, color="grey", linestyle=dashes, label=f"{name} ({value:.2f})")

    said = "held-out text"
    if whole_text in scores:
        step, _, bits = scores[whole_text][-1]
        said = f"all held-out text at step {step}: {bits:.3f} bits per byte"
    left.set(xlabel="step", ylabel="loss (nats per token)", title="loss")
    right.set(xlabel="step", ylabel="bits per byte", title=said)
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.2)
    return figure


def held_out_scores(metrics: list[dict]) -> dict[int | None, list[tuple[int, float, float]]]:
    """(step, loss, bits per byte) of each evaluation, by how many tokens were scored."""
    names = (("held_out_loss", "bits_per_byte", "scored"),)
    names += (("windows_loss", "windows_bits_per_byte", "windows_scored"),)
    found = {}
    for line in metrics:
        for loss, bits, scored in names:
            if loss in line:
                point = (line["step"], line[loss], line[bits])
                found.setdefault(line.get(scored), []).append(point)
    return found


def _smoothed(losses, decay: float = 0.95):
    """Exponential moving average, corrected for its start."""
    average, weight, smooth = 0.0, 0.0, []
    for loss in losses:
        average, weight = decay * average + (1 - decay) * loss, decay * weight + 1 - decay
        smooth.append(average / weight)
    return smooth
