"""The loop of `generate`: reads the prompts, then runs compiled blocks of steps.

The number of steps of a block is fixed (a `lax.scan`), so an accelerator never waits for the host.
After each block the host checks whether every row has stopped. Shapes come in buckets (prompts of
2ⁿ or 3 · 2ⁿ tokens, 3 · 2ⁿ slots, batches of 2ⁿ or 3 · 2ⁿ rows), so that few programs are compiled.
The cache starts with the slots of the first block and grows while rows continue.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from jaxformer.decoding.autoregressive import (
    check_finite_logits,
    check_not_traced,
    prepare,
    start_cache,
    weights_of,
)
from jaxformer.decoding.batches import Batch, batches_of, in_order, one_batch, rows_at_once
from jaxformer.decoding.constraints import NO_TOKEN, constraints_of_call, rules_of
from jaxformer.decoding.loop_cache import live_slots, slots, with_slots
from jaxformer.decoding.sampling import Sampler, default_sampler
from jaxformer.decoding.steps import (
    STEPS,
    WEIGHTS,
    Block,
    Choice,
    choose_first,
    decode_block,
    prefill,
)
from jaxformer.functional.cache.key_values import CacheSize
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.taps import Hooks, Patch
from jaxformer.functional.trees import Weights
from jaxformer.models.autoregressive import require_autoregressive
from jaxformer.models.check import checked_hooks
from jaxformer.models.config.check import whole_number
from jaxformer.models.config.generation import Constraints
from jaxformer.models.explicit_axes import in_auto_axes
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.models.mesh import to_host
from jaxformer.models.rows import padded, row_of_ids

Prompts = Sequence[Sequence[int]] | Int[Array | np.ndarray, "batch length"]


class Generation(NamedTuple):
    """Result of `generate`.

    Attributes:
        tokens: int [batch, max_new_tokens], 0 after the end of a row.
        lengths: int [batch], number of new tokens, the stop token included.
        log_probs: float32 [batch, max_new_tokens], log P of each token under the model, before
            temperature and truncation, 0 after the end.
        captured: {name: [layers, batch, max_new_tokens, …]}, entry t from the pass that predicted
            token t, 0 after the end. Points outside of the layers have no layer axis. The keys of
            "attention.weights" are the positions of the row, prompt first. Points of an encoder,
            which reads once, are [layers, sources, …].
    """

    tokens: np.ndarray
    lengths: np.ndarray
    log_probs: np.ndarray
    captured: dict[str, np.ndarray]


@in_auto_axes
def generate(
    model: LanguageModel,
    variables: Variables,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    sampler: Sampler | None = None,
    key: PRNGKeyArray | None = None,
    stop_tokens: Iterable[int] = (),
    source: Any = None,
    constraints: Constraints | None = None,
    on_tokens: Callable[[list[list[int]]], None] | None = None,
    batch_size: int | None = None,
    capture: Iterable[str] = (),
    patch: Mapping[str, Patch] | None = None,
) -> Generation:
    """Continues each prompt by up to `max_new_tokens` tokens.

    Many prompts are computed in batches of similar lengths, and returned in the order given. Memory
    follows the length that the rows reach, not `max_new_tokens`. Batches are filled up to a bucket
    of batch sizes, unless there is a patch; the additional rows are not returned. With `capture` or
    `patch`, whose arrays have entries of all rows, the call is one batch.

    Args:
        model: an autoregressive model.
        variables: its variables, or the result of `prepare`.
        prompts: lists of ids of any lengths (none empty), or an int array [batch, length].
        max_new_tokens: the most new tokens of a row.
        sampler: how to choose a token; None: that of `model.generation`, or Sampler().
        key: a jax.random key, required unless the sampler is greedy. Row i draws its t-th token
            with fold_in(fold_in(key, i), t), so a row does not depend on other rows.
        stop_tokens: ids, each of which ends a row.
        source: for a model that reads one, a row of ids for each prompt.
        constraints: rules about the next token; None: those of `model.generation`.
        on_tokens: called after every block of steps with the new tokens of each row, which are none
            for rows of other batches.
        batch_size: the largest number of prompts to compute at once. None: as many as have prompts
            of 16,384 tokens, and caches and logits of 1 GiB, all at the full length. With a mesh in
            context, None means all.
        capture: names of points to capture, from `model.points`.
        patch: {name of a point: Patch}, values to replace; a Patch may name positions and steps.

    Returns:
        A `Generation`: the new tokens of each row with their lengths and log-probabilities, and the
        captured values.

    Raises:
        ValueError: an argument is not accepted.
        FloatingPointError: logits of a row are not finite.
    """
    require_autoregressive(model)
    check_not_traced("generate", variables, prompts, source, key)
    sampler = default_sampler(model.generation) if sampler is None else sampler
    constraints = constraints_of_call(model, constraints)
    if key is None and not sampler.greedy:
        raise ValueError(
            f"key is None, but sampling at temperature {sampler.temperature} needs one "
            "(jax.random.key(seed)); only temperature 0 needs none"
        )
    if key is not None and not is_key(key):
        raise ValueError(f"key is {key!r}; it must be one key, jax.random.key(seed)")
    texts, stops = check_prompts(model, prompts, max_new_tokens, stop_tokens, source)
    weights = weights_of(prepare(model, variables))
    hooks = checked_hooks(
        capture,
        patch,
        model.points,
        # The last generated token is not read.
        length=max(map(len, texts)) + max_new_tokens - 1,
        source_length=None if source is None else max(map(np.size, source)),
        steps=max_new_tokens,
    )
    choice = Choice(sampler.arrays(), None if sampler.greedy else key, stops)
    call = _Call(
        model, variables, weights, choice, constraints, max_new_tokens, len(texts), hooks, on_tokens
    )
    most = rows_at_once(model, weights, texts, source, max_new_tokens, batch_size)
    if hooks.patch:  # a patch may have one entry for each of the caller's rows
        batches = [one_batch(texts, source, len(texts))]
    else:
        batches = batches_of(texts, source, len(texts) if hooks.capture else most)
    return in_order([_continued(call, batch) for batch in batches], batches)


@dataclass(frozen=True)
class _Call:
    """The arguments of a call that all its batches share.

    Attributes:
        choice: how tokens are chosen, without what depends on the batch.
        num_rows: number of prompts of the call.
    """

    model: LanguageModel
    variables: Variables
    weights: Weights
    choice: Choice
    constraints: Constraints
    max_new_tokens: int
    num_rows: int
    hooks: Hooks
    on_tokens: Callable[[list[list[int]]], None] | None

    def report(self, tokens: Int[np.ndarray, "steps rows"], batch: Batch) -> None:
        """Calls `on_tokens` with the new tokens of a batch; the remaining rows have none."""
        if self.on_tokens is None:
            return
        found: list[list[int]] = [[] for _ in range(self.num_rows)]
        for row, ids in zip(batch.own_rows, tokens[:, : batch.batch_size].T, strict=True):
            found[row] = ids[ids != NO_TOKEN].tolist()
        self.on_tokens(found)


def _continued(call: _Call, batch: Batch) -> Generation:
    """Continues the prompts of one batch."""
    model, weights, hooks, most = call.model, call.weights, call.hooks, call.max_new_tokens
    texts, source, width, rows = batch.prompts, batch.source, batch.width, len(batch.rows)
    first_slots = slots(width + (STEPS if most > 1 else 0))
    num_keys = slots(width + -(-(most - 1) // STEPS) * STEPS)
    # Attention weights have one axis of keys in all layers.
    ring = False if WEIGHTS in (*hooks.capture, *hooks.patch) else None
    size, sources = CacheSize(rows, first_slots, ring, num_keys), model.read_source(source)
    cache, read = start_cache(model, weights, sources, size, hooks.at_step(0))
    passed = prefill(model, weights, Inputs(*padded(texts, width, left=True)), cache, hooks)
    found, room = [], most
    rules = rules_of(call.constraints, texts, width, most, call.choice.stops, source)
    choice = call.choice._replace(rules=rules, rows=batch.rows.astype(np.int32))
    generated = None if rules is None else np.full((rows, num_keys), NO_TOKEN, np.int32)
    batch_size = np.int32(batch.batch_size)
    state, new = choose_first(passed.logits, passed.captured, choice, batch_size, generated)
    state = state._replace(cache=passed.cache)
    while True:
        found.append(jax.tree.map(to_host, new))
        tokens, log_probs, _ = found[-1]
        check_finite_logits(np.isnan(log_probs[:room]).any(axis=0), call.variables, batch.rows)
        call.report(tokens[:room], batch)
        room -= len(tokens)
        if room <= 0 or to_host(state.stopped).all():
            break
        needed = width + most - room - 1 + STEPS
        state = state._replace(cache=with_slots(state.cache, needed))
        live = live_slots(state.cache, needed)
        state, new = decode_block(model, weights, state, choice, live, hooks)
    return _collected(call, batch, found, jax.tree.map(to_host, read), num_keys)


def _collected(
    call: _Call,
    batch: Batch,
    blocks: Sequence[Block],
    read: Mapping[str, np.ndarray],
    num_keys: int,
) -> Generation:
    """Concatenates the blocks of a batch, without the repetitions of its first row.

    Args:
        call: the call.
        batch: the batch.
        blocks: the blocks, in order.
        read: the values captured while the sources were read.
        num_keys: number of keys of the attention weights, of which early blocks have fewer.
    """
    number, most, layer_points = batch.batch_size, call.max_new_tokens, call.model.layer_points

    def joined(steps: Sequence[Array | np.ndarray], fill: int = 0) -> np.ndarray:
        whole = np.concatenate(steps)[:most]
        widths = [(0, most - len(whole)), *[(0, 0)] * (whole.ndim - 1)]
        return np.pad(whole, widths, constant_values=fill)

    def first_rows(name: str, x: np.ndarray) -> np.ndarray:
        return x[:, :number] if name in layer_points else x[:number]

    tokens = joined([block.tokens for block in blocks], NO_TOKEN).T[:number]
    log_probs = joined([block.log_probs for block in blocks]).T[:number]
    is_there = tokens != NO_TOKEN
    captured = {name: first_rows(name, x) for name, x in read.items()}
    for name in blocks[0].captured:
        steps = [block.captured[name] for block in blocks]
        if name == WEIGHTS:
            widths = [(*[(0, 0)] * (x.ndim - 1), (0, num_keys - x.shape[-1])) for x in steps]
            steps = list(map(np.pad, steps, widths))
        batch_axis = 1 if name in layer_points else 0
        x = first_rows(name, np.moveaxis(joined(steps), 0, batch_axis + 1))
        mask = is_there.reshape(*is_there.shape, *[1] * (x.ndim - batch_axis - 2))
        captured[name] = np.where(mask, x, 0)
    if WEIGHTS in captured:
        lengths = [len(x) for x in batch.prompts[:number]]
        captured[WEIGHTS] = _by_position(captured[WEIGHTS], lengths, batch.width)
    return Generation(np.where(is_there, tokens, 0), is_there.sum(axis=1), log_probs, captured)


def _by_position(weights: np.ndarray, lengths: Sequence[int], width: int) -> np.ndarray:
    """Returns attention weights with the positions of each row as keys, not its slots.

    Args:
        weights: [layers, rows, …, slots].
        lengths: number of prompt tokens of each row; they end at slot `width - 1`.
        width: number of slots of the prompts.
    """
    found = np.zeros_like(weights)
    for row, length in enumerate(lengths):
        row_weights = weights[:, row, ..., width - length :]
        found[:, row, ..., : row_weights.shape[-1]] = row_weights
    return found


def is_key(key: object) -> bool:
    """Returns whether this is one random key: a typed key, or a legacy one of two words."""
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return shape == ()
    return dtype == jnp.uint32 and shape == (2,)


def check_prompts(
    model: LanguageModel,
    prompts: Prompts,
    max_new_tokens: int,
    stop_tokens: Iterable[int],
    source: Any,
) -> tuple[list[np.ndarray], Int[np.ndarray, " stops"]]:
    """Returns (prompts, stop tokens) as arrays.

    Raises:
        ValueError: a prompt, a stop token, `max_new_tokens` or the number of sources is not
            accepted.
    """
    config = model.config
    whole_number("max_new_tokens", max_new_tokens, 1)
    if not isinstance(stop_tokens, Iterable):
        raise ValueError(f"stop_tokens is {stop_tokens!r}; it must be a collection of token ids")
    stops = row_of_ids("stop_tokens", list(stop_tokens), config.vocab_size)
    rows = [row_of_ids(f"prompt {i}", row, config.vocab_size) for i, row in enumerate(prompts)]
    if not rows:
        raise ValueError("prompts is empty; it must hold at least one prompt")
    for i, ids in enumerate(rows):
        if not ids.size:
            raise ValueError(f"prompt {i} is empty; a model needs at least one token to continue")
        if ids.size < model.minimum_prefill:
            raise ValueError(
                f"prompt {i} has {ids.size} tokens; the first {model.minimum_prefill} must be read "
                "in one call, so it needs at least that many"
            )
        if ids.size + max_new_tokens > config.max_length:
            raise ValueError(
                f"prompt {i} has {ids.size} tokens and max_new_tokens is {max_new_tokens}; "
                f"together they must not exceed max_length, {config.max_length}"
            )
    if source is not None and len(source) != len(rows):
        raise ValueError(f"source has {len(source)} rows; there are {len(rows)} prompts")
    return rows, np.unique(stops).astype(np.int32)
