"""Text in which tokens are hidden, to score a model that sees both sides of them."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxformer.training.batch import Batch
from jaxformer.training.evaluate import evaluate


class HiddenScore(NamedTuple):
    """loss: nats per hidden token; accuracy: the share of them whose token is the most probable;
    tokens: how many there were."""

    loss: float
    accuracy: float
    tokens: int


def hidden_rows(
    documents: Iterable[Sequence[int]],
    mask: int,
    length: int,
    *,
    before: Sequence[int] = (),
    after: Sequence[int] = (),
    rate: float = 0.15,
    seed: int = 0,
) -> list[Batch]:
    """Documents in windows [1, length], none of two documents, each between `before` and `after`.

    Some of the tokens are hidden by the mask, the same for the same seed, and those are the
    targets; of a text so short that none would be, the last. ValueError if there is no token.
    """
    room = length - len(before) - len(after)
    parts = [
        np.asarray(document[at : at + room], np.int32)
        for document in documents
        for at in range(0, len(document), room)
    ]
    if not parts:
        raise ValueError("documents: there are no tokens to hide")
    ends = np.cumsum([len(part) for part in parts])
    words = np.random.Philox(np.random.SeedSequence([seed])).random_raw(ends[-1])
    hidden = words < rate * 2**64
    hidden[-1] |= not hidden.any()
    rows = []
    for part, is_hidden in zip(parts, np.split(hidden, ends[:-1]), strict=True):
        targets, weights, segments = np.zeros((3, 1, length), np.int32)
        end = len(before) + len(part)
        targets[0, : end + len(after)] = [*before, *part, *after]
        weights[0, len(before) : end], segments[0, : end + len(after)] = is_hidden, 1
        inputs = np.where(weights, np.int32(mask), targets)
        rows.append(Batch(inputs, targets, weights.astype(np.float32), segments))
    return rows


def most_frequent(rows: Sequence[Batch]) -> dict[str, float]:
    """The accuracy of whoever always says the token that is hidden most often."""
    targets = np.concatenate([row.targets[row.weights > 0] for row in rows])
    return {"the most frequent token": float(np.bincount(targets).max() / len(targets))}


def score_hidden(
    model,
    variables,
    batches: Iterable[Batch],
    on_scored: Callable[[int], None] = lambda count: None,
) -> HiddenScore:
    """How well a model predicts what is hidden in batches of such rows."""
    sums = evaluate(model, variables, batches, on_scored, correct=True)
    targets = max(1, sums.targets)
    return HiddenScore(sums.loss / targets, sums.correct / targets, sums.targets)
