"""The picture of a run: loss and held-out bits per byte against steps."""

from pathlib import Path

from matplotlib.figure import Figure

from jaxformer.artifacts.picture import write_figure


def draw_run(metrics: list[dict], path: Path, title: str, baselines: dict[str, float]) -> None:
    """Draw metrics.jsonl's lines to a PNG; baselines: bits per byte of compressors."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)

    trained = [(line["step"], line["loss"]) for line in metrics if "loss" in line]
    held_out = [line for line in metrics if "held_out_loss" in line]
    if trained:
        steps, losses = zip(*trained, strict=True)
        left.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
        left.plot(steps, _smoothed(losses), color="tab:blue", label="training")
    held_steps = [line["step"] for line in held_out]
    losses = [line["held_out_loss"] for line in held_out]
    left.plot(held_steps, losses, "o-", color="tab:orange", label="held out")
    left.set(xlabel="step", ylabel="loss (nats per token)", title="loss")
    left.legend()

    bits = [line["bits_per_byte"] for line in held_out]
    right.plot(held_steps, bits, "o-", color="tab:orange", label="this model")
    for (name, value), style in zip(baselines.items(), ("--", ":", "-."), strict=False):
        right.axhline(value, color="grey", linestyle=style, label=f"{name} ({value:.2f})")
    last = f"held-out text: {bits[-1]:.3f} bits per byte" if bits else "held-out text"
    right.set(xlabel="step", ylabel="bits per byte", title=last)
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.2)
    write_figure(figure, title, path, dpi=120)


def _smoothed(losses, decay: float = 0.95):
    """Exponential moving average, corrected for its start."""
    average, weight, smooth = 0.0, 0.0, []
    for loss in losses:
        average, weight = decay * average + (1 - decay) * loss, decay * weight + 1 - decay
        smooth.append(average / weight)
    return smooth
