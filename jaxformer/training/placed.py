"""A training state on a mesh of devices."""

from functools import partial

import jax
import optax

from jaxformer.models.build import shape_tree
from jaxformer.models.lora import adapter_shardings
from jaxformer.models.placement import batch_sharding, replicated, shardings
from jaxformer.training.step import TrainState, init_state


def state_shardings(model, optimizer, mesh, shapes: TrainState) -> TrainState:
    """Where each array of a state of these shapes lives: what the optimiser keeps of a parameter,
    where that does, and an adapter where what it is of does."""
    params, whole = shardings(shape_tree(model), model.config, mesh), replicated(mesh)
    frozen = None if shapes.frozen is None else params
    learnt = params if frozen is None else adapter_shardings(shapes.params, params)

    def beside(kept, param, sharding):
        return sharding if kept.shape == param.shape else whole

    kept = optax.tree_map_params(
        optimizer,
        beside,
        shapes.optimizer,
        shapes.params,
        learnt,
        transform_non_params=lambda _: whole,
    )
    average = None if shapes.average is None else learnt
    return TrainState(whole, learnt, kept, whole, average, frozen)


def init_on(mesh, model, optimizer, seed: int, base: dict | None = None, **how) -> TrainState:
    """The state of `init_state`, each array made where it lives; base is given away. mesh None: one
    device."""
    make = partial(init_state, model, optimizer, seed, **how)
    if mesh is None:
        return jax.jit(make, donate_argnums=0)(base)
    where = state_shardings(model, optimizer, mesh, jax.eval_shape(make, base))
    if base is not None:
        base = jax.device_put(base, shardings(base, model.config, mesh))
    return jax.jit(make, out_shardings=where, donate_argnums=0)(base)


def place_batch(batch, mesh):
    """Micro-batches along the first axis, the rows of each spread over the devices; of several
    processes, each with the whole batch, every one takes the rows of its own devices."""
    where = batch_sharding(mesh, before=1)
    if jax.process_count() == 1:
        return jax.device_put(batch, where)
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, where, lambda index: x[index]), batch
    )


def placed_shapes(batch, mesh):
    """The shapes of a batch, with where it will be."""
    where = batch_sharding(mesh, before=1)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), batch)
