"""The device mesh of a run, and the sharding of batches."""

from collections.abc import Callable
from dataclasses import asdict

import jax
from jax.sharding import Mesh

from jaxformer.models.kinds import build
from jaxformer.models.parameters import shape_tree
from jaxformer.models.sharding.parameters import (
    AnyMesh,
    batch_sharding,
    make_mesh,
    num_batch_shards,
    shardings,
)
from jaxformer.training.batch import WHOLE, AnyBatch, Share
from jaxformer.training.config import RunConfig


def num_devices_for(config: RunConfig) -> int:
    """Returns the largest number of devices by which a run's batch size is divisible.

    With several processes, or for a config without `batch_size`, returns the number of all devices.
    In both cases, a later check raises an error if the batch size is not divisible by this number.
    """
    batch_size, count = getattr(config, "batch_size", None), jax.device_count()
    if batch_size is None or jax.process_count() > 1:
        return count
    return max(number for number in range(1, count + 1) if batch_size % number == 0)


def make_run_mesh(config: RunConfig, say: Callable[[str], None]) -> Mesh | None:
    """Creates the device mesh of a run.

    Args:
        config: The `RunConfig`.
        say: Called with lines that describe the mesh.

    Returns:
        The mesh, or None if the config has no mesh and there is only one device.

    Raises:
        ValueError: The model cannot be sharded over the mesh's axes.
    """
    if config.mesh is None and jax.device_count() == 1:
        return None
    sizes = asdict(config.mesh) if config.mesh else {"data": num_devices_for(config)}
    mesh = make_mesh(sizes, None if config.mesh else jax.devices()[: sizes["data"]])
    if mesh.size < jax.device_count():
        say(
            f"using {mesh.size} of {jax.device_count()} devices, because no larger number "
            "of devices divides the batch size"
        )
    model = build(config.model)
    shardings(shape_tree(model), model, mesh)
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    say(f"mesh: {axes} ({mesh.devices.flat[0].device_kind})")
    return mesh


def process_share(mesh: Mesh | None) -> Share:
    """Returns the shard of each micro-batch that this process reads.

    If the sequences on this process's devices form one of several equal shards, the process reads
    only this shard. In any other case, the process reads all sequences.
    """
    if mesh is None or jax.process_count() == 1:
        return WHOLE
    parts = num_batch_shards(mesh)
    where = batch_sharding(mesh).addressable_devices_indices_map((parts,))
    local = sorted({part.indices(parts)[0] for (part,) in filter(None, where.values())})
    first, number = local[0], len(local)
    if local != list(range(first, first + number)) or parts % number or first % number:
        return WHOLE
    return Share(first // number, parts // number)


def place_batch(batch: AnyBatch, mesh: Mesh, share: Share = WHOLE) -> AnyBatch:
    """Shards the sequences of micro-batches over the devices.

    Args:
        batch: Micro-batches along the first axis.
        mesh: The device mesh.
        share: The shard of each micro-batch that `batch` contains.
    """
    where = batch_sharding(mesh, before=1)
    if jax.process_count() == 1:
        return jax.device_put(batch, where)
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(where, x, _whole(x.shape, share)), batch
    )


def sharded_batch_shapes(batch: AnyBatch, mesh: AnyMesh, share: Share = WHOLE) -> AnyBatch:
    """Returns the shapes of the arrays that `place_batch` returns, with their shardings."""
    where = batch_sharding(mesh, before=1)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(_whole(x.shape, share), x.dtype, sharding=where), batch
    )


def _whole(shape: tuple[int, ...], share: Share) -> tuple[int, ...]:
    """Returns the shape of a batch that contains the shards of all processes."""
    accumulate, batch_size, *rest = shape
    return (accumulate, batch_size * share.count, *rest)
