"""Limits and points of the roofline plot."""

import numpy as np
import pytest

from jaxformer.bench import report
from jaxformer.bench.measurement import Ceilings, Measurement, Part, Timing
from jaxformer.bench.report import Roof, draw_roofline, make_roofs
from jaxformer.training.devices import DEVICES

H100 = DEVICES["gpu:h100"]
SECOND = Timing(1.0, 1.0, 1.0, 3)


def test_programs_of_low_arithmetic_intensity_are_limited_by_bandwidth():
    roof = Roof(flops=100.0, bandwidth=20.0)
    assert roof.ridge == 5.0
    np.testing.assert_allclose(roof.attainable(np.array([1.0, 5.0, 50.0])), [20.0, 100.0, 100.0])


def test_unmeasured_peak_rates_are_omitted_from_the_roofline():
    assert make_roofs(Ceilings({}, None, None)) == {}
    assert make_roofs(Ceilings({"float32": 1.0}, None, None)) == {}
    assert make_roofs(Ceilings({}, None, H100)).keys() == {"published, bfloat16"}


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws a plot and returns its axes."""

    def draw(measurements, ceilings):
        figures = []
        monkeypatch.setattr(report, "write_figure", lambda x, *_, **__: figures.append(x))
        draw_roofline(measurements, ceilings, "title", tmp_path / "x.png")
        return figures[0].axes[0]

    return draw


def test_the_roofline_shows_each_program_below_the_limits(drawn):
    """The FLOPs of all devices are divided by their number. The published limit is dashed."""
    measured = [
        Measurement(Part.TRAINING, "model", "bfloat16", SECOND, 8e14, 1e12, devices=4),
        Measurement(Part.ATTENTION, "row", "bfloat16", SECOND, 1e14, 5e12),
        Measurement(Part.MEMORY, "copy", "float32", SECOND, bytes=3e12),
    ]
    axes = drawn(measured, Ceilings({"bfloat16": 7e14}, 3e12, H100))
    lines = {line.get_label(): line for line in axes.lines}
    points = {name: line.get_xydata().tolist() for name, line in lines.items() if name[0].isdigit()}
    assert points == {
        "1  training step: model": [[200.0, 2e14]],
        "2  attention: row": [[20.0, 1e14]],
    }
    roofs = {name: line for name, line in lines.items() if name.startswith("roof")}
    dashed = {name: line.get_linestyle() == "--" for name, line in roofs.items()}
    assert [(name.split(":")[0], x) for name, x in dashed.items()] == [
        ("roofline of measured, bfloat16", False),
        ("roofline of published, bfloat16", True),
    ]
    for line in roofs.values():
        assert line.get_ydata().max() in (7e14, H100.flops)
    low, high = axes.get_xlim()
    assert low < 20.0 and high > H100.flops / H100.bandwidth
