"""How well a model predicts text: loss, perplexity, bits per byte."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.training.batch import Batch
from jaxformer.training.data.windows import EvaluationWindows, evaluation_batches
from jaxformer.training.loss import summed_correct, summed_loss


class Evaluation(NamedTuple):
    """loss: nats per token; perplexity: e^loss; bits_per_byte: the whole loss over the bytes of the
    text, which compares models of any tokenizer, and compressors."""

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int
    bytes: int


class Sums(NamedTuple):
    """Σ loss in nats over so many targets, and of how many the most probable token was right
    (0 unless that was asked for)."""

    loss: float
    targets: int
    correct: int


def evaluate(
    model,
    variables,
    batches: Iterable[Batch],
    on_scored: Callable[[int], None] = lambda count: None,
    *,
    correct: bool = False,
) -> Sums:
    """The sums over all batches; no dropout. on_scored: is told how many targets are scored so far;
    correct: count those that are predicted right."""
    found, count = [], 0
    for batch in batches:
        found.append(_compiled(model, correct)(variables, batch))
        jax.block_until_ready(found[-2:-1])  # one behind: the count is true, the device is busy
        on_scored(count)
        count += int(batch.weights.sum())
    losses, right = np.sum(jax.device_get(found), axis=0, dtype=np.float64)
    return Sums(float(losses), count, round(right))


@lru_cache(maxsize=4)
def _compiled(model, correct: bool):
    @jax.jit
    def of_batch(variables, batch):
        params = variables["params"]
        loss, _ = summed_loss(model, params, batch)
        return loss, summed_correct(model, params, batch) if correct else jnp.float32(0)

    return of_batch


def half(window: int) -> int:
    """From one window to the next, unless told otherwise."""
    return max(1, window // 2)


def summarise(loss: float, tokens: int, num_bytes: int) -> Evaluation:
    """Σ loss in nats over `tokens` tokens that spell `num_bytes` bytes, as figures to compare."""
    mean = loss / tokens
    perplexity = math.exp(mean) if mean < 700 else math.inf
    return Evaluation(mean, perplexity, loss / math.log(2) / num_bytes, tokens, num_bytes)


def evaluate_documents(
    model,
    variables,
    documents: Sequence[Sequence[int]],
    num_bytes: int,
    *,
    stride: int | None = None,
    batch_size: int = 16,
    on_scored: Callable[[int], None] = lambda count: None,
) -> Evaluation:
    """Every token of every document scored once (each document begins with the end-of-text).

    Windows are as long as the model allows and start `stride` tokens apart (half a window unless
    given): past a document's first window, a token is predicted from more than length − stride.
    """
    length = model.config.max_length
    stride = half(length) if stride is None else stride
    batches = evaluation_batches(documents, length, stride, batch_size)
    sums = evaluate(model, variables, batches, on_scored)
    return summarise(sums.loss, sums.targets, num_bytes)


def evaluate_windows(
    model,
    variables,
    documents: Sequence[Sequence[int]],
    num_bytes: int,
    *,
    windows: int,
    batch_size: int = 16,
    on_scored: Callable[[int], None] = lambda count: None,
) -> Evaluation:
    """So many of the windows of `evaluate_documents`, from all over the text: the same ones each
    time, so that scores can be compared. A token is taken to spell as many bytes as the text's
    tokens do on average."""
    chosen = spread_windows(documents, model.config.max_length, windows, batch_size)
    loss, tokens, _ = evaluate(model, variables, chosen, on_scored)
    targets = sum(len(document) - 1 for document in documents)
    return summarise(loss, tokens, tokens * num_bytes / targets)


def spread_windows(
    documents: Sequence[Sequence[int]], length: int, number: int, batch_size: int
) -> list[Batch]:
    """So many of the documents' evaluation windows (all, if there are fewer), evenly spread."""
    return spread(EvaluationWindows(documents, length, half(length)), number, batch_size)


def spread(rows: Sequence[Batch], number: int, batch_size: int) -> list[Batch]:
    """So many of these batches of one row (all, if there are fewer), evenly spread, in batches of
    one size; the last is filled up with rows that weigh nothing."""
    places = np.linspace(0, len(rows) - 1, min(number, len(rows))).round().astype(int)
    chosen = [rows[place] for place in places]
    chosen += [jax.tree.map(np.zeros_like, rows[0])] * (-len(chosen) % batch_size)
    return [
        jax.tree.map(lambda *x: np.concatenate(x), *chosen[i : i + batch_size])
        for i in range(0, len(chosen), batch_size)
    ]
