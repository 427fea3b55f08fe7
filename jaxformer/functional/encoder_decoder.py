"""The encoder–decoder Transformer as pure functions of its weights (seeds: lecture 13 §1, §4–5).

    source → encoder → keys and values, layer by layer
    tokens → embedding + position → blocks that look at those → norm → logits

Output i predicts token i + 1 and depends on tokens ≤ i and on the whole source, padding aside. A
source is encoded once, and its keys and values are kept beside the decoder's own.
"""

from dataclasses import replace
from functools import partial

import jax

from jaxformer.functional import encoder
from jaxformer.functional.attention import dot_product_attention, few_queries_attention
from jaxformer.functional.blocks import CROSS_POINTS, cross_block, init_cross_block, source_heads
from jaxformer.functional.cache import SourceCache, fold_source, visible_source
from jaxformer.functional.embedding import head, logits, with_head
from jaxformer.functional.masks import Causal, Mask, Packed, Padding, TokenInfo
from jaxformer.functional.transformer import (
    POINTS,
    empty_cache,
    implementation,
    prepare,
    read_on,
    read_rows,
    stack_initializers,
    unstack,
)

__all__ = ["POINTS", "advance", "head", "hidden_states", "initializers", "inspect", "logits"]
__all__ += ["prepare", "start"]
POINTS = (*POINTS, *CROSS_POINTS)


def self_attention_mask(mask: Mask | None = None) -> Mask:
    """Of the decoder: causal within a document, or the caller's mask, within a document too."""
    return (Causal() if mask is None else mask) & Packed()


def initializers(config) -> dict:
    """The weights by name, each as a pure initialiser of one key; the decoder's as in `decoder`."""
    parts = stack_initializers(config, init_cross_block)
    parts["encoder"] = lambda key: init_encoder(key, config)
    return with_head(parts, config, config.embed_dim)


def init_encoder(key, config):
    """The encoder's weights in one tree, without token vectors if it shares the decoder's."""
    parts = stack_initializers(config.encoder)
    keys = jax.random.split(key, len(parts))
    tree = {name: init(key) for (name, init), key in zip(parts.items(), keys, strict=True)}
    if config.share_embeddings:
        learned = {name: x for name, x in tree.pop("embedding").items() if name == "positions"}
        tree |= {"embedding": learned} if learned else {}
    return tree


def encode(weights, source, config, execution, *, segments=None, dropout_key=None):
    """A vector for each token of the source [batch, source length, dim]."""
    own = weights["encoder"]
    tables = {"tokens": weights["embedding"]["tokens"], **own.get("embedding", {})}
    return encoder.encode(
        {**own, "embedding": tables},
        source,
        config.encoder,
        execution,
        segments=segments,
        dropout_key=dropout_key,
    )[0]


def hidden_states(weights, tokens, source, config, execution, **options):
    """Whole rows to the last hidden states [batch, length, dim]: see `inspect`."""
    return inspect(weights, tokens, source, config, execution, **options)[0]


def inspect(
    weights,
    tokens,
    source,
    config,
    execution,
    *,
    mask: Mask | None = None,
    segments=None,
    source_segments=None,
    dropout_key=None,
    capture=(),
    patch=None,
):
    """(hidden states, what passed through the points of the decoder named in `capture`).

    mask: of the decoder's self-attention; None: causal.

    source_segments: int [batch, source length], 0 for padding, as `segments` are for the tokens.
    """
    keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
    how = {"segments": source_segments, "dropout_key": keys[0]}
    encoded = encode(weights, source, config, execution, **how)
    places = TokenInfo(source.shape[1], None, source_segments)

    def look_up(weights, query, tap):
        key, value = source_heads(weights["cross_attention"], encoded, config)
        return dot_product_attention(
            query,
            key,
            value,
            Padding(),
            key_info=places,
            scale=config.attention_scale,
            implementation=implementation("cross_attention.weights", execution, capture, patch),
            tap=tap,
        )

    return read_rows(
        weights,
        tokens,
        config,
        execution,
        self_attention_mask(mask),
        block=partial(cross_block, look_up=look_up),
        segments=segments,
        dropout_key=keys[1],
        capture=capture,
        patch=patch,
    )


# ---- token by token


def start(weights, source, config, execution, batch_size: int, capacity: int, source_segments=None):
    """Read the sources; the cache of batch_size rows that have read nothing else yet."""
    encoded = encode(weights, source, config, execution, segments=source_segments)
    visible = visible_source(source, source_segments)
    memory = tuple(
        fold_source(source_heads(block["cross_attention"], encoded, config), visible)
        for block in unstack(weights["blocks"], config.num_layers)
    )
    return SourceCache(empty_cache(config, batch_size, capacity), memory, visible)


def advance(
    weights, tokens, cache: SourceCache, config, *, mask: Mask | None = None, segments=None
):
    """The hidden states of the next tokens [batch, new], and the cache after them."""

    def look_up(weights, query, tap):
        keys, values = weights["memory"]
        return few_queries_attention(query, keys, values, cache.visible, config.attention_scale)

    blocks = unstack(weights["blocks"], config.num_layers)
    blocks = [
        {**block, "memory": memory} for block, memory in zip(blocks, cache.memory, strict=True)
    ]
    hidden, own = read_on(
        {**weights, "blocks": blocks},
        tokens,
        cache.own,
        config,
        self_attention_mask(mask),
        block=partial(cross_block, look_up=look_up),
        segments=segments,
    )
    return hidden, replace(cache, own=own)
