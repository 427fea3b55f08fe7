"""The encoder–decoder Transformer as pure functions of its weights (seeds: lecture 13 §1, §4–5).

    source → encoder → keys and values, layer by layer
    tokens → embedding + position → blocks that look at those → norm → logits

Output i predicts token i + 1 and depends on tokens ≤ i and on the whole source, padding aside. A
source is encoded once, and its keys and values are kept beside the decoder's own.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxformer.functional import encoder, transformer
from jaxformer.functional.blocks import (
    BLOCK_POINTS,
    CROSS_BLOCK_POINTS,
    cross_keys_values,
    init_cross_block,
)
from jaxformer.functional.cache import SourceCache
from jaxformer.functional.contexts import Source, SourceAttention
from jaxformer.functional.embedding import head, logits, with_head
from jaxformer.functional.layers import Forward, split_key, unstack
from jaxformer.functional.masks import Causal, Mask, Packed
from jaxformer.functional.scores import Scores
from jaxformer.functional.taps import NO_HOOKS, Hooks
from jaxformer.functional.transformer import (
    CROSS_POINTS,
    FEW_TOKENS,
    attention_form,
    prepare,
    stack_initializers,
)

__all__ = [
    "POINTS",
    "forward",
    "head",
    "initializers",
    "layer_points",
    "logits",
    "points",
    "prepare",
]
__all__ += ["self_attention_mask", "start"]
ENCODER = "encoder."  # what the names of the encoder's points begin with
POINTS = (*(ENCODER + name for name in encoder.POINTS), *CROSS_POINTS)


def points(config) -> tuple[str, ...]:
    """The names at which a pass can be looked into."""
    return POINTS


def layer_points(config) -> tuple[str, ...]:
    """Those of them that every layer has."""
    return (*(ENCODER + name for name in BLOCK_POINTS), *CROSS_BLOCK_POINTS)


def self_attention_mask(config, mask: Mask | None = None) -> Mask:
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


def encode(weights, source: Source, config, execution, *, dropout_key=None, hooks=NO_HOOKS):
    """(A vector for each token of the source [batch, source length, dim], what was captured)."""
    own = weights["encoder"]
    tables = {"tokens": weights["embedding"]["tokens"], **own.get("embedding", {})}
    passed = encoder.encode(
        {**own, "embedding": tables},
        source.tokens,
        config.encoder,
        execution,
        tuple(encoder.self_attention_mask(layer) for layer in config.encoder.layers),
        segments=source.segments,
        dropout_key=dropout_key,
        hooks=hooks.within(ENCODER),
    )
    return passed.hidden, {ENCODER + name: x for name, x in passed.captured.items()}


def forward(
    weights,
    tokens,
    config,
    execution,
    masks: tuple[Mask, ...],
    *,
    cache: SourceCache | None = None,
    segments=None,
    source: Source | None = None,
    dropout_key=None,
    hooks: Hooks = NO_HOOKS,
) -> Forward:
    """As `transformer.forward`, over whole rows of which each has its source, or on from a cache
    that has read them. masks: of the decoder's self-attention."""
    form = attention_form(execution, hooks, "cross_attention.weights")
    scores, keys = Scores(config.attention_scale, config.attention_cap), split_key(dropout_key, 2)
    if cache is None:
        inputs = {"dropout_key": keys[0], "hooks": hooks}
        encoded, captured = encode(weights, source, config, execution, **inputs)
        attention = SourceAttention(encoded, source.segments, scores, form)
        own = cross = None
    else:
        few = tokens.shape[1] <= FEW_TOKENS and form in ("auto", "explicit")
        attention = SourceAttention(None, cache.source_segments, scores, form, few)
        own, cross, captured = cache.self_cache, cache.cross_keys_values, {}
    passed = transformer.forward(
        weights,
        tokens,
        config,
        execution,
        masks,
        cache=own,
        segments=segments,
        source=attention,
        cross_keys_values=cross,
        dropout_key=keys[1],
        hooks=hooks,
    )
    if cache is not None:
        cache = replace(cache, self_cache=passed.cache)
    return Forward(passed.hidden, {**captured, **passed.captured}, cache)


def start(
    weights,
    source: Source,
    config,
    execution,
    batch_size: int,
    capacity: int,
    reach: int | None = None,
    hooks: Hooks = NO_HOOKS,
):
    """Read the sources: (the cache of batch_size rows that have read nothing else yet, what was
    captured of the encoder)."""
    encoded, captured = encode(weights, source, config, execution, hooks=hooks)

    def without_padding(x):
        """Zeros there: 0 × NaN is NaN."""
        if source.segments is None:
            return x
        return jnp.where((source.segments != 0)[:, None, :, None], x, 0)

    cross = [
        tuple(map(without_padding, cross_keys_values(block["cross_attention"], encoded, config)))
        for block in unstack(weights["blocks"], config.num_layers)
    ]
    own = transformer.start(config, batch_size, capacity, reach)
    return SourceCache(own, cross, source.segments), captured
