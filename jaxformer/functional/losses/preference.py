"""Losses of preference tuning and of reinforcement learning with checkable answers.

The loss functions take log-probabilities, so they can be used with every model. Each loss function
returns one loss per pair or per token, and the caller takes the mean (see `masked_mean`). All
functions compute in float32.

References:
    DPO: Rafailov et al. 2023, equation 7. ORPO: Hong et al. 2024, equations 6 and 7. GRPO: Shao et
    al. 2024, equation 3. The loss with clipped ratios: Schulman et al. 2017, equation 7.
"""

from numbers import Real

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxformer.functional.arguments import checks_arguments
from jaxformer.functional.losses.cross_entropy import token_losses


@checks_arguments()
def token_log_probs(
    logits: Float[Array, "*batch length vocab"], targets: Int[Array, "*batch length"]
) -> Float[Array, "*batch length"]:
    """Returns log P(target) of each token in nats."""
    return -token_losses(logits, targets)


@checks_arguments()
def token_entropies(logits: Float[Array, "*batch vocab"]) -> Float[Array, "*batch"]:
    """Returns the entropy −Σ_v p_v log p_v of each predicted distribution in nats."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -(jnp.exp(log_probs) * log_probs).sum(axis=-1)


@checks_arguments()
def masked_mean(
    values: Float[Array, "*shape"], mask: Bool[Array, "*shape"], axis: int | None = None
) -> Float[Array, "*rest"]:
    """Returns the mean of the values at which the mask is True.

    Args:
        values: the values.
        mask: which values count.
        axis: the axis of the mean; all axes if None.

    Returns:
        The mean, which is NaN where no value counts.
    """
    mask = jnp.asarray(mask, bool)
    chosen = jnp.where(mask, values.astype(jnp.float32), 0.0)
    return chosen.sum(axis=axis) / mask.sum(axis=axis)


def _check_beta(beta: float, **_: object) -> None:
    if isinstance(beta, Real) and not beta > 0:
        raise ValueError(f"beta is {beta}; it must be above 0")


@checks_arguments(_check_beta)
def dpo_loss(
    chosen: Float[Array, "*batch"],
    rejected: Float[Array, "*batch"],
    reference_chosen: Float[Array, "*batch"],
    reference_rejected: Float[Array, "*batch"],
    beta: float = 0.1,
) -> Float[Array, "*batch"]:
    """Computes −log σ(β [(log π(c) − log π₀(c)) − (log π(r) − log π₀(r))]) for each pair.

    Args:
        chosen: log π(c), the log-probability of the better answer, summed over its tokens.
        rejected: log π(r), the log-probability of the worse answer.
        reference_chosen: log π₀(c), computed with the model before the tuning.
        reference_rejected: log π₀(r), computed with the model before the tuning.
        beta: β; a larger value keeps the model closer to the model before the tuning.
    """
    margin = (chosen - rejected) - (reference_chosen - reference_rejected)
    return -jax.nn.log_sigmoid(beta * margin.astype(jnp.float32))


@checks_arguments()
def odds_ratio_loss(
    chosen: Float[Array, "*batch"], rejected: Float[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """Computes −log σ(log odds(c) − log odds(r)), ORPO's term for each pair.

    Here odds = P / (1 − P). ORPO adds this term, multiplied by a weight λ, to the cross-entropy of
    the better answer.

    Args:
        chosen: the mean log-probability per token of the better answer.
        rejected: the mean log-probability per token of the worse answer.
    """
    chosen, rejected = chosen.astype(jnp.float32), rejected.astype(jnp.float32)
    log_odds = (chosen - rejected) - (_log_one_minus_exp(chosen) - _log_one_minus_exp(rejected))
    return -jax.nn.log_sigmoid(log_odds)


def _log_one_minus_exp(x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Returns log(1 − e^x) for x < 0 without cancellation (Mächler 2012)."""
    near_zero = x > -jnp.log(2.0)
    # `where` hides infinite values from the result, but not from the gradient, so each branch gets
    # a harmless input where it is not used.
    small, large = jnp.where(near_zero, x, -1.0), jnp.where(near_zero, -1.0, x)
    return jnp.where(near_zero, jnp.log(-jnp.expm1(small)), jnp.log1p(-jnp.exp(large)))


@checks_arguments()
def group_advantages(
    rewards: Float[Array, "groups answers"],
    *,
    divides_by_std: bool = True,
    epsilon: float = 1e-6,
) -> Float[Array, "groups answers"]:
    """Returns how much better each answer is than the mean of the answers to its prompt.

    Args:
        rewards: the reward of each answer; a group has the answers to one prompt.
        divides_by_std: whether to divide by the standard deviation within the group, as in GRPO.
            The division makes very hard and very easy prompts count more than others (Liu et al.
            2025).
        epsilon: added to the standard deviation.
    """
    rewards = rewards.astype(jnp.float32)
    centred = rewards - rewards.mean(axis=-1, keepdims=True)
    if not divides_by_std:
        return centred
    return centred / (rewards.std(axis=-1, ddof=1, keepdims=True) + epsilon)


def _check_clip(clip: float, **_: object) -> None:
    if isinstance(clip, Real) and not clip > 0:
        raise ValueError(f"clip is {clip}; it must be above 0")


@checks_arguments(_check_clip)
def clipped_policy_loss(
    log_probs: Float[Array, "*batch length"],
    old_log_probs: Float[Array, "*batch length"],
    advantages: Float[Array, "*batch"],
    clip: float = 0.2,
) -> Float[Array, "*batch length"]:
    """Computes −min(r A, clip(r, 1 − ε, 1 + ε) A) for each token, where r = π / π_old.

    Args:
        log_probs: log π of each token of the answers.
        old_log_probs: log π_old, computed with the model that generated the answers.
        advantages: A of each answer (see `group_advantages`).
        clip: ε.
    """
    ratio = jnp.exp((log_probs - old_log_probs).astype(jnp.float32))
    scale = advantages[..., None]
    return -jnp.minimum(ratio * scale, jnp.clip(ratio, 1 - clip, 1 + clip) * scale)
