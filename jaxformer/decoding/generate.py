"""The incremental loop: prefill and the first token, then compiled blocks of steps with a test for
the end between.

Inside a block the trip count is fixed (a `lax.scan`), so an accelerator never waits for the host;
the host looks once a block whether every row has stopped. Shapes come in buckets (prompts of 2ⁿ or
3 · 2ⁿ tokens, 3 · 2ⁿ live slots), so a length seen before never compiles again.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.decoding.autoregressive import (
    live_slots,
    prompt_bucket,
    refuse_broken,
    refuse_tracers,
    slots,
    start_captured,
)
from jaxformer.decoding.prepared import prepared_variables, weights_of
from jaxformer.decoding.protocol import require_autoregressive
from jaxformer.decoding.sampling import Sampler, SamplerArrays, sample_tokens
from jaxformer.functional.losses import token_losses
from jaxformer.functional.taps import NO_HOOKS, Hooks, Patch
from jaxformer.models.check import checked_hooks
from jaxformer.models.config.check import whole_number
from jaxformer.models.placement import to_host
from jaxformer.models.rows import padded, row_of_ids

STEPS = 16  # tokens a block


class Generation(NamedTuple):
    """tokens: int [batch, max_new_tokens], 0 after the end; lengths: int [batch], the stop token
    counted; log_probs: float32 [batch, max_new_tokens], log P of each token under the model itself,
    before temperature and truncation, 0 after the end. captured: {name: [layers, batch,
    max_new_tokens, …]}, at t what passed while token t was predicted (without the axis of layers
    for points outside of them), 0 after the end; the keys of "attention.weights" are the positions
    of the row, prompt first. Points of an encoder, which reads once: [layers, sources, …]."""

    tokens: np.ndarray
    lengths: np.ndarray
    log_probs: np.ndarray
    captured: dict


class Prefill(NamedTuple):
    """The prompts, read."""

    cache: object
    logits: jax.Array  # [batch, vocab], of the last token
    captured: dict  # what passed while that was read


class State(NamedTuple):
    """What a step leaves for the next."""

    cache: object
    token: jax.Array  # int [batch], chosen and not read yet
    stopped: jax.Array  # bool [batch]
    step: jax.Array  # int [], tokens generated


def generate(
    model,
    variables,
    prompts,
    *,
    max_new_tokens: int,
    sampler: Sampler = Sampler(),  # noqa: B008 (frozen)
    key=None,
    stop_tokens: Iterable[int] = (),
    source=None,
    on_tokens: Callable[[list[list[int]]], None] | None = None,
    capture: Iterable[str] = (),
    patch: Mapping[str, Patch] | None = None,
) -> Generation:
    """Continue each prompt by up to max_new_tokens tokens.

    prompts: lists of ids of any lengths (none empty), or an int array [batch, length].
    key: a jax.random key; needed unless the sampler is greedy. Row i draws its t-th token with
    fold_in(fold_in(key, i), t), so a row does not depend on its neighbours and the same key gives
    the same text. stop_tokens end a row. source: for a model that reads one, a row of ids for each
    prompt. on_tokens is called after every block of steps with the new tokens of each row.
    capture, patch: names of `model.points` to read out and values to put in place, as for
    `inspect`; a patch may name positions of the row, and steps.
    FloatingPointError if logits are not finite: no token follows from them.
    """
    require_autoregressive(model)
    refuse_tracers("generate", variables, prompts, source, key)
    if key is None and not sampler.greedy:
        raise ValueError(
            f"key is None, but sampling at temperature {sampler.temperature} needs one "
            "(jax.random.key(seed)); only temperature 0 does without"
        )
    if key is not None and not is_key(key):
        raise ValueError(f"key is {key!r}; it must be one key, jax.random.key(seed)")
    prompts, stops = check_prompts(model, prompts, max_new_tokens, stop_tokens, source)
    key = None if sampler.greedy else key
    batch_size, longest = len(prompts), max(map(len, prompts))
    width = prompt_bucket(longest)
    variables = prepared_variables(model, variables)
    weights = weights_of(variables)
    hooks = checked_hooks(capture, patch, model.points, in_steps=True)
    capacity = slots(width + -(-(max_new_tokens - 1) // STEPS) * STEPS)
    cache, read = start_captured(model, variables, batch_size, capacity, source, hooks.at_step(0))
    passed = prefill(model, weights, *padded(prompts, width, left=True), cache, hooks)
    arrays, found, room = sampler.arrays(), [], max_new_tokens
    state, new = first_token(passed, arrays, key, stops)
    while True:
        found.append(jax.tree.map(to_host, new))
        wanted = found[-1].log_probs[:, :room]
        refuse_broken(np.isnan(wanted).any(axis=1), variables)
        if on_tokens:
            on_tokens(_new_tokens(found[-1].tokens, room))
        room -= found[-1].tokens.shape[1]
        if room <= 0 or to_host(state.stopped).all():
            break
        live = live_slots(state.cache, width + max_new_tokens - room - 1 + STEPS)
        state, new = decode_block(model, weights, state, arrays, key, stops, live, hooks)
    generation = collected(found, max_new_tokens, model.layer_points)
    weights_by_position = by_position(generation.captured, list(map(len, prompts)), width)
    captured = {**read, **generation.captured, **weights_by_position}
    return generation._replace(captured=jax.tree.map(to_host, captured))


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def prefill(model, weights, tokens, segments, cache, hooks: Hooks = NO_HOOKS) -> Prefill:
    """Read the prompts, padded on the left, and keep the logits of the last position alone."""
    prefix = cache.live_prefix(live_slots(cache, tokens.shape[1]))
    hooks = hooks.at_step(0)
    passed = model.forward(weights, tokens, cache=prefix, segments=segments, hooks=hooks)
    return Prefill(
        cache.merge_prefix(passed.cache),
        model.logits(weights, passed.hidden[:, -1:])[:, -1],
        last_token(passed.captured, cache.capacity),
    )


class Block(NamedTuple):
    """What some steps give. tokens, −1 after the end, and log_probs: [batch, steps]; captured:
    {name: [steps, …]}."""

    tokens: jax.Array
    log_probs: jax.Array
    captured: dict


def first_token(passed: Prefill, arrays: SamplerArrays | None, key, stops) -> tuple[State, Block]:
    """The first token of each row."""
    token, stopped, first = choose_first(passed.logits, passed.captured, arrays, key, stops)
    return State(passed.cache, token, stopped, jnp.int32(1)), first


@jax.jit
def choose_first(logits, captured, arrays, key, stops):
    nobody = jnp.zeros(len(logits), bool)
    token, stopped, first = _choose(logits, captured, nobody, jnp.int32(0), arrays, key, stops)
    return token, stopped, _in_rows(jax.tree.map(lambda x: x[None], first))


def _in_rows(steps: Block) -> Block:
    """The outputs of steps one after the other, as a block."""
    return steps._replace(tokens=steps.tokens.T, log_probs=steps.log_probs.T)


def _choose(logits, captured, stopped, step, arrays, key, stops):
    """(each row's next token, who has stopped then, what the step gives)."""
    token = sample_tokens(arrays, key, step, logits)
    log_prob = -token_losses(logits, token)
    tokens, log_probs = jnp.where(stopped, -1, token), jnp.where(stopped, 0.0, log_prob)
    stopped |= (token[:, None] == stops).any(axis=-1)
    return token, stopped, Block(tokens, log_probs, captured)


@partial(jax.jit, static_argnums=(0, 6), donate_argnums=2)
def decode_block(
    model,
    weights,
    state: State,
    arrays: SamplerArrays | None,
    key,
    stops,
    live: int | None,
    hooks: Hooks = NO_HOOKS,
) -> tuple[State, Block]:
    """STEPS tokens. The steps attend to the first `live` slots alone, whatever the capacity of the
    cache."""
    cache = state.cache

    def step(state, _):
        now = hooks.at_step(state.step)
        passed = model.forward(weights, state.token[:, None], cache=state.cache, hooks=now)
        logits = model.logits(weights, passed.hidden)[:, -1]
        captured = last_token(passed.captured, cache.capacity)
        token, stopped, output = _choose(
            logits, captured, state.stopped, state.step, arrays, key, stops
        )
        return State(passed.cache, token, stopped, state.step + 1), output

    state = state._replace(cache=cache.live_prefix(live))
    state, steps = jax.lax.scan(step, state, length=STEPS)
    return state._replace(cache=cache.merge_prefix(state.cache)), _in_rows(steps)


def last_token(captured, slots: int | None) -> dict:
    """What was captured at the last token of a pass; the weights over all slots of the cache."""
    found = {name: x[..., -1, :] for name, x in captured.items()}
    name = "attention.weights"
    if name in found:
        missing = slots - found[name].shape[-1]
        found[name] = jnp.pad(found[name], [(0, 0)] * (found[name].ndim - 1) + [(0, missing)])
    return found


def is_key(key) -> bool:
    """Whether this is one random key: a typed one or, as of old, two words."""
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return shape == ()
    return dtype == jnp.uint32 and shape == (2,)


def check_prompts(model, prompts, max_new_tokens, stop_tokens, source):
    """(the prompts, the stop tokens) as arrays, or a ValueError that names what is wrong."""
    config = model.config
    whole_number("max_new_tokens", max_new_tokens, 1)
    if not isinstance(stop_tokens, Iterable):
        raise ValueError(f"stop_tokens is {stop_tokens!r}; it must be a collection of token ids")
    stops = row_of_ids("stop_tokens", list(stop_tokens), config.vocab_size)
    prompts = [row_of_ids(f"prompt {i}", row, config.vocab_size) for i, row in enumerate(prompts)]
    if not prompts:
        raise ValueError("prompts is empty; it must hold at least one prompt")
    for i, ids in enumerate(prompts):
        if not ids.size:
            raise ValueError(f"prompt {i} is empty; a model needs at least one token to go on from")
        if ids.size < model.minimum_prefill:
            raise ValueError(
                f"prompt {i} has {ids.size} tokens; the first {model.minimum_prefill} must be read "
                "at once"
            )
        if ids.size + max_new_tokens > config.max_length:
            raise ValueError(
                f"prompt {i} has {ids.size} tokens and max_new_tokens is {max_new_tokens}; "
                f"together they must not pass max_length, {config.max_length}"
            )
    if source is not None and len(source) != len(prompts):
        raise ValueError(f"source has {len(source)} rows; there are {len(prompts)} prompts")
    return prompts, np.unique(stops).astype(np.int32)


def _new_tokens(tokens, room: int) -> list[list[int]]:
    """A block's tokens, row by row, without what comes after an end."""
    return [[int(token) for token in row[:room] if token >= 0] for row in tokens]


def collected(found: list[Block], max_new_tokens: int, layer_points) -> Generation:
    """The blocks one after the other."""

    def after_each_other(blocks):
        whole = np.concatenate(blocks)[:max_new_tokens]
        return np.pad(whole, [(0, max_new_tokens - len(whole)), *[(0, 0)] * (whole.ndim - 1)])

    tokens = after_each_other([block.tokens.T + 1 for block in found]).T - 1  # −1 is the end
    log_probs = after_each_other([block.log_probs.T for block in found]).T
    is_there, captured = tokens >= 0, {}
    for name in found[0].captured:
        x = after_each_other([block.captured[name] for block in found])
        batch_axis = 1 if name in layer_points else 0
        x = np.moveaxis(x, 0, batch_axis + 1)
        mask = is_there.reshape(*is_there.shape, *[1] * (x.ndim - batch_axis - 2))
        captured[name] = np.where(mask, x, 0)
    return Generation(np.maximum(tokens, 0), is_there.sum(axis=1), log_probs, captured)


def by_position(captured, lengths: list[int], width: int) -> dict:
    """The weights of attention with the positions of each row as keys: prompts of these lengths
    stand at the end of `width` slots."""
    name = "attention.weights"
    if name not in captured:
        return {}
    weights, found = captured[name], np.zeros_like(captured[name])
    for row, length in enumerate(lengths):
        own = weights[:, row, ..., width - length :]
        found[:, row, ..., : own.shape[-1]] = own
    return {name: found}
