"""A recurrent encoder–decoder as pure functions of its weights (seeds: lecture 10 §1–2).

    source → recurrent layers → e_1 … e_S, and their last states, from which the decoder begins
    α_t = softmax_j(h_t · K e_j)      a_t = Σ_j α_tj V e_j      hidden_t = tanh(W [a_t; h_t] + b)

with h_t the decoder's own state (Bahdanau et al. 2015; in this form, Luong et al. 2015). Without
attention hidden_t is h_t, and those last states, of one size, must carry all of the source.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxformer.functional import recurrent
from jaxformer.functional.cache import SourceCache
from jaxformer.functional.contexts import Source, SourceAttention
from jaxformer.functional.embedding import head, init_embedding, logits, pack_all
from jaxformer.functional.layers import Forward, split_key
from jaxformer.functional.linear import init_linear, linear
from jaxformer.functional.positions import (
    DocumentCursor,
    continued_segments,
    document_positions,
)
from jaxformer.functional.recurrent import init_layers
from jaxformer.functional.scores import Scores
from jaxformer.functional.taps import NO_HOOKS, Hooks, Tap, no_tap
from jaxformer.functional.transformer import attention_form

__all__ = [
    "forward",
    "head",
    "initializers",
    "layer_points",
    "logits",
    "points",
    "prepare",
    "start",
]
ENCODER = "encoder."  # what the names of the encoder's points begin with
CROSS_POINTS = (
    "cross_attention.query",
    "cross_attention.weights",
    "cross_attention.heads",
    "cross_attention.output",
)
_SCORES = Scores(scale=1.0)  # of h · K e, as the lecture writes it


def points(config) -> tuple[str, ...]:
    """The names at which a pass can be looked into."""
    own = recurrent.points(config)
    cross = CROSS_POINTS if config.attends else ()
    return (*(ENCODER + name for name in own), *own, *cross)


def layer_points(config) -> tuple[str, ...]:
    """Those of them that every layer has."""
    own = recurrent.layer_points(config)
    return (*(ENCODER + name for name in own), *own)


def initializers(config) -> dict:
    """The weights by name, each as a pure initialiser of one key; a decoder as in `recurrent`.

    Here both first layers hear little of a token at first (W ~ N(0, 1/dim), e of size 1/√dim):
    made to hear all of it, as in `recurrent`, they learnt experiments/translate.py's phrases less
    exactly at every learning rate tried.
    """
    parts = {**recurrent.initializers(config), "layers": lambda key: init_layers(key, config)}
    parts["encoder"] = lambda key: init_encoder(key, config)
    if config.attends:
        parts["attention"] = lambda key: init_attention(key, config.hidden_dim)
    return parts


def init_encoder(key, config):
    """Layers like the decoder's and, unless they are shared, token vectors of the source."""
    table_key, layers_key = jax.random.split(key)
    weights = {"layers": init_layers(layers_key, config)}
    if not config.share_embeddings:
        dim, size = config.embed_dim, config.source_vocab_size
        weights["embedding"] = init_embedding(table_key, size, dim, stddev=dim**-0.5)
    return weights


def init_attention(key, dim: int):
    """K and V ~ N(0, 1/dim), and "output", W of [a; h], ~ N(0, 1/(2 dim))."""
    keys = jax.random.split(key, 3)
    return {
        "key": init_linear(keys[0], dim, dim, use_bias=False, stddev=dim**-0.5),
        "value": init_linear(keys[1], dim, dim, use_bias=False, stddev=dim**-0.5),
        "output": init_linear(keys[2], 2 * dim, dim, stddev=(2 * dim) ** -0.5),
    }


def encode(weights, source: Source, config, execution, *, dropout_key=None, hooks=NO_HOOKS):
    """(e_1 … e_S [batch, source length, hidden], the last states, layer by layer, what was
    captured)."""
    tables = weights["encoder"].get("embedding", weights["embedding"])
    hidden, captured, after = recurrent.read(
        {"embedding": tables, "layers": weights["encoder"]["layers"]},
        source.tokens,
        config,
        execution,
        None,
        segments=source.segments,
        dropout_key=dropout_key,
        hooks=hooks.within(ENCODER),
    )
    return hidden, after.states, {ENCODER + name: x for name, x in captured.items()}


def cross_keys_values(weights, encoded):
    """(K e, V e), each with one head [batch, 1, source length, hidden]."""
    return tuple(linear(weights[name], encoded)[:, None] for name in ("key", "value"))


def cross_attend(weights, hidden, source: SourceAttention, keys_values, tap=no_tap):
    """tanh(W [a; h] + b), with a what attention by h finds in the source, with one head."""
    query = tap("cross_attention.query", hidden[:, None])
    context = source(query, *keys_values, lambda name, value: tap(f"cross_{name}", value))
    context = tap("cross_attention.heads", context)[:, 0]
    both = jnp.concatenate([context, hidden], axis=-1)
    return tap("cross_attention.output", jnp.tanh(linear(weights["output"], both)))


def forward(
    weights,
    tokens,
    config,
    execution,
    *,
    cache: SourceCache | None = None,
    segments=None,
    source: Source | None = None,
    dropout_key=None,
    hooks: Hooks = NO_HOOKS,
) -> Forward:
    """Tokens [batch, length] to the last hidden states [batch, length, hidden], as whole rows of
    which each has its source, or on from a cache that has read them. Each document of a row begins
    from the source's last states."""
    form = attention_form(execution, hooks, "cross_attention.weights")
    keys, keys_values, captured = split_key(dropout_key, 2), None, {}
    if cache is None:
        inputs = {"dropout_key": keys[0], "hooks": hooks}
        encoded, initial, captured = encode(weights, source, config, execution, **inputs)
        attention, own = SourceAttention(encoded, source.segments, _SCORES, form), None
        if config.attends:
            keys_values = cross_keys_values(weights["attention"], encoded)
    else:
        few = form in ("auto", "explicit")
        attention = SourceAttention(None, cache.source_segments, _SCORES, form, few)
        own, initial, keys_values = cache.self_cache, cache.initial, cache.cross_keys_values
    inputs = {"cache": own, "initial": initial, "segments": segments, "dropout_key": keys[1]}
    passed = recurrent.forward(weights, tokens, config, execution, hooks=hooks, **inputs)
    hidden, captured = passed.hidden, {**captured, **passed.captured}
    if config.attends:
        tap = Tap(hooks, *_positions(tokens, segments, own))
        hidden = cross_attend(weights["attention"], hidden, attention, keys_values, tap)
        captured |= tap.captured
    if cache is not None:
        cache = replace(cache, self_cache=passed.cache)
    return Forward(hidden, captured, cache)


def _positions(tokens, segments, cache):
    """(positions, documents or None) of the tokens."""
    if segments is None and cache is None:
        return jnp.arange(tokens.shape[1]), None
    cursor = DocumentCursor.begin(len(tokens)) if cache is None else cache.cursor
    segments = continued_segments(segments, cursor, tokens.shape[:2])
    documents, positions, _ = document_positions(segments, cursor)
    return positions, documents


def start(
    weights,
    source: Source,
    config,
    execution,
    batch_size: int,
    capacity: int,
    hooks: Hooks = NO_HOOKS,
):
    """Read the sources: (the cache of batch_size rows that have read nothing else yet, what was
    captured of the encoder)."""
    encoded, states, captured = encode(weights, source, config, execution, hooks=hooks)
    keys_values = None
    if config.attends:
        is_real = None if source.segments is None else (source.segments != 0)[:, None, :, None]
        keys_values = cross_keys_values(weights["attention"], encoded)
        if is_real is not None:  # 0 × NaN is NaN
            keys_values = tuple(jnp.where(is_real, x, 0) for x in keys_values)
    initial = jax.tree.map(lambda x: jnp.repeat(x, batch_size // len(x), axis=0), states)
    own = recurrent.start(config, batch_size, capacity)
    return SourceCache(own, keys_values, source.segments, initial), captured


def prepare(weights, config, parts: int = 1):
    """The same weights as many small steps want them; the encoder takes few, large ones."""
    weights = recurrent.prepare(weights, config, parts)
    if config.attends:
        weights["attention"] = pack_all(weights["attention"], config, parts)
    return weights
