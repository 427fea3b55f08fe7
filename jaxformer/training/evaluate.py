"""Scores of a model on text: loss, perplexity, bits per byte."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.training.batch import Batch, Ids, OnScored, Rows, noop, num_targets
from jaxformer.training.data.windows import EvaluationWindows, evaluation_batches, in_batches
from jaxformer.training.loss import summed_correct, summed_loss


class Evaluation(NamedTuple):
    """Score of a model on a text.

    Attributes:
        loss: Nats per token.
        perplexity: e^loss.
        bits_per_byte: The total loss in bits, divided by the bytes of the text. It compares models
            with different tokenizers, and compressors.
        tokens: The number of scored tokens.
        bytes: The number of bytes that they encode.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    bytes: float


class LossSums(NamedTuple):
    """Sums over the scored targets.

    Attributes:
        loss: Σ loss in nats.
        targets: The number of targets.
        correct: The number of targets that are the most probable token; 0 if not counted.
    """

    loss: float
    targets: int
    correct: int


def evaluate(
    model: LanguageModel,
    variables: Variables,
    batches: Iterable[Batch],
    on_scored: OnScored = noop,
    *,
    correct: bool = False,
) -> LossSums:
    """Scores all batches, without dropout.

    Args:
        model: The model.
        variables: Its parameters.
        batches: The batches to score.
        on_scored: Called with the number of targets scored so far.
        correct: Whether to count the targets that are the most probable token.

    Raises:
        ValueError: There are no batches.
    """
    results, count = [], 0
    for batch in batches:
        # pyrefly: ignore[bad-argument-type] (Flax gives modules a hash)
        results.append(_compiled(model, correct)(variables, batch))
        # Wait for the batch before this one: the reported count is exact, the device stays busy.
        jax.block_until_ready(results[-2:-1])
        on_scored(count)
        count += num_targets(batch)
    if not results:
        raise ValueError("the text has no tokens to score")
    losses, right = np.array(jax.device_get(results), np.float64).sum(axis=0)
    return LossSums(float(losses), count, round(right))


@lru_cache(maxsize=4)
def _compiled(
    model: LanguageModel, correct: bool
) -> Callable[[Variables, Batch], tuple[Float[Array, ""], Float[Array, ""]]]:
    @jax.jit
    def of_batch(variables: Variables, batch: Batch) -> tuple[Float[Array, ""], Float[Array, ""]]:
        params = variables["params"]
        loss = summed_loss(model, params, batch)
        return loss, summed_correct(model, params, batch) if correct else jnp.float32(0)

    return of_batch


def half(window: int) -> int:
    """Returns the default distance between the starts of two windows, half a window."""
    return max(1, window // 2)


def summarise(loss: float, tokens: int, num_bytes: float) -> Evaluation:
    """Computes an `Evaluation` from sums.

    Args:
        loss: Σ loss in nats.
        tokens: The number of scored tokens.
        num_bytes: The number of bytes that they encode.
    """
    mean, bits = loss / tokens, loss / math.log(2)
    return Evaluation(mean, math.exp(min(mean, 700)), bits / num_bytes, tokens, num_bytes)


def evaluate_documents(
    model: LanguageModel,
    variables: Variables,
    documents: Sequence[Ids],
    num_bytes: int,
    *,
    stride: int | None = None,
    batch_size: int = 16,
    on_scored: OnScored = noop,
) -> Evaluation:
    """Scores every token of every document once.

    Windows have the model's maximum length. After the first window of a document, more than
    length − stride tokens precede each target.

    Args:
        model: The model.
        variables: Its parameters.
        documents: The tokens of each document. The first one is context only.
        num_bytes: The number of bytes of the text.
        stride: The distance between the starts of two windows; None: half a window.
        batch_size: Windows per batch.
        on_scored: Called with the number of targets scored so far.
    """
    length = model.config.max_length
    stride = half(length) if stride is None else stride
    batches = evaluation_batches(documents, length, stride, batch_size)
    sums = evaluate(model, variables, batches, on_scored)
    return summarise(sums.loss, sums.targets, num_bytes)


def evaluate_windows(
    model: LanguageModel,
    variables: Variables,
    documents: Sequence[Ids],
    num_bytes: int,
    *,
    windows: int,
    batch_size: int = 16,
    on_scored: OnScored = noop,
) -> Evaluation:
    """Scores some of the windows of `evaluate_documents`, evenly spaced over the text.

    The windows are the same each time, so that scores are comparable. Bits per byte assume the
    average number of bytes per token of the text.

    Args:
        model: The model.
        variables: Its parameters.
        documents: The tokens of each document. The first one is context only.
        num_bytes: The number of bytes of the text.
        windows: The number of windows.
        batch_size: Windows per batch.
        on_scored: Called with the number of targets scored so far.
    """
    length = model.config.max_length
    rows = EvaluationWindows(documents, length, half(length))
    loss, tokens, _ = evaluate(model, variables, spread(rows, windows, batch_size), on_scored)
    targets = sum(len(document) - 1 for document in documents)
    return summarise(loss, tokens, tokens * num_bytes / targets)


def spread(rows: Rows[Batch], number: int, batch_size: int) -> list[Batch]:
    """Returns `number` evenly spaced rows in batches of `batch_size`; all, if there are fewer.

    The last batch is filled up with rows of weight 0.

    Args:
        rows: Batches of one row.
        number: The number of rows to select.
        batch_size: Rows per batch.
    """
    places = np.linspace(0, len(rows) - 1, min(number, len(rows))).round().astype(int)
    return list(in_batches(rows, places, batch_size))
