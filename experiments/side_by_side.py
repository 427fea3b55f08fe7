"""Times several programs alternately (A B C A B C …), so that drift affects all programs equally.

Each program runs in a separate process, which waits while the other programs are measured. After a
pause, the first runs of a program are slow. A round of a short program therefore consists of many
runs, and the time of the round is the median over the runs.
"""

import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable

from jaxformer.bench.measurement import Rounds, Timing, time_alternately
from jaxformer.runtime import tune_cpu_runtime

WARMUP_ROUNDS = 3
# In a round, a program runs repeatedly until `seconds` have passed.
ROUND = Rounds(most=sys.maxsize, seconds=1.0, least=1)
# After each run, idle threads keep a core busy for a while (threads of OpenMP for up to 0.2 s).
PAUSE_SECONDS = 0.3


def _serve(connection, make: Callable[[], Callable[[], None]]):
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # Torch also benefits from these settings, so every program uses them.
    tune_cpu_runtime()
    try:
        begin = time.perf_counter()
        run = make()
        run()
        connection.send(time.perf_counter() - begin)
        while connection.recv() == "run":
            connection.send(ROUND.measure(run, warmup=0).median)
    except Exception:
        connection.send(traceback.format_exc())


class Subject:
    """A program to measure, which runs in another process.

    `make()` sets up the program and returns a function that runs it once and waits for the result.
    """

    def __init__(self, name: str, make: Callable[[], Callable[[], None]]):
        context = multiprocessing.get_context("spawn")
        self.name, self.seconds = name, []
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make), daemon=True)
        self._process.start()
        # If this process also kept the child's end open, `recv` would wait forever after the child
        # dies.
        theirs.close()
        self.setup_seconds = self._receive()

    def measure(self) -> float:
        """Runs one round after a pause. Returns the median seconds per run."""
        time.sleep(PAUSE_SECONDS)
        self._connection.send("run")
        return self._receive()

    def close(self) -> None:
        self._connection.send("stop")
        self._process.join()

    def _receive(self) -> float:
        try:
            answer = self._connection.recv()
        except EOFError:
            raise RuntimeError(f"{self.name} died (out of memory?)") from None
        if isinstance(answer, str):
            raise RuntimeError(f"{self.name} failed:\n{answer}")
        return answer

    @property
    def median(self) -> float:
        return Timing.of(self.seconds).median


def compare(makers: dict[str, Callable], rounds: int) -> dict[str, Subject]:
    """Starts all programs and measures them alternately, each for at least a second per round.

    The medians do not include the first run of a program and the first rounds. A virtual machine
    may reclaim the memory of a waiting process. In a process that had waited, the next steps of
    GPT-2 124M took 4.3, 3.2, 2.8 and finally 2.6 s.
    """
    subjects = {name: Subject(name, make) for name, make in makers.items()}
    timers = {name: subject.measure for name, subject in subjects.items()}
    for name, seconds in time_alternately(timers, rounds, WARMUP_ROUNDS).items():
        subjects[name].seconds = seconds
        subjects[name].close()
    return subjects


def ratio(ours: Subject, theirs: Subject) -> float:
    """Computes the speed of `ours` relative to another program, round by round."""
    return speedup(ours.seconds, theirs.seconds)


def speedup(ours: list[float], theirs: list[float]) -> float:
    """Returns the median of the speed ratios over all rounds."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def table(subjects: dict[str, Subject], tokens: int) -> dict:
    """Prints a line per program and returns the measurements.

    The first entry of `subjects` is jaxformer's program. One call of a program processes `tokens`
    tokens.
    """
    ours, figures = next(iter(subjects.values())), {}
    for name, subject in subjects.items():
        speed, times = tokens / subject.median, ratio(ours, subject)
        note = "" if subject is ours else f"   {ours.name} is {times:5.2f}× as fast"
        print(
            f"  {name:22} {1e3 * subject.median:9.1f} ms {speed:12,.1f} tokens/s{note}"
            f"   (first run {subject.setup_seconds:.0f} s)"
        )
        figures[name] = {"seconds": subject.median, "tokens_per_second": speed, "ratio": times}
    return figures
