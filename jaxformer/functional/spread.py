"""Rows of a batch spread over the devices of a mesh: what the partitioner is told where it would
guess.

The mesh is the one in context (`jax.set_mesh`), and its axes are known by name: rows are spread
over "data" and "fsdp", a layer's own work over "tensor". Heads or words of the vocabulary that
"tensor" does not divide are whole on each device, and there rows are spread over "tensor" too.
Without a mesh nothing is told, nor where rows do not divide, nor inside `shard_map`, where each
device has its own already.
"""

from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, PartitionSpec

BATCH_AXES = ("data", "fsdp")
TENSOR_AXIS = "tensor"
TPU_LANES = 128  # the last axis of an array is padded to a multiple of it
EXCHANGED = "exchanged"  # what is kept for the backward pass where products are


def row_axes(*pieces: int) -> tuple[str, ...]:
    """The axes over which rows are spread where a layer's own work is in so many pieces (query
    heads, key heads; words): those of the batch and, where it does not divide one of them,
    "tensor"."""
    tensor = _size(_axes((TENSOR_AXIS,)))
    return (*BATCH_AXES, TENSOR_AXIS) if any(n % tensor for n in pieces) else BATCH_AXES


def spread(x, axes: tuple[str, ...] = BATCH_AXES):
    """x, its rows spread over the devices along these axes and nothing else of it.

    Between layers the partitioner would else be free to cut the features, by which parameters may
    be cut, and to exchange activations in the place of parameters.
    """
    axes = _axes(axes)
    if not axes or x.shape[0] % _size(axes):
        return x
    return _constrained(x, axes, *[None] * (x.ndim - 1))


def spread_back(x, axes: tuple[str, ...]):
    """x, its rows spread along these axes, spread as the batch is again. What it takes an exchange
    to know is not computed a second time."""
    x = spread(x)
    return x if axes == BATCH_AXES else checkpoint_name(x, EXCHANGED)


def platform() -> str:
    """What is computed on: the platform of the mesh in context, which may be of machines that are
    not here, or else JAX's own."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def kept_in_place(slots, batch_size: int, kv_heads: int):
    """slots, keys or values [batch, kv_heads, slots, head_dim] with or without axes of size 1, laid
    out on TPU as arguments of a program are: whichever of the last two axes is not padded last.

    Left to itself the compiler lays them out by what writes one slot, which pads 12 heads of 64 to
    2.7 times their size, and copies all of them into a loop and out of it.
    """
    if platform() != "tpu":
        return slots
    rows = _axes(row_axes(kv_heads))
    if batch_size % _size(rows):
        return slots
    last = slots.ndim - 1
    order = (last - 1, last) if slots.shape[-1] % TPU_LANES == 0 else (last, last - 1)
    layout = Layout((*range(last - 1), *order))
    if not _axes(BATCH_AXES):
        return with_layout_constraint(slots, layout)
    heads = None if TENSOR_AXIS in rows else (_axes((TENSOR_AXIS,)) or None)
    cuts = ((batch_size, rows), (kv_heads, heads))
    whole = slots.ndim == len(cuts) + 2
    spec = PartitionSpec(*(axes for size, axes in cuts if whole or size != 1), None, None)
    # On each device by itself: the partitioner would gather what it has no rule for.
    laid_out = jax.shard_map(
        lambda x: with_layout_constraint(x, layout), in_specs=spec, out_specs=spec
    )
    return laid_out(slots)


def varying_alike(*trees):
    """The trees, every array of them one that may differ between the devices of a `shard_map`
    wherever another of them may: what a loop carries must begin as what it becomes. The gradient of
    what is the same on all devices is then the sum over them. Elsewhere they are as they are."""

    def varying(x):
        return jax.typeof(x).manual_axis_type.varying

    axes = frozenset().union(*map(varying, jax.tree.leaves(trees)))

    def cast(x):
        missing = tuple(axes - varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, trees)


def num_parts(rows: int, axes: tuple[str, ...] = BATCH_AXES) -> int:
    """Into how many parts so many rows are spread along these axes."""
    parts = _size(_axes(axes))
    return 1 if rows % parts else parts


def is_cut() -> bool:
    """Whether the outputs of a layer's maps are cut over devices."""
    return _size(_axes((TENSOR_AXIS,))) > 1


def look_up(take, index, words: int, dtype):
    """take(index), vectors of a table of so many that may itself be cut along them, as `dtype`.

    index: [batch, length], or [length] where all rows have the same. Each device looks up its part
    of the vectors for all devices that share the rest, and they exchange what they found: less than
    the table, of which the gradient needs no exchange.
    """
    axes = _axes(BATCH_AXES)
    if not axes or (index.ndim > 1 and len(index) % _size(axes)):
        return take(index).astype(dtype)
    if index.ndim == 1:
        return _constrained(take(index).astype(dtype), None, None)
    copies, cut = _axes(BATCH_AXES[:1]) or None, _vector_axes(words) or None
    found = take(_constrained(index, copies, None))
    return spread(_constrained(found, copies, None, cut).astype(dtype))


def gathered(table, dtype):
    """A table of vectors [words, dim] as `dtype`, with the vectors, which may be cut, gathered:
    once, and not for every chunk of tokens. Its gradient goes back to where the vectors are."""
    return _gathered(table, jnp.dtype(table.dtype), dtype) if _axes(BATCH_AXES) else table


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(table, own_dtype, dtype):
    return _constrained(table.astype(dtype), _word_axes(len(table)) or None, None)


def _scattered(own_dtype, dtype, _, gradient):
    words, vectors = _word_axes(len(gradient)), _vector_axes(len(gradient))
    return (_constrained(gradient, words or None, vectors or None).astype(own_dtype),)


_gathered.defvjp(lambda *inputs: (_gathered(*inputs), None), _scattered)


def _word_axes(words: int) -> tuple[str, ...]:
    """The axes that cut so many words."""
    return () if TENSOR_AXIS in row_axes(words) else _axes((TENSOR_AXIS,))


def _vector_axes(words: int) -> tuple[str, ...]:
    """The axes that cut the vectors of so many words."""
    words = _word_axes(words)
    return tuple(axis for axis in _axes((BATCH_AXES[1], TENSOR_AXIS)) if axis not in words)


def _constrained(x, *partition):
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*partition))


def _axes(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the axes that the mesh in context has, and leaves to the partitioner.

    ValueError for explicit axes, by which an array says itself how it is cut.
    """
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types or (), strict=False))
    _refuse_explicit("the mesh in context", mesh)
    return tuple(name for name in names if types.get(name) == AxisType.Auto)


def refuse_explicit(name: str, tree) -> None:
    """ValueError if an array of the tree is on a mesh with explicit axes."""
    for leaf in jax.tree.leaves(tree):
        _refuse_explicit(f"the mesh that {name} are on", jax.typeof(leaf).sharding.mesh)


def _refuse_explicit(what: str, mesh) -> None:
    if AxisType.Explicit in (mesh.axis_types or ()):
        raise ValueError(
            f"{what} has explicit axes ({', '.join(mesh.axis_names)}); models here are cut by the "
            "partitioner: make it with axis_types=(jax.sharding.AxisType.Auto,) * "
            f"{len(mesh.axis_names)}, or by jaxformer.models.placement.make_mesh"
        )


def _size(axes: tuple[str, ...]) -> int:
    return prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes)
