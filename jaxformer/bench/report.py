"""The benchmark report as a table, as JSON and as a roofline plot (FLOP/s over intensity).

    attainable(i) = min(FLOP/s of a matrix product, i · memory bandwidth in bytes/s)

The intensity i is the number of FLOPs per byte.

Reference: Williams et al. 2009, "Roofline: an insightful visual performance model".
"""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer.artifacts.files import write_figure
from jaxformer.bench.measurement import Ceilings, Measurement, Part
from jaxformer.bench.suite import Results

# For each part of the benchmark, the table relates the speeds to two peaks: one measured, one
# published.
_OF_FLOPS, _OF_MEMORY = ("matrix product", "published peak"), ("memory", "published bandwidth")
_SHOWN = {
    Part.MATRIX: ("", "published peak"),
    Part.MEMORY: ("", "published bandwidth"),
    Part.DECODING: _OF_MEMORY,
    Part.COLLECTIVES: ("", "published links"),
}
_NOTE = """\
Speeds are medians. Percentages compare them with the fastest measured matrix product, copy or read,
or with published rates.
FLOPs follow the formulas in jaxformer/models/flops.py: attention counts only visible keys,
(length + 1) / 2 per query on average. Bytes are the minimum that a program must move: in decoding,
the weights, and the keys and values of all tokens so far."""


class Anchor(NamedTuple):
    """A published speed of another project, to compare with a part of the benchmark.

    In `figure`, "of peak" means a percentage of the published peak FLOP/s. The projects count FLOPs
    in different ways.
    """

    part: Part
    model: str
    device: str
    figure: str
    source: str


ANCHORS = (
    Anchor(Part.TRAINING, "GPT-2 124M", "1 H100", "468,000 tokens/s, 40% of peak", "llm.c"),
    Anchor(Part.TRAINING, "GPT-2 124M", "8 A100", "107,000 tokens/s per GPU, 29%", "nanoGPT"),
    Anchor(Part.TRAINING, "GPT-2 350M", "1 A100", "62% of peak", "llm.c"),
    Anchor(Part.TRAINING, "nanochat", "H100", "41% (d12) and about 46% (d18) of peak", "nanochat"),
    Anchor(
        Part.TRAINING,
        "1.3B",
        "1 H100",
        "60,178 tokens/s, 56.4% of peak",
        "jax-linear-attention 0.1.0, average causal context",
    ),
    Anchor(Part.TRAINING, "GPT-2 1.5B", "1 H100", "48.7% of peak", "llm.c"),
    Anchor(Part.TRAINING, "Llama 2 7B", "8 H100", "50–54% of peak", "JAX-Toolbox"),
    Anchor(Part.TRAINING, "8B", "8 H100", "33–39% of peak", "torchtitan"),
    Anchor(Part.TRAINING, "8B; 70B", "TPU v6e", "45.5%; 50.3% of peak", "MaxText"),
    Anchor(Part.TRAINING, "32B; 70B", "TPU v5p", "71.5%; 65.4% of peak", "MaxText"),
    Anchor(Part.TRAINING, "70B", "H200", "51% of peak", "MaxText"),
    Anchor(Part.DECODING, "7B, batch 1", "1 A100", "104.9 tokens/s, 69% of bandwidth", "gpt-fast"),
    Anchor(Part.DECODING, "70B, batch 8", "16 TPU v5e", "85% of bandwidth", "jax-llm-examples"),
)


def results_json(results: Results, ceilings: Ceilings) -> dict:
    """Returns all results as JSON values."""
    return {
        "measurements": [_object(x, ceilings) for x in results.measurements],
        "skipped": results.skipped,
        "published": {
            "device": ceilings.device and asdict(ceilings.device),
            "anchors": [x._asdict() for x in ANCHORS],
        },
    }


def _object(x: Measurement, ceilings: Ceilings) -> dict:
    rates = ("flops_per_second", "bytes_per_second", "tokens_per_second")
    found = {**x._asdict(), "seconds": x.timing._asdict(), "flops_per_byte": x.intensity or None}
    found |= {rate: getattr(x, rate) or None for rate in rates}
    del found["timing"]
    return {**found, "shares": ceilings.shares(x)}


def results_table(results: Results, ceilings: Ceilings, num_devices: int) -> str:
    """Returns the table: measurements by part, skipped parts, and published speeds.

    Args:
        results: The results.
        ceilings: The peak rates. The table shows each speed as a percentage of a peak rate.
        num_devices: The number of devices.
    """
    rows: list[tuple[str, ...]] = []
    for part in Part:
        measured = [x for x in results.measurements if x.part == part]
        names = {name for x in measured for name in ceilings.shares(x)}
        shown = tuple(name if name in names else "" for name in _SHOWN.get(part, _OF_FLOPS))
        if measured:
            heads = (f"of {name}" if name else "" for name in shown)
            rows += [(part, "speed", *heads, "time (fastest … slowest)")]
            rows += [*(_row(x, ceilings, shown) for x in measured), ()]
    remarks = [f"skipped: {name}: {reason}" for name, reason in results.skipped.items()]
    if num_devices == 1:
        remarks.append("skipped: collectives: a single device sends no data")
    remarks += [""] * bool(remarks)
    published = [(f"  {x.model}, {x.device}", x.figure, x.part, x.source) for x in ANCHORS]
    lines = [*_aligned(rows), *remarks, _NOTE, "", "published speeds", *_aligned(published)]
    return "\n".join(lines)


def _row(x: Measurement, ceilings: Ceilings, shown: tuple[str, ...]) -> tuple[str, ...]:
    shares = ceilings.shares(x)
    cells = (f"{shares[name]:.1%}" if name in shares else "" for name in shown)
    label = f"{x.dtype}, {x.name}" if x.part == Part.MATRIX else x.name
    return (f"  {label}", _rate(x), *cells, _time(x), x.note)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Formats rows as an aligned table without empty columns."""
    columns = list(zip_longest(*rows, fillvalue=""))
    widths = [max(map(len, column)) for column in columns]
    padded = (
        [cell.ljust(n + 2) for cell, n in zip(row, widths, strict=True) if n]
        for row in zip(*columns, strict=True)
    )
    return ["".join(cells).rstrip() for cells in padded]


def _rate(x: Measurement) -> str:
    if x.part in (Part.TRAINING, Part.DECODING):
        return f"{x.tokens_per_second:,.{0 if x.tokens_per_second >= 100 else 1}f} tokens/s"
    if x.part == Part.FIRST_TOKEN:
        return _seconds(x.timing.median)
    if x.part in (Part.MEMORY, Part.COLLECTIVES):
        return prefixed(x.bytes_per_second, "B/s")
    return prefixed(x.flops_per_second, "FLOP/s")


def _time(x: Measurement) -> str:
    """Formats the median and the range of the rounds."""
    median, least, most, _ = x.timing
    return f"{_seconds(median)} ({_seconds(least)} … {_seconds(most)})"


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"


def prefixed(value: float, unit: str) -> str:
    """Formats a rate with three digits and a decimal prefix, such as 85.3 GFLOP/s."""
    for prefix in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} T{unit}" if value < 999.5 else f"{value:,.0f} T{unit}"


_STYLES = {
    Part.TRAINING: ("o", "C0"),
    Part.DECODING: ("s", "C1"),
    Part.FIRST_TOKEN: ("^", "C2"),
    Part.ATTENTION: ("D", "C3"),
}
_ROOFS = {"float32": "0.55", "bfloat16": "0.1"}


class Roof(NamedTuple):
    """Peak FLOP/s and memory bandwidth of one device, which limit all programs."""

    flops: float
    bandwidth: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which memory no longer limits a program."""
        return self.flops / self.bandwidth

    def attainable(self, intensity: float | np.ndarray) -> Any:
        """Returns the FLOP/s that a program with this intensity (FLOPs per byte) can attain."""
        return np.minimum(self.flops, np.asarray(intensity) * self.bandwidth)


def make_roofs(ceilings: Ceilings) -> dict[str, Roof]:
    """Returns the largest FLOP/s and bandwidth, as measured for each dtype and as published."""
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
    """Plots the measured limits, the published limits (dashed), and a numbered point per program.

    Args:
        measurements: The measurements. Programs without FLOPs or bytes are omitted.
        ceilings: The peak rates.
        title: The title.
        path: The PNG file to write.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    points = [x for x in measurements if x.part in _STYLES and x.intensity]
    roofs = make_roofs(ceilings)
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    axes = figure.subplots()
    low, high = _limits([*(x.intensity for x in points), *(x.ridge for x in roofs.values())])
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    _draw_roofs(axes, roofs, low, high)
    places = [(x.intensity, x.flops_per_second) for x in points]
    for number, (x, place) in enumerate(zip(points, places, strict=True)):
        marker, color = _STYLES[x.part]
        style = {"marker": marker, "color": color, "markersize": 9, "linestyle": "none"}
        axes.plot(*place, label=f"{number + 1}  {x.part}: {x.name}", alpha=0.85, **style)
        corner = _CORNERS[sum(_are_close(place, other) for other in places[:number]) % 4]
        axes.annotate(str(number + 1), place, fontsize=9, textcoords="offset points", **corner)
    axes.set_xlabel("FLOPs per byte (minimum bytes that the program must move)")
    axes.set_ylabel("FLOP/s per device")
    axes.grid(alpha=0.2, which="both")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: prefixed(value, "FLOP/s"))
    axes.yaxis.set_minor_formatter("")
    handles = axes.get_legend_handles_labels()
    figure.legend(*handles, loc="outside right upper", fontsize=8, markerscale=0.8)
    write_figure(figure, title, path, dpi=130)


# Each marker of the plot has a number at one of its corners. Overlapping markers have their numbers
# at different corners. The offsets are in typographic points.
_CORNERS = tuple(
    {"xytext": (x, y), "ha": "left" if x > 0 else "right", "va": "bottom" if y > 0 else "top"}
    for x, y in ((5, 3), (-5, -3), (5, -3), (-5, 3))
)


def _are_close(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Returns whether two markers overlap, that is, differ by less than 25% in both directions."""
    return all(abs(np.log(x / y)) < 0.25 for x, y in zip(one, other, strict=True))


def _draw_roofs(axes: Any, roofs: dict[str, Roof], low: float, high: float) -> None:
    for name, roof in roofs.items():
        intensities = np.array((low, roof.ridge, high))
        is_measured = name.startswith("measured")
        peak, memory = prefixed(roof.flops, "FLOP/s"), prefixed(roof.bandwidth, "B/s")
        axes.plot(
            intensities,
            roof.attainable(intensities),
            linestyle="-" if is_measured else "--",
            color=_ROOFS[name.split(", ")[1]] if is_measured else "C4",
            label=f"roofline of {name}: {peak}, {memory}",
        )


def _limits(values: list[float]) -> tuple[float, float]:
    """Returns the limits of a logarithmic axis that shows these values with a margin."""
    return (min(values, default=1.0) / 3, max(values, default=1.0) * 3)
