"""The decoder-only Transformer as pure functions of its weights.

    tokens → embedding + position → blocks → norm → logits            (seeds: lecture 11 §6)

Output i predicts token i + 1 and depends on tokens ≤ i, and on all of a prefix if there is one (the
first tokens of a document, which see one another both ways, are given and not predicted). Two ways
through it, held to the same values: `hidden_states` takes whole rows, `advance` takes the next
tokens and a cache.
"""

import jax.numpy as jnp

from jaxformer.functional.cache import Cache
from jaxformer.functional.embedding import head, logits, with_head
from jaxformer.functional.masks import Causal, Mask, Packed, Prefix, Window
from jaxformer.functional.transformer import (
    POINTS,
    empty_cache,
    prepare,
    read_on,
    read_rows,
    stack_initializers,
)

__all__ = ["POINTS", "advance", "head", "hidden_states", "initializers", "inspect", "logits"]
__all__ += ["prepare", "self_attention_mask", "start"]


def initializers(config) -> dict:
    """The decoder's weights by name, each as a pure initialiser of one key."""
    return with_head(stack_initializers(config), config, config.embed_dim)


def self_attention_mask(config, mask: Mask | None = None) -> Mask:
    """Causal (or prefix) within a document, through a window if the config has one; or the caller's
    mask, within a document too."""
    if mask is not None:
        return mask & Packed()
    mask = Prefix(config.prefix) if config.prefix else Causal()
    if config.window is not None:
        mask = mask & Window(config.window)
    return mask & Packed()


def hidden_states(weights, tokens, config, execution, **options):
    """Whole rows to the last hidden states [batch, length, dim]: see `read_rows`."""
    return inspect(weights, tokens, config, execution, **options)[0]


def inspect(weights, tokens, config, execution, *, mask: Mask | None = None, **options):
    """(hidden states, what passed through the points named in `capture`): see `read_rows`."""
    rule = self_attention_mask(config, mask)
    return read_rows(weights, tokens, config, execution, rule, **options)


def start(config, batch_size: int, capacity: int) -> Cache:
    """An empty cache for this decoder."""
    return empty_cache(config, batch_size, capacity)


def advance(weights, tokens, cache: Cache, config, *, mask: Mask | None = None, segments=None):
    """The hidden states of the next tokens [batch, new], and the cache after them.

    A row that stops inside a prefix, which must be read at once, gets NaN.
    """
    before, mask = cache.cursor.position, self_attention_mask(config, mask)
    x, cache = read_on(weights, tokens, cache, config, mask, segments=segments)
    if config.prefix:
        after = cache.cursor.position
        torn = ((before > 0) & (before < config.prefix)) | ((after > 0) & (after < config.prefix))
        x = jnp.where(torn[:, None, None], jnp.nan, x)
    return x, cache
