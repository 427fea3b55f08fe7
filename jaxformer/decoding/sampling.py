"""Sampling: truncates the distribution of the next token and draws from it.

The temperature and the truncations are arguments of the compiled step, so new values need no new
compilation. Bisection of the logits' bit patterns finds each threshold exactly, in 32 passes of
compare-and-sum. On a CPU, sorting 50,000 logits takes many times as long as the 32 passes.
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

# The logits are divided by a temperature between these bounds. XLA replaces the division by a
# multiplication with the reciprocal. If a device flushed the reciprocal to zero, −∞ · 0 would be
# NaN.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**126


@dataclass(frozen=True)
class Sampler:
    """Sampling parameters: the temperature, and truncations of the distribution.

    The temperature applies first, then the truncations in the order of the attributes. Each
    truncation applies only to the tokens that the previous truncation kept. Tokens that tie at a
    threshold are all kept.

    Attributes:
        temperature: divisor of the logits, at most 2¹²⁶. With 0, sampling is greedy: the most
            probable token is chosen without randomness.
        top_k: keep this number of the most probable tokens, or all tokens if 0.
        top_p: keep the smallest set of most probable tokens with at least this total probability
            (Holtzman et al. 2020).
        min_p: keep the tokens with at least this fraction of the largest probability.
        typical_p: keep the smallest set of tokens with at least this total probability. Tokens
            whose −log P is closest to the entropy are kept first (Meister et al. 2022).
        epsilon_cutoff: keep the tokens with at least this probability, and always the most probable
            token (Hewitt et al. 2022).
        eta_cutoff: keep the tokens with at least the probability min(η, √η · e^−entropy) for η =
            eta_cutoff, and always the most probable token (Hewitt et al. 2022).

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
            object.__setattr__(self, name, _to_float(name, getattr(self, name)))
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
        """Returns the fields as arrays, or None if the sampler is greedy.

        The arrays are arguments of compiled functions, so new values cause no new compilation.
        """
        if self.greedy:
            return None
        return SamplerArrays(
            jnp.float32(max(self.temperature, _SMALLEST)),  # Smaller numbers may be flushed to 0.
            jnp.int32(min(self.top_k, np.iinfo(np.int32).max)),
            jnp.float32(self.top_p),
            jnp.float32(math.log(self.min_p) if self.min_p else -math.inf),
            jnp.float32(self.typical_p),
            jnp.float32(self.epsilon_cutoff),
            jnp.float32(self.eta_cutoff),
        )


def default_sampler(defaults: GenerationDefaults) -> Sampler:
    """Returns the sampler that a checkpoint defines, for calls that pass no sampler.

    As in transformers, the sampler is greedy if the checkpoint disables sampling (`do_sample`). To
    sample with the checkpoint's truncations and another temperature, use
    `replace(default_sampler(…), temperature=0.7)`.
    """
    named = {field.name: getattr(defaults, field.name) for field in fields(Sampler)}
    sampler = Sampler(**{name: value for name, value in named.items() if value is not None})
    return replace(sampler, temperature=0.0) if defaults.do_sample is False else sampler


def _to_float(name: str, value: Any) -> float:
    """Converts a number of any type to a float. Raises ValueError for bools, strings, etc."""
    try:
        if hasattr(value, "__float__") and not isinstance(value, bool | np.bool_):
            return float(value)
    except OverflowError:  # The integer is too large for a float.
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        pass  # `value` is an array of several numbers or of strings.
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
    indices: Int[Array | np.ndarray, " batch"] | None = None,
) -> Int[Array, " batch"]:
    """Samples one token per batch element, or returns the most probable tokens if `arrays` is None.

    Args:
        arrays: the sampler's fields, or None for greedy decoding.
        key: a random key, not used if `arrays` is None. Batch element i samples with
            fold_in(fold_in(key, indices[i]), step), so its token does not depend on other elements.
        step: number of tokens generated so far.
        logits: float32 [batch, vocab].
        indices: the index of each batch element in the caller's arguments; 0, 1, 2, … if None.
    """
    if arrays is None:
        return most_probable(logits)
    if key is None:
        raise ValueError(
            "key is None, but sampling needs a random key; pass jax.random.key(seed), or "
            "temperature 0"
        )

    def draw(index: Int[Array, ""], logits: Float[Array, " vocab"]) -> Int[Array, ""]:
        return jax.random.categorical(
            jax.random.fold_in(jax.random.fold_in(key, index), step), logits
        )

    truncated = _divide_by_temperature(arrays, truncate(arrays, logits))
    numbers = jnp.arange(len(logits), dtype=jnp.int32) if indices is None else jnp.asarray(indices)
    return jax.vmap(draw)(numbers, truncated).astype(jnp.int32)


def most_probable(logits: Logits) -> Int[Array, " batch"]:
    """Computes the argmax over the vocabulary, in two passes that XLA:CPU vectorizes.

    `jnp.argmax` takes twice as long as this function, because XLA reduces over pairs of value and
    index.
    """
    last = logits.shape[-1] - 1
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    is_largest = logits == logits.max(axis=-1, keepdims=True)
    return jnp.where(is_largest, index, last).min(axis=-1)


def _divide_by_temperature(arrays: SamplerArrays, logits: Logits) -> Logits:
    """Divides logits by the temperature, after subtracting the largest logit.

    Without the subtraction, the quotient would overflow at a very small temperature. If the
    subtraction overflows, the function divides both logits before it subtracts.
    """
    largest, temperature = logits.max(axis=-1, keepdims=True), arrays.temperature
    shifted = logits - largest
    divided_first = logits / temperature - largest / temperature
    return jnp.where(jnp.isneginf(shifted), divided_first, shifted / temperature)


def truncate(arrays: SamplerArrays, logits: Logits) -> Logits:
    """Sets the logits of the tokens that the `Sampler` excludes to −∞.

    The comparisons use the logits before division by the temperature, because the division may
    round different logits to the same number.
    """
    vocab_size = logits.shape[-1]
    truncated = jax.lax.cond(
        (arrays.top_k > 0) & (arrays.top_k < vocab_size),
        lambda: _keep(logits, jnp.ones_like(logits), arrays.top_k.astype(jnp.float32)),
        lambda: logits,
    )

    def nucleus() -> Logits:
        probabilities = jax.nn.softmax(_divide_by_temperature(arrays, truncated), axis=-1)
        return _keep(truncated, probabilities, arrays.top_p)

    truncated = jax.lax.cond(arrays.top_p < 1.0, nucleus, lambda: truncated)
    truncated = jnp.where(
        _divide_by_temperature(arrays, truncated) >= arrays.log_min_p, truncated, -jnp.inf
    )
    is_used = (arrays.typical_p < 1.0) | (arrays.epsilon_cutoff > 0.0) | (arrays.eta_cutoff > 0.0)
    return jax.lax.cond(is_used, lambda: _truncate_by_entropy(arrays, truncated), lambda: truncated)


def _truncate_by_entropy(arrays: SamplerArrays, logits: Logits) -> Logits:
    """Applies typical_p, epsilon_cutoff and eta_cutoff."""

    def statistics(logits: Logits) -> tuple[Array, Array, Array]:
        log_probs = jax.nn.log_softmax(_divide_by_temperature(arrays, logits), axis=-1)
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
    """Sets the logits of all tokens to −∞, except the highest-ranked tokens.

    The function keeps the smallest number of tokens whose `mass` sums to at least `wanted`. Tokens
    are ranked by `ranks`, or by the logits if `ranks` is None. If several tokens tie for the last
    rank, the function keeps all of them.
    """
    order = _to_ordered_uint(logits if ranks is None else ranks)

    def bisect(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        # The tokens with `order` ≥ low have a total mass of at least `wanted`. The tokens with
        # `order` ≥ high have a total mass below `wanted`.
        low, high = bounds
        middle = low + (high - low) // 2
        enough = jnp.where(order >= middle[:, None], mass, 0.0).sum(axis=-1) >= wanted
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    lowest = jnp.zeros(len(logits), jnp.uint32)
    threshold, _ = jax.lax.fori_loop(0, 32, bisect, (lowest, order.max(axis=-1) + 1))
    return jnp.where(order >= threshold[:, None], logits, -jnp.inf)


def _to_ordered_uint(x: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Converts float32 to uint32, preserving the order.

    The integer is 2³¹ for 0.0 and −0.0, larger for positive floats and smaller for negative floats.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31 == 1, -bits, bits | jnp.uint32(1 << 31))
