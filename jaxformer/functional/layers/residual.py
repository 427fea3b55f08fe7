"""The parts of a layer: sub-layers with their norms and residuals.

    pre:     y = x + F(Norm(x))
    post:    y = Norm(x + F(x))
    output:  y = x + Norm(F(x))

With `output_norm` the output of F has a second norm, as in Gemma 2. A Transformer block is
(`Residual(attention)`, `Residual(feed-forward layer)`).

Reference:
    Notes, lecture 11 §3; OLMo 2 2024; Gemma 2 2024.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.dropout import dropout
from jaxformer.functional.layers.norms import Norm
from jaxformer.functional.layers.sublayer import At, Initial, Output, SubLayer
from jaxformer.functional.taps import NO_TAP, Tap
from jaxformer.functional.trees import Weights, split_key


class LayerAt(NamedTuple):
    """Where a layer is called.

    Attributes:
        contexts: the context of each sub-layer.
        states: what the layer kept of earlier tokens, by the sub-layer's name.
        dropout_key: a random key, which means training; None: no dropout.
        tap: captures and replaces values.
        sums: the names of the residual stream after each of these sub-layers.
    """

    contexts: Mapping[SubLayer, Any]
    states: Mapping[str, Any] = {}
    dropout_key: PRNGKeyArray | None = None
    tap: Tap = NO_TAP
    sums: tuple[str, ...] = ()

    def run(
        self, sublayer: SubLayer, weights: Weights, x: Float[Array, "*batch length dim"]
    ) -> Output:
        """Calls a sub-layer in its context and with its state."""
        at = At(self.contexts[sublayer], self.states.get(sublayer.name), self.tap)
        output = sublayer(weights[sublayer.name], x, at)
        has_state = output.state is not None
        return output._replace(state={sublayer.name: output.state} if has_state else {})


@dataclass(frozen=True)
class Residual:
    """A sub-layer F with its norms and its residual; see the module.

    Attributes:
        sublayer: F.
        norm: the norm at `norm_position`; None: there is none.
        norm_position: before F, after the sum, or on the output of F.
        output_norm: one more norm on the output of F, or None.
        adds: whether x is added. Without it, this is the half-built decoder of lecture 10.
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
        self, weights: Weights, x: Float[Array, "*batch length dim"], at: LayerAt
    ) -> Output:
        """Computes x + F(Norm(x)), or another form of the module."""
        output = at.run(self.sublayer, weights, self.input_of(self.sublayer, weights, x))
        y = self._norm_at("output", weights, output.x)
        if self.output_norm is not None:
            y = self.output_norm(weights[f"{self.sublayer.name}_output_norm"], y)
        y = dropout(at.dropout_key, y, self.dropout)
        y = self._norm_at("post", weights, x + y if self.adds else y)
        return output._replace(x=at.tap(at.sums[0], y))

    def input_of(
        self, sublayer: SubLayer, weights: Weights, x: Float[Array, "*batch dim"]
    ) -> Float[Array, "*batch dim"]:
        """Computes what the sub-layer reads: Norm(x) or x."""
        return self._norm_at("pre", weights, x)

    def _norm_at(
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
        reads_sum: sub-layers that read the sum so far instead, with a norm of their own, such as
            cross-attention between the two.
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
        self, weights: Weights, x: Float[Array, "*batch length dim"], at: LayerAt
    ) -> Output:
        """Adds the outputs of all sub-layers to their common input."""
        y, state, auxiliary = x, {}, {}
        keys = split_key(at.dropout_key, len(self.sublayers))
        for sublayer, key, point in zip(self.sublayers, keys, at.sums, strict=True):
            read = y if sublayer in self.reads_sum else x
            output = at.run(sublayer, weights, self.input_of(sublayer, weights, read))
            y = at.tap(point, y + dropout(key, output.x, self.dropout))
            state, auxiliary = {**state, **output.state}, {**auxiliary, **output.auxiliary}
        return Output(y, state, auxiliary)

    def input_of(
        self, sublayer: SubLayer, weights: Weights, x: Float[Array, "*batch dim"]
    ) -> Float[Array, "*batch dim"]:
        """Computes what a sub-layer reads: Norm(x) or x."""
        return x if self.norm is None else self.norm(weights[self._norm_of(sublayer)], x)

    def _norm_of(self, sublayer: SubLayer) -> str:
        is_shared = self.shares_norm and sublayer not in self.reads_sum
        return f"{(self.sublayers[0] if is_shared else sublayer).name}_norm"
