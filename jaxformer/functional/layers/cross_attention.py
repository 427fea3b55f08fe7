"""Cross-attention: each token reads from a source (lecture 13 §4)."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.attention.attend import Context, KeysValues, attend
from jaxformer.functional.attention.contexts import Pass
from jaxformer.functional.attention.heads import merge_heads, split_heads
from jaxformer.functional.attention.scores import Scores
from jaxformer.functional.layers.attention import init_heads
from jaxformer.functional.layers.sublayer import At, Initial, Output, SubLayer
from jaxformer.functional.linear.affine import linear
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
class CrossAttention(SubLayer):
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

    name: ClassVar[str] = "cross_attention"
    points: ClassVar[tuple[str, ...]] = tuple(
        f"cross_attention.{x}" for x in ("input", "query", "weights", "heads", "output")
    )

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None
    softcap: float | None = None
    use_bias: bool = True
    output_bias: bool = True

    def units(self) -> tuple[int, ...]:
        """See `SubLayer`."""
        return self.num_heads, self.num_kv_heads

    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """See `SubLayer`."""
        return init_heads(key, self, dim, initial.reading(dim), initial)

    def context(self, tokens: Pass, shared: Weights) -> SourceContext:
        """See `SubLayer`."""
        attention = tokens.source_attention(Scores(self.scale, self.softcap))
        return SourceContext(attention, tokens.encoded)

    def __call__(self, weights: Weights, x: Float[Array, "*batch length dim"], at: At) -> Output:
        """Computes attention to the source. The state, its keys and values, never changes."""
        context, encoded = at.context
        keys, values = at.state if encoded is None else self.keys_values(weights, encoded)
        tap = at.tap
        query = linear(weights["query"], tap("cross_attention.input", x))
        query = tap("cross_attention.query", split_heads(query, self.num_heads))
        heads = tap("cross_attention.heads", attend(query, keys, values, context, tap))
        output = linear(weights["output"], merge_heads(heads))
        return Output(tap("cross_attention.output", output))

    def keys_values(
        self, weights: Weights, encoded: Float[Array, "*batch source dim"]
    ) -> KeysValues:
        """Computes keys and values [*batch, kv_heads, source, head_dim] from encoded sources."""
        key, value = (linear(weights[name], encoded) for name in ("key", "value"))
        return split_heads(key, self.num_kv_heads), split_heads(value, self.num_kv_heads)
