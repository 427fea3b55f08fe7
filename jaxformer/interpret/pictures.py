"""Figures of head atlases: heat maps of all heads, and scores over the checkpoints of a run.

To write a figure, call `figure.savefig(path)` or `artifacts.files.write_figure`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxformer.interpret.atlas import AtlasHistory, HeadAtlas

# Heat maps with more heads or layers than this do not show numbers in their cells.
_MOST_NUMBERED = 24


def atlas_figure(atlases: Mapping[str, HeadAtlas]) -> Figure:
    """Draws the scores and ablation effects of atlases as heat maps, one row per atlas.

    Each heat map has a cell for each head, with heads from left to right and layers from bottom to
    top. A score that is NaN for every head is omitted.

    Args:
        atlases: {name of the text: scores of all attention heads on this text}.

    Raises:
        ValueError: `atlases` is empty.
    """
    if not atlases:
        raise ValueError("atlases is empty; it must contain at least one HeadAtlas")
    columns = 1 + max(len(_defined(atlas)) for atlas in atlases.values())
    layers, heads = np.max([atlas.effect.shape for atlas in atlases.values()], axis=0)
    wide, high = max(2.0, 0.56 * heads + 0.9), max(1.6, 0.42 * layers + 1.1)
    figure = Figure(figsize=(wide * columns, (high + 0.5) * len(atlases)), layout="constrained")
    parts = figure.subfigures(len(atlases), 1, squeeze=False)[:, 0]
    for part, (name, atlas) in zip(parts, atlases.items(), strict=True):
        part.suptitle(
            f"{name}: {atlas.loss:.2f} nats per token, {atlas.num_sequences} sequences",
            parse_math=False,
        )
        _draw_tables(part.subplots(1, columns, squeeze=False)[0], atlas)
    return figure


def history_figure(history: AtlasHistory, names: Sequence[str] = ("induction",)) -> Figure:
    """Plots the loss, and the scores of each head, against the training step.

    Each head has one line, colored by its layer.

    Args:
        history: the loss and the scores of all heads at each checkpoint.
        names: the scores to draw, one panel per score.

    Raises:
        ValueError: A score does not exist.
    """
    figure = Figure(figsize=(4.6 * (len(names) + 1), 3.8), layout="constrained")
    axes = figure.subplots(1, len(names) + 1)
    for panel, name in zip(axes, names, strict=False):
        draw_lines(panel, history, name)
    axes[-1].plot(history.steps, history.loss, color="black")
    axes[-1].set(xlabel="step", ylabel="nats per token", title="loss on this text")
    axes[-1].grid(alpha=0.2)
    return figure


def draw_lines(axes: Axes, history: AtlasHistory, name: str) -> None:
    """Plots one score of every head against the training step.

    The figure labels the two heads with the highest final scores.

    Args:
        axes: matplotlib axes.
        history: the loss and the scores of all heads at each checkpoint.
        name: the score to draw.

    Raises:
        ValueError: The score does not exist.
    """
    if name not in history.scores:
        raise ValueError(f"names contain {name!r}; they must be in {', '.join(history.scores)}")
    scores = history.scores[name]
    _, layers, heads = scores.shape
    order = sorted(np.ndindex(layers, heads), key=lambda head: scores[-1][head])
    for layer, head in order:
        label = f"layer {layer}" if head == 0 else None
        axes.plot(history.steps, scores[:, layer, head], color=f"C{layer}", alpha=0.85, label=label)
    for (layer, head), side in zip(order[-2:], ("top", "bottom"), strict=False):
        axes.annotate(
            f"{layer}.{head}",
            (history.steps[-1], scores[-1, layer, head]),
            xytext=(3, 0),
            textcoords="offset points",
            va=side,
            fontsize=9,
        )
    title = f"{_words(name)} score of each head"
    axes.set(xlabel="step", ylabel="share of attention weight", title=title)
    handles = dict(sorted(zip(*axes.get_legend_handles_labels()[::-1], strict=True)))
    axes.legend(handles.values(), handles.keys(), fontsize=9)
    # The margin leaves space for the labels.
    axes.margins(x=0.08)
    axes.set_ylim(bottom=min(0.0, float(np.nanmin(scores, initial=0.0))))
    axes.grid(alpha=0.2)


def _defined(atlas: HeadAtlas) -> dict[str, np.ndarray]:
    return {name: score for name, score in atlas.scores.items() if not np.isnan(score).all()}


def _draw_tables(panels: np.ndarray, atlas: HeadAtlas) -> None:
    scores = _defined(atlas)
    for panel, (name, score) in zip(panels, scores.items(), strict=False):
        # The score of some heads may be NaN.
        low = -1.0 if np.nanmin(score) < 0 else 0.0
        draw_table(panel, _words(name), score, ("viridis", low, 1.0))
    most = max(float(abs(atlas.effect).max()), 1e-3)
    title = f"ablation, nats\n(± {atlas.standard_error.max():.2g} at most)"
    draw_table(panels[len(scores)], title, atlas.effect, ("coolwarm", -most, most))
    for panel in panels[len(scores) + 1 :]:
        panel.set_axis_off()


def draw_table(
    axes: Axes,
    title: str,
    values: Float[np.ndarray, "layers heads"],
    colors: tuple[str, float, float],
) -> None:
    """Draws a heat map with one cell per head.

    Args:
        axes: matplotlib axes.
        title: the title of the heat map.
        values: one number for each head, which the heat map shows as a color.
        colors: name of the color map, and the values at both ends of the color map.
    """
    name, low, high = colors
    axes.imshow(values, cmap=name, vmin=low, vmax=high, origin="lower", aspect="auto")
    for layer, head in np.ndindex(values.shape):
        if max(values.shape) > _MOST_NUMBERED:
            break
        share = (values[layer, head] - low) / (high - low)
        is_dark = share < 0.5 if name == "viridis" else abs(share - 0.5) > 0.35
        digits = 2 if high >= 0.1 else 3
        # Adding 0.0 turns −0.0 into 0.0, which is shown without a sign.
        text = f"{round(float(values[layer, head]), digits) + 0.0:.{digits}f}"
        color = "white" if is_dark else "black"
        axes.text(head, layer, text, ha="center", va="center", fontsize=9, color=color)
    axes.set_title(title, fontsize=10)
    axes.set(xlabel="head", ylabel="layer")
    every = -(-max(values.shape) // _MOST_NUMBERED)
    axes.set_xticks(range(0, values.shape[1], every))
    axes.set_yticks(range(0, values.shape[0], every))


def _words(name: str) -> str:
    return name.replace("_", " ")
