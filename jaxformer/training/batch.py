"""Batches of tokens for training and evaluation of all models. This module does not import JAX."""

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

# A batch is a pytree of arrays.
AnyBatch = TypeVar("AnyBatch")
# The token ids of one text.
Ids = Sequence[int] | np.ndarray
Element = TypeVar("Element", covariant=True)
# A leaf of a batch is a NumPy array (on the host), a JAX array, or a shape.
Leaf = TypeVar("Leaf")
# A function that is called with the number of targets scored so far.
OnScored = Callable[[int], None]


def noop(count: int) -> None:
    """Does nothing. Default of `OnScored` arguments."""


class Batch(NamedTuple, Generic[Leaf]):
    """Inputs and targets of a model.

    An update takes several batches, called micro-batches, stacked along a new first axis.

    Attributes:
        inputs: the tokens that the model reads, int [batch, length].
        targets: the tokens to predict, int [batch, length]. Output i predicts target i.
        weights: float [batch, length]: 1 for targets that contribute to the loss, 0 for padding and
            context. If None, all targets contribute.
        segment_ids: int [batch, length]: the index of each token's document within its sequence,
            from 1, and 0 for padding. If None, each sequence is one document.
        source: the sources of a model with a source, int [batch, source length] tokens or float
            [batch, source length, features].
        source_segment_ids: the segment ids of the source, int [batch, source length].
    """

    inputs: Leaf
    targets: Leaf
    weights: Leaf | None = None
    segment_ids: Leaf | None = None
    source: Leaf | None = None
    source_segment_ids: Leaf | None = None


class Indexed(Protocol[Element]):
    """Indexed collection, such as a list. An element may be created when it is accessed."""

    def __len__(self) -> int:
        """Returns the number of elements."""

    def __getitem__(self, number: int, /) -> Element:
        """Returns the element at index `number`."""


def num_tokens(batch: Batch) -> int:
    """Returns the number of tokens in a batch, excluding padding."""
    return batch.targets.size if batch.segment_ids is None else int((batch.segment_ids != 0).sum())


def num_targets(batch: Batch) -> int:
    """Returns the number of targets that contribute to the loss."""
    return batch.targets.size if batch.weights is None else int(batch.weights.sum())


class Share(NamedTuple):
    """Shard of each micro-batch that one of several processes reads.

    Each micro-batch is split into `count` equal shards, and this process reads shard `index`. The
    processes together read the same sequences in the same order as a single process would.

    Attributes:
        index: The index of the shard, from 0.
        count: The number of processes.
    """

    index: int = 0
    count: int = 1

    def indices(self, batch_size: int, accumulate: int = 1) -> np.ndarray:
        """Returns the indices of this shard's sequences, counted over all micro-batches.

        Args:
            batch_size: Sequences per micro-batch.
            accumulate: The number of micro-batches.

        Returns:
            int [accumulate * batch_size / count].

        Raises:
            ValueError: `batch_size` is not divisible by `count`, or `index` is out of range.
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
        indices = np.arange(accumulate * batch_size).reshape(accumulate, self.count, -1)
        return indices[:, self.index].ravel()


WHOLE = Share()
