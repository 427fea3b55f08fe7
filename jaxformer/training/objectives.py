"""Objectives: what an update reduces. An objective is a value of the run, not of the model."""

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
from jaxformer.models.activation_sharding import gather_vectors, num_parts, row_axes, shard_rows
from jaxformer.models.config.check import check_fraction
from jaxformer.models.explicit_axes import in_auto_axes
from jaxformer.models.language_model import LanguageModel
from jaxformer.training.batch import AnyBatch, Batch

Scalar = Float[Array, ""]
NoiseKey = PRNGKeyArray | None  # of dropout and of an objective's own noise; None: neither
# Other entries of a line of metrics.jsonl.
RESERVED = ("step", "gradient_norm", "learning_rate", "seconds", "tokens_per_second")
RESERVED += ("model_flops_utilization", "held_out_loss", "scored", "not_finite")


class Sums(NamedTuple):
    """Sums over a batch. The sums of two batches can be added.

    Attributes:
        loss: The sum that the update reduces.
        figures: Further sums by name, which are reported but not reduced. The entry `loss` is
            reported in place of the loss that the update reduces.
    """

    loss: Scalar
    figures: dict[str, Shaped[Array, ""]] = {}  # noqa: RUF012 (read only)


class Objective(ABC, Generic[AnyBatch]):
    """Base class of objectives: a sum over a batch, and the number that the sum is divided by.

    An update reduces Σ loss / Σ count over all micro-batches together. So it has the gradient of
    the full batch even if the micro-batches have unequal counts. Subclasses are frozen dataclasses.

    Attributes:
        batch_type: The type of its batches, a pytree of arrays such as a NamedTuple.
    """

    batch_type: ClassVar[type]

    @abstractmethod
    def loss(self, model: LanguageModel, params: Weights, batch: AnyBatch, key: NoiseKey) -> Sums:
        """Computes the sums of one micro-batch.

        Args:
            model: The model.
            params: Its parameters.
            batch: The micro-batch.
            key: The random key of dropout and of the objective's own noise; None: neither.
        """

    @abstractmethod
    def count(self, batch: AnyBatch) -> Shaped[ArrayLike, ""]:
        """Returns the number that a sum over this batch is divided by, such as that of its targets.

        Args:
            batch: A micro-batch, or several along a new first axis.
        """

    def scaled_loss(
        self, model: LanguageModel, params: Weights, batch: AnyBatch, key: NoiseKey, scale: Scalar
    ) -> Sums:
        """Computes `loss` times `scale`. Override this if scaling an input is faster."""
        sums = check_sums(self, self.loss(model, params, batch, key))
        return jax.tree.map(lambda x: x * scale, sums)


@dataclass(frozen=True)
class CrossEntropy(Objective[Batch]):
    """Cross-entropy of a batch's targets: next tokens, hidden tokens, or the targets of pairs.

    Attributes:
        label_smoothing: The share of the target probability that is spread over all tokens. If it
            is not 0, `loss` is reported without label smoothing and `smoothed_loss` with it.
        auxiliary: (name, weight) for each sum of `Forward.auxiliary` to add to the loss.
    """

    batch_type = Batch
    label_smoothing: float = 0.0
    auxiliary: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        """Checks the settings."""
        check_fraction(self, "label_smoothing")

    def loss(self, model: LanguageModel, params: Weights, batch: Batch, key: NoiseKey) -> Sums:
        """Sums the losses of the targets in nats, each times its weight (see `Objective.loss`)."""
        return self.scaled_loss(model, params, batch, key, jnp.float32(1))

    def count(self, batch: Batch) -> Scalar:
        """Returns the sum of the targets' weights, float32."""
        return jnp.float32(batch.targets.size) if batch.weights is None else batch.weights.sum()

    def scaled_loss(
        self, model: LanguageModel, params: Weights, batch: Batch, key: NoiseKey, scale: Scalar
    ) -> Sums:
        """Computes `loss` times `scale`.

        With scaled weights, gradients have the right scale. The head's own gradient would take a
        pass over it to scale it afterwards.
        """
        if batch.targets.ndim != 2:
            raise ValueError(
                f"targets has shape {batch.targets.shape}; a micro-batch has targets [batch, "
                "length], and a batch has micro-batches along a new first axis"
            )
        batch = batch._replace(weights=target_weights(batch) * scale)
        passed = read_batch(model, params, batch, key if model.config.dropout > 0 else None)
        loss, unsmoothed = head_losses(model, params, passed.hidden, batch, self.label_smoothing)
        figures = {"loss": unsmoothed, "smoothed_loss": loss} if self.label_smoothing else {}
        for name, weight in self.auxiliary:
            if name not in passed.auxiliary:
                given = ", ".join(passed.auxiliary) or "none"
                raise ValueError(f"auxiliary has {name!r}; the layers of this model have: {given}")
            term = passed.auxiliary[name] * scale
            figures = {"loss": unsmoothed, **figures, name: term}
            loss += weight * term
        return Sums(loss, figures)


def check_objective(objective: Objective) -> None:
    """Checks that an objective can be an argument of `make_step`.

    Raises:
        ValueError: It is no `Objective`, or it has no hash.
    """
    if not isinstance(objective, Objective):
        raise ValueError(
            f"objective is {objective!r}; it must be an Objective such as CrossEntropy()"
        )
    try:
        hash(objective)
    except TypeError as error:
        raise ValueError(
            f"objective is {objective!r}, which has no hash ({error}); its class must be a frozen "
            "dataclass with hashable fields. Large arrays belong to the batch"
        ) from None


def check_batch(objective: Objective, batch: object) -> int:
    """Checks the type and the shapes of an update's batch. Returns the number of micro-batches.

    Raises:
        ValueError: The objective has another type of batch, or the arrays have no common first
            axis.
    """
    wanted, name = objective.batch_type, type(objective).__name__
    if not isinstance(batch, wanted):
        raise ValueError(
            f"batch is a {type(batch).__name__}; the objective {name} takes a {wanted.__name__}"
        )
    shapes = [jnp.shape(x) for x in jax.tree.leaves(batch)]
    if len({shape[:1] for shape in shapes}) != 1 or not all(shapes):
        raise ValueError(
            f"batch has arrays of shapes {', '.join(map(str, shapes))}; all must have the "
            "micro-batches along their first axis"
        )
    return shapes[0][0]


def check_scalar(objective: Objective, name: str, value: Shaped[ArrayLike, ""]) -> None:
    """Raises ValueError unless a value of an objective is a scalar."""
    if jnp.shape(value) != ():
        raise ValueError(
            f"the objective {type(objective).__name__} returned {name} of shape "
            f"{jnp.shape(value)}; it must be a scalar, a sum over the micro-batch"
        )


def check_sums(objective: Objective, sums: Sums) -> Sums:
    """Returns the result of an objective's `loss`, checked.

    Raises:
        ValueError: It is no `Sums`, a sum is no scalar, or a figure has the name of another entry
            of metrics.jsonl.
    """
    name = type(objective).__name__
    if not isinstance(sums, Sums):
        found = "an array" if isinstance(sums, jax.Array) else repr(sums)
        raise ValueError(f"the objective {name} returned {found}; loss must return Sums(loss)")
    check_scalar(objective, "loss", sums.loss)
    if not jnp.issubdtype(jnp.result_type(sums.loss), jnp.floating):
        raise ValueError(
            f"the objective {name} returned a loss of dtype {jnp.result_type(sums.loss)}; it must "
            "be a float, which has gradients"
        )
    for figure, value in sums.figures.items():
        check_scalar(objective, f"the figure {figure!r}", value)
        if figure in RESERVED:
            raise ValueError(
                f"the objective {name} returned a figure {figure!r}; choose another name, because "
                "metrics.jsonl has an entry of this name"
            )
    return sums


@in_auto_axes
def summed_loss(model: LanguageModel, params: Weights, batch: Batch) -> Array:
    """Computes the sum of a batch's losses in nats, each multiplied by its target's weight.

    Sums of batches with different token counts can be added.

    Args:
        model: The model.
        params: Its parameters.
        batch: The batch.
    """
    return head_losses(model, params, read_batch(model, params, batch).hidden, batch).loss


def read_batch(
    model: LanguageModel, params: Weights, batch: Batch, dropout_key: NoiseKey = None
) -> Forward:
    """Runs one pass over the inputs of a batch.

    Args:
        model: The model.
        params: Its parameters.
        batch: The batch.
        dropout_key: The random key of dropout; None: no dropout.
    """
    inputs = Inputs(batch.inputs, batch.segments, None, batch.source, batch.source_segments)
    return model.forward(params, inputs, dropout_key=dropout_key)


def head_losses(
    model: LanguageModel,
    params: Weights,
    hidden: Float[Array, "batch length dim"],
    batch: Batch,
    label_smoothing: float = 0.0,
) -> Losses:
    """Computes the sums of a batch's losses with and without label smoothing.

    Sums of batches with different token counts can be added. If the rows are sharded, each device
    sums the head's gradient over its own rows. So the devices exchange it once, not once per chunk
    of tokens.

    Args:
        model: The model.
        params: Its parameters.
        hidden: The input of the head, from `read_batch`.
        batch: The batch.
        label_smoothing: The share of the target probability that is spread over all tokens.
    """
    head = model.output_map(params)
    kernel = head["kernel"]
    kernel = kernel if is_kernel(kernel) else gather_vectors(kernel.T, hidden.dtype).T

    def of_rows(
        hidden: Float[Array, "rows length dim"],
        targets: Int[Array, "rows length"],
        weights: Float[Array, "rows length"],
    ) -> Losses:
        return chunked_weighted_sums(
            hidden, kernel, targets, weights, head.get("bias"), head.get("cap"), label_smoothing
        )

    rows = (hidden, batch.targets, target_weights(batch))
    axes = row_axes(kernel.shape[-1])
    if (parts := num_parts(len(hidden), axes)) == 1:
        return of_rows(*rows)
    rows = (shard_rows(hidden), *rows[1:])  # so that its gradient is sharded like the model's work
    rows = jax.tree.map(lambda x: shard_rows(x.reshape(parts, -1, *x.shape[1:]), axes), rows)
    return jax.tree.map(jnp.sum, jax.vmap(of_rows)(*rows))


def target_weights(batch: Batch) -> Array:
    """Returns the weight of each target, float32."""
    if batch.weights is None:
        return jnp.ones(batch.targets.shape, jnp.float32)
    return batch.weights.astype(jnp.float32)


def summed_correct(model: LanguageModel, params: Weights, batch: Batch) -> Array:
    """Returns the number of counted targets that are the model's most probable token."""
    hidden = read_batch(model, params, batch).hidden
    rows = jax.lax.map(lambda row: model.logits(params, row[None])[0].argmax(axis=-1), hidden)
    right = rows == batch.targets
    return right.sum() if batch.weights is None else jnp.where(right, batch.weights, 0.0).sum()
