"""By how much a query attends to a key, beside the mask's who sees whom.

    s_ij = cap · tanh(scale · q_i·k_j / cap) + b_ij

The bias b is a rule about positions, as a mask is: it is asked for a row, a tile of it, or the
slots of a cache.
"""

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.functional.masks import TokenInfo


class Bias:
    """A rule: bias(query, key) gives [*batch, heads, queries, keys] in float32."""

    def __call__(self, query: TokenInfo, key: TokenInfo):
        raise TypeError(f"{type(self).__name__} has no rule")


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


@partial(jax.tree_util.register_dataclass, data_fields=["bias"], meta_fields=["scale", "cap"])
@dataclass(frozen=True)
class Scores:
    """What becomes of the products q·k. bias: a rule, or None."""

    scale: float
    cap: float | None = None
    bias: Bias | None = None

    def __call__(self, products, query: TokenInfo, key: TokenInfo):
        """products: float32 [*batch, kv_heads, group, queries, keys]."""
        scores = self.scale * products
        if self.cap is not None:
            scores = self.cap * jnp.tanh(scores / self.cap)
        if self.bias is None:
            return scores
        bias = self.bias(query, key)
        heads = products.shape[-4:-2]
        return scores + bias.reshape(*bias.shape[:-3], *heads, *bias.shape[-2:])
