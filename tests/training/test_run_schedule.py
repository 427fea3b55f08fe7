"""The learning rate during whole runs with slow updates, with one and with several processes."""

import math
from collections import deque
from itertools import pairwise
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxformer.artifacts.run import RunFolder
from jaxformer.cli import main
from jaxformer.training import processes
from jaxformer.training import speed as module
from jaxformer.training.loop import Training
from jaxformer.training.processes import Agreement
from jaxformer.training.step import CompiledStep

pytestmark = pytest.mark.usefixtures("quick_compilation")

WORDS = (
    "train text.py --model recurrent --preset tiny --vocab-size 300 --max-length 8 --embed-dim 8 "
    "--num-layers 1 --batch-size 2 --evaluation-windows 2 --sample-tokens 0 --warmup-steps 12 "
    "--max-minutes 1 --evaluate-every 20 --checkpoint-every 8 --learning-rate 1.0 --out run"
).split()


class Device:
    """Device whose updates take randomly drawn times while the host continues."""

    def __init__(self, monkeypatch, longest: float):
        self.now, self._durations = 0.0, np.random.default_rng(0)
        self._longest, self._running = longest, deque()
        call, block = CompiledStep.__call__, jax.block_until_ready

        def dispatch(step, *arguments):
            state, measured = call(step, *arguments)
            self._running.append(measured)
            return state, measured

        def wait(x):
            while self._running:
                self.now += self._durations.uniform(0, self._longest)
                if self._running.popleft() is x:
                    break
            return block(x)

        monkeypatch.setattr(CompiledStep, "__call__", dispatch)
        monkeypatch.setattr(jax, "block_until_ready", lambda x: x if x is None else wait(x))
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)


@pytest.mark.slow
def test_learning_rate_of_a_resumed_run_with_slow_updates_is_smooth(tmp_path, monkeypatch, capsys):
    """The run ends after step 11, before a checkpoint, and resumes with twice the time limit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.py").write_text("".join(f"def f{i}(x):\n    return {i}\n" for i in range(99)))
    Device(monkeypatch, longest := 4.0)
    update = Training._update

    def ending(training, step):
        if training.step == 11:
            raise RuntimeError("ended")
        update(training, step)

    with monkeypatch.context() as patched:
        patched.setattr(Training, "_update", ending)
        assert main(WORDS) == 1
    assert main(["train", "--resume", "--out", "run", "--max-minutes", "2"]) == 0
    rates = [x["learning_rate"] for x in RunFolder("run").read_metrics() if "loss" in x]
    assert rates[0] == 0 and len(rates) > 40 and max(rates) > 0.7
    for last, rate in pairwise(rates):
        assert rate <= last + 1 / 12 + 1e-9
        assert rate >= last - math.pi / 2 * 2 * longest / 120


def test_processes_synchronize_elapsed_time_after_each_slow_update(monkeypatch):
    """Processes exchange the time every ten steps, or at each step if an update takes a second."""
    monkeypatch.setattr(processes, "are_several", lambda: True)
    clock, exchanged = SimpleNamespace(seconds=5.0), []

    def gather(*values):
        exchanged.append(step)
        return [[*values], [0.0, 0.0]]

    monkeypatch.setattr(processes, "gather", gather)
    agreed = Agreement(clock, step=3)
    for step in range(4, 60):
        clock.seconds += 0.01 if step < 30 else 2.0
        agreed.signal(step, None)
        assert agreed.seconds <= clock.seconds <= agreed.seconds + 20.0
        assert step < 36 or agreed.seconds == clock.seconds
    assert exchanged[:4] == [4, 14, 24, 34] and exchanged[4:] == list(range(35, 60))
