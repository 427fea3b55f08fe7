"""Memory, communication and best-case time of a training step or a decoding loop."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.sharding import Mesh

from jaxformer.decoding.steps import STEPS
from jaxformer.doctor.compiled import compile_decoding, compile_step
from jaxformer.doctor.exchange import least_exchange
from jaxformer.doctor.experts import dense_over_experts, expert_sizes
from jaxformer.doctor.machines import Target, as_if_on, compiler, devices_of
from jaxformer.doctor.program import by_kind, collectives, copies
from jaxformer.models.config import Execution
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.flops import forward_flops, training_flops
from jaxformer.models.kinds import build
from jaxformer.models.language_model import LanguageModel
from jaxformer.models.mesh import make_mesh, num_row_parts
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.optimizer import make_optimizer


class DoesNotFit(Exception):
    """Raised when a program does not fit into the memory of a device."""

    status = 1


def examine_step(
    config: ModelConfig,
    execution: Execution,
    target: Target,
    mesh: dict[str, int],
    rows: int,
    length: int,
    recipe: OptimizerConfig | None = None,
) -> dict:
    """Compiles a training step and reports its memory, communication and best-case time.

    Memory and communication are in bytes per device, times in seconds. Computation is timed at the
    device's peak, communication at the speed of its links. The step takes at least the longer of
    the two.

    Args:
        config: The config of the model.
        execution: Its execution settings.
        target: The machine.
        mesh: The number of devices along each axis.
        rows: Rows of the batch.
        length: Tokens per row.
        recipe: The settings of the optimizer; None: AdamW.

    Returns:
        The figures. "experts" is None for a model without experts. Otherwise its "only_chosen" says
        whether each token is computed by its experts only, and "dense" lists arrays
        [experts, tokens, features] that show the contrary.

    Raises:
        ValueError: The mesh does not divide the rows, or does not suit the machine.
        DoesNotFit: The program does not fit into a device's memory.
    """
    model, device_mesh, notes = _prepared(config, execution, target, mesh, rows)
    begin = time.perf_counter()
    with _compiling(target):
        optimizer = make_optimizer(recipe or OptimizerConfig())
        program, memory = compile_step(model, optimizer, device_mesh, rows, length)
    seconds, text = round(time.perf_counter() - begin, 1), program.as_text() or ""
    found = by_kind(collectives(text))
    sent = sum(total.sent for total in found.values())
    flops, device = training_flops(model, length) * rows / target.count, target.device
    return {
        **_circumstances(target, device_mesh, model, rows, length),
        "memory": {**memory._asdict(), **_room(target, memory.total)},
        "exchanges": {kind: total._asdict() for kind, total in found.items()},
        "exchanged": sent,
        "least": least_exchange(config, device_mesh, rows, length),
        "experts": _experts(text, config, device_mesh, rows, length),
        "flops": flops,
        "seconds": device and {"operations": flops / device.flops, "links": sent / device.links},
        "compiled_in": seconds,
        "notes": notes,
    }


def examine_decoding(
    config: ModelConfig,
    execution: Execution,
    target: Target,
    mesh: dict[str, int],
    rows: int,
    length: int,
) -> dict:
    """Compiles the decoding steps of `generate` and reports their memory and communication.

    Each step generates one token per row. Its best-case time is that of reading the weights and
    the cache.

    Args:
        config: The config of the model.
        execution: Its execution settings.
        target: The machine.
        mesh: The number of devices along each axis.
        rows: The number of rows.
        length: Largest number of tokens per row; half of them are the prompt.

    Raises:
        ValueError: The mesh does not divide the rows, or does not suit the machine.
        DoesNotFit: The program does not fit into a device's memory.
    """
    model, device_mesh, notes = _prepared(config, execution, target, mesh, rows)
    begin = time.perf_counter()
    with _compiling(target):
        found = compile_decoding(model, device_mesh, rows, max(1, length // 2), length)
    seconds, text = round(time.perf_counter() - begin, 1), found.program.as_text() or ""
    exchanged = [one for one in collectives(text) if one.times >= STEPS]  # those inside the loop
    gathered = sum(one.sent for one in exchanged if one.kind == "all-gather")
    memory = {name: getattr(found, name) for name in ("weights", "cache", "temporaries")}
    total, device = sum(memory.values()), target.device
    return {
        **_circumstances(target, device_mesh, model, rows, length),
        "memory": {**memory, "total": total, **_room(target, total)},
        "exchanges": {kind: total._asdict() for kind, total in by_kind(exchanged).items()},
        "steps": STEPS,
        "exchanged_per_token": sum(one.sent for one in exchanged) / STEPS,
        "gathered_per_token": gathered / STEPS,
        "cache_copies_per_token": found.layer and copies(text, found.layer) / STEPS,
        "experts": _experts(text, config, device_mesh, rows, 1),
        "flops_per_token": forward_flops(model, 1) * rows / target.count,
        "seconds": device and {"memory": (found.weights + found.cache) / device.bandwidth},
        "compiled_in": seconds,
        "notes": notes,
    }


def _prepared(
    config: ModelConfig, execution: Execution, target: Target, mesh: dict[str, int], rows: int
) -> tuple[LanguageModel, Mesh, list[str]]:
    """Returns the model, the mesh and notes about the difference from the real machine."""
    device_mesh, notes = make_mesh(mesh, devices_of(target)), []
    parts = num_row_parts(device_mesh)
    if rows % parts:
        raise ValueError(
            f"batch_size is {rows}; it must be a multiple of data × fsdp × expert ({parts})"
        )
    if target.platform == "gpu":
        notes.append("the memory does not include the workspace of cuDNN's attention")
    return build(config, execution), device_mesh, notes


@contextmanager
def _compiling(target: Target) -> Iterator[None]:
    """Raises DoesNotFit if the compiler runs out of device memory in this context."""
    try:
        with as_if_on(target):
            yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise DoesNotFit(
            f"the program does not fit into the memory of {target}: {str(error).splitlines()[0]}"
        ) from None


def _circumstances(
    target: Target, mesh: Mesh, model: LanguageModel, rows: int, length: int
) -> dict:
    execution = model.execution
    return {
        "target": str(target),
        "devices": target.count,
        "compiler": compiler(target),
        "mesh": dict(mesh.shape),
        "rows": rows,
        "length": length,
        "dtype": model.config.dtype,
        "remat": execution.remat,
        "layers": "scan" if execution.scans(model.config.num_layers, False) else "unrolled",
    }


def _experts(text: str, config: ModelConfig, mesh: Mesh, rows: int, length: int) -> dict | None:
    """Returns the arrays that show that all experts are computed; None: there are no experts."""
    found = expert_sizes(config, mesh, rows, length)
    if not found:
        return None
    dense = [array for sizes in found for array in dense_over_experts(text, sizes)]
    return {"only_chosen": not dense, "dense": dense}


def _room(target: Target, total: int) -> dict:
    if target.device is None:
        return {"device": None, "fits": None}
    return {"device": target.device.memory, "fits": total <= target.device.memory}
