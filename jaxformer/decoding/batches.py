"""Splits the prompts of a call into batches of similar length that fit into a memory limit."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from jaxformer.decoding.autoregressive import compiled_cache
from jaxformer.decoding.loop_cache import prompt_bucket, slots
from jaxformer.functional.cache.key_values import CacheSize
from jaxformer.functional.hooks import NO_HOOKS
from jaxformer.functional.trees import Weights
from jaxformer.models.check import Sources
from jaxformer.models.config.check import whole_number
from jaxformer.models.language_model import LanguageModel
from jaxformer.models.sequences import batch_bucket, power_of_two, with_batch_size

# If the caller does not set a batch size, BATCH_BYTES limits the caches and logits of a batch.
# BATCH_TOKENS limits the prompt tokens of a batch, because reading 2¹⁴ prompt tokens takes more
# memory than a small model's cache.
BATCH_BYTES, BATCH_TOKENS = 2**30, 2**14

Texts = Sequence[Int[np.ndarray, " length"]]  # The token ids of each text.


class Batch(NamedTuple):
    """Prompts of a call that are computed together.

    Attributes:
        indices: int [size], the indices of the prompts in the call. Repetitions of the first index
            fill the batch.
        batch_size: number of prompts, without the repetitions that fill the batch.
        prompts: the token ids of the prompts at `indices`.
        source: the ids or vectors of each prompt's source. None if the model has no encoder.
        width: number of tokens to which the prompts are padded.
    """

    indices: Int[np.ndarray, " size"]
    batch_size: int
    prompts: Texts
    source: Sources | None
    width: int

    @property
    def own_indices(self) -> Int[np.ndarray, " batch"]:
        """The indices of the prompts, without the repetitions that fill the batch."""
        return self.indices[: self.batch_size]


def single_batch(prompts: Texts, source: Sources | None, size: int) -> Batch:
    """Returns all prompts, in their order, as one batch that is filled up to `size` elements."""
    return _batch(prompts, source, np.arange(len(prompts)), size)


def make_batches(prompts: Texts, source: Sources | None, most: int) -> list[Batch]:
    """Returns batches of at most `most` prompts, all filled up to the same batch size.

    If there are several batches, the prompts and sources are sorted by length, the shortest first.
    In a single batch, the prompts keep the caller's order.
    """
    number = len(prompts)
    if number <= most:
        return [single_batch(prompts, source, batch_bucket(number))]
    prompt_lengths = [prompt_bucket(len(x)) for x in prompts]
    source_lengths = [0] * number if source is None else [len(x) for x in source]
    order, size = np.lexsort((source_lengths, prompt_lengths)), batch_bucket(most)
    parts = (order[i : i + most] for i in range(0, number, most))
    return [_batch(prompts, source, part, size) for part in parts]


def _batch(
    prompts: Texts, source: Sources | None, indices: Int[np.ndarray, " batch"], size: int
) -> Batch:
    width = prompt_bucket(max(len(prompts[i]) for i in indices))
    filled = with_batch_size(indices, size)
    if source is not None:
        source = source[filled] if hasattr(source, "shape") else [source[i] for i in filled]
    return Batch(filled, len(indices), [prompts[i] for i in filled], source, width)


def batch_size_within_memory(
    model: LanguageModel,
    weights: Weights,
    prompts: Texts,
    source: Sources | None,
    max_new_tokens: int,
    batch_size: int | None,
    beam_width: int = 1,
) -> int:
    """Returns the number of prompts per batch.

    Args:
        model: an autoregressive model.
        weights: the model's packed weights.
        prompts: the prompts of the call.
        source: the prompts' sources. None if the model has no encoder.
        max_new_tokens: maximum number of new tokens per prompt.
        batch_size: the caller's batch size. If None, BATCH_BYTES and BATCH_TOKENS limit the batch
            size, for sequences with `max_new_tokens` new tokens. With a mesh in context, None means
            all prompts, because the caller chose their number for the mesh.
        beam_width: number of hypotheses per prompt.

    Raises:
        ValueError: `batch_size` is not a whole number of at least 1, or a source is invalid.
    """
    number = len(prompts)
    if (set_by_caller := requested_batch_size(number, batch_size)) == number:
        return number
    read = model.read_source(source)  # Raises for an invalid source before the first batch runs.
    if set_by_caller is not None:
        return set_by_caller
    read = jax.tree.map(lambda x: x[:1], read)
    width = prompt_bucket(max(map(len, prompts)))
    size = CacheSize(1, slots(width + max_new_tokens))
    # jit caches the trace, so later calls are fast.
    cache, _ = compiled_cache.eval_shape(model, weights, read, size, NO_HOOKS)
    cache_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    sequence_bytes = beam_width * (cache_bytes + 4 * model.config.vocab_size)
    return batch_size_for_width(width, sequence_bytes)


def requested_batch_size(number: int, batch_size: int | None) -> int | None:
    """Returns the batch size that the caller chose, or None if BATCH_BYTES and BATCH_TOKENS apply.

    Args:
        number: number of sequences in the call.
        batch_size: the caller's batch size. With None and a mesh in context, all sequences form one
            batch, because the caller chose their number for the mesh.
    """
    if batch_size is not None:
        return min(number, whole_number("batch_size", batch_size, 1))
    return number if number == 1 or jax.sharding.get_abstract_mesh().axis_names else None


def batch_size_for_width(width: int, sequence_bytes: int = 0) -> int:
    """Returns the largest `batch_bucket` size that BATCH_TOKENS and BATCH_BYTES allow.

    Args:
        width: number of tokens per sequence.
        sequence_bytes: number of bytes per sequence.
    """
    by_bytes = BATCH_BYTES // sequence_bytes if sequence_bytes else BATCH_TOKENS
    return _bucket_below(max(1, min(by_bytes, BATCH_TOKENS // max(width, 1))))


def _bucket_below(limit: int) -> int:
    """Returns the largest `batch_bucket` size that is at most `limit`."""
    half = power_of_two(limit + 1, 2) // 2
    return 3 * half // 2 if half >= 8 and 3 * half // 2 <= limit else half


def split_batch(tree: Any, most: int) -> list[Any]:
    """Splits a tree of arrays [batch, …] into trees with a batch size of at most `most`."""
    number = len(jax.tree.leaves(tree)[0])
    starts = range(0, number, most) if number > most else (0,)
    return [jax.tree.map(lambda x, at=at: x[at : at + most], tree) for at in starts]


def in_order(parts: Sequence[Any], batches: Sequence[Batch]) -> Any:
    """Concatenates the results of batches, trees of arrays [batch, …], in the caller's order."""
    if len(batches) == 1:
        return parts[0]
    place = np.argsort(np.concatenate([batch.own_indices for batch in batches]))
    return jax.tree.map(lambda *arrays: np.concatenate(arrays)[place], *parts)
