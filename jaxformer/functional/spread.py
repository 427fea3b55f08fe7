"""Rows of a batch spread over the devices of a mesh: what the partitioner is told where it would
guess.

The mesh is the one in context (`jax.set_mesh`), and its axes are known by name: rows are spread
over "data" and "fsdp", a layer's own work over "tensor". Without a mesh nothing is told, nor where
rows do not divide, nor inside `shard_map`, where each device has its own already.
"""

from math import prod

import jax
from jax.sharding import AxisType, PartitionSpec

BATCH_AXES = ("data", "fsdp")
TENSOR_AXIS = "tensor"


def spread(x):
    """x, its rows spread over the devices and nothing else of it.

    Between layers the partitioner would else be free to cut the features, by which parameters may
    be cut, and to exchange activations in the place of parameters.
    """
    axes = _axes(BATCH_AXES)
    if not axes or x.shape[0] % _size(axes):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axes, *[None] * (x.ndim - 1)))


def num_parts(rows: int) -> int:
    """Into how many parts so many rows are spread."""
    parts = _size(_axes(BATCH_AXES))
    return 1 if rows % parts else parts


def is_cut() -> bool:
    """Whether the outputs of a layer's maps are cut over devices."""
    return _size(_axes((TENSOR_AXIS,))) > 1


def whole_rows(table):
    """A table of vectors [rows, dim] with the vectors gathered, which may be cut by the axes of a
    batch: so that what is looked up is cut as the batch is, and the output map is gathered once and
    not for every chunk of tokens."""
    if not _axes(BATCH_AXES):
        return table
    return jax.lax.with_sharding_constraint(table, PartitionSpec(PartitionSpec.UNCONSTRAINED, None))


def _axes(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the axes that the mesh in context has, and leaves to the partitioner.

    ValueError for explicit axes, by which an array says itself how it is cut.
    """
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types or (), strict=False))
    if AxisType.Explicit in types.values():
        raise ValueError(
            f"the mesh in context has explicit axes ({', '.join(types)}); models here are cut by "
            "the partitioner: make it with axis_types=(jax.sharding.AxisType.Auto,) * "
            f"{len(types)}, or by jaxformer.models.placement.make_mesh"
        )
    return tuple(name for name in names if types.get(name) == AxisType.Auto)


def _size(axes: tuple[str, ...]) -> int:
    return prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes)
