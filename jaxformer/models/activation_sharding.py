"""Sharding of the values of a pass over the mesh in context.

The partitioner would otherwise have to guess. The mesh is the one in context (`jax.set_mesh`). Its
axes "data", "fsdp" and "expert" shard the rows of arrays, that is, the batch elements. "tensor"
shards the computation inside a layer. If "tensor" does not divide the number of heads or the
vocabulary, the computation with them is not sharded over it; the rows are sharded over "tensor"
instead. "expert" shards the experts too: each device computes the tokens of its own experts.

Nothing here has an effect without a mesh, if the number of rows is not divisible, and inside
`shard_map`, where each device already has only its own rows.
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
from jaxformer.functional.linear.affine import map_kernels
from jaxformer.functional.linear.kernels import is_kernel
from jaxformer.functional.linear.products import STORED
from jaxformer.functional.machine import platform
from jaxformer.functional.own_gradient import own_gradient

DATA_AXIS, FSDP_AXIS, EXPERT_AXIS, TENSOR_AXIS = "data", "fsdp", "expert", "tensor"
BATCH_AXES = (DATA_AXIS, FSDP_AXIS, EXPERT_AXIS)
TPU_LANES = 128  # the last axis of an array is padded to a multiple of it

# Where the rows of a value are sharded, by the name of its point: over the axes of the batch, or
# over those of the heads, which include "tensor" if "tensor" does not divide the heads.
BATCH, HEADS = "batch", "heads"
ROWS_OF_POINTS = {
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
    """The `Placement` of a pass over the mesh in context.

    Attributes:
        fused_kernels: see `Placement`.
        fuses_projections: see `Placement`.
        head_axes: the mesh axes that shard the rows where heads are computed.
    """

    fused_kernels: tuple[Any, ...]
    fuses_projections: bool
    head_axes: tuple[str, ...] = BATCH_AXES

    def of_stack(self, units: tuple[int, ...]) -> "MeshPlacement":
        """See `Placement`."""
        return replace(self, head_axes=row_axes(*units))

    def place(self, name: str, value: Array) -> Array:
        """See `Placement`."""
        if name == "cache.slots":
            return keep_in_place(value)
        rows = ROWS_OF_POINTS.get(name)
        if rows is None:
            return value
        value = shard_rows(value, self.head_axes if rows == HEADS else BATCH_AXES)
        # So that a remat policy can store the value instead of repeating the exchange.
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

        Each device looks up its part of the vectors for the tokens of all devices along "fsdp". The
        devices then exchange the looked-up parts. That is less data than the table, and the table's
        gradient needs no exchange.
        """
        axes = _axes(BATCH_AXES)
        if not axes or (index.ndim > 1 and len(index) % _size(axes)):
            return take(index).astype(dtype)
        if index.ndim == 1:
            return _constrained(take(index).astype(dtype), None, None)
        copies, vectors = _axes((DATA_AXIS, EXPERT_AXIS)) or None, _vector_axes(num_vectors) or None
        found = take(_constrained(index, copies, None))
        return shard_rows(_constrained(found, copies, None, vectors).astype(dtype))

    def per_device(
        self,
        function: Callable[..., Array],
        query: Float[Array, "batch heads queries d"],
        key: Float[Array, "batch kv_heads keys d"],
        *arrays: Array,
    ) -> Array:
        """See `Placement`."""
        rows = _dividing(_axes(self.head_axes), len(query))
        heads = () if TENSOR_AXIS in self.head_axes else _axes((TENSOR_AXIS,))
        if not rows and not heads:
            return function(query, key, *arrays)
        specs = tuple(
            PartitionSpec(rows or None, *([heads or None] if x.ndim == 4 else []))
            for x in (query, key, *arrays)
        )
        # Kernels do not say over which axes their results vary, so this is not checked.
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

        The devices along "expert" gather their tokens, each computes those of its own experts, and
        the sums are scattered. The partitioner cannot shard a sort, so it would compute all tokens
        on every device.
        """
        axes, parts = _axes(BATCH_AXES), _size(_axes((EXPERT_AXIS,)))
        if _size(axes) == 1:
            return function(weights, x, experts, shares)
        if num_experts % parts:
            raise ValueError(
                f"the mesh has expert={parts}; it must divide num_experts ({num_experts})"
            )
        rows = _dividing(axes, len(x))
        is_split, manual = EXPERT_AXIS in rows, {*axes, *_axes((TENSOR_AXIS,))}
        dtype = exchanged = x.dtype
        if _size(_axes((TENSOR_AXIS,))) > 1:
            # The partitioner shards hidden features. XLA:CPU of jaxlib 0.10.2 aborts on a bfloat16
            # sum inside a `shard_map` that leaves an axis to the partitioner.
            manual.remove(TENSOR_AXIS)
            exchanged = jnp.float32 if platform() == "cpu" else dtype

        def of_device(weights: Any, *tokens: Array) -> Array:
            if is_split:
                tokens = tuple(jax.lax.all_gather(t, EXPERT_AXIS, tiled=True) for t in tokens)
            x, experts, shares = tokens
            first = jax.lax.axis_index(EXPERT_AXIS) * (num_experts // parts)
            y = function(weights, x.astype(dtype), experts - first, shares).astype(exchanged)
            if is_split:
                return jax.lax.psum_scatter(y, EXPERT_AXIS, tiled=True)
            return jax.lax.psum(y, EXPERT_AXIS)

        by_rows = PartitionSpec(rows or None)
        specs = PartitionSpec(EXPERT_AXIS), by_rows, by_rows, by_rows
        mapped = jax.shard_map(of_device, in_specs=specs, out_specs=by_rows, axis_names=manual)
        weights = map_kernels(lambda x: x if is_kernel(x) else x.astype(exchanged), weights)
        return mapped(weights, x.astype(exchanged), experts, shares).astype(dtype)


def placement_here(attention: str = "auto") -> MeshPlacement:
    """Returns the placement on the mesh in context, or on one device.

    Raises:
        ValueError: the implementation of attention does not exist on this platform.
    """
    implementation_here(attention)
    return MeshPlacement(fused_kernels(), not is_tensor_parallel())


def row_axes(*pieces: int) -> tuple[str, ...]:
    """Returns the mesh axes that shard the rows in one part of a layer.

    Args:
        pieces: numbers of units that "tensor" can shard in that part: query heads and key heads, or
            words.

    Returns:
        The axes of the batch and, if "tensor" does not divide one of `pieces`, "tensor".
    """
    tensor = _size(_axes((TENSOR_AXIS,)))
    return (*BATCH_AXES, TENSOR_AXIS) if any(n % tensor for n in pieces) else BATCH_AXES


def shard_rows(
    x: Shaped[Array, "rows ..."], axes: tuple[str, ...] = BATCH_AXES
) -> Shaped[Array, "rows ..."]:
    """Shards the rows of x over the devices along `axes`, and no other axis of x.

    Rows that do not divide by all of these axes are sharded over the longest prefix of `axes` by
    which they do. Without this constraint the partitioner may shard the features between layers, as
    parameters are sharded, and exchange activations instead of parameters.
    """
    axes = _dividing(_axes(axes), x.shape[0])
    if not axes:
        return x
    return _constrained(x, axes, *[None] * (x.ndim - 1))


def keep_in_place(
    slots: Float[Array, "batch kv_heads slots d"],
) -> Float[Array, "batch kv_heads slots d"]:
    """Constrains the layout of a cache's slots on TPU, so that a loop updates them in place.

    The layout is that of a program's arguments: of the last two axes the minor one is head_dim if
    that needs no padding, otherwise the axis of slots. Without the constraint the compiler chooses
    the layout by the operation that writes one slot. That pads 12 heads of 64 to 2.7 times their
    size, and the loop copies all slots on entry and exit.
    """
    if platform() != "tpu":
        return slots
    batch_size, kv_heads, _, head_dim = slots.shape
    rows = _axes(row_axes(kv_heads))
    if batch_size % _size(rows):
        return slots
    layout = Layout((0, 1, 2, 3) if head_dim % TPU_LANES == 0 else (0, 1, 3, 2))
    if not _axes(BATCH_AXES):
        return with_layout_constraint(slots, layout)
    heads = None if TENSOR_AXIS in rows else (_axes((TENSOR_AXIS,)) or None)
    spec = PartitionSpec(rows, heads, None, None)
    # Inside shard_map, because the partitioner gathers the operands of operations that it has no
    # rule for.
    laid_out = jax.shard_map(
        lambda x: with_layout_constraint(x, layout), in_specs=spec, out_specs=spec
    )
    return laid_out(slots)


def num_parts(rows: int, axes: tuple[str, ...] = BATCH_AXES) -> int:
    """Returns the number of parts into which `axes` shard `rows` rows; 1 if it does not divide."""
    parts = _size(_axes(axes))
    return 1 if rows % parts else parts


def is_tensor_parallel() -> bool:
    """Returns whether the mesh axis "tensor" shards the outputs of a layer's kernels."""
    return _size(_axes((TENSOR_AXIS,))) > 1


def gather_vectors(table: Float[Array, "words dim"], dtype: DTypeLike) -> Float[Array, "words dim"]:
    """Gathers the sharded vectors of a table [words, dim] in `dtype`.

    The gather happens once, not for every chunk of tokens. The gradient is sharded as the table is.
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
    return () if TENSOR_AXIS in row_axes(words) else _axes((TENSOR_AXIS,))


def _vector_axes(words: int) -> tuple[str, ...]:
    """Returns the mesh axes that shard the vectors of a table of `words` vectors."""
    used = _word_axes(words)
    return tuple(axis for axis in _axes((FSDP_AXIS, TENSOR_AXIS)) if axis not in used)


def _constrained(
    x: Shaped[Array, "*shape"], *partition: tuple[str, ...] | None
) -> Shaped[Array, "*shape"]:
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*partition))


def _axes(names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns those of the axes that the mesh in context has and leaves to the partitioner."""
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types or (), strict=False))
    return tuple(name for name in names if types.get(name) == AxisType.Auto)


def _dividing(axes: tuple[str, ...], size: int) -> tuple[str, ...]:
    """Returns the longest prefix of the axes over which an axis of this size can be sharded."""
    while axes and size % _size(axes):
        axes = axes[:-1]
    return axes


def _size(axes: tuple[str, ...]) -> int:
    return prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes)
