"""Timed rounds of a program, and the time budget of a whole measurement."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

Clock = Callable[[], float]  # returns the time in seconds
LEAST_ROUNDS = 3  # a median of fewer rounds is not robust against one slow round


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
        seconds: After this time no further round starts, except to reach `LEAST_ROUNDS`.
        clock: Returns the time in seconds.
    """

    most: int = 7
    seconds: float = 10.0
    clock: Clock = time.perf_counter

    def repeat(self, once: Callable[[], float]) -> list[float]:
        """Calls `once`, which returns seconds, for each round. Returns the seconds."""
        begin, seconds = self.clock(), []
        while len(seconds) < self.most:
            if len(seconds) >= LEAST_ROUNDS and self.clock() - begin >= self.seconds:
                break
            seconds.append(once())
        return seconds

    def time(self, run: Callable[[], Any]) -> float:
        """Returns the seconds of one run, including the wait for its result."""
        begin = self.clock()
        jax.block_until_ready(run())
        return self.clock() - begin

    def measure(self, run: Callable[[], Any], repeats: int = 1) -> Timing:
        """Runs a program once to warm it up, then times it.

        Args:
            run: Runs the program and returns its result.
            repeats: The number of equal steps in a run. The timing is that of one step.
        """
        jax.block_until_ready(run())
        return Timing.of(self.repeat(lambda: self.time(run)), repeats)


class Budget:
    """Time limit of a whole measurement, which is checked before each part."""

    def __init__(self, seconds: float, clock: Clock = time.perf_counter):
        """Starts the time.

        Args:
            seconds: The limit.
            clock: Returns the time in seconds.
        """
        self._clock = clock
        self._end = clock() + seconds

    @property
    def remaining(self) -> float:
        """Seconds until the limit."""
        return self._end - self._clock()
