"""Compilation of the training step and of decoding for a mesh of possibly absent devices."""

from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxformer.decoding.autoregressive import parallel_parts, prepare_weights, start_cache
from jaxformer.decoding.loop_cache import live_slots, slots
from jaxformer.decoding.steps import Choice, choose_first, decode_block, prefill
from jaxformer.functional.cache.key_values import CacheSize
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.taps import NO_HOOKS
from jaxformer.models.autoregressive import require_autoregressive
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.language_model import LanguageModel
from jaxformer.models.mesh import parameter_shapes, shapes_at
from jaxformer.training.batch import Batch, placed_shapes
from jaxformer.training.step import init_state, make_step, num_bytes, state_shardings


class Memory(NamedTuple):
    """Memory of a training step, in bytes per device.

    Attributes:
        parameters: The parameters.
        optimizer: The optimizer state.
        temporaries: Activations, gradients and gathered parameters.
        total: Everything, including the batch.
    """

    parameters: int
    optimizer: int
    temporaries: int
    total: int


def compile_step(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    rows: int,
    length: int,
    *,
    is_packed: bool = False,
) -> tuple[jax.stages.Compiled, Memory]:
    """Compiles a training step of one micro-batch.

    Args:
        model: The model.
        optimizer: An optax optimizer.
        mesh: The mesh.
        rows: Rows of the micro-batch.
        length: Tokens per row.
        is_packed: Whether rows are packed documents.

    Returns:
        (the compiled program, its `Memory`).
    """
    shapes = jax.eval_shape(lambda: init_state(model, optimizer, 0))
    state = shapes_at(shapes, state_shardings(model, mesh, shapes))
    batch = placed_shapes(batch_shapes(model.config, rows, length, is_packed), mesh)
    rate = jax.ShapeDtypeStruct((), np.float32)
    with jax.set_mesh(mesh):
        program = make_step(model, optimizer).lower(state, batch, rate).compile()
    parameters, optimizer_bytes = bytes_per_device(state.params), bytes_per_device(state.optimizer)
    return program, Memory(parameters, optimizer_bytes, *_memory_of(program))


class Decoding(NamedTuple):
    """Compiled block of decoding steps.

    Attributes:
        program: The compiled program.
        weights: Bytes of the weights on each device.
        cache: Bytes of the cache on each device.
        temporaries: Bytes of temporary arrays on each device.
        layer: The shape of one layer's keys on each device. None: the cache is a state of fixed
            size, without in-place writes.
    """

    program: jax.stages.Compiled
    weights: int
    cache: int
    temporaries: int
    layer: tuple[int, ...] | None


def compile_decoding(
    model: LanguageModel, mesh: Mesh, rows: int, prompt: int, length: int
) -> Decoding:
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
    (temporaries, _), cache_size = _memory_of(program), bytes_per_device(read.cache)
    layer = None
    if read.cache.capacity is not None:
        largest = max(jax.tree.leaves(read.cache), key=bytes_per_device)
        layer = largest.sharding.shard_shape(largest.shape)
    return Decoding(program, bytes_per_device(weights), cache_size, temporaries, layer)


def _memory_of(program: jax.stages.Compiled) -> tuple[int, int]:
    """Returns (bytes of temporary arrays, bytes of everything) on each device."""
    used, total = program.memory_analysis(), num_bytes(program)
    if used is None or total is None:
        raise RuntimeError("the compiler does not report how much memory a program needs")
    return used.temp_size_in_bytes, total


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
