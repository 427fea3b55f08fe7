"""Recurrent cells: the step from one state to the next, and the initial weights of a layer."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from jaxformer.functional.trees import Weights

State = tuple[Float[Array, "*batch hidden"], ...]  # of one layer; the first part is h


def rnn_cell(gates: Float[Array, "*batch hidden"], state: State) -> State:
    """Computes h_t = tanh(gates), where gates = x_t W + h_{t−1} U + b (Elman 1990)."""
    return (jnp.tanh(gates),)


def lstm_cell(gates: Float[Array, "*batch gates"], state: State) -> State:
    """Computes c_t = σ(f) c_{t−1} + σ(i) tanh(g) and h_t = σ(o) tanh(c_t).

    Args:
        gates: [i, f, g, o] = x_t W + h_{t−1} U + b.
        state: (h_{t−1}, c_{t−1}).

    Returns:
        (h_t, c_t).

    Reference:
        Hochreiter & Schmidhuber 1997; for the forget gate Gers et al. 2000.
    """
    _, cell = state
    write, keep, candidate, show = jnp.split(gates, 4, axis=-1)
    cell = jax.nn.sigmoid(keep) * cell + jax.nn.sigmoid(write) * jnp.tanh(candidate)
    return jax.nn.sigmoid(show) * jnp.tanh(cell), cell


class Cell(NamedTuple):
    """A kind of recurrent cell.

    Attributes:
        step: step(gates, state) → state. A state is a tuple whose first part is h.
        num_gates: number of gates.
        num_parts: number of parts of the state.
        open_gate: index of the gate whose initial bias is 1; None: no gate has one.
    """

    step: Callable[[Float[Array, "*batch gates"], State], State]
    num_gates: int
    num_parts: int
    open_gate: int | None = None


# A forget gate that is open initially lets gradients through (Jozefowicz et al. 2015).
CELLS = {"rnn": Cell(rnn_cell, 1, 1), "lstm": Cell(lstm_cell, 4, 2, open_gate=1)}


def init_recurrent_layer(
    key: PRNGKeyArray, cell: str, in_dim: int, hidden_dim: int, input_stddev: float = 1.0
) -> Weights:
    """Returns the initial weights of a recurrent layer.

    W ~ N(0, 1/(in_dim · input_stddev²)), so that W x has size 1 if the features of x have size
    input_stddev. U is orthogonal for each gate (Saxe et al. 2014). The bias is 1 for the forget
    gate and 0 otherwise.
    """
    input_key, state_key = jax.random.split(key)
    _, gates, _, open_gate = CELLS[cell]
    bias = jnp.zeros((gates, hidden_dim), jnp.float32)
    if open_gate is not None:
        bias = bias.at[open_gate].set(1.0)
    kernel = jax.random.normal(input_key, (in_dim, gates * hidden_dim), jnp.float32)
    kernel = kernel / (in_dim**0.5 * input_stddev)
    square = [_orthogonal(k, hidden_dim) for k in jax.random.split(state_key, gates)]
    return {
        "input": {"kernel": kernel, "bias": bias.reshape(-1)},
        "state": {"kernel": jnp.concatenate(square, axis=1)},
    }


def _orthogonal(key: PRNGKeyArray, size: int) -> Float[Array, "size size"]:
    """Returns a random orthogonal matrix; under `vmap`, one key after another.

    LAPACK's factorization of a batch waits, on a thread of XLA's pool, for other threads of that
    pool: two at once on two threads deadlock (jaxlib 0.10).
    """
    one = jax.nn.initializers.orthogonal()
    return jax.custom_batching.sequential_vmap(lambda key: one(key, (size, size), jnp.float32))(key)
