"""Cache of a decoding loop: number of slots per step, and layout of the arrays between steps."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.functional.cache.key_values import Cache
from jaxformer.functional.positions import continued_segment_ids, document_positions
from jaxformer.models.check import AnyArray
from jaxformer.models.language_model import LanguageModel
from jaxformer.models.sequences import bucket, power_of_two
from jaxformer.models.sharding.parameters import to_host


def checked_slots(
    model: LanguageModel, cache: Cache, tokens: AnyArray, segment_ids: AnyArray | None
) -> int | None:
    """Returns the number of slots that the new tokens attend to, or None for all slots.

    Raises:
        ValueError: The cache has too few free slots or another batch size than the tokens.
    """
    if not tokens.shape[1]:
        raise ValueError(
            f"tokens has shape {tokens.shape}; it must hold at least one new token per sequence"
        )
    batch_size = len(cache.cursor.position)
    if len(tokens) != batch_size:
        raise ValueError(
            f"tokens has batch size {len(tokens)}, but the cache has batch size {batch_size}"
        )
    traced = isinstance(cache.length, jax.core.Tracer)
    used = 0 if traced else int(cache.length)  # Inside jit, only shapes are known.
    needed = used + tokens.shape[1]
    if cache.capacity is not None and needed > cache.capacity:
        raise ValueError(
            f"tokens has length {tokens.shape[1]}, but {used} of the {cache.capacity} slots of the "
            f"cache are used; call init_cache with a capacity of at least {needed}"
        )
    if not any(isinstance(x, jax.core.Tracer) for x in (tokens, segment_ids, cache.length)):
        _check_reading(model, cache, needed, segment_ids, tokens.shape[:2])
    return None if traced else live_slots(cache, needed)


def _check_reading(
    model: LanguageModel,
    cache: Cache,
    needed: int,
    segment_ids: AnyArray | None,
    shape: tuple[int, ...],
) -> None:
    """Checks that the new tokens end at an allowed position of their documents.

    Raises:
        ValueError: a sequence ends inside a bidirectional prefix, which must be read in one call,
            or has more tokens than the model has positions.
    """
    least, most = model.minimum_prefill, model.config.max_length
    positions = model.architecture.embedding.positions
    if cache.reach is not None and not (positions and positions.is_table):
        # With a ring buffer, only the dtype of positions limits the number of tokens.
        most = np.iinfo(np.int32).max
    if least == 1 and needed <= most:
        return  # No sequence can fail the checks below.
    # The values below are known even if the caller is inside jit.
    with jax.ensure_compile_time_eval():
        given = None if segment_ids is None else jnp.asarray(segment_ids)
        segment_ids = continued_segment_ids(given, cache.cursor, shape)
        read = to_host(document_positions(jnp.asarray(segment_ids), cache.cursor)[2].position)
    in_prefix = f"the bidirectional prefix has {least}; pass the whole prefix in one call"
    too_long = f"max_length is {most}"
    for is_wrong, why in (((read > 0) & (read < least), in_prefix), (read > most, too_long)):
        if is_wrong.any():
            index = int(is_wrong.argmax())
            raise ValueError(
                f"the last document of batch element {index} has {read[index]} tokens, but {why}"
            )


def live_slots(cache: Cache, needed: int) -> int | None:
    """Returns the number of cache slots that queries attend to, as an int that is static in jit.

    The number of slots is the minimum of `slots(needed)` and the capacity. The function returns
    None for a cache of fixed size, such as a cache that has only recurrent states.
    """
    return None if cache.capacity is None else min(cache.capacity, slots(needed))


def with_slots(cache: Cache, needed: int) -> Cache:
    """Returns the cache, enlarged to `slots(needed)` slots if it has fewer than `needed`.

    Decoding loops start with few slots and enlarge the cache as the texts grow. So the memory
    depends on the actual length of the texts, not on the caller's maximum.
    """
    if cache.capacity is None or cache.capacity >= needed:
        return cache
    return _grow(cache, slots(needed))


_grow = jax.jit(lambda cache, slots: cache.grow(slots), static_argnums=1)


def slots(length: int) -> int:
    """Rounds `length` up to a number 3 · 2ⁿ that is at least 48.

    Prompt lengths are rounded up to 2ⁿ or 3 · 2ⁿ. Cache sizes are rounded up to 3 · 2ⁿ only,
    because a long decoding loop uses many sizes, and each size needs a compiled program of all
    layers.
    """
    return 3 * power_of_two(-(-length // 3), 16)


def prompt_bucket(length: int) -> int:
    """Rounds the length of a prompt up to 2ⁿ or 3 · 2ⁿ, at least 32; returns 1 for length 1."""
    return 1 if length == 1 else bucket(length)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LoopCache:
    """The arrays of a cache, without batch and head axes of size 1.

    XLA:CPU updates keys and values in place only if the arrays have no axes of size 1. Decoding one
    sequence with GPT-2 124M took 9% longer if the arrays had axes of size 1 (jaxlib 0.10, two
    cores).

    Attributes:
        arrays: the arrays of the cache.
        structure: the cache's tree and the shape of each array.
    """

    arrays: list[jax.Array]
    structure: tuple[Any, tuple[tuple[int, ...], ...]] = field(metadata={"static": True})

    @classmethod
    def from_cache(cls, cache: Cache) -> "LoopCache":
        """Converts a cache to a `LoopCache`, for the carry of a `scan` or a `while_loop`."""
        leaves, tree = jax.tree.flatten(cache)
        return cls(
            [_without_single_axes(x) for x in leaves], (tree, tuple(x.shape for x in leaves))
        )

    def to_cache(self) -> Cache:
        """Converts the `LoopCache` back to the cache."""
        tree, shapes = self.structure
        return tree.unflatten(x.reshape(n) for x, n in zip(self.arrays, shapes, strict=True))


def _without_single_axes(x: jax.Array) -> jax.Array:
    return x.reshape([n for n in x.shape[:2] if n != 1] + list(x.shape[2:])) if x.ndim == 4 else x
