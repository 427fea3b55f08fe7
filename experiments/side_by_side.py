"""Times several programs in turn (A B C A B C …), so that drift of the machine affects all alike.

Each program runs in its own process and waits while another one is measured. A program that has
waited is slow at first, so a round of a short one has many runs and counts as their median.
"""

import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable

from jaxformer.bench.measurement import Rounds, Timing, in_turn
from jaxformer.runtime import keep_freed_memory

WARMUP_ROUNDS = 3
ROUND = Rounds(most=sys.maxsize, seconds=1.0, least=1)  # runs of a program until a second is over
# Threads that wait for work keep a core busy for a moment, OpenMP's up to 0.2 s.
PAUSE_SECONDS = 0.3


def _serve(connection, make: Callable[[], Callable[[], None]]):
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    keep_freed_memory()  # for every program, because torch benefits too
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
    """A program in another process.

    `make()` sets it up and returns a function that runs it once and waits for the result.
    """

    def __init__(self, name: str, make: Callable[[], Callable[[], None]]):
        context = multiprocessing.get_context("spawn")
        self.name, self.seconds = name, []
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make), daemon=True)
        self._process.start()
        theirs.close()  # otherwise a process that dies would leave `recv` waiting forever
        self.setup_seconds = self._receive()

    def measure(self) -> float:
        """Returns the seconds of a run, after a pause: the median of a round."""
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
    """Starts all programs and measures them in turn, each for at least a second per round.

    The first run of a program and the first rounds are not counted. On a virtual machine, which may
    reclaim the memory of a waiting process, steps of GPT-2 124M took 4.3, 3.2, 2.8 and then 2.6 s.
    """
    subjects = {name: Subject(name, make) for name, make in makers.items()}
    timers = {name: subject.measure for name, subject in subjects.items()}
    for name, seconds in in_turn(timers, rounds, WARMUP_ROUNDS).items():
        subjects[name].seconds = seconds
        subjects[name].close()
    return subjects


def ratio(ours: Subject, theirs: Subject) -> float:
    """Returns how many times as fast `ours` is."""
    return speedup(ours.seconds, theirs.seconds)


def speedup(ours: list[float], theirs: list[float]) -> float:
    """Returns the median of the ratios of all rounds."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def table(subjects: dict[str, Subject], tokens: int) -> dict:
    """Prints a line per program and returns the figures.

    The first program is ours. Each run processes `tokens` tokens.
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
