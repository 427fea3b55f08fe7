"""Recurrent cells, how a state follows from the one before, and the first weights of a layer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


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
    square = [_orthogonal(k, hidden_dim) for k in jax.random.split(state_key, gates)]
    return {
        "input": {"kernel": kernel, "bias": bias.reshape(-1)},
        "state": {"kernel": jnp.concatenate(square, axis=1)},
    }


def _orthogonal(key, size: int) -> Float[Array, "size size"]:
    """A random orthogonal matrix; of many keys (`vmap`) one after another.

    LAPACK's factorisation of a batch waits, on a thread of XLA's pool, for others of that pool: two
    at once on two threads never end (jaxlib 0.10).
    """
    one = jax.nn.initializers.orthogonal()
    return jax.custom_batching.sequential_vmap(lambda key: one(key, (size, size)))(key)
