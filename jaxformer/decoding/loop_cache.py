"""The cache of a decoding loop: the slots that a pass needs, and the layout between steps."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.functional.cache.key_values import Cache
from jaxformer.functional.positions import continued_segments, document_positions
from jaxformer.models.check import AnyArray
from jaxformer.models.language_model import LanguageModel
from jaxformer.models.mesh import to_host
from jaxformer.models.rows import bucket, power_of_two


def checked_slots(
    model: LanguageModel, cache: Cache, tokens: AnyArray, segments: AnyArray | None
) -> int | None:
    """Returns the number of slots to attend to with these tokens (None: all).

    Raises:
        ValueError: the cache has too few slots, or the tokens do not fit it.
    """
    if not tokens.shape[1]:
        raise ValueError(f"tokens are {tokens.shape}; there must be at least one new token a row")
    rows = len(cache.cursor.position)
    if len(tokens) != rows:
        raise ValueError(f"tokens have {len(tokens)} rows; the cache was started for {rows}")
    traced = isinstance(cache.length, jax.core.Tracer)
    used = 0 if traced else int(cache.length)  # inside jit only shapes are known
    needed = used + tokens.shape[1]
    if cache.capacity is not None and needed > cache.capacity:
        raise ValueError(
            f"tokens are {tokens.shape[1]} a row, but the cache has {cache.capacity} slots with "
            f"{used} used; start one with a capacity of at least {needed}"
        )
    if not any(isinstance(x, jax.core.Tracer) for x in (tokens, segments, cache.length)):
        _check_reading(model, cache, needed, segments, tokens.shape[:2])
    return None if traced else live_slots(cache, needed)


def _check_reading(
    model: LanguageModel,
    cache: Cache,
    needed: int,
    segments: AnyArray | None,
    shape: tuple[int, ...],
) -> None:
    """Checks where a chunk ends in its documents.

    Raises:
        ValueError: a row ends inside a prefix that must be read at once, or has more tokens than
            there are positions.
    """
    least, most = model.minimum_prefill, model.config.max_length
    if cache.reach is not None and model.config.positions != "learned":
        most = np.iinfo(np.int32).max  # the largest position is the only limit of a ring
    if least == 1 and needed <= most:
        return  # no row can fail the checks
    with jax.ensure_compile_time_eval():  # these values are known, even inside a caller's jit
        given = None if segments is None else jnp.asarray(segments)
        segments = continued_segments(given, cache.cursor, shape)
        read = to_host(document_positions(jnp.asarray(segments), cache.cursor)[2].position)
    both_ways = f", whose first {least} see one another both ways; read them in one chunk"
    too_long = f"; max_length is {most} positions"
    for is_wrong, why in (((read > 0) & (read < least), both_ways), (read > most, too_long)):
        if is_wrong.any():
            row = int(is_wrong.argmax())
            raise ValueError(f"row {row} ends after {read[row]} tokens of a document{why}")


def live_slots(cache: Cache, needed: int) -> int | None:
    """Returns the static number of slots to attend to: `slots(needed)`, at most the capacity.

    Returns None for a cache without slots, which holds one state of fixed size.
    """
    return None if cache.capacity is None else min(cache.capacity, slots(needed))


def with_slots(cache: Cache, needed: int) -> Cache:
    """Returns the cache with at least `needed` slots, growing it to `slots(needed)` if it has less.

    Decoding loops start with few slots and grow the cache while rows continue, so that memory
    follows the length of the texts and not the maximum that the caller allows.
    """
    if cache.capacity is None or cache.capacity >= needed:
        return cache
    return _grow(cache, slots(needed))


_grow = jax.jit(lambda cache, slots: cache.grow(slots), static_argnums=1)


def slots(length: int) -> int:
    """Returns the least 3 · 2ⁿ that is at least `length` and 48.

    These numbers are half as frequent as the buckets of prompts, because each number is a compiled
    program of all layers and a decoding loop passes through one after the other.
    """
    return 3 * power_of_two(-(-length // 3), 16)


def prompt_bucket(length: int) -> int:
    """Returns the width to which prompts are padded: a bucket, or 1 for a single token."""
    return 1 if length == 1 else bucket(length)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LoopCache:
    """The arrays of a cache without axes of size 1 for batch elements and heads.

    XLA:CPU updates keys and values in place only without such axes: with them, the steps of one row
    of GPT-2 124M took 9 % longer (jaxlib 0.10, two cores).

    Attributes:
        arrays: the arrays of the cache.
        structure: the cache's tree and the shape of each array.
    """

    arrays: list[jax.Array]
    structure: tuple[Any, tuple[tuple[int, ...], ...]] = field(metadata={"static": True})

    @classmethod
    def of(cls, cache: Cache) -> "LoopCache":
        """Returns the loop's form of a cache, for the carry of a `scan` or a `while_loop`."""
        leaves, tree = jax.tree.flatten(cache)
        return cls(
            [_without_single_axes(x) for x in leaves], (tree, tuple(x.shape for x in leaves))
        )

    def restored(self) -> Cache:
        """Returns the cache."""
        tree, shapes = self.structure
        return tree.unflatten(x.reshape(n) for x, n in zip(self.arrays, shapes, strict=True))


def _without_single_axes(x: jax.Array) -> jax.Array:
    return x.reshape([n for n in x.shape[:2] if n != 1] + list(x.shape[2:])) if x.ndim == 4 else x
