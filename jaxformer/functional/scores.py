"""By how much a query attends to a key, beside the mask's who sees whom.

    s_ij = cap · tanh(scale · q_i·k_j / cap) + b_ij

The bias b is a rule about positions, as a mask is: it is asked for a row, a tile of it, or the
slots of a cache.
"""

import math
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.functional.linear import capped
from jaxformer.functional.masks import Part, TokenInfo, cut


class Bias:
    """A rule: bias(query, key) gives [*batch, heads, queries, keys] in float32."""

    def __call__(self, query: TokenInfo, key: TokenInfo):
        raise TypeError(f"{type(self).__name__} has no rule")

    def tile(self, query: TokenInfo, key: TokenInfo, rows: Part, columns: Part):
        """The rule asked about some queries and some keys of a row only."""
        return self(query.part(rows), key.part(columns))


@jax.tree_util.register_static
@dataclass(frozen=True)
class Alibi(Bias):
    """b_ij = −slope_h · |i − j|, a slope a head: 2^(−8h/H) for h = 1 … H (Press et al. 2022).

    Where H is no power of two: the slopes of the next lower one P, then every second slope of 2P.
    """

    num_heads: int

    def __call__(self, query, key):
        distance = abs(query.position_ids()[..., :, None] - key.position_ids()[..., None, :])
        slopes = np.float32(alibi_slopes(self.num_heads))[:, None, None]
        return -slopes * jnp.asarray(distance, jnp.float32)[..., None, :, :]


def alibi_slopes(num_heads: int) -> list[float]:
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-4 * h / power) for h in range(1, 2 * power + 1, 2)]
    return slopes + between[: num_heads - power]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["table"],
    meta_fields=["max_distance", "bidirectional"],
)
@dataclass(frozen=True)
class RelativeBias(Bias):
    """b_ij = table[bucket(j − i)], learnt (T5, Raffel et al. 2020, §2.1).

    table: [buckets, heads]. Half of the buckets (of each direction, where there are two) are for
    one distance each, the other half grow by a factor up to max_distance, and the last holds all
    beyond it.
    """

    table: Any
    max_distance: int = 128
    bidirectional: bool = True

    def __call__(self, query, key):
        offset = key.position_ids()[..., None, :] - query.position_ids()[..., :, None]
        far = self.max_distance
        buckets = relative_buckets(len(self.table), far, self.bidirectional)
        by_offset = jnp.asarray(self.table, jnp.float32)[buckets]  # [2 far + 1, heads]
        return jnp.moveaxis(by_offset[jnp.clip(offset, -far, far) + far], -1, -3)


@cache
def relative_buckets(num_buckets: int, max_distance: int, bidirectional: bool) -> np.ndarray:
    """The bucket of each offset key − query in −max_distance … max_distance."""
    offset = np.arange(-max_distance, max_distance + 1)
    later = np.zeros_like(offset)
    if bidirectional:
        num_buckets //= 2
        later = (offset > 0) * num_buckets
    distance = abs(offset) if bidirectional else np.maximum(-offset, 0)
    exact = num_buckets // 2
    # In float32 and in this order, as checkpoints were trained: a bound may fall on an integer.
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    grown = exact + (ratio / math.log(max_distance / exact) * (num_buckets - exact)).astype(int)
    return later + np.where(distance < exact, distance, np.minimum(grown, num_buckets - 1))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseBias(Bias):
    """No rule but the numbers themselves, [*batch, heads, queries, keys]."""

    array: Any

    def __call__(self, query, key):
        return self.array

    def tile(self, query, key, rows, columns):
        return cut(cut(self.array, rows, -2), columns)


@partial(jax.tree_util.register_dataclass, data_fields=["bias"], meta_fields=["scale", "cap"])
@dataclass(frozen=True)
class Scores:
    """What becomes of the products q·k. scale: None is 1/√head_dim; cap: None is no cap; bias: a
    rule, or None."""

    scale: float | None = None
    cap: float | None = None
    bias: Bias | None = None

    def for_heads(self, head_dim: int) -> "Scores":
        """The same with its scale worked out."""
        return replace(self, scale=1 / math.sqrt(head_dim)) if self.scale is None else self

    def asked(self, query: TokenInfo, key: TokenInfo) -> "Scores":
        """The same with the answers in the place of its rule, which then is asked once for many
        layers."""
        return self if self.bias is None else replace(self, bias=DenseBias(self.bias(query, key)))

    def __call__(self, products, query: TokenInfo, key: TokenInfo):
        """products: float32 [*batch, kv_heads, group, queries, keys]."""
        everything = slice(0, query.length), slice(0, key.length)
        return self.tile(products, query, key, *everything)

    def tile(self, products, query: TokenInfo, key: TokenInfo, rows: Part, columns: Part):
        """The products of some queries and some keys of a row only."""
        scores = self.scaled(products)
        if self.bias is None:
            return scores
        bias = self.bias.tile(query, key, rows, columns)
        heads = products.shape[-4:-2]
        return scores + bias.reshape(*bias.shape[:-3], *heads, *bias.shape[-2:])

    def scaled(self, products):
        """What they become but for the bias."""
        return capped(self.scale * products, self.cap)
