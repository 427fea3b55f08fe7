"""Compiled steps of `generate`: reads the prompts, chooses tokens and runs blocks of steps."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxformer.decoding.constraints import NO_TOKEN, Room, Rules
from jaxformer.decoding.loop_cache import LoopCache, live_slots
from jaxformer.decoding.sampling import Logits, SamplerArrays, sample_tokens
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.losses.cross_entropy import token_losses
from jaxformer.functional.taps import NO_HOOKS, Hooks
from jaxformer.functional.trees import Weights
from jaxformer.models.language_model import LanguageModel

STEPS = 16  # tokens per block
WEIGHTS = "attention.weights"


class Prefill(NamedTuple):
    """Result of reading the prompts."""

    cache: Any
    logits: jax.Array  # [batch, vocab], of the last token
    captured: dict[str, Array]  # the values captured at the last token


class Choice(NamedTuple):
    """How the next token of each row is chosen.

    Attributes:
        sampler: the sampler's fields; None: greedy.
        key: a random key; None: greedy.
        stops: int [stops], ids that end a row.
        rules: constraints on the tokens; None: no constraints.
        rows: int [batch], the numbers of the rows, from which they draw; None: 0, 1, 2, …
    """

    sampler: SamplerArrays | None
    key: Any
    stops: Int[Array | np.ndarray, " stops"]
    rules: Rules | None = None
    rows: Int[Array | np.ndarray, " batch"] | None = None


class State(NamedTuple):
    """State of the loop between steps."""

    cache: Any
    token: jax.Array  # int [batch], the last token, which the model has not read yet
    stopped: jax.Array  # bool [batch]
    step: jax.Array  # int [], number of tokens generated
    generated: Room | None = None  # for constraints


class Block(NamedTuple):
    """Results of several steps.

    Attributes:
        tokens: int [steps, batch], NO_TOKEN after the end of a row.
        log_probs: float32 [steps, batch].
        captured: {name: [steps, …]}.
    """

    tokens: jax.Array | np.ndarray
    log_probs: jax.Array | np.ndarray
    captured: Mapping[str, Array | np.ndarray]


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def prefill(
    model: LanguageModel, weights: Weights, inputs: Inputs, cache: Any, hooks: Hooks = NO_HOOKS
) -> Prefill:
    """Reads the prompts into an empty cache and computes the logits of the last position only.

    The prompts are padded on the left.
    """
    prefix = cache.live_prefix(live_slots(cache, inputs.tokens.shape[1]))
    passed = model.forward(weights, inputs, prefix, hooks=hooks.at_step(0), is_first=True)
    logits = model.logits(weights, passed.hidden[:, -1:])[:, -1]
    return Prefill(cache.merge_prefix(passed.cache), logits, last_token(passed.captured))


def last_token(captured: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the captured values at the last token of a pass."""
    return {name: x[..., -1, :] for name, x in captured.items()}


@jax.jit
def choose_first(
    logits: Logits,
    captured: dict[str, Array],
    choice: Choice,
    batch_size: Int[Array, ""] | np.integer | None = None,
    generated: Room | None = None,
) -> tuple[State, Block]:
    """Chooses the first token of each row.

    Args:
        logits: float32 [batch, vocab], of the last token of each prompt.
        captured: the values captured at this token.
        choice: how tokens are chosen.
        batch_size: int [], rows from this index on are padding and count as stopped; None: there
            are none.
        generated: int [batch, room], full of NO_TOKEN, for constraints.

    Returns:
        (the state without its cache, a block of one step).
    """
    rows = len(logits)
    is_padding = jnp.arange(rows, dtype=jnp.int32) >= (rows if batch_size is None else batch_size)
    before = State(None, jnp.zeros(rows, jnp.int32), is_padding, jnp.int32(0), generated)
    state, output = _choose(logits, captured, before, choice)
    return state, jax.tree.map(lambda x: x[None], output)


def _choose(
    logits: Logits, captured: dict[str, Array], before: State, choice: Choice
) -> tuple[State, Block]:
    """Chooses the next token of each row. Returns (the next state, the output of the step)."""
    cache, _, stopped, step, generated = before
    allowed = logits
    if choice.rules is not None and generated is not None:
        allowed = choice.rules.apply(logits, generated, step)
    token = sample_tokens(choice.sampler, choice.key, step, allowed, choice.rows)
    if generated is not None:
        generated = jax.lax.dynamic_update_slice(generated, token[:, None], (0, step))
    log_prob = -token_losses(logits, token)
    tokens, log_probs = jnp.where(stopped, NO_TOKEN, token), jnp.where(stopped, 0.0, log_prob)
    stopped |= (token[:, None] == choice.stops).any(axis=-1)
    return State(cache, token, stopped, step + 1, generated), Block(tokens, log_probs, captured)


@partial(jax.jit, static_argnums=(0, 4), donate_argnums=2)
def decode_block(
    model: LanguageModel,
    weights: Weights,
    state: State,
    choice: Choice,
    live: int | None,
    hooks: Hooks = NO_HOOKS,
) -> tuple[State, Block]:
    """Generates STEPS tokens, attending to only the first `live` slots of the cache."""
    cache = state.cache

    def step(state: State, _: None) -> tuple[State, Block]:
        inputs, now = Inputs(state.token[:, None]), hooks.at_step(state.step)
        passed = model.forward(weights, inputs, state.cache.restored(), hooks=now)
        logits = model.logits(weights, passed.hidden)[:, -1]
        captured = last_token(passed.captured)
        return _choose(logits, captured, state._replace(cache=LoopCache.of(passed.cache)), choice)

    state = state._replace(cache=LoopCache.of(cache.live_prefix(live)))
    state, steps = jax.lax.scan(step, state, length=STEPS)
    return state._replace(cache=cache.merge_prefix(state.cache.restored())), steps
