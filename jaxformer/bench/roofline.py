"""Roofline picture: operations per second over operations per byte.

    attainable(i) = min(operations per second of a matrix product, i · bytes per second of memory)

Reference: Williams et al. 2009, "Roofline: an insightful visual performance model".
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer.artifacts.files import write_figure
from jaxformer.bench.measurement import (
    ATTENTION,
    DECODING,
    FIRST_TOKEN,
    TRAINING,
    Ceilings,
    Measurement,
)
from jaxformer.bench.report import prefixed

_STYLES = {
    TRAINING: ("o", "C0"),
    DECODING: ("s", "C1"),
    FIRST_TOKEN: ("^", "C2"),
    ATTENTION: ("D", "C3"),
}
_ROOFS = {"float32": "0.55", "bfloat16": "0.1"}


class Roof(NamedTuple):
    """A roof: peak operations per second, and bytes per second of memory, of one device."""

    flops: float
    bandwidth: float

    @property
    def ridge(self) -> float:
        """The operations per byte from which on memory no longer limits a program."""
        return self.flops / self.bandwidth

    def attainable(self, intensity: float | np.ndarray) -> Any:
        """Returns the operations per second that this roof allows at operations per byte."""
        return np.minimum(self.flops, np.asarray(intensity) * self.bandwidth)


def roofs_of(ceilings: Ceilings) -> dict[str, Roof]:
    """Returns the measured roof of each dtype, and the published one."""
    found = {}
    if ceilings.bandwidth:
        for dtype, flops in ceilings.flops.items():
            found[f"measured, {dtype}"] = Roof(flops, ceilings.bandwidth)
    if ceilings.device:
        found["published, bfloat16"] = Roof(ceilings.device.flops, ceilings.device.bandwidth)
    return found


def draw_roofline(
    measurements: list[Measurement], ceilings: Ceilings, title: str, path: Path
) -> None:
    """Draws the measured roofs, the published one dashed, and a numbered point for each program.

    Args:
        measurements: The measurements; those without operations or bytes are omitted.
        ceilings: The ceilings.
        title: The title.
        path: The PNG to write.
    """
    from matplotlib.figure import Figure

    points = [x for x in measurements if x.part in _STYLES and x.intensity]
    roofs = roofs_of(ceilings)
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    axes = figure.subplots()
    low, high = _limits([*(x.intensity for x in points), *(x.ridge for x in roofs.values())])
    intensities = np.geomspace(low, high, 400)
    for name, roof in roofs.items():
        is_measured = name.startswith("measured")
        peak, memory = prefixed(roof.flops, "FLOP/s"), prefixed(roof.bandwidth, "B/s")
        axes.plot(
            intensities,
            roof.attainable(intensities),
            linestyle="-" if is_measured else "--",
            color=_ROOFS[name.split(", ")[1]] if is_measured else "C4",
            label=f"roof {name}: {peak}, {memory}",
        )
    for number, x in enumerate(points, 1):
        marker, color = _STYLES[x.part]
        label = f"{number}  {x.part}: {x.name}"
        style = {"marker": marker, "color": color, "markersize": 13, "linestyle": "none"}
        axes.plot(x.intensity, x.flops_per_second, label=label, alpha=0.85, **style)
        axes.annotate(
            str(number),
            (x.intensity, x.flops_per_second),
            ha="center",
            va="center",
            color="white",
            fontsize=7,
        )
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    axes.set_xlabel("FLOP per byte (least bytes that the program must move)")
    axes.set_ylabel("speed of each device")
    axes.grid(alpha=0.2, which="both")
    axes.yaxis.set_major_formatter(lambda value, _: prefixed(value, "FLOP/s"))
    axes.yaxis.set_minor_formatter("")
    handles = axes.get_legend_handles_labels()
    figure.legend(*handles, loc="outside right upper", fontsize=8, markerscale=0.55)
    write_figure(figure, title, path, dpi=130)


def _limits(values: list[float]) -> tuple[float, float]:
    """Returns the limits of a logarithmic axis that shows these values with some room."""
    return (min(values, default=1.0) / 3, max(values, default=1.0) * 3)
