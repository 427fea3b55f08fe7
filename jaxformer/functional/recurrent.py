"""Recurrent language models as pure functions of their weights: h_t = f(h_{t−1}, x_t).

    tokens → embedding → recurrent layers → logits

Later tokens depend on earlier ones only through the state. It is reset at the start of each
document, and padding does not change it. States are float32 whatever the dtype of the activations.

Reference:
    Notes, lecture 11 §8.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxformer.functional.architecture import CacheSize, Initializers
from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.cache.fixed_size_state import FixedSizeState
from jaxformer.functional.dropout import dropout
from jaxformer.functional.embedding import (
    embed_tokens,
    head_of,
    init_embedding,
    prepare,
    without_padding,
)
from jaxformer.functional.inputs import Forward, Inputs, Run
from jaxformer.functional.layers.cells import CELLS, State, init_recurrent_layer
from jaxformer.functional.linear.affine import linear
from jaxformer.functional.placement import vary_alike
from jaxformer.functional.positions import (
    DocumentCursor,
    continued_segments,
    document_positions,
)
from jaxformer.functional.symbolic import Size
from jaxformer.functional.taps import NO_HOOKS, Hooks, Tap
from jaxformer.functional.trees import REMAT, Weights, split_key, stack_trees

LAYER_POINTS = ("recurrent.gates", "recurrent.hidden", "recurrent.cell")


def points(config: Any) -> tuple[str, ...]:
    """Returns the names of the points at which a pass can be captured or patched.

    Only an LSTM has the point of the cell state.
    """
    return ("embedding", *LAYER_POINTS[: 1 + CELLS[config.cell].num_parts])


def layer_points(config: Any) -> tuple[str, ...]:
    """Returns the points that every layer has."""
    return points(config)[1:]


def empty_states(config: Any, batch_size: Size) -> tuple[State, ...]:
    """Returns zeros for each layer and part, all distinct arrays, because they are donated."""
    parts, shape = CELLS[config.cell].num_parts, (batch_size, config.hidden_dim)
    return tuple(
        tuple(jnp.zeros(shape, jnp.float32) for _ in range(parts)) for _ in range(config.num_layers)
    )


class Times(NamedTuple):
    """What the steps through time need to know, each [batch, length].

    Attributes:
        begins: where a document begins and the state is reset; None: nowhere.
        valid: False for padding; None: no padding.
        positions: the positions of the tokens, for patches; None: 0, 1, 2, …
    """

    begins: Bool[Array, "batch length"] | None = None
    valid: Bool[Array, "batch length"] | None = None
    positions: Int[Array, "batch length"] | None = None


def recurrent_layer(
    weights: Weights,
    x: Float[Array, "batch length in_dim"],
    state: tuple[Float[Array, "batch hidden"], ...],
    initial: tuple[Float[Array, "batch hidden"], ...] | None = None,
    times: Times = Times(),  # noqa: B008 (immutable)
    hooks: Hooks = NO_HOOKS,
    *,
    cell: str,
) -> tuple[Float[Array, "batch length hidden"], State, dict[str, Array]]:
    """Runs one layer through time.

    The products with x are computed for all times at once.

    Args:
        weights: those of `init_recurrent_layer`.
        x: the input of the layer.
        state: the state before the first token.
        initial: the state at which documents begin; None if they begin nowhere.
        times: documents, padding and positions.
        hooks: points to capture and patch. The next token continues from a patched state.
        cell: a name in `CELLS`.

    Returns:
        (outputs, state, captured): h_1 … h_T [batch, length, hidden], the state after the last
        token, and the captured values.
    """
    length = x.shape[1]
    gates = linear(weights["input"], x, jnp.float32)
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), x.shape[:2])
    positions = index if times.positions is None else times.positions
    if not hooks.patch:
        positions = index = None  # only patches use them

    def step(
        state: State, inputs: tuple[Any, Any, Any]
    ) -> tuple[State, tuple[Float[Array, "batch hidden"], dict[str, Array]]]:
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
        new = CELLS[cell].step(gates, state)
        named = zip(LAYER_POINTS[1:], new, strict=False)  # an RNN has no cell
        new = tuple(tap(name, part[:, None])[:, 0] for name, part in named)
        if valid is None:
            return new, (new[0], tap.captured)
        state = tuple(jnp.where(valid[:, None], *parts) for parts in zip(new, state, strict=True))
        return state, (jnp.where(valid[:, None], new[0], 0.0), tap.captured)

    state, *_ = vary_alike(state, gates, initial, times)
    inputs = (gates, times._replace(positions=positions), index)
    by_time = jax.tree.map(lambda array: array.swapaxes(0, 1), inputs)
    state, (outputs, captured) = jax.lax.scan(step, state, by_time)
    captured = {name: x[:, :, 0].swapaxes(0, 1) for name, x in captured.items()}
    return outputs.swapaxes(0, 1).astype(x.dtype), state, captured


# ---- the language model


def initializers(config: Any) -> dict:
    """Returns {name: initializer}, each a pure function of a key.

    Token vectors have a standard deviation of 1/√dim, which suits logits. The input weights of the
    first layer are larger in return: a cell with a small input learns very slowly at first.
    """
    dim, vocab_size = config.embed_dim, config.vocab_size
    parts = {
        "embedding": lambda key: init_embedding(key, vocab_size, dim, stddev=dim**-0.5),
        "layers": lambda key: init_layers(key, config, dim**-0.5),
    }
    return parts | head_of(config, config.hidden_dim).initializers()


def init_layers(key: PRNGKeyArray, config: Any, input_stddev: float = 1.0) -> Weights:
    """Returns {layer_i: weights} for each layer i.

    The input of the first layer has `embed_dim` features of size `input_stddev`, that of the
    remaining layers `hidden_dim` features of size 1.
    """
    first, others = (config.embed_dim, input_stddev), (config.hidden_dim, 1.0)
    inputs = [first, *[others] * (config.num_layers - 1)]
    keys = jax.random.split(key, config.num_layers)
    return {
        f"layer_{i}": init_recurrent_layer(keys[i], config.cell, in_dim, config.hidden_dim, stddev)
        for i, (in_dim, stddev) in enumerate(inputs)
    }


def run_layers(
    weights: Weights,
    x: Float[Array, "batch length dim"],
    config: Any,
    run: Run,
    states: tuple[State, ...],
    initial: tuple[State, ...],
    times: "Times",
) -> tuple[Float[Array, "batch length hidden"], tuple[State, ...], dict[str, Array]]:
    """Runs all layers, with dropout between layers but not through time (Zaremba et al. 2014).

    Args:
        weights: those of `init_layers`.
        x: [batch, length, embed_dim].
        config: a RecurrentConfig, or a value with its fields.
        run: how the pass runs.
        states: the state of each layer before the first token.
        initial: the state of each layer at which documents begin.
        times: documents, padding and positions.

    Returns:
        (hidden, states, captured): the hidden states of the last layer, the states after the last
        token, and the captured values.
    """
    num_layers = config.num_layers
    keys = split_key(run.dropout_key, num_layers + 1)
    x, after, captured = dropout(keys[0], x, config.dropout), [], []
    layer = REMAT[run.execution.remat](partial(recurrent_layer, cell=config.cell))
    for i, hooks in enumerate(run.hooks.of(LAYER_POINTS).of_layers(num_layers)):
        x, state, values = layer(weights[f"layer_{i}"], x, states[i], initial[i], times, hooks)
        x = dropout(keys[i + 1], x, config.dropout)
        after.append(state)
        captured.append(values)
    return x, tuple(after), stack_trees(captured)


def forward(
    weights: Weights, inputs: Inputs, config: Any, run: Run, cache: "RecurrentCache | None" = None
) -> Forward:
    """Computes the hidden states [batch, length, hidden_dim] of the last layer.

    Args:
        weights: those of `initializers`.
        inputs: the tokens.
        config: a RecurrentConfig, or a value with its fields.
        run: how the pass runs.
        cache: the state after earlier tokens; None: the tokens are complete sequences.
    """
    passed = read(weights, inputs, config, run, cache)
    return passed if cache is not None else passed._replace(cache=None)


def read(
    weights: Weights,
    inputs: Inputs,
    config: Any,
    run: Run,
    cache: "RecurrentCache | None" = None,
    initial: tuple[State, ...] | None = None,
) -> Forward:
    """Runs the layers; the result has the cache after the tokens even if there is none before.

    Args:
        weights: see `forward`.
        inputs: see `forward`.
        config: see `forward`.
        run: see `forward`.
        cache: see `forward`.
        initial: the states at which documents begin; None: zeros.
    """
    tokens, segments = inputs.tokens, inputs.segments
    batch_size, length = tokens.shape[:2]
    initial = empty_states(config, batch_size) if initial is None else initial
    before = RecurrentCache.begin(initial) if cache is None else cache
    valid = begins = None
    positions, cursor = (
        jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape[:2]),
        before.cursor,
    )
    if segments is not None or cache is not None:
        segments = continued_segments(segments, cursor, tokens.shape[:2])
        documents, positions, cursor = document_positions(segments, cursor)
        valid = documents != 0
        begins = valid & (positions == 0)
    tap = Tap(run.hooks, positions, valid, run.placement)
    x = embed_tokens(weights["embedding"], tokens, config.dtype, run.placement)
    x = tap("embedding", without_padding(x, segments))
    times = Times(begins, valid, positions)
    x, states, captured = run_layers(
        weights["layers"], x, config, run, before.states, initial, times
    )
    after = RecurrentCache(cursor, before.length + length, states)
    return Forward(x, {**tap.captured, **captured}, after)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentCache(FixedSizeState):
    """Cache of a recurrent model; its size does not depend on the number of tokens.

    Attributes:
        states: float32 [batch, hidden], for each layer and part.
    """

    states: tuple[State, ...]

    @classmethod
    def begin(cls, states: tuple[State, ...]) -> "RecurrentCache":
        """Returns the cache of rows that have read no token, with these states."""
        return cls(DocumentCursor.begin(states[0][0].shape[0]), jnp.int32(0), states)


def start(
    weights: Weights, source: Inputs | None, config: Any, run: Run, size: CacheSize
) -> tuple[RecurrentCache, dict]:
    """Returns the cache before the first token; its size does not depend on the capacity."""
    return RecurrentCache.begin(empty_states(config, size.batch_size)), {}


@dataclass(frozen=True)
class RecurrentModel:
    """The `Architecture` of a recurrent language model.

    Attributes:
        config: the resolved config.
    """

    config: Any

    @property
    def masks(self) -> tuple[Mask, ...]:
        """See `Architecture`."""
        return ()

    @property
    def generates(self) -> bool:
        """See `Architecture`."""
        return True

    @property
    def initializers(self) -> Initializers:
        """See `Architecture`."""
        return initializers(self.config)

    @property
    def points(self) -> tuple[str, ...]:
        """See `Architecture`."""
        return points(self.config)

    @property
    def layer_points(self) -> tuple[str, ...]:
        """See `Architecture`."""
        return layer_points(self.config)

    def forward(self, weights: Weights, inputs: Inputs, run: Run, cache: Any = None) -> Forward:
        """See `Architecture`."""
        return forward(weights, inputs, self.config, run, cache)

    def finish(self, weights: Weights, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        """See `Architecture`."""
        return x

    def start(
        self, weights: Weights, source: Inputs | None, run: Run, size: CacheSize
    ) -> tuple[Any, dict[str, Array]]:
        """See `Architecture`."""
        return start(weights, source, self.config, run, size)

    def prepare(self, weights: Weights, parts: int = 1) -> Weights:
        """See `Architecture`."""
        return prepare(weights, self.config.dtype, parts)
