"""Timed rounds of programs, one by one or in turn."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax

TimeSource = Callable[[], float]  # returns the time in seconds
K = TypeVar("K", bound=Hashable)


class Timing(NamedTuple):
    """Seconds of the timed rounds of a program.

    Attributes:
        median: The median of the rounds.
        least: The fastest round.
        most: The slowest round.
        rounds: The number of rounds.
    """

    median: float
    least: float
    most: float
    rounds: int

    @classmethod
    def of(cls, seconds: list[float], divisor: int = 1) -> "Timing":
        """Returns the timing of one of `divisor` equal steps that make up each round."""
        each = [second / divisor for second in seconds]
        return cls(statistics.median(each), min(each), max(each), len(each))


@dataclass(frozen=True)
class Rounds:
    """How often a program is timed.

    Attributes:
        most: The largest number of rounds.
        seconds: After this time no further round starts, except to reach `least`.
        clock: Returns the time in seconds.
        least: The smallest number of rounds. A median of fewer than three is not robust against one
            slow round.
    """

    most: int = 7
    seconds: float = 10.0
    clock: TimeSource = time.perf_counter
    least: int = 3

    def repeat(self, once: Callable[[], float]) -> list[float]:
        """Calls `once`, which returns seconds, for each round. Returns the seconds."""
        begin, seconds = self.clock(), []
        while len(seconds) < self.most:
            if len(seconds) >= self.least and self.clock() - begin >= self.seconds:
                break
            seconds.append(once())
        return seconds

    def time(self, run: Callable[[], Any]) -> float:
        """Returns the seconds of one run, including the wait for its result."""
        begin = self.clock()
        jax.block_until_ready(run())
        return self.clock() - begin

    def measure(self, run: Callable[[], Any], repeats: int = 1, warmup: int = 1) -> Timing:
        """Warms a program up, then times it.

        Args:
            run: Runs the program and returns its result.
            repeats: The number of equal steps in a run. The timing is that of one step.
            warmup: The number of first runs that do not count.
        """
        for _ in range(warmup):
            jax.block_until_ready(run())
        return Timing.of(self.repeat(lambda: self.time(run)), repeats)


def in_turn(
    timers: Mapping[K, Callable[[], float]], rounds: int, warmup: int = 1
) -> dict[K, list[float]]:
    """Times several programs in turn (A B C A B C …), so that drift of the machine affects all.

    Args:
        timers: For each program, a function that runs it once and returns the seconds.
        rounds: How often each program is timed.
        warmup: The number of first rounds that do not count. Programs compile in the first one.

    Returns:
        The seconds of each round, by program.
    """
    seconds: dict[K, list[float]] = {name: [] for name in timers}
    for _ in range(warmup + rounds):
        for name, timer in timers.items():
            seconds[name].append(timer())
    return {name: each[warmup:] for name, each in seconds.items()}
