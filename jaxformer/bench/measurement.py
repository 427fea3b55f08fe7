"""Timed rounds of programs, their operations and bytes, and the shares of the device's ceilings.

    utilization = operations / (seconds · devices · operations per second of one device)

Operations are counted by formula (`models.flops`) with the average causal context: attention counts
only the pairs of a query and a key that the mask allows. Bytes are the least that a program must
move: it reads its inputs once and writes its results once.
"""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeVar

import jax

from jaxformer.training.devices import Device


class Part(StrEnum):
    """Part of the measurement, in the order of the table."""

    MATRIX = "matrix product"
    MEMORY = "memory"
    TRAINING = "training step"
    DECODING = "decoding"
    FIRST_TOKEN = "first token"
    ATTENTION = "attention"
    COLLECTIVES = "collectives"


DType = Literal["float32", "bfloat16"]
MEASURED_DTYPES: tuple[DType, ...] = ("float32", "bfloat16")
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
        while len(seconds) < self.most and (
            len(seconds) < self.least or self.clock() - begin < self.seconds
        ):
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


class Measurement(NamedTuple):
    """Time of one program, and the work that it does.

    Attributes:
        part: The part of the measurement.
        name: The program.
        dtype: The dtype of its products.
        timing: The seconds of one run.
        flops: Operations of one run on all devices; 0: they are not counted.
        bytes: Bytes of one run that each device moves at least, between its processor and its
            memory; in collectives between devices.
        tokens: Tokens of one run; 0: the program has none.
        devices: The number of devices.
        note: Further details.
    """

    part: Part
    name: str
    dtype: DType
    timing: Timing
    flops: float = 0.0
    bytes: float = 0.0
    tokens: int = 0
    devices: int = 1
    note: str = ""

    @property
    def flops_per_second(self) -> float:
        """Operations per second of one device."""
        return self.flops / self.devices / self.timing.median

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second of one device."""
        return self.bytes / self.timing.median

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices."""
        return self.tokens / self.timing.median

    @property
    def intensity(self) -> float:
        """Operations per byte (arithmetic intensity); 0 if either is not counted."""
        return self.flops / self.devices / self.bytes if self.bytes else 0.0


class Ceilings(NamedTuple):
    """Rates that one device reaches at most, in the fastest round of each program.

    Attributes:
        flops: Measured operations per second of a matrix product, by dtype.
        bandwidth: Measured bytes per second of memory, the faster of copying and reading; None: it
            was not measured.
        device: The published figures; None: the table of devices lacks this device.
    """

    flops: dict[str, float]
    bandwidth: float | None
    device: Device | None

    @classmethod
    def of(cls, measurements: list[Measurement], device: Device | None) -> "Ceilings":
        """Returns the ceilings that these measurements contain."""
        best = [x._replace(timing=x.timing._replace(median=x.timing.least)) for x in measurements]
        products = (x for x in best if x.part == Part.MATRIX)
        flops: dict[str, float] = {x.dtype: x.flops_per_second for x in products}
        memory = [x.bytes_per_second for x in best if x.part == Part.MEMORY]
        return cls(flops, max(memory, default=None), device)

    def published_flops(self, dtype: str) -> float | None:
        """Returns the published operations per second; they are known for bfloat16 only."""
        return self.device.flops if self.device and dtype == "bfloat16" else None

    def shares(self, measured: Measurement) -> dict[str, float]:
        """Returns the shares of the ceilings that a program reaches, by the name of the ceiling."""
        flops, moved, device = measured.flops_per_second, measured.bytes_per_second, self.device
        if measured.part == Part.COLLECTIVES:
            return {"published links": moved / device.links} if device else {}
        limits = (
            ("matrix product", self.flops.get(measured.dtype), flops),
            ("published peak", self.published_flops(measured.dtype), flops),
            ("memory", self.bandwidth, moved),
            ("published bandwidth", device.bandwidth if device else None, moved),
        )
        return {name: rate / limit for name, limit, rate in limits if limit and rate}
