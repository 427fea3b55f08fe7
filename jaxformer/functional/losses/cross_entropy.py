"""Cross-entropy: the weighted mean of −log P(target) over tokens.

All computations are float32, also for logits of another dtype. The logits at position i are
compared with the target at position i, so the caller must shift the targets.
"""

from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer, Shaped

from jaxformer.functional.arguments import checks_arguments


def token_losses(
    logits: Float[Array, "*batch vocab"],
    targets: Int[Array, "*batch"],
    label_smoothing: float = 0.0,
) -> Float[Array, "*batch"]:
    """Computes −Σ_v q_v log softmax(logits)_v in nats.

    Here q = (1 − ε) one-hot(target) + ε / vocab. The loss of a target outside 0 … vocab − 1 is NaN.

    Args:
        logits: one vector for each token.
        targets: ids of the classes.
        label_smoothing: ε.
    """
    return smoothed_and_plain(logits, targets, label_smoothing)[0]


def smoothed_and_plain(
    logits: Float[Array, "*batch vocab"], targets: Int[Array, "*batch"], label_smoothing: float
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Returns `token_losses` with and without label smoothing.

    With label smoothing, the smallest possible loss is above 0, so only the loss without label
    smoothing can be compared with a held-out loss.
    """
    logits = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=-1)
    is_id = (targets >= 0) & (targets < logits.shape[-1])
    is_target = jnp.asarray(targets)[..., None] == jnp.arange(logits.shape[-1], dtype=jnp.int32)
    # This masked sum replaces a lookup, whose gradient would write an additional array of the size
    # of the logits to memory. XLA fuses the gradient of the masked sum with the gradient
    # of `total`.
    picked = jnp.where(is_target, logits, 0.0).sum(axis=-1)
    picked = jnp.where(is_id, picked, jnp.nan)
    if not label_smoothing:
        return total - picked, total - picked
    smoothed = (1 - label_smoothing) * picked + label_smoothing * logits.mean(axis=-1)
    return total - smoothed, total - picked


def check_smoothing(label_smoothing: float) -> None:
    """Raises ValueError unless label_smoothing is in [0, 1)."""
    if isinstance(label_smoothing, Real) and not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be in [0, 1)")


def check_targets(
    shape: tuple[int, ...],
    targets: Integer[Any, "*batch"],
    weights: Shaped[Any, "*weighted"] | None,
) -> None:
    """Raises ValueError if the targets or the weights do not fit logits of this shape.

    Targets with a weight above 0 must be in 0 … vocab_size − 1. Inside jit, where values are
    unknown, the loss of an invalid target is NaN.
    """
    *batch, vocab_size = shape
    for name, array in (("targets", targets), ("weights", weights)):
        if array is not None and list(array.shape) != batch:
            raise ValueError(
                f"{name} has shape {array.shape}; it must have the shape {tuple(batch)} of the "
                "logits without their last axis"
            )
    if isinstance(targets, jax.core.Tracer) or isinstance(weights, jax.core.Tracer):
        return
    counted = np.asarray(targets)
    if weights is not None:
        counted = counted[np.asarray(weights) != 0]
    outside = counted[(counted < 0) | (counted >= vocab_size)]
    if outside.size:
        raise ValueError(f"targets contains {outside[0]}; a target must be in 0 … {vocab_size - 1}")


def _check_losses(
    logits: Float[Any, "*logits"],
    targets: Integer[Any, "*batch"],
    weights: Shaped[Any, "*weighted"] | None,
    label_smoothing: float,
) -> None:
    check_smoothing(label_smoothing)
    check_targets(logits.shape, targets, weights)


@checks_arguments(_check_losses)
def cross_entropy(
    logits: Float[Array, "*batch vocab"],
    targets: Integer[Array, "*batch"],
    weights: Shaped[Array, "*batch"] | None = None,
    label_smoothing: float = 0.0,
) -> Float[Array, ""]:
    """Computes Σ w_i loss_i / Σ w_i in nats per token; 0 if Σ w_i is 0.

    The loss is the average over all tokens of the batch, so it does not depend on how tokens are
    distributed over sequences.

    Args:
        logits: one vector for each token.
        targets: ids of the classes. Targets with weight 0 may have any value, such as −100.
        weights: 1 for tokens to learn, 0 for other tokens, such as padding; all 1 if None.
        label_smoothing: see `token_losses`.

    Raises:
        ValueError: A target with a weight above 0 is out of range (inside jit, the loss is NaN
            instead), or shapes do not fit.
    """
    losses = token_losses(logits, targets, label_smoothing)
    return weighted_mean(*weighted_sum(losses, weights))


def weighted_sum(
    losses: Float[Array, "*batch"], weights: Shaped[Array, "*batch"] | None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns (Σ w_i loss_i, Σ w_i); every weight w_i is 1 if `weights` is None."""
    if weights is None:
        return losses.sum(), jnp.float32(losses.size)
    weights = weights.astype(jnp.float32)
    return (weights * jnp.where(weights != 0, losses, 0.0)).sum(), weights.sum()


def weighted_mean(total: Float[Array, "*shape"], count: Float[Array, ""]) -> Float[Array, "*shape"]:
    """Returns total / count; 0 if `count` is 0."""
    return total / jnp.where(count == 0, 1.0, count)
