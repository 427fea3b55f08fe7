"""On one core, an interrupted and resumed run is bit-identical to an uninterrupted run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slow import mostly_rare

PROJECT = Path(__file__).parents[2]
SETTINGS = (
    "--preset tiny --max-length 32 --embed-dim 32 --vocab-size 300 --steps 60 --batch-size 4 "
    "--dropout 0.1 --evaluate-every 25 --checkpoint-every 7 --evaluation-windows 4 "
    "--sample-tokens 0"
).split()

QUICKLY = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compilation takes most of the time

# The new process restricts itself to one core, because `preexec_fn` makes JAX warn about a fork.
ON_ONE_CORE = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from jaxformer.cli import main
sys.exit(main())
"""


class Runner:
    """Starts `jaxformer train` in separate processes, on one core, with a shared cache."""

    def __init__(self, folder: Path):
        self.folder = folder
        text = "".join(f"def f{i}(x):\n    return x * {i}\n\n\n" for i in range(500))
        (folder / "text.py").write_text(text)
        cache = str(folder / "cache")
        self.environment = {**os.environ, "NPROC": "1", "XDG_CACHE_HOME": cache, **QUICKLY}

    def start(self, *words):
        command = [sys.executable, "-c", ON_ONE_CORE, "train", *words]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, *words):
        process = self.start(*words)
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
        return said

    def losses(self, run):
        lines = (self.folder / run / "metrics.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in lines]
        return [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]

    def wait_for(self, run, step, process):
        """Waits until metrics.jsonl has reached a step or the process has ended."""
        metrics = self.folder / run / "metrics.jsonl"
        while process.poll() is None:
            if metrics.exists() and f'"step": {step},' in metrics.read_text():
                return
            time.sleep(0.002)


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    runner = Runner(tmp_path_factory.mktemp("resume"))
    runner.finish("text.py", *SETTINGS, "--out", "whole")
    return runner


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cannot keep to one core here")
def test_a_run_resumed_after_signals_equals_an_uninterrupted_run(runner):
    """A run is killed after step 10, interrupted after step 25 and terminated after step 40.

    The run is resumed each time. After SIGINT and SIGTERM, the run saves the current step and
    prints the command that continues it.
    """
    for words, step, end in (
        (["text.py", *SETTINGS], 10, signal.SIGKILL),
        (["--resume"], 25, signal.SIGINT),
        (["--resume"], 40, signal.SIGTERM),
    ):
        process = runner.start(*words, "--out", "ended")
        runner.wait_for("ended", step, process)
        process.send_signal(end)
        said, _ = process.communicate(timeout=100)
        last = runner.losses("ended")[-1][0]
        assert last < 60
        if end == signal.SIGKILL:
            assert process.returncode == -end
            continue
        assert process.returncode == 128 + end, said
        assert "--resume --out ended" in said.splitlines()[-1] and "Traceback" not in said
        assert last == max(
            int(path.name) for path in (runner.folder / "ended/checkpoints").iterdir()
        )
    runner.finish("--resume", "--out", "ended")
    assert runner.losses("ended") == runner.losses("whole")


@pytest.mark.slow
@pytest.mark.parametrize("seconds", mostly_rare([0.5, 3], 3))
def test_a_run_killed_at_any_time_and_resumed_equals_an_uninterrupted_run(runner, seconds):
    """Random times also hit imports and the preparation of data."""
    run = f"killed-{seconds}"
    process = runner.start("text.py", *SETTINGS, "--out", run)
    time.sleep(seconds)
    process.kill()
    process.communicate()
    begun = (runner.folder / run / "config.json").exists()
    runner.finish(*(["--resume"] if begun else ["text.py", *SETTINGS]), "--out", run)
    assert runner.losses(run) == runner.losses("whole")


@pytest.mark.rare
def test_run_survives_ten_kills_and_detects_damaged_files():
    """Runs a small part of `experiments/survival.py` (200 kills and 1,000 damaged files)."""
    words = ["experiments/survival.py", "--kills", "10", "--flips", "30", "--seed", "1"]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=PROJECT,
        env={**os.environ, **QUICKLY},
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, (found, done.stderr)
    assert found["kills"] == 10 and found["damage"]["noticed"] == 30
