"""Placement of arrays on a mesh of devices, from what each sub-layer says about its weights.

    data     shards the batch; parameters are replicated
    fsdp     shards the batch and the parameters; a layer's parameters are gathered when it runs
    expert   shards the batch, and the experts: a device computes the tokens of its own experts
    tensor   shards the computation of a layer: heads, hidden features, vocabulary

Kernels that compute heads and hidden features are sharded by their outputs, kernels that read them
by their inputs. In between there is no exchange over `tensor`. Where `tensor` does not divide the
heads or the vocabulary, the batch is sharded over it instead (`MeshPlacement.of_stack`). Parameters
are then sharded over `tensor` as over `fsdp`.

An ordered table of patterns says the partition of each parameter. JAX's partitioner inserts the
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

from jaxformer.functional.layers.layer import sublayers_of
from jaxformer.functional.layers.sublayer import WeightAxis
from jaxformer.functional.linear.low_rank import is_low_rank
from jaxformer.functional.model import Model
from jaxformer.functional.stack import Stack
from jaxformer.models.activation_sharding import BATCH_AXES, EXPERT_AXIS, TENSOR_AXIS
from jaxformer.models.language_model import LanguageModel
from jaxformer.models.lora import low_rank_shardings
from jaxformer.models.parameters import shape_tree

MeshAxes = str | tuple[str, ...] | None
_BOTH = ("fsdp", "tensor")
_DIVIDED: dict[WeightAxis, MeshAxes] = {
    "dim": "fsdp",
    "heads": "tensor",
    "hidden": "tensor",
    "experts": "expert",
    None: None,
}
_WHOLE = _DIVIDED | {"heads": None, "dim": _BOTH}


class Rule(NamedTuple):
    """Partition of the parameters whose path matches a pattern.

    Attributes:
        pattern: a pattern of paths, "*" for anything.
        partition: the mesh axis, or axes, that shard each of an array's last axes; None: that axis
            is not sharded. The axes before, which are layers, are never sharded.
    """

    pattern: str
    partition: tuple[MeshAxes, ...]

    def matches(self, path: str) -> bool:
        """Returns whether the rule is that of a parameter with this path."""
        return fnmatchcase(path, self.pattern)


_OTHERS = (
    Rule("*embedding/*", (None, "fsdp")),
    Rule("*/kernel", ("fsdp", None)),
    *(Rule(f"*/{name}", (None,)) for name in ("scale", "bias", "log_scale")),
)


def partition_rules(model: Model, tensor: int) -> tuple[Rule, ...]:
    """Returns the rules of a model's parameters; the first that matches a path applies.

    Args:
        model: the model.
        tensor: the size of the mesh axis of that name. It need not divide the heads or the
            vocabulary of the decoder or of the encoder.
    """
    encoder = [] if model.encoder is None else _rules_of_stack(model.encoder, tensor, "encoder/")
    return (*_rules_of_stack(model, tensor, ""), *encoder, *_OTHERS)


def _rules_of_stack(model: Model, tensor: int, prefix: str) -> Iterator[Rule]:
    words = _BOTH[::-1] if model.embedding.vocab_size % tensor == 0 else (None, _BOTH)
    yield Rule(f"{prefix}embedding/tokens", words)
    yield Rule(f"{prefix}head/kernel", words[::-1])
    yield Rule(f"{prefix}head/bias", words[:1])
    stack, divides = model.stack, not any(num % tensor for num in model.stack.units)
    yield Rule(f"{prefix}relative_bias/table", (None, "tensor" if divides else None))
    for path, axes in _axes_of_weights(stack):
        is_divided = divides or "heads" not in axes
        mesh_axes = [(_DIVIDED if is_divided else _WHOLE)[axis] for axis in axes]
        yield Rule(f"{prefix}blocks/{path}", tuple(mesh_axes))


def _axes_of_weights(stack: Stack) -> Iterator[tuple[str, tuple[WeightAxis, ...]]]:
    """Yields (path, axes) for the weights of which a sub-layer says the axes."""
    for numbers in stack.groups:
        group = f"{numbers[0]}/" if len(stack.groups) > 1 else ""
        for sublayer in sublayers_of(stack.layers[numbers[0]]):
            for path, axes in sublayer.weight_axes().items():
                yield f"{group}{sublayer.name}/{path}", axes


AnyMesh = Mesh | AbstractMesh
AXES = (*BATCH_AXES, TENSOR_AXIS)
# Stated because `jax.make_mesh` defaults to Explicit.
_AXIS_TYPES = (AxisType.Auto,) * len(AXES)


def make_mesh(sizes: dict[str, int], devices: Sequence | None = None) -> Mesh:
    """Returns a mesh whose axes the partitioner handles.

    Args:
        sizes: the size of each axis of `AXES`; an axis that is absent has size 1.
        devices: the devices of the mesh; None: all of this process's backend.

    Raises:
        ValueError: an axis is unknown, a size is below 1, or the product of the sizes is not the
            number of devices.
    """
    devices = jax.devices() if devices is None else devices
    shape = _mesh_shape(sizes)
    if prod(shape) != len(devices):
        named = ",".join(f"{name}={size}" for name, size in zip(AXES, shape, strict=True))
        raise ValueError(
            f"mesh is {named}, {prod(shape)} devices; there are {len(devices)} "
            f"({devices[0].platform})"
        )
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=_AXIS_TYPES)


def make_abstract_mesh(sizes: dict[str, int]) -> AbstractMesh:
    """Returns a mesh like that of `make_mesh` without devices.

    It places parameters for a machine that is absent.
    """
    return AbstractMesh(_mesh_shape(sizes), AXES, axis_types=_AXIS_TYPES)


def _mesh_shape(sizes: dict[str, int]) -> tuple[int, ...]:
    for name, size in sizes.items():
        if name not in AXES:
            raise ValueError(f"mesh has an axis {name!r}; there are {', '.join(AXES)}")
        if size < 1:
            raise ValueError(f"mesh has {name}={size}; it must be at least 1")
    return tuple(sizes.get(name, 1) for name in AXES)


def check_mesh(mesh: AnyMesh) -> None:
    """Raises ValueError unless the mesh has the axes of `make_mesh`."""
    if mesh.axis_names != AXES:
        raise ValueError(
            f"mesh has the axes {mesh.axis_names}; models need the axes {AXES}: make the mesh by "
            "jaxformer.models.mesh.make_mesh"
        )


def partition_of(
    path: str, shape: tuple[int, ...], rules: Sequence[Rule], mesh: AnyMesh
) -> PartitionSpec:
    """Returns the partition of the first rule that matches the path.

    Raises:
        ValueError: no rule matches, the rule uses an axis twice or has more axes than the array,
            or the mesh axes do not divide a size.
    """
    rule = next((rule for rule in rules if rule.matches(path)), None)
    if rule is None:
        raise ValueError(f"{path} {shape} matches no rule of the table")
    used = [axis for axes in rule.partition for axis in _axes(axes)]
    if len(set(used)) < len(used):
        raise ValueError(f"the rule {rule.pattern!r} uses an axis twice: {rule.partition}")
    if len(rule.partition) > len(shape):
        raise ValueError(f"{path} {shape} has fewer axes than its rule {rule.pattern!r}")
    unsharded = (None,) * (len(shape) - len(rule.partition))
    for size, axes in zip(shape[len(unsharded) :], rule.partition, strict=True):
        if size % prod(mesh.shape[axis] for axis in _axes(axes)):
            sizes = " × ".join(f"{axis}={mesh.shape[axis]}" for axis in _axes(axes))
            raise ValueError(
                f"{path} {shape}: {size} does not divide by {sizes} (the rule {rule.pattern!r})"
            )
    return PartitionSpec(*unsharded, *rule.partition)


def _axes(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


def shardings(tree: Any, model: LanguageModel, mesh: AnyMesh) -> dict:
    """Returns the `NamedSharding` of each parameter of a model, as a tree.

    Raises:
        ValueError: the axes of the mesh are not those of `make_mesh`, they do not divide a size, or
            the mesh shards experts and the model has none.
    """
    check_mesh(mesh)
    rules = partition_rules(model.architecture, mesh.shape["tensor"])

    def place(path: tuple[Any, ...], leaf: Any) -> Any:
        name = "/".join(key.key for key in path)
        where = NamedSharding(mesh, partition_of(name, leaf.shape, rules, mesh))
        if not is_low_rank(leaf):
            return where
        down, up = low_rank_shardings(where)
        return replace(leaf, frozen=where, down=down, up=up)

    placed = jax.tree_util.tree_map_with_path(place, tree, is_leaf=is_low_rank)
    experts = mesh.shape[EXPERT_AXIS]
    if experts > 1 and not any(EXPERT_AXIS in x.spec for x in jax.tree.leaves(placed)):
        raise ValueError(
            f"mesh has {EXPERT_AXIS}={experts}, but the model has no experts; it must be 1"
        )
    return placed


def parameter_shapes(model: LanguageModel, mesh: AnyMesh | None) -> dict:
    """Returns the shapes of the model's parameters, with shardings unless the mesh is None."""
    shapes = shape_tree(model)
    if mesh is None:
        return shapes
    return shapes_at(shapes, shardings(shapes, model, mesh))


def shapes_at(shapes: Any, where: Any) -> Any:
    """Returns the shapes of a tree with the sharding of each leaf."""
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, where
    )


def batch_sharding(mesh: AnyMesh, before: int = 0) -> NamedSharding:
    """Returns the sharding of arrays whose rows, after `before` other axes, are sharded."""
    return NamedSharding(mesh, PartitionSpec(*[None] * before, BATCH_AXES))


def num_row_parts(mesh: AnyMesh) -> int:
    """Returns the number of parts into which the mesh shards the rows of a batch."""
    return prod(mesh.shape[axis] for axis in BATCH_AXES)


def replicated(mesh: AnyMesh) -> NamedSharding:
    """Returns the sharding of arrays that are replicated on every device."""
    return NamedSharding(mesh, PartitionSpec())


def to_host(x: Any) -> np.ndarray:
    """Returns all values of an array as a NumPy array, even if other processes hold parts of it."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)
