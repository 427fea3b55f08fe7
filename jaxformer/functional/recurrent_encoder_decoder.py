"""A recurrent encoder–decoder as pure functions of its weights (seeds: lecture 10 §1–2).

    source → recurrent layers → e_1 … e_S, and their last states, from which the decoder begins
    α_t = softmax_j(h_t · K e_j)      a_t = Σ_j α_tj V e_j      hidden_t = tanh(W [a_t; h_t] + b)

with h_t the decoder's own state (Bahdanau et al. 2015; in this form, Luong et al. 2015). Without
attention hidden_t is h_t, and those last states, of one size, must carry all of the source.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxformer.functional.attention import dot_product_attention, few_queries_attention
from jaxformer.functional.cache import SourceCache, fold_source, visible_source
from jaxformer.functional.embedding import (
    embed_tokens,
    head,
    init_embedding,
    logits,
    pack_all,
    without_padding,
)
from jaxformer.functional.embedding import prepare as prepare_layers
from jaxformer.functional.linear import init_linear, linear
from jaxformer.functional.masks import Padding, TokenInfo
from jaxformer.functional.recurrent import (
    begin_reading,
    empty_states,
    init_layers,
    read_on,
    read_rows,
    run_layers,
)
from jaxformer.functional.recurrent import initializers as decoder_initializers

__all__ = ["advance", "head", "hidden_states", "initializers", "logits", "prepare", "start"]
_SCALE = 1.0  # of h · K e, as the lecture writes it


def initializers(config) -> dict:
    """The weights by name, each as a pure initialiser of one key; a decoder as in `recurrent`.

    Here both first layers hear little of a token at first (W ~ N(0, 1/dim), e of size 1/√dim):
    made to hear all of it, as in `recurrent`, they learnt experiments/translate.py's phrases less
    exactly at every learning rate tried.
    """
    parts = {**decoder_initializers(config), "layers": lambda key: init_layers(key, config)}
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
    """K and V ~ N(0, 1/dim), and W of [a; h] ~ N(0, 1/(2 dim))."""
    keys = jax.random.split(key, 3)
    return {
        "key": init_linear(keys[0], dim, dim, use_bias=False, stddev=dim**-0.5),
        "value": init_linear(keys[1], dim, dim, use_bias=False, stddev=dim**-0.5),
        "joined": init_linear(keys[2], 2 * dim, dim, stddev=(2 * dim) ** -0.5),
    }


def encode(weights, source, config, *, segments=None, dropout_key=None):
    """(e_1 … e_S [batch, source length, hidden], the last states, layer by layer)."""
    tables = weights["encoder"].get("embedding", weights["embedding"])
    x = without_padding(embed_tokens(tables, source, config.dtype), segments)
    valid = None if segments is None else segments != 0
    states = empty_states(config, len(source))
    return run_layers(
        weights["encoder"]["layers"], x, states, config, valid=valid, dropout_key=dropout_key
    )


def memory(weights, encoded):
    """(K e, V e), each with one head [batch, 1, source length, hidden]."""
    return tuple(linear(weights[name], encoded)[:, None] for name in ("key", "value"))


def join(weights, hidden, attend):
    """tanh(W [a; h] + b), with a = attend(query) of one head."""
    context = attend(hidden[:, None])[:, 0]
    return jnp.tanh(linear(weights["joined"], jnp.concatenate([context, hidden], axis=-1)))


def hidden_states(
    weights,
    tokens,
    source,
    config,
    execution,
    *,
    segments=None,
    source_segments=None,
    dropout_key=None,
):
    """Whole rows to the last hidden states [batch, length, hidden]; segments, of the tokens and of
    the source: 0 for padding. Each document of a row begins from the source's last states."""
    keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
    encoded, initial = encode(
        weights, source, config, segments=source_segments, dropout_key=keys[0]
    )
    hidden = read_rows(weights, tokens, initial, config, segments=segments, dropout_key=keys[1])
    if not config.attends:
        return hidden
    key, value = memory(weights["attention"], encoded)
    places = TokenInfo(source.shape[1], None, source_segments)

    def attend(query):
        return dot_product_attention(
            query,
            key,
            value,
            Padding(),
            key_info=places,
            scale=_SCALE,
            implementation=execution.attention,
        )

    return join(weights["attention"], hidden, attend)


# ---- token by token


def start(weights, source, config, execution, batch_size: int, capacity: int, source_segments=None):
    """Read the sources; the cache of batch_size rows that have read nothing else yet."""
    encoded, states = encode(weights, source, config, segments=source_segments)
    visible, looked_up = visible_source(source, source_segments), None
    if config.attends:
        looked_up = fold_source(memory(weights["attention"], encoded), visible)
    initial = jax.tree.map(lambda x: jnp.repeat(x, batch_size // len(x), axis=0), states)
    own = begin_reading(empty_states(config, batch_size))
    return SourceCache(own, looked_up, visible, initial)


def prepare(weights, config, parts: int = 1):
    """The same weights as many small steps want them; the encoder takes few, large ones."""
    weights = prepare_layers(weights, config, parts)
    if config.attends:
        weights["attention"] = pack_all(weights["attention"], config, parts)
    return weights


def advance(weights, tokens, cache: SourceCache, config, *, segments=None):
    """The hidden states of the next tokens [batch, new], and the cache after them."""
    hidden, own = read_on(weights, tokens, cache.own, cache.initial, config, segments=segments)
    if config.attends:

        def attend(query):
            return few_queries_attention(query, *cache.memory, cache.visible, _SCALE)

        hidden = join(weights["attention"], hidden, attend)
    return hidden, replace(cache, own=own)
