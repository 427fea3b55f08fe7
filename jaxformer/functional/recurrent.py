"""Recurrent language models as pure functions of their weights: h_t = f(h_{t−1}, x_t).

    tokens → embedding → recurrent layers → logits                    (seeds: lecture 11 §8)

The state after a token is all that later tokens learn of the past: it is reset where a document
begins, and padding leaves it as it is. States are float32 whatever the dtype of the activations.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.functional.cache import FixedSizeState
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
from jaxformer.functional.linear import linear
from jaxformer.functional.positions import DocumentCursor, continued_segments, document_positions

__all__ = ["advance", "head", "hidden_states", "initializers", "logits", "prepare", "start"]


def rnn_cell(gates: Float[Array, "*batch hidden"], state):
    """h_t = tanh(x_t W + h_{t−1} U + b), the sum handed in as `gates` (Elman 1990)."""
    return (jnp.tanh(gates),)


def lstm_cell(gates: Float[Array, "*batch gates"], state):
    """c_t = σ(f) c_{t−1} + σ(i) tanh(g) and h_t = σ(o) tanh(c_t), with [i, f, g, o] = gates =
    x_t W + h_{t−1} U + b (Hochreiter & Schmidhuber 1997; the forget gate, Gers et al. 2000)."""
    _, cell = state
    write, keep, candidate, show = jnp.split(gates, 4, axis=-1)
    cell = jax.nn.sigmoid(keep) * cell + jax.nn.sigmoid(write) * jnp.tanh(candidate)
    return jax.nn.sigmoid(show) * jnp.tanh(cell), cell


class Cell(NamedTuple):
    """step(gates, state) → state, a tuple whose first part is h; how many gates and parts it has,
    and which of the gates has a bias of 1 at the start."""

    step: callable
    num_gates: int
    num_parts: int
    open_gate: int | None = None


# A forget gate that begins open lets gradients through (Jozefowicz et al. 2015).
CELLS = {"rnn": Cell(rnn_cell, 1, 1), "lstm": Cell(lstm_cell, 4, 2, open_gate=1)}


def init_recurrent_layer(key, cell: str, in_dim: int, hidden_dim: int, input_stddev=1.0):
    """W ~ N(0, 1/(in_dim · input_stddev²)), so that W x is of size 1 if x's features are of size
    input_stddev; U orthogonal, gate by gate (Saxe et al. 2014); b = 0, 1 to forget."""
    input_key, state_key = jax.random.split(key)
    _, gates, _, open_gate = CELLS[cell]
    bias = jnp.zeros((gates, hidden_dim))
    if open_gate is not None:
        bias = bias.at[open_gate].set(1.0)
    kernel = jax.random.normal(input_key, (in_dim, gates * hidden_dim))
    kernel = kernel / (in_dim**0.5 * input_stddev)
    orthogonal = jax.nn.initializers.orthogonal()
    square = [orthogonal(k, (hidden_dim, hidden_dim)) for k in jax.random.split(state_key, gates)]
    return {
        "input": {"kernel": kernel, "bias": bias.reshape(-1)},
        "state": {"kernel": jnp.concatenate(square, axis=1)},
    }


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
):
    """x through time; returns (h_1 … h_T [batch, length, hidden], the state after them).

    begins, valid: bool [batch, length], where the state is set to `initial`, and where a token
    stands at all (None: nowhere, and everywhere). The products with x are taken for all times at
    once.
    """
    gates = linear(weights["input"], x, jnp.float32)

    def step(state, inputs):
        gates, begins, valid = inputs
        if begins is not None:
            parts = zip(initial, state, strict=True)
            state = tuple(jnp.where(begins[:, None], first, part) for first, part in parts)
        hidden = linear(weights["state"], state[0].astype(x.dtype), jnp.float32)
        new = CELLS[cell].step(gates + hidden, state)
        if valid is None:
            return new, new[0]
        state = tuple(jnp.where(valid[:, None], *parts) for parts in zip(new, state, strict=True))
        return state, jnp.where(valid[:, None], new[0], 0.0)

    over_time = jax.tree.map(lambda array: array.swapaxes(0, 1), (gates, begins, valid))
    state, outputs = jax.lax.scan(step, state, over_time)
    return outputs.swapaxes(0, 1).astype(x.dtype), state


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
    weights, x, states, config, *, initial=None, begins=None, valid=None, dropout_key=None
):
    """x through all layers; returns (hidden states of the last, the states after the last token).
    Dropout is on what goes from layer to layer, not through time (Zaremba et al. 2014)."""
    num = config.num_layers
    keys = [None] * (num + 1) if dropout_key is None else jax.random.split(dropout_key, num + 1)
    x, after = dropout(keys[0], x, config.dropout), []
    for layer, state in enumerate(states):
        x, state = recurrent_layer(
            weights[f"layer_{layer}"],
            x,
            state,
            config.cell,
            initial=None if initial is None else initial[layer],
            begins=begins,
            valid=valid,
        )
        x = dropout(keys[layer + 1], x, config.dropout)
        after.append(state)
    return x, tuple(after)


def hidden_states(weights, tokens, config, execution, *, segments=None, dropout_key=None):
    """Whole rows to the last layer's states [batch, length, hidden_dim]; segments as elsewhere:
    1, 1, 2, 2, … for documents packed into a row, 0 for padding."""
    initial = empty_states(config, len(tokens))
    return read_rows(weights, tokens, initial, config, segments=segments, dropout_key=dropout_key)


def read_rows(weights, tokens, initial, config, *, segments=None, dropout_key=None):
    """The same, each document beginning from the states `initial`."""
    begins = valid = None
    if segments is not None:
        _, positions, _ = document_positions(segments, DocumentCursor.begin(len(segments)))
        valid = segments != 0
        begins = valid & (positions == 0)
    x = without_padding(embed_tokens(weights["embedding"], tokens, config.dtype), segments)
    how = {"initial": initial, "begins": begins, "valid": valid, "dropout_key": dropout_key}
    return run_layers(weights["layers"], x, initial, config, **how)[0]


# ---- token by token


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentCache(FixedSizeState):
    """states: per layer and part float32 [batch, hidden]; cursor: how far each row has been read;
    length: tokens read, padding counted, int []. However many they are, it is as large."""

    states: tuple
    cursor: DocumentCursor
    length: Array


def start(config, batch_size: int, capacity: int) -> RecurrentCache:
    """The state before the first token; the capacity costs nothing."""
    return begin_reading(empty_states(config, batch_size))


def begin_reading(states) -> RecurrentCache:
    """The cache of rows that have read nothing yet, with these states."""
    return RecurrentCache(states, DocumentCursor.begin(len(states[0][0])), jnp.int32(0))


def advance(weights, tokens, cache: RecurrentCache, config, *, segments=None):
    """Read the next tokens [batch, new]; returns (their hidden states, the cache after them)."""
    initial = empty_states(config, len(tokens))
    return read_on(weights, tokens, cache, initial, config, segments=segments)


def read_on(weights, tokens, cache: RecurrentCache, initial, config, *, segments=None):
    """The same, each document beginning from the states `initial`."""
    segments = continued_segments(segments, cache.cursor, tokens.shape[:2])
    documents, positions, cursor = document_positions(segments, cache.cursor)
    valid = documents != 0
    x = without_padding(embed_tokens(weights["embedding"], tokens, config.dtype), segments)
    how = {"initial": initial, "begins": valid & (positions == 0), "valid": valid}
    x, states = run_layers(weights["layers"], x, cache.states, config, **how)
    return x, RecurrentCache(states, cursor, cache.length + tokens.shape[1])
