"""Batches, the part of them that each process reads, and the mesh that shards them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Generic, NamedTuple, Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer.models.kinds import build
from jaxformer.models.mesh import AnyMesh, batch_sharding, make_mesh, num_row_parts, shardings
from jaxformer.models.parameters import shape_tree
from jaxformer.training.config import RunConfig

AnyBatch = TypeVar("AnyBatch")  # a pytree of arrays
Ids = Sequence[int] | np.ndarray  # token ids of one text
Row = TypeVar("Row", covariant=True)
Leaf = TypeVar("Leaf")  # an array of NumPy (on the host) or of JAX, or its shape
OnScored = Callable[[int], None]  # receives the number of targets that are scored so far


def noop(count: int) -> None:
    """Does nothing: the default of `OnScored` arguments."""


class Batch(NamedTuple, Generic[Leaf]):
    """Inputs and targets of a model.

    An update takes several batches at once: micro-batches, stacked along a new first axis.

    Attributes:
        inputs: int [batch, length].
        targets: int [batch, length]. Output i predicts target i.
        weights: float [batch, length]: 1 for a target that counts, 0 for padding and for tokens
            that are only context. None: all targets count.
        segments: int [batch, length]: the number of each token's document within its row, 0 for
            padding. None: a row is one document.
        source: int [batch, source length], for a model that reads a source.
        source_segments: int [batch, source length]: like `segments`, for the source.
    """

    inputs: Leaf
    targets: Leaf
    weights: Leaf | None = None
    segments: Leaf | None = None
    source: Leaf | None = None
    source_segments: Leaf | None = None


class Rows(Protocol[Row]):
    """Rows that are read by number. A row may be created when it is read."""

    def __len__(self) -> int:
        """Returns the number of rows."""

    def __getitem__(self, number: int, /) -> Row:
        """Returns a row."""


def num_tokens(batch: Batch) -> int:
    """Returns the number of tokens in a batch, excluding padding."""
    return batch.targets.size if batch.segments is None else int((batch.segments != 0).sum())


def num_targets(batch: Batch) -> int:
    """Returns the number of targets that count."""
    return batch.targets.size if batch.weights is None else int(batch.weights.sum())


class Share(NamedTuple):
    """Part of each micro-batch that one of several processes reads.

    Each micro-batch is divided into `count` equal parts, and this process reads part `index`. All
    processes together read the rows that a single process would, in the same order.

    Attributes:
        index: The number of the part, from 0.
        count: The number of processes.
    """

    index: int = 0
    count: int = 1

    def rows(self, batch_size: int, accumulate: int = 1) -> np.ndarray:
        """Returns the row numbers of this share in concatenated micro-batches.

        Args:
            batch_size: Rows of a micro-batch.
            accumulate: The number of micro-batches.

        Returns:
            int [accumulate * batch_size / count].

        Raises:
            ValueError: `count` does not divide `batch_size`, or `index` is out of range.
        """
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"share: index is {self.index}; it must be at least 0 and below {self.count}"
            )
        if batch_size % self.count:
            raise ValueError(
                f"share: the batch size is {batch_size}; it must be a multiple of the number of "
                f"processes ({self.count})"
            )
        rows = np.arange(accumulate * batch_size).reshape(accumulate, self.count, -1)
        return rows[:, self.index].ravel()


WHOLE = Share()


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
