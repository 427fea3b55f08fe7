"""Attention to a source: each token reads from all of its tokens (lecture 13 §4).

A recurrent decoder reads a source as

    α_t = softmax_j(h_t · K e_j)      a_t = Σ_j α_tj V e_j      tanh(W [a_t; h_t] + b)

h_t is the decoder's state and e_j the encoder's (Bahdanau et al. 2015; in this form, Luong et al.
2015). Without attention the encoder's last state, which has a fixed size, must represent the whole
source.

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
from jaxformer.functional.cache.slots import SourceSlots
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
from jaxformer.functional.row_size import RowSize, product_flops
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights


class SourceContext(NamedTuple):
    """The source that the queries attend to.

    Attributes:
        attention: its padding, and how scores are computed.
        encoded: the encoder's output, from which each layer computes keys and values; None: the
            layers keep these.
    """

    attention: Context
    encoded: Float[Array, "sources source dim"] | None


@dataclass(frozen=True)
class ReadsSource(SubLayer):
    """Base class of the attentions to a source."""

    name: ClassVar[str] = "cross_attention"
    points: ClassVar[tuple[str, ...]] = tuple(
        f"cross_attention.{x}" for x in ("input", "query", "weights", "heads", "output")
    )

    @property
    def group_size(self) -> int:
        """The number of query heads that share a key head."""
        return 1

    @abstractmethod
    def scores(self) -> Scores:
        """Returns how scores are computed."""

    @abstractmethod
    def keys_values(
        self, weights: Weights, encoded: Float[Array, "*batch source dim"]
    ) -> KeysValues:
        """Computes keys and values [*batch, kv_heads, source, head_dim] from encoded sources."""

    def flops(self, weights: Weights, row: RowSize) -> int:
        """Returns the operations of the maps, of scores and of weighted sums."""
        read = {name: weights[name] for name in ("key", "value")}
        own = {name: weights[name] for name in weights.keys() - read.keys()}
        scores = 2 * weights["key"]["kernel"].shape[-1] + 2 * weights["value"]["kernel"].shape[-1]
        products = product_flops(own, row.length) + product_flops(read, row.source_length)
        return products + self.group_size * scores * row.length * row.source_length

    def context(self, tokens: Tokens, shared: Weights) -> SourceContext:
        """See `SubLayer`."""
        encoded = None if tokens.encoded is None else tokens.encoded.hidden
        return SourceContext(tokens.source_attention(self.scores()), encoded)

    def init_state(self, weights: Weights, start: Start) -> SourceSlots:
        """Returns the keys and values of the sources, which never change.

        Raises:
            ValueError: the model has read no source.
        """
        if start.encoded is None or start.source is None:
            raise ValueError("source is None; cross-attention reads one")
        return SourceSlots.of(self.keys_values(weights, start.encoded.hidden), start.source)

    def read(self, weights: Weights, at: At) -> KeysValues:
        """Returns the keys and values of the sources: those of the cache, or computed ones."""
        if at.context.encoded is None:
            return at.state.keys, at.state.values
        return self.keys_values(weights, at.context.encoded)


@dataclass(frozen=True)
class CrossAttention(ReadsSource):
    """Multi-head attention of queries from the tokens to keys and values from a source.

    Attributes:
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads, which divides num_heads.
        head_dim: width of a head.
        scale: factor of the scores; None: 1/√head_dim.
        softcap: soft cap of the scores, or None.
        use_bias: whether the maps to query, key and value have biases.
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
        """Computes attention to the source."""
        tap, (keys, values) = at.tap, self.read(weights, at)
        query = linear(weights["query"], tap("cross_attention.input", x))
        query = tap("cross_attention.query", split_heads(query, self.num_heads))
        heads = tap("cross_attention.heads", attend(query, keys, values, at.context.attention, tap))
        output = linear(weights["output"], merge_heads(heads))
        return Output(tap("cross_attention.output", output))

    def keys_values(
        self, weights: Weights, encoded: Float[Array, "*batch source dim"]
    ) -> KeysValues:
        """See `ReadsSource`."""
        key, value = (linear(weights[name], encoded) for name in ("key", "value"))
        return split_heads(key, self.num_kv_heads), split_heads(value, self.num_kv_heads)


@dataclass(frozen=True)
class LuongAttention(ReadsSource):
    """Attention by the states of a decoder to those of its encoder, which have the same width."""

    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """Returns K and V ~ N(0, 1/dim), and "output", the map W of [a; h], ~ N(0, 1/(2 dim))."""
        keys = jax.random.split(key, 3)
        return {
            "key": init_linear(keys[0], dim, dim, use_bias=False, stddev=dim**-0.5),
            "value": init_linear(keys[1], dim, dim, use_bias=False, stddev=dim**-0.5),
            "output": init_linear(keys[2], 2 * dim, dim, stddev=(2 * dim) ** -0.5),
        }

    def scores(self) -> Scores:
        """Returns scores without a factor, as in the lecture."""
        return Scores(scale=1.0)

    def __call__(self, weights: Weights, x: Float[Array, "*batch length dim"], at: At) -> Output:
        """Computes tanh(W [a; h] + b), where a is the result of attention by h to the source."""
        tap, (keys, values) = at.tap, self.read(weights, at)
        hidden = tap("cross_attention.input", x)
        query = tap("cross_attention.query", hidden[:, None])
        heads = attend(query, keys, values, at.context.attention, tap)
        attended = tap("cross_attention.heads", heads)[:, 0]
        both = jnp.concatenate([attended, hidden], axis=-1)
        return Output(tap("cross_attention.output", jnp.tanh(linear(weights["output"], both))))

    def keys_values(
        self, weights: Weights, encoded: Float[Array, "*batch source dim"]
    ) -> KeysValues:
        """Computes (K e, V e), each with one head, [batch, 1, source, dim]."""
        return linear(weights["key"], encoded)[:, None], linear(weights["value"], encoded)[:, None]
