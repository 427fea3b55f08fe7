"""Objectives: the quantities that training minimizes. An objective is independent of the model."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray, Shaped

from jaxformer.functional.inputs import Forward, Inputs
from jaxformer.functional.linear.kernels import is_kernel
from jaxformer.functional.losses.chunked import Losses, chunked_weighted_sums
from jaxformer.functional.trees import Weights
from jaxformer.models.config.check import check_fraction
from jaxformer.models.language_model import LanguageModel
from jaxformer.models.sharding.activations import batch_axes, gather_vectors, num_parts, shard_batch
from jaxformer.models.sharding.explicit_axes import in_auto_axes
from jaxformer.terminal import kind_of, with_article
from jaxformer.training.batch import AnyBatch, Batch

Scalar = Float[Array, ""]
# Random key for dropout and for the objective's own noise, or None to use neither.
NoiseKey = PRNGKeyArray | None
# Names of metrics that an objective must not use.
RESERVED = ("step", "gradient_norm", "learning_rate", "seconds", "tokens_per_second")
RESERVED += ("model_flops_utilization", "held_out_loss", "scored", "not_finite")


class Sums(NamedTuple):
    """Sums of losses and metrics over a batch. The sums of several batches can be added.

    Attributes:
        loss: The sum that an update minimizes.
        figures: Sums of further metrics by name, for reports only. If there is an entry `loss`,
            reports show this entry instead of the minimized loss.
    """

    loss: Scalar
    figures: dict[str, Shaped[Array, ""]] = {}  # noqa: RUF012 (read only)


class Objective(ABC, Generic[AnyBatch]):
    """Base class of objectives. An objective sums the loss and counts the targets of a batch.

    An update minimizes Σ loss / Σ count over all micro-batches. An update therefore uses the
    gradient of the full batch, even if the micro-batches have different counts. Subclasses must be
    frozen dataclasses.

    Attributes:
        batch_type: The type of the batches: a pytree of arrays, such as a NamedTuple.
    """

    batch_type: ClassVar[type]

    @abstractmethod
    def loss(self, model: LanguageModel, params: Weights, batch: AnyBatch, key: NoiseKey) -> Sums:
        """Computes the sums of a micro-batch.

        Args:
            model: The model.
            params: The model's parameters.
            batch: The micro-batch.
            key: The random key for dropout and for the objective's own noise; None to use neither.
        """

    @abstractmethod
    def count(self, batch: AnyBatch) -> Shaped[ArrayLike, ""]:
        """Returns the divisor of the batch's sums, such as the number of targets.

        Args:
            batch: A micro-batch, or several micro-batches along a new first axis.
        """

    def scaled_loss(
        self, model: LanguageModel, params: Weights, batch: AnyBatch, key: NoiseKey, scale: Scalar
    ) -> Sums:
        """Computes `loss` multiplied by `scale`.

        Override this method if it is faster to scale an input of the loss.
        """
        sums = check_sums(self, self.loss(model, params, batch, key))
        return jax.tree.map(lambda x: x * scale, sums)


@dataclass(frozen=True)
class CrossEntropy(Objective[Batch]):
    """Cross-entropy of a batch's targets: next tokens, masked tokens, or the targets of pairs.

    Attributes:
        label_smoothing: The probability that is distributed uniformly over all tokens. With label
            smoothing, reports contain `loss` without smoothing and `smoothed_loss` with smoothing.
        auxiliary: Pairs (name, weight). The loss includes the sum `Forward.auxiliary[name]`,
            multiplied by the weight.
    """

    batch_type = Batch
    label_smoothing: float = 0.0
    auxiliary: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        """Checks the settings."""
        check_fraction(self, "label_smoothing")

    def loss(self, model: LanguageModel, params: Weights, batch: Batch, key: NoiseKey) -> Sums:
        """Computes the weighted sum of the losses of the targets, in nats."""
        return self.scaled_loss(model, params, batch, key, jnp.float32(1))

    def count(self, batch: Batch) -> Scalar:
        """Returns the sum of the targets' weights as float32."""
        return jnp.float32(batch.targets.size) if batch.weights is None else batch.weights.sum()

    def scaled_loss(
        self, model: LanguageModel, params: Weights, batch: Batch, key: NoiseKey, scale: Scalar
    ) -> Sums:
        """Computes `loss` multiplied by `scale`.

        The method scales the weights of the targets, and thereby also the gradients. Scaling the
        gradient of the output head afterwards would need another pass over this gradient.
        """
        if batch.targets.ndim != 2:
            raise ValueError(
                f"targets has shape {batch.targets.shape}; it must be [batch, length] in a "
                "micro-batch, and [micro-batches, batch, length] in a batch"
            )
        batch = batch._replace(weights=target_weights(batch) * scale)
        passed = read_batch(model, params, batch, key if model.config.dropout > 0 else None)
        loss, unsmoothed = head_losses(model, params, passed.hidden, batch, self.label_smoothing)
        figures = {"loss": unsmoothed, "smoothed_loss": loss} if self.label_smoothing else {}
        for name, weight in self.auxiliary:
            if name not in passed.auxiliary:
                given = ", ".join(passed.auxiliary) or "none"
                raise ValueError(
                    f"auxiliary has {name!r}; the layers of the model return the auxiliary "
                    f"losses: {given}"
                )
            term = passed.auxiliary[name] * scale
            figures = {"loss": unsmoothed, **figures, name: term}
            loss += weight * term
        return Sums(loss, figures)


def check_objective(objective: Objective) -> None:
    """Checks that an objective is suitable for `make_step`.

    Raises:
        ValueError: The argument is not an `Objective`, or it is not hashable.
    """
    if not isinstance(objective, Objective):
        raise ValueError(
            f"objective is {objective!r}; it must be an Objective such as CrossEntropy()"
        )
    try:
        hash(objective)
    except TypeError as error:
        raise ValueError(
            f"objective is {objective!r}, which is not hashable ({error}); its class must be a "
            "frozen dataclass with hashable fields. Pass large arrays in the batch"
        ) from None


def check_batch(objective: Objective, batch: object) -> int:
    """Checks the type and shapes of a batch, and returns the number of micro-batches.

    Raises:
        ValueError: The batch is not of the objective's batch type, or the arrays have different
            first axes.
    """
    wanted, name = objective.batch_type, type(objective).__name__
    if not isinstance(batch, wanted):
        raise ValueError(
            f"batch is {kind_of(batch)}, but the objective {name} needs "
            f"{with_article(wanted.__name__)}"
        )
    shapes = [jnp.shape(x) for x in jax.tree.leaves(batch)]
    if len({shape[:1] for shape in shapes}) != 1 or not all(shapes):
        raise ValueError(
            f"batch has arrays of shapes {', '.join(map(str, shapes))}; the first axis of each "
            "array must be the number of micro-batches"
        )
    return shapes[0][0]


def check_scalar(objective: Objective, name: str, value: Shaped[ArrayLike, ""]) -> None:
    """Raises ValueError unless `value`, which an objective returned, is a scalar."""
    if jnp.shape(value) != ():
        raise ValueError(
            f"the objective {type(objective).__name__} returned {name} of shape "
            f"{jnp.shape(value)}; it must be a scalar (the sum over the micro-batch)"
        )


def check_sums(objective: Objective, sums: Sums) -> Sums:
    """Checks and returns the result of an objective's `loss`.

    Raises:
        ValueError: The result is not a `Sums`, a sum is not a scalar, or a key of `figures` is a
            reserved name (see `RESERVED`).
    """
    name = type(objective).__name__
    if not isinstance(sums, Sums):
        found = "an array" if isinstance(sums, jax.Array) else repr(sums)
        raise ValueError(
            f"the objective {name} returned {found}; its method `loss` must return a Sums object"
        )
    check_scalar(objective, "loss", sums.loss)
    if not jnp.issubdtype(jnp.result_type(sums.loss), jnp.floating):
        raise ValueError(
            f"the objective {name} returned a loss of dtype {jnp.result_type(sums.loss)}; it must "
            "be a float, so that it has a gradient"
        )
    for figure, value in sums.figures.items():
        check_scalar(objective, f"the figure {figure!r}", value)
        if figure in RESERVED:
            raise ValueError(
                f"the objective {name} returned Sums whose `figures` have the key {figure!r}; "
                "choose another key, because metrics.jsonl already has an entry with this name"
            )
    return sums


@in_auto_axes
def summed_loss(model: LanguageModel, params: Weights, batch: Batch) -> Array:
    """Computes the weighted sum of the losses of a batch's targets, in nats.

    The sums of batches with different token counts can be added.

    Args:
        model: The model.
        params: The model's parameters.
        batch: The batch.
    """
    return head_losses(model, params, read_batch(model, params, batch).hidden, batch).loss


def read_batch(
    model: LanguageModel, params: Weights, batch: Batch, dropout_key: NoiseKey = None
) -> Forward:
    """Runs the model on the inputs of a batch.

    Args:
        model: The model.
        params: The model's parameters.
        batch: The batch.
        dropout_key: The random key for dropout; no dropout if None.
    """
    inputs = Inputs(batch.inputs, batch.segment_ids, None, batch.source, batch.source_segment_ids)
    return model.forward(params, inputs, dropout_key=dropout_key)


def head_losses(
    model: LanguageModel,
    params: Weights,
    hidden: Float[Array, "batch length dim"],
    batch: Batch,
    label_smoothing: float = 0.0,
) -> Losses:
    """Computes the sums of a batch's losses with and without label smoothing.

    The sums of batches with different token counts can be added. If the batch is sharded, each
    device sums the gradient of the output head over its own shard. The devices then exchange these
    sums once, instead of once per chunk of tokens.

    Args:
        model: The model.
        params: The model's parameters.
        hidden: The input of the output head, from `read_batch`.
        batch: The batch.
        label_smoothing: The probability that is distributed uniformly over all tokens.
    """
    head = model.output_map(params)
    kernel = head["kernel"]
    kernel = kernel if is_kernel(kernel) else gather_vectors(kernel.T, hidden.dtype).T

    def shard_losses(
        hidden: Float[Array, "batch length dim"],
        targets: Int[Array, "batch length"],
        weights: Float[Array, "batch length"],
    ) -> Losses:
        return chunked_weighted_sums(
            hidden, kernel, targets, weights, head.get("bias"), head.get("cap"), label_smoothing
        )

    arrays = (hidden, batch.targets, target_weights(batch))
    axes = batch_axes(kernel.shape[-1])
    if (parts := num_parts(len(hidden), axes)) == 1:
        return shard_losses(*arrays)
    # The next line also shards the gradient of `hidden`, in the same way as the model's
    # activations.
    arrays = (shard_batch(hidden), *arrays[1:])
    arrays = jax.tree.map(lambda x: shard_batch(x.reshape(parts, -1, *x.shape[1:]), axes), arrays)
    return jax.tree.map(jnp.sum, jax.vmap(shard_losses)(*arrays))


def target_weights(batch: Batch) -> Array:
    """Returns the weight of each target as float32."""
    if batch.weights is None:
        return jnp.ones(batch.targets.shape, jnp.float32)
    return batch.weights.astype(jnp.float32)


@in_auto_axes
def summed_correct(model: LanguageModel, params: Weights, batch: Batch) -> Array:
    """Returns the sum of the weights of the correctly predicted targets."""
    hidden = read_batch(model, params, batch).hidden
    predicted = jax.lax.map(
        lambda sequence: model.logits(params, sequence[None])[0].argmax(axis=-1), hidden
    )
    right = predicted == batch.targets
    return right.sum() if batch.weights is None else jnp.where(right, batch.weights, 0.0).sum()
