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
    from matplotlib.ticker import LogLocator

    points = [x for x in measurements if x.part in _STYLES and x.intensity]
    roofs = roofs_of(ceilings)
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    axes = figure.subplots()
    low, high = _limits([*(x.intensity for x in points), *(x.ridge for x in roofs.values())])
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    _draw_roofs(axes, roofs, np.geomspace(low, high, 400))
    places = [(x.intensity, x.flops_per_second) for x in points]
    for number, (x, place) in enumerate(zip(points, places, strict=True)):
        marker, color = _STYLES[x.part]
        style = {"marker": marker, "color": color, "markersize": 9, "linestyle": "none"}
        axes.plot(*place, label=f"{number + 1}  {x.part}: {x.name}", alpha=0.85, **style)
        corner = _CORNERS[sum(_are_close(place, other) for other in places[:number]) % 4]
        axes.annotate(str(number + 1), place, fontsize=9, textcoords="offset points", **corner)
    axes.set_xlabel("FLOP per byte (least bytes that the program must move)")
    axes.set_ylabel("speed of each device")
    axes.grid(alpha=0.2, which="both")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: prefixed(value, "FLOP/s"))
    axes.yaxis.set_minor_formatter("")
    handles = axes.get_legend_handles_labels()
    figure.legend(*handles, loc="outside right upper", fontsize=8, markerscale=0.8)
    write_figure(figure, title, path, dpi=130)


# Where the number of a point stands, in printer's points. Points that are close to one another use
# different corners.
_CORNERS = tuple(
    {"xytext": (x, y), "ha": "left" if x > 0 else "right", "va": "bottom" if y > 0 else "top"}
    for x, y in ((5, 3), (-5, -3), (5, -3), (-5, 3))
)


def _are_close(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Returns whether the markers of two points overlap: less than 25% apart in both directions."""
    return all(abs(np.log(x / y)) < 0.25 for x, y in zip(one, other, strict=True))


def _draw_roofs(axes: Any, roofs: dict[str, Roof], intensities: np.ndarray) -> None:
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


def _limits(values: list[float]) -> tuple[float, float]:
    """Returns the limits of a logarithmic axis that shows these values with some room."""
    return (min(values, default=1.0) / 3, max(values, default=1.0) * 3)
