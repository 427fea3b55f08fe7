"""What a training step or a decoding loop needs of a machine: memory, exchanges, time at best."""

import time
from contextlib import contextmanager
from dataclasses import replace

import jax

from jaxformer.decoding.generate import STEPS
from jaxformer.models.build import build
from jaxformer.models.flops import forward_flops, training_flops
from jaxformer.models.placement import make_mesh
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.doctor.compiled import compile_decoding, compile_step
from jaxformer.training.doctor.exchange import least_exchange
from jaxformer.training.doctor.machines import Target, compiler, devices_of
from jaxformer.training.doctor.program import by_kind, collectives, copies
from jaxformer.training.optimizer import make_optimizer


class DoesNotFit(Exception):
    """The compiler found no place for the program in the memory of a device."""

    status = 1


def examine_step(
    config, execution, target: Target, mesh: dict[str, int], rows: int, length: int, recipe=None
) -> dict:
    """A training step of so many rows of so many tokens. recipe: an `OptimizerConfig`; None: AdamW.

    Memory and what is exchanged are bytes on each device, times are seconds: operations by the
    device's peak, exchanges by its links; the step takes at least the longer of them.
    """
    model, made, notes = _prepared(config, execution, target, mesh)
    _check_rows(rows, made)
    with _compiling(target) as seconds:
        optimizer = make_optimizer(recipe or OptimizerConfig())
        program, memory = compile_step(model, optimizer, made, rows, length)
    found = by_kind(collectives(program.as_text()))
    sent = sum(total.sent for total in found.values())
    least = least_exchange(config, made, rows, length)
    flops = training_flops(config, length) * rows / target.count
    return {
        **_circumstances(target, made, model, rows, length),
        "memory": {**memory._asdict(), **_room(target, memory.total)},
        "exchanges": {kind: total._asdict() for kind, total in found.items()},
        "exchanged": sent,
        "least": least,
        "flops": flops,
        "seconds": _seconds(target, flops, sent),
        "compiled_in": seconds[0],
        "notes": notes,
    }


def examine_decoding(
    config, execution, target: Target, mesh: dict[str, int], rows: int, length: int
) -> dict:
    """The block of steps that `generate` runs, for rows of up to so many tokens, half of them
    prompt. A token is one step; its time is at best that of reading the weights and the cache."""
    model, made, notes = _prepared(config, execution, target, mesh)
    _check_rows(rows, made)
    with _compiling(target) as seconds:
        found = compile_decoding(model, made, rows, max(1, length // 2), length)
    text = found.program.as_text()
    exchanged = [one for one in collectives(text) if one.times >= STEPS]  # within the loop
    gathered = sum(one.sent for one in exchanged if one.kind == "all-gather")
    memory = {name: getattr(found, name) for name in ("weights", "cache", "temporaries")}
    total, device = sum(memory.values()), target.device
    best = device and {"memory": (found.weights + found.cache) / device.bandwidth}
    return {
        **_circumstances(target, made, model, rows, length),
        "memory": {**memory, "total": total, **_room(target, total)},
        "exchanges": {kind: total._asdict() for kind, total in by_kind(exchanged).items()},
        "steps": STEPS,
        "exchanged_per_token": sum(one.sent for one in exchanged) / STEPS,
        "gathered_per_token": gathered / STEPS,
        "cache_copies_per_token": found.layer and copies(text, found.layer) / STEPS,
        "flops_per_token": forward_flops(config, 1) * rows / target.count,
        "seconds": best,
        "compiled_in": seconds[0],
        "notes": notes,
    }


def _prepared(config, execution, target: Target, mesh: dict[str, int]):
    """(model, mesh, what to know about them)."""
    made, notes = make_mesh(mesh, devices_of(target)), []
    if target.platform == "gpu" and execution.attention == "auto":
        execution = replace(execution, attention="blockwise")
        notes.append(
            "attention is blockwise here; on the machine itself cuDNN's fused kernel runs where it "
            "can, which is compiled by the device alone"
        )
    return build(config, execution), made, notes


def _check_rows(rows: int, mesh) -> None:
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    if rows % parts:
        raise ValueError(f"batch_size is {rows}; it does not divide by data × fsdp ({parts})")


@contextmanager
def _compiling(target: Target):
    """Gives a list that will hold the seconds; DoesNotFit if there is not the memory."""
    seconds, begin = [], time.perf_counter()
    try:
        yield seconds
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise DoesNotFit(f"it does not fit on {target}: {str(error).splitlines()[0]}") from None
    seconds.append(round(time.perf_counter() - begin, 1))


def _circumstances(target: Target, mesh, model, rows: int, length: int) -> dict:
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


def _room(target: Target, total: int) -> dict:
    if target.device is None:
        return {"device": None, "fits": None}
    return {"device": target.device.memory, "fits": total <= target.device.memory}


def _seconds(target: Target, flops: float, sent: float) -> dict | None:
    if target.device is None:
        return None
    return {"operations": flops / target.device.flops, "links": sent / target.device.links}
