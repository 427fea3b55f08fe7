"""Tests of `jaxformer bench`: its files, its errors, and a complete run of tiny programs."""

import json
import os
import subprocess
import sys

import jax
import pytest

from jaxformer.bench.measurement import Part
from jaxformer.cli import main
from tests.cli.test_errors import refused

# Shorter than the estimate of any part: every part is skipped.
NOTHING = ("bench", "--quick", "--seconds", "0.01")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--dtype", "float16"], ["--dtype", "float16", "bfloat16"]),
        (["--out", "figures.txt"], ["out", "figures.txt", ".json"]),
        (["--out", "nowhere/figures.json"], ["out", "nowhere", "existing folder"]),
        (["-o", "mine.json"], ["mine.json", "already exists"]),
        (["-o", "picture.json"], ["picture.png", "already exists"]),
        (["--seconds", "0"], ["seconds", "0", "at most 540"]),
        (["--seconds", "nan"], ["seconds", "nan", "at most 540"]),
        (["--seconds", "600"], ["seconds", "600", "at most 540"]),
        (["--quik"], ["--quik", "did you mean --quick?"]),
    ],
)
def test_bench_rejects_invalid_arguments(words, named, tmp_path, capsys):
    for name in ("mine.json", "picture.png"):
        (tmp_path / name).write_text("mine")
    refused(capsys, [*NOTHING, *words], *named)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["mine.json", "picture.png"]
    assert all(x.read_text() == "mine" for x in tmp_path.iterdir())


def test_bench_keeps_existing_files_and_lists_skipped_benchmarks(tmp_path, capsys):
    """A name is free if neither the figures nor the picture of this name exist."""
    (tmp_path / "bench-2.png").write_text("mine")
    for name in ("bench", "bench-3"):
        assert main([*NOTHING]) == 0
        said = capsys.readouterr().out
        assert f"figures: {name}.json" in said and f"picture: {name}.png" in said
        assert "skipped: attention: this part needs about 1 s, but 0 s remain" in said
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert json.loads((tmp_path / f"{name}.json").read_text())["measurements"] == []
    assert (tmp_path / "bench-2.png").read_text() == "mine"
    assert not (tmp_path / "bench-2.json").exists()


@pytest.mark.slow
def test_bench_runs_all_benchmarks_with_tiny_programs(tmp_path, capsys):
    assert main(["bench", "--quick", "--json", "-o", "here.json"]) == 0
    printed, said = capsys.readouterr()
    found = json.loads(printed)
    assert said == "" and found == json.loads((tmp_path / "here.json").read_text())
    assert found["skipped"] == {}
    assert found["machine"]["versions"]["jax"] == jax.__version__
    assert found["machine"]["devices"] == jax.device_count()
    assert {x["part"] for x in found["measurements"]} == {*Part} - {Part.COLLECTIVES}
    for one in found["measurements"]:
        times = one["seconds"]
        assert 0 < times["least"] <= times["median"] <= times["most"] and times["rounds"] == 3
        assert one["flops"] or one["bytes"]
    (step,) = (x for x in found["measurements"] if x["part"] == Part.TRAINING)
    assert step["tokens"] == 128 and step["shares"]["matrix product"] > 0
    assert (tmp_path / "here.png").read_bytes().startswith(b"\x89PNG")


SCRIPT = """
import json
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxformer.bench.device import programs
from jaxformer.cli import main
from jaxformer.models.sharding.parameters import make_mesh
mesh = make_mesh({"fsdp": 8})
x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
for name, (program, _) in programs(mesh).items():
    assert name in program.lower(x).compile().as_text(), name
assert main(["bench", "--quick", "-o", "eight.json"]) == 0
"""


@pytest.mark.slow
def test_bench_measures_communication_and_training_on_eight_devices(tmp_path):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "eight.json").read_text())
    assert found["skipped"] == {} and "one device" not in done.stdout
    size = 8 * 2**16
    together = [x for x in found["measurements"] if x["devices"] == 8]
    sent = {x["name"].split()[0]: x["bytes"] for x in together if x["part"] == Part.COLLECTIVES}
    assert sent == {"all-gather": size * 7 / 8, "all-reduce": 2 * size / 8 * 7 / 8}
    assert [x["name"] for x in together if x["part"] == Part.TRAINING] == ["tiny, 16 × 64 tokens"]
    assert found["machine"]["xla_flags"] == flags["XLA_FLAGS"]
