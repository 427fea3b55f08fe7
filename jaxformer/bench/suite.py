"""The whole measurement: its parts in order, within the time budget."""

import os
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax

import jaxformer
from jaxformer.bench.attention import measure_attention
from jaxformer.bench.ceilings import measure_ceilings
from jaxformer.bench.collectives import measure_collectives
from jaxformer.bench.decoding import measure_decoding
from jaxformer.bench.measurement import DType, Measurement
from jaxformer.bench.plan import BenchPlan
from jaxformer.bench.steps import measure_step
from jaxformer.bench.timing import TimeSource


class SuitePart(NamedTuple):
    """Part of the measurement: its name, an estimate of its seconds, and what runs it."""

    name: str
    seconds: float
    run: Callable[[], list[Measurement]]


class Results(NamedTuple):
    """Measurements, and the reason for each part that was skipped, by its name."""

    measurements: list[Measurement]
    skipped: dict[str, str]


def suite_parts(plan: BenchPlan, dtype: DType) -> Iterator[SuitePart]:
    """Yields the parts: first the ceilings, then the programs that are compared with them.

    Args:
        plan: The sizes.
        dtype: The dtype of the models and of attention.
    """

    def part(
        name: str, key: str, measure: Callable[..., list[Measurement]], *sizes: Any
    ) -> SuitePart:
        return SuitePart(name, plan.seconds.get(key, 1), partial(measure, *sizes, plan.rounds))

    sizes = plan.matrix_sizes, plan.array_bytes
    yield part("matrix product and memory", "ceilings", measure_ceilings, *sizes)
    for case in plan.training:
        yield part(f"training step of {case.name}", case.name, measure_step, case, dtype)
    for case in plan.decoding:
        yield part(f"decoding of {case.name}", case.name, measure_decoding, case, dtype)
    yield part("attention", "attention", measure_attention, plan.attention, dtype)
    if jax.device_count() > 1:
        yield part("collectives", "collectives", measure_collectives, plan.exchanged)


def run_parts(
    parts: list[SuitePart],
    seconds: float,
    show: Callable[[str, Callable], list[Measurement]],
    clock: TimeSource = time.perf_counter,
) -> Results:
    """Runs the parts that fit into the budget.

    A part that needs more memory than there is, or that the mesh of all devices does not suit, is
    skipped. The other figures are not lost.

    Args:
        parts: The parts.
        seconds: The time budget.
        show: (name of a part, its `run`) → its measurements. It shows the progress.
        clock: Returns the time in seconds.
    """
    found, skipped, end = [], {}, clock() + seconds
    for part in parts:
        remaining = end - clock()
        if remaining < part.seconds:
            skipped[part.name] = (
                f"it needs about {part.seconds:.0f} s, and {max(0, remaining):.0f} s remain"
            )
            continue
        try:
            found += show(part.name, part.run)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            skipped[part.name] = str(error).splitlines()[0]
    return Results(found, skipped)


def processor() -> str:
    """Returns the name of the host's processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def machine() -> dict:
    """Returns the devices, and the versions and flags on which compiled programs depend."""
    device = jax.devices()[0]
    names = ("jax", "jaxlib", "flax")
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "memory": (device.memory_stats() or {}).get("bytes_limit"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "versions": {"jaxformer": jaxformer.__version__, **{x: version(x) for x in names}},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
