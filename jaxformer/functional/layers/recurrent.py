"""Recurrent layers: h_t = f(h_{t−1}, x_t).

Later tokens depend on earlier tokens only through the state h. The state is reset at the start of
each document, and padding does not change the state. States are always float32.

Reference:
    Notes, lecture 11 §8.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxformer.functional.arguments import check_maps, checks_arguments
from jaxformer.functional.attention.masks import Causal, Mask
from jaxformer.functional.hooks import NO_HOOKS, HookPoints, Hooks
from jaxformer.functional.inputs import Forward
from jaxformer.functional.layers.sublayer import At, Initial, Output, Start, SubLayer
from jaxformer.functional.linear.affine import linear
from jaxformer.functional.placement import vary_alike
from jaxformer.functional.symbolic import Size
from jaxformer.functional.tokens import Tokens
from jaxformer.functional.trees import Weights
from jaxformer.terminal import kind_of

# The state of one layer: the hidden state h and, for an LSTM, the cell state c.
State = tuple[Float[Array, "*batch hidden"], ...]


class Cell(ABC):
    """Base class of recurrent cells. Subclasses are frozen dataclasses.

    Attributes:
        num_gates: number of gates.
        parts: names of the parts of the state; the first part is h.
        open_gate: index of the gate whose initial bias is 1, or None.
    """

    num_gates: ClassVar[int]
    parts: ClassVar[tuple[str, ...]]
    open_gate: ClassVar[int | None] = None

    @abstractmethod
    def step(self, gates: Float[Array, "*batch gates"], state: State) -> State:
        """Computes the next state.

        Args:
            gates: x_t W + h_{t−1} U + b, with all gates concatenated.
            state: the previous state.
        """


@dataclass(frozen=True)
class Rnn(Cell):
    """RNN cell: h_t = tanh(gates) (Elman 1990)."""

    num_gates = 1
    parts = ("hidden",)

    def step(self, gates: Float[Array, "*batch gates"], state: State) -> State:
        """See `Cell`."""
        return (jnp.tanh(gates),)


@dataclass(frozen=True)
class Lstm(Cell):
    """LSTM cell with the gates [i, f, g, o].

        c_t = σ(f) c_{t−1} + σ(i) tanh(g)        h_t = σ(o) tanh(c_t)

    Reference:
        Hochreiter & Schmidhuber 1997; for the forget gate Gers et al. 2000.
    """

    num_gates = 4
    parts = ("hidden", "cell")
    # The bias 1 lets gradients through the forget gate early in training (Jozefowicz et al. 2015).
    open_gate = 1

    def step(self, gates: Float[Array, "*batch gates"], state: State) -> State:
        """See `Cell`."""
        _, cell = state
        write, keep, candidate, show = jnp.split(gates, 4, axis=-1)
        cell = jax.nn.sigmoid(keep) * cell + jax.nn.sigmoid(write) * jnp.tanh(candidate)
        return jax.nn.sigmoid(show) * jnp.tanh(cell), cell


CELLS = {"rnn": Rnn(), "lstm": Lstm()}


def _check_cell(
    cell: Cell, weights: Any, x: Float[Any, "*batch in_dim"], states: Sequence[Any]
) -> None:
    """Raises ValueError unless the weights fit the cell, its input and its states."""
    check_maps("weights", weights, {"input": (x.shape[-1], None), "state": (None, None)})
    size, gates = weights["state"]["kernel"].shape
    if gates != cell.num_gates * size:
        raise ValueError(
            f"weights['state']['kernel'] has shape {(size, gates)}; the {type(cell).__name__} cell "
            f"needs {cell.num_gates} gates, so the shape must be {(size, cell.num_gates * size)}"
        )
    check_maps("weights", weights, {"input": (x.shape[-1], gates)})
    for name, part in zip(cell.parts, states, strict=False):
        if part.shape != (*x.shape[:-1], size):
            raise ValueError(
                f"state: {name} has shape {part.shape}; it must be {(*x.shape[:-1], size)}"
            )


def _check_rnn(weights: Any, x: Any, hidden: Any = None) -> None:
    _check_cell(Rnn(), weights, x, () if hidden is None else (hidden,))


def _check_lstm(weights: Any, x: Any, state: Any = ()) -> None:
    if not isinstance(state, tuple | list) or len(state) not in (0, 2):
        raise TypeError(f"state is {kind_of(state)}; it must be a pair (hidden, cell)")
    _check_cell(Lstm(), weights, x, state)


@checks_arguments(_check_rnn)
def rnn_cell(
    weights: Weights, x: Float[Array, "*batch in_dim"], hidden: Float[Array, "*state_batch hidden"]
) -> Float[Array, "*batch hidden"]:
    """Computes h_t = tanh(x_t W + h_{t−1} U + b), one step of an RNN.

    Args:
        weights: the linear layers "input" (W, b) and "state" (U); see `init_recurrent_layer`.
        x: the input x_t.
        hidden: the state h_{t−1}.
    """
    (hidden,) = Rnn().step(_gates(weights, x, hidden), (hidden,))
    return hidden


@checks_arguments(_check_lstm)
def lstm_cell(weights: Weights, x: Float[Array, "*batch in_dim"], state: State) -> State:
    """Computes (h_t, c_t) from x_t and (h_{t−1}, c_{t−1}), one step of an LSTM; see `Lstm`.

    Args:
        weights: the linear layers "input" (W, b) and "state" (U), each with the gates [i, f, g, o]
            side by side; see `init_recurrent_layer`.
        x: the input x_t.
        state: (h_{t−1}, c_{t−1}).
    """
    return Lstm().step(_gates(weights, x, state[0]), state)


def _gates(
    weights: Weights, x: Float[Array, "*batch in_dim"], hidden: Float[Array, "*batch hidden"]
) -> Float[Array, "*batch gates"]:
    """Computes x_t W + h_{t−1} U + b."""
    gates = linear(weights["input"], x, jnp.float32)
    return gates + linear(weights["state"], hidden, jnp.float32)


def init_recurrent_layer(
    key: PRNGKeyArray, cell: str | Cell, in_dim: int, hidden_dim: int, input_stddev: float = 1.0
) -> Weights:
    """Returns the initial weights of a recurrent layer.

    W is drawn from N(0, 1/(in_dim · input_stddev²)), so that W x has variance 1 if the features of
    x have standard deviation input_stddev. U is orthogonal for each gate (Saxe et al. 2014). The
    bias is 1 for the forget gate and 0 otherwise.

    Args:
        key: the random key.
        cell: "rnn", "lstm" or another cell.
        in_dim: the number of features of x.
        hidden_dim: the number of features of the state.
        input_stddev: the standard deviation of the features of x.
    """
    if isinstance(cell, str):
        if cell not in CELLS:
            raise ValueError(f"cell is {cell!r}; it must be {' or '.join(CELLS)}, or a Cell")
        cell = CELLS[cell]
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
    """Returns a random orthogonal matrix.

    Under `vmap`, the function computes the matrices one after another, to avoid a deadlock.

    In jaxlib 0.10, LAPACK's factorization of a batch occupies one thread of XLA's pool and waits
    for other threads of this pool. Two factorizations of batches on two threads would deadlock.
    """
    one = jax.nn.initializers.orthogonal()
    return jax.custom_batching.sequential_vmap(lambda key: one(key, (size, size), jnp.float32))(key)


class Times(NamedTuple):
    """Per-token inputs of the scan over time, each [batch, length].

    Attributes:
        begins: True for the first token of each document, where the state is reset; None if the
            state is never reset.
        valid: False for padding; None if no token is padding.
        positions: the token positions, by which patches select tokens; defaults to 0, 1, 2, …
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
    """Runs one recurrent layer over all tokens.

    The products x W of all tokens are computed before the scan over time.

    Args:
        weights: the weights of the layer; see `init_recurrent_layer`.
        x: the input of the layer.
        state: the state before the first token.
        initial: the state at the start of each document; if None, the state is never reset.
        times: the starts of documents, the padding and the token positions; see `Times`.
        hooks: hook points to capture and patch. A patched state is passed to the next token.
        cell: the recurrent cell, which computes each new state.
        keeps_states: whether to return the state after each token.

    Returns:
        (outputs, state, captured): h_1 … h_T [batch, length, hidden], the state after the last
        token [batch, hidden] or after each token [batch, length, hidden], and the captured values.
    """
    length = x.shape[1]
    gates = linear(weights["input"], x, jnp.float32)
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), x.shape[:2])
    positions = index if times.positions is None else jnp.broadcast_to(times.positions, x.shape[:2])
    if not hooks.patch:
        positions = index = None  # Without patches, no hook uses these arrays.

    def step(
        state: State, inputs: tuple[Any, Any, Any]
    ) -> tuple[State, tuple[Float[Array, "batch hidden"], State | None, dict[str, Array]]]:
        gates, (begins, valid, position), index = inputs
        hook = HookPoints(hooks)
        if hooks.patch:
            documents = None if valid is None else valid[:, None]
            hook = HookPoints(hooks.for_token(index[0], length), position[:, None], documents)
        if begins is not None and initial is not None:
            parts = zip(initial, state, strict=True)
            state = tuple(jnp.where(begins[:, None], first, part) for first, part in parts)
        hidden = linear(weights["state"], state[0].astype(x.dtype), jnp.float32)
        gates = hook("recurrent.gates", (gates + hidden)[:, None])[:, 0]
        new = zip(cell.parts, cell.step(gates, state), strict=True)
        new = tuple(hook(f"recurrent.{name}", part[:, None])[:, 0] for name, part in new)
        output = new[0]
        if valid is not None:
            parts = zip(new, state, strict=True)
            new = tuple(jnp.where(valid[:, None], *part) for part in parts)
            output = jnp.where(valid[:, None], output, 0.0)
        return new, (output, new if keeps_states else None, hook.captured)

    state, *_ = vary_alike(state, gates, initial, times)
    inputs = (gates, times._replace(positions=positions), index)
    by_time = jax.tree.map(lambda array: array.swapaxes(0, 1), inputs)
    state, (outputs, states, captured) = jax.lax.scan(step, state, by_time)
    state = state if states is None else jax.tree.map(lambda x: x.swapaxes(0, 1), states)
    captured = {name: x[:, :, 0].swapaxes(0, 1) for name, x in captured.items()}
    return outputs.swapaxes(0, 1).astype(x.dtype), state, captured


@checks_arguments(_check_rnn)
def rnn(
    weights: Weights, x: Float[Array, "*batch length in_dim"]
) -> Float[Array, "*batch length hidden"]:
    """Computes the states h_1 … h_T of an RNN from a zero state; see `rnn_cell`."""
    return _run_from_zero(weights, x, Rnn())


@checks_arguments(_check_lstm)
def lstm(
    weights: Weights, x: Float[Array, "*batch length in_dim"]
) -> Float[Array, "*batch length hidden"]:
    """Computes the states h_1 … h_T of an LSTM from a zero state; see `lstm_cell`."""
    return _run_from_zero(weights, x, Lstm())


def _run_from_zero(
    weights: Weights, x: Float[Array, "*batch length in_dim"], cell: Cell
) -> Float[Array, "*batch length hidden"]:
    sequences = x.reshape(-1, *x.shape[-2:])
    size = weights["state"]["kernel"].shape[0]
    state = tuple(jnp.zeros((len(sequences), size), jnp.float32) for _ in cell.parts)
    outputs, *_ = recurrent_layer(weights, sequences, state, cell=cell)
    return outputs.reshape(*x.shape[:-1], size)


class RecurrentState(NamedTuple):
    """State of a recurrent layer in a cache.

    Attributes:
        now: the state after the tokens.
        initial: the state at the start of each document; zeros if None.
    """

    now: State
    initial: State | None = None


@dataclass(frozen=True)
class Recurrent(SubLayer):
    """Recurrent sub-layer, whose output has `hidden_dim` features; see `recurrent_layer`.

    Attributes:
        cell: the recurrent cell, which computes each new state.
        hidden_dim: number of features of each part of the state.
        source_layer: the number of the encoder layer whose last state initializes each document; if
            None, the initial state is zero.
    """

    name: ClassVar[str] = "recurrent"

    cell: Cell
    hidden_dim: int
    source_layer: int | None = None

    @property
    def hook_points(self) -> tuple[str, ...]:  # pyrefly: ignore[bad-override] (computed, not stored)
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
        """Returns a zero state of distinct arrays, because jit cannot donate an array twice."""
        shape = (batch_size, self.hidden_dim)
        return tuple(jnp.zeros(shape, jnp.float32) for _ in self.cell.parts)

    def init_state(self, weights: Weights, start: Start) -> RecurrentState:
        """See `SubLayer`."""
        initial, batch_size = None, start.batch_size
        if start.encoded is not None:
            # Without `place`, and with fewer source sequences than devices, XLA would shard the
            # states along features and replicate them at every step.
            initial = jax.tree.map(
                lambda x: start.placement.place(
                    "recurrent.initial", jnp.repeat(x, batch_size // x.shape[0], axis=0)
                ),
                self._last_of_source(start.encoded),
            )
        return RecurrentState(self.zeros(batch_size), initial)

    def context(self, tokens: Tokens, shared: Weights) -> tuple[Times, State | None]:
        """Returns (times, initial): inputs of the scan for each token, and the initial state."""
        documents, positions = tokens.new.segment_ids, tokens.new.positions
        times = Times(positions=positions)
        if documents is not None:
            valid = documents != 0
            times = Times(valid & (tokens.new.position_ids() == 0), valid, positions)
        return times, None if tokens.encoded is None else self._last_of_source(tokens.encoded)

    def _last_of_source(self, encoded: Forward) -> State | None:
        """Returns the last state of the encoder layer `source_layer`."""
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
            at.hook.hooks,
            cell=self.cell,
            keeps_states=at.keeps_states,
        )
        at.hook.captured.update(captured)
        initial = before.initial
        if at.keeps_states:
            # The initial state is the same for each token.
            length = x.shape[1]
            initial = jax.tree.map(lambda x: jnp.repeat(x[:, None], length, axis=1), initial)
        return Output(x, RecurrentState(now, initial))
