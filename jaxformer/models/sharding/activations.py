"""Sharding of activations over the mesh in context.

Constraints on activations make sure that XLA's partitioner chooses an efficient sharding. The mesh
is the mesh in context (`jax.set_mesh`). The axes "data", "fsdp" and "expert" shard the batch. The
axis "tensor" shards the computation inside a layer. If the number of heads is not divisible by the
size of "tensor", attention shards the batch over "tensor" instead. If the vocabulary size is not
divisible by the size of "tensor", the loss shards the batch over "tensor" too. The axis "expert"
also shards the experts: each device processes the tokens of its own experts.

These constraints have no effect without a mesh, or if the batch size is not divisible by the sizes
of the mesh axes. They also have no effect inside `shard_map`, where each device already has only
its own batch elements.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, DTypeLike, Float, Int, Shaped

from jaxformer.functional.attention.platforms import fused_kernels, implementation_here
from jaxformer.functional.linear.affine import target_kernels
from jaxformer.functional.linear.kernels import is_kernel
from jaxformer.functional.linear.products import STORED
from jaxformer.functional.machine import platform
from jaxformer.functional.own_gradient import own_gradient

DATA_AXIS, FSDP_AXIS, EXPERT_AXIS, TENSOR_AXIS = "data", "fsdp", "expert", "tensor"
BATCH_AXES = (DATA_AXIS, FSDP_AXIS, EXPERT_AXIS)
# TPUs pad the last axis of an array to a multiple of this size.
TPU_LANES = 128

# For each hook point, the mesh axes that shard the batch axis of its value. BATCH stands for
# BATCH_AXES. If the number of heads is not divisible by the size of the mesh axis "tensor", HEADS
# also includes "tensor".
BATCH, HEADS = "batch", "heads"
SHARDING_OF_POINTS = {
    "embedding": BATCH,
    "block.input": BATCH,
    "attention.input": HEADS,
    "attention.output": BATCH,
    "block.middle": BATCH,
    "cross_attention.input": HEADS,
    "cross_attention.output": BATCH,
    "block.output": BATCH,
    "recurrent.initial": BATCH,
}


@dataclass(frozen=True)
class MeshPlacement:
    """Implementation of `Placement` for the mesh in context.

    Attributes:
        fused_kernels: see `Placement`.
        fuses_projections: see `Placement`.
        head_axes: the mesh axes that shard the batch where heads are computed.
    """

    fused_kernels: tuple[Any, ...]
    fuses_projections: bool
    head_axes: tuple[str, ...] = BATCH_AXES

    def for_stack(self, units: tuple[int, ...]) -> "MeshPlacement":
        """See `Placement`."""
        return replace(self, head_axes=batch_axes(*units))

    def place(self, name: str, value: Array) -> Array:
        """See `Placement`."""
        if name == "cache.key_values":
            return keep_in_place(value)
        sharded_by = SHARDING_OF_POINTS.get(name)
        if sharded_by is None:
            return value
        value = shard_batch(value, self.head_axes if sharded_by == HEADS else BATCH_AXES)
        # The name lets a remat policy store the value instead of repeating the communication.
        is_exchanged = name == "block.middle" or name == "cross_attention.output"
        if is_exchanged and self.head_axes != BATCH_AXES:
            value = checkpoint_name(value, STORED)
        return value

    def look_up(
        self,
        take: Callable[[Int[Array, "*batch"]], Float[Array, "*batch dim"]],
        index: Int[Array, "*batch"],
        num_vectors: int,
        dtype: DTypeLike,
    ) -> Float[Array, "*batch dim"]:
        """Looks up vectors of a table that may be sharded.

        Each device looks up its shard of the vectors for the tokens of all devices along "fsdp",
        and the devices exchange the results. This exchange communicates less data than gathering
        the whole table. The gradient of this table does not need further communication along
        "fsdp".
        """
        axes = _axes(BATCH_AXES)
        if not axes or (index.ndim > 1 and len(index) % _size(axes)):
            return take(index).astype(dtype)
        if index.ndim == 1:
            return _constrained(take(index).astype(dtype), None, None)
        copies, vectors = _axes((DATA_AXIS, EXPERT_AXIS)) or None, _vector_axes(num_vectors) or None
        found = take(_constrained(index, copies, None))
        return shard_batch(_constrained(found, copies, None, vectors).astype(dtype))

    def per_device(
        self,
        function: Callable[..., Array],
        query: Float[Array, "batch heads queries d"],
        key: Float[Array, "batch kv_heads keys d"],
        *arrays: Array,
    ) -> Array:
        """See `Placement`."""
        axes = _dividing(_axes(self.head_axes), len(query))
        heads = () if TENSOR_AXIS in self.head_axes else _axes((TENSOR_AXIS,))
        if not axes and not heads:
            return function(query, key, *arrays)
        specs = tuple(
            PartitionSpec(axes or None, *([heads or None] if x.ndim == 4 else []))
            for x in (query, key, *arrays)
        )
        # `check_vma` is False, because kernels do not declare over which mesh axes their results
        # vary.
        mapped = jax.shard_map(function, in_specs=specs, out_specs=specs[0], check_vma=False)
        return mapped(query, key, *arrays)

    def per_expert(
        self,
        function: Callable[..., Array],
        num_experts: int,
        weights: Any,
        x: Float[Array, "tokens dim"],
        experts: Int[Array, "tokens chosen"],
        shares: Float[Array, "tokens chosen"],
    ) -> Float[Array, "tokens dim"]:
        """See `Placement`.

        The devices along "expert" gather all tokens, each device applies its own experts, and the
        sums are scattered. XLA's partitioner cannot shard a sort, and would process all tokens on
        every device.
        """
        axes, parts = _axes(BATCH_AXES), _size(_axes((EXPERT_AXIS,)))
        if _size(axes) == 1:
            return function(weights, x, experts, shares)
        if num_experts % parts:
            raise ValueError(
                f"the mesh has expert={parts}; it must divide num_experts ({num_experts})"
            )
        token_axes = _dividing(axes, len(x))
        is_split, manual = EXPERT_AXIS in token_axes, {*axes, *_axes((TENSOR_AXIS,))}
        dtype = exchanged = x.dtype
        if _size(_axes((TENSOR_AXIS,))) > 1:
            # The partitioner, not this `shard_map`, shards hidden features over "tensor". The sum
            # is not bfloat16, because XLA:CPU of jaxlib 0.10.2 aborts on a bfloat16 sum inside a
            # `shard_map` that leaves an axis to the partitioner.
            manual.remove(TENSOR_AXIS)
            exchanged = jnp.float32 if platform() == "cpu" else dtype

        def compute_on_device(weights: Any, *tokens: Array) -> Array:
            if is_split:
                tokens = tuple(jax.lax.all_gather(t, EXPERT_AXIS, tiled=True) for t in tokens)
            x, experts, shares = tokens
            first = jax.lax.axis_index(EXPERT_AXIS) * (num_experts // parts)
            y = function(weights, x.astype(dtype), experts - first, shares).astype(exchanged)
            if is_split:
                return jax.lax.psum_scatter(y, EXPERT_AXIS, tiled=True)
            return jax.lax.psum(y, EXPERT_AXIS)

        by_tokens = PartitionSpec(token_axes or None)
        specs = PartitionSpec(EXPERT_AXIS), by_tokens, by_tokens, by_tokens
        mapped = jax.shard_map(
            compute_on_device, in_specs=specs, out_specs=by_tokens, axis_names=manual
        )
        weights = target_kernels(lambda x: x if is_kernel(x) else x.astype(exchanged), weights)
        return mapped(weights, x.astype(exchanged), experts, shares).astype(dtype)


def placement_here(attention: str = "auto") -> MeshPlacement:
    """Returns the `MeshPlacement` for the mesh in context, or for one device.

    Raises:
        ValueError: The platform does not support the attention implementation.
    """
    implementation_here(attention)
    return MeshPlacement(fused_kernels(), not is_tensor_parallel())


def batch_axes(*pieces: int) -> tuple[str, ...]:
    """Returns the mesh axes that shard the batch in attention or in the output head.

    Args:
        pieces: the sizes that "tensor" would shard: the numbers of query heads and of key heads, or
            the vocabulary size.

    Returns:
        The batch axes. If one of `pieces` is not divisible by the size of "tensor", the result also
        contains "tensor".
    """
    tensor = _size(_axes((TENSOR_AXIS,)))
    return (*BATCH_AXES, TENSOR_AXIS) if any(n % tensor for n in pieces) else BATCH_AXES


def shard_batch(
    x: Shaped[Array, "batch ..."], axes: tuple[str, ...] = BATCH_AXES
) -> Shaped[Array, "batch ..."]:
    """Shards the first axis of x over the devices along `axes`, and replicates the other axes.

    If the size of the first axis is not divisible by the number of these devices, the last mesh
    axes are dropped until it is divisible. Without this constraint, the partitioner may shard the
    features of x as it shards the parameters, and communicate activations instead of parameters.
    """
    axes = _dividing(_axes(axes), x.shape[0])
    if not axes:
        return x
    return _constrained(x, axes, *[None] * (x.ndim - 1))


def keep_in_place(
    slots: Float[Array, "batch kv_heads slots d"],
) -> Float[Array, "batch kv_heads slots d"]:
    """Constrains the layout of cached keys or values on TPU, so that loops update them in place.

    The minor axis of the layout is head_dim if head_dim is a multiple of `TPU_LANES`, otherwise the
    axis of cache slots. XLA also gives this layout to a cache that is an argument of a program.
    Without the constraint, XLA chooses the best layout for writing one cache slot. That layout pads
    12 heads of 64 features to 2.7 times their size, and a loop copies all cache slots when it
    starts and when it ends.
    """
    if platform() != "tpu":
        return slots
    batch_size, kv_heads, _, head_dim = slots.shape
    axes = _axes(batch_axes(kv_heads))
    if batch_size % _size(axes):
        return slots
    layout = Layout((0, 1, 2, 3) if head_dim % TPU_LANES == 0 else (0, 1, 3, 2))
    if not _axes(BATCH_AXES):
        return with_layout_constraint(slots, layout)
    heads = None if TENSOR_AXIS in axes else (_axes((TENSOR_AXIS,)) or None)
    spec = PartitionSpec(axes, heads, None, None)
    # Without `shard_map`, the partitioner would gather the cache slots, because a layout constraint
    # has no partitioning rule.
    laid_out = jax.shard_map(
        lambda x: with_layout_constraint(x, layout), in_specs=spec, out_specs=spec
    )
    return laid_out(slots)


def num_parts(batch_size: int, axes: tuple[str, ...] = BATCH_AXES) -> int:
    """Returns the number of shards of a batch over `axes`; 1 if it does not divide `batch_size`."""
    parts = _size(_axes(axes))
    return 1 if batch_size % parts else parts


def is_tensor_parallel() -> bool:
    """Returns whether the mesh in context has more than one device along "tensor"."""
    return _size(_axes((TENSOR_AXIS,))) > 1


def gather_vectors(table: Float[Array, "words dim"], dtype: DTypeLike) -> Float[Array, "words dim"]:
    """Converts a sharded table [words, dim] to `dtype`, and gathers its vectors.

    The loss gathers the table once, instead of once per chunk of tokens. The gradient is sharded
    like the table.
    """
    if not _axes(BATCH_AXES):
        return table
    gather = partial(_gather, dtype)
    return own_gradient(gather, lambda x: (gather(x), None), partial(_scatter, table.dtype))(table)


def _gather(dtype: DTypeLike, table: Float[Array, "words dim"]) -> Float[Array, "words dim"]:
    return _constrained(table.astype(dtype), _word_axes(len(table)) or None, None)


def _scatter(
    own_dtype: DTypeLike, _: None, gradient: Float[Array, "words dim"]
) -> tuple[Float[Array, "words dim"]]:
    words, vectors = _word_axes(len(gradient)), _vector_axes(len(gradient))
    return (_constrained(gradient, words or None, vectors or None).astype(own_dtype),)


def _word_axes(words: int) -> tuple[str, ...]:
    """Returns the mesh axes that shard the first axis of a table of `words` vectors."""
    return () if TENSOR_AXIS in batch_axes(words) else _axes((TENSOR_AXIS,))


def _vector_axes(words: int) -> tuple[str, ...]:
    """Returns the mesh axes that shard the vectors of a table of `words` vectors."""
    used = _word_axes(words)
    return tuple(axis for axis in _axes((FSDP_AXIS, TENSOR_AXIS)) if axis not in used)


def _constrained(
    x: Shaped[Array, "*shape"], *partition: tuple[str, ...] | None
) -> Shaped[Array, "*shape"]:
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*partition))


def _axes(names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the mesh axes in `names` that are "Auto" axes of the mesh in context."""
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types or (), strict=False))
    return tuple(name for name in names if types.get(name) == AxisType.Auto)


def _dividing(axes: tuple[str, ...], size: int) -> tuple[str, ...]:
    """Returns the longest prefix of the mesh axes that can shard an array axis of this size."""
    while axes and size % _size(axes):
        axes = axes[:-1]
    return axes


def _size(axes: tuple[str, ...]) -> int:
    return prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes)
