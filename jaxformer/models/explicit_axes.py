"""Meshes with explicit axes, which `jax.make_mesh` makes by default.

Arrays on such a mesh carry their sharding in their types, and each operation must say how its
result is sharded. Models leave that to the partitioner, so they run on the same mesh with "Auto"
axes. The batch of a result is sharded as that of the inputs, on the mesh with explicit axes.
"""

from collections.abc import Callable, Iterator, ValuesView
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def in_auto_axes(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorates a function of variables and inputs for arrays on a mesh with explicit axes.

    Other arguments, and other arrays, are passed on unchanged.
    """

    @wraps(function)
    def on_any_mesh(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        leaves, structure = jax.tree.flatten((args, kwargs), _is_opaque)
        places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
        arrays = [leaves[i] for i in places]
        mesh = _explicit_mesh(arrays)
        if mesh is None:
            return function(*args, **kwargs)
        if isinstance(mesh, Mesh):  # not in context, which places arrays that are on no mesh
            with jax.set_mesh(mesh):
                return on_any_mesh(*args, **kwargs)
        results: list[Any] = []

        def run(*arrays: jax.Array) -> None:
            values = dict(zip(places, arrays, strict=True))
            filled = [values.get(i, x) for i, x in enumerate(leaves)]
            args, kwargs = jax.tree.unflatten(structure, filled)
            results.append(function(*args, **kwargs))

        nowhere = NamedSharding(mesh, PartitionSpec())  # of the result None
        jax.sharding.auto_axes(run, out_sharding=nowhere)(*arrays)
        size, axes = _batch_of(arrays)

        def place(x: Any) -> Any:
            if not isinstance(x, jax.Array) or _is_on_one_device(x):
                return x
            return jax.sharding.reshard(x, NamedSharding(mesh, _spec(x.shape, size, axes)))

        return jax.tree.map(place, results[0])

    return on_any_mesh


def has_explicit_axes(*trees: Any) -> bool:
    """Returns whether an array of the trees, or the program, is on a mesh with explicit axes."""
    leaves = jax.tree.leaves(trees, is_leaf=_is_opaque)
    return _explicit_mesh([x for x in leaves if isinstance(x, jax.Array)]) is not None


def _is_opaque(x: Any) -> bool:
    """Returns whether JAX needs to be told that this is a leaf, such as an iterator of stop tokens.

    JAX has deprecated flattening iterables that it does not know.
    """
    return isinstance(x, Iterator | ValuesView)


def _is_on_one_device(x: jax.Array) -> bool:
    """Returns whether an array outside of jit is on no mesh, as newly made parameters are."""
    if isinstance(x, jax.core.Tracer):
        return False
    return isinstance(x.sharding, SingleDeviceSharding)


def _explicit_mesh(arrays: list[jax.Array]) -> AbstractMesh | Mesh | None:
    """Returns the mesh with explicit axes that is in context or that arrays are on, if any.

    It is a `Mesh` if it is only that of an array outside of jit.
    """
    meshes = [jax.sharding.get_abstract_mesh()]
    if meshes[0].empty:
        meshes += [mesh for mesh in map(_mesh_of, arrays) if mesh is not None]
    return next((mesh for mesh in meshes if AxisType.Explicit in (mesh.axis_types or ())), None)


def _mesh_of(x: jax.Array) -> AbstractMesh | Mesh | None:
    """Returns the mesh that an array is on; None: it is on one device."""
    where = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else x.sharding
    return where.mesh if isinstance(where, NamedSharding) else None


def _batch_of(arrays: list[jax.Array]) -> tuple[int | None, Any]:
    """Returns the size of the batch and the mesh axes that shard it; None: nothing shards it.

    Of the arrays, only token ids and the like are integers with two axes.
    """
    for x in arrays:
        spec = jax.typeof(x).sharding.spec
        is_batch = x.ndim == 2 and jax.numpy.issubdtype(x.dtype, jax.numpy.integer)
        if is_batch and spec and spec[0] is not None:
            return x.shape[0], spec[0]
    return None, None


def _spec(shape: tuple[int, ...], size: int | None, axes: Any) -> PartitionSpec:
    """Returns the sharding of a result; captured values have the layer before the batch."""
    if size is None or size not in shape[:2]:
        return PartitionSpec()
    return PartitionSpec(*[None] * shape.index(size), axes)
