"""The formula of attention. Tests compare all other implementations with this module.

s_ij = q_i · k_j / √d        α_i = softmax_j(s_ij)        o_i = Σ_j α_ij v_j
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def attention(
    query: Float[Array, "*batch heads queries d"],
    key: Float[Array, "*batch kv_heads keys d"],
    value: Float[Array, "*batch kv_heads keys v"],
    visible: Bool[Array, "*#batch queries keys"],
) -> Float[Array, "*batch heads queries v"]:
    """Computes o_i = Σ_j α_ij v_j with α_i = softmax_j(q_i·k_j / √d) over the visible keys j.

    Each of the h key heads serves a group of g query heads. Queries without visible keys give
    zeros.

    Reference:
        Vaswani et al. 2017, §3.2.1; Ainslie et al. 2023 (grouped heads); notes, lecture 11 §5.
    """
    *batch, heads, length, dim = query.shape
    query = query.reshape(*batch, key.shape[-3], -1, length, dim)
    scores = jnp.einsum("...hgid,...hjd->...hgij", query, key) / dim**0.5
    weights = softmax(jnp.where(visible[..., None, None, :, :], scores, -jnp.inf))
    output = jnp.einsum("...hgij,...hjv->...hgiv", weights, value)
    return output.reshape(*batch, heads, length, -1)


def softmax(
    scores: Float[Array, "*batch keys"], sink: Float[Array, "*heads 1 1"] | None = None
) -> Float[Array, "*batch keys"]:
    """Computes exp(s_j) / (exp(sink) + Σ_k exp(s_k)) over the last axis.

    A sink is a learned score of each head that takes part in the softmax but has no value. Without
    a sink, exp(sink) is 0. Returns zeros where all scores are −∞.

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
