"""The loop of `generate`: reads the prompts, then runs compiled blocks of steps.

The number of steps of a block is fixed (a `lax.scan`), so an accelerator never waits for the host.
After each block the host checks whether every row has stopped. Shapes come in buckets (prompts of
2ⁿ or 3 · 2ⁿ tokens, 3 · 2ⁿ slots, batches of 2ⁿ or 3 · 2ⁿ rows), so that few programs are compiled.
The cache starts with the slots of the first block and grows while rows continue.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from jaxformer.decoding.autoregressive import check_finite_logits, check_not_traced, start_captured
from jaxformer.decoding.cache_slots import live_slots, prompt_bucket, slots, with_slots
from jaxformer.decoding.constraints import NO_TOKEN, constraints_of_call, rules_of
from jaxformer.decoding.prepared import prepare, weights_of
from jaxformer.decoding.result import Generation, by_position, collected, first_rows, new_tokens
from jaxformer.decoding.sampling import Sampler, default_sampler
from jaxformer.decoding.steps import STEPS, Choice, decode_block, first_token, prefill
from jaxformer.functional.family import CacheSize
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.taps import Patch
from jaxformer.models.autoregressive import require_autoregressive
from jaxformer.models.check import checked_hooks
from jaxformer.models.config.check import whole_number
from jaxformer.models.config.generation import Constraints
from jaxformer.models.explicit_axes import in_auto_axes
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.models.mesh import to_host
from jaxformer.models.rows import batch_bucket, padded, row_of_ids, with_batch_size

Prompts = Sequence[Sequence[int]] | Int[Array | np.ndarray, "batch length"]


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
    capture: Iterable[str] = (),
    patch: Mapping[str, Patch] | None = None,
) -> Generation:
    """Continues each prompt by up to `max_new_tokens` tokens.

    Memory follows the length that the rows reach, not `max_new_tokens`. Batches are filled up to a
    bucket of batch sizes, unless there is a patch; the additional rows are not returned.

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
        on_tokens: called after every block of steps with the new tokens of each row.
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
    key = None if sampler.greedy else key
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
    batch_size, width = len(texts), prompt_bucket(max(map(len, texts)))
    # A patch may have one entry for each of the caller's rows.
    rows = batch_size if hooks.patch else batch_bucket(batch_size)
    texts, source = (with_batch_size(x, rows) for x in (texts, source))
    first_slots = slots(width + (STEPS if max_new_tokens > 1 else 0))
    size, ready = CacheSize(rows, first_slots), {"prepared": weights}
    cache, read = start_captured(model, ready, source, size, hooks.at_step(0))
    passed = prefill(model, weights, Inputs(*padded(texts, width, left=True)), cache, hooks)
    found, room = [], max_new_tokens
    num_keys = slots(width + -(-(max_new_tokens - 1) // STEPS) * STEPS)
    rules = rules_of(constraints, texts, width, max_new_tokens, stops, source)
    choice = Choice(sampler.arrays(), key, stops, rules)
    generated = None if rules is None else np.full((rows, num_keys), NO_TOKEN, np.int32)
    state, new = first_token(passed, choice, np.int32(batch_size), generated)
    while True:
        found.append(jax.tree.map(to_host, new))
        wanted = found[-1].log_probs[:, :room]
        check_finite_logits(np.isnan(wanted).any(axis=1), variables)
        if on_tokens:
            on_tokens(new_tokens(found[-1].tokens[:batch_size], room))
        room -= found[-1].tokens.shape[1]
        if room <= 0 or to_host(state.stopped).all():
            break
        needed = width + max_new_tokens - room - 1 + STEPS
        state = state._replace(cache=with_slots(state.cache, needed))
        live = live_slots(state.cache, needed)
        state, new = decode_block(model, weights, state, choice, live, hooks)
    generation = collected(found, max_new_tokens, model.layer_points, num_keys)
    weights_by_position = by_position(generation.captured, list(map(len, texts)), width)
    captured = {**jax.tree.map(to_host, read), **generation.captured, **weights_by_position}
    generation = generation._replace(captured=captured)
    return first_rows(generation, batch_size, model.layer_points)


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
