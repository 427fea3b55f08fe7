"""The Transformer's stack, which encoder and decoder have in common.

    tokens → embedding + position → blocks → norm

Two ways through it, held to the same values: `read_rows` takes whole rows, `read_on` takes the next
tokens and a cache. What a block does besides (reading a source) is handed in as `block`.
"""

import jax
import jax.numpy as jnp

from jaxformer.functional.attention import (
    dot_product_attention,
    few_queries_attention,
    masked_attention,
)
from jaxformer.functional.blocks import (
    BLOCK_POINTS,
    CROSS_POINTS,
    block,
    fuse_query_key_value,
    init_block,
    init_blocks,
    run_blocks,
    unstack,
)
from jaxformer.functional.cache import Cache, append_slots, init_cache, read_heads, write_heads
from jaxformer.functional.dropout import dropout
from jaxformer.functional.embedding import (
    add_positions,
    embed_tokens,
    head,
    init_embedding,
    pack_all,
    without_padding,
)
from jaxformer.functional.masks import Mask, TokenInfo
from jaxformer.functional.norms import init_norm, normalizer
from jaxformer.functional.positions import DocumentCursor, continued_segments, document_positions
from jaxformer.functional.taps import Tap

FEW = 64  # new tokens up to which a step over the cache takes all of their scores at once
POINTS = ("embedding", *BLOCK_POINTS, "final_norm")


def stack_initializers(config, init_block=init_block) -> dict:
    """The stack's weights by name, each as a pure initialiser of one key."""
    dim, vocab_size = config.embed_dim, config.vocab_size
    tables = {
        "learned_positions": config.max_length if config.positions == "learned" else 0,
        "stddev": dim**-0.5 if config.scale_embeddings else 0.02,
    }

    def norm(key):
        return init_norm(config.norm, dim, use_bias=config.use_bias)

    parts = {
        "embedding": lambda key: init_embedding(key, vocab_size, dim, **tables),
        "blocks": lambda key: init_blocks(key, config, init_block),
    }
    if config.embedding_norm:
        parts["embedding_norm"] = norm
    if config.norm_position == "pre" and config.norm != "none":
        parts["final_norm"] = norm
    return parts


def embed(weights, tokens, positions, config, segments=None):
    """e + p, and its norm if there is one; padding is silent.

    tokens: int ids, or float rows of the embedding table in their place.
    """
    x = embed_tokens(weights["embedding"], tokens, config.dtype)
    if config.scale_embeddings:  # Vaswani et al. 2017, §3.4
        x = x * jnp.asarray(config.embed_dim**0.5, x.dtype)
    x = add_positions(weights["embedding"], x, positions, config.positions)
    return _norm_if_there(weights, "embedding_norm", without_padding(x, segments), config)


def read_rows(
    weights,
    tokens,
    config,
    execution,
    mask: Mask,
    *,
    block=block,
    segments=None,
    dropout_key=None,
    capture=(),
    patch=None,
):
    """Whole rows [batch, length] to the last hidden states [batch, length, dim] under a mask.

    segments: int [batch, length], 1, 1, 2, 2, … for documents packed into a row, 0 for padding.
    Returns (hidden states, what passed through the points named in `capture`).
    """
    length, patch = tokens.shape[1], patch or {}
    inner = {name: entry for name, entry in patch.items() if _in_block(name)}
    tap = Tap(capture, {name: entry for name, entry in patch.items() if not _in_block(name)})
    if segments is None:
        places, positions = TokenInfo(length), jnp.arange(length)
    else:
        documents, positions, _ = document_positions(
            segments, DocumentCursor.begin(segments.shape[0])
        )
        # Order within a document is order along the row: only a rule that counts (a window, a
        # prefix) needs the counted positions, which are not known while tracing.
        places = TokenInfo(length, positions if mask.needs_positions else None, documents)

    embed_key, blocks_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
    x = embed(weights, tokens, positions, config, segments)
    x = tap("embedding", dropout(embed_key, x, config.dropout))

    def step(weights, x, dropout_key, tap):
        def attend(query, key, value):
            return dot_product_attention(
                query,
                key,
                value,
                mask,
                query_info=places,
                key_info=places,
                scale=config.attention_scale,
                implementation=implementation("attention.weights", execution, capture, patch),
                tap=tap,
            ), None

        how = {"attend": attend, "positions": positions, "dropout_key": dropout_key, "tap": tap}
        return block(weights, x, config, **how)[0]

    x, captured = run_blocks(
        step,
        weights["blocks"],
        x,
        config,
        execution,
        dropout_key=blocks_key,
        capture=tuple(filter(_in_block, capture)),
        patch=inner,
    )
    x = tap("final_norm", _norm_if_there(weights, "final_norm", x, config))
    return x, {**tap.captured, **captured}


def implementation(point, execution, capture, patch) -> str:
    """How attention runs: as told, but explicitly where its weights are to be seen or changed."""
    return "explicit" if point in {*capture, *(patch or ())} else execution.attention


def _in_block(name):
    return name in {*BLOCK_POINTS, *CROSS_POINTS}


def _norm_if_there(weights, name, x, config):
    if name not in weights:
        return x
    return normalizer(config.norm, config.norm_epsilon)(weights[name], x)


def empty_cache(config, batch_size: int, capacity: int) -> Cache:
    """An empty cache for this stack."""
    return init_cache(
        config.num_layers,
        batch_size,
        config.num_kv_heads,
        capacity,
        config.head_dim,
        jnp.dtype(config.dtype),
    )


def prepare(weights, config, parts: int = 1):
    """The weights as many small steps want them: block by block, query, key and value in one map,
    and the head: see `pack_all`. What an encoder has stays as it is: it takes few, large steps.
    """
    blocks = unstack(weights["blocks"], config.num_layers)
    return {
        **weights,
        "embedding": {
            name: table.astype(config.dtype) for name, table in weights["embedding"].items()
        },
        "blocks": [pack_all(fuse_query_key_value(block), config, parts) for block in blocks],
        "head": pack_all(head(weights), config, parts),
    }


def read_on(weights, tokens, cache: Cache, config, mask: Mask, *, block=block, segments=None):
    """Read the next tokens [batch, new]; returns (their hidden states, the cache after them).

    segments: as in `read_rows`, 0 for padding; None goes on with each row's document. Past the
    capacity the result is NaN: a write is never clamped into the last slots unnoticed.
    """
    segments = continued_segments(segments, cache.cursor, tokens.shape[:2])
    old_length = cache.length
    cache, new, slots = append_slots(cache, segments)
    x = embed(weights, tokens, new.positions, config, segments)

    keys, values = [], []
    visible = mask(new, slots) if new.length <= FEW else None  # the same in every layer
    for layer, block_weights in enumerate(unstack(weights["blocks"], config.num_layers)):

        def attend(query, key, value, layer=layer):
            keys = write_heads(cache.keys[layer], key, old_length)
            values = write_heads(cache.values[layer], value, old_length)
            if new.length <= FEW:
                output = few_queries_attention(query, keys, values, visible, config.attention_scale)
            else:  # a long prompt: not all of its scores at once
                key, value = (read_heads(x, len(tokens)) for x in (keys, values))
                output = masked_attention(
                    query, key, value, mask, new, slots, config.attention_scale
                )
            return output, (keys, values)

        x, (key, value) = block(block_weights, x, config, attend=attend, positions=new.positions)
        keys.append(key)
        values.append(value)

    length = old_length + tokens.shape[1]
    x = jnp.where(length <= cache.capacity, x, jnp.nan)
    cache = cache._replace(keys=tuple(keys), values=tuple(values), length=length)
    return _norm_if_there(weights, "final_norm", x, config), cache
