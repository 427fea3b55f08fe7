"""Finds computations of all experts for all tokens in a compiled program.

A mixture of experts needs k of E experts for each token. A dense program computes all E of them and
multiplies most outputs by 0, as `jax.lax.ragged_dot` does where the compiler has no kernel for it.
Such a program has arrays [experts, tokens, features], in some order of the axes. Their memory and
their time grow with E, not with k.
"""

from itertools import combinations, product
from math import prod
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxformer.doctor.program import computations
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.mesh import num_row_parts

_PRODUCTS = ("dot", "convolution", "custom-call")
Sizes = frozenset[int]


class ExpertSizes(NamedTuple):
    """Sizes of axes, by which arrays of experts, kernels and attention are recognised.

    Attributes:
        chosen: The number of experts of each token.
        experts: The numbers of experts: of all devices, and of one. All are above `chosen`.
        tokens: The numbers of tokens: of all devices, of those along "expert", and of one.
        features: The numbers of features: of the input, and hidden ones.
        kernels: The shapes of a kernel and of its shards, each in ascending order.
        heads: The numbers of heads: of all devices, and of one.
        of_heads: The sizes of the other axes of attention: head_dim, and tokens per row.
        layers: The sizes of an axis of layers.
    """

    chosen: int
    experts: Sizes
    tokens: Sizes
    features: Sizes
    kernels: frozenset[tuple[int, ...]]
    heads: Sizes = frozenset()
    of_heads: Sizes = frozenset()
    layers: Sizes = frozenset()


def expert_sizes(config: ModelConfig, mesh: Mesh, rows: int, length: int) -> list[ExpertSizes]:
    """Returns the sizes for each number of experts that layers of a model have.

    Args:
        config: The config of the model.
        mesh: The mesh.
        rows: Rows of the batch.
        length: Tokens of each row in one pass.
    """
    if not getattr(config, "has_experts", False):
        return []
    stacks: Any = config.resolved.stacks
    found: list[ExpertSizes] = []
    along = {axis: frozenset((1, size)) for axis, size in mesh.shape.items()}
    own = rows * length // num_row_parts(mesh)
    for stack in stacks.values():
        for layer in stack.layers:
            chosen, dim = layer.experts_per_token, layer.embed_dim
            experts = _divided(layer.num_experts, along["expert"])
            hidden = _divided(layer.expert_dim or layer.mlp_dim, along["tensor"])
            kernels = product(_divided(dim, along["fsdp"]), hidden)
            sizes = ExpertSizes(
                chosen,
                frozenset(n for n in experts if n > chosen),
                frozenset((rows * length, own * mesh.shape["expert"], own)),
                frozenset((dim, *hidden)),
                frozenset(tuple(sorted(pair)) for pair in kernels),
                frozenset(n for heads in layer.heads for n in _divided(heads, along["tensor"])),
                frozenset((layer.head_dim, length)),
                frozenset(range(1, stack.num_layers + 1)),
            )
            found += [sizes] * bool(sizes.experts)
    return list(dict.fromkeys(found))


def _divided(size: int, parts: Sizes) -> Sizes:
    return frozenset(size // n for n in parts)


def dense_over_experts(text: str, sizes: ExpertSizes) -> list[str]:
    """Returns the arrays [experts, tokens, features] of a program, such as "f32[8,1024,64]".

    Args:
        text: The text of the program.
        sizes: The sizes of these axes.
    """
    arrays: dict[tuple[str, tuple[int, ...]], bool] = {}  # whether a product has the array
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
    """Returns whether a shape is that of experts, tokens and features.

    A scan stores arrays [layers, tokens, features], which no product reads as they are. If there
    are as many layers as experts, only operands and results of products count.
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
    """Returns whether these axes are those of a kernel, or of the kernels of several layers."""
    return any(
        tuple(sorted(pair)) in sizes.kernels and prod(rest) // prod(pair) in sizes.layers | {1}
        for pair in combinations(rest, 2)
    )
