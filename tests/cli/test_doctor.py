"""Tests of `jaxformer doctor`: this machine's setup and a model's needs, as a table and JSON."""

import json

import jax
import pytest

from jaxformer.cli import main
from jaxformer.cli.doctor import table_of_cells
from jaxformer.doctor.report import setup_rows
from tests.slow import mostly_slow


def printed(capsys, *words) -> str:
    assert main(["doctor", *words]) == 0
    return capsys.readouterr().out


def test_doctor_prints_versions_and_devices(capsys):
    found = json.loads(printed(capsys, "--json"))
    assert found["versions"]["jax"] == jax.__version__
    assert len(found["devices"]) == jax.device_count() and found["memory"] > 0
    table = printed(capsys)
    assert jax.__version__ in table and "devices" in table
    assert [line for line in table.splitlines() if "not installed" in line] or not found["missing"]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_doctor_prints_commands_and_paths_without_line_breaks(width, monkeypatch):
    """So it can be copied. The other cells are wrapped to the terminal's width."""
    monkeypatch.setenv("COLUMNS", str(width))
    command = 'pip install --no-deps "jax-cuda12-plugin==0.10.2" jax-cuda12-pjrt==0.10.2'
    found = {
        **{name: "1.2" for name in ("jaxformer", "python")},
        **{"system": "Linux-6.18-x86_64-with-glibc2.36", "versions": {"jax": None}, "devices": []},
        **{"memory": 10**10, "cores": 2, "missing": {"compiler for GPUs not here": command}},
        "cache": {"files": 3, "bytes": 10**6, "folder": "/home/somebody/.cache/jaxformer/xla"},
    }
    lines = [*setup_rows(found), ("note", "a note in many words " * 9, "")]
    table = table_of_cells("jaxformer doctor", lines).splitlines()
    assert sum(line.endswith(command) for line in table) == 1
    assert sum(line.endswith(found["cache"]["folder"]) for line in table) == 1
    for line in table:
        unbroken = line.lstrip().startswith(("pip", "/home", "Python"))
        assert len(line) <= width or unbroken, line


@pytest.mark.slow
def test_doctor_reports_attention_kernel_of_a_tpu_that_is_not_present(capsys):
    words = ("--preset", "gpt2-124m", "--target", "tpu:v5e:4x4", "--explain-attention")
    table = printed(capsys, *words)
    assert "layers 1–12" in table and "splash" in table
    found = json.loads(printed(capsys, *words, "--json"))
    assert found["layers"][0]["implementation"] == "splash"
    assert main(["doctor", "--explain-attention"]) == 2
    assert main(["doctor", *words, "--decode"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


HOW = ("--preset", "tiny", "--target", "cpu:1", "--batch-size", "2", "--length", "16")


@pytest.mark.slow
@pytest.mark.parametrize("what", mostly_slow(["decode", "step"], "step"))
def test_doctor_prints_the_memory_that_a_model_needs(what, capsys):
    """One device sends nothing and holds all parameters in float32."""
    words = (*HOW, *["--decode"] * (what == "decode"))
    found = json.loads(printed(capsys, *words, "--json"))
    assert found["target"] == "cpu:1" and found["exchanges"] == {}
    if what == "step":
        assert found["memory"]["optimizer"] == 2 * found["memory"]["parameters"] + 4
        assert found["flops"] == pytest.approx(
            3 * 2 * 2 * 16 * (2 * 12 * 64**2 + 512 * 64), rel=0.1
        )
    else:
        assert found["cache_copies_per_token"] == 0
    capsys.readouterr()
