"""Batches of tokens, for training and scoring every kind of model. Does not import JAX."""

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

AnyBatch = TypeVar("AnyBatch")  # a pytree of arrays
Ids = Sequence[int] | np.ndarray  # token ids of one text
Row = TypeVar("Row", covariant=True)
Leaf = TypeVar("Leaf")  # an array of NumPy (on the host) or of JAX, or its shape
OnScored = Callable[[int], None]  # receives the number of targets that are scored so far


def noop(count: int) -> None:
    """Does nothing: the default of `OnScored` arguments."""


class Batch(NamedTuple, Generic[Leaf]):
    """Inputs and targets of a model.

    An update takes several batches at once: micro-batches, stacked along a new first axis.

    Attributes:
        inputs: int [batch, length].
        targets: int [batch, length]. Output i predicts target i.
        weights: float [batch, length]: 1 for a target that counts, 0 for padding and for tokens
            that are only context. None: all targets count.
        segments: int [batch, length]: the number of each token's document within its row, 0 for
            padding. None: a row is one document.
        source: int [batch, source length], for a model that reads a source.
        source_segments: int [batch, source length]: like `segments`, for the source.
    """

    inputs: Leaf
    targets: Leaf
    weights: Leaf | None = None
    segments: Leaf | None = None
    source: Leaf | None = None
    source_segments: Leaf | None = None


class Rows(Protocol[Row]):
    """Rows that are read by number. A row may be created when it is read."""

    def __len__(self) -> int:
        """Returns the number of rows."""

    def __getitem__(self, number: int, /) -> Row:
        """Returns a row."""


def num_tokens(batch: Batch) -> int:
    """Returns the number of tokens in a batch, excluding padding."""
    return batch.targets.size if batch.segments is None else int((batch.segments != 0).sum())


def num_targets(batch: Batch) -> int:
    """Returns the number of targets that count."""
    return batch.targets.size if batch.weights is None else int(batch.weights.sum())


class Share(NamedTuple):
    """Part of each micro-batch that one of several processes reads.

    Each micro-batch is divided into `count` equal parts, and this process reads part `index`. All
    processes together read the rows that a single process would, in the same order.

    Attributes:
        index: The number of the part, from 0.
        count: The number of processes.
    """

    index: int = 0
    count: int = 1

    def rows(self, batch_size: int, accumulate: int = 1) -> np.ndarray:
        """Returns the row numbers of this share in concatenated micro-batches.

        Args:
            batch_size: Rows of a micro-batch.
            accumulate: The number of micro-batches.

        Returns:
            int [accumulate * batch_size / count].

        Raises:
            ValueError: `count` does not divide `batch_size`, or `index` is out of range.
        """
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"share: index is {self.index}; it must be at least 0 and below {self.count}"
            )
        if batch_size % self.count:
            raise ValueError(
                f"share: the batch size is {batch_size}; it must be a multiple of the number of "
                f"processes ({self.count})"
            )
        rows = np.arange(accumulate * batch_size).reshape(accumulate, self.count, -1)
        return rows[:, self.index].ravel()


WHOLE = Share()
