"""The picture of a dependency matrix: what depends on what, and how much."""

from pathlib import Path

import numpy as np


def draw_dependency(found, rule, path: Path, title: str) -> None:
    """Of one row of tokens: on the left who depends on whom beside the rule, on the right the
    largest effect of each pair. Writes a PNG."""
    from matplotlib.colors import ListedColormap, LogNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from jaxformer.artifacts.picture import write_figure

    matrix, rule = found.matrix[0, :, 0], rule[0, :, 0]
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    kinds = {
        "depends, as the rule says": ("#2b5c8a", matrix & rule),
        "spurious: depends, against the rule": ("#d62728", matrix & ~rule),
        "missing: should depend": ("#ff9f1c", rule & ~matrix),
    }
    table = sum((i + 1) * where for i, (_, where) in enumerate(kinds.values()))
    colours = ["#f4f4f4", *(colour for colour, _ in kinds.values())]
    left.imshow(table, cmap=ListedColormap(colours), vmin=0, vmax=3, interpolation="nearest")
    left.legend(
        handles=[Patch(color=c, label=f"{n} ({w.sum()})") for n, (c, w) in kinds.items()],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.12),
        fontsize=8,
    )
    left.set_title("which output depends on which input")
    effects = found.effects[0, :, 0]
    some = effects[np.isfinite(effects) & (effects > 0)]
    if some.size:
        scale = LogNorm(max(some.min(), some.max() * 1e-8), some.max())
        image = right.imshow(
            np.where(effects > 0, effects, np.nan), norm=scale, interpolation="nearest"
        )
        figure.colorbar(image, ax=right, label="largest derivative or change (hidden states)")
    right.set_title("how much (white: exactly 0)")
    for axes in (left, right):
        axes.set(xlabel="input position", ylabel="output position")
    write_figure(figure, title, path, dpi=110)
