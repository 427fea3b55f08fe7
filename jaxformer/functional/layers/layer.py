"""One layer: a sequence of parts, each a sub-layer F with its norm and residual.

    pre:     y = x + F(Norm(x))
    post:    y = Norm(x + F(x))
    output:  y = x + Norm(F(x))

The Transformer block is (`Residual(attention)`, `Residual(feed-forward layer)`), and `run_layer`
computes it. With `output_norm` the output of F has a second norm, as in Gemma 2.

Reference:
    Notes, lecture 11 §3; OLMo 2 2024; Gemma 2 2024.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial, reduce
from typing import Any, Literal, NamedTuple

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.arguments import checks_arguments
from jaxformer.functional.dropout import dropout
from jaxformer.functional.layers.norms import Norm
from jaxformer.functional.layers.sublayer import At, Initial, Output, SubLayer, with_contexts
from jaxformer.functional.linear.kernels import is_kernel
from jaxformer.functional.taps import NO_HOOKS, Hooks, Tap
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights, split_key


class PartAt(NamedTuple):
    """What a part of a layer reads besides its weights and x.

    Attributes:
        tokens: the pass, with the contexts of the sub-layers.
        states: the state of each sub-layer after the earlier tokens, by name.
        dropout_key: a random key, which means training; None: no dropout.
        tap: captures and replaces values.
        points: for each sub-layer of the part, the name by which the residual stream after it is
            captured.
    """

    tokens: Tokens
    states: Mapping[str, Any]
    dropout_key: PRNGKeyArray | None
    tap: Tap
    points: tuple[str, ...]

    def of(self, sublayer: SubLayer) -> At:
        """Returns what a sub-layer of the part reads."""
        context, state = self.tokens.contexts[sublayer], self.states.get(sublayer.name)
        return At(context, state, self.tap, self.tokens.run.keeps_states)


@dataclass(frozen=True)
class Residual:
    """A sub-layer F with its norms and its residual; see the module.

    Attributes:
        sublayer: F.
        norm: the norm at `norm_position`; None: there is none.
        norm_position: before F, after the sum, or on the output of F.
        output_norm: one more norm on the output of F, or None.
        adds: whether x is added. If not, F may return another number of features.
        dropout: the dropout rate of the output of F.
    """

    sublayer: SubLayer
    norm: Norm | None = None
    norm_position: Literal["pre", "post", "output"] = "pre"
    output_norm: Norm | None = None
    adds: bool = True
    dropout: float = 0.0

    @property
    def sublayers(self) -> tuple[SubLayer, ...]:
        """The sub-layers."""
        return (self.sublayer,)

    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """Returns initial weights, by the names of the sub-layer and of its norms."""
        name, output_dim = self.sublayer.name, self.output_dim(dim)
        weights = {name: self.sublayer.init(key, dim, initial)}
        if self.norm is not None:
            is_before = self.norm_position == "pre"
            weights[f"{name}_norm"] = self.norm.init(dim if is_before else output_dim)
        if self.output_norm is not None:
            weights[f"{name}_output_norm"] = self.output_norm.init(output_dim)
        return weights

    def output_dim(self, dim: int) -> int:
        """Returns how many features the part returns if it reads `dim`."""
        return self.sublayer.output_dim(dim)

    def __call__(
        self, weights: Weights, x: Float[Array, "*batch length dim"], at: PartAt
    ) -> Output:
        """Computes x + F(Norm(x)), or another form of the module."""
        name, function = self.sublayer.name, self.sublayer
        y, state, auxiliary = function(
            weights[name], self._norm("pre", weights, x), at.of(function)
        )
        y = self._norm("output", weights, y)
        if self.output_norm is not None:
            y = self.output_norm(weights[f"{name}_output_norm"], y)
        y = dropout(at.dropout_key, y, self.dropout)
        y = self._norm("post", weights, x + y if self.adds else y)
        return Output(at.tap(at.points[0], y), _by_name(function, state), auxiliary)

    def input_of(
        self, sublayer: SubLayer, weights: Weights, x: Float[Array, "*batch dim"]
    ) -> Float[Array, "*batch dim"]:
        """Computes what the sub-layer reads: Norm(x) or x."""
        return self._norm("pre", weights, x)

    def _norm(
        self, position: str, weights: Weights, x: Float[Array, "*batch dim"]
    ) -> Float[Array, "*batch dim"]:
        """Computes Norm(x) if the norm stands at this position; otherwise returns x."""
        if self.norm is None or position != self.norm_position:
            return x
        return self.norm(weights[f"{self.sublayer.name}_norm"], x)


@dataclass(frozen=True)
class Parallel:
    """Sub-layers that read the same input: y = x + F₁(Norm₁(x)) + F₂(Norm₂(x)).

    Attributes:
        sublayers: F₁, F₂, …
        norm: the norm of each input (GPT-NeoX); None: there is none.
        shares_norm: whether all inputs share the norm of the first (GPT-J).
        dropout: the dropout rate of each output.
        reads_sum: sub-layers that read, instead of x, the sum of x and the outputs before, with a
            norm of their own: cross-attention between self-attention and the feed-forward layer.
    """

    sublayers: tuple[SubLayer, ...]
    norm: Norm | None = None
    shares_norm: bool = False
    dropout: float = 0.0
    reads_sum: tuple[SubLayer, ...] = ()

    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """Returns initial weights, by the names of the sub-layers and of their norms."""
        keys, weights = jax.random.split(key, len(self.sublayers)), {}
        for sublayer, part_key in zip(self.sublayers, keys, strict=True):
            weights[sublayer.name] = sublayer.init(part_key, dim, initial)
            if self.norm is not None:
                weights[self._norm_of(sublayer)] = self.norm.init(dim)
        return weights

    def output_dim(self, dim: int) -> int:
        """Returns `dim`: a sum has the features of its input."""
        return dim

    def __call__(
        self, weights: Weights, x: Float[Array, "*batch length dim"], at: PartAt
    ) -> Output:
        """Adds the outputs of all sub-layers to their common input."""
        total, states, auxiliary = x, {}, {}
        keys = split_key(at.dropout_key, len(self.sublayers))
        for function, key, point in zip(self.sublayers, keys, at.points, strict=True):
            read = self.input_of(function, weights, total if function in self.reads_sum else x)
            y, state, sums = function(weights[function.name], read, at.of(function))
            total = at.tap(point, total + dropout(key, y, self.dropout))
            states, auxiliary = {**states, **_by_name(function, state)}, {**auxiliary, **sums}
        return Output(total, states, auxiliary)

    def input_of(
        self, sublayer: SubLayer, weights: Weights, x: Float[Array, "*batch dim"]
    ) -> Float[Array, "*batch dim"]:
        """Computes what a sub-layer reads: Norm(x) or x."""
        return x if self.norm is None else self.norm(weights[self._norm_of(sublayer)], x)

    def _norm_of(self, sublayer: SubLayer) -> str:
        is_shared = self.shares_norm and sublayer not in self.reads_sum
        return f"{(self.sublayers[0] if is_shared else sublayer).name}_norm"


def _by_name(sublayer: SubLayer, state: Any) -> dict[str, Any]:
    """Returns the state by the name of its sub-layer; nothing if there is none."""
    return {} if state is None else {sublayer.name: state}


Layer = tuple[Residual | Parallel, ...]


class LayerInputs(NamedTuple):
    """What one layer reads besides x and its weights.

    Attributes:
        dropout_key: a random key, which means training; None: no dropout.
        states: the state of each sub-layer after the earlier tokens, by name.
        hooks: the points to capture and patch.
    """

    dropout_key: PRNGKeyArray | None = None
    states: Mapping[str, Any] = {}
    hooks: Hooks = NO_HOOKS


class LayerOutput(NamedTuple):
    """What one layer returns.

    Attributes:
        x: the residual stream after the layer.
        states: the state of each sub-layer that has one, by name.
        captured: {name: value} for the captured points.
        auxiliary: sums for the objective, by name.
    """

    x: Float[Array, "*batch length dim"]
    states: Mapping[str, Any]
    captured: dict[str, Array]
    auxiliary: dict[str, Array]


def run_layer(
    layer: Layer,
    tokens: Tokens,
    weights: Weights,
    x: Float[Array, "*batch length dim"],
    inputs: LayerInputs = LayerInputs(),  # noqa: B008 (never changed)
) -> LayerOutput:
    """Computes one layer: each part reads the residual stream x and returns the new one.

    Args:
        layer: the parts of the layer.
        tokens: the pass, with the contexts of the sub-layers.
        weights: the weights of the sub-layers and norms, by name.
        x: the residual stream.
        inputs: dropout key, states and hooks.
    """
    tap, states, auxiliary = tokens.tap(inputs.hooks), {}, {}
    keys = split_key(inputs.dropout_key, len(layer))
    x = tap("block.input", x)
    for part, key, points in zip(layer, keys, residual_points(layer), strict=True):
        at = PartAt(tokens, inputs.states, key, tap, points)
        x, state, sums = part(weights, x, at)
        states, auxiliary = {**states, **state}, {**auxiliary, **sums}
    return LayerOutput(x, states, tap.captured, auxiliary)


def check_block(
    weights: Any, x: Float[Any, "*batch dim"], layer: tuple, tokens: Tokens, shared: Any
) -> None:
    """Raises ValueError unless the weights are those of the layer."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights is a {type(weights).__name__}; it must be a dictionary")
    if not isinstance(shared, Mapping):
        raise TypeError(f"shared is a {type(shared).__name__}; it must be a dictionary")
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
    weights: Weights,
    x: Float[Array, "*batch length dim"],
    layer: tuple,
    tokens: Tokens,
    shared: Weights = {},  # noqa: B006 (never changed)
) -> Output:
    """Checks that the weights fit the layer, and computes this layer alone.

    Models call `run_layer`, which does not check.

    Args:
        weights: the weights of its sub-layers and norms, by name.
        x: the residual stream.
        layer: the parts of the layer, each a `Residual` or a `Parallel`.
        tokens: the tokens, such as `Tokens.of_sequences(Inputs(x), Run(Execution()))`.
        shared: the weights that all layers of a stack share, such as relative positions.

    Raises:
        ValueError: a size or a part of the weights does not fit.
        TypeError: an argument has another type.
    """
    output = run_layer(layer, with_contexts(sublayers_of(layer), tokens, shared), weights, x)
    return Output(output.x, output.states, output.auxiliary)


def sublayers_of(layer: Layer) -> list[SubLayer]:
    """Returns the sub-layers of a layer, in order."""
    return [sublayer for part in layer for sublayer in part.sublayers]


@cache
def residual_points(layer: Layer) -> tuple[tuple[str, ...], ...]:
    """Returns the names of the residual stream after each sub-layer, for each part of a layer."""
    num = len(sublayers_of(layer))
    names = iter((*("block.middle", *["block.crossed"] * (num - 2))[: num - 1], "block.output"))
    return tuple(tuple(next(names) for _ in part.sublayers) for part in layer)


@cache
def layer_points(layer: Layer) -> tuple[str, ...]:
    """Returns the names of the values of a layer that can be captured or patched, in order."""
    after = [name for names in residual_points(layer) for name in names]
    parts = zip(sublayers_of(layer), after, strict=True)
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
