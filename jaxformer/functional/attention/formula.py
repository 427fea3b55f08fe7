"""The formula of attention. Tests compare all other implementations with this module.

s_ij = q_i · k_j / √d        α_i = softmax_j(s_ij)        o_i = Σ_j α_ij v_j
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def explicit_attention(
    query: Float[Array, "*batch queries d"],
    key: Float[Array, "*#batch keys d"],
    value: Float[Array, "*#batch keys v"],
    mask: Bool[Array, "*#batch queries keys"] | None = None,
    scale: float | None = None,
) -> Float[Array, "*batch queries v"]:
    """Computes o_i = Σ_j α_ij v_j with α_i = softmax_j(scale · q_i·k_j) over the visible keys j.

    The function stores all scores in one array. The output of a query without visible keys is 0.

    Args:
        query: the queries q. The heads are one of the batch axes.
        key: the keys k.
        value: the values v.
        mask: True where a query may attend to a key; None allows all keys.
        scale: the factor of the scores; defaults to 1/√d.

    Reference:
        Vaswani et al. 2017, §3.2.1; notes, lecture 11 §5.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * (query @ key.swapaxes(-2, -1))
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    return softmax(scores) @ value


def softmax(
    scores: Float[Array, "*batch keys"], sink: Float[Array, "*heads 1 1"] | None = None
) -> Float[Array, "*batch keys"]:
    """Computes exp(s_j) / (exp(sink) + Σ_k exp(s_k)) over the last axis.

    A sink is one learned score per head. It takes part in the softmax, but has no value vector.
    Without a sink, exp(sink) is 0. Returns zeros where all scores are −∞.

    Reference:
        gpt-oss 2025 (arXiv:2508.10925), sinks.
    """
    largest = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    if sink is not None:
        largest = jnp.maximum(largest, jax.lax.stop_gradient(sink))
    powers = jnp.exp(scores - jnp.where(largest == -jnp.inf, 0.0, largest))
    total = powers.sum(axis=-1, keepdims=True)
    if sink is not None:
        total += jnp.exp(sink - largest)
    return powers / jnp.where(total == 0.0, 1.0, total)
