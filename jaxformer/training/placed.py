"""A training state on a mesh of devices."""

import jax
import optax

from jaxformer.models.build import shape_tree
from jaxformer.models.placement import batch_sharding, replicated, shardings
from jaxformer.training.step import TrainState, init_state


def state_shardings(model, optimizer, mesh) -> TrainState:
    """Where each array lives: what the optimiser keeps of a parameter, where that does."""
    params = shardings(shape_tree(model), model.config, mesh)
    whole = replicated(mesh)

    def beside(kept, param, sharding):
        return sharding if kept.shape == param.shape else whole

    shapes = jax.eval_shape(lambda: init_state(model, optimizer, 0))
    kept = optax.tree_map_params(
        optimizer,
        beside,
        shapes.optimizer,
        shapes.params,
        params,
        transform_non_params=lambda _: whole,
    )
    return TrainState(whole, params, kept, whole)


def init_on(mesh, model, optimizer, seed: int) -> TrainState:
    """The state of `init_state`, each array made where it lives."""
    where = state_shardings(model, optimizer, mesh)
    return jax.jit(lambda: init_state(model, optimizer, seed), out_shardings=where)()


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
