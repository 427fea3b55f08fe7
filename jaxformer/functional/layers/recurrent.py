"""Recurrent layers: h_t = f(h_{t−1}, x_t).

Later tokens depend on earlier ones only through the state. It is reset at the start of each
document, and padding does not change it. States are float32 whatever the dtype of the activations.

Reference:
    Notes, lecture 11 §8.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxformer.functional.attention.masks import Causal, Mask
from jaxformer.functional.inputs import Forward
from jaxformer.functional.layers.sublayer import At, Initial, Output, Start, SubLayer
from jaxformer.functional.linear.affine import linear
from jaxformer.functional.placement import vary_alike
from jaxformer.functional.symbolic import Size
from jaxformer.functional.taps import NO_HOOKS, Hooks, Tap
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights

State = tuple[Float[Array, "*batch hidden"], ...]  # of one layer; the first part is h


class Cell(ABC):
    """A kind of recurrent cell. Subclasses are frozen dataclasses.

    Attributes:
        num_gates: number of gates.
        parts: names of the parts of the state, the first of which is h.
        open_gate: index of the gate whose initial bias is 1; None: no gate has one.
    """

    num_gates: ClassVar[int]
    parts: ClassVar[tuple[str, ...]]
    open_gate: ClassVar[int | None] = None

    @abstractmethod
    def step(self, gates: Float[Array, "*batch gates"], state: State) -> State:
        """Returns the next state.

        Args:
            gates: x_t W + h_{t−1} U + b, all gates after each other.
            state: the state before.
        """


@dataclass(frozen=True)
class Rnn(Cell):
    """h_t = tanh(gates) (Elman 1990)."""

    num_gates = 1
    parts = ("hidden",)

    def step(self, gates: Float[Array, "*batch gates"], state: State) -> State:
        """See `Cell`."""
        return (jnp.tanh(gates),)


@dataclass(frozen=True)
class Lstm(Cell):
    """c_t = σ(f) c_{t−1} + σ(i) tanh(g) and h_t = σ(o) tanh(c_t), for the gates [i, f, g, o].

    Reference:
        Hochreiter & Schmidhuber 1997; for the forget gate Gers et al. 2000.
    """

    num_gates = 4
    parts = ("hidden", "cell")
    open_gate = 1  # lets gradients through at first (Jozefowicz et al. 2015)

    def step(self, gates: Float[Array, "*batch gates"], state: State) -> State:
        """See `Cell`."""
        _, cell = state
        write, keep, candidate, show = jnp.split(gates, 4, axis=-1)
        cell = jax.nn.sigmoid(keep) * cell + jax.nn.sigmoid(write) * jnp.tanh(candidate)
        return jax.nn.sigmoid(show) * jnp.tanh(cell), cell


CELLS = {"rnn": Rnn(), "lstm": Lstm()}


def init_recurrent_layer(
    key: PRNGKeyArray, cell: Cell, in_dim: int, hidden_dim: int, input_stddev: float = 1.0
) -> Weights:
    """Returns the initial weights of a recurrent layer.

    W ~ N(0, 1/(in_dim · input_stddev²)), so that W x has size 1 if the features of x have size
    input_stddev. U is orthogonal for each gate (Saxe et al. 2014). The bias is 1 for the forget
    gate and 0 otherwise.
    """
    input_key, state_key = jax.random.split(key)
    gates, open_gate = cell.num_gates, cell.open_gate
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


class Times(NamedTuple):
    """What the steps through time need to know, each [batch, length].

    Attributes:
        begins: where a document begins and the state is reset; None: nowhere.
        valid: False for padding; None: no padding.
        positions: the positions of the tokens, for patches; None: 0, 1, 2, …
    """

    begins: Bool[Array, "batch length"] | None = None
    valid: Bool[Array, "batch length"] | None = None
    positions: Int[Array, "*batch length"] | None = None


def recurrent_layer(
    weights: Weights,
    x: Float[Array, "batch length in_dim"],
    state: State,
    initial: State | None = None,
    times: Times = Times(),  # noqa: B008 (immutable)
    hooks: Hooks = NO_HOOKS,
    *,
    cell: Cell,
    keeps_states: bool = False,
) -> tuple[
    Float[Array, "batch length hidden"],
    tuple[Float[Array, "batch *times hidden"], ...],
    dict[str, Array],
]:
    """Runs one layer through time.

    The products with x are computed for all times at once.

    Args:
        weights: those of `init_recurrent_layer`.
        x: the input of the layer.
        state: the state before the first token.
        initial: the state at which documents begin; None if they begin nowhere.
        times: documents, padding and positions.
        hooks: points to capture and patch. The next token reads a patched state.
        cell: the step from one state to the next.
        keeps_states: whether to return the state after each token.

    Returns:
        (outputs, state, captured): h_1 … h_T [batch, length, hidden], the state after the last
        token [batch, hidden] or after each one [batch, length, hidden], and the captured values.
    """
    length = x.shape[1]
    gates = linear(weights["input"], x, jnp.float32)
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), x.shape[:2])
    positions = index if times.positions is None else jnp.broadcast_to(times.positions, x.shape[:2])
    if not hooks.patch:
        positions = index = None  # only patches use them

    def step(
        state: State, inputs: tuple[Any, Any, Any]
    ) -> tuple[State, tuple[Float[Array, "batch hidden"], State | None, dict[str, Array]]]:
        gates, (begins, valid, position), index = inputs
        tap = Tap(hooks)
        if hooks.patch:
            documents = None if valid is None else valid[:, None]
            tap = Tap(hooks.of_token(index[0], length), position[:, None], documents)
        if begins is not None and initial is not None:
            parts = zip(initial, state, strict=True)
            state = tuple(jnp.where(begins[:, None], first, part) for first, part in parts)
        hidden = linear(weights["state"], state[0].astype(x.dtype), jnp.float32)
        gates = tap("recurrent.gates", (gates + hidden)[:, None])[:, 0]
        new = zip(cell.parts, cell.step(gates, state), strict=True)
        new = tuple(tap(f"recurrent.{name}", part[:, None])[:, 0] for name, part in new)
        output = new[0]
        if valid is not None:
            parts = zip(new, state, strict=True)
            new = tuple(jnp.where(valid[:, None], *part) for part in parts)
            output = jnp.where(valid[:, None], output, 0.0)
        return new, (output, new if keeps_states else None, tap.captured)

    state, *_ = vary_alike(state, gates, initial, times)
    inputs = (gates, times._replace(positions=positions), index)
    by_time = jax.tree.map(lambda array: array.swapaxes(0, 1), inputs)
    state, (outputs, states, captured) = jax.lax.scan(step, state, by_time)
    state = state if states is None else jax.tree.map(lambda x: x.swapaxes(0, 1), states)
    captured = {name: x[:, :, 0].swapaxes(0, 1) for name, x in captured.items()}
    return outputs.swapaxes(0, 1).astype(x.dtype), state, captured


class RecurrentState(NamedTuple):
    """The state of a recurrent layer in a cache.

    Attributes:
        now: the state after the tokens.
        initial: the state at which documents begin; None: zeros.
    """

    now: State
    initial: State | None = None


@dataclass(frozen=True)
class Recurrent(SubLayer):
    """`recurrent_layer` with its sizes; the residual stream has `hidden_dim` features after it.

    Attributes:
        cell: the step from one state to the next.
        hidden_dim: number of features of each part of the state.
        source_layer: the number of the encoder's layer whose last state is that at which documents
            begin; None: they begin at zeros.
    """

    name: ClassVar[str] = "recurrent"

    cell: Cell
    hidden_dim: int
    source_layer: int | None = None

    @property
    def points(self) -> tuple[str, ...]:  # pyrefly: ignore[bad-override] (computed, not stored)
        """See `SubLayer`."""
        return ("recurrent.gates", *(f"recurrent.{part}" for part in self.cell.parts))

    def output_dim(self, dim: int) -> int:
        """See `SubLayer`."""
        return self.hidden_dim

    def rule(self) -> Mask:
        """See `SubLayer`."""
        return Causal()

    def init(self, key: PRNGKeyArray, dim: int, initial: Initial) -> Weights:
        """See `init_recurrent_layer`."""
        return init_recurrent_layer(key, self.cell, dim, self.hidden_dim, initial.input_stddev)

    def zeros(self, batch_size: Size) -> State:
        """Returns the state of zeros, all distinct arrays, because they are donated."""
        shape = (batch_size, self.hidden_dim)
        return tuple(jnp.zeros(shape, jnp.float32) for _ in self.cell.parts)

    def init_state(self, weights: Weights, start: Start) -> RecurrentState:
        """See `SubLayer`."""
        initial, rows = None, start.batch_size
        if start.encoded is not None:
            # With fewer sources than devices the partitioner would shard the states by their
            # features, and replicate them at every step to divide the rows among the sources.
            initial = jax.tree.map(
                lambda x: start.placement.place(
                    "recurrent.initial", jnp.repeat(x, rows // x.shape[0], axis=0)
                ),
                self._last_of_source(start.encoded),
            )
        return RecurrentState(self.zeros(rows), initial)

    def context(self, tokens: Tokens, shared: Weights) -> tuple[Times, State | None]:
        """Returns (documents, padding and positions; the state at which documents begin)."""
        documents, positions = tokens.new.segments, tokens.new.positions
        times = Times(positions=positions)
        if documents is not None:
            valid = documents != 0
            times = Times(valid & (tokens.new.position_ids() == 0), valid, positions)
        return times, None if tokens.encoded is None else self._last_of_source(tokens.encoded)

    def _last_of_source(self, encoded: Forward) -> State | None:
        """Returns the last state of the encoder's layer."""
        if self.source_layer is None:
            return None
        return encoded.states[self.source_layer][self.name].now

    def __call__(self, weights: Weights, x: Float[Array, "*batch length dim"], at: At) -> Output:
        """See `recurrent_layer`."""
        times, initial = at.context
        zeros = self.zeros(x.shape[0])
        before = RecurrentState(zeros if initial is None else initial, initial)
        if at.state is not None:
            before = at.state
        x, now, captured = recurrent_layer(
            weights,
            x,
            before.now,
            zeros if before.initial is None else before.initial,
            times,
            at.tap.hooks,
            cell=self.cell,
            keeps_states=at.keeps_states,
        )
        at.tap.captured.update(captured)
        initial = before.initial
        if at.keeps_states:  # it is the same after each token
            length = x.shape[1]
            initial = jax.tree.map(lambda x: jnp.repeat(x[:, None], length, axis=1), initial)
        return Output(x, RecurrentState(now, initial))
