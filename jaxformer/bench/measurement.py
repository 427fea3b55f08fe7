"""Timed rounds of programs, and their utilization of the device's peak rates.

    utilization = FLOPs / (seconds · devices · FLOP/s of one device)

The FLOPs are computed by formulas, such as the formulas in `models.flops`. For attention, only the
pairs of a query and a key that the mask allows are counted. The bytes are the minimum that a
program must move: each input read once and each result written once.
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
    """Part of the benchmark, in the order of the table."""

    MATRIX = "matrix product"
    MEMORY = "memory"
    TRAINING = "training step"
    DECODING = "decoding"
    FIRST_TOKEN = "first token"
    ATTENTION = "attention"
    COLLECTIVES = "collectives"


DType = Literal["float32", "bfloat16"]
MEASURED_DTYPES: tuple[DType, ...] = ("float32", "bfloat16")
TimeSource = Callable[[], float]
K = TypeVar("K", bound=Hashable)


class Timing(NamedTuple):
    """Time of a program, in seconds.

    Attributes:
        median: The median of the rounds.
        least: The time of the fastest round.
        most: The time of the slowest round.
        rounds: The number of rounds.
    """

    median: float
    least: float
    most: float
    rounds: int

    @classmethod
    def of(cls, seconds: list[float], divisor: int = 1) -> "Timing":
        """Returns the timing of one step. Each round consists of `divisor` equal steps."""
        each = [second / divisor for second in seconds]
        return cls(statistics.median(each), min(each), max(each), len(each))


@dataclass(frozen=True)
class Rounds:
    """Limits on the number of timed rounds of a program.

    Attributes:
        most: The maximum number of rounds.
        seconds: The time limit in seconds. After `seconds`, a round starts only if fewer than
            `least` rounds have run.
        clock: Function that returns a time in seconds.
        least: The minimum number of rounds. With fewer than three rounds, one slow round distorts
            the median.
    """

    most: int = 7
    seconds: float = 10.0
    clock: TimeSource = time.perf_counter
    least: int = 3

    def repeat(self, once: Callable[[], float]) -> list[float]:
        """Calls `once` for each round, and returns the seconds of each call."""
        begin, seconds = self.clock(), []
        while len(seconds) < self.most and (
            len(seconds) < self.least or self.clock() - begin < self.seconds
        ):
            seconds.append(once())
        return seconds

    def time(self, run: Callable[[], Any]) -> float:
        """Returns the seconds that `run` takes, including the wait for its result."""
        begin = self.clock()
        jax.block_until_ready(run())
        return self.clock() - begin

    def measure(self, run: Callable[[], Any], repeats: int = 1, warmup: int = 1) -> Timing:
        """Warms up a program and times it.

        Args:
            run: Function that runs the program and returns the result.
            repeats: The number of equal steps that one call of `run` makes. The returned timing is
                per step.
            warmup: The number of initial calls that are not timed.
        """
        for _ in range(warmup):
            jax.block_until_ready(run())
        return Timing.of(self.repeat(lambda: self.time(run)), repeats)


def time_alternately(
    timers: Mapping[K, Callable[[], float]], rounds: int, warmup: int = 1
) -> dict[K, list[float]]:
    """Times several programs alternately (A B C A B C …), so that drift affects all programs alike.

    Args:
        timers: For each program, a function that runs the program and returns the seconds.
        rounds: The number of timed rounds.
        warmup: The number of initial rounds to discard. Programs compile in the first round.

    Returns:
        The seconds of each round, by program.
    """
    seconds: dict[K, list[float]] = {name: [] for name in timers}
    for _ in range(warmup + rounds):
        for name, timer in timers.items():
            seconds[name].append(timer())
    return {name: each[warmup:] for name, each in seconds.items()}


class Measurement(NamedTuple):
    """Measured time of a program, with its FLOPs, bytes and tokens.

    Attributes:
        part: The part of the benchmark.
        name: The name of the program.
        dtype: The dtype of the matrix products.
        timing: The seconds of one execution of the program.
        flops: The FLOPs of one execution on all devices, or 0 if the FLOPs are not counted.
        bytes: The minimum number of bytes that each device moves between processor and memory in
            one execution. For a collective, `bytes` is the number of bytes that each device sends.
        tokens: The tokens that one execution processes, or 0 if the program has no tokens.
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
        """FLOP/s of one device."""
        return self.flops / self.devices / self.timing.median

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second of one device."""
        return self.bytes / self.timing.median

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices together."""
        return self.tokens / self.timing.median

    @property
    def intensity(self) -> float:
        """FLOPs per byte (arithmetic intensity), or 0 if FLOPs or bytes are not counted."""
        return self.flops / self.devices / self.bytes if self.bytes else 0.0


class Ceilings(NamedTuple):
    """Peak rates of one device, measured in the fastest round of each program.

    Attributes:
        flops: The measured FLOP/s of a matrix product, by dtype.
        bandwidth: The measured memory bandwidth in bytes per second (copying or reading, whichever
            is faster), or None if it was not measured.
        device: The published specifications, or None if the table of devices lacks this device.
    """

    flops: dict[str, float]
    bandwidth: float | None
    device: Device | None

    @classmethod
    def of(cls, measurements: list[Measurement], device: Device | None) -> "Ceilings":
        """Extracts the peak rates from measurements."""
        best = [x._replace(timing=x.timing._replace(median=x.timing.least)) for x in measurements]
        products = (x for x in best if x.part == Part.MATRIX)
        flops: dict[str, float] = {x.dtype: x.flops_per_second for x in products}
        memory = [x.bytes_per_second for x in best if x.part == Part.MEMORY]
        return cls(flops, max(memory, default=None), device)

    def published_flops(self, dtype: str) -> float | None:
        """Returns the published FLOP/s, which are known for bfloat16 only."""
        return self.device.flops if self.device and dtype == "bfloat16" else None

    def shares(self, measured: Measurement) -> dict[str, float]:
        """Returns the fraction of each peak rate that a program reaches, by the rate's name."""
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
