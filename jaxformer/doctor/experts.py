"""Detects programs that compute all experts for all tokens.

In a mixture of experts, each token needs k of E experts. A dense program computes all E experts and
multiplies most outputs by 0. `jax.lax.ragged_dot` becomes a dense program where the compiler lacks
a kernel for it. A dense program has arrays [experts, tokens, features], with the axes in any order.
The memory and the time of a dense program grow with E instead of k.
"""

from collections.abc import Mapping
from itertools import combinations, product
from math import prod
from typing import NamedTuple

from jax.sharding import Mesh

from jaxformer.doctor.program import computations
from jaxformer.functional.layers.layer import list_sublayers, list_weight_shapes
from jaxformer.functional.layers.sublayer import SubLayer, WeightAxis
from jaxformer.models.language_model import LanguageModel
from jaxformer.models.sharding.parameters import MESH_AXES, num_batch_shards

_PRODUCTS = ("dot", "convolution", "custom-call")
Sizes = frozenset[int]


class ExpertSizes(NamedTuple):
    """Axis sizes by which `dense_over_experts` recognizes arrays of experts.

    Attributes:
        chosen: The number of experts per token.
        experts: The number of experts on all devices and the number on one device. Numbers up to
            `chosen` are omitted, because arrays of the chosen experts are not dense.
        tokens: The number of tokens on all devices, on the devices along the mesh axis "expert",
            and on one device.
        features: The numbers of input features and of hidden features.
        kernels: The shapes of a kernel and of its shards, with the sizes in ascending order.
        heads: The numbers of heads on all devices and on one device.
        of_heads: The sizes of the other axes of attention's arrays: head_dim, tokens per sequence.
        layers: The possible sizes of an axis over layers, from 1 to the number of layers.
    """

    chosen: int
    experts: Sizes
    tokens: Sizes
    features: Sizes
    kernels: frozenset[tuple[int, ...]]
    heads: Sizes = frozenset()
    of_heads: Sizes = frozenset()
    layers: Sizes = frozenset()


def expert_sizes(
    model: LanguageModel, mesh: Mesh, batch_size: int, length: int
) -> list[ExpertSizes]:
    """Returns the axis sizes for each sub-layer with experts (see `chosen_experts`).

    Args:
        model: The model.
        mesh: The device mesh.
        batch_size: The batch size.
        length: Tokens per sequence in one pass.
    """
    found: list[ExpertSizes] = []
    own = batch_size * length // num_batch_shards(mesh)
    tokens = frozenset((batch_size * length, own * mesh.shape["expert"], own))
    architecture = model.architecture
    for part in (architecture, architecture.encoder):
        if part is None:
            continue
        stack = part.stack
        heads = frozenset(n for unit in stack.units for n in _divided(unit, "heads", mesh))
        slots = [x.key_value_size() for x in stack.sublayers]
        of_heads = frozenset((length, *(x.head_dim for x in slots if x is not None)))
        layers = frozenset(range(1, len(stack.layers) + 1))
        for layer, dim in zip(stack.layers, stack.dims, strict=False):
            shapes = dict(list_weight_shapes(layer, dim))
            for sublayer in list_sublayers(layer):
                if chosen := sublayer.chosen_experts():
                    experts, features, kernels = _expert_weight_sizes(sublayer, shapes, mesh)
                    experts = frozenset(n for n in experts if n > chosen)
                    others = (features, kernels, heads, of_heads, layers)
                    found.append(ExpertSizes(chosen, experts, tokens, *others))
    return [sizes for sizes in dict.fromkeys(found) if sizes.experts]


def _expert_weight_sizes(
    sublayer: SubLayer, shapes: Mapping[str, tuple[int, ...]], mesh: Mesh
) -> tuple[Sizes, Sizes, frozenset[tuple[int, ...]]]:
    """Returns the numbers of experts and of features, and the shapes of the experts' kernels.

    The results include the sizes of whole weights and of their shards on one device.
    """
    experts, features, kernels = set(), set(), set()
    for path, axes in sublayer.weight_axes().items():
        shape = shapes.get(f"{sublayer.name}/{path}")
        if shape is None or "experts" not in axes:
            continue
        rest = []
        for size, axis in zip(shape, axes, strict=True):
            if axis == "experts":
                experts |= _divided(size, axis, mesh)
            else:
                rest.append(_divided(size, axis, mesh))
                features |= {size} if axis == "dim" else rest[-1]
        kernels |= {tuple(sorted(pair)) for pair in product(*rest) if len(pair) == 2}
    return frozenset(experts), frozenset(features), frozenset(kernels)


def _divided(size: int, axis: WeightAxis, mesh: Mesh) -> Sizes:
    """Returns the size of a weight's axis on all devices and on one device."""
    along = MESH_AXES[axis]
    return frozenset((size, size // mesh.shape[along] if isinstance(along, str) else size))


def dense_over_experts(text: str, sizes: ExpertSizes) -> list[str]:
    """Returns a program's arrays [experts, tokens, features], as text such as "f32[8,1024,64]".

    Args:
        text: The compiled program.
        sizes: The axis sizes of the model; see `ExpertSizes`.
    """
    # {(dtype, shape): whether a matrix product reads or returns such an array}.
    arrays: dict[tuple[str, tuple[int, ...]], bool] = {}
    for lines in computations(text)[0].values():
        for line in lines.values():
            is_product = line.operation in _PRODUCTS
            operands = [lines[x] for x in line.operands if x in lines] if is_product else []
            for array in (array for one in (line, *operands) for array in one.arrays):
                key = array.dtype, array.sizes
                arrays[key] = is_product or arrays.get(key, False)
    return sorted(
        f"{dtype}[{','.join(map(str, shape))}]"
        for (dtype, shape), is_of_product in arrays.items()
        if _is_dense(shape, sizes, is_of_product)
    )


def _is_dense(shape: tuple[int, ...], sizes: ExpertSizes, is_of_product: bool) -> bool:
    """Returns whether the axes of a shape are experts, tokens and features, in any order.

    A scan stores arrays [layers, tokens, features], which no matrix product uses directly.
    Therefore, if `sizes.layers` contains the number of experts, only operands and results of matrix
    products are dense.
    """
    tokens = {n * times for n in sizes.tokens for times in (1, sizes.chosen)}
    for axis, experts in enumerate(shape):
        rest = [n for n in shape[:axis] + shape[axis + 1 :] if n != 1]
        is_layer = experts in sizes.layers and not is_of_product
        if experts not in sizes.experts or is_layer or _is_kernel(rest, sizes):
            continue
        widths = sizes.features - (sizes.of_heads if experts in sizes.heads else frozenset())
        if any(width in widths and prod(rest) // width in tokens for width in rest):
            return True
    return False


def _is_kernel(rest: list[int], sizes: ExpertSizes) -> bool:
    """Returns whether an array with axes `rest` is a kernel or a stack of kernels."""
    return any(
        tuple(sorted(pair)) in sizes.kernels and prod(rest) // prod(pair) in sizes.layers | {1}
        for pair in combinations(rest, 2)
    )
