"""Attention scores: scale, soft cap and bias of the products q·k.

    s_ij = cap · tanh(scale · q_i·k_j / cap) + b_ij

The bias b is a function of positions, like a mask. Like masks, biases are evaluated for whole
sequences, for tiles, or for the positions stored in a cache.
"""

import math
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.attention.token_info import Part, TokenInfo, cut
from jaxformer.functional.linear.affine import soft_cap
from jaxformer.functional.trees import Weights


class Bias:
    """Base class of biases: `bias(query, key)` returns float32 [*batch, heads, queries, keys]."""

    def __call__(
        self, query: TokenInfo, key: TokenInfo
    ) -> Float[Array, "*batch heads queries keys"]:
        """Returns the bias for each head, query and key."""
        raise TypeError(f"{type(self).__name__} must override __call__")

    def tile(
        self, query: TokenInfo, key: TokenInfo, rows: Part, columns: Part
    ) -> Float[Array, "*batch heads queries keys"]:
        """Returns the bias for a part of the queries and a part of the keys."""
        return self(query.part(rows), key.part(columns))


@jax.tree_util.register_static
@dataclass(frozen=True)
class Alibi(Bias):
    """b_ij = −slope_h · |i − j| with slope_h = 2^(−8h/H) for h = 1 … H (Press et al. 2022).

    If H is not a power of two, let P be the next lower power of two. The first P slopes are the
    slopes for P heads, and the remaining slopes are every second slope for 2P heads.
    """

    num_heads: int

    def with_weights(self, shared: Weights) -> "Alibi":
        """Returns the bias unchanged, because ALiBi does not need weights."""
        return self

    def __call__(
        self, query: TokenInfo, key: TokenInfo
    ) -> Float[Array, "*batch heads queries keys"]:
        """See `Bias`."""
        distance = abs(query.position_ids()[..., :, None] - key.position_ids()[..., None, :])
        slopes = np.array(alibi_slopes(self.num_heads), np.float32)[:, None, None]
        return jnp.asarray(distance, jnp.float32)[..., None, :, :] * -slopes


def alibi_slopes(num_heads: int) -> list[float]:
    """Returns the slope of each head; see `Alibi`."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-4 * h / power) for h in range(1, 2 * power + 1, 2)]
    return slopes + between[: num_heads - power]


@dataclass(frozen=True)
class RelativePositions:
    """Sizes of a `RelativeBias` that all layers of a stack share; its table is in the weights.

    Attributes:
        num_buckets: number of rows of the table.
        num_heads: number of columns of the table.
        max_distance: see `RelativeBias`.
        bidirectional: see `RelativeBias`.
    """

    num_buckets: int
    num_heads: int
    max_distance: int = 128
    bidirectional: bool = True

    def init(self, key: PRNGKeyArray) -> Weights:
        """Returns the initial table."""
        shape = (self.num_buckets, self.num_heads)
        return {"table": 0.02 * jax.random.normal(key, shape, jnp.float32)}

    def with_weights(self, shared: Weights) -> "RelativeBias":
        """Returns the `RelativeBias` with the table from the weights of a stack."""
        table = shared["relative_bias"]["table"]
        return RelativeBias(table, self.max_distance, self.bidirectional)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["table"],
    meta_fields=["max_distance", "bidirectional"],
)
@dataclass(frozen=True)
class RelativeBias(Bias):
    """b_ij = table[bucket(j − i)] with a learned table (T5, Raffel et al. 2020, §2.1).

    If the bias is bidirectional, earlier and later keys have separate buckets. In each direction,
    the first half of the buckets cover one distance each. The sizes of the other buckets grow by a
    constant factor up to max_distance, and the last bucket also covers all larger distances.

    Attributes:
        table: [buckets, heads].
        max_distance: distances of at least this value share a bucket.
        bidirectional: whether later keys have separate buckets; otherwise all later keys are in the
            bucket of distance 0.
    """

    table: Any
    max_distance: int = 128
    bidirectional: bool = True

    def __call__(
        self, query: TokenInfo, key: TokenInfo
    ) -> Float[Array, "*batch heads queries keys"]:
        """See `Bias`."""
        offset = key.position_ids()[..., None, :] - query.position_ids()[..., :, None]
        far = self.max_distance
        buckets = relative_buckets(len(self.table), far, self.bidirectional)
        by_offset = jnp.asarray(self.table, jnp.float32)[buckets]  # [2 far + 1, heads]
        return jnp.moveaxis(by_offset[jnp.clip(offset, -far, far) + far], -1, -3)


@cache
def relative_buckets(num_buckets: int, max_distance: int, bidirectional: bool) -> np.ndarray:
    """Returns the bucket of each offset key − query in −max_distance … max_distance."""
    offset = np.arange(-max_distance, max_distance + 1)
    later = np.zeros_like(offset)
    if bidirectional:
        num_buckets //= 2
        later = (offset > 0) * num_buckets
    distance = abs(offset) if bidirectional else np.maximum(-offset, 0)
    exact = num_buckets // 2
    # The dtype and the order of operations match the training of published checkpoints. With
    # another rounding, a distance at the boundary of two buckets could get the wrong bucket.
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    grown = exact + (ratio / math.log(max_distance / exact) * (num_buckets - exact)).astype(int)
    buckets = later + np.where(distance < exact, distance, np.minimum(grown, num_buckets - 1))
    return buckets.astype(np.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseBias(Bias):
    """A bias stored as an array, [*batch, heads, queries, keys], instead of a rule."""

    array: Any

    def __call__(
        self, query: TokenInfo, key: TokenInfo
    ) -> Float[Array, "*batch heads queries keys"]:
        """See `Bias`."""
        return self.array

    def tile(
        self, query: TokenInfo, key: TokenInfo, rows: Part, columns: Part
    ) -> Float[Array, "*batch heads queries keys"]:
        """See `Bias`."""
        return cut(cut(self(query, key), rows, -2), columns)


@partial(
    jax.tree_util.register_dataclass, data_fields=["bias", "sink"], meta_fields=["scale", "cap"]
)
@dataclass(frozen=True)
class Scores:
    """Scale, soft cap, bias and sinks, which turn products q·k into attention scores.

    Attributes:
        scale: factor of the products; defaults to 1/√head_dim.
        cap: soft cap of the scaled products, or None.
        bias: a bias that is added after the cap, or None.
        sink: attention sinks [*batch, heads], or None. The sink of a head is a score that takes
            part in the softmax but has no value vector.
    """

    scale: float | None = None
    cap: float | None = None
    bias: Bias | None = None
    sink: Any = None

    def __init_subclass__(cls) -> None:
        """Raises TypeError if a subclass overrides `__call__` instead of `tile`."""
        super().__init_subclass__()
        if cls.__call__ is not Scores.__call__:
            raise TypeError(
                f"{cls.__name__} overrides __call__; override tile instead, which __call__ calls"
            )

    def for_heads(self, head_dim: int) -> "Scores":
        """Sets the scale to 1/√head_dim if the scale is None."""
        return replace(self, scale=1 / math.sqrt(head_dim)) if self.scale is None else self

    @property
    def factor(self) -> float:
        """The scale. Raises ValueError if the scale is None; `for_heads` sets the scale."""
        if self.scale is None:
            raise ValueError("scale is None; call for_heads(head_dim) first")
        return self.scale

    def sink_of_groups(self, num_kv_heads: int) -> Float[Array, "*batch kv_heads group 1"] | None:
        """Returns the sinks in float32, grouped by key head; None without sinks."""
        if self.sink is None:
            return None
        sink = jnp.asarray(self.sink, jnp.float32)
        return sink.reshape(*sink.shape[:-1], num_kv_heads, -1, 1)

    def evaluated(self, query: TokenInfo, key: TokenInfo) -> "Scores":
        """Evaluates the bias, so that many layers can share the array."""
        return self if self.bias is None else replace(self, bias=DenseBias(self.bias(query, key)))

    def __call__(
        self,
        products: Float[Array, "*batch kv_heads group queries keys"],
        query: TokenInfo,
        key: TokenInfo,
    ) -> Float[Array, "*batch kv_heads group queries keys"]:
        """Computes the attention scores from the products q·k, which are float32."""
        everything = slice(0, query.length), slice(0, key.length)
        return self.tile(products, query, key, *everything)

    def tile(
        self,
        products: Float[Array, "*batch kv_heads group queries keys"],
        query: TokenInfo,
        key: TokenInfo,
        rows: Part,
        columns: Part,
    ) -> Float[Array, "*batch kv_heads group queries keys"]:
        """Computes the scores of some queries and some keys from their products q·k."""
        scores = self.scaled(products)
        if self.bias is None:
            return scores
        bias = self.bias.tile(query, key, rows, columns)
        heads = products.shape[-4:-2]
        return scores + bias.reshape(*bias.shape[:-3], *heads, *bias.shape[-2:])

    def scaled(
        self, products: Float[Array, "*batch kv_heads group queries keys"]
    ) -> Float[Array, "*batch kv_heads group queries keys"]:
        """Applies the scale and the soft cap to the products q·k, but does not add the bias."""
        return soft_cap(self.factor * products, self.cap)
