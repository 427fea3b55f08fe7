"""The one face of everything autoregressive: start a cache, advance it, score a text.

A model has this face when it has four methods: prepare(params) → weights, read_source(source) →
source (None for a model that reads none), start(weights, batch_size, capacity, source) → cache,
advance(weights, tokens, cache, segments, last_only) → (logits, cache), where weights are its params
as they are or prepared. A cache knows its `length`, its `capacity` (None: it has no end) and its
`reading`, can be `narrow`ed and `widen`ed, and its rows can be `take`n.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.decoding.prepared import require_autoregressive, weights_of
from jaxformer.functional.losses import chunked_token_losses
from jaxformer.functional.positions import DocumentCursor, continued_segments, document_positions
from jaxformer.models.check import as_array, check_tokens
from jaxformer.models.config.check import whole_number
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


def start(model, variables, batch_size: int, capacity: int, source=None):
    """An empty cache for `batch_size` rows of at most `capacity` tokens, padding counted.

    source: for a model that reads one, rows of ids of any lengths, or an int array [sources,
    length]. Each is encoded once, and serves batch_size / sources rows in turn.
    """
    require_autoregressive(model)
    batch_size = whole_number("batch_size", batch_size, 1)
    capacity = whole_number("capacity", capacity, 1)
    read = model.read_source(source)
    if read is not None and batch_size % len(read[0]):
        raise ValueError(
            f"source has {len(read[0])} rows; batch_size, {batch_size}, must be a multiple of that"
        )
    return _start(model, weights_of(variables), batch_size, capacity, read)


@partial(jax.jit, static_argnums=(0, 2, 3))
def _start(model, weights, batch_size, capacity, source):
    return model.start(weights, batch_size, capacity, source)


def advance(model, variables, tokens, cache, segments=None):
    """Read any number of new tokens [batch, new]; returns (logits [batch, new, vocab], cache).

    segments: int [batch, new]; 0 is padding, which takes a slot but no position; None: every token
    is real. The cache given stays what it was; go on with the one returned. Called outside jit, the
    cost depends on the live length and not on the capacity (but for copying the cache), and more
    tokens than there are slots left is a ValueError; inside, it gives NaN.
    """
    require_autoregressive(model)
    tokens, segments = as_array("tokens", tokens), as_array("segments", segments)
    check_tokens(tokens, model.config, segments)
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
    tokens = jnp.asarray(tokens)
    if traced:
        return _advance(model, variables, tokens, cache, segments, cache.capacity)
    return _advance_jitted(model, variables, tokens, cache, segments, live_slots(cache, needed))


def _advance(model, variables, tokens, cache, segments, live):
    logits, narrow = model.advance(weights_of(variables), tokens, cache.live_prefix(live), segments)
    return logits, cache.merge_prefix(narrow)


_advance_jitted = partial(jax.jit, static_argnums=(0, 5))(_advance)


def _check_reading(model, cache, needed: int, segments, shape):
    """Refuse a chunk that ends within a document's first tokens, if those must be read at once, or
    after more tokens of a document than there are positions."""
    least, most = model.minimum_prefill, model.config.max_length
    if least == 1 and needed <= most:
        return  # nothing to find
    with jax.ensure_compile_time_eval():  # inside somebody's jit too, where nothing is traced
        segments = continued_segments(segments, cache.cursor, shape)
        read = np.asarray(document_positions(jnp.asarray(segments), cache.cursor)[2].position)
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


def score(
    model, variables, tokens: Int[Array, "batch length"], segments=None, source=None
) -> Float[Array, " batch"]:
    """Σ_i log P(x_i | x_<i) in nats over each row, the first token of each document given (of a
    prefix-LM the prefix, which its outputs have seen).

    source: a row for each, as for `start`. segments: int [batch, length]; 0 is padding, 1, 1, 2, 2,
    … packed documents, none of which scores the first token of the next. FloatingPointError if the
    logits are not finite; inside jit the score is then NaN.
    """
    require_autoregressive(model)
    tokens, segments = as_array("tokens", tokens), as_array("segments", segments)
    check_tokens(tokens, model.config, segments)
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens are {tokens.dtype} {tokens.shape}; score needs their ids")
    read = model.read_source(source)
    if read is not None and len(read[0]) != len(tokens):
        raise ValueError(f"source has {len(read[0])} rows; tokens have {len(tokens)}")
    scores = _score(model, variables, tokens, segments, read)
    if not isinstance(scores, jax.core.Tracer):
        refuse_broken(np.isnan(scores), variables)
    return scores


@partial(jax.jit, static_argnums=0)
def _score(model, variables, tokens, segments, source):
    given = {} if source is None else {"source": source[0], "source_segments": source[1]}
    hidden = model.apply(variables, tokens, segments, **given, method="hidden_states")
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    if segments is None:
        hidden = hidden[:, :-1]
    else:  # a token is predicted where the last real one before it stands, padding between or not
        real = jnp.where(segments != 0, positions, 0)
        before = jax.lax.cummax(real, axis=1)[:, :-1, None]
        hidden = jnp.take_along_axis(hidden, before, axis=1)
        _, positions, _ = document_positions(segments, DocumentCursor.begin(len(segments)))
    head = model.apply(variables, method="head")
    losses = chunked_token_losses(hidden, head["kernel"], tokens[:, 1:], bias=head.get("bias"))
    return -jnp.where(positions[:, 1:] >= model.minimum_prefill, losses, 0.0).sum(axis=-1)
