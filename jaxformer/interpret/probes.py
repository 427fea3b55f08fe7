"""Linear probes: test whether a linear classifier can read a token's label from a layer.

A probe with enough features can memorize the label of each token id, so a high accuracy alone is
not evidence. The control task therefore assigns a random label to each id, with the frequencies of
the real labels. The selectivity is the accuracy on the real labels minus the accuracy on the random
labels. The selectivity measures the information about the label beyond the identity of the token.

Tokens of one text share many features. A probe that was trained on some tokens of a text can
recognize this text in its held-out tokens, so `groups` holds out whole texts.

Reference:
    Alain & Bengio 2016, "Understanding intermediate layers using linear classifier probes"; Hewitt
    & Liang 2019, "Designing and Interpreting Probes with Control Tasks".
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from jaxformer.interpret.summary import summary
from jaxformer.models.config.check import whole_number


class Probes(NamedTuple):
    """Linear probes of all layers, and their accuracies.

    Attributes:
        kernel: maps features, standardized over the training examples, to logits of the labels.
        bias: the bias of the logits.
        accuracy: accuracy of the probes on the held-out examples.
        control_accuracy: accuracy of the control task's probes on the same held-out examples.
    """

    kernel: Float[Array, "layers dim labels"]
    bias: Float[Array, "layers labels"]
    accuracy: Float[Array, " layers"]
    control_accuracy: Float[Array, " layers"]

    def __repr__(self) -> str:
        """See `summary`."""
        return summary(self)

    @property
    def selectivity(self) -> Float[Array, " layers"]:
        """The accuracy minus the accuracy on the control task."""
        return self.accuracy - self.control_accuracy


def train_probes(
    features: Float[Array, "layers examples dim"],
    labels: Int[Array, " examples"],
    token_ids: Int[Array, " examples"],
    held_out: float = 0.25,
    steps: int = 300,
    seed: int = 0,
    groups: Int[Array, " examples"] | None = None,
) -> Probes:
    """Trains one probe per layer for the labels, and one per layer for the control task.

    Args:
        features: values captured at a hook point, such as `jf.inspect(…).captured["block.output"]`
            with the batch and position axes merged.
        labels: the label of each example, an integer of at least 0.
        token_ids: the token id of each example; the control task draws one label for each id.
        held_out: the probability that a group is held out.
        steps: the number of Adam steps; each step uses all training examples.
        seed: random seed of the split and of the control task.
        groups: the group of each example; all examples of a group are held out together. If the
            examples are tokens, use the index of each token's text as its group. If None, each
            example is a group, which is valid only for independent examples.

    Raises:
        ValueError: An argument is invalid, or no example or every example is held out.
    """
    features = jnp.asarray(features, jnp.float32)
    real, ids = np.asarray(labels), np.asarray(token_ids)
    group = np.arange(len(real)) if groups is None else np.asarray(groups)
    _check(features, {"labels": real, "token_ids": ids, "groups": group}, held_out)
    whole_number("steps", steps, 1)
    rng = np.random.default_rng(seed)
    trains = _trains(group, held_out, rng)
    kinds, kind = np.unique(ids, return_inverse=True)
    control = rng.choice(real, len(kinds))[kind]
    num_labels = int(real.max()) + 1
    accuracy, kernel, bias = _train(features, real, trains, steps, num_labels)
    control_accuracy, _, _ = _train(features, control, trains, steps, num_labels)
    return Probes(kernel, bias, accuracy, control_accuracy)


def _trains(groups: np.ndarray, held_out: float, rng: np.random.Generator) -> np.ndarray:
    """Splits the groups at random into training groups and held-out groups.

    Returns:
        bool [examples], True for the examples of training groups.

    Raises:
        ValueError: Every group or no group is held out.
    """
    names, index = np.unique(groups, return_inverse=True)
    trains = rng.random(len(names)) >= held_out
    if trains.all() or not trains.any():
        raise ValueError(
            f"held_out is {held_out}, and the random split held out {(~trains).sum()} of "
            f"{len(names)} groups; it must hold out at least one group, but not all groups. Pass "
            "more groups, another held_out or another seed"
        )
    return trains[index]


def _check(features: Array, integers: dict[str, np.ndarray], held_out: float) -> None:
    if features.ndim != 3:
        raise ValueError(f"features are {features.shape}; they must be [layers, examples, dim]")
    for name, x in integers.items():
        if x.shape != features.shape[1:2] or not np.issubdtype(x.dtype, np.integer):
            raise ValueError(
                f"{name} are {x.dtype} {x.shape}; they must be int ({features.shape[1]},)"
            )
    labels = integers["labels"]
    if labels.min(initial=0) < 0 or len(np.unique(labels)) < 2:
        raise ValueError("labels must be at least 0 and contain at least two different labels")
    if not 0 < held_out < 1:
        raise ValueError(f"held_out is {held_out}; it must be between 0 and 1")


@partial(jax.jit, static_argnums=(3, 4))
def _train(
    features: Float[Array, "layers examples dim"],
    labels: Int[Array, " examples"],
    trains: Bool[Array | np.ndarray, " examples"],
    steps: int,
    num_labels: int,
) -> tuple[Array, Array, Array]:
    """Trains the probes and returns their (accuracies on held-out examples, kernels, biases)."""
    optimizer = optax.adam(1e-2)
    trains = jnp.asarray(trains)
    weight = trains / jnp.maximum(trains.sum(), 1)

    def probe(x: Float[Array, "examples dim"]) -> tuple[Array, Array, Array]:
        mean = weight @ x
        deviation = jnp.sqrt(weight @ jnp.square(x - mean)) + 1e-6
        x = (x - mean) / deviation

        def loss(params: tuple[Array, Array]) -> Float[Array, ""]:
            logits = x @ params[0] + params[1]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return weight @ losses + 1e-3 * jnp.square(params[0]).sum()

        def step(state: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], None]:
            params, moments = state
            updates, moments = optimizer.update(jax.grad(loss)(params), moments)
            return (jax.tree.map(jnp.add, params, updates), moments), None

        params = (
            jnp.zeros((x.shape[-1], num_labels), jnp.float32),
            jnp.zeros(num_labels, jnp.float32),
        )
        (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), None, steps)
        right = (x @ params[0] + params[1]).argmax(-1) == labels
        return jnp.where(trains, 0, right).sum() / jnp.maximum((~trains).sum(), 1), *params

    return jax.vmap(probe)(features)
