"""The whole measurement: its parts in order, within the time budget."""

import os
import platform
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import jax

import jaxformer
from jaxformer.bench.attention import measure_attention
from jaxformer.bench.ceilings import measure_memory, measure_product
from jaxformer.bench.collectives import measure_collectives
from jaxformer.bench.decoding import measure_decoding
from jaxformer.bench.measurement import DTYPES, DType, Measurement
from jaxformer.bench.plan import Plan
from jaxformer.bench.steps import measure_step
from jaxformer.bench.timing import Budget


class Part(NamedTuple):
    """Part of the measurement.

    Attributes:
        name: Its name.
        seconds: An estimate of its time.
        run: Runs it.
    """

    name: str
    seconds: float
    run: Callable[[], list[Measurement]]


class Results(NamedTuple):
    """Measurements, and the reason for each part that was skipped, by its name."""

    measurements: list[Measurement]
    skipped: dict[str, str]


def parts_of(plan: Plan, dtype: DType) -> Iterator[Part]:
    """Yields the parts: first the ceilings, then the programs that are compared with them.

    Args:
        plan: The sizes.
        dtype: The dtype of the models and of attention.
    """
    rounds, seconds = plan.rounds, plan.seconds

    def ceilings() -> list[Measurement]:
        products = [measure_product(plan.matrix_sizes[x], x, rounds) for x in DTYPES]
        return [*products, *measure_memory(plan.array_bytes, rounds)]

    def attention() -> list[Measurement]:
        lengths = (
            measure_attention(plan.attention, n, dtype, rounds) for n in plan.attention.lengths
        )
        return [x for pair in lengths for x in pair]

    yield Part("matrix product and memory", seconds.get("ceilings", 1), ceilings)
    for case in plan.training:
        run = partial(lambda case: [measure_step(case, dtype, rounds)], case)
        yield Part(f"training step of {case.name}", seconds.get(case.name, 1), run)
    for case in plan.decoding:
        run = partial(measure_decoding, case, dtype, rounds)
        yield Part(f"decoding of {case.name}", seconds.get(case.name, 1), run)
    yield Part("attention", seconds.get("attention", 1), attention)
    if jax.device_count() > 1:
        run = partial(measure_collectives, plan.exchanged, rounds)
        yield Part("collectives", seconds.get("collectives", 1), run)


def run_parts(
    parts: list[Part], budget: Budget, show: Callable[[str, Callable], list[Measurement]]
) -> Results:
    """Runs the parts that fit into the budget.

    A part that needs more memory than there is, or that the mesh of all devices does not suit, is
    skipped. The other figures are not lost.

    Args:
        parts: The parts.
        budget: The time budget.
        show: (name of a part, its `run`) → its measurements. It shows the progress.
    """
    found, skipped = [], {}
    for part in parts:
        remaining = budget.remaining
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
