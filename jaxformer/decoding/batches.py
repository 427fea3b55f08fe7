"""Splits the rows of one call into batches that fit a memory bound, prompts by their lengths."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from jaxformer.decoding.autoregressive import start_cache
from jaxformer.decoding.loop_cache import prompt_bucket, slots
from jaxformer.functional.cache.key_values import CacheSize
from jaxformer.functional.taps import NO_HOOKS
from jaxformer.functional.trees import Weights
from jaxformer.models.config.check import whole_number
from jaxformer.models.language_model import LanguageModel
from jaxformer.models.rows import batch_bucket, power_of_two, with_batch_size

# Bounds on a batch whose size the caller did not set: its caches and logits, and the tokens of its
# prompts, because reading 2¹⁴ of them takes more memory than small caches do.
BATCH_BYTES, BATCH_TOKENS = 2**30, 2**14

Texts = Sequence[Int[np.ndarray, " length"]]  # rows of ids


class Batch(NamedTuple):
    """Rows of a call that are computed at once.

    Attributes:
        rows: int [rows], the numbers of the rows in the call, then repetitions of the first one.
        batch_size: number of rows without the repetitions.
        prompts: the ids of the prompts of `rows`.
        source: rows of ids, or an array with a row for each prompt; None: the model reads none.
        width: number of slots of the prompts.
    """

    rows: Int[np.ndarray, " rows"]
    batch_size: int
    prompts: Texts
    source: Any
    width: int

    @property
    def own_rows(self) -> Int[np.ndarray, " batch"]:
        """The numbers of the rows without the repetitions."""
        return self.rows[: self.batch_size]


def one_batch(prompts: Texts, source: Any, rows: int) -> Batch:
    """Returns all prompts as one batch of `rows` rows, in the order given."""
    return _batch(prompts, source, np.arange(len(prompts)), rows)


def batches_of(prompts: Texts, source: Any, most: int) -> list[Batch]:
    """Returns batches of at most `most` prompts, all filled up to the same number of rows.

    Several batches have the shortest prompts and sources first. A single one has the order given.
    """
    number = len(prompts)
    if number <= most:
        return [one_batch(prompts, source, batch_bucket(number))]
    prompt_lengths = [prompt_bucket(len(x)) for x in prompts]
    source_lengths = [0] * number if source is None else [len(x) for x in source]
    order, rows = np.lexsort((source_lengths, prompt_lengths)), batch_bucket(most)
    parts = (order[i : i + most] for i in range(0, number, most))
    return [_batch(prompts, source, part, rows) for part in parts]


def _batch(prompts: Texts, source: Any, rows: Int[np.ndarray, " batch"], size: int) -> Batch:
    width = prompt_bucket(max(len(prompts[row]) for row in rows))
    filled = with_batch_size(rows, size)
    if source is not None:
        source = source[filled] if hasattr(source, "shape") else [source[row] for row in filled]
    return Batch(filled, len(rows), [prompts[row] for row in filled], source, width)


def rows_at_once(
    model: LanguageModel,
    weights: Weights,
    prompts: Texts,
    source: Any,
    max_new_tokens: int,
    batch_size: int | None,
    beam_width: int = 1,
) -> int:
    """Returns the number of prompts of a batch.

    Args:
        model: an autoregressive model.
        weights: its prepared weights.
        prompts: the prompts of the call.
        source: their sources; None: the model reads none.
        max_new_tokens: the most new tokens of a row.
        batch_size: the caller's number; None: as many as BATCH_BYTES and BATCH_TOKENS allow at
            the full length, or all with a mesh in context, because the caller chose their number
            for its devices.
        beam_width: number of hypotheses of each prompt.

    Raises:
        ValueError: `batch_size` is not a whole number of at least 1, or a source is not accepted.
    """
    number = len(prompts)
    if (set_by_caller := rows_of_caller(number, batch_size)) == number:
        return number
    read = model.read_source(source)  # rejects a source before the first batch
    if set_by_caller is not None:
        return set_by_caller
    read = jax.tree.map(lambda x: x[:1], read)
    width = prompt_bucket(max(map(len, prompts)))
    size = CacheSize(1, slots(width + max_new_tokens))
    # jit stores the trace, so that later calls only look it up.
    cache, _ = start_cache.eval_shape(model, weights, read, size, NO_HOOKS)
    cache_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    row_bytes = beam_width * (cache_bytes + 4 * model.config.vocab_size)
    return rows_within(width, row_bytes)


def rows_of_caller(number: int, batch_size: int | None) -> int | None:
    """Returns the number of rows of a batch, or None if the bounds above decide it.

    Args:
        number: number of rows of the call.
        batch_size: the caller's number. None: with a mesh in context all rows, because the caller
            chose their number for its devices; without a mesh the bounds decide.
    """
    if batch_size is not None:
        return min(number, whole_number("batch_size", batch_size, 1))
    return number if number == 1 or jax.sharding.get_abstract_mesh().axis_names else None


def rows_within(width: int, row_bytes: int = 0) -> int:
    """Returns the number of rows that BATCH_TOKENS and BATCH_BYTES allow, a bucket of batch sizes.

    Args:
        width: number of tokens of a row.
        row_bytes: bytes of a row.
    """
    by_bytes = BATCH_BYTES // row_bytes if row_bytes else BATCH_TOKENS
    return _bucket_below(max(1, min(by_bytes, BATCH_TOKENS // max(width, 1))))


def _bucket_below(rows: int) -> int:
    """Returns the largest bucket of batch sizes that is at most `rows`."""
    half = power_of_two(rows + 1, 2) // 2
    return 3 * half // 2 if half >= 8 and 3 * half // 2 <= rows else half


def in_parts(rows: Any, most: int) -> list[Any]:
    """Splits a tree of arrays [batch, …] into trees of at most `most` rows, in order."""
    number = len(jax.tree.leaves(rows)[0])
    starts = range(0, number, most) if number > most else (0,)
    return [jax.tree.map(lambda x, at=at: x[at : at + most], rows) for at in starts]


def in_order(parts: Sequence[Any], batches: Sequence[Batch]) -> Any:
    """Concatenates results of batches, trees of arrays [batch, …], in the order of the call."""
    if len(batches) == 1:
        return parts[0]
    place = np.argsort(np.concatenate([batch.own_rows for batch in batches]))
    return jax.tree.map(lambda *arrays: np.concatenate(arrays)[place], *parts)
