"""One layer: a sequence of parts, each a sub-layer with its norm and residual.

The Transformer block is (`Residual(attention)`, `Residual(feed-forward layer)`).
"""

from collections.abc import Mapping
from functools import cache, partial, reduce
from typing import Any

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.arguments import checks_arguments
from jaxformer.functional.attention.contexts import Pass
from jaxformer.functional.layers.residual import LayerAt, Parallel, Residual
from jaxformer.functional.layers.sublayer import Initial, Output, SubLayer
from jaxformer.functional.linear.kernels import is_kernel
from jaxformer.functional.trees import Weights, split_key

Layer = tuple[Residual | Parallel, ...]


def run_layer(
    layer: Layer, weights: Weights, x: Float[Array, "*batch length dim"], at: LayerAt
) -> Output:
    """Computes one layer: x ← x + F(Norm(x)) for each of its sub-layers F.

    Args:
        layer: the parts of the layer.
        weights: the weights of its sub-layers and norms, by name.
        x: the residual stream.
        at: what the sub-layers read, besides x.

    Returns:
        The residual stream after the layer, and the state of each sub-layer that has one, by name.
    """
    states, auxiliary, sums = {}, {}, sum_points(layer)
    keys = split_key(at.dropout_key, len(layer))
    x = at.tap("block.input", x)
    for part, key in zip(layer, keys, strict=True):
        here, sums = sums[: len(part.sublayers)], sums[len(part.sublayers) :]
        output = part(weights, x, at._replace(dropout_key=key, sums=here))
        x = output.x
        states, auxiliary = {**states, **output.state}, {**auxiliary, **output.auxiliary}
    return Output(x, states, auxiliary)


def check_block(weights: Any, x: Float[Any, "*batch dim"], layer: tuple, **_: object) -> None:
    """Raises ValueError unless the weights are those of the layer."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights is a {type(weights).__name__}; it must be a dictionary")
    if not all(isinstance(part, Residual | Parallel) for part in layer):
        raise TypeError("layer must be a tuple of Residual and Parallel")
    wanted = dict(weight_shapes_of(layer, x.shape[-1]))
    leaves = jax.tree_util.tree_leaves_with_path(dict(weights), is_leaf=is_kernel)
    given = {jax.tree_util.keystr(p, simple=True, separator="/"): y.shape for p, y in leaves}
    for name in wanted.keys() | given.keys():
        if wanted.get(name) != given.get(name):
            is_, must = (shapes.get(name, "absent") for shapes in (given, wanted))
            raise ValueError(f"weights: {name} is {is_}; for this layer it must be {must}")


@checks_arguments(check_block)
def block(
    weights: Weights, x: Float[Array, "*batch length dim"], layer: tuple, at: LayerAt
) -> Output:
    """Computes one layer, as `run_layer` does, after checking that the weights fit it.

    Args:
        weights: the weights of its sub-layers and norms, by name.
        x: the residual stream.
        layer: the parts of the layer, each a `Residual` or a `Parallel`.
        at: what the sub-layers read, besides x; see `layer_at`.

    Raises:
        ValueError: a size or a part of the weights does not fit.
        TypeError: an argument has another type.
    """
    return run_layer(layer, weights, x, at)


def layer_at(layer: Layer, tokens: Pass, shared: Weights | None = None) -> LayerAt:
    """Returns what the sub-layers of a layer read in a pass, without earlier tokens.

    Args:
        layer: the parts of the layer.
        tokens: the tokens of the pass.
        shared: the weights that all layers of a stack share, if there are any.
    """
    return LayerAt({x: x.context(tokens, shared or {}) for x in sublayers_of(layer)})


def sublayers_of(layer: Layer) -> list[SubLayer]:
    """Returns the sub-layers of a layer, in order."""
    return [sublayer for part in layer for sublayer in part.sublayers]


@cache
def sum_points(layer: Layer) -> tuple[str, ...]:
    """Returns the names of the residual stream after each sub-layer of a layer."""
    num = len(sublayers_of(layer))
    return (*("block.middle", *["block.crossed"] * (num - 2))[: num - 1], "block.output")


@cache
def layer_points(layer: Layer) -> tuple[str, ...]:
    """Returns the names of the values of a layer that can be captured or patched, in order."""
    parts = zip(sublayers_of(layer), sum_points(layer), strict=True)
    return ("block.input", *(x for sublayer, point in parts for x in (*sublayer.points, point)))


def init_layer(layer: Layer, initial: Initial, dim: int, key: PRNGKeyArray) -> Weights:
    """Returns the initial weights of a layer, by the names of its sub-layers and norms."""
    keys, weights = jax.random.split(key, len(layer)), {}
    for part, part_key in zip(layer, keys, strict=True):
        weights |= part.init(part_key, dim, initial)
        dim = part.output_dim(dim)
    return weights


def input_dims(layer: Layer, dim: int) -> dict[str, int]:
    """Returns how many features each sub-layer reads, by name, in a layer that reads `dim`."""
    dims = {}
    for part in layer:
        dims |= {sublayer.name: dim for sublayer in part.sublayers}
        dim = part.output_dim(dim)
    return dims


def output_dim(layer: Layer, dim: int) -> int:
    """Returns how many features a layer returns if it reads `dim`."""
    return reduce(lambda dim, part: part.output_dim(dim), layer, dim)


@cache
def weight_shapes_of(layer: Layer, dim: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Returns (path, shape) of the weights of a layer."""
    init = partial(init_layer, layer, Initial(None), dim)
    leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(init, jax.random.key(0)))
    return tuple(
        (jax.tree_util.keystr(path, simple=True, separator="/"), x.shape) for path, x in leaves
    )
