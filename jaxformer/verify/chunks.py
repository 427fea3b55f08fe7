"""Check that a row read in chunks through the cache has the logits of one pass."""

import itertools
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxformer.decoding.autoregressive import advance, start
from jaxformer.functional.cache.key_values import Cache
from jaxformer.verify.layers import distance
from jaxformer.verify.subject import Result, Subject


def cached(subject: Subject) -> Result:
    """Checks that a row read in random chunks has the logits of one pass without a cache.

    If it fails, the caches of the two readings are compared to find the layer.

    Returns:
        Whether it holds, the figures and, if it fails, the layer.
    """
    rng, first = np.random.default_rng(subject.seed), subject.minimum_prefill
    length = min(subject.length, first + 63)
    tokens = subject.tokens(subject.rows(2), length)
    whole = subject.compiled(tokens)
    _, whole_cache = _read_in_chunks(subject, tokens, [length])
    worst = 0.0
    for sizes in ([length], *(chunk_sizes(rng, length, first) for _ in range(3))):
        logits, cache = _read_in_chunks(subject, tokens, sizes)
        worst = max(worst, off := distance(logits, whole))
        if off > subject.tolerance:
            where = _differing_layer(cache, whole_cache, 10 * subject.tolerance)
            return False, f"chunks of {_few(sizes)}: off by {off:.3g}", where
    return True, f"{length} tokens at once and in 3 random chunkings: off by {worst:.2g} at most"


def _read_in_chunks(
    subject: Subject, tokens: Int[np.ndarray, "batch length"], sizes: Sequence[int]
) -> tuple[Float[np.ndarray, "batch length vocab"], Cache]:
    """Returns the logits and the cache after reading the tokens in chunks of these sizes."""
    cache = start(subject.model, subject.variables, len(tokens), tokens.shape[1], subject.source)
    logits = []
    for chunk in np.split(tokens, np.cumsum(sizes)[:-1], axis=1):
        chunk_logits, cache = advance(subject.model, subject.variables, chunk, cache)
        logits.append(chunk_logits)
    return np.concatenate(logits, axis=1), cache


def chunk_sizes(rng: np.random.Generator, length: int, first: int) -> list[int]:
    """Draws the sizes of the chunks: 1 or 11, because each size is compiled separately.

    Args:
        rng: The random generator.
        length: The sum of the sizes.
        first: The minimum size of the first chunk, which must contain the prefix.
    """
    sizes = rng.choice([1, 11], length).tolist()
    sizes[0] = max(sizes[0], first)
    ends = [end for end in itertools.accumulate(sizes) if end <= length]
    return sizes[: len(ends)] + [1] * (length - ends[-1])


def _few(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes[:6])) + ", …" * (len(sizes) > 6)


def _differing_layer(cache: Cache, expected: Cache, tolerance: float) -> str | None:
    """Returns the first layer whose caches differ."""
    leaves = jax.tree_util.tree_leaves_with_path(cache.states)
    differing = []
    for (path, x), y in zip(leaves, jax.tree.leaves(expected.states), strict=True):
        if not np.allclose(x, y, rtol=0, atol=tolerance):
            name = jax.tree_util.keystr(path[1:], simple=True, separator=".")
            differing.append((path[0].idx, name))
    return "layer {}, {}".format(*min(differing)) if differing else None
