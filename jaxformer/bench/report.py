"""The report as a table and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest

from jaxformer.bench.anchors import ANCHORS
from jaxformer.bench.measurement import (
    COLLECTIVES,
    DECODING,
    FIRST_TOKEN,
    MATRIX,
    MEMORY,
    PARTS,
    TRAINING,
    Ceilings,
    Measurement,
)
from jaxformer.bench.suite import Results

# The ceilings that the table compares each part with: a measured one and a published one.
_OF_FLOPS, _OF_MEMORY = ("matrix product", "published peak"), ("memory", "published bandwidth")
_SHOWN = {
    MATRIX: ("", "published peak"),
    MEMORY: ("", "published bandwidth"),
    DECODING: _OF_MEMORY,
    COLLECTIVES: ("", "published links"),
}
_NOTE = """\
Speeds are medians; shares relate them to the fastest round of the matrix product or of memory.
Operations are counted by formula (jaxformer/models/flops.py): attention counts only the keys that a
query sees, (length + 1) / 2 on average. Bytes are the least that a program must move: in decoding,
the weights and the keys and values of the tokens so far."""


def json_of(results: Results, ceilings: Ceilings) -> dict:
    """Returns all figures as values that JSON can store."""
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
    return {
        "part": x.part,
        "name": x.name,
        "dtype": x.dtype,
        "devices": x.devices,
        "note": x.note,
        "seconds": x.timing._asdict(),
        "flops": x.flops,
        "bytes": x.bytes,
        "tokens": x.tokens,
        "flops_per_byte": x.intensity or None,
        **{rate: getattr(x, rate) or None for rate in rates},
        "shares": ceilings.shares(x),
    }


def results_table(results: Results, ceilings: Ceilings, num_devices: int) -> str:
    """Returns the table: the measured programs by part, the skipped parts, and published figures.

    Args:
        results: The results.
        ceilings: The ceilings, of which the table shows the shares.
        num_devices: The number of devices.
    """
    rows: list[tuple[str, ...]] = []
    for part in PARTS:
        measured = [x for x in results.measurements if x.part == part]
        names = {name for x in measured for name in ceilings.shares(x)}
        shown = tuple(name if name in names else "" for name in _SHOWN.get(part, _OF_FLOPS))
        if measured:
            heads = (f"of {name}" if name else "" for name in shown)
            rows += [(part, "speed", *heads, "time (fastest … slowest)")]
            rows += [*(_row(x, ceilings, shown) for x in measured), ()]
    remarks = [f"skipped: {name}: {reason}" for name, reason in results.skipped.items()]
    if num_devices == 1:
        remarks.append("collectives: none, because there is one device")
    remarks += [""] * bool(remarks)
    published = [(f"  {x.model}, {x.device}", x.figure, x.part, x.source) for x in ANCHORS]
    lines = [*_aligned(rows), *remarks, _NOTE, "", "published by others", *_aligned(published)]
    return "\n".join(lines)


def _row(x: Measurement, ceilings: Ceilings, shown: tuple[str, ...]) -> tuple[str, ...]:
    shares = ceilings.shares(x)
    cells = (f"{shares[name]:.1%}" if name in shares else "" for name in shown)
    label = f"{x.dtype}, {x.name}" if x.part == MATRIX else x.name
    return (f"  {label}", _rate(x), *cells, _time(x), x.note)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns lines whose cells stand in columns. Columns without text are omitted."""
    columns = list(zip_longest(*rows, fillvalue=""))
    widths = [max(map(len, column)) for column in columns]
    padded = (
        [cell.ljust(n + 2) for cell, n in zip(row, widths, strict=True) if n]
        for row in zip(*columns, strict=True)
    )
    return ["".join(cells).rstrip() for cells in padded]


def _rate(x: Measurement) -> str:
    if x.part in (TRAINING, DECODING):
        return f"{x.tokens_per_second:,.{0 if x.tokens_per_second >= 100 else 1}f} tokens/s"
    if x.part == FIRST_TOKEN:
        return _seconds(x.timing.median)
    if x.part in (MEMORY, COLLECTIVES):
        return prefixed(x.bytes_per_second, "B/s")
    return prefixed(x.flops_per_second, "FLOP/s")


def _time(x: Measurement) -> str:
    """Returns the median and the range of the rounds."""
    median, least, most, _ = x.timing
    return f"{_seconds(median)} ({_seconds(least)} … {_seconds(most)})"


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"


def prefixed(value: float, unit: str) -> str:
    """Returns a rate with three digits and a decimal prefix, such as 85.3 GFLOP/s."""
    for prefix in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} T{unit}" if value < 999.5 else f"{value:,.0f} T{unit}"
