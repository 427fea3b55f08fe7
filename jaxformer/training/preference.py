"""The objective of preference tuning: DPO on pairs of a better and a worse answer.

Reference:
    Rafailov et al. 2023.
"""

import math
from dataclasses import dataclass
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.functional.losses.preference import dpo_loss, token_log_probs
from jaxformer.functional.trees import Weights
from jaxformer.models.language_model import LanguageModel
from jaxformer.models.sharding.explicit_axes import in_auto_axes
from jaxformer.training.batch import Batch, Leaf
from jaxformer.training.objectives import (
    NoiseKey,
    Objective,
    Scalar,
    Sums,
    read_batch,
    target_weights,
)


class PreferenceBatch(NamedTuple, Generic[Leaf]):
    """Pairs of answers to the same prompts.

    Attributes:
        chosen: The better answers, each in a sequence with its prompt. The targets with weight 1
            are the tokens of the answer. A sequence without such targets is padding.
        rejected: The worse answers.
        reference_chosen: The log-probability of each better answer under the model before the
            tuning, float [batch].
        reference_rejected: The log-probability of each worse answer under this earlier model.
    """

    chosen: Batch[Leaf]
    rejected: Batch[Leaf]
    reference_chosen: Leaf
    reference_rejected: Leaf


@dataclass(frozen=True)
class DirectPreference(Objective[PreferenceBatch]):
    """DPO: trains the model to prefer the better answer more than it did before the tuning.

    A preference is the log-probability of the better answer minus that of the worse answer, in
    nats. Reports also contain `preference_accuracy`, the fraction of pairs whose preference has
    increased, and `preference_margin`, the mean of β times the increase.

    Attributes:
        beta: β of `dpo_loss`.
    """

    batch_type = PreferenceBatch
    beta: float = 0.1

    def __post_init__(self) -> None:
        """Checks β."""
        if not 0 < self.beta < math.inf:
            raise ValueError(f"beta is {self.beta}; it must be above 0 and finite")

    def loss(
        self, model: LanguageModel, params: Weights, batch: PreferenceBatch, key: NoiseKey
    ) -> Sums:
        """Computes the sum of the losses of the pairs."""
        keys = (None, None) if key is None else jax.random.split(key)
        chosen = answer_log_probs(model, params, batch.chosen, keys[0])
        rejected = answer_log_probs(model, params, batch.rejected, keys[1])
        losses = dpo_loss(
            chosen, rejected, batch.reference_chosen, batch.reference_rejected, self.beta
        )
        margin = (chosen - rejected) - (batch.reference_chosen - batch.reference_rejected)
        real = _is_pair(batch)

        def total(values: Array) -> Scalar:
            return jnp.where(real, values, 0.0).sum()

        return Sums(
            total(losses),
            {
                "preference_accuracy": total(jnp.float32(margin > 0)),
                "preference_margin": total(self.beta * margin),
            },
        )

    def count(self, batch: PreferenceBatch) -> Scalar:
        """Returns the number of pairs as float32."""
        return _is_pair(batch).sum(dtype=jnp.float32)


def _is_pair(batch: PreferenceBatch) -> Array:
    """Returns which elements of a batch are pairs, and not padding."""
    return (target_weights(batch.chosen) > 0).any(axis=-1)


@in_auto_axes
def answer_log_probs(
    model: LanguageModel, params: Weights, batch: Batch, dropout_key: NoiseKey = None
) -> Float[Array, " batch"]:
    """Computes the log-probability of each answer: the sum over its tokens, in nats.

    Memory holds the logits of only one sequence at a time, also in the backward pass.

    Args:
        model: The model.
        params: The model's parameters.
        batch: The sequences. The targets with weight 1 are the answers.
        dropout_key: The random key for dropout; no dropout if None.
    """
    key = dropout_key if model.config.dropout > 0 else None
    hidden = read_batch(model, params, batch, key).hidden

    @jax.checkpoint
    def of_sequence(
        arrays: tuple[Float[Array, "length dim"], Int[Array, " length"], Float[Array, " length"]],
    ) -> Scalar:
        states, targets, weights = arrays
        log_probs = token_log_probs(model.logits(params, states[None])[0], targets)
        return jnp.where(weights > 0, log_probs, 0.0).sum()

    return jax.lax.map(of_sequence, (hidden, batch.targets, target_weights(batch)))
