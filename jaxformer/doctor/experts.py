"""Finds computations of all experts for all tokens in a compiled program.

A mixture of experts needs k of E experts for each token. A dense program computes all E of them and
multiplies most outputs by 0, as `jax.lax.ragged_dot` does where the compiler has no kernel for it.
Such a program has arrays [experts, tokens, features], in some order of the axes. Their memory and
their time grow with E, not with k.
"""

from collections.abc import Iterator
from itertools import combinations, product
from math import prod
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxformer.doctor.hlo import Computations, HloArray, computations
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
    found: dict[ExpertSizes, Sizes] = {}
    along = {axis: frozenset((1, size)) for axis, size in mesh.shape.items()}
    own = rows * length // num_row_parts(mesh)
    for stack in stacks.values():
        for layer in stack.layers:
            total, dim = layer.num_experts, layer.embed_dim
            hidden = _divided(layer.expert_dim or layer.mlp_dim, along["tensor"])
            sizes = ExpertSizes(
                layer.experts_per_token,
                frozenset(
                    n for n in _divided(total, along["expert"]) if n > layer.experts_per_token
                ),
                frozenset((rows * length, own * mesh.shape["expert"], own)),
                frozenset((dim, *hidden)),
                frozenset(
                    tuple(sorted(pair)) for pair in product(_divided(dim, along["fsdp"]), hidden)
                ),
                frozenset(n for heads in layer.heads for n in _divided(heads, along["tensor"])),
                frozenset((layer.head_dim, length)),
                frozenset(range(1, stack.num_layers + 1)),
            )
            found[sizes] = sizes.experts
    return [sizes for sizes, experts in found.items() if experts]


def _divided(size: int, parts: Sizes) -> Sizes:
    return frozenset(size // n for n in parts)


def dense_over_experts(text: str, sizes: ExpertSizes) -> list[str]:
    """Returns the arrays [experts, tokens, features] of a program, such as "f32[8,1024,64]".

    Args:
        text: The text of the program.
        sizes: The sizes of these axes.
    """
    found, _ = computations(text)
    of_products = {(x.dtype, x.sizes) for x in _arrays(found, only_products=True)}
    arrays = {(x.dtype, x.sizes) for x in _arrays(found)}
    return sorted(
        f"{dtype}[{','.join(map(str, shape))}]"
        for dtype, shape in arrays | of_products
        if _is_dense(shape, sizes, (dtype, shape) in of_products)
    )


def _arrays(found: Computations, *, only_products: bool = False) -> Iterator[HloArray]:
    """Yields the results of all instructions, or the results and operands of products."""
    for lines in found.values():
        for line in lines.values():
            if not only_products or line.operation in _PRODUCTS:
                yield from line.arrays
            if only_products and line.operation in _PRODUCTS:
                for name in line.operands:
                    yield from lines[name].arrays if name in lines else ()


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
