"""Distributed alignment search: learns the subspace of an activation that represents a variable.

`train_alignment` learns the rotation R of an interchange intervention (see `interchange`) by
gradient descent. The loss is lowest if the model predicts the expected answers. R is the transposed
factor Q of the QR decomposition of a free matrix [dim, k], so its rows are always orthonormal.

The accuracy of a learnt subspace is evidence only on pairs that were not used to learn it. Compare
it with the accuracy of a random subspace (`Alignment.initial_accuracy`). A large subspace can
always carry the answer, so also compare subspaces of several sizes k.

Reference:
    Geiger et al. 2023, "Finding Alignments Between Interpretable Causal Variables and Distributed
    Neural Representations".
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from jaxformer.functional.trees import Weights
from jaxformer.interpret.interchange import (
    Examples,
    InterchangePairs,
    InterchangeSite,
    Place,
    answer_logits,
    check_interchange,
    measure_accuracy,
    read_examples,
)
from jaxformer.interpret.summary import summary
from jaxformer.models.config.check import (
    check_at_least,
    check_fraction,
    check_positive,
    whole_number,
)
from jaxformer.models.language_model import LanguageModel, Variables

# The learning rate is an argument of the compiled step, so that it does not cause a recompilation.
_ADAM = optax.scale_by_adam()


@dataclass(frozen=True)
class AlignmentSettings:
    """Settings of `train_alignment`.

    Attributes:
        steps: the number of Adam steps.
        batch_size: the number of pairs per step.
        learning_rate: the learning rate of Adam.
        held_out: the fraction of the pairs that is not used for training.
        seed: random seed of the split, the batches and the initial subspace.
    """

    steps: int = 200
    batch_size: int = 32
    learning_rate: float = 1e-2
    held_out: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_at_least(1, self, "steps", "batch_size")
        check_positive(self, "learning_rate", "held_out")
        check_fraction(self, "held_out")


class Alignment(NamedTuple):
    """Result of `train_alignment`.

    Attributes:
        rotation: R, an orthonormal basis of the learnt subspace.
        accuracy: the interchange-intervention accuracy of R on the held-out pairs: the fraction of
            pairs for which the model predicts the answer.
        initial_accuracy: the accuracy of the initial, random subspace on the same pairs.
        losses: the cross-entropy of the answers at each training step, in nats.
    """

    rotation: Float[Array, "k dim"]
    accuracy: float
    initial_accuracy: float
    losses: Float[np.ndarray, " steps"]

    def __repr__(self) -> str:
        """See `summary`."""
        return summary(self)


def train_alignment(
    model: LanguageModel,
    variables: Variables,
    pairs: InterchangePairs,
    site: InterchangeSite,
    size: int,
    settings: AlignmentSettings = AlignmentSettings(),
) -> Alignment:
    """Learns the subspace whose interchange makes the model predict the expected answers.

    Args:
        model: a model without a source.
        variables: the model's variables; they do not change.
        pairs: the pairs of texts, with the expected answers. The split into training pairs and
            held-out pairs is random, so pass each pair once.
        site: where the intervention replaces values. All positions share one subspace.
        size: k, the dimension of the subspace.
        settings: the settings of the training.

    Raises:
        ValueError: An argument is invalid.
    """
    checked, place, dim = check_interchange(model, variables, pairs, site)
    if whole_number("size", size, 1) > dim:
        raise ValueError(
            f"size is {size}; it must be at most {dim}, the number of features at {site.point!r}"
        )
    rng = np.random.default_rng(settings.seed)
    held_out, trained = _split(len(checked.answers), settings.held_out, rng)
    weights, batch_size = variables["params"], settings.batch_size
    examples = read_examples(model, weights, checked, site.point, place, batch_size)
    tested: Examples = jax.tree.map(lambda x: x[held_out], examples)
    free = jax.random.normal(jax.random.key(settings.seed), (dim, size), jnp.float32)
    first = _rotation(free)
    state, losses = (free, _ADAM.init(free)), []
    rate = jnp.float32(settings.learning_rate)
    for _ in range(settings.steps):
        chosen = rng.choice(trained, batch_size)
        batch: Examples = jax.tree.map(lambda x: x[chosen], examples)  # noqa: B023 (used at once)
        state, loss = _step(model, weights, site.point, (batch, place, rate), state)
        losses.append(loss)
    rotations = {"initial": first, "learnt": _rotation(state[0])}
    found = {
        name: measure_accuracy(model, weights, site.point, (tested, x, place), batch_size)
        for name, x in rotations.items()
    }
    return Alignment(
        rotations["learnt"], found["learnt"], found["initial"], np.asarray(losses, np.float32)
    )


def _split(
    count: int, held_out: float, rng: np.random.Generator
) -> tuple[Int[np.ndarray, " held_out"], Int[np.ndarray, " trained"]]:
    """Splits the indices 0 … count − 1 at random into (held-out indices, training indices)."""
    number = round(held_out * count)
    if not 0 < number < count:
        raise ValueError(
            f"held_out is {held_out}, so {number} of {count} pairs are held out; at least one pair "
            "must be held out and at least one used for training. Pass more pairs"
        )
    order = rng.permutation(count)
    return order[:number], order[number:]


def _rotation(free: Float[Array, "dim k"]) -> Float[Array, "k dim"]:
    """Returns R, whose orthonormal rows have the same span as the columns of `free`."""
    return jnp.linalg.qr(free)[0].T


@partial(jax.jit, static_argnums=(0, 2))
def _step(
    model: LanguageModel,
    weights: Weights,
    point: str,
    arguments: tuple[Examples, Place, Float[Array, ""]],
    state: tuple[Float[Array, "dim k"], optax.OptState],
) -> tuple[tuple[Float[Array, "dim k"], optax.OptState], Float[Array, ""]]:
    """Makes one step of Adam; returns the new state and the loss before the step."""
    batch, place, rate = arguments
    free, moments = state

    def loss(free: Float[Array, "dim k"]) -> Float[Array, ""]:
        logits = answer_logits(model, weights, point, batch, _rotation(free), place)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.answers).mean()

    value, gradient = jax.value_and_grad(loss)(free)
    updates, moments = _ADAM.update(gradient, moments)
    free = jax.tree.map(lambda x, update: x - rate * update, free, updates)
    return (free, moments), value
