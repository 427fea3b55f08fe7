"""Scores of encoders on hidden tokens, which they predict from the tokens on both sides."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxformer.artifacts.tokenizer import Tokenizer
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.training.batch import Batch, Ids, OnScored, noop
from jaxformer.training.evaluate import evaluate


class HiddenScore(NamedTuple):
    """Score on hidden tokens.

    Attributes:
        loss: Nats per hidden token.
        accuracy: The share of hidden tokens that are the most probable token.
        tokens: The number of hidden tokens.
    """

    loss: float
    accuracy: float
    tokens: int


def never_hidden(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids below `vocab_size` that are never hidden and never replace a hidden token.

    These are the special tokens, the tokens of the template, and ids without a token.
    """
    ordinary = set(tokenizer.text_ids) - {*tokenizer.before, *tokenizer.after}
    ordinary.discard(tokenizer.mask_token)
    return tuple(token for token in range(vocab_size) if token not in ordinary)


def hidden_rows(
    documents: Iterable[Ids],
    mask: int,
    length: int,
    *,
    before: Sequence[int] = (),
    after: Sequence[int] = (),
    rate: float = 0.15,
    seed: int = 0,
    special: Collection[int] = (),
) -> list[Batch[np.ndarray]]:
    """Divides documents into windows and replaces some of their tokens by the mask.

    The hidden tokens are the targets. If the draw hides no token, the last one is hidden.

    Args:
        documents: The tokens of each document, without opening tokens.
        mask: The id that replaces a hidden token.
        length: Tokens per window, including `before` and `after`.
        before: Ids in front of each window; they are never hidden.
        after: Ids behind each window; they are never hidden.
        rate: The probability that a token is hidden.
        seed: The seed of the draw.
        special: Ids that are never hidden (see `never_hidden`).

    Returns:
        Batches of one window, [1, length]. No window holds parts of two documents.

    Raises:
        ValueError: No token may be hidden, or `length` has no room for one.
    """
    room = length - len(before) - len(after)
    if room < 1:
        raise ValueError(
            f"length is {length}; it must be more than the {length - room} tokens around a text"
        )
    parts = [
        np.asarray(document[at : at + room], np.int32)
        for document in documents
        for at in range(0, len(document), room)
    ]
    may_be = ~np.isin(np.concatenate([np.zeros(0, np.int32), *parts]), [*special, mask])
    if not may_be.any():
        raise ValueError("documents: there are no tokens to hide")
    ends = np.cumsum([len(part) for part in parts])
    words = np.random.Philox(np.random.SeedSequence([seed])).random_raw(ends[-1])
    hidden = (words < rate * 2**64) & may_be
    hidden[np.flatnonzero(may_be)[-1]] |= not hidden.any()
    rows = []
    for part, is_hidden in zip(parts, np.split(hidden, ends[:-1]), strict=True):
        targets, weights, segments = np.zeros((3, 1, length), np.int32)
        end = len(before) + len(part)
        targets[0, : end + len(after)] = [*before, *part, *after]
        weights[0, len(before) : end], segments[0, : end + len(after)] = is_hidden, 1
        inputs = np.where(weights, np.int32(mask), targets)
        rows.append(Batch(inputs, targets, weights.astype(np.float32), segments))
    return rows


def most_frequent(rows: Sequence[Batch[np.ndarray]]) -> dict[str, float]:
    """Returns the accuracy of always predicting the token that is hidden most often."""
    targets = np.concatenate([row.targets[row.weights != 0] for row in rows])
    return {"the most frequent token": float(np.bincount(targets).max() / len(targets))}


def score_hidden(
    model: LanguageModel,
    variables: Variables,
    batches: Iterable[Batch],
    on_scored: OnScored = noop,
) -> HiddenScore:
    """Scores a model on batches of rows from `hidden_rows`.

    Args:
        model: The model.
        variables: Its parameters.
        batches: Batches of the rows.
        on_scored: Called with the number of targets scored so far.
    """
    sums = evaluate(model, variables, batches, on_scored, correct=True)
    targets = max(1, sums.targets)
    return HiddenScore(sums.loss / targets, sums.correct / targets, sums.targets)
