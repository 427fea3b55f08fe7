"""Compiled steps of `generate`: prefill, choice of the first token, and blocks of steps."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from jaxformer.decoding.constraints import NO_TOKEN, Room, Rules
from jaxformer.decoding.loop_cache import LoopCache, live_slots
from jaxformer.decoding.sampling import Logits, SamplerArrays, sample_tokens
from jaxformer.functional.cache.key_values import Cache
from jaxformer.functional.hooks import NO_HOOKS, Hooks
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.losses.cross_entropy import token_losses
from jaxformer.functional.trees import Weights
from jaxformer.models.language_model import LanguageModel

STEPS = 16  # One compiled call generates this number of tokens per sequence.
# The value at masked keys, for each hook point whose last axis is the keys of self-attention.
MASKED_VALUES = {"attention.scores": -np.inf, "attention.weights": 0.0}


class Prefill(NamedTuple):
    """Result of reading the prompts.

    Attributes:
        cache: the cache with the prompts.
        logits: [batch, vocab], at the last token of each prompt.
        captured: the values captured at the last token of each prompt.
    """

    cache: Cache
    logits: jax.Array
    captured: dict[str, Array]


class TokenSelection(NamedTuple):
    """Arguments that determine how the next token of each batch element is chosen.

    Attributes:
        sampler: the sampler's fields, or None for greedy decoding.
        key: a random key, or None for greedy decoding.
        stops: int [stops], ids that end a sequence.
        rules: constraints on the tokens, or None.
        indices: int [batch], the index of each batch element in the call, which selects its random
            numbers; 0, 1, 2, … if None.
        stop_table: int [states, vocab], see `StopStrings.table`, or None.
        allowed: bool [batch, vocab], the tokens that a grammar allows, or None.
    """

    sampler: SamplerArrays | None
    key: PRNGKeyArray | None
    stops: Int[Array | np.ndarray, " stops"]
    rules: Rules | None = None
    indices: Int[Array | np.ndarray, " batch"] | None = None
    stop_table: Int[Array | np.ndarray, "states vocab"] | None = None
    allowed: Bool[Array | np.ndarray, "batch vocab"] | None = None


class DecodingState(NamedTuple):
    """State of the decoding loop between steps, apart from the cache.

    Attributes:
        token: int [batch], the newest token, which is the model's next input.
        stopped: bool [batch], whether the sequence has ended.
        step: int [], number of tokens generated so far.
        generated: int [batch, room], the tokens generated so far, then NO_TOKEN. None without
            constraints.
        stop_state: int [batch], row of the stop table after the newest token. None without stop
            strings.
    """

    token: jax.Array
    stopped: jax.Array
    step: jax.Array
    generated: Room | None = None
    stop_state: Int[Array, " batch"] | None = None


class DecodedChunk(NamedTuple):
    """Results of several decoding steps.

    Attributes:
        tokens: int [steps, batch], NO_TOKEN after the end of a sequence.
        log_probs: float32 [steps, batch].
        captured: {name: [steps, …]}.
    """

    tokens: jax.Array | np.ndarray
    log_probs: jax.Array | np.ndarray
    captured: Mapping[str, Array | np.ndarray]


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def prefill(
    model: LanguageModel, weights: Weights, inputs: Inputs, cache: Cache, hooks: Hooks = NO_HOOKS
) -> Prefill:
    """Runs the model on the prompts with an empty cache.

    The function computes logits only at the last position. The prompts are padded on the left.
    """
    prefix = cache.live_prefix(live_slots(cache, inputs.tokens.shape[1]))
    passed = model.forward(weights, inputs, prefix, hooks=hooks.at_step(0), is_first=True)
    logits = model.logits(weights, passed.hidden[:, -1:])[:, -1]
    return Prefill(cache.merge_prefix(passed.cache), logits, last_token(passed.captured))


def last_token(captured: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the captured values at the last token of a forward pass."""
    return {name: x[..., -1, :] for name, x in captured.items()}


@jax.jit
def choose_first(
    logits: Logits,
    captured: dict[str, Array],
    choice: TokenSelection,
    batch_size: Int[Array, ""] | np.integer | None = None,
    generated: Room | None = None,
) -> tuple[DecodingState, DecodedChunk]:
    """Chooses the first new token of each batch element.

    Args:
        logits: float32 [batch, vocab], at the last token of each prompt.
        captured: the values captured at the last token of each prompt.
        choice: how tokens are chosen.
        batch_size: int [], the number of batch elements that are not padding; None if no element is
            padding. Padding elements count as stopped.
        generated: int [batch, room], filled with NO_TOKEN; required for constraints.

    Returns:
        (the state after the step, the output of the step with a leading axis of size 1).
    """
    size = len(logits)
    is_padding = jnp.arange(size, dtype=jnp.int32) >= (size if batch_size is None else batch_size)
    tokens = jnp.zeros(size, jnp.int32)
    stop_state = None if choice.stop_table is None else tokens
    before = DecodingState(tokens, is_padding, jnp.int32(0), generated, stop_state)
    state, output = _choose(logits, captured, before, choice)
    return state, jax.tree.map(lambda x: x[None], output)


def _choose(
    logits: Logits, captured: dict[str, Array], before: DecodingState, choice: TokenSelection
) -> tuple[DecodingState, DecodedChunk]:
    """Chooses the next token of each batch element; returns (the next state, the step's output)."""
    _, stopped, step, generated, stop_state = before
    scores = logits
    if choice.rules is not None and generated is not None:
        scores = choice.rules.apply(logits, generated, step)
    if choice.allowed is not None:
        masked = jnp.where(choice.allowed, scores, -jnp.inf)
        # If the constraints exclude all tokens that the grammar allows, only the grammar applies.
        is_possible = (masked > -jnp.inf).any(axis=-1, keepdims=True)
        scores = jnp.where(is_possible, masked, jnp.where(choice.allowed, logits, -jnp.inf))
    token = sample_tokens(choice.sampler, choice.key, step, scores, choice.indices)
    if generated is not None:
        generated = jax.lax.dynamic_update_slice(generated, token[:, None], (0, step))
    log_prob = -token_losses(logits, token)
    tokens, log_probs = jnp.where(stopped, NO_TOKEN, token), jnp.where(stopped, 0.0, log_prob)
    stopped |= (token[:, None] == choice.stops).any(axis=-1)
    if choice.stop_table is not None and stop_state is not None:
        stop_state = choice.stop_table[stop_state, token].astype(jnp.int32)
        stopped |= stop_state == len(choice.stop_table) - 1
    after = DecodingState(token, stopped, step + 1, generated, stop_state)
    return after, DecodedChunk(tokens, log_probs, captured)


@partial(jax.jit, static_argnums=(0, 5, 7), donate_argnums=(2, 3))
def decode_chunk(
    model: LanguageModel,
    weights: Weights,
    cache: Cache,
    state: DecodingState,
    choice: TokenSelection,
    live: int | None,
    hooks: Hooks = NO_HOOKS,
    steps: int = STEPS,
) -> tuple[Cache, DecodingState, DecodedChunk]:
    """Generates `steps` tokens per batch element; attention reads the first `live` cache slots."""

    def step(
        carry: tuple[LoopCache, DecodingState], _: None
    ) -> tuple[tuple[LoopCache, DecodingState], DecodedChunk]:
        cache, state = carry
        inputs, now = Inputs(state.token[:, None]), hooks.at_step(state.step)
        passed = model.forward(weights, inputs, cache.to_cache(), hooks=now)
        logits = model.logits(weights, passed.hidden)[:, -1]
        state, output = _choose(logits, last_token(passed.captured), state, choice)
        return (LoopCache.from_cache(passed.cache), state), output

    carry = LoopCache.from_cache(cache.live_prefix(live)), state
    (prefix, state), outputs = jax.lax.scan(step, carry, length=steps)
    return cache.merge_prefix(prefix.to_cache()), state, outputs
