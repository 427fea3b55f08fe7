"""Memory, communication and minimum time of a training step or a decoding loop.

The program is compiled for a mesh of devices that may be absent. JAX's `memory_analysis` provides
the memory of temporary arrays. The module `program` parses the communication from the compiled
program.
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

from jaxformer.decoding.autoregressive import compiled_cache, packed_weights, parallel_parts
from jaxformer.decoding.loop_cache import live_slots, slots
from jaxformer.decoding.steps import STEPS, TokenSelection, choose_first, decode_chunk, prefill
from jaxformer.doctor.exchange import least_exchange
from jaxformer.doctor.experts import dense_over_experts, expert_sizes
from jaxformer.doctor.program import by_kind, collectives, copies
from jaxformer.doctor.targets import Target, as_if_on, compiler, target_devices
from jaxformer.functional.cache.key_values import CacheSize
from jaxformer.functional.hooks import NO_HOOKS
from jaxformer.functional.inputs import Inputs
from jaxformer.models.autoregressive import require_autoregressive
from jaxformer.models.check import source_shape
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.flops import forward_flops, training_flops
from jaxformer.models.language_model import LanguageModel
from jaxformer.models.sharding.parameters import (
    make_mesh,
    num_batch_shards,
    parameter_shapes,
    shapes_at,
)
from jaxformer.training.batch import Batch
from jaxformer.training.config import OptimizerConfig
from jaxformer.training.mesh import sharded_batch_shapes
from jaxformer.training.optimizer import make_optimizer
from jaxformer.training.step import init_state, make_step, num_bytes, state_shardings


class DoesNotFit(Exception):
    """Raised when a program does not fit into the memory of a device."""

    status = 1


class ProgramCase(NamedTuple):
    """Model, devices and sizes of a program to compile.

    Attributes:
        model: The model.
        target: The devices.
        mesh: The number of devices along each axis.
        batch_size: The batch size.
        length: Maximum number of tokens per sequence. In decoding, the first half of the sequence
            is the prompt.
    """

    model: LanguageModel
    target: Target
    mesh: dict[str, int]
    batch_size: int
    length: int


def examine_step(case: ProgramCase) -> dict:
    """Compiles a training step and reports its memory, communication and minimum time.

    Memory and communication are in bytes per device. Times are in seconds. The times assume the
    device's peak FLOP/s for computation and the full speed of its links for communication. A step
    takes at least the computation time and at least the communication time.

    Returns:
        The results. The entry "experts" is None for a model without experts, and otherwise a
        dictionary with two entries: "only_chosen" is True if each token is computed only by its
        chosen experts. "dense" lists the program's arrays [experts, tokens, features]. The list is
        empty if "only_chosen" is True.

    Raises:
        ValueError: The batch size is not divisible by the mesh, or the mesh does not suit the
            devices.
        DoesNotFit: The program does not fit into a device's memory.
    """
    batch_size, length, target = case.batch_size, case.length, case.target

    def compile(model: LanguageModel, mesh: Mesh) -> CompiledProgram:
        return compile_step(model, make_optimizer(OptimizerConfig()), mesh, batch_size, length)

    mesh, program, figures = _examine(case, compile, length)
    found = by_kind(collectives(program.text))
    sent = sum(total.sent for total in found.values())
    flops, device = training_flops(case.model, length) * batch_size / target.count, target.device
    return figures | {
        "exchanges": {kind: total._asdict() for kind, total in found.items()},
        "exchanged": sent,
        "least": least_exchange(case.model, mesh, batch_size, length),
        "flops": flops,
        "seconds": device and {"operations": flops / device.flops, "links": sent / device.links},
    }


def examine_decoding(case: ProgramCase) -> dict:
    """Compiles the decoding steps of `generate` and reports their memory and communication.

    Each step generates one token per sequence. The minimum time is the time to read the weights and
    the cache.

    Raises:
        ValueError: The batch size is not divisible by the mesh, or the mesh does not suit the
            devices.
        DoesNotFit: The program does not fit into a device's memory.
    """
    batch_size, length, target = case.batch_size, case.length, case.target

    def compile(model: LanguageModel, mesh: Mesh) -> CompiledProgram:
        return compile_decoding(model, mesh, batch_size, max(1, length // 2), length)

    _, program, figures = _examine(case, compile, 1)
    inside = [one for one in collectives(program.text) if one.times >= STEPS]  # Within the loop.
    gathered = sum(one.sent for one in inside if one.kind == "all-gather")
    read, device = program.memory["weights"] + program.memory["cache"], target.device
    return figures | {
        "exchanges": {kind: total._asdict() for kind, total in by_kind(inside).items()},
        "steps": STEPS,
        "exchanged_per_token": sum(one.sent for one in inside) / STEPS,
        "gathered_per_token": gathered / STEPS,
        "cache_copies_per_token": program.layer and copies(program.text, program.layer) / STEPS,
        "flops_per_token": forward_flops(case.model, 1) * batch_size / target.count,
        "seconds": device and {"memory": read / device.bandwidth},
    }


class CompiledProgram(NamedTuple):
    """A compiled program.

    Attributes:
        text: The compiled program as text.
        memory: The bytes on each device for each kind of content, such as "weights", and the
            "total".
        layer: The shape of one layer's keys on each device. None for a program without a cache, or
            with a recurrent state instead of keys.
    """

    text: str
    memory: dict[str, int]
    layer: tuple[int, ...] | None = None


def _examine(
    case: ProgramCase, compile: Callable[[LanguageModel, Mesh], CompiledProgram], new_tokens: int
) -> tuple[Mesh, CompiledProgram, dict]:
    """Compiles a program in which each forward pass processes `new_tokens` tokens per sequence.

    Returns:
        (the mesh, the program, the results that training and decoding have in common).
    """
    model, target, _, batch_size, length = case
    mesh = make_mesh(case.mesh, target_devices(target))
    if batch_size % (parts := num_batch_shards(mesh)):
        raise ValueError(
            f"batch_size is {batch_size}; it must be a multiple of data × fsdp × expert ({parts})"
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
    notes = ["the memory excludes the workspace of cuDNN's attention"]
    figures = {
        "target": str(target),
        "devices": target.count,
        "compiler": compiler(target),
        "mesh": dict(mesh.shape),
        "batch_size": batch_size,
        "length": length,
        "dtype": model.config.dtype,
        "remat": model.execution.remat,
        "layers": "scan" if model.execution.scans(model.config.num_layers, False) else "unrolled",
        "memory": {
            **program.memory,
            "device": room,
            "fits": None if room is None else program.memory["total"] <= room,
        },
        "experts": _experts(program.text, model, mesh, batch_size, new_tokens),
        "compiled_in": round(time.perf_counter() - begin, 1),
        "notes": notes * (target.platform == "gpu"),
    }
    return mesh, program, figures


def _experts(
    text: str, model: LanguageModel, mesh: Mesh, batch_size: int, length: int
) -> dict | None:
    """Returns the entry "experts" of the result of `examine_step`."""
    if not (found := expert_sizes(model, mesh, batch_size, length)):
        return None
    dense = [array for sizes in found for array in dense_over_experts(text, sizes)]
    return {"only_chosen": not dense, "dense": dense}


def compile_step(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    batch_size: int,
    length: int,
    *,
    is_packed: bool = False,
) -> CompiledProgram:
    """Compiles a training step with one micro-batch.

    Args:
        model: The model.
        optimizer: An optax optimizer.
        mesh: The device mesh.
        batch_size: Sequences per micro-batch.
        length: Tokens per sequence.
        is_packed: Whether each sequence consists of packed documents.
    """
    shapes = jax.eval_shape(lambda: init_state(model, optimizer, 0))
    state = shapes_at(shapes, state_shardings(model, mesh, shapes))
    batch = sharded_batch_shapes(batch_shapes(model.config, batch_size, length, is_packed), mesh)
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
    model: LanguageModel, mesh: Mesh, batch_size: int, prompt: int, length: int
) -> CompiledProgram:
    """Compiles the greedy decoding steps that `generate` runs after reading prompts.

    The weights and the cache have the same shardings as in `generate`.

    Args:
        model: The model.
        mesh: The device mesh.
        batch_size: The batch size.
        prompt: Tokens per prompt.
        length: The maximum number of tokens per sequence.
    """
    require_autoregressive(model)
    params = parameter_shapes(model, mesh)
    tokens = jax.ShapeDtypeStruct((batch_size, prompt), np.int32)
    read = source_shape(model.config, batch_size, prompt)
    source = None if read is None else Inputs(read)
    stops = jax.eval_shape(lambda: jnp.zeros(1, jnp.int32))
    with jax.set_mesh(mesh):
        weights = _outputs(packed_weights, model, params, parallel_parts())
        size = CacheSize(batch_size, slots(length))
        cache, _ = _outputs(compiled_cache, model, weights, source, size, NO_HOOKS)
        read = _outputs(prefill, model, weights, Inputs(tokens, tokens), cache)
        choice = TokenSelection(None, None, stops)
        state, _ = _outputs(choose_first, read.logits, read.captured, choice)
        live = live_slots(read.cache, length)
        program = decode_chunk.lower(model, weights, read.cache, state, choice, live).compile()
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
        raise RuntimeError("the compiler does not report the memory that a program needs")
    return used.temp_size_in_bytes


def _outputs(function: jax.stages.Wrapped, *arguments: Any) -> Any:
    """Returns the shapes of a jitted function's outputs, with the shardings that XLA chooses."""
    lowered = function.lower(*arguments)
    return shapes_at(lowered.out_info, lowered.compile().output_shardings)


def batch_shapes(
    config: ModelConfig, batch_size: int, length: int, is_packed: bool = False
) -> Batch:
    """Returns the shapes of a batch that consists of one micro-batch.

    If the model reads a source, the source has the same batch size and length as the inputs. If
    `is_packed`, the inputs and the source have segment ids.
    """
    tokens = jax.ShapeDtypeStruct((1, batch_size, length), np.int32)
    read = source_shape(config, batch_size, length)
    source = None if read is None else jax.ShapeDtypeStruct((1, *read.shape), read.dtype)
    segment_ids = tokens if is_packed else None
    source_segment_ids = None if source is None else segment_ids
    return Batch(tokens, tokens, None, segment_ids, source, source_segment_ids)


def bytes_per_device(tree: Any) -> int:
    """Returns the bytes per device of a tree of shapes with shardings."""
    leaves = jax.tree.leaves(tree)
    return sum(prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
