"""A training state on a mesh of devices."""

from functools import partial

import jax
import optax

from jaxformer.models.build import shape_tree
from jaxformer.models.lora import adapter_shardings
from jaxformer.models.placement import batch_sharding, num_row_parts, replicated, shardings
from jaxformer.training.batch import WHOLE, Share
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


def share_of(mesh) -> Share:
    """What this process is to read of each micro-batch: the rows that its own devices hold, where
    these are one of as many equal parts; else all of it."""
    if mesh is None or jax.process_count() == 1:
        return WHOLE
    parts = num_row_parts(mesh)
    where = batch_sharding(mesh).addressable_devices_indices_map((parts,))
    held = sorted({rows.indices(parts)[0] for (rows,) in where.values()})
    first, number = held[0], len(held)
    if held != list(range(first, first + number)) or parts % number or first % number:
        return WHOLE
    return Share(first // number, parts // number)


def place_batch(batch, mesh, share: Share = WHOLE):
    """Micro-batches along the first axis, the rows of each spread over the devices. share: what of
    them this process has."""
    where = batch_sharding(mesh, before=1)
    if jax.process_count() == 1:
        return jax.device_put(batch, where)
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(where, x, _whole(x.shape, share)), batch
    )


def placed_shapes(batch, mesh, share: Share = WHOLE):
    """The shapes of a batch, with where it will be."""
    where = batch_sharding(mesh, before=1)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(_whole(x.shape, share), x.dtype, sharding=where), batch
    )


def _whole(shape: tuple[int, ...], share: Share) -> tuple[int, ...]:
    """Of all shares together."""
    accumulate, rows, *rest = shape
    return (accumulate, rows * share.count, *rest)
