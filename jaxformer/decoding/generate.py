"""The incremental loop: prefill, then compiled blocks of steps with a test for the end between.

Inside a block the trip count is fixed (a `lax.scan`), so an accelerator never waits for the host;
the host looks once a block whether every row has stopped. Shapes come in buckets (prompts of 2ⁿ or
3 · 2ⁿ tokens, 3 · 2ⁿ live slots), so a length seen before never compiles again.
"""

from collections.abc import Callable, Iterable
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
    start,
)
from jaxformer.decoding.prepared import prepared_variables, require_autoregressive, weights_of
from jaxformer.decoding.sampling import Sampler, SamplerArrays, sample_tokens
from jaxformer.functional.losses import token_losses
from jaxformer.models.config.check import whole_number
from jaxformer.models.rows import padded, row_of_ids

STEPS = 16  # tokens a block


class Generation(NamedTuple):
    """tokens: int [batch, max_new_tokens], 0 after the end; lengths: int [batch], the stop token
    counted; log_probs: float32 [batch, max_new_tokens], log P of each token under the model itself,
    before temperature and truncation, 0 after the end."""

    tokens: np.ndarray
    lengths: np.ndarray
    log_probs: np.ndarray


class State(NamedTuple):
    """What a step leaves for the next."""

    cache: object
    logits: jax.Array  # [batch, vocab], of the last token read
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
) -> Generation:
    """Continue each prompt by up to max_new_tokens tokens.

    prompts: lists of ids of any lengths (none empty), or an int array [batch, length].
    key: a jax.random key; needed unless the sampler is greedy. Row i draws its t-th token with
    fold_in(fold_in(key, i), t), so a row does not depend on its neighbours and the same key gives
    the same text. stop_tokens end a row. source: for a model that reads one, a row of ids for each
    prompt. on_tokens is called after every block of steps with the new tokens of each row.
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
    blocks = -(-max_new_tokens // STEPS)
    variables = prepared_variables(model, variables)
    weights = weights_of(variables)
    cache = start(model, variables, batch_size, slots(width + blocks * STEPS), source)
    state = prefill(model, weights, *padded(prompts, width, left=True), cache)
    arrays, tokens, log_probs, read = sampler.arrays(), [], [], width
    for block in range(blocks):
        read += STEPS
        state, new = decode_block(
            model, weights, state, arrays, key, stops, live_slots(state.cache, read)
        )
        tokens.append(np.asarray(new[0]))
        log_probs.append(np.asarray(new[1]))
        wanted = log_probs[-1][:, : max_new_tokens - STEPS * block]
        refuse_broken(np.isnan(wanted).any(axis=1), variables)
        if on_tokens:
            on_tokens(_without_padding(tokens, max_new_tokens))
        if np.asarray(state.stopped).all():
            break
    return _collect(tokens, log_probs, max_new_tokens)


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def prefill(model, weights, tokens, segments, cache) -> State:
    """Read the prompts, padded on the left, and keep the logits of the last position alone."""
    narrow = cache.live_prefix(live_slots(cache, tokens.shape[1]))
    logits, narrow = model.advance(weights, tokens, narrow, segments, last_only=True)
    stopped = jnp.zeros(len(tokens), bool)
    return State(cache.merge_prefix(narrow), logits[:, -1], stopped, jnp.int32(0))


@partial(jax.jit, static_argnums=(0, 6), donate_argnums=2)
def decode_block(model, weights, state: State, arrays: SamplerArrays | None, key, stops, live: int):
    """STEPS tokens; returns (state, (tokens, log_probs)), both [batch, STEPS], −1 after the end.

    The steps attend to the first `live` slots alone, whatever the capacity of the cache.
    """
    wide = state.cache

    def step(state, _):
        token = sample_tokens(arrays, key, state.step, state.logits)
        log_prob = -token_losses(state.logits, token)
        logits, cache = model.advance(weights, token[:, None], state.cache)
        stopped = state.stopped | (token[:, None] == stops).any(axis=-1)
        output = (
            jnp.where(state.stopped, -1, token),
            jnp.where(state.stopped, 0.0, log_prob),
        )
        return State(cache, logits[:, -1], stopped, state.step + 1), output

    state = state._replace(cache=wide.live_prefix(live))
    state, (tokens, log_probs) = jax.lax.scan(step, state, length=STEPS)
    return state._replace(cache=wide.merge_prefix(state.cache)), (tokens.T, log_probs.T)


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


def _without_padding(blocks, max_new_tokens) -> list[list[int]]:
    """The newest block's tokens, row by row, without what comes after an end."""
    room = max_new_tokens - STEPS * (len(blocks) - 1)
    return [[int(token) for token in row[:room] if token >= 0] for row in blocks[-1]]


def _collect(tokens, log_probs, max_new_tokens) -> Generation:
    tokens, log_probs = (np.concatenate(x, axis=1)[:, :max_new_tokens] for x in (tokens, log_probs))
    missing = [(0, 0), (0, max_new_tokens - tokens.shape[1])]
    tokens = np.pad(tokens, missing, constant_values=-1)
    lengths = (tokens >= 0).sum(axis=1)
    return Generation(np.maximum(tokens, 0), lengths, np.pad(log_probs, missing))
