"""Benchmark suite, which runs the programs that suit a device within a time budget."""

import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax

import jaxformer
from jaxformer.bench.device import (
    AttentionCase,
    measure_attention,
    measure_ceilings,
    measure_collectives,
)
from jaxformer.bench.measurement import DType, Measurement, Rounds, TimeSource
from jaxformer.bench.models import DecodingCase, TrainingCase, measure_decoding, measure_step
from jaxformer.models.config import DecoderConfig, preset
from jaxformer.models.parameters import parameter_count

# Bytes per parameter in a training step: parameter, gradient and two moments, all in float32.
_STATE_BYTES = 16
# Activations that the forward pass stores per token, feature and layer: about 20 bfloat16 values.
# If the estimate is too low, the batch is halved (`largest_that_fits`).
_ACTIVATION_BYTES = 40
# The maximum number of tokens per device and step. Larger batches hardly increase the throughput.
_MOST_TOKENS = 65_536
# Assumed memory size, in bytes, of a device that does not report its memory size.
_UNKNOWN_MEMORY = 12e9

# 10.8 M parameters
_SMALL = DecoderConfig(vocab_size=256, max_length=256, num_layers=6, embed_dim=384, num_heads=6)
_TINY = DecoderConfig(vocab_size=256, max_length=64, num_layers=2, embed_dim=64, num_heads=4)


@dataclass(frozen=True)
class BenchPlan:
    """Sizes of all benchmark programs.

    Attributes:
        matrix_size: The number of rows and columns of the matrices.
        array_bytes: The bytes of the array that is copied and read.
        training: The training benchmarks, smallest first.
        decoding: The decoding benchmarks, smallest first.
        attention: The shapes of the attention benchmark.
        exchanged: The bytes per device of the array that the collectives exchange.
        rounds: The limits on the timed rounds of each program.
        seconds: Estimated seconds of each part, including compilation, by the name of the part or
            of its model.
    """

    matrix_size: int
    array_bytes: int
    training: tuple[TrainingCase, ...]
    decoding: tuple[DecodingCase, ...]
    attention: AttentionCase
    exchanged: int
    rounds: Rounds
    seconds: dict[str, float]


QUICK = BenchPlan(
    matrix_size=128,
    array_bytes=2**22,
    training=(TrainingCase("tiny", _TINY, 64, 2),),
    decoding=(DecodingCase("tiny", _TINY, (1, 8), 8, 32, 32),),
    attention=AttentionCase((64,), 128, 2, 16),
    exchanged=2**16,
    rounds=Rounds(3, 0.5),
    seconds={},
)
CPU = BenchPlan(
    matrix_size=1536,
    array_bytes=2**28,
    training=(
        TrainingCase("10.8M", _SMALL, 256, 8),
        TrainingCase("gpt2-124m", preset("gpt2-124m"), 256, 1),
    ),
    decoding=(DecodingCase("gpt2-124m", preset("gpt2-124m"), (1, 8), 32, 32, 256),),
    attention=AttentionCase((256, 1024, 4096), 4096, 12, 64),
    exchanged=2**24,
    rounds=Rounds(5, 8.0),
    seconds={"10.8M": 60, "gpt2-124m": 90, "ceilings": 30, "attention": 45, "collectives": 15},
)
_ACCELERATOR = BenchPlan(
    matrix_size=8192,
    array_bytes=2**31,
    training=(),
    decoding=(),
    attention=AttentionCase((1024, 4096, 16_384), 16_384, 16, 128),
    exchanged=2**28,
    rounds=Rounds(11, 8.0),
    seconds={
        "gpt2-124m": 60,
        "gpt2-350m": 100,
        "llama-1.1b": 120,
        "ceilings": 30,
        "attention": 30,
        "collectives": 30,
    },
)


def plan_for(platform: str, memory: int | None, count: int, quick: bool) -> BenchPlan:
    """Returns the benchmark sizes for a machine.

    Args:
        platform: The name of the platform: cpu, gpu or tpu.
        memory: The bytes that JAX may use on one device, or None if unknown.
        count: The number of devices.
        quick: Whether to select tiny programs, which take a few seconds.
    """
    if quick:
        return QUICK
    if platform == "cpu":  # Simulated devices share the CPU's cores.
        cases = (x._replace(batch_size=max(1, x.batch_size // count)) for x in CPU.training)
        return replace(CPU, training=tuple(cases))
    memory = int(memory or _UNKNOWN_MEMORY)
    names = ("gpt2-124m", "gpt2-350m", "llama-1.1b")
    training = [case for name in names if (case := _training_case(name, memory, count))]
    decoding = [
        DecodingCase(name, preset(name), (1, 8), 128, 256, preset(name).max_length // 2)
        for name in ("gpt2-124m", "llama-1.1b")
        if 6 * parameter_count(preset(name)) < memory / 2
    ]
    return replace(
        _ACCELERATOR,
        training=tuple(training),
        decoding=tuple(decoding),
        array_bytes=min(_ACCELERATOR.array_bytes, _power_of_two(memory // 8)),
    )


def _training_case(name: str, memory: int, count: int) -> TrainingCase | None:
    """Returns a training benchmark for a device with `memory` bytes.

    Returns None if the training state needs more than two thirds of the memory.

    The batch size is a power of two, so that `largest_that_fits` can halve it down to 1.
    """
    config = preset(name)
    room = memory - _STATE_BYTES * parameter_count(config) // count
    if room < memory / 3:
        return None
    token_bytes = _ACTIVATION_BYTES * config.num_layers * config.embed_dim
    batch_size = min(room // token_bytes, _MOST_TOKENS) // config.max_length
    return TrainingCase(name, config, config.max_length, _power_of_two(max(1, batch_size)))


def _power_of_two(most: int) -> int:
    """Returns the largest power of two that does not exceed `most`."""
    return 2 ** (most.bit_length() - 1)


class SuitePart(NamedTuple):
    """Part of the benchmark: its name, the estimated seconds, and the function that measures it."""

    name: str
    seconds: float
    run: Callable[[], list[Measurement]]


class Results(NamedTuple):
    """The measurements of a benchmark, and {name of a skipped part: reason}."""

    measurements: list[Measurement]
    skipped: dict[str, str]


def suite_parts(plan: BenchPlan, dtype: DType) -> Iterator[SuitePart]:
    """Yields the parts of the benchmark: first the peak rates, then the other programs.

    Args:
        plan: The sizes.
        dtype: The dtype of the models and of attention.
    """

    def part(
        name: str, key: str, measure: Callable[..., list[Measurement]], *sizes: Any
    ) -> SuitePart:
        return SuitePart(name, plan.seconds.get(key, 1), partial(measure, *sizes, plan.rounds))

    sizes = plan.matrix_size, plan.array_bytes
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
    """Runs the parts that fit into the time budget.

    A part is also skipped if it needs too much memory or if its model cannot be sharded over the
    mesh of all devices. The results of the remaining parts are still returned.

    Args:
        parts: The parts.
        seconds: The time budget in seconds.
        show: Function that shows the progress. The function takes the name and the `run` of a
            `SuitePart`, calls `run` and returns the measurements.
        clock: Function that returns a time in seconds.
    """
    found, skipped, end = [], {}, clock() + seconds
    for part in parts:
        remaining = end - clock()
        if remaining < part.seconds:
            skipped[part.name] = (
                f"this part needs about {part.seconds:.0f} s, but {max(0, remaining):.0f} s remain"
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
    """Returns the devices, and the versions and flags that affect compiled programs."""
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
