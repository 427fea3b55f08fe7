"""The real programs, compiled for a mesh of devices that need not be here."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.decoding.autoregressive import live_slots, slots, start_cache
from jaxformer.decoding.generate import State, choose_first, decode_block, prefill
from jaxformer.decoding.prepared import cores_side_by_side, prepare_weights
from jaxformer.decoding.protocol import require_autoregressive
from jaxformer.functional.contexts import Source
from jaxformer.functional.taps import NO_HOOKS
from jaxformer.models.config.encoder_decoder import ReadsSource
from jaxformer.models.placement import parameter_shapes, shapes_at
from jaxformer.training.batch import Batch
from jaxformer.training.compiled_step import num_bytes
from jaxformer.training.placed import placed_shapes, state_shardings
from jaxformer.training.step import init_state, make_step


class Memory(NamedTuple):
    """Bytes on each device. temporaries: activations, gradients, and what is gathered."""

    parameters: int
    optimizer: int
    temporaries: int
    total: int


def compile_step(model, optimizer, mesh, rows: int, length: int):
    """(the compiled training step, its `Memory`) for one micro-batch of so many rows."""
    shapes = jax.eval_shape(lambda: init_state(model, optimizer, 0))
    state = shapes_at(shapes, state_shardings(model, optimizer, mesh, shapes))
    batch = placed_shapes(batch_shapes(model.config, rows, length), mesh)
    rate = jax.ShapeDtypeStruct((), np.float32)
    with jax.set_mesh(mesh):
        program = make_step(model, optimizer).lower(state, batch, rate).compile()
    parameters, kept = held(state.params), held(state.optimizer)
    temporaries = program.memory_analysis().temp_size_in_bytes
    return program, Memory(parameters, kept, temporaries, num_bytes(program))


class Decoding(NamedTuple):
    """The compiled block of decoding steps, what it holds on each device, and the shape there of
    one layer's keys; None: the cache is a state of one size, in which nothing is written in
    place."""

    program: jax.stages.Compiled
    weights: int
    cache: int
    temporaries: int
    layer: tuple[int, ...] | None


def compile_decoding(model, mesh, rows: int, prompt: int, length: int) -> Decoding:
    """The block of steps that `generate` runs, greedily, once prompts of so many tokens are read
    and rows are to become `length` long: weights and cache are where its own programs put them."""
    require_autoregressive(model)
    params = parameter_shapes(model, mesh)
    tokens = jax.ShapeDtypeStruct((rows, prompt), np.int32)
    source = Source(tokens) if isinstance(model.config, ReadsSource) else None
    stops = jax.ShapeDtypeStruct((1,), np.int32)
    with jax.set_mesh(mesh):
        weights = _outputs(prepare_weights, model, params, cores_side_by_side())
        start = (model, weights, rows, slots(length), source, NO_HOOKS, None)
        cache, _ = _outputs(start_cache, *start)
        read = _outputs(prefill, model, weights, tokens, tokens, cache)
        chosen = _outputs(choose_first, read.logits, read.captured, None, None, stops)
        step = jax.ShapeDtypeStruct((), np.int32)
        state = State(read.cache, *chosen[:2], step)
        live = live_slots(read.cache, length)
        block = decode_block.lower(model, weights, state, None, None, stops, live)
        program = block.compile()
    used, sizes = program.memory_analysis(), held(read.cache)
    layer = None
    if read.cache.capacity is not None:
        largest = max(jax.tree.leaves(read.cache), key=held)
        layer = largest.sharding.shard_shape(largest.shape)
    return Decoding(program, held(weights), sizes, used.temp_size_in_bytes, layer)


def _outputs(function, *arguments):
    """What a jitted function gives, as shapes with where the compiler puts them."""
    lowered = function.lower(*arguments)
    return shapes_at(lowered.out_info, lowered.compile().output_shardings)


def batch_shapes(config, rows: int, length: int) -> Batch:
    """The shapes of a batch of one micro-batch, with a source as long where one is read."""
    tokens = jax.ShapeDtypeStruct((1, rows, length), np.int32)
    source = tokens if isinstance(config, ReadsSource) else None
    return Batch(tokens, tokens, source=source)


def held(tree) -> int:
    """Bytes that one device holds of arrays, given as shapes with where they are."""
    shards = [(x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(tree)]
    return sum(int(np.prod(shape)) * _itemsize(dtype) for shape, dtype in shards)


def _itemsize(dtype) -> int:
    return 8 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else dtype.itemsize
