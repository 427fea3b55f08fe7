"""Linear probes: can a label of a token be read from a layer by a linear map?

A probe with enough features can memorize the label of each token id, so its accuracy alone says
little. The control task gives each id a random label, with the frequencies of the real ones. The
difference between the two accuracies, the selectivity, is what the layer has beyond the identity of
the token.

The tokens of a text share much more than the label. A probe that was trained on some tokens of a
text recognizes the text by the others, so `groups` holds out whole texts.

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
from jaxtyping import Array, Float, Int

from jaxformer.models.config.check import whole_number


class Probes(NamedTuple):
    """One linear probe for each layer.

    Attributes:
        kernel: maps features, standardized over the training examples, to logits of the labels.
        bias: the bias of these logits.
        accuracy: on the held-out examples.
        control_accuracy: of probes for the control task, on the same examples.
    """

    kernel: Float[Array, "layers dim labels"]
    bias: Float[Array, "layers labels"]
    accuracy: Float[Array, " layers"]
    control_accuracy: Float[Array, " layers"]

    @property
    def selectivity(self) -> Float[Array, " layers"]:
        """The accuracy minus that of the control task."""
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
    """Trains a probe for every layer, and one for its control task, in one `vmap`.

    Args:
        features: values captured at a point, such as `jf.inspect(…).captured["block.output"]`
            with the axes of batch and positions folded into one.
        labels: the label of each example, from 0.
        token_ids: the id of each example, from which the control task draws its labels.
        held_out: the share of the groups that are held out; each group is held out with this
            probability.
        steps: the number of steps of Adam, each over all training examples.
        seed: of the split and of the control task.
        groups: the group of each example, which is held out as a whole: the number of its text if
            the examples are tokens of texts. None: each example is a group, which suits only
            examples that are independent of one another.

    Raises:
        ValueError: an argument is not accepted, or no example is held out, or all are.
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
    """Returns which examples train the probes: all of a group or none.

    Raises:
        ValueError: one of the two sides has no example.
    """
    names, index = np.unique(groups, return_inverse=True)
    trains = rng.random(len(names)) >= held_out
    if trains.all() or not trains.any():
        raise ValueError(
            f"held_out is {held_out}, which with this seed holds out {(~trains).sum()} of "
            f"{len(names)} groups; it must be at least one, and not all. Give more groups, another "
            "held_out or another seed"
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
        raise ValueError("labels must be at least 0 and have at least two values")
    if not 0 < held_out < 1:
        raise ValueError(f"held_out is {held_out}; it must be between 0 and 1")


@partial(jax.jit, static_argnums=(3, 4))
def _train(
    features: Float[Array, "layers examples dim"],
    labels: Int[Array, " examples"],
    trains: Any,
    steps: int,
    num_labels: int,
) -> tuple[Array, Array, Array]:
    """Returns (accuracy on examples where `trains` is False, kernels, biases) of all layers."""
    optimizer = optax.adam(1e-2)
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
