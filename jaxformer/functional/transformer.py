"""The Transformer's stack, which decoder and encoder have in common.

    tokens → embedding + position → blocks → norm

One pass, `forward`, over whole rows or, with a cache, over the next tokens: what differs is the
value that the blocks attend by (`contexts`).
"""

import jax
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
    add_token_types,
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
from jaxformer.functional.scores import Alibi, RelativeBias, Scores
from jaxformer.functional.spread import is_cut
from jaxformer.functional.taps import NO_HOOKS, Hooks, Tap

FEW_TOKENS = 64  # new tokens up to which a step over the cache takes all of their scores at once
POINTS = ("embedding", *BLOCK_POINTS, "final_norm")
CROSS_POINTS = ("embedding", *CROSS_BLOCK_POINTS, "final_norm")


def stack_initializers(config, init_block=init_block) -> dict:
    """The stack's weights by name, each as a pure initialiser of one key."""
    dim, vocab_size = config.embed_dim, config.vocab_size
    length = config.max_length + config.position_offset
    tables = {
        "learned_positions": length if config.positions == "learned" else 0,
        "token_types": getattr(config, "num_token_types", 0),
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
    if config.positions == "relative":
        sizes = (config.relative_buckets, config.num_heads)
        parts["relative_bias"] = lambda key: {"table": 0.02 * jax.random.normal(key, sizes)}
    return parts


def forward(
    weights,
    tokens,
    config,
    execution,
    masks: tuple[Mask, ...],
    *,
    cache: Cache | None = None,
    segments=None,
    token_types=None,
    source: SourceAttention | None = None,
    cross_keys_values=None,
    dropout_key=None,
    hooks: Hooks = NO_HOOKS,
) -> Forward:
    """Tokens [batch, length] to their last hidden states [batch, length, dim].

    cache: what was read before, on which the tokens go on; None: they are whole rows. masks: who
    sees whom, layer by layer. segments: int [batch, length], 1, 1, 2, 2, … for documents packed
    into a row, 0 for padding; None: one document, or each row's document goes on. token_types: int
    [batch, length]; None: all 0. source, cross_keys_values: what
    cross-attention looks at, and its keys and values layer by layer if they are made already.

    Past the capacity, and where a part of a prefix is missing, the result is NaN: a write is never
    clamped into the last slots unnoticed.
    """
    before, settings = cache, config.layers
    # A mask for each kind of layer there is.
    how = (dict(zip(settings, masks, strict=True)), scores_of(weights, config))
    form = attention_form(execution, hooks)
    if cache is None:
        positions, documents, attentions = whole_rows(tokens, segments, *how, form)
    else:
        segments = continued_segments(segments, cache.cursor, tokens.shape[:2])
        cache, positions, documents, attentions = next_tokens(cache, segments, *how, form)
    embed_key, *block_keys = split_key(dropout_key, 1 + config.num_layers)
    tap = Tap(hooks, positions, documents)
    x = embed(weights, tokens, positions, config, segments, token_types)
    x = tap("embedding", dropout(embed_key, x, config.dropout))

    def step(config, x, layer):
        weights, key, kept, cross, hooks = layer
        weights = weights if is_cut() else fuse_query_key_value(weights)
        tap = Tap(hooks, positions, documents)
        x, kept = block(
            weights,
            x,
            config,
            attentions[config],
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
    decodes = cache is not None
    kind = {"decodes": decodes, "few_tokens": decodes and tokens.shape[1] <= FEW_TOKENS}
    x, outputs = over_layers(step, x, layers, settings, execution, **kind)
    kept, captured = map(list, zip(*outputs, strict=True))
    x = norm_if_there(weights, "final_norm", x, config)
    if config.output_scale is not None:
        x = x * jnp.asarray(config.output_scale, x.dtype)
    x = tap("final_norm", x)
    captured = {**tap.captured, **stack(captured)}
    if cache is None:
        return Forward(x, captured)
    cache = cache.with_layers(kept)
    return Forward(unless_torn(x, before, cache, masks), captured, cache)


def attention_form(execution, hooks: Hooks, point: str = "attention.weights") -> str:
    """How attention runs: as told, but explicitly where its weights are to be seen or changed."""
    return "explicit" if point in {*hooks.capture, *hooks.patch} else execution.attention


def scores_of(weights, config) -> Scores:
    """What becomes of the products of queries and keys, in every layer."""
    bias = None
    if config.positions == "alibi":
        bias = Alibi(config.num_heads)
    if config.positions == "relative":
        table = weights["relative_bias"]["table"]
        bias = RelativeBias(table, config.relative_distance, config.bidirectional)
    return Scores(config.attention_scale, config.attention_cap, bias)


def whole_rows(tokens, segments, masks: dict, scores: Scores, form: str):
    """(positions, documents or None, the attention by the setting of a layer) of tokens that are
    whole rows. masks: who sees whom, by the setting of a layer."""
    length = tokens.shape[1]
    positions, documents = jnp.arange(length), None
    if segments is not None:
        start = DocumentCursor.begin(len(segments))
        documents, positions, _ = document_positions(segments, start)

    def attention(mask):
        # Order within a document is order along the row: only a rule that counts (a window, a
        # prefix) needs the counted positions, which are not known while tracing.
        counts = segments is not None and (mask.needs_positions or scores.bias is not None)
        info = TokenInfo(length, positions if counts else None, documents)
        return RowAttention(mask, info, scores, form)

    return positions, documents, {setting: attention(mask) for setting, mask in masks.items()}


def next_tokens(cache: Cache, segments, masks: dict, scores: Scores, form: str):
    """(the cache with these tokens marked in it, positions, documents, the attention by the setting
    of a layer) of tokens that go on from a cache."""
    marked, new, slots, written = cache.append(segments)
    few = new.length <= FEW_TOKENS and form in ("auto", "explicit")
    if few:  # the same in every layer
        scores = scores.asked(new, slots)

    def attention(mask):
        visible = mask(new, slots) if few else None
        return CacheAttention(mask, new, slots, written, visible, scores, form)

    attentions = {setting: attention(mask) for setting, mask in masks.items()}
    return marked, new.positions, new.segments, attentions


def unless_torn(x, before: Cache, after: Cache, masks):
    """x, or NaN: past the capacity, after a rewind past a document's start, and for a row that
    stops among the first tokens of a document, which must be read at once."""
    old, new = before.cursor.position, after.cursor.position
    least = max(mask.minimum_prefill for mask in masks)
    is_whole = (old >= 0) & ((old == 0) | (old >= least)) & ((new == 0) | (new >= least))
    if after.capacity is not None:
        is_whole &= after.length <= after.capacity
    return jnp.where(is_whole[:, None, None], x, jnp.nan)


def embed(weights, tokens, positions, config, segments=None, token_types=None):
    """e + p (and the vector of a token's type), and its norm if there is one; padding is zeros.

    tokens: int ids, or float rows of the embedding table in their place.
    """
    x = embed_tokens(weights["embedding"], tokens, config.dtype)
    if config.scale_embeddings:  # Vaswani et al. 2017, §3.4
        x = x * jnp.asarray(config.embed_dim**0.5, x.dtype)
    x = add_positions(weights["embedding"], x, positions, config)
    x = add_token_types(weights["embedding"], x, token_types)
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
