"""Start a cache, advance it, look inside, score a text: what every autoregressive model shares."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxformer.decoding.prepared import weights_of
from jaxformer.decoding.protocol import require_autoregressive
from jaxformer.functional.positions import continued_segments, document_positions
from jaxformer.functional.taps import NO_HOOKS, Hooks
from jaxformer.models.check import as_array, check_tokens, checked_hooks
from jaxformer.models.config.check import whole_number
from jaxformer.models.placement import to_host
from jaxformer.models.rows import bucket, power_of_two


def refuse_tracers(name: str, *trees) -> None:
    """ValueError inside jit, vmap or grad, for what runs a loop on the host."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(trees)):
        raise ValueError(
            f"{name} was called on traced arrays; its loop runs on the host, so inside jit, vmap "
            "or grad use start and advance"
        )


def refuse_broken(broken, variables) -> None:
    """FloatingPointError if some row's logits are NaN (broken: bool [batch]): no token follows from
    them. The message names the row, and the weights that are not finite, if any are."""
    if not broken.any():
        return
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    names = [jax.tree_util.keystr(path) for path, x in leaves if not jnp.isfinite(x).all()]
    why = f"nor are the weights {', '.join(names[:3])}" if names else "the weights are"
    raise FloatingPointError(f"the logits of row {int(broken.argmax())} are not finite; {why}")


def start(model, variables, batch_size: int, capacity: int, source=None, *, ring: bool = False):
    """An empty cache for `batch_size` rows of at most `capacity` tokens, padding counted.

    source: for a model that reads one, rows of ids of any lengths, or an int array [sources,
    length]. Each is encoded once, and serves batch_size / sources rows in turn.
    ring: slots are used again, so that a model with a sliding window goes on as long as one likes
    in `capacity` slots (with learned positions, to max_length). Its chunks are at most capacity −
    window + 1 tokens.
    """
    return start_captured(model, variables, batch_size, capacity, source, NO_HOOKS, ring=ring)[0]


def start_captured(model, variables, batch_size, capacity, source, hooks: Hooks, *, ring=False):
    """(The cache, what was captured while the source was read): see `start`."""
    require_autoregressive(model)
    batch_size = whole_number("batch_size", batch_size, 1)
    capacity = whole_number("capacity", capacity, 1)
    read = model.read_source(source)
    if read is not None and batch_size % len(read.tokens):
        raise ValueError(
            f"source has {len(read.tokens)} rows; batch_size, {batch_size}, must be a multiple of "
            "that"
        )
    if ring and model.reach is None:
        raise ValueError(
            f"ring is True; this {type(model).__name__} has no window, so it needs every slot"
        )
    reach = model.reach if ring else None
    return start_cache(model, weights_of(variables), batch_size, capacity, read, hooks, reach)


@partial(jax.jit, static_argnums=(0, 2, 3, 6))
def start_cache(model, weights, batch_size, capacity, source, hooks, reach):
    how = {} if reach is None else {"reach": reach}
    return model.start(weights, batch_size, capacity, source, hooks, **how)


def advance(model, variables, tokens, cache, segments=None):
    """Read any number of new tokens [batch, new]; returns (logits [batch, new, vocab], cache).

    segments: int [batch, new]; 0 is padding, which takes a slot but no position; None: every token
    is real. The cache given stays what it was; go on with the one returned. Called outside jit, the
    cost depends on the live length and not on the capacity (but for copying the cache), and more
    tokens than there are slots left is a ValueError; inside, it gives NaN. A loop of your own, of
    one row, is fastest on a CPU over `cache.live_prefix(cache.capacity)`.
    """
    require_autoregressive(model)
    if cache is None:
        raise ValueError(
            "cache is None; start gives one, and a pass over whole rows is model.apply"
        )
    seen = inspect(model, variables, tokens, cache, segments)
    return seen.logits, seen.cache


class Inspection(NamedTuple):
    """logits: float32 [batch, length, vocab]; captured: {name: the value that passed there}, the
    layer as the first axis of points inside the layers; cache: the one after these tokens, None
    where none was given."""

    logits: Array
    captured: dict
    cache: object


def inspect(
    model, variables, tokens, cache=None, segments=None, source=None, capture=(), patch=None
) -> Inspection:
    """A pass over whole rows or, with a cache, over the next tokens, and what passed through it.

    capture: names of `model.points`; patch: {name: Patch(where, value)}, put in place. source: for
    a model that reads one, where there is no cache, which has read it. Points of an encoder
    ("encoder.…") are there only where the source is read. Errors as for `advance`.
    """
    if cache is not None:
        require_autoregressive(model)
        if source is not None:
            raise ValueError("source was given with a cache; the cache has read its source")
    tokens, segments = as_array("tokens", tokens), as_array("segments", segments)
    check_tokens(tokens, model.config, segments)
    hooks = checked_hooks(capture, patch, model.points)
    if cache is None:
        read = model.read_source(source)
        if read is not None and len(read.tokens) != len(tokens):
            raise ValueError(f"source has {len(read.tokens)} rows; tokens have {len(tokens)}")
        model.check(variables)
        return _inspect(model, variables, jnp.asarray(tokens), None, segments, read, hooks, None)
    if any(name.startswith("encoder.") for name in (*hooks.capture, *hooks.patch)):
        raise ValueError("points of the encoder were asked for with a cache, which has read it")
    live = _check_room(model, cache, tokens, segments)
    run = _inspect_in_trace if isinstance(cache.length, jax.core.Tracer) else _inspect
    return run(model, variables, jnp.asarray(tokens), cache, segments, None, hooks, live)


def _inspect_in_trace(model, variables, tokens, cache, segments, source, hooks, live):
    weights, prefix = weights_of(variables), None
    if cache is not None:
        prefix = cache.live_prefix(live)
    passed = model.forward(
        weights, tokens, cache=prefix, segments=segments, source=source, hooks=hooks
    )
    after = None if cache is None else cache.merge_prefix(passed.cache)
    return Inspection(model.logits(weights, passed.hidden), passed.captured, after)


_inspect = partial(jax.jit, static_argnums=(0, 7))(_inspect_in_trace)


def _check_room(model, cache, tokens, segments) -> int | None:
    """The slots that are live after these tokens (None: all); ValueError if there is no room."""
    if not tokens.shape[1]:
        raise ValueError(f"tokens are {tokens.shape}; there must be at least one new token a row")
    rows = len(cache.cursor.position)
    if len(tokens) != rows:
        raise ValueError(f"tokens have {len(tokens)} rows; the cache was started for {rows}")
    traced = isinstance(cache.length, jax.core.Tracer)
    used = 0 if traced else int(cache.length)  # inside jit only shapes can be refused
    needed = used + tokens.shape[1]
    if cache.capacity is not None and needed > cache.capacity:
        raise ValueError(
            f"tokens are {tokens.shape[1]} a row, but the cache has {cache.capacity} slots with "
            f"{used} used; start one with a capacity of at least {needed}"
        )
    if not any(isinstance(x, jax.core.Tracer) for x in (tokens, segments, cache.length)):
        _check_reading(model, cache, needed, segments, tokens.shape[:2])
    return None if traced else live_slots(cache, needed)


def _check_reading(model, cache, needed: int, segments, shape):
    """Refuse a chunk that ends within a document's first tokens, if those must be read at once, or
    after more tokens of a document than there are positions."""
    least, most = model.minimum_prefill, model.config.max_length
    if cache.reach is not None and model.config.positions != "learned":
        most = np.iinfo(np.int32).max  # a ring goes on for as long as there are positions
    if least == 1 and needed <= most:
        return  # nothing to find
    with jax.ensure_compile_time_eval():  # inside somebody's jit too, where nothing is traced
        segments = continued_segments(segments, cache.cursor, shape)
        read = to_host(document_positions(jnp.asarray(segments), cache.cursor)[2].position)
    short, long = (read > 0) & (read < least), read > most
    if short.any():
        row = int(short.argmax())
        raise ValueError(
            f"row {row} ends after {read[row]} tokens of a document, whose first {least} see one "
            "another both ways; read them in one chunk"
        )
    if long.any():
        row = int(long.argmax())
        raise ValueError(
            f"row {row} ends after {read[row]} tokens of a document; max_length is {most} positions"
        )


def live_slots(cache, needed: int) -> int | None:
    """The static number of slots to attend to, `slots(needed)` of what there are. None for a cache
    that has no slots, but a state of one size."""
    return None if cache.capacity is None else min(cache.capacity, slots(needed))


def slots(length: int) -> int:
    """The least 3 · 2ⁿ that is at least `length` (and 48). They are half as many as the buckets of
    prompts: each is a program of all layers, and steps pass through one after the other."""
    return 3 * power_of_two(-(-length // 3), 16)


def prompt_bucket(length: int) -> int:
    """The width to which prompts are padded: a bucket, but for a lone token (a begin-of-text)."""
    return 1 if length == 1 else bucket(length)
