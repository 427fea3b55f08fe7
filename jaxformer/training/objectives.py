"""Objectives: what an update reduces. An objective is a value of the run, not of the model."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray, Shaped

from jaxformer.functional.trees import Weights
from jaxformer.models.config.check import check_fraction
from jaxformer.models.language_model import LanguageModel
from jaxformer.training.batch import Batch
from jaxformer.training.loss import counted, head_losses, read_batch, target_weights

AnyBatch = TypeVar("AnyBatch")  # a pytree of arrays
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

    loss: Float[Array, ""]
    figures: dict[str, Shaped[Array, ""]] = {}  # noqa: RUF012 (read only)

    def scaled(self, scale: Float[Array, ""]) -> "Sums":
        """Returns the sums times `scale`."""
        return Sums(self.loss * scale, {name: x * scale for name, x in self.figures.items()})


class Objective(ABC, Generic[AnyBatch]):
    """Base class of objectives: a sum over a batch, and the number that the sum is divided by.

    An update reduces Σ loss / Σ count over all micro-batches together. So it has the gradient of
    the full batch even if the micro-batches have unequal counts. Subclasses are frozen dataclasses.

    Attributes:
        batch_type: The type of its batches, a pytree of arrays such as a NamedTuple.
    """

    batch_type: ClassVar[type]

    @abstractmethod
    def loss(
        self, model: LanguageModel, params: Weights, batch: AnyBatch, key: PRNGKeyArray | None
    ) -> Sums:
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
        self,
        model: LanguageModel,
        params: Weights,
        batch: AnyBatch,
        key: PRNGKeyArray | None,
        scale: Float[Array, ""],
    ) -> Sums:
        """Computes `loss` times `scale`. Override this if scaling an input is faster."""
        return check_sums(self, self.loss(model, params, batch, key)).scaled(scale)


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

    def loss(
        self, model: LanguageModel, params: Weights, batch: Batch, key: PRNGKeyArray | None
    ) -> Sums:
        """Sums the losses of the targets in nats, each times its weight (see `Objective.loss`)."""
        return self.scaled_loss(model, params, batch, key, jnp.float32(1))

    def count(self, batch: Batch) -> Float[Array, ""]:
        """Returns the sum of the targets' weights."""
        return counted(batch)

    def scaled_loss(
        self,
        model: LanguageModel,
        params: Weights,
        batch: Batch,
        key: PRNGKeyArray | None,
        scale: Float[Array, ""],
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
