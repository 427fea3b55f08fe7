"""The mesh of a run, and batches on it."""

from collections.abc import Callable
from dataclasses import asdict

import jax
from jax.sharding import Mesh

from jaxformer.models.kinds import build
from jaxformer.models.mesh import AnyMesh, batch_sharding, make_mesh, num_row_parts, shardings
from jaxformer.models.parameters import shape_tree
from jaxformer.training.batch import WHOLE, AnyBatch, Share
from jaxformer.training.config import RunConfig


def num_devices_for(config: RunConfig) -> int:
    """Returns the largest number of devices that divides a run's batch size.

    With several processes, or for a config without `batch_size`, it returns the number of all
    devices. A batch that they do not divide raises an error elsewhere.
    """
    rows, count = getattr(config, "batch_size", None), jax.device_count()
    if rows is None or jax.process_count() > 1:
        return count
    return max(number for number in range(1, count + 1) if rows % number == 0)


def mesh_of(config: RunConfig, say: Callable[[str], None]) -> Mesh | None:
    """Makes the mesh of a run.

    Args:
        config: The `RunConfig`.
        say: Receives the lines that describe the mesh.

    Returns:
        The mesh; None if the config has no mesh and there is only one device.

    Raises:
        ValueError: The model cannot be placed on the mesh.
    """
    if config.mesh is None and jax.device_count() == 1:
        return None
    sizes = asdict(config.mesh) if config.mesh else {"data": num_devices_for(config)}
    mesh = make_mesh(sizes, None if config.mesh else jax.devices()[: sizes["data"]])
    if mesh.size < jax.device_count():
        say(
            f"using {mesh.size} of {jax.device_count()} devices: no larger number divides the batch"
        )
    model = build(config.model)
    shardings(shape_tree(model), model, mesh)
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    say(f"mesh: {axes} ({mesh.devices.flat[0].device_kind})")
    return mesh


def share_of(mesh: Mesh | None) -> Share:
    """Returns the share of each micro-batch that this process reads.

    The share has the rows of this process's own devices, if these rows are one of several equal
    parts. Otherwise the process reads all rows.
    """
    if mesh is None or jax.process_count() == 1:
        return WHOLE
    parts = num_row_parts(mesh)
    where = batch_sharding(mesh).addressable_devices_indices_map((parts,))
    local = sorted({rows.indices(parts)[0] for (rows,) in filter(None, where.values())})
    first, number = local[0], len(local)
    if local != list(range(first, first + number)) or parts % number or first % number:
        return WHOLE
    return Share(first // number, parts // number)


def place_batch(batch: AnyBatch, mesh: Mesh, share: Share = WHOLE) -> AnyBatch:
    """Shards the rows of micro-batches over the devices.

    Args:
        batch: Micro-batches along the first axis.
        mesh: The mesh.
        share: The part of the rows that `batch` holds.
    """
    where = batch_sharding(mesh, before=1)
    if jax.process_count() == 1:
        return jax.device_put(batch, where)
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(where, x, _whole(x.shape, share)), batch
    )


def placed_shapes(batch: AnyBatch, mesh: AnyMesh, share: Share = WHOLE) -> AnyBatch:
    """Returns the shapes of a batch with the shardings of `place_batch`."""
    where = batch_sharding(mesh, before=1)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(_whole(x.shape, share), x.dtype, sharding=where), batch
    )


def _whole(shape: tuple[int, ...], share: Share) -> tuple[int, ...]:
    """Returns the shape of a batch of all processes."""
    accumulate, rows, *rest = shape
    return (accumulate, rows * share.count, *rest)
