"""One layer: a sequence of parts, each with sub-layers F, norms and a residual connection.

    pre:     y = x + F(Norm(x))
    post:    y = Norm(x + F(x))
    output:  y = x + Norm(F(x))

A Transformer block is the layer (`Residual(attention)`, `Residual(feed-forward layer)`).
`run_layer` computes a layer. With `output_norm`, a second norm follows F, as in Gemma 2.
`plain.Plain` is a part without a residual connection: y = F(Norm(x)).

Reference:
    Notes, lecture 11 §3; OLMo 2 2024; Gemma 2 2024.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial, reduce
from typing import Any, ClassVar, Literal, NamedTuple

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.arguments import checks_arguments
from jaxformer.functional.dropout import dropout
from jaxformer.functional.hooks import NO_HOOK, NO_HOOKS, HookPoints, Hooks
from jaxformer.functional.layers.norms import Norm, apply_norm, divisor_point
from jaxformer.functional.layers.sublayer import At, Initial, Output, SubLayer, with_contexts
from jaxformer.functional.linear.kernels import is_kernel
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights, split_key
from jaxformer.terminal import kind_of


class PartAt(NamedTuple):
    """Arguments of a part of a layer, in addition to its weights and its input x.

    Attributes:
        tokens: the tokens of the forward pass, with the masks and other contexts of the
            sub-layers.
        states: the state of each sub-layer after the earlier tokens, by name.
        dropout_key: a random key for dropout in training; None disables dropout.
        hook: the `HookPoints` of the forward pass, which captures and replaces values.
        points: for each sub-layer of the part, the hook point of the residual stream after the
            sub-layer.
    """

    tokens: Tokens
    states: Mapping[str, Any]
    dropout_key: PRNGKeyArray | None
    hook: HookPoints
    points: tuple[str, ...]

    def of(self, sublayer: SubLayer) -> At:
        """Returns the arguments with which this part of a layer calls a sub-layer."""
        context, state = self.tokens.contexts[sublayer], self.states.get(sublayer.name)
        return At(context, state, self.hook, self.tokens.run.keeps_states)


@dataclass(frozen=True)
class Residual:
    """A sub-layer F with norms and a residual connection; see the formulas of this module.

    Attributes:
        sublayer: F.
        norm: the norm at `norm_position`, or None.
        norm_position: "pre" (before F), "post" (after the sum) or "post_sublayer" (after F).
        output_norm: an additional norm of the output of F, or None.
        dropout: the dropout rate of the output of F.
        adds: whether x is added to the output of F. True for `Residual`, False for `Plain`.
    """

    adds: ClassVar[bool] = True

    sublayer: SubLayer
    norm: Norm | None = None
    norm_position: Literal["pre", "post", "post_sublayer"] = "pre"
    output_norm: Norm | None = None
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
        """Returns `dim`, because the residual connection adds input and output."""
        return dim

    def __call__(
        self, weights: Weights, x: Float[Array, "*batch length dim"], at: PartAt
    ) -> Output:
        """Computes x + F(Norm(x)), or a variant with norms at other positions."""
        name, function = self.sublayer.name, self.sublayer
        read = self.sublayer_input(function, weights, x, at.hook)
        y, state, auxiliary = function(weights[name], read, at.of(function))
        y = x + self.sublayer_output(weights, y, at)
        y = at.hook(at.points[0], self._norm("post", weights, y, at.hook))
        return Output(y, by_name(function, state), auxiliary)

    def hook_points(self, after: Sequence[str]) -> tuple[str, ...]:
        """Returns the names of the hook points.

        Args:
            after: the hook point of the residual stream after the part.
        """
        name = self.sublayer.name
        own = () if self.norm is None else (divisor_point(f"{name}_norm"),)
        output = () if self.output_norm is None else (divisor_point(f"{name}_output_norm"),)
        if self.norm_position == "pre":
            return (*own, *self.sublayer.hook_points, *output, *after)
        return (*self.sublayer.hook_points, *own, *output, *after)

    def sublayer_input(
        self,
        sublayer: SubLayer,
        weights: Weights,
        x: Float[Array, "*batch dim"],
        hook: HookPoints = NO_HOOK,
    ) -> Float[Array, "*batch dim"]:
        """Computes the input of the sub-layer: Norm(x) or x."""
        return self._norm("pre", weights, x, hook)

    def sublayer_output(
        self, weights: Weights, y: Float[Array, "*batch dim"], at: PartAt
    ) -> Float[Array, "*batch dim"]:
        """Applies the norms that follow F, and dropout, to the output y of F."""
        y = self._norm("post_sublayer", weights, y, at.hook)
        y = apply_norm(self.output_norm, weights, f"{self.sublayer.name}_output_norm", y, at.hook)
        return dropout(at.dropout_key, y, self.dropout)

    def _norm(
        self, position: str, weights: Weights, x: Float[Array, "*batch dim"], hook: HookPoints
    ) -> Float[Array, "*batch dim"]:
        """Computes Norm(x) if `norm_position` is `position`; otherwise returns x."""
        norm = self.norm if position == self.norm_position else None
        return apply_norm(norm, weights, f"{self.sublayer.name}_norm", x, hook)


@dataclass(frozen=True)
class Parallel:
    """Sub-layers that read the same input: y = x + F₁(Norm₁(x)) + F₂(Norm₂(x)).

    Attributes:
        sublayers: F₁, F₂, …
        norm: the norm of each input (GPT-NeoX), or None.
        shares_norm: whether all sub-layers share one norm of the input (GPT-J).
        dropout: the dropout rate of each output.
        reads_sum: the sub-layers whose input is the sum of x and the outputs of all earlier
            sub-layers, such as cross-attention between self-attention and the feed-forward layer.
            Each sub-layer in `reads_sum` has a separate norm.
        adds: always True, because x is added to the outputs.
    """

    adds: ClassVar[bool] = True

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
                weights[self.norm_name(sublayer)] = self.norm.init(dim)
        return weights

    def output_dim(self, dim: int) -> int:
        """Returns `dim`, because the residual connection adds input and output."""
        return dim

    def __call__(
        self, weights: Weights, x: Float[Array, "*batch length dim"], at: PartAt
    ) -> Output:
        """Adds the outputs of all sub-layers to their common input."""
        total, states, auxiliary = x, {}, {}
        keys = split_key(at.dropout_key, len(self.sublayers))
        for function, key, point in zip(self.sublayers, keys, at.points, strict=True):
            before = total if function in self.reads_sum else x
            read = self.sublayer_input(function, weights, before, at.hook)
            y, state, sums = function(weights[function.name], read, at.of(function))
            total = at.hook(point, total + dropout(key, y, self.dropout))
            states, auxiliary = {**states, **by_name(function, state)}, {**auxiliary, **sums}
        return Output(total, states, auxiliary)

    def hook_points(self, after: Sequence[str]) -> tuple[str, ...]:
        """Returns the names of the hook points.

        Args:
            after: for each sub-layer, the hook point of the residual stream after the sub-layer.
        """
        points: list[str] = []
        for sublayer, point in zip(self.sublayers, after, strict=True):
            if self.norm is not None:
                points.append(divisor_point(self.norm_name(sublayer)))
            points += [*sublayer.hook_points, point]
        return tuple(dict.fromkeys(points))

    def sublayer_input(
        self,
        sublayer: SubLayer,
        weights: Weights,
        x: Float[Array, "*batch dim"],
        hook: HookPoints = NO_HOOK,
    ) -> Float[Array, "*batch dim"]:
        """Computes the input of a sub-layer: Norm(x) or x."""
        return apply_norm(self.norm, weights, self.norm_name(sublayer), x, hook)

    def norm_name(self, sublayer: SubLayer) -> str:
        """Returns the name of the norm weights of a sub-layer's input."""
        is_shared = self.shares_norm and sublayer not in self.reads_sum
        return f"{(self.sublayers[0] if is_shared else sublayer).name}_norm"


def by_name(sublayer: SubLayer, state: Any) -> dict[str, Any]:
    """Returns {name of the sub-layer: state}; an empty dictionary if the state is None."""
    return {} if state is None else {sublayer.name: state}


Layer = tuple[Residual | Parallel, ...]


class LayerInputs(NamedTuple):
    """Arguments of one layer besides x and its weights.

    Attributes:
        dropout_key: a random key for dropout in training; None disables dropout.
        states: the state of each sub-layer after the earlier tokens, by name.
        hooks: the hook points to capture and patch.
    """

    dropout_key: PRNGKeyArray | None = None
    states: Mapping[str, Any] = {}
    hooks: Hooks = NO_HOOKS


class LayerOutput(NamedTuple):
    """Result of one layer.

    Attributes:
        x: the residual stream after the layer.
        states: {name of a sub-layer: state} for the sub-layers with a state.
        captured: {name: value} for the captured hook points.
        auxiliary: terms of the training objective, by name.
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
    """Computes one layer by applying its parts to the residual stream x in order.

    Args:
        layer: the sub-layers with their norms and residuals.
        tokens: the tokens of the forward pass, with the contexts of the sub-layers.
        weights: the weights of the sub-layers and norms, by name.
        x: the residual stream.
        inputs: dropout key, states and hooks.
    """
    hook, states, auxiliary = tokens.hook(inputs.hooks), {}, {}
    keys = split_key(inputs.dropout_key, len(layer))
    x = hook("block.input", x)
    for part, key, points in zip(layer, keys, residual_hook_points(layer), strict=True):
        at = PartAt(tokens, inputs.states, key, hook, points)
        x, state, sums = part(weights, x, at)
        states, auxiliary = {**states, **state}, {**auxiliary, **sums}
    return LayerOutput(x, states, hook.captured, auxiliary)


def check_block(
    weights: Any, x: Float[Any, "*batch dim"], layer: tuple, tokens: Tokens, shared: Any
) -> None:
    """Raises ValueError if the weights do not have the names and shapes of the layer."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights is {kind_of(weights)}; weights must be a dictionary")
    if not isinstance(shared, Mapping):
        raise TypeError(f"shared is {kind_of(shared)}; shared must be a dictionary")
    if not all(isinstance(part, Residual | Parallel) for part in layer):
        raise TypeError("layer must be a tuple of Residual and Parallel")
    wanted = dict(list_weight_shapes(layer, x.shape[-1]))
    leaves = jax.tree_util.tree_leaves_with_path(dict(weights), is_leaf=is_kernel)
    given = {jax.tree_util.keystr(p, simple=True, separator="/"): y.shape for p, y in leaves}
    for name in wanted.keys() | given.keys():
        if wanted.get(name) != given.get(name):
            is_, must = (shapes.get(name, "absent") for shapes in (given, wanted))
            raise ValueError(f"weights: the shape of {name} must be {must}, but is {is_}")


@checks_arguments(check_block)
def block(
    weights: Weights,
    x: Float[Array, "*batch length dim"],
    layer: tuple,
    tokens: Tokens,
    shared: Weights = {},  # noqa: B006 (never changed)
) -> Output:
    """Computes one layer, after checking that its weights have the right names and shapes.

    Models call `run_layer`, which skips these checks.

    Args:
        weights: the weights of the sub-layers and norms, by name.
        x: the residual stream.
        layer: the parts of the layer, each a `Residual` or a `Parallel`.
        tokens: the tokens of the forward pass, such as
            `Tokens.from_sequences(Inputs(x), Run(Execution()))`.
        shared: the weights that all layers of a stack share, such as a relative position bias.

    Raises:
        ValueError: The weights do not fit the layer.
        TypeError: An argument has a wrong type.
    """
    output = run_layer(layer, with_contexts(list_sublayers(layer), tokens, shared), weights, x)
    return Output(output.x, output.states, output.auxiliary)


def list_sublayers(layer: Layer) -> list[SubLayer]:
    """Returns the sub-layers of a layer, in order."""
    return [sublayer for part in layer for sublayer in part.sublayers]


@cache
def residual_hook_points(layer: Layer) -> tuple[tuple[str, ...], ...]:
    """Returns the hook points of the residual stream after the sub-layers of each part."""
    num = len(list_sublayers(layer))
    names = iter((*("block.middle", *["block.crossed"] * (num - 2))[: num - 1], "block.output"))
    return tuple(tuple(next(names) for _ in part.sublayers) for part in layer)


@cache
def layer_hook_points(layer: Layer) -> tuple[str, ...]:
    """Returns the names of all hook points of a layer, in order of computation."""
    parts = zip(layer, residual_hook_points(layer), strict=True)
    return ("block.input", *(x for part, after in parts for x in part.hook_points(after)))


def init_layer(layer: Layer, initial: Initial, dim: int, key: PRNGKeyArray) -> Weights:
    """Returns the initial weights of a layer, by the names of its sub-layers and norms."""
    keys, weights = jax.random.split(key, len(layer)), {}
    for part, part_key in zip(layer, keys, strict=True):
        weights |= part.init(part_key, dim, initial)
        dim = part.output_dim(dim)
    return weights


def input_dims(layer: Layer, dim: int) -> dict[str, int]:
    """Returns {name of a sub-layer: number of its input features}.

    `dim` is the number of input features of the layer.
    """
    dims = {}
    for part in layer:
        dims |= {sublayer.name: dim for sublayer in part.sublayers}
        dim = part.output_dim(dim)
    return dims


def output_dim(layer: Layer, dim: int) -> int:
    """Returns the number of output features of a layer for `dim` input features."""
    return reduce(lambda dim, part: part.output_dim(dim), layer, dim)


@cache
def list_weight_shapes(layer: Layer, dim: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Returns the pairs (path, shape) of all weights of a layer."""
    init = partial(init_layer, layer, Initial(1), dim)
    leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(init, jax.random.key(0)))
    return tuple(
        (jax.tree_util.keystr(path, simple=True, separator="/"), x.shape) for path, x in leaves
    )
