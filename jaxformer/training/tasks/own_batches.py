"""Task of a user's script: any objective, and a function that returns each update's batch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Generic

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.trees import Weights
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.models.sharding.explicit_axes import in_auto_axes
from jaxformer.training.batch import WHOLE, AnyBatch, OnScored, Share, noop
from jaxformer.training.objectives import Objective
from jaxformer.training.tasks.task import Score


class NumberedBatches(Iterator[AnyBatch]):
    """Iterator over the batches that a function of the batch index returns."""

    def __init__(self, batch_of: Callable[[int], AnyBatch], share: Share = WHOLE):
        """Creates an iterator that starts at the first batch.

        Args:
            batch_of: Returns batch n.
            share: Which shard of each micro-batch to return.
        """
        self._find_batch, self._share, self._number = batch_of, share, 0

    def __next__(self) -> AnyBatch:
        """Returns the next batch."""
        batch, self._number = self._read(self._number), self._number + 1
        return batch

    def _read(self, number: int) -> AnyBatch:
        return jax.tree.map(
            lambda x: x[:, self._share.indices(x.shape[1])], _canonical(self._find_batch(number))
        )

    def shapes(self) -> list[AnyBatch]:
        """Returns the shape of the first batch. Later batches may have different shapes."""
        return [jax.eval_shape(lambda x: x, self._read(0))]

    def state(self) -> dict[str, Any]:
        """Returns the iterator's position as JSON values."""
        return {"number": self._number}

    def restore(self, state: dict[str, Any]) -> None:
        """Moves the iterator to the position in `state`."""
        self._number = state["number"]


@dataclass(frozen=True)
class OwnBatches(Generic[AnyBatch]):
    """Task of `fit` (see `Task`).

    Attributes:
        objective: The quantity that training minimizes.
        batch_of: Returns the batch of update n.
        held_out: Batches to score, without the axis of micro-batches.
    """

    measure: ClassVar[None] = None
    scoring_cost: ClassVar[float] = 0.5
    objective: Objective[AnyBatch]
    batch_of: Callable[[int], AnyBatch]
    held_out: Sequence[AnyBatch]

    @property
    def baselines(self) -> dict[str, float]:
        """The dict is empty, because this task has no baselines."""
        return {}

    @property
    def part(self) -> float:
        """The fraction is 1, because every evaluation scores all held-out batches."""
        return 1.0

    @cached_property
    def num_targets(self) -> int:
        """Total count of targets in all held-out batches."""
        return round(float(sum(jnp.asarray(self.objective.count(x)) for x in self.held_out)))

    def batches(self, share: Share = WHOLE) -> NumberedBatches[AnyBatch]:
        """Returns an iterator over the training batches; `share` selects a part of each batch."""
        return NumberedBatches(self.batch_of, share)

    def score(
        self, model: LanguageModel, variables: Variables, *, whole: bool, on_scored: OnScored = noop
    ) -> Score:
        """Returns the mean loss over all held-out batches (see `Task.score`)."""
        losses, count = [], 0.0
        for batch in self.held_out:
            # pyrefly: ignore[bad-argument-type] (Flax gives modules a hash)
            loss, counted = _scored(model, self.objective)(variables["params"], batch)
            losses.append(float(loss))
            count += float(counted)
            on_scored(round(count))
        loss = sum(losses) / count
        return Score(loss, loss, self.num_targets)

    def sample(self, model: LanguageModel, variables: Variables, key: PRNGKeyArray) -> str:
        """Returns an empty text, because this task has no samples."""
        return ""


@lru_cache(maxsize=4)
def _scored(
    model: LanguageModel, objective: Objective[AnyBatch]
) -> Callable[[Weights, AnyBatch], tuple[Float[Array, ""], Float[Array, ""]]]:
    """Compiles a function that returns the reported loss and `Objective.count` of a batch."""

    @jax.jit
    @in_auto_axes
    def score(params: Weights, batch: AnyBatch) -> tuple[Float[Array, ""], Float[Array, ""]]:
        sums = objective.loss(model, params, batch, None)
        return sums.figures.get("loss", sums.loss), jnp.asarray(objective.count(batch))

    return score


def _canonical(batch: AnyBatch) -> AnyBatch:
    """Converts the arrays to JAX's dtypes, for example int64 to int32."""
    return jax.tree.map(lambda x: np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype)), batch)
