"""Recurrent language models as pure functions of their weights: h_t = f(h_{t−1}, x_t).

    tokens → embedding → recurrent layers → logits                    (seeds: lecture 11 §8)

The state after a token is all that later tokens learn of the past: it is reset where a document
begins, and padding leaves it as it is. States are float32 whatever the dtype of the activations.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.functional.cache import FixedSizeState
from jaxformer.functional.cells import CELLS, init_recurrent_layer
from jaxformer.functional.dropout import dropout
from jaxformer.functional.embedding import (
    embed_tokens,
    head,
    init_embedding,
    logits,
    prepare,
    with_head,
    without_padding,
)
from jaxformer.functional.layers import REMAT, Forward, split_key, stack
from jaxformer.functional.linear import linear
from jaxformer.functional.positions import (
    DocumentCursor,
    continued_segments,
    document_positions,
)
from jaxformer.functional.spread import varying_alike
from jaxformer.functional.taps import NO_HOOKS, Hooks, Tap

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
LAYER_POINTS = ("recurrent.gates", "recurrent.hidden", "recurrent.cell")


def points(config) -> tuple[str, ...]:
    """The names at which a pass can be looked into; only an LSTM has a cell beside h."""
    return ("embedding", *LAYER_POINTS[: 1 + CELLS[config.cell].num_parts])


def layer_points(config) -> tuple[str, ...]:
    """Those of them that every layer has."""
    return points(config)[1:]


def empty_states(config, batch_size: int):
    """Zeros, layer by layer and part by part; no two the same array, since they are donated."""
    parts, shape = CELLS[config.cell].num_parts, (batch_size, config.hidden_dim)
    return tuple(tuple(jnp.zeros(shape) for _ in range(parts)) for _ in range(config.num_layers))


def recurrent_layer(
    weights,
    x: Float[Array, "batch length in_dim"],
    state,
    cell: str,
    *,
    initial=None,
    begins=None,
    valid=None,
    positions=None,
    hooks: Hooks = NO_HOOKS,
):
    """x through time; returns (h_1 … h_T [batch, length, hidden], the state after them, what was
    captured).

    begins, valid: bool [batch, length], where the state is set to `initial`, and where a token
    stands at all (None: nowhere, and everywhere). The products with x are taken for all times at
    once. A patched state is what the next token goes on from.
    """
    length = x.shape[1]
    gates = linear(weights["input"], x, jnp.float32)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length), x.shape[:2])
    time = jnp.broadcast_to(jnp.arange(length), x.shape[:2])
    times = (positions, time) if hooks.patch else (None, None)  # else nobody asks

    def step(state, inputs):
        gates, begins, valid, position, time = inputs
        tap = Tap(hooks, None)
        if hooks.patch:
            documents = None if valid is None else valid[:, None]
            tap = Tap(hooks.of_token(time[0], length), position[:, None], documents)
        if begins is not None:
            parts = zip(initial, state, strict=True)
            state = tuple(jnp.where(begins[:, None], first, part) for first, part in parts)
        hidden = linear(weights["state"], state[0].astype(x.dtype), jnp.float32)
        gates = tap("recurrent.gates", (gates + hidden)[:, None])[:, 0]
        new = CELLS[cell].step(gates, state)
        named = zip(LAYER_POINTS[1:], new, strict=False)  # an RNN has no cell
        new = tuple(tap(name, part[:, None])[:, 0] for name, part in named)
        if valid is None:
            return new, (new[0], tap.captured)
        state = tuple(jnp.where(valid[:, None], *parts) for parts in zip(new, state, strict=True))
        return state, (jnp.where(valid[:, None], new[0], 0.0), tap.captured)

    state, *_ = varying_alike(state, gates, initial, begins, valid)
    inputs = (gates, begins, valid, *times)
    over_time = jax.tree.map(lambda array: array.swapaxes(0, 1), inputs)
    state, (outputs, captured) = jax.lax.scan(step, state, over_time)
    captured = {name: x[:, :, 0].swapaxes(0, 1) for name, x in captured.items()}
    return outputs.swapaxes(0, 1).astype(x.dtype), state, captured


# ---- the language model


def initializers(config) -> dict:
    """The weights by name, each as a pure initialiser of one key.

    Token vectors are of size 1/√dim, which suits logits, and the first layer makes up for it: a
    cell that hardly hears its input is slow to begin to learn.
    """
    dim, vocab_size = config.embed_dim, config.vocab_size
    parts = {
        "embedding": lambda key: init_embedding(key, vocab_size, dim, stddev=dim**-0.5),
        "layers": lambda key: init_layers(key, config, dim**-0.5),
    }
    return with_head(parts, config, config.hidden_dim)


def init_layers(key, config, input_stddev=1.0):
    """layer_0, layer_1, …: the first may read features of another size and number."""
    first, others = (config.embed_dim, input_stddev), (config.hidden_dim, 1.0)
    inputs = [first, *[others] * (config.num_layers - 1)]
    keys = jax.random.split(key, config.num_layers)
    return {
        f"layer_{i}": init_recurrent_layer(keys[i], config.cell, in_dim, config.hidden_dim, stddev)
        for i, (in_dim, stddev) in enumerate(inputs)
    }


def run_layers(
    weights,
    x,
    states,
    config,
    execution,
    *,
    initial=None,
    begins=None,
    valid=None,
    positions=None,
    dropout_key=None,
    hooks: Hooks = NO_HOOKS,
):
    """x through all layers; returns (hidden states of the last, the states after the last token,
    what was captured). Dropout is on what goes from layer to layer, not through time (Zaremba et
    al. 2014)."""
    num_layers = config.num_layers
    keys = split_key(dropout_key, num_layers + 1)
    x, after, captured = dropout(keys[0], x, config.dropout), [], []
    in_time = {"begins": begins, "valid": valid, "positions": positions}
    run = REMAT[execution.remat](partial(recurrent_layer, cell=config.cell))
    for layer, own_hooks in enumerate(hooks.of(LAYER_POINTS).of_layers(num_layers)):
        x, state, seen = run(
            weights[f"layer_{layer}"],
            x,
            states[layer],
            initial=None if initial is None else initial[layer],
            hooks=own_hooks,
            **in_time,
        )
        x = dropout(keys[layer + 1], x, config.dropout)
        after.append(state)
        captured.append(seen)
    return x, tuple(after), stack(captured)


def forward(
    weights,
    tokens,
    config,
    execution,
    *,
    cache: "RecurrentCache | None" = None,
    initial=None,
    segments=None,
    dropout_key=None,
    hooks: Hooks = NO_HOOKS,
) -> Forward:
    """Tokens [batch, length] to the last layer's states [batch, length, hidden_dim].

    cache: what was read before; None: whole rows. initial: the states from which documents begin;
    None: zeros. segments: 1, 1, 2, 2, … for documents packed into a row, 0 for padding.
    """
    inputs = {"segments": segments, "dropout_key": dropout_key, "hooks": hooks}
    hidden, captured, after = read(weights, tokens, config, execution, cache, initial, **inputs)
    return Forward(hidden, captured, None if cache is None else after)


def read(weights, tokens, config, execution, cache, initial=None, *, segments, dropout_key, hooks):
    """(hidden, captured, the cache after these tokens), with a cache before them or without."""
    batch_size, length = tokens.shape[:2]
    initial = empty_states(config, batch_size) if initial is None else initial
    before = RecurrentCache.begin(initial) if cache is None else cache
    valid = begins = positions = None
    cursor = before.cursor
    if segments is not None or cache is not None:
        segments = continued_segments(segments, cursor, tokens.shape[:2])
        documents, positions, cursor = document_positions(segments, cursor)
        valid = documents != 0
        begins = valid & (positions == 0)
    x = without_padding(embed_tokens(weights["embedding"], tokens, config.dtype), segments)
    tap = Tap(hooks, jnp.arange(length) if positions is None else positions, valid)
    x, states, captured = run_layers(
        weights["layers"],
        tap("embedding", x),
        before.states,
        config,
        execution,
        initial=initial,
        begins=begins,
        valid=valid,
        positions=positions,
        dropout_key=dropout_key,
        hooks=hooks,
    )
    after = RecurrentCache(states, cursor, before.length + length)
    return x, {**tap.captured, **captured}, after


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentCache(FixedSizeState):
    """states: per layer and part float32 [batch, hidden]; cursor: how far each row has been read;
    length: tokens read, padding counted, int []. However many they are, it is as large."""

    states: tuple
    cursor: DocumentCursor
    length: Array

    @classmethod
    def begin(cls, states) -> "RecurrentCache":
        """Rows that have read nothing yet, with these states."""
        return cls(states, DocumentCursor.begin(len(states[0][0])), jnp.int32(0))


def start(config, batch_size: int, capacity: int) -> RecurrentCache:
    """The state before the first token; the capacity costs nothing."""
    return RecurrentCache.begin(empty_states(config, batch_size))
