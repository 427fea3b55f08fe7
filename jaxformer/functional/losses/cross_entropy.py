"""Cross-entropy: −log P(target), averaged over the tokens that count.

Everything here is float32 whatever the dtype of the logits. Output i is scored against target i:
the caller shifts the targets.
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
    """Computes −Σ_v q_v log softmax(logits)_v in nats, q = (1 − ε) one-hot(target) + ε / vocab.

    The loss of a target outside 0 … vocab − 1 is NaN, not that of another class.

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

    The least possible loss with label smoothing is above 0, so only the loss without it can be
    compared with a held-out loss.
    """
    logits = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=-1)
    is_id = (targets >= 0) & (targets < logits.shape[-1])
    is_target = jnp.asarray(targets)[..., None] == jnp.arange(logits.shape[-1], dtype=jnp.int32)
    # A sum, not a lookup: the gradient of a lookup writes an array of zeros and one logit per token
    # to memory, that of the sum is computed together with the gradient of `total`.
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
    """Raises ValueError if targets or weights do not fit logits of this shape.

    A target that counts must be a class; inside jit, where its value is unknown, its loss is NaN.
    """
    *batch, vocab_size = shape
    for name, array in (("targets", targets), ("weights", weights)):
        if array is not None and list(array.shape) != batch:
            raise ValueError(f"{name} are {array.shape}; outputs are {tuple(batch)}")
    if isinstance(targets, jax.core.Tracer) or isinstance(weights, jax.core.Tracer):
        return
    counted = np.asarray(targets)
    if weights is not None:
        counted = counted[np.asarray(weights) != 0]
    outside = counted[(counted < 0) | (counted >= vocab_size)]
    if outside.size:
        raise ValueError(f"targets hold {outside[0]}; it must be in 0 … {vocab_size - 1}")


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

    The average is over tokens, not over rows: a batch of unequal lengths has the same loss as its
    tokens in any other arrangement.

    Args:
        logits: one vector for each token.
        targets: ids of the classes. A target of weight 0 may have any value, such as −100.
        weights: 1 for tokens to learn, 0 for the rest, such as padding; None: all 1.
        label_smoothing: see `token_losses`.

    Raises:
        ValueError: a target that counts is out of range (inside jit the loss is NaN instead), or a
            shape does not fit.
    """
    losses = token_losses(logits, targets, label_smoothing)
    return weighted_mean(*weighted_sum(losses, weights))


def weighted_sum(
    losses: Float[Array, "*batch"], weights: Shaped[Array, "*batch"] | None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the weighted sum of the losses and the sum of the weights; None: all are 1."""
    if weights is None:
        return losses.sum(), jnp.float32(losses.size)
    weights = weights.astype(jnp.float32)
    return (weights * jnp.where(weights != 0, losses, 0.0)).sum(), weights.sum()


def weighted_mean(total: Float[Array, "*shape"], count: Float[Array, ""]) -> Float[Array, "*shape"]:
    """Returns total / count, or total (0) if nothing counts."""
    return total / jnp.where(count == 0, 1.0, count)
