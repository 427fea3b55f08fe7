"""Plots of mean curves over several runs, with bands for the standard error."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

# (x, y) of each point.
Curve = list[tuple[float, float]]


def draw_mean(axes: Axes, curves: Sequence[Curve], **style: Any) -> None:
    """Draws the mean of curves as a line, and its standard error as a band.

    The mean at an x value averages only the curves that have a point at this x value.

    Args:
        axes: The axes to draw in.
        curves: The curves.
        **style: Options of `Axes.plot`.
    """
    at: dict[float, list[float]] = {}
    for curve in curves:
        for x, y in curve:
            at.setdefault(x, []).append(y)
    if not at:
        return
    places = sorted(at)
    means = np.array([np.mean(at[x]) for x in places])
    (line,) = axes.plot(places, means, **style)
    errors = np.array([_standard_error(at[x]) for x in places])
    if errors.any():
        band = {"color": line.get_color(), "alpha": 0.2, "linewidth": 0}
        axes.fill_between(places, means - errors, means + errors, **band)


def _standard_error(values: Sequence[float]) -> float:
    """Returns the standard error of the mean, or 0 for a single value."""
    number = len(values)
    return float(np.std(values, ddof=1) / number**0.5) if number > 1 else 0.0


def limit(axes: Axes, top: float) -> None:
    """Limits the y axis to `top` if a curve is higher."""
    losses = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines])
    if len(losses) and losses.max() > top:
        lowest = losses.min()
        axes.set_ylim(lowest - 0.05 * (top - lowest), top)
