"""Batches of pairs of a better and a worse answer, for preference tuning."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxformer.training.batch import WHOLE, Batch, Share
from jaxformer.training.data.epochs import EpochBatches, divide, shuffled
from jaxformer.training.data.packing import Examples, pack_sequence, stack_batches
from jaxformer.training.preference import PreferenceBatch


class PreferenceBatches(EpochBatches[PreferenceBatch, Sequence[int]]):
    """Endless iterator over batches of shuffled pairs. Each epoch contains every pair once.

    The order depends only on the pairs, the sizes and the seed. Empty pairs fill the last batch of
    an epoch.
    """

    def __init__(
        self,
        examples: Examples,
        reference: np.ndarray,
        length: int,
        batch_size: int,
        seed: int = 0,
        *,
        accumulate: int = 1,
        share: Share = WHOLE,
    ):
        """Initializes the iterator.

        Args:
            examples: The answers. Examples 2i and 2i + 1 are the better and the worse answer.
            reference: The log-probability of each example under the model before the tuning.
            length: Tokens per sequence.
            batch_size: Pairs per micro-batch.
            seed: Seed of the random order.
            accumulate: Micro-batches per batch.
            share: Which shard of each micro-batch to read.
        """
        self._examples, self._reference, self._length = examples, reference, length
        self._batch_size, self._accumulate, self._seed = batch_size, accumulate, seed
        self._places = share.indices(batch_size, accumulate)
        super().__init__()

    def shapes(self) -> list[PreferenceBatch]:
        """Returns the shape of a batch, which is always the same."""
        return [jax.eval_shape(lambda x: x, self._build([]))]

    def _identity(self) -> dict[str, Any]:
        sizes = {"length": self._length, "batch_size": self._batch_size, "seed": self._seed}
        return {"examples": self._examples.digest, "accumulate": self._accumulate, **sizes}

    def _plan_epoch(self, epoch: int) -> list[Sequence[int]]:
        """Returns the indices of the pairs in each batch of an epoch."""
        order = shuffled(len(self._examples) // 2, self._seed, epoch)
        return divide(order.tolist(), self._accumulate * self._batch_size)

    def _build(self, planned: Sequence[int]) -> PreferenceBatch:
        """Returns a batch [accumulate, batch, length], filled up with pairs of padding."""
        size = self._accumulate * self._batch_size
        whole = pair_batch(self._examples, self._reference, planned, size, self._length)
        return jax.tree.map(
            lambda x: x[self._places].reshape(self._accumulate, -1, *x.shape[1:]), whole
        )


def pair_batch(
    examples: Examples,
    reference: np.ndarray,
    pairs: Sequence[int] | np.ndarray,
    size: int,
    length: int,
) -> PreferenceBatch:
    """Returns a batch [size, length] with some pairs; the remaining sequences are padding."""
    sides = [answer_batch(examples, [2 * n + side for n in pairs], size, length) for side in (0, 1)]
    scores = np.zeros((2, size), np.float32)
    scores[:, : len(pairs)] = reference.reshape(-1, 2)[np.asarray(pairs, int)].T
    return PreferenceBatch(*sides, *scores)


def answer_batch(
    examples: Examples, numbers: Sequence[int], size: int, length: int
) -> Batch[np.ndarray]:
    """Returns a batch [size, length] with one example in each sequence, and then padding."""
    sequences = [pack_sequence([examples[number]], length) for number in numbers]
    padding = [pack_sequence([], length)] * (size - len(sequences))
    return stack_batches([*sequences, *padding])
