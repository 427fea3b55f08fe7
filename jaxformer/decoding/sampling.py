"""Choosing the next token: what is left of a distribution, and a draw from it.

Temperature, top-k, top-p and min-p are numbers handed to the compiled step, not compiled into it.
Thresholds are found by bisecting the bit patterns of the logits, exactly and without a sort: 32
passes of compare-and-sum, where sorting 50,000 logits takes many times as long on a CPU.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.models.config.check import at_least

# Temperatures of which the reciprocal, too, is a float32 that no device flushes to zero: XLA
# multiplies by it where the program says divide, and −∞ · 0 would be NaN.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**126


@dataclass(frozen=True)
class Sampler:
    """How a token is chosen. Temperature first, then top-k, top-p and min-p, each on what is left.

    temperature: logits are divided by it; 0 is greedy (the most probable token, no randomness), and
    2¹²⁶ is the largest; top_k: keep the k most probable tokens (0, or as many as there are: all);
    top_p: keep the fewest, most probable first, that together have at least this probability
    (Holtzman et al. 2020); min_p: keep those with at least this fraction of the largest
    probability. Ties at a threshold, which are equal logits, are all kept.

    Errors: ValueError for what is no number, or not in its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        at_least(0, self, "top_k")
        for name in ("temperature", "top_p", "min_p"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        if not 0.0 <= self.temperature <= _LARGEST:
            raise ValueError(
                f"temperature is {self.temperature}; it must be 0 (greedy) or above, and at most "
                f"{_LARGEST:.8g}"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; it must be in (0, 1]")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p is {self.min_p}; it must be in [0, 1]")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def arrays(self) -> "SamplerArrays | None":
        """The fields as arrays, so that other values need no other compilation; None if greedy."""
        if self.greedy:
            return None
        return SamplerArrays(
            jnp.float32(max(self.temperature, _SMALLEST)),  # less would be 0
            jnp.int32(min(self.top_k, np.iinfo(np.int32).max)),  # no vocabulary has so many
            jnp.float32(self.top_p),
            jnp.float32(math.log(self.min_p) if self.min_p else -math.inf),
        )


def _number(name: str, value) -> float:
    """Python's float of a number of any kind; ValueError if it is none, such as True or "0.7"."""
    try:
        if hasattr(value, "__float__") and not isinstance(value, bool | np.bool_):
            return float(value)
    except OverflowError:  # a whole number beyond every float
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):  # an array of several, or of something else
        pass
    raise ValueError(f"{name} is {value!r}; it must be a number")


class SamplerArrays(NamedTuple):
    """The fields of a `Sampler`, traced; log_min_p: the logarithm of min_p."""

    temperature: Array
    top_k: Array
    top_p: Array
    log_min_p: Array


def sample_tokens(
    arrays: SamplerArrays | None, key, step: Int[Array, ""], logits: Float[Array, "batch vocab"]
) -> Int[Array, " batch"]:
    """One token a row: row i's is drawn with fold_in(fold_in(key, i), step), whatever other rows
    there are; without arrays it is the most probable, and no key is needed."""
    if arrays is None:
        return most_probable(logits)

    def draw(row, logits):
        return jax.random.categorical(
            jax.random.fold_in(jax.random.fold_in(key, row), step), logits
        )

    kept = _tempered(arrays, truncate(arrays, logits))
    return jax.vmap(draw)(jnp.arange(len(logits)), kept).astype(jnp.int32)


def most_probable(logits: Float[Array, "batch vocab"]) -> Int[Array, " batch"]:
    """argmax over the vocabulary, in two passes that XLA:CPU vectorises; its own argmax, over pairs
    of value and index, takes twice as long."""
    last = logits.shape[-1] - 1
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    is_largest = logits == logits.max(axis=-1, keepdims=True)
    return jnp.where(is_largest, index, last).min(axis=-1)


def _tempered(arrays: SamplerArrays, logits):
    """Divided by the temperature. The largest comes to 0 first: divided by a very small one it must
    not overflow."""
    return (logits - logits.max(axis=-1, keepdims=True)) / arrays.temperature


def truncate(
    arrays: SamplerArrays, logits: Float[Array, "batch vocab"]
) -> Float[Array, "batch vocab"]:
    """−∞ for every token that top-k, then top-p, then min-p leave out; nothing to do: nothing.

    Which logit is larger is asked before the temperature, by which different ones may become equal.
    """
    vocab_size = logits.shape[-1]
    kept = jax.lax.cond(
        (arrays.top_k > 0) & (arrays.top_k < vocab_size),
        lambda: _keep(logits, jnp.ones_like(logits), arrays.top_k.astype(jnp.float32)),
        lambda: logits,
    )

    def nucleus():
        probabilities = jax.nn.softmax(_tempered(arrays, kept), axis=-1)
        return _keep(kept, probabilities, arrays.top_p)

    kept = jax.lax.cond(arrays.top_p < 1.0, nucleus, lambda: kept)
    return jnp.where(_tempered(arrays, kept) >= arrays.log_min_p, kept, -jnp.inf)


def _keep(logits, mass, wanted):
    """Keep logits at or above the highest threshold whose tokens have at least `wanted` mass."""
    order = _ordered(logits)

    def bisect(_, bounds):
        low, high = bounds  # the mass at or above low suffices; at or above high it does not
        middle = low + (high - low) // 2
        enough = jnp.where(order >= middle[:, None], mass, 0.0).sum(axis=-1) >= wanted
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    lowest = jnp.zeros(len(logits), jnp.uint32)
    threshold, _ = jax.lax.fori_loop(0, 32, bisect, (lowest, order.max(axis=-1) + 1))
    return jnp.where(order >= threshold[:, None], logits, -jnp.inf)


def _ordered(x):
    """float32 → uint32 such that greater floats have greater integers: that of either zero is 2³¹,
    from which positive ones count up and negative ones down."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31 == 1, -bits, bits | jnp.uint32(1 << 31))
