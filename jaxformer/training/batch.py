"""What a model is trained on and scored by, whatever its kind."""

from typing import NamedTuple

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
