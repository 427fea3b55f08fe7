"""Where arrays live: a mesh of devices, and an ordered table, path pattern → partition.

    data     the batch is spread; parameters are whole on every device
    fsdp     the batch is spread, and so are parameters; a layer's are gathered when it is run
    tensor   a layer's own work is spread: heads, features of the feed-forward layer, vocabulary

JAX's partitioner does the rest. Sources: Zhao et al. 2023 (fully sharded data parallelism),
Shoeybi et al. 2019 (tensor parallelism).
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxformer.functional.spread import BATCH_AXES, TENSOR_AXIS
from jaxformer.models.build import shape_tree
from jaxformer.models.config import (
    ConvolutionalConfig,
    DecoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
    RecurrentConfig,
    RecurrentEncoderDecoderConfig,
)

AXES = (*BATCH_AXES, TENSOR_AXIS)


class Rule(NamedTuple):
    """pattern: of paths, "*" for anything; partition: the mesh axis, or axes, that cut each of an
    array's last axes, None: it is whole. Those before them, layers, are never cut."""

    pattern: str
    partition: tuple[str | tuple[str, ...] | None, ...]


# Maps into heads and hidden features are cut by their outputs, those out of them by their inputs:
# between the two nothing is exchanged over `tensor`.
_ENDS = (
    Rule("*embedding/tokens", ("tensor", "fsdp")),
    Rule("*embedding/*", (None, "fsdp")),
    Rule("head/kernel", ("fsdp", "tensor")),
    Rule("head/bias", ("tensor",)),
)
_VECTORS = (Rule("*/scale", (None,)), Rule("*/bias", (None,)))
_TRANSFORMER = (
    *_ENDS,
    *(
        Rule(f"*blocks/*/{name}/{part}", partition)
        for name in ("query", "key", "value", "up", "gate")
        for part, partition in (("kernel", ("fsdp", "tensor")), ("bias", ("tensor",)))
    ),
    Rule("*blocks/*/output/kernel", ("tensor", "fsdp")),
    Rule("*blocks/*/down/kernel", ("tensor", "fsdp")),
    Rule("*relative_bias/table", (None, "tensor")),
    Rule("*/kernel", ("fsdp", None)),
    *_VECTORS,
)
# A recurrent state or a convolution's features would be exchanged at every step or layer.
_OTHERS = (*_ENDS, Rule("*/kernel", ("fsdp", None)), *_VECTORS)
# What `tensor` does not divide is computed row by row (`functional.spread.row_axes`): there it is
# to parameters as another fsdp.
_BOTH = ("fsdp", "tensor")
_WHOLE_WORDS = (
    Rule("*embedding/tokens", (None, _BOTH)),
    Rule("head/kernel", (_BOTH, None)),
    Rule("head/bias", (None,)),
)
_WHOLE_HEADS = (
    *(
        Rule(f"*blocks/*attention/{name}/kernel", (_BOTH, None))
        for name in ("query", "key", "value")
    ),
    Rule("*blocks/*attention/output/kernel", (None, _BOTH)),
    Rule("*blocks/*attention/*/bias", (None,)),
    Rule("*relative_bias/table", (None, None)),
)
TABLES: dict[type, tuple[Rule, ...]] = {
    DecoderConfig: _TRANSFORMER,
    EncoderConfig: _TRANSFORMER,
    EncoderDecoderConfig: _TRANSFORMER,
    RecurrentConfig: _OTHERS,
    ConvolutionalConfig: _OTHERS,
    RecurrentEncoderDecoderConfig: _OTHERS,
}


def make_mesh(sizes: dict[str, int], devices: Sequence | None = None) -> Mesh:
    """A mesh of these axes, those that are not named being 1; devices: None for all there are.

    ValueError for an axis that is none of `AXES`, or sizes whose product is not that of devices.
    """
    devices = jax.devices() if devices is None else devices
    for name, size in sizes.items():
        if name not in AXES:
            raise ValueError(f"mesh has an axis {name!r}; there are {', '.join(AXES)}")
        if size < 1:
            raise ValueError(f"mesh has {name}={size}; it must be at least 1")
    shape = tuple(sizes.get(name, 1) for name in AXES)
    if prod(shape) != len(devices):
        said = ",".join(f"{name}={size}" for name, size in zip(AXES, shape, strict=True))
        raise ValueError(
            f"mesh is {said}, {prod(shape)} devices; there are {len(devices)} "
            f"({devices[0].platform})"
        )
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_mesh(mesh: Mesh) -> None:
    """ValueError unless it is one as `make_mesh` gives."""
    if mesh.axis_names != AXES or any(x != AxisType.Auto for x in mesh.axis_types):
        raise ValueError(
            f"mesh has the axes {mesh.axis_names} ({', '.join(map(str, mesh.axis_types))}); models "
            f"here are spread over {AXES}, left to the partitioner: jaxformer.models.placement."
            "make_mesh gives such a mesh"
        )


def partition_of(path: str, shape: tuple[int, ...], rules: Sequence[Rule], mesh) -> PartitionSpec:
    """Of the first rule whose pattern is that path's.

    ValueError if there is none, if it uses an axis twice or has more axes than the array, or if a
    size does not divide.
    """
    rule = next((rule for rule in rules if fnmatchcase(path, rule.pattern)), None)
    if rule is None:
        raise ValueError(f"{path} {shape} matches no rule of the table")
    used = [axis for axes in rule.partition for axis in _axes(axes)]
    if len(set(used)) < len(used):
        raise ValueError(f"the rule {rule.pattern!r} uses an axis twice: {rule.partition}")
    if len(rule.partition) > len(shape):
        raise ValueError(f"{path} {shape} has fewer axes than its rule {rule.pattern!r}")
    whole = (None,) * (len(shape) - len(rule.partition))
    for size, axes in zip(shape[len(whole) :], rule.partition, strict=True):
        if size % prod(mesh.shape[axis] for axis in _axes(axes)):
            said = " × ".join(f"{axis}={mesh.shape[axis]}" for axis in _axes(axes))
            raise ValueError(
                f"{path} {shape}: {size} does not divide by {said} (the rule {rule.pattern!r})"
            )
    return PartitionSpec(*whole, *rule.partition)


def _axes(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


def shardings(tree, config, mesh) -> dict:
    """Where each parameter of a model of this config lives, a tree of `NamedSharding`."""
    check_mesh(mesh)
    rules = rules_of(config, mesh.shape["tensor"])

    def place(path, leaf):
        name = "/".join(key.key for key in path)
        return NamedSharding(mesh, partition_of(name, leaf.shape, rules, mesh))

    return jax.tree_util.tree_map_with_path(place, tree)


def parameter_shapes(model, mesh) -> dict:
    """The model's parameters, as shapes with where each lives; mesh None: they do not say where."""
    shapes = shape_tree(model)
    if mesh is None:
        return shapes
    return shapes_at(shapes, shardings(shapes, model.config, mesh))


def shapes_at(shapes, where):
    """The shapes of a tree, with where each leaf lives."""
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, where
    )


def rules_of(config, tensor: int) -> tuple[Rule, ...]:
    """The table of a config on a mesh of so many devices along `tensor`. Heads, or words, that
    these do not divide are no error."""
    rules = TABLES[type(config)]
    heads = [getattr(config, name, None) for name in _HEADS]
    if any(n % tensor for n in heads if n is not None):
        rules = (*_WHOLE_HEADS, *rules)
    return (*_WHOLE_WORDS, *rules) if config.vocab_size % tensor else rules


_HEADS = ("num_heads", "num_kv_heads", "num_encoder_heads")


def batch_sharding(mesh, before: int = 0) -> NamedSharding:
    """Of arrays whose rows, after so many other axes, are spread over devices."""
    return NamedSharding(mesh, PartitionSpec(*[None] * before, BATCH_AXES))


def num_row_parts(mesh) -> int:
    """Into how many parts the rows of a batch are spread."""
    return prod(mesh.shape[axis] for axis in BATCH_AXES)


def replicated(mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def to_host(x) -> np.ndarray:
    """The values of an array, whole on this process, though its parts be on devices of others."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)
