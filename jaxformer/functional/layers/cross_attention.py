"""Cross-attention: each token reads from a source (lecture 13 §4)."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.attention.attend import Context, KeysValues, attend
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
from jaxformer.functional.linear.affine import linear
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
