"""Check that a row read in chunks through the cache has the logits of one pass."""

import itertools

import jax
import numpy as np

from jaxformer.decoding.autoregressive import advance, start
from jaxformer.verify.layers import distance


def cached(subject):
    """Checks that a row read in random chunks has the logits of one pass without a cache.

    If it fails, the caches of the two readings are compared to find the layer.

    Returns:
        Whether it holds, the figures and, if it fails, the layer.
    """
    rng, first = np.random.default_rng(subject.seed), subject.minimum_prefill
    length = min(subject.length, first + 63)
    tokens = subject.tokens(subject.rows(2), length)
    whole = subject.compiled(tokens)
    _, kept = _advanced(subject, tokens, [length])
    worst = 0.0
    for sizes in ([length], *(chunk_sizes(rng, length, first) for _ in range(3))):
        logits, cache = _advanced(subject, tokens, sizes)
        worst = max(worst, off := distance(logits, whole))
        if off > subject.tolerance:
            where = _parting(cache, kept, 10 * subject.tolerance)
            return False, f"chunks of {_few(sizes)}: off by {off:.3g}", where
    return True, f"{length} tokens at once and in 3 random chunkings: off by {worst:.2g} at most"


def _advanced(subject, tokens, sizes):
    cache = start(subject.model, subject.variables, len(tokens), tokens.shape[1], subject.source)
    logits, begin = [], 0
    for size in sizes:
        some, cache = advance(
            subject.model, subject.variables, tokens[:, begin : begin + size], cache
        )
        logits.append(some)
        begin += size
    return np.concatenate(logits, axis=1), cache


def chunk_sizes(rng, length: int, first: int):
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


def _few(sizes):
    return ", ".join(map(str, sizes[:6])) + ", …" * (len(sizes) > 6)


def _parting(cache, kept, tolerance: float) -> str | None:
    """Returns the first layer whose caches differ."""
    (some, _), (others, _) = map(jax.tree_util.tree_flatten_with_path, (cache, kept))
    parted = []
    for (path, x), (_, y) in zip(some, others, strict=True):
        layers = [key.idx for key in path if isinstance(key, jax.tree_util.SequenceKey)]
        if layers and not np.allclose(x, y, rtol=0, atol=tolerance):
            parted.append((layers[0], f"cache{jax.tree_util.keystr(path)}"))
    return "layer {}, {}".format(*min(parted)) if parted else None
