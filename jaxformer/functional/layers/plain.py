"""Layers without a residual connection, such as recurrent layers.

    y = F(Norm(x))

The first decoder of lecture 10 §8 consists of such layers, as a counter-example to layers with a
residual connection. The feed-forward layer of this decoder applies the activation after both linear
layers.

Reference:
    Notes, lecture 10 §7–8. Plain networks: He et al. 2016 (arXiv:1512.03385).
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.layers.attention import Attention
from jaxformer.functional.layers.feedforward import (
    FeedForward,
    activate,
    activation_power,
    feed_forward,
)
from jaxformer.functional.layers.layer import PartAt, Residual, by_name
from jaxformer.functional.layers.sublayer import At, Initial, Output
from jaxformer.functional.linear.affine import Scalar
from jaxformer.functional.trees import Weights


@dataclass(frozen=True)
class Preserving(Initial):
    """Standard deviations of initial weights for layers without a residual connection.

    With the kernels of `Initial`, the signal would shrink in each layer, and the gradients after
    four layers would be about 1e-14. Here every kernel preserves the variance of its input. W has
    the variance 1 / fan_in or, if its input comes from an activation, 1 / (fan_in · E[act(z)²]) (He
    et al. 2015).
    """

    def reading(self, fan_in: int) -> float:
        """See `Initial`."""
        return fan_in**-0.5

    def writing(self, fan_in: int) -> float:
        """See `Initial`."""
        return fan_in**-0.5

    def gain(self, power: Scalar) -> Scalar:
        """Returns 1 / √power, which scales inputs of mean square `power` to mean square 1."""
        return power**-0.5


@dataclass(frozen=True)
class Plain(Residual):
    """A sub-layer F without a residual connection, with the norms of `Residual`.

    The output of F may have a different number of features than the input.
    """

    adds: ClassVar[bool] = False

    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """Returns initial weights that preserve the variance; see `Preserving`."""
        # A gated layer multiplies two functions of its input, so the size of its output grows with
        # the square of the input and is unstable without a norm. With a gate power of 1,
        # activations of a 4-layer, 64-feature stack grew to 440; with 1.5 they stay between 0.02
        # and 10.
        gate_power = 1.5 if self.norm is None else 1.0
        preserving = Preserving(initial.num_layers, initial.input_stddev, gate_power)
        return super().init(key, dim, preserving)

    def output_dim(self, dim: int) -> int:
        """Returns the number of output features of F for `dim` input features."""
        return self.sublayer.output_dim(dim)

    def __call__(
        self, weights: Weights, x: Float[Array, "*batch length dim"], at: PartAt
    ) -> Output:
        """Computes F(Norm(x)), or Norm(F(x))."""
        name, function = self.sublayer.name, self.sublayer
        read = self.sublayer_input(function, weights, x, at.hook)
        y, state, auxiliary = function(weights[name], read, at.of(function))
        y = self.sublayer_output(weights, y, at)
        y = at.hook(at.points[0], self._norm("post", weights, y, at.hook))
        return Output(y, by_name(function, state), auxiliary)


@dataclass(frozen=True)
class MatchedAttention(Attention):
    """Self-attention in which each token initially attends mostly to itself.

    With ordinary self-attention and no residual connection, the vectors of all tokens become equal
    (He et al. 2023, arXiv:2302.10322).
    """

    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """Returns initial weights whose key kernels are computed from the query kernels.

        The kernel of a key head is the sum of the kernels of its query heads, scaled to the
        variance of one query kernel.
        """
        weights = super().init(key, dim, initial)
        group = self.num_heads // self.num_kv_heads
        query = weights["query"]["kernel"].reshape(dim, self.num_kv_heads, group, self.head_dim)
        weights["key"]["kernel"] = (query.sum(axis=2) / group**0.5).reshape(dim, -1)
        return weights


@dataclass(frozen=True)
class ActivatedFeedForward(FeedForward):
    """Feed-forward layer with the activation also after W₂: act(act(x W₁ + b₁) W₂ + b₂)."""

    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """See `SubLayer`."""
        weights = super().init(key, dim, initial)
        power = activation_power(self.activation, initial.gate_power)
        weights["down"]["kernel"] *= initial.gain(power)
        return weights

    def __call__(self, weights: Weights, x: Float[Array, "*batch length dim"], at: At) -> Output:
        """See `feed_forward`."""
        y = activate(feed_forward(weights, x, self.activation, at.hook), self.activation)
        return Output(at.hook("feedforward.output", y))
