"""The Transformer's stack, which decoder and encoder have in common.

    tokens → embedding + position → blocks → norm

One pass, `forward`, over whole rows or, with a cache, over the next tokens: what differs is the
value that the blocks attend by (`contexts`).
"""

import jax.numpy as jnp

from jaxformer.functional.blocks import (
    BLOCK_POINTS,
    CROSS_BLOCK_POINTS,
    block,
    fuse_query_key_value,
    init_block,
    init_blocks,
)
from jaxformer.functional.cache import Cache, init_cache
from jaxformer.functional.contexts import CacheAttention, RowAttention, SourceAttention
from jaxformer.functional.dropout import dropout
from jaxformer.functional.embedding import (
    add_positions,
    embed_tokens,
    head,
    init_embedding,
    pack_all,
    without_padding,
)
from jaxformer.functional.layers import Forward, over_layers, split_key, stack, unstack
from jaxformer.functional.masks import Mask, TokenInfo
from jaxformer.functional.norms import init_norm, normalizer
from jaxformer.functional.positions import (
    DocumentCursor,
    continued_segments,
    document_positions,
)
from jaxformer.functional.taps import NO_HOOKS, Hooks, Tap

FEW_TOKENS = 64  # new tokens up to which a step over the cache takes all of their scores at once
POINTS = ("embedding", *BLOCK_POINTS, "final_norm")
CROSS_POINTS = ("embedding", *CROSS_BLOCK_POINTS, "final_norm")


def stack_initializers(config, init_block=init_block) -> dict:
    """The stack's weights by name, each as a pure initialiser of one key."""
    dim, vocab_size = config.embed_dim, config.vocab_size
    tables = {
        "learned_positions": config.max_length if config.positions == "learned" else 0,
        "stddev": dim**-0.5 if config.scale_embeddings else 0.02,
    }

    def norm(key):
        return init_norm(config.norm, dim, use_bias=config.norm_bias)

    parts = {
        "embedding": lambda key: init_embedding(key, vocab_size, dim, **tables),
        "blocks": lambda key: init_blocks(key, config, init_block),
    }
    if config.embedding_norm:
        parts["embedding_norm"] = norm
    if config.norm_position != "post" and config.norm != "none":
        parts["final_norm"] = norm
    return parts


def forward(
    weights,
    tokens,
    config,
    execution,
    mask: Mask,
    *,
    cache: Cache | None = None,
    segments=None,
    source: SourceAttention | None = None,
    cross_keys_values=None,
    dropout_key=None,
    hooks: Hooks = NO_HOOKS,
) -> Forward:
    """Tokens [batch, length] to their last hidden states [batch, length, dim].

    cache: what was read before, on which the tokens go on; None: they are whole rows. mask: who
    sees whom. segments: int [batch, length], 1, 1, 2, 2, … for documents packed into a row, 0 for
    padding; None: one document, or each row's document goes on. source, cross_keys_values: what
    cross-attention looks at, and its keys and values layer by layer if they are made already.

    Past the capacity, and where a part of a prefix is missing, the result is NaN: a write is never
    clamped into the last slots unnoticed.
    """
    before = cache
    if cache is None:
        positions, documents, attention = whole_rows(
            tokens, segments, config, mask, attention_form(execution, hooks)
        )
    else:
        segments = continued_segments(segments, cache.cursor, tokens.shape[:2])
        cache, positions, documents, attention = next_tokens(
            cache, segments, config, mask, attention_form(execution, hooks)
        )
    embed_key, *block_keys = split_key(dropout_key, 1 + config.num_layers)
    tap = Tap(hooks, positions, documents)
    x = embed(weights, tokens, positions, config, segments)
    x = tap("embedding", dropout(embed_key, x, config.dropout))

    def step(x, layer):
        weights, key, kept, cross, hooks = layer
        tap = Tap(hooks, positions, documents)
        x, kept = block(
            weights,
            x,
            config,
            attention,
            positions=positions,
            kept=kept,
            source=source,
            cross_keys_values=cross,
            dropout_key=key,
            tap=tap,
        )
        return x, (kept, tap.captured)

    kept = None if cache is None else cache.layers
    layer_hooks = hooks.of(CROSS_BLOCK_POINTS).of_layers(config.num_layers)
    layers = (weights["blocks"], block_keys, kept, cross_keys_values, layer_hooks)
    is_step = cache is not None and tokens.shape[1] <= FEW_TOKENS
    x, outputs = over_layers(step, x, layers, config, execution, few_tokens=is_step)
    kept, captured = map(list, zip(*outputs, strict=True))
    x = tap("final_norm", norm_if_there(weights, "final_norm", x, config))
    captured = {**tap.captured, **stack(captured)}
    if cache is None:
        return Forward(x, captured)
    cache = cache.with_layers(kept)
    return Forward(unless_torn(x, before, cache, mask), captured, cache)


def attention_form(execution, hooks: Hooks, point: str = "attention.weights") -> str:
    """How attention runs: as told, but explicitly where its weights are to be seen or changed."""
    return "explicit" if point in {*hooks.capture, *hooks.patch} else execution.attention


def whole_rows(tokens, segments, config, mask: Mask, form: str):
    """(positions, documents or None, the attention) of tokens that are whole rows."""
    length, scale = tokens.shape[1], config.attention_scale
    if segments is None:
        return jnp.arange(length), None, RowAttention(mask, TokenInfo(length), scale, form)
    start = DocumentCursor.begin(len(segments))
    documents, positions, _ = document_positions(segments, start)
    # Order within a document is order along the row: only a rule that counts (a window, a prefix)
    # needs the counted positions, which are not known while tracing.
    info = TokenInfo(length, positions if mask.needs_positions else None, documents)
    return positions, documents, RowAttention(mask, info, scale, form)


def next_tokens(cache: Cache, segments, config, mask: Mask, form: str):
    """(the cache with these tokens marked in it, positions, documents, the attention) of tokens
    that go on from a cache."""
    marked, new, slots, written = cache.append(segments)
    few = new.length <= FEW_TOKENS and form in ("auto", "explicit")
    attention = CacheAttention(
        mask=mask,
        new=new,
        slots=slots,
        written=written,
        visible=mask(new, slots) if few else None,  # the same in every layer
        scale=config.attention_scale,
        implementation=form,
    )
    return marked, new.positions, new.segments, attention


def unless_torn(x, before: Cache, after: Cache, mask: Mask):
    """x, or NaN: past the capacity, after a rewind past a document's start, and for a row that
    stops among the first tokens of a document, which must be read at once."""
    old, new = before.cursor.position, after.cursor.position
    least = mask.minimum_prefill
    is_whole = (old >= 0) & ((old == 0) | (old >= least)) & ((new == 0) | (new >= least))
    if after.capacity is not None:
        is_whole &= after.length <= after.capacity
    return jnp.where(is_whole[:, None, None], x, jnp.nan)


def embed(weights, tokens, positions, config, segments=None):
    """e + p, and its norm if there is one; padding is zeros.

    tokens: int ids, or float rows of the embedding table in their place.
    """
    x = embed_tokens(weights["embedding"], tokens, config.dtype)
    if config.scale_embeddings:  # Vaswani et al. 2017, §3.4
        x = x * jnp.asarray(config.embed_dim**0.5, x.dtype)
    x = add_positions(weights["embedding"], x, positions, config.positions)
    return norm_if_there(weights, "embedding_norm", without_padding(x, segments), config)


def norm_if_there(weights, name, x, config):
    if name not in weights:
        return x
    return normalizer(config.norm, config.norm_epsilon)(weights[name], x)


def start(config, batch_size: int, capacity: int, reach: int | None = None) -> Cache:
    """An empty cache for this stack; a ring, where a reach is given."""
    return init_cache(
        config.num_layers,
        batch_size,
        config.num_kv_heads,
        capacity,
        config.head_dim,
        jnp.dtype(config.dtype),
        reach,
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
