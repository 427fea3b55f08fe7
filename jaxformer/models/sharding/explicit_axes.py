"""Support for meshes with explicit axes, the default of `jax.make_mesh`.

Arrays on such a mesh have their sharding in their types, and each operation must declare the
sharding of its result. Models leave sharding to the partitioner, so they run on the same mesh with
"Auto" axes. Results are then moved back to the mesh with explicit axes, where their batch is
sharded like the batch of the inputs.
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
    """Lets a function of variables and inputs accept arrays on a mesh with explicit axes.

    Other arguments, and arrays on other meshes, are passed on unchanged.
    """

    @wraps(function)
    def on_any_mesh(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        leaves, structure = jax.tree.flatten((args, kwargs), _is_opaque)
        places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
        arrays = [leaves[i] for i in places]
        mesh = _explicit_mesh(arrays)
        if mesh is None:
            return function(*args, **kwargs)
        if isinstance(mesh, Mesh):
            # `set_mesh` applies the mesh of one array to the arrays without a mesh as well.
            with jax.set_mesh(mesh):
                return on_any_mesh(*args, **kwargs)
        results: list[Any] = []

        def run(*arrays: jax.Array) -> None:
            values = dict(zip(places, arrays, strict=True))
            filled = [values.get(i, x) for i, x in enumerate(leaves)]
            args, kwargs = jax.tree.unflatten(structure, filled)
            results.append(function(*args, **kwargs))

        # `run` returns None, so this sharding does not apply to any array.
        nowhere = NamedSharding(mesh, PartitionSpec())
        jax.sharding.auto_axes(run, out_sharding=nowhere)(*arrays)
        size, axes = _find_batch(arrays)

        def place(x: Any) -> Any:
            if not isinstance(x, jax.Array) or _is_on_one_device(x):
                return x
            return jax.sharding.reshard(x, NamedSharding(mesh, _spec(x.shape, size, axes)))

        return jax.tree.map(place, results[0])

    return on_any_mesh


def has_explicit_axes(*trees: Any) -> bool:
    """Returns whether the mesh in context, or the mesh of any array, has explicit axes."""
    leaves = jax.tree.leaves(trees, is_leaf=_is_opaque)
    return _explicit_mesh([x for x in leaves if isinstance(x, jax.Array)]) is not None


def _is_opaque(x: Any) -> bool:
    """Returns whether an object is an iterator or a view of values.

    Such objects must be leaves, because JAX has deprecated flattening unknown iterables.
    """
    return isinstance(x, Iterator | ValuesView)


def _is_on_one_device(x: jax.Array) -> bool:
    """Returns whether an array outside jit is on a single device, as new parameters are."""
    if isinstance(x, jax.core.Tracer):
        return False
    return isinstance(x.sharding, SingleDeviceSharding)


def _explicit_mesh(arrays: list[jax.Array]) -> AbstractMesh | Mesh | None:
    """Returns the mesh in context, if it has explicit axes.

    If no mesh is in context, returns the first mesh of an array that has explicit axes. Returns
    None if there is no such mesh. The result is a `Mesh` if it comes from an array outside jit, and
    otherwise an `AbstractMesh`.
    """
    meshes = [jax.sharding.get_abstract_mesh()]
    if meshes[0].empty:
        meshes += [mesh for mesh in map(_find_mesh, arrays) if mesh is not None]
    return next((mesh for mesh in meshes if AxisType.Explicit in (mesh.axis_types or ())), None)


def _find_mesh(x: jax.Array) -> AbstractMesh | Mesh | None:
    """Returns the mesh of an array; None for an array on one device."""
    where = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else x.sharding
    return where.mesh if isinstance(where, NamedSharding) else None


def _find_batch(arrays: list[jax.Array]) -> tuple[int | None, Any]:
    """Returns the batch size and the mesh axes that shard the batch.

    The batch is the first sharded integer array with two axes, such as token ids. Without such an
    array, the result is (None, None).
    """
    for x in arrays:
        spec = jax.typeof(x).sharding.spec
        is_batch = x.ndim == 2 and jax.numpy.issubdtype(x.dtype, jax.numpy.integer)
        if is_batch and spec and spec[0] is not None:
            return x.shape[0], spec[0]
    return None, None


def _spec(shape: tuple[int, ...], size: int | None, axes: Any) -> PartitionSpec:
    """Returns the partition of an output array, whose batch axis has `size` elements.

    The batch axis is the first axis. In hook point values of several layers, it is the second axis,
    after the layer axis.
    """
    if size is None or size not in shape[:2]:
        return PartitionSpec()
    return PartitionSpec(*[None] * shape.index(size), axes)
