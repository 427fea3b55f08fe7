"""Base class of endless iterators that shuffle their data anew in each epoch."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from jaxformer.training.batch import AnyBatch

# The plan of one batch, such as the indices of the batch's examples.
Planned = TypeVar("Planned")


class EpochBatches(Iterator[AnyBatch], ABC, Generic[AnyBatch, Planned]):
    """Endless iterator that plans the batches of one epoch at a time.

    A subclass sets its own attributes before it calls the initializer of this class.

    Attributes:
        epoch: The number of complete epochs.
    """

    def __init__(self) -> None:
        """Starts at the first batch of the first epoch."""
        self.epoch, self._place = 0, 0
        self._plan = self._plan_epoch(0)

    @abstractmethod
    def _plan_epoch(self, epoch: int) -> Sequence[Planned]:
        """Returns, for each batch of an epoch, what is needed to build it, such as example indices.

        The plans must depend only on the data, the epoch and the seed.
        """

    @abstractmethod
    def _build(self, planned: Planned) -> AnyBatch:
        """Returns a batch, with micro-batches along the first axis."""

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """Returns a description of the data and the settings, as JSON values."""

    def __next__(self) -> AnyBatch:
        """Returns the next batch, with micro-batches along the first axis."""
        if self._place == len(self._plan):
            self.epoch, self._place = self.epoch + 1, 0
            self._plan = self._plan_epoch(self.epoch)
        planned = self._plan[self._place]
        self._place += 1
        return self._build(planned)

    def state(self) -> dict[str, Any]:
        """Returns the iterator's position as JSON values."""
        return {"epoch": self.epoch, "place": self._place, **self._identity()}

    def restore(self, state: dict[str, Any]) -> None:
        """Sets the iterator to the position in ``state``.

        Raises:
            ValueError: ``state`` was saved with different data or settings.
        """
        for name, here in self._identity().items():
            if state.get(name) != here:
                raise ValueError(
                    f"state has {name} {state.get(name)!r}, but this iterator has {here}; resume "
                    "with the same data and settings"
                )
        self.epoch, self._place = state["epoch"], state["place"]
        self._plan = self._plan_epoch(self.epoch)


def shuffled(number: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the indices 0 to `number` - 1 in the order of an epoch.

    The order is computed from the generator's raw numbers, because future versions of NumPy may
    change all other random functions.
    """
    words = np.random.Philox(np.random.SeedSequence([seed, epoch]))
    return np.argsort(words.random_raw(number), kind="stable")


def divide(plan: Sequence[Planned], size: int) -> list[Sequence[Planned]]:
    """Divides a plan into parts of `size` entries; the last part may be smaller."""
    return [plan[start : start + size] for start in range(0, len(plan), size)]
