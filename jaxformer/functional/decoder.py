"""The decoder-only Transformer as pure functions of its weights.

    tokens → embedding + position → blocks → norm → logits            (seeds: lecture 11 §6)

Output i predicts token i + 1 and depends on tokens ≤ i. Two ways through it, held to the same
values: `hidden_states` takes whole rows, `advance` takes the next tokens and a cache.
"""

import jax
import jax.numpy as jnp

from jaxformer.functional.attention import (
    dot_product_attention,
    folded_attention,
    masked_attention,
)
from jaxformer.functional.blocks import BLOCK_POINTS, block, init_blocks, run_blocks, unstack
from jaxformer.functional.cache import Cache, init_cache, open_slots, read_heads, write_heads
from jaxformer.functional.dropout import dropout
from jaxformer.functional.embedding import (
    add_positions,
    embed_tokens,
    head,
    head_initializer,
    init_embedding,
    logits,
    without_padding,
)
from jaxformer.functional.linear import all_by_rows
from jaxformer.functional.masks import Causal, Mask, Packed, Places, Prefix, Window
from jaxformer.functional.norms import init_norm, normalizer
from jaxformer.functional.positions import Reading, read_segments, same_document
from jaxformer.functional.taps import Tap

__all__ = ["advance", "head", "hidden_states", "initializers", "inspect", "logits", "prepare"]
__all__ += ["start"]
FEW = 64  # new tokens up to which a step over the cache takes all of their scores at once
POINTS = ("embedding", *BLOCK_POINTS, "final_norm")


def initializers(config) -> dict:
    """The decoder's weights by name, each as a pure initialiser of one key."""
    dim, vocab_size = config.embed_dim, config.vocab_size
    learned = config.max_length if config.positions == "learned" else 0
    parts = {
        "embedding": lambda key: init_embedding(key, vocab_size, dim, learned_positions=learned),
        "blocks": lambda key: init_blocks(key, config),
    }
    if config.norm_position == "pre" and config.norm != "none":
        parts["final_norm"] = lambda key: init_norm(config.norm, dim, use_bias=config.use_bias)
    own = head_initializer(dim, vocab_size, tied=config.tie_embeddings, use_bias=config.head_bias)
    return parts | ({"head": own} if own else {})


def self_attention_mask(config) -> Mask:
    """Causal (or prefix) within a document, through a window if the config has one."""
    mask = Prefix(config.prefix) if config.prefix else Causal()
    if config.window is not None:
        mask = mask & Window(config.window)
    return mask & Packed()


def embed(weights, tokens, positions, config):
    """e + p. tokens: int ids, or float rows of the embedding table in their place."""
    x = embed_tokens(weights, tokens, config.dtype)
    if config.scale_embeddings:
        x = x * jnp.asarray(config.embed_dim**0.5, x.dtype)
    return add_positions(weights, x, positions, config.positions)


def hidden_states(weights, tokens, config, execution, *, segments=None, dropout_key=None):
    """Whole rows to the last hidden states [batch, length, dim].

    segments: int [batch, length], 1, 1, 2, 2, … for documents packed into a row, 0 for padding.
    """
    return inspect(weights, tokens, config, execution, segments=segments, dropout_key=dropout_key)[
        0
    ]


def inspect(
    weights, tokens, config, execution, *, segments=None, dropout_key=None, capture=(), patch=None
):
    """(what `hidden_states` gives, what passed through the points named in `capture`)."""
    length, mask = tokens.shape[1], self_attention_mask(config)
    outer, inner = _split_patch(patch)
    tap = Tap(capture, outer)
    if segments is None:
        places, positions = Places(length), jnp.arange(length)
    else:
        documents, positions, _ = read_segments(segments, Reading.begin(segments.shape[0]))
        # Order within a document is order along the row: only a rule that counts (a window, a
        # prefix) needs the counted positions, which are not known while tracing.
        places = Places(length, positions if mask.absolute else None, documents)

    embed_key, blocks_key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
    x = embed(weights["embedding"], tokens, positions, config)
    x = without_padding(x, segments)
    x = tap("embedding", dropout(embed_key, x, config.dropout))

    weights_wanted = "attention.weights" in {*capture, *inner}
    implementation = "explicit" if weights_wanted else execution.attention

    def attend_with(tap):
        def attend(query, key, value):
            return dot_product_attention(
                query,
                key,
                value,
                mask,
                query_places=places,
                key_places=places,
                scale=config.attention_scale,
                implementation=implementation,
                tap=tap,
            ), None

        return attend

    x, captured = run_blocks(
        weights["blocks"],
        x,
        config,
        execution,
        attend_with=attend_with,
        positions=positions,
        dropout_key=blocks_key,
        capture=tuple(name for name in capture if name in BLOCK_POINTS),
        patch=inner,
    )
    return tap("final_norm", _final_norm(weights, x, config)), {**tap.captured, **captured}


def _split_patch(patch):
    patch = patch or {}
    inner = {name: entry for name, entry in patch.items() if name in BLOCK_POINTS}
    return {name: entry for name, entry in patch.items() if name not in inner}, inner


def _final_norm(weights, x, config):
    if "final_norm" not in weights:
        return x
    return normalizer(config.norm, config.norm_epsilon)(weights["final_norm"], x)


def start(config, batch_size: int, capacity: int) -> Cache:
    """An empty cache for this decoder."""
    return init_cache(
        config.num_layers,
        batch_size,
        config.num_kv_heads,
        capacity,
        config.head_dim,
        jnp.dtype(config.dtype),
    )


def prepare(weights, config):
    """The same weights as many small steps want them: block by block, matrices by rows and in the
    compute dtype (scales and biases stay float32: statistics and logits are)."""
    blocks = unstack(weights["blocks"], config.num_layers)
    return {
        **weights,
        "embedding": jax.tree.map(lambda table: table.astype(config.dtype), weights["embedding"]),
        "blocks": [all_by_rows(block, config.dtype) for block in blocks],
        "head": all_by_rows(head(weights), config.dtype),
    }


def advance(weights, tokens, cache: Cache, config, *, segments=None):
    """Read the next tokens [batch, new]; returns (their hidden states, the cache after them).

    segments: as in `hidden_states`, 0 for padding; None goes on with each row's document. Past the
    capacity the result is NaN: a write is never clamped into the last slots unnoticed.
    """
    segments = same_document(segments, cache.reading, tokens.shape[:2])
    old_length = cache.length
    cache, new, slots = open_slots(cache, segments)
    x = embed(weights["embedding"], tokens, new.positions, config)
    x = without_padding(x, segments)

    mask, keys, values = self_attention_mask(config), [], []
    visible = mask(new, slots) if new.length <= FEW else None  # the same in every layer
    for layer, block_weights in enumerate(unstack(weights["blocks"], config.num_layers)):

        def attend(query, key, value, layer=layer):
            keys = write_heads(cache.keys[layer], key, old_length)
            values = write_heads(cache.values[layer], value, old_length)
            if new.length <= FEW:
                output = folded_attention(query, keys, values, visible, config.attention_scale)
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
    return _final_norm(weights, x, config), cache
