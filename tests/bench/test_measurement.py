"""Utilization, other percentages, and the table, computed from known numbers."""

import pytest

from jaxformer.bench.measurement import Ceilings, Measurement, Part, Timing
from jaxformer.bench.report import prefixed, results_json, results_table
from jaxformer.bench.suite import Results
from jaxformer.training.devices import DEVICES

H100 = DEVICES["gpu:h100"]


def second(part, dtype="bfloat16", **work):
    """A program whose median time is two seconds and whose fastest round takes one second."""
    return Measurement(part, "program", dtype, Timing(2.0, 1.0, 4.0, 3), **work)


MEASURED = [
    second(Part.MATRIX, flops=800e12),  # its fastest round takes one second
    second(Part.MATRIX, "float32", flops=400e12),
    second(Part.MEMORY, bytes=2e12),
    second(Part.MEMORY, bytes=3e12),
]
CEILINGS = Ceilings.of(MEASURED, H100)


def test_measured_peak_rates_come_from_the_fastest_rounds():
    assert CEILINGS.flops == {"bfloat16": 800e12, "float32": 400e12}
    assert CEILINGS.bandwidth == 3e12


def test_utilization_is_flops_per_device_over_measured_or_published_peak():
    """Eight devices do 8 · 2 · 400e12 FLOPs in two seconds: 400e12 FLOP/s each."""
    step = second(Part.TRAINING, flops=8 * 2 * 400e12, tokens=1000, devices=8)
    assert step.tokens_per_second == 500
    shares = CEILINGS.shares(step)
    assert shares == pytest.approx({"matrix product": 0.5, "published peak": 400e12 / H100.flops})


def test_utilization_of_published_peak_is_shown_for_bfloat16_only():
    step = second(Part.TRAINING, "float32", flops=2 * 100e12)
    assert CEILINGS.shares(step) == pytest.approx({"matrix product": 0.25})
    assert Ceilings.of(MEASURED, None).shares(step) == pytest.approx({"matrix product": 0.25})


def test_decoding_speed_is_relative_to_the_memory_bandwidth():
    step = second(Part.DECODING, flops=2e12, bytes=3e12, tokens=8)
    shares = CEILINGS.shares(step)
    assert shares["memory"] == 0.5
    assert shares["published bandwidth"] == pytest.approx(1.5e12 / H100.bandwidth)
    assert step.intensity == pytest.approx(2 / 3)


def test_collective_speed_is_relative_to_published_link_bandwidth():
    gather = second(Part.COLLECTIVES, "float32", bytes=450e9, devices=8)
    assert CEILINGS.shares(gather) == {"published links": 0.5}
    assert Ceilings.of(MEASURED, None).shares(gather) == {}


def test_the_benchmark_table_shows_rates_and_percentages():
    step = second(Part.TRAINING, flops=2 * 400e12, tokens=2000)
    attention = second(Part.ATTENTION, flops=2 * 80e12, note="cuDNN")
    results = Results([*MEASURED, step, attention], {"large": "it needs about 9 s"})
    lines = results_table(results, CEILINGS, 1).splitlines()
    (row,) = (line for line in lines if "1,000 tokens/s" in line)
    assert row.split()[1:] == "1,000 tokens/s 50.0% 40.4% 2.00 s (1.00 s … 4.00 s)".split()
    (row,) = (line for line in lines if line.endswith("cuDNN"))
    assert "80 TFLOP/s" in row and "10.0%" in row
    assert "skipped: large: it needs about 9 s" in lines
    assert any("a single device" in line for line in lines)
    assert not any(
        "single device" in line for line in results_table(results, CEILINGS, 2).splitlines()
    )


def test_the_benchmark_table_names_a_source_for_each_published_figure():
    results = Results([], {})
    published = results_json(results, CEILINGS)["published"]
    lines = results_table(results, CEILINGS, 1).splitlines()
    assert published["device"]["flops"] == H100.flops
    for anchor in published["anchors"]:
        assert all(anchor.values())
        assert sum(all(value in line for value in anchor.values()) for line in lines) == 1


def test_rates_are_formatted_with_three_digits_and_si_prefix():
    rates = {
        0.5: "0.5 B/s",
        999.4: "999 B/s",
        999.9: "1 kB/s",
        85.3e9: "85.3 GB/s",
        4e12: "4 TB/s",
        2e15: "2,000 TB/s",
    }
    assert {value: prefixed(value, "B/s") for value in rates} == rates
