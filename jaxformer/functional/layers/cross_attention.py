"""Cross-attention: each token attends to all tokens of a source (lecture 13 §4).

A recurrent decoder attends to a source by

    α_t = softmax_j(h_t · K e_j)      a_t = Σ_j α_tj V e_j      tanh(W [a_t; h_t] + b)

Here h_t is the state of the decoder and e_j is the state of the encoder at token j. Bahdanau et al.
(2015) introduced attention; these formulas are by Luong et al. (2015). Without attention, the
encoder's last state, which has a fixed size, must represent the whole source.

Reference:
    Notes, lecture 10 §1–2, lecture 13 §4.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.attention.attend import attend
from jaxformer.functional.attention.context import Context, KeysValues
from jaxformer.functional.attention.heads import merge_heads, split_heads
from jaxformer.functional.attention.scores import Scores
from jaxformer.functional.cache.slots import SourceKeysValues
from jaxformer.functional.layers.attention import init_heads
from jaxformer.functional.layers.sublayer import (
    At,
    Initial,
    Output,
    Start,
    SubLayer,
    WeightAxis,
    axes_of_linear,
)
from jaxformer.functional.linear.affine import init_linear, linear
from jaxformer.functional.sequence_size import SequenceSize, product_flops
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights


class SourceContext(NamedTuple):
    """Source that the queries of a cross-attention layer attend to.

    Attributes:
        attention: the context of attention, with the source's padding and the scores.
        encoded: the encoder's output, from which each layer computes keys and values; None if the
            cache holds the keys and values.
    """

    attention: Context
    encoded: Float[Array, "sources source dim"] | None


@dataclass(frozen=True)
class ReadsSource(SubLayer):
    """Base class of cross-attention layers."""

    name: ClassVar[str] = "cross_attention"
    hook_points: ClassVar[tuple[str, ...]] = tuple(
        f"cross_attention.{x}" for x in ("input", "query", "scores", "weights", "heads", "output")
    )

    @property
    def group_size(self) -> int:
        """The number of query heads that share a key head."""
        return 1

    @abstractmethod
    def scores(self) -> Scores:
        """Returns the scale and the cap of the attention scores."""

    @abstractmethod
    def keys_values(
        self, weights: Weights, encoded: Float[Array, "*batch source dim"]
    ) -> KeysValues:
        """Computes keys and values [*batch, kv_heads, source, head_dim] from encoded sources."""

    def flops(self, weights: Weights, size: SequenceSize) -> int:
        """Returns the FLOPs of the linear layers, of attention scores and of weighted sums."""
        read = {name: weights[name] for name in ("key", "value")}
        own = {name: weights[name] for name in weights.keys() - read.keys()}
        scores = 2 * weights["key"]["kernel"].shape[-1] + 2 * weights["value"]["kernel"].shape[-1]
        products = product_flops(own, size.length) + product_flops(read, size.source_length)
        return products + self.group_size * scores * size.length * size.source_length

    def context(self, tokens: Tokens, shared: Weights) -> SourceContext:
        """See `SubLayer`."""
        encoded = None if tokens.encoded is None else tokens.encoded.hidden
        return SourceContext(tokens.source_attention(self.scores()), encoded)

    def init_state(self, weights: Weights, start: Start) -> SourceKeysValues:
        """Returns the keys and values of the sources for the cache.

        Raises:
            ValueError: `start.source` is None.
        """
        if start.encoded is None or start.source is None:
            raise ValueError("source is None, but cross-attention needs a source")
        return SourceKeysValues.of(self.keys_values(weights, start.encoded.hidden), start.source)

    def read(self, weights: Weights, at: At) -> KeysValues:
        """Returns the keys and values of the sources, cached or computed."""
        if at.context.encoded is None:
            return at.state.keys, at.state.values
        return self.keys_values(weights, at.context.encoded)


@dataclass(frozen=True)
class CrossAttention(ReadsSource):
    """Multi-head cross-attention, with queries from the tokens, and keys and values from a source.

    Attributes:
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads, which must divide num_heads.
        head_dim: width of a head.
        scale: factor of the scores; defaults to 1/√head_dim.
        softcap: soft cap of the scores, or None.
        use_bias: whether the projections to query, key and value have biases.
        output_bias: whether W_O has a bias.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None
    softcap: float | None = None
    use_bias: bool = True
    output_bias: bool = True

    @property
    def group_size(self) -> int:
        """See `ReadsSource`."""
        return self.num_heads // self.num_kv_heads

    def weight_axes(self) -> dict[str, tuple[WeightAxis, ...]]:
        """See `SubLayer`."""
        maps = axes_of_linear("dim", "heads", "query", "key", "value")
        return maps | axes_of_linear("heads", "dim", "output")

    def units(self) -> tuple[int, ...]:
        """See `SubLayer`."""
        return self.num_heads, self.num_kv_heads

    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """See `SubLayer`."""
        return init_heads(key, self, dim, initial.reading(dim), initial)

    def scores(self) -> Scores:
        """See `ReadsSource`."""
        return Scores(self.scale, self.softcap)

    def __call__(self, weights: Weights, x: Float[Array, "*batch length dim"], at: At) -> Output:
        """Computes cross-attention to the source."""
        hook, (keys, values) = at.hook, self.read(weights, at)
        query = linear(weights["query"], hook("cross_attention.input", x))
        query = hook("cross_attention.query", split_heads(query, self.num_heads))
        heads = hook(
            "cross_attention.heads", attend(query, keys, values, at.context.attention, hook)
        )
        output = linear(weights["output"], merge_heads(heads))
        return Output(hook("cross_attention.output", output))

    def keys_values(
        self, weights: Weights, encoded: Float[Array, "*batch source dim"]
    ) -> KeysValues:
        """See `ReadsSource`."""
        key, value = (linear(weights[name], encoded) for name in ("key", "value"))
        return split_heads(key, self.num_kv_heads), split_heads(value, self.num_kv_heads)


@dataclass(frozen=True)
class LuongAttention(ReadsSource):
    """Luong attention: states of a decoder attend to states of an encoder with the same width."""

    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """Returns K and V from N(0, 1/dim), and W ("output") from N(0, 1/(2 dim))."""
        keys = jax.random.split(key, 3)
        return {
            "key": init_linear(keys[0], dim, dim, use_bias=False, stddev=dim**-0.5),
            "value": init_linear(keys[1], dim, dim, use_bias=False, stddev=dim**-0.5),
            "output": init_linear(keys[2], 2 * dim, dim, stddev=(2 * dim) ** -0.5),
        }

    def scores(self) -> Scores:
        """Returns scores with scale 1, because Luong attention does not divide by √d."""
        return Scores(scale=1.0)

    def __call__(self, weights: Weights, x: Float[Array, "*batch length dim"], at: At) -> Output:
        """Computes tanh(W [a; h] + b), where a is the output of attention with query h."""
        hook, (keys, values) = at.hook, self.read(weights, at)
        hidden = hook("cross_attention.input", x)
        query = hook("cross_attention.query", hidden[:, None])
        heads = attend(query, keys, values, at.context.attention, hook)
        attended = hook("cross_attention.heads", heads)[:, 0]
        both = jnp.concatenate([attended, hidden], axis=-1)
        return Output(hook("cross_attention.output", jnp.tanh(linear(weights["output"], both))))

    def keys_values(
        self, weights: Weights, encoded: Float[Array, "*batch source dim"]
    ) -> KeysValues:
        """Computes the keys K e and values V e of the only head, each [batch, 1, source, dim]."""
        return linear(weights["key"], encoded)[:, None], linear(weights["value"], encoded)[:, None]
