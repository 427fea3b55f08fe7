"""Task of a user's script: any objective, and a function that returns the batch of each update."""

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
from jaxformer.training.batch import WHOLE, AnyBatch, OnScored, Share, noop
from jaxformer.training.objectives import Objective
from jaxformer.training.tasks.task import Score


class NumberedBatches(Iterator[AnyBatch]):
    """The batches of a function of their number."""

    def __init__(self, batch_of: Callable[[int], AnyBatch], share: Share = WHOLE):
        """Starts at batch 0.

        Args:
            batch_of: Returns batch n.
            share: The rows of each micro-batch to return.
        """
        self._batch_of, self._share, self._number = batch_of, share, 0

    def __next__(self) -> AnyBatch:
        """Returns the next batch."""
        batch, self._number = self._read(self._number), self._number + 1
        return batch

    def _read(self, number: int) -> AnyBatch:
        return jax.tree.map(
            lambda x: x[:, self._share.rows(x.shape[1])], _canonical(self._batch_of(number))
        )

    def shapes(self) -> list[AnyBatch]:
        """Returns the shape of the first batch. Further shapes are compiled when they come."""
        return [jax.eval_shape(lambda x: x, self._read(0))]

    def state(self) -> dict[str, Any]:
        """Returns the position of the iterator, for JSON."""
        return {"number": self._number}

    def restore(self, state: dict[str, Any]) -> None:
        """Moves the iterator to the position in `state`."""
        self._number = state["number"]


@dataclass(frozen=True)
class OwnBatches(Generic[AnyBatch]):
    """Task of `fit` (see `Task`).

    Attributes:
        objective: What an update reduces.
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
        """No values to compare with."""
        return {}

    @property
    def part(self) -> float:
        """1: every evaluation scores all held-out batches."""
        return 1.0

    @cached_property
    def num_targets(self) -> int:
        """The count of all held-out batches."""
        return round(float(sum(jnp.asarray(self.objective.count(x)) for x in self.held_out)))

    def batches(self, share: Share = WHOLE) -> NumberedBatches[AnyBatch]:
        """Returns the training batches from the beginning, or the share of one process."""
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
        """Returns "": there is no sample."""
        return ""


@lru_cache(maxsize=4)
def _scored(
    model: LanguageModel, objective: Objective[AnyBatch]
) -> Callable[[Weights, AnyBatch], tuple[Float[Array, ""], Float[Array, ""]]]:
    """Returns the compiled function of the reported loss and the count of a batch."""

    @jax.jit
    def score(params: Weights, batch: AnyBatch) -> tuple[Float[Array, ""], Float[Array, ""]]:
        sums = objective.loss(model, params, batch, None)
        return sums.figures.get("loss", sums.loss), jnp.asarray(objective.count(batch))

    return score


def _canonical(batch: AnyBatch) -> AnyBatch:
    """Returns the arrays in the dtypes of JAX, such as int32 for int64."""
    return jax.tree.map(lambda x: np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype)), batch)
