"""Memory, communication and best-case time of a training step or a decoding loop.

The program is compiled for a mesh of devices that may be absent. JAX's `memory_analysis` gives the
memory of temporary arrays; `program` reads the communication from the compiled program.
"""

import time
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxformer.decoding.autoregressive import parallel_parts, prepare_weights, start_cache
from jaxformer.decoding.loop_cache import live_slots, slots
from jaxformer.decoding.steps import STEPS, Choice, choose_first, decode_block, prefill
from jaxformer.doctor.exchange import least_exchange
from jaxformer.doctor.experts import dense_over_experts, expert_sizes
from jaxformer.doctor.machines import Target, as_if_on, compiler, devices_of
from jaxformer.doctor.program import by_kind, collectives, copies
from jaxformer.functional.cache.key_values import CacheSize
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.taps import NO_HOOKS
from jaxformer.models.autoregressive import require_autoregressive
from jaxformer.models.config import Execution
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.flops import forward_flops, training_flops
from jaxformer.models.kinds import build
from jaxformer.models.language_model import LanguageModel
from jaxformer.models.mesh import make_mesh, num_row_parts, parameter_shapes, shapes_at
from jaxformer.training.batch import Batch
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.mesh import placed_shapes
from jaxformer.training.optimizer import make_optimizer
from jaxformer.training.step import init_state, make_step, num_bytes, state_shardings


class DoesNotFit(Exception):
    """Raised when a program does not fit into the memory of a device."""

    status = 1


class ProgramCase(NamedTuple):
    """A program to examine.

    Attributes:
        config: The config of the model.
        execution: Its execution settings.
        target: The machine.
        mesh: The number of devices along each axis.
        rows: Rows of the batch.
        length: Tokens per row; in decoding the largest number, of which half are the prompt.
    """

    config: ModelConfig
    execution: Execution
    target: Target
    mesh: dict[str, int]
    rows: int
    length: int


def examine_step(case: ProgramCase) -> dict:
    """Compiles a training step and reports its memory, communication and best-case time.

    Memory and communication are in bytes per device, times in seconds. Computation is timed at the
    device's peak, communication at the speed of its links. The step takes at least the longer of
    the two.

    Returns:
        The figures. "experts" is None for a model without experts. Otherwise its "only_chosen" says
        whether each token is computed by its experts only, and "dense" lists arrays
        [experts, tokens, features] that show the contrary.

    Raises:
        ValueError: The mesh does not divide the rows, or does not suit the machine.
        DoesNotFit: The program does not fit into a device's memory.
    """
    rows, length, target = case.rows, case.length, case.target

    def compile(model: LanguageModel, mesh: Mesh) -> CompiledProgram:
        return compile_step(model, make_optimizer(OptimizerConfig()), mesh, rows, length)

    model, mesh, program, figures = _examine(case, compile, length)
    found = by_kind(collectives(program.text))
    sent = sum(total.sent for total in found.values())
    flops, device = training_flops(model, length) * rows / target.count, target.device
    return figures | {
        "exchanges": {kind: total._asdict() for kind, total in found.items()},
        "exchanged": sent,
        "least": least_exchange(case.config, mesh, rows, length),
        "flops": flops,
        "seconds": device and {"operations": flops / device.flops, "links": sent / device.links},
    }


def examine_decoding(case: ProgramCase) -> dict:
    """Compiles the decoding steps of `generate` and reports their memory and communication.

    Each step generates one token per row. Its best-case time is that of reading the weights and
    the cache.

    Raises:
        ValueError: The mesh does not divide the rows, or does not suit the machine.
        DoesNotFit: The program does not fit into a device's memory.
    """
    rows, length, target = case.rows, case.length, case.target

    def compile(model: LanguageModel, mesh: Mesh) -> CompiledProgram:
        return compile_decoding(model, mesh, rows, max(1, length // 2), length)

    model, _, program, figures = _examine(case, compile, 1)
    inside = [one for one in collectives(program.text) if one.times >= STEPS]  # inside the loop
    gathered = sum(one.sent for one in inside if one.kind == "all-gather")
    read, device = program.memory["weights"] + program.memory["cache"], target.device
    return figures | {
        "exchanges": {kind: total._asdict() for kind, total in by_kind(inside).items()},
        "steps": STEPS,
        "exchanged_per_token": sum(one.sent for one in inside) / STEPS,
        "gathered_per_token": gathered / STEPS,
        "cache_copies_per_token": program.layer and copies(program.text, program.layer) / STEPS,
        "flops_per_token": forward_flops(model, 1) * rows / target.count,
        "seconds": device and {"memory": read / device.bandwidth},
    }


class CompiledProgram(NamedTuple):
    """A compiled program.

    Attributes:
        text: The program.
        memory: Bytes on each device, by what they hold, and their "total".
        layer: The shape of one layer's keys on each device. None: the program has no cache, or its
            cache is a state of fixed size, without in-place writes.
    """

    text: str
    memory: dict[str, int]
    layer: tuple[int, ...] | None = None


def _examine(
    case: ProgramCase, compile: Callable[[LanguageModel, Mesh], CompiledProgram], new_tokens: int
) -> tuple[LanguageModel, Mesh, CompiledProgram, dict]:
    """Compiles a program, of which a pass reads `new_tokens` in each row.

    Returns:
        (the model, the mesh, the program, the figures that all programs have).
    """
    config, execution, target, _, rows, length = case
    model, mesh = build(config, execution), make_mesh(case.mesh, devices_of(target))
    if rows % (parts := num_row_parts(mesh)):
        raise ValueError(
            f"batch_size is {rows}; it must be a multiple of data × fsdp × expert ({parts})"
        )
    begin = time.perf_counter()
    try:
        with as_if_on(target):
            program = compile(model, mesh)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise DoesNotFit(
            f"the program does not fit into the memory of {target}: {str(error).splitlines()[0]}"
        ) from None
    room = None if target.device is None else target.device.memory
    notes = ["the memory does not include the workspace of cuDNN's attention"]
    figures = {
        "target": str(target),
        "devices": target.count,
        "compiler": compiler(target),
        "mesh": dict(mesh.shape),
        "rows": rows,
        "length": length,
        "dtype": model.config.dtype,
        "remat": execution.remat,
        "layers": "scan" if execution.scans(model.config.num_layers, False) else "unrolled",
        "memory": {
            **program.memory,
            "device": room,
            "fits": None if room is None else program.memory["total"] <= room,
        },
        "experts": _experts(program.text, config, mesh, rows, new_tokens),
        "compiled_in": round(time.perf_counter() - begin, 1),
        "notes": notes * (target.platform == "gpu"),
    }
    return model, mesh, program, figures


def _experts(text: str, config: ModelConfig, mesh: Mesh, rows: int, length: int) -> dict | None:
    """Returns the arrays that show that all experts are computed; None: there are no experts."""
    if not (found := expert_sizes(config, mesh, rows, length)):
        return None
    dense = [array for sizes in found for array in dense_over_experts(text, sizes)]
    return {"only_chosen": not dense, "dense": dense}


def compile_step(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    rows: int,
    length: int,
    *,
    is_packed: bool = False,
) -> CompiledProgram:
    """Compiles a training step of one micro-batch.

    Args:
        model: The model.
        optimizer: An optax optimizer.
        mesh: The mesh.
        rows: Rows of the micro-batch.
        length: Tokens per row.
        is_packed: Whether rows are packed documents.
    """
    shapes = jax.eval_shape(lambda: init_state(model, optimizer, 0))
    state = shapes_at(shapes, state_shardings(model, mesh, shapes))
    batch = placed_shapes(batch_shapes(model.config, rows, length, is_packed), mesh)
    rate = jax.ShapeDtypeStruct((), np.float32)
    with jax.set_mesh(mesh):
        program = make_step(model, optimizer).lower(state, batch, rate).compile()
    memory = {
        "parameters": bytes_per_device(state.params),
        "optimizer": bytes_per_device(state.optimizer),
        "temporaries": _temporaries(program),
        "total": num_bytes(program) or 0,
    }
    return CompiledProgram(program.as_text() or "", memory)


def compile_decoding(
    model: LanguageModel, mesh: Mesh, rows: int, prompt: int, length: int
) -> CompiledProgram:
    """Compiles the block of greedy decoding steps that `generate` runs after reading prompts.

    The weights and the cache have the shardings that the programs of `generate` give them.

    Args:
        model: The model.
        mesh: The mesh.
        rows: The number of rows.
        prompt: Tokens per prompt.
        length: Largest number of tokens per row.
    """
    require_autoregressive(model)
    params = parameter_shapes(model, mesh)
    tokens = jax.ShapeDtypeStruct((rows, prompt), np.int32)
    source = Inputs(tokens) if model.config.reads_source else None
    stops = jax.eval_shape(lambda: jnp.zeros(1, jnp.int32))
    with jax.set_mesh(mesh):
        weights = _outputs(prepare_weights, model, params, parallel_parts())
        size = CacheSize(rows, slots(length))
        cache, _ = _outputs(start_cache, model, weights, source, size, NO_HOOKS)
        read = _outputs(prefill, model, weights, Inputs(tokens, tokens), cache)
        choice = Choice(None, None, stops)
        state, _ = _outputs(choose_first, read.logits, read.captured, choice)
        state = state._replace(cache=read.cache)
        live = live_slots(read.cache, length)
        program = decode_block.lower(model, weights, state, choice, live).compile()
    memory = {
        "weights": bytes_per_device(weights),
        "cache": bytes_per_device(read.cache),
        "temporaries": _temporaries(program),
    }
    layer = None
    if read.cache.capacity is not None:
        largest = max(jax.tree.leaves(read.cache), key=bytes_per_device)
        layer = largest.sharding.shard_shape(largest.shape)
    memory["total"] = sum(memory.values())
    return CompiledProgram(program.as_text() or "", memory, layer)


def _temporaries(program: jax.stages.Compiled) -> int:
    """Returns the bytes of temporary arrays on each device."""
    if (used := program.memory_analysis()) is None:
        raise RuntimeError("the compiler does not report how much memory a program needs")
    return used.temp_size_in_bytes


def _outputs(function: jax.stages.Wrapped, *arguments: Any) -> Any:
    """Returns the shapes of a jitted function's outputs with the compiler's shardings."""
    lowered = function.lower(*arguments)
    return shapes_at(lowered.out_info, lowered.compile().output_shardings)


def batch_shapes(config: ModelConfig, rows: int, length: int, is_packed: bool = False) -> Batch:
    """Returns the shapes of a batch of one micro-batch, with the documents of packed rows.

    If the model reads a source, the source has the same shape as the inputs, with padding if rows
    are packed.
    """
    tokens = jax.ShapeDtypeStruct((1, rows, length), np.int32)
    source = tokens if config.reads_source else None
    segments, source_segments = (x if is_packed else None for x in (tokens, source))
    return Batch(tokens, tokens, None, segments, source, source_segments)


def bytes_per_device(tree: Any) -> int:
    """Returns the bytes per device of a tree of shapes with shardings."""
    leaves = jax.tree.leaves(tree)
    return sum(prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
