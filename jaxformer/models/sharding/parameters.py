"""Sharding of parameters over a mesh of devices, from the weight axes of each sub-layer.

    data     shards the batch; parameters are replicated
    fsdp     shards the batch and the parameters; a layer's parameters are gathered when it runs
    expert   shards the batch and the experts; a device processes the tokens of its own experts
    tensor   shards the computation of a layer: heads, hidden features, vocabulary

Over `tensor`, kernels whose outputs are heads or hidden features are sharded along the outputs.
Kernels whose inputs are heads or hidden features are sharded along the inputs. Between these
kernels, sharding over `tensor` needs no communication. If the heads or the vocabulary are not
divisible by the size of `tensor`, the batch is sharded over `tensor` instead
(`MeshPlacement.for_stack`). In this case, `tensor` shards the parameters as `fsdp` does.

An ordered table of patterns maps each parameter to its partition. XLA's partitioner inserts the
communication.

Reference:
    Zhao et al. 2023 (fully sharded data parallelism), Shoeybi et al. 2019 (tensor parallelism).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxformer.functional.layers.layer import list_sublayers
from jaxformer.functional.layers.sublayer import WeightAxis
from jaxformer.functional.linear.low_rank import is_low_rank
from jaxformer.functional.model import Model
from jaxformer.functional.stack import Stack
from jaxformer.models.language_model import LanguageModel
from jaxformer.models.lora import low_rank_shardings
from jaxformer.models.parameters import shape_tree
from jaxformer.models.sharding.activations import BATCH_AXES, EXPERT_AXIS, TENSOR_AXIS

MeshAxes = str | tuple[str, ...] | None
_BOTH = ("fsdp", "tensor")
# The mesh axis over which each type of weight axis is sharded.
MESH_AXES: dict[WeightAxis, MeshAxes] = {
    "dim": "fsdp",
    "heads": "tensor",
    "hidden": "tensor",
    "experts": "expert",
    None: None,
}
_WHOLE = MESH_AXES | {"heads": None, "dim": _BOTH}


class Rule(NamedTuple):
    """Partition of the parameters whose path matches a pattern.

    Attributes:
        pattern: a pattern for paths, in which "*" matches any characters.
        partition: for each of an array's last axes, the mesh axis or axes that shard it, or None.
            Earlier axes, such as the layer axis, are never sharded.
    """

    pattern: str
    partition: tuple[MeshAxes, ...]

    def matches(self, path: str) -> bool:
        """Returns whether the pattern matches the path of a parameter."""
        return fnmatchcase(path, self.pattern)


_OTHERS = (
    *(Rule(f"*/{name}", (None,)) for name in ("scale", "bias", "log_scale")),
    Rule("*embedding/*", (None, "fsdp")),
    Rule("*/kernel", ("fsdp", None)),
)


def partition_rules(model: Model, tensor: int) -> tuple[Rule, ...]:
    """Returns the partition rules of a model's parameters. The first matching rule applies.

    Args:
        model: the model.
        tensor: the size of the mesh axis "tensor". The number of heads and the vocabulary size need
            not be divisible by this size.
    """
    encoder = [] if model.encoder is None else _rules_of_stack(model.encoder, tensor, "encoder/")
    return (*_rules_of_stack(model, tensor, ""), *encoder, *_OTHERS)


def _rules_of_stack(model: Model, tensor: int, prefix: str) -> Iterator[Rule]:
    yield Rule(f"{prefix}embedding/tokens", _words(model.embedding.vectors.units(), tensor))
    if model.head is not None:
        words = _words((model.head.vocab_size,), tensor)
        yield Rule(f"{prefix}head/kernel", words[::-1])
        yield Rule(f"{prefix}head/bias", words[:1])
    stack, divides = model.stack, not any(num % tensor for num in model.stack.units)
    yield Rule(f"{prefix}relative_bias/table", (None, "tensor" if divides else None))
    for path, axes in _axes_of_weights(stack):
        is_divided = divides or "heads" not in axes
        mesh_axes = [(MESH_AXES if is_divided else _WHOLE)[axis] for axis in axes]
        yield Rule(f"{prefix}blocks/{path}", tuple(mesh_axes))


def _words(sizes: tuple[int, ...], tensor: int) -> tuple[MeshAxes, ...]:
    """Returns the partition of a table [vocab_size, dim]."""
    return (None, _BOTH) if any(size % tensor for size in sizes) else _BOTH[::-1]


def _axes_of_weights(stack: Stack) -> Iterator[tuple[str, tuple[WeightAxis, ...]]]:
    """Yields the path and the axes of each weight that `SubLayer.weight_axes` contains."""
    for numbers in stack.groups:
        group = f"{numbers[0]}/" if len(stack.groups) > 1 else ""
        for sublayer in list_sublayers(stack.layers[numbers[0]]):
            for path, axes in sublayer.weight_axes().items():
                yield f"{group}{sublayer.name}/{path}", axes


AnyMesh = Mesh | AbstractMesh
AXES = (*BATCH_AXES, TENSOR_AXIS)
# By default, `jax.make_mesh` makes "Explicit" axes.
_AXIS_TYPES = (AxisType.Auto,) * len(AXES)


def make_mesh(sizes: dict[str, int], devices: Sequence | None = None) -> Mesh:
    """Returns a mesh with "Auto" axes, along which XLA's partitioner chooses the shardings.

    Args:
        sizes: the sizes of the axes in `AXES`; missing axes have size 1.
        devices: the devices of the mesh; defaults to all devices of the backend.

    Raises:
        ValueError: An axis is unknown, a size is below 1, or the product of the sizes is not the
            number of devices.
    """
    devices = jax.devices() if devices is None else devices
    shape = _mesh_shape(sizes)
    if prod(shape) != len(devices):
        named = ",".join(f"{name}={size}" for name, size in zip(AXES, shape, strict=True))
        raise ValueError(
            f"mesh is {named}, which needs {prod(shape)} devices; there are {len(devices)} "
            f"({devices[0].platform})"
        )
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=_AXIS_TYPES)


def make_abstract_mesh(sizes: dict[str, int]) -> AbstractMesh:
    """Returns an abstract mesh, without devices, with the axes of `make_mesh`.

    Abstract meshes describe the sharding of parameters on absent devices.
    """
    return AbstractMesh(_mesh_shape(sizes), AXES, axis_types=_AXIS_TYPES)


def _mesh_shape(sizes: dict[str, int]) -> tuple[int, ...]:
    for name, size in sizes.items():
        if name not in AXES:
            raise ValueError(f"mesh has an unknown axis {name!r}; the axes are {', '.join(AXES)}")
        if size < 1:
            raise ValueError(f"mesh has {name}={size}; it must be at least 1")
    return tuple(sizes.get(name, 1) for name in AXES)


def check_mesh(mesh: AnyMesh) -> None:
    """Raises ValueError unless the axes of the mesh are the axes of `make_mesh`."""
    if mesh.axis_names != AXES:
        raise ValueError(
            f"mesh has the axes {mesh.axis_names}; models need the axes {AXES}: make the mesh with "
            "jaxformer.models.sharding.parameters.make_mesh"
        )


def find_partition(
    path: str, shape: tuple[int, ...], rules: Sequence[Rule], mesh: AnyMesh
) -> PartitionSpec:
    """Returns the partition of the first rule that matches the path.

    Raises:
        ValueError: No rule matches, the rule uses an axis twice, the rule has more axes than the
            array, or a size is not divisible by the sizes of the mesh axes.
    """
    rule = next((rule for rule in rules if rule.matches(path)), None)
    if rule is None:
        raise ValueError(f"{path} {shape} matches no sharding rule of the table")
    used = [axis for axes in rule.partition for axis in _axes(axes)]
    if len(set(used)) < len(used):
        raise ValueError(f"the sharding rule {rule.pattern!r} uses an axis twice: {rule.partition}")
    if len(rule.partition) > len(shape):
        raise ValueError(f"{path} {shape} has fewer axes than its sharding rule {rule.pattern!r}")
    unsharded = (None,) * (len(shape) - len(rule.partition))
    for size, axes in zip(shape[len(unsharded) :], rule.partition, strict=True):
        if size % prod(mesh.shape[axis] for axis in _axes(axes)):
            sizes = " × ".join(f"{axis}={mesh.shape[axis]}" for axis in _axes(axes))
            raise ValueError(
                f"{path} {shape}: {size} is not divisible by {sizes} (the rule {rule.pattern!r})"
            )
    return PartitionSpec(*unsharded, *rule.partition)


def _axes(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


def shardings(tree: Any, model: LanguageModel, mesh: AnyMesh) -> dict:
    """Returns the `NamedSharding` of each parameter of a model, as a tree.

    Raises:
        ValueError: The mesh does not have the axes of `make_mesh`, a parameter has no valid
            partition (see `find_partition`), or the mesh shards experts and the model has none.
    """
    check_mesh(mesh)
    rules = partition_rules(model.architecture, mesh.shape["tensor"])

    def place(path: tuple[Any, ...], leaf: Any) -> Any:
        name = "/".join(key.key for key in path)
        where = NamedSharding(mesh, find_partition(name, leaf.shape, rules, mesh))
        if not is_low_rank(leaf):
            return where
        down, up = low_rank_shardings(where)
        return replace(leaf, frozen=where, down=down, up=up)

    placed = jax.tree_util.tree_map_with_path(place, tree, is_leaf=is_low_rank)
    experts = mesh.shape[EXPERT_AXIS]
    if experts > 1 and not any(EXPERT_AXIS in x.spec for x in jax.tree.leaves(placed)):
        raise ValueError(
            f"mesh has {EXPERT_AXIS}={experts}, but must have {EXPERT_AXIS}=1 for "
            "a model without experts"
        )
    return placed


def parameter_shapes(model: LanguageModel, mesh: AnyMesh | None) -> dict:
    """Returns the shapes of the model's parameters, with shardings unless `mesh` is None."""
    shapes = shape_tree(model)
    if mesh is None:
        return shapes
    return shapes_at(shapes, shardings(shapes, model, mesh))


def shapes_at(shapes: Any, where: Any) -> Any:
    """Adds the sharding of each leaf to a tree of shapes."""
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, where
    )


def batch_sharding(mesh: AnyMesh, before: int = 0) -> NamedSharding:
    """Returns the sharding of arrays whose batch axis has the index `before`."""
    return NamedSharding(mesh, PartitionSpec(*[None] * before, BATCH_AXES))


def num_batch_shards(mesh: AnyMesh) -> int:
    """Returns the number of shards of a batch on the mesh."""
    return prod(mesh.shape[axis] for axis in BATCH_AXES)


def replicated(mesh: AnyMesh) -> NamedSharding:
    """Returns the sharding of arrays that are replicated on every device."""
    return NamedSharding(mesh, PartitionSpec())


def to_host(x: Any) -> np.ndarray:
    """Returns all values of an array as a NumPy array, also if other processes hold shards."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)
