"""What a model is trained on and scored by, whatever its kind."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array


class Batch(NamedTuple):
    """int [batch, length] inputs and targets: output i is to predict target i.

    weights: float, 1 for a target that counts, 0 for padding and for what is context alone (None:
    all count); segments: the document of each token within its row, 0 for padding (None: one);
    source and source_segments, [batch, source length]: for a model that reads one. An update takes
    several such batches at once, micro-batches along a first axis.
    """

    inputs: Array
    targets: Array
    weights: Array | None = None
    segments: Array | None = None
    source: Array | None = None
    source_segments: Array | None = None


def num_tokens(batch: Batch) -> int:
    """Tokens that are learnt from, padding not counted."""
    return batch.targets.size if batch.segments is None else int((batch.segments != 0).sum())


class Share(NamedTuple):
    """What one of ``count`` processes reads: of each micro-batch the ``index``-th of as many equal
    parts. All of them together read what one process would, in the same order."""

    index: int = 0
    count: int = 1

    def rows(self, batch_size: int, accumulate: int = 1) -> np.ndarray:
        """Its rows of so many micro-batches one after another, int [accumulate · batch / count].

        Errors: ``ValueError`` if a micro-batch cannot be divided so, or there is no such part.
        """
        if not 0 <= self.index < self.count:
            raise ValueError(f"share: {self.index} of {self.count} is not accepted; 0 to count - 1")
        if batch_size % self.count:
            raise ValueError(
                f"share: {batch_size} rows of a micro-batch do not divide by {self.count} processes"
            )
        rows = np.arange(accumulate * batch_size).reshape(accumulate, self.count, -1)
        return rows[:, self.index].ravel()


WHOLE = Share()
