"""The encoder–decoder Transformer as pure functions of its weights.

    source → encoder → keys and values, layer by layer
    tokens → embedding + position → blocks that attend to those → norm → logits

Output i predicts token i + 1. It depends on tokens ≤ i and on the whole source except padding. A
source is encoded once, and the cache holds its keys and values in addition to the decoder's own.

Reference:
    Notes, lecture 13 §1, §4–5.
"""

from dataclasses import replace
from typing import Any

import jax
from jaxtyping import Array, PRNGKeyArray

from jaxformer.functional import encoder, transformer
from jaxformer.functional.attention.contexts import source_context
from jaxformer.functional.attention.scores import Scores
from jaxformer.functional.attention.token_info import TokenInfo
from jaxformer.functional.blocks import BLOCK_POINTS, CROSS_BLOCK_POINTS, cross_keys_values
from jaxformer.functional.cache.source_cache import SourceCache
from jaxformer.functional.embedding import with_head
from jaxformer.functional.family import CacheSize, Family, Weights
from jaxformer.functional.initial import init_cross_block, stack_initializers
from jaxformer.functional.inputs import Forward, Inputs, Run
from jaxformer.functional.transformer import CROSS_POINTS, CrossAttentionSource
from jaxformer.functional.trees import split_key, unstack

PREFIX = "encoder."  # of the names of the encoder's points
POINTS = (*(PREFIX + name for name in encoder.POINTS), *CROSS_POINTS)
LAYER_POINTS = (*(PREFIX + name for name in BLOCK_POINTS), *CROSS_BLOCK_POINTS)


def initializers(config: Any) -> dict:
    """Returns {name: initializer}, each a pure function of a key; the decoder's as in `decoder`."""
    parts = stack_initializers(config, init_cross_block)
    parts["encoder"] = lambda key: init_encoder(key, config)
    return with_head(parts, config, config.embed_dim)


def init_encoder(key: PRNGKeyArray, config: Any) -> Weights:
    """Returns the encoder's weights, without token vectors if it shares the decoder's."""
    parts = stack_initializers(config.encoder)
    keys = jax.random.split(key, len(parts))
    tree = {name: init(key) for (name, init), key in zip(parts.items(), keys, strict=True)}
    if config.share_embeddings:
        learned = {name: x for name, x in tree.pop("embedding").items() if name == "positions"}
        tree |= {"embedding": learned} if learned else {}
    return tree


def encode(weights: Weights, source: Inputs, config: Any, run: Run) -> Forward:
    """Encodes a source."""
    encoder_weights = weights["encoder"]
    tables = {"tokens": weights["embedding"]["tokens"], **encoder_weights.get("embedding", {})}
    encoded = encoder.encode({**encoder_weights, "embedding": tables}, source, config.encoder, run)
    return encoded._replace(captured={PREFIX + name: x for name, x in encoded.captured.items()})


def forward(
    weights: Weights, inputs: Inputs, config: Any, run: Run, cache: SourceCache | None = None
) -> Forward:
    """Computes the last hidden states [batch, length, dim] of tokens [batch, length].

    Args:
        weights: those of `initializers`.
        inputs: the tokens and, without a cache, their sources.
        config: an EncoderDecoderConfig, or a value with its fields.
        run: how the pass runs; its mask is that of the decoder.
        cache: a cache that has read the sources; None: the tokens are complete sequences.
    """
    scores, num_tokens = (
        Scores(config.attention_scale, config.attention_cap),
        inputs.tokens.shape[1],
    )
    encoder_key, decoder_key = split_key(run.dropout_key, 2)
    of_decoder = replace(run, dropout_key=decoder_key)
    if cache is None:
        source = inputs.of_source()
        encoded = encode(weights, source, config, run.of_encoder(PREFIX, encoder_key))
        info = TokenInfo(source.tokens.shape[1], None, source.segments)
        context = source_context(info, num_tokens, scores, run, is_cached=False)
        read = CrossAttentionSource(context, encoded.hidden)
        passed = transformer.forward(weights, inputs, config, of_decoder, None, read)
        return passed._replace(captured={**encoded.captured, **passed.captured})
    context = source_context(cache.source, num_tokens, scores, run, is_cached=True)
    read = CrossAttentionSource(context, keys_values=cache.cross_keys_values)
    passed = transformer.forward(weights, inputs, config, of_decoder, cache.self_cache, read)
    return passed._replace(cache=replace(cache, self_cache=passed.cache))


def start(
    weights: Weights, source: Inputs | None, config: Any, run: Run, size: CacheSize
) -> tuple[SourceCache, dict[str, Array]]:
    """Reads the sources.

    Returns:
        (cache, captured): the cache of rows that have read only their source, and the captured
        values of the encoder.
    """
    if source is None:
        raise ValueError("source is None; this model reads one")
    encoded = encode(weights, source, config, run.of_encoder(PREFIX, None))
    cross = [
        cross_keys_values(block["cross_attention"], encoded.hidden, config)
        for block in unstack(weights["blocks"], config.num_layers)
    ]
    self_cache, _ = transformer.start(weights, None, config, run, size)
    return SourceCache.of(self_cache, cross, source), encoded.captured


ENCODER_DECODER = Family(
    initializers,
    forward,
    points=lambda config: POINTS,
    layer_points=lambda config: LAYER_POINTS,
    start=start,
    prepare=transformer.prepare,
    masks=transformer.self_attention_masks,
)
