"""Sampling: truncates the distribution of the next token and draws from it.

The temperature and the truncations are arguments of the compiled step, not constants in it.
Thresholds are found exactly and without a sort, by bisection of the bit patterns of the logits.
That takes 32 passes of compare-and-sum; sorting 50,000 logits takes many times as long on a CPU.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from jaxformer.models.config.check import check_at_least
from jaxformer.models.config.generation import GenerationDefaults

Logits = Float[Array, "batch vocab"]

# Temperatures whose reciprocal is also a float32 that no device flushes to zero: XLA replaces the
# division by a multiplication with the reciprocal, and −∞ · 0 would be NaN.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**126


@dataclass(frozen=True)
class Sampler:
    """How to choose a token: first temperature, then the truncations, each on the rest.

    The truncations apply in the order of the attributes. All tokens that equal a threshold are
    kept.

    Attributes:
        temperature: divisor of the logits, at most 2¹²⁶; 0 is greedy (the most probable token,
            without randomness).
        top_k: how many of the most probable tokens to keep; 0: all.
        top_p: keep the fewest, most probable tokens with at least this total probability (Holtzman
            et al. 2020).
        min_p: keep the tokens with at least this fraction of the largest probability.
        typical_p: keep the fewest tokens with at least this total probability, first those whose
            −log P is closest to the entropy (Meister et al. 2022); 1: all.
        epsilon_cutoff: keep the tokens with at least this probability, and the most probable token
            (Hewitt et al. 2022); 0: all.
        eta_cutoff: like epsilon_cutoff, with the probability min(η, √η · e^−entropy) for η =
            eta_cutoff (Hewitt et al. 2022); 0: all.

    Raises:
        ValueError: a field is not a number or is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0

    def __post_init__(self) -> None:
        """Converts the fields to numbers and checks them."""
        check_at_least(0, self, "top_k")
        for name in (field.name for field in fields(self) if field.name != "top_k"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        at_most = f"0 (greedy) or above, and at most {_LARGEST:.8g}"
        accepted = {
            "temperature": (0.0 <= self.temperature <= _LARGEST, at_most),
            "top_p": (0.0 < self.top_p <= 1.0, "in (0, 1]"),
            "min_p": (0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            "typical_p": (0.0 < self.typical_p <= 1.0, "in (0, 1]"),
            "epsilon_cutoff": (0.0 <= self.epsilon_cutoff < 1.0, "in [0, 1)"),
            "eta_cutoff": (0.0 <= self.eta_cutoff < 1.0, "in [0, 1)"),
        }
        for name, (is_accepted, words) in accepted.items():
            if not is_accepted:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {words}")

    @property
    def greedy(self) -> bool:
        """Whether the sampler always chooses the most probable token."""
        return self.temperature == 0.0

    def arrays(self) -> "SamplerArrays | None":
        """Returns the fields as arrays, so that new values need no compilation; None if greedy."""
        if self.greedy:
            return None
        return SamplerArrays(
            jnp.float32(max(self.temperature, _SMALLEST)),  # a smaller one may be flushed to 0
            jnp.int32(min(self.top_k, np.iinfo(np.int32).max)),  # larger than any vocabulary
            jnp.float32(self.top_p),
            jnp.float32(math.log(self.min_p) if self.min_p else -math.inf),
            jnp.float32(self.typical_p),
            jnp.float32(self.epsilon_cutoff),
            jnp.float32(self.eta_cutoff),
        )


def default_sampler(defaults: GenerationDefaults) -> Sampler:
    """Returns a checkpoint's sampler, for calls without one.

    As in transformers, it is greedy unless the checkpoint samples. Its truncations then apply to a
    sampler with another temperature: `replace(default_sampler(…), temperature=0.7)`.
    """
    named = {field.name: getattr(defaults, field.name) for field in fields(Sampler)}
    sampler = Sampler(**{name: value for name, value in named.items() if value is not None})
    return replace(sampler, temperature=0.0) if defaults.do_sample is False else sampler


def _number(name: str, value: Any) -> float:
    """Converts a number of any kind to a float; raises ValueError for True, "0.7" and the like."""
    try:
        if hasattr(value, "__float__") and not isinstance(value, bool | np.bool_):
            return float(value)
    except OverflowError:  # a whole number beyond every float
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):  # an array of several, or of something else
        pass
    raise ValueError(f"{name} is {value!r}; it must be a number")


class SamplerArrays(NamedTuple):
    """The fields of a `Sampler` as arrays, with the logarithm of min_p."""

    temperature: Array
    top_k: Array
    top_p: Array
    log_min_p: Array
    typical_p: Array
    epsilon_cutoff: Array
    eta_cutoff: Array


def sample_tokens(
    arrays: SamplerArrays | None,
    key: PRNGKeyArray | None,
    step: Int[Array, ""],
    logits: Logits,
    rows: Int[Array | np.ndarray, " batch"] | None = None,
) -> Int[Array, " batch"]:
    """Returns one token for each row.

    Row number i draws with fold_in(fold_in(key, i), step), so it does not depend on other rows.
    `rows` has their numbers; None: 0, 1, 2, … Without `arrays` it is the most probable
    token, and `key` is not used.
    """
    if arrays is None:
        return most_probable(logits)
    if key is None:
        raise ValueError("key is None; only a greedy choice needs none")

    def draw(row: Int[Array, ""], logits: Float[Array, " vocab"]) -> Int[Array, ""]:
        return jax.random.categorical(
            jax.random.fold_in(jax.random.fold_in(key, row), step), logits
        )

    truncated = _tempered(arrays, truncate(arrays, logits))
    numbers = jnp.arange(len(logits), dtype=jnp.int32) if rows is None else jnp.asarray(rows)
    return jax.vmap(draw)(numbers, truncated).astype(jnp.int32)


def most_probable(logits: Logits) -> Int[Array, " batch"]:
    """Computes the argmax over the vocabulary, in two passes that XLA:CPU vectorizes.

    XLA's own argmax, over pairs of value and index, takes twice as long.
    """
    last = logits.shape[-1] - 1
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    is_largest = logits == logits.max(axis=-1, keepdims=True)
    return jnp.where(is_largest, index, last).min(axis=-1)


def _tempered(arrays: SamplerArrays, logits: Logits) -> Logits:
    """Divides logits by the temperature, after shifting the largest to 0.

    Otherwise a division by a very small temperature would overflow. If the shift itself overflows,
    the division comes first.
    """
    largest, temperature = logits.max(axis=-1, keepdims=True), arrays.temperature
    shifted = logits - largest
    divided_first = logits / temperature - largest / temperature
    return jnp.where(jnp.isneginf(shifted), divided_first, shifted / temperature)


def truncate(arrays: SamplerArrays, logits: Logits) -> Logits:
    """Sets the logits of tokens outside of the truncations of `Sampler` to −∞, in their order.

    Logits are compared before the division by the temperature, which may make different ones equal.
    """
    vocab_size = logits.shape[-1]
    truncated = jax.lax.cond(
        (arrays.top_k > 0) & (arrays.top_k < vocab_size),
        lambda: _keep(logits, jnp.ones_like(logits), arrays.top_k.astype(jnp.float32)),
        lambda: logits,
    )

    def nucleus() -> Logits:
        probabilities = jax.nn.softmax(_tempered(arrays, truncated), axis=-1)
        return _keep(truncated, probabilities, arrays.top_p)

    truncated = jax.lax.cond(arrays.top_p < 1.0, nucleus, lambda: truncated)
    truncated = jnp.where(_tempered(arrays, truncated) >= arrays.log_min_p, truncated, -jnp.inf)
    is_used = (arrays.typical_p < 1.0) | (arrays.epsilon_cutoff > 0.0) | (arrays.eta_cutoff > 0.0)
    return jax.lax.cond(is_used, lambda: _truncate_by_entropy(arrays, truncated), lambda: truncated)


def _truncate_by_entropy(arrays: SamplerArrays, logits: Logits) -> Logits:
    """Applies typical_p, epsilon_cutoff and eta_cutoff."""

    def statistics(logits: Logits) -> tuple[Array, Array, Array]:
        log_probs = jax.nn.log_softmax(_tempered(arrays, logits), axis=-1)
        probs = jnp.exp(log_probs)
        entropy = -jnp.where(probs > 0, probs * log_probs, 0.0).sum(axis=-1, keepdims=True)
        return log_probs, probs, entropy

    def typical() -> Logits:
        log_probs, probs, entropy = statistics(logits)
        return _keep(logits, probs, arrays.typical_p, -jnp.abs(log_probs + entropy))

    def at_least(logits: Logits, least: Float[Array, "..."], probs: Array) -> Logits:
        is_largest = logits == logits.max(axis=-1, keepdims=True)
        return jnp.where((probs >= least) | is_largest, logits, -jnp.inf)

    logits = jax.lax.cond(arrays.typical_p < 1.0, typical, lambda: logits)
    logits = at_least(logits, arrays.epsilon_cutoff, statistics(logits)[1])
    _, probs, entropy = statistics(logits)
    eta = arrays.eta_cutoff
    return at_least(logits, jnp.minimum(eta, jnp.sqrt(eta) * jnp.exp(-entropy)), probs)


def _keep(
    logits: Logits,
    mass: Float[Array, "batch vocab"],
    wanted: Float[Array, ""],
    ranks: Float[Array, "batch vocab"] | None = None,
) -> Logits:
    """Keeps tokens at or above the highest threshold whose tokens have at least `wanted` mass.

    The threshold is one of `ranks`; None: of the logits.
    """
    order = _ordered(logits if ranks is None else ranks)

    def bisect(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # the mass at or above low suffices; at or above high it does not
        middle = low + (high - low) // 2
        enough = jnp.where(order >= middle[:, None], mass, 0.0).sum(axis=-1) >= wanted
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    lowest = jnp.zeros(len(logits), jnp.uint32)
    threshold, _ = jax.lax.fori_loop(0, 32, bisect, (lowest, order.max(axis=-1) + 1))
    return jnp.where(order >= threshold[:, None], logits, -jnp.inf)


def _ordered(x: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Maps float32 to uint32 so that greater floats have greater integers.

    Both zeros become 2³¹. Positive floats count up from there and negative ones down.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31 == 1, -bits, bits | jnp.uint32(1 << 31))
