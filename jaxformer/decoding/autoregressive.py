"""Functions of every autoregressive model: start a cache, advance it, and inspect a pass."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxformer.decoding.cache_slots import checked_slots
from jaxformer.decoding.prepared import weights_of
from jaxformer.functional.cache.key_values import Cache, CacheSize
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.taps import NO_HOOKS, Hooks, Patch
from jaxformer.functional.trees import Weights
from jaxformer.models.autoregressive import require_autoregressive
from jaxformer.models.check import AnyArray, as_array, check_tokens, checked_hooks, hooks_of_texts
from jaxformer.models.config.check import whole_number
from jaxformer.models.explicit_axes import in_auto_axes
from jaxformer.models.language_model import LanguageModel, Variables


def check_not_traced(name: str, *trees: Any) -> None:
    """Raises ValueError inside jit, vmap or grad, for functions that run a loop on the host."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(trees)):
        raise ValueError(
            f"{name} was called on traced arrays; its loop runs on the host, so inside jit, vmap "
            "or grad use start and advance"
        )


def check_finite_logits(
    broken: Bool[np.ndarray, " batch"] | np.bool_, variables: Variables
) -> None:
    """Raises FloatingPointError if the logits of a row are NaN, since no token follows from them.

    The message names the row and the weights that are not finite, if there are any.

    Args:
        broken: bool [batch], True for rows whose logits are NaN.
        variables: the model's variables.
    """
    if not broken.any():
        return
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    names = [jax.tree_util.keystr(path) for path, x in leaves if not jnp.isfinite(x).all()]
    why = f"nor are the weights {', '.join(names[:3])}" if names else "the weights are"
    raise FloatingPointError(f"the logits of row {int(broken.argmax())} are not finite; {why}")


@in_auto_axes
def start(
    model: LanguageModel,
    variables: Variables,
    batch_size: int,
    capacity: int,
    source: Any = None,
    *,
    ring: bool | None = None,
) -> Cache:
    """Returns an empty cache for `batch_size` rows.

    A layer with a sliding window keeps the last tokens only, if that needs fewer slots.

    Args:
        model: an autoregressive model.
        variables: its variables, or the result of `prepare`.
        batch_size: number of rows.
        capacity: the most tokens of a row, padding included.
        source: for a model that reads one, rows of ids of any lengths, or an int array [sources,
            length]. Each source is encoded once. Source i serves rows i * n to (i + 1) * n - 1,
            where n = batch_size / sources.
        ring: True: all layers reuse `capacity` slots, for a model whose layers all have a window.
            Rows then have no limit, except that of learned positions, max_length. False: every
            layer keeps all tokens, so that they can be dropped again, or their weights captured.
            None: a layer with a window keeps its window and 64 more tokens.

    Raises:
        ValueError: an argument is not accepted.
    """
    require_autoregressive(model)
    batch_size = whole_number("batch_size", batch_size, 1)
    size = CacheSize(batch_size, whole_number("capacity", capacity, 1), ring)
    return start_captured(model, variables, source, size, NO_HOOKS)[0]


def start_captured(
    model: LanguageModel,
    variables: Variables,
    source: Any,
    size: CacheSize,
    hooks: Hooks,
) -> tuple[Cache, dict[str, Array]]:
    """Returns (the cache, the values captured while the source was read); see `start`."""
    read = model.read_source(source)
    if read is not None and size.batch_size % len(read.tokens):
        raise ValueError(
            f"source has {len(read.tokens)} rows; batch_size, {size.batch_size}, must be a "
            "multiple of that"
        )
    if size.ring and model.reach is None:
        raise ValueError(
            f"ring is True; not all layers of this {type(model).__name__} have a window, so it "
            "needs every slot"
        )
    return start_cache(model, weights_of(variables), read, size, hooks)


@partial(jax.jit, static_argnums=(0, 3))
def start_cache(
    model: LanguageModel, weights: Weights, source: Inputs | None, size: CacheSize, hooks: Hooks
) -> tuple[Any, dict[str, Array]]:
    """Starts the cache in one compiled program; see `start`."""
    return model.start(weights, source, size, hooks)


@in_auto_axes
def advance(
    model: LanguageModel,
    variables: Variables,
    tokens: AnyArray,
    cache: Cache,
    segments: AnyArray | None = None,
    *,
    keep_states: bool = False,
) -> tuple[Float[Array, "batch new vocab"], Cache]:
    """Reads new tokens.

    The given cache remains valid but is not updated: continue with the returned one. Outside jit
    the cost depends on the number of used slots and not on the capacity, except for copying the
    cache. Before a loop of your own, call `cache.live_prefix(cache.capacity)` once.

    Args:
        model: an autoregressive model.
        variables: its variables, or the result of `prepare`.
        tokens: [batch, new], any number of new tokens.
        cache: the cache of earlier tokens.
        segments: int [batch, new]; 0 is padding, which takes a slot but no position. None: no
            padding.
        keep_states: whether layers without slots, such as recurrent ones, keep their states after
            each new token, so that `cache.rewind` can drop these tokens. Attention needs none.

    Returns:
        (logits [batch, new, vocab], cache).

    Raises:
        ValueError: an argument is not accepted, or there are more tokens than free slots. Inside
            jit the logits are NaN in the latter case.
    """
    require_autoregressive(model)
    if cache is None:
        raise ValueError(
            "cache is None; create one by start, or call model.apply for complete sequences"
        )
    logits, _, after = inspect(model, variables, tokens, cache, segments, keep_states=keep_states)
    return logits, after


class Inspection(NamedTuple):
    """Result of `inspect`.

    Attributes:
        logits: float32 [batch, length, vocab].
        captured: {name of a point: value}. Values from points inside the layers have the layer as
            their first axis.
        cache: the cache after these tokens; None if there was none before.
    """

    logits: Array
    captured: dict[str, Array]
    cache: Any


@in_auto_axes
def inspect(
    model: LanguageModel,
    variables: Variables,
    tokens: AnyArray,
    cache: Cache | None = None,
    segments: AnyArray | None = None,
    source: Any = None,
    capture: Iterable[str] = (),
    patch: Mapping[str, Patch] | None = None,
    keep_states: bool = False,
) -> Inspection:
    """Runs a pass over complete sequences or over the next tokens of a cache; captures values.

    Args:
        model: any model; with a cache, an autoregressive one.
        variables: its variables or, with a cache, the result of `prepare`.
        tokens: [batch, length].
        cache: the cache of earlier tokens; None: the tokens are complete sequences.
        segments: int [batch, length]; 0 is padding, 1, 1, 2, 2, … are packed documents.
        source: for a model that reads one, the sources; None with a cache, which has read them.
        capture: names of points to capture, from `model.points`. Points of an encoder ("encoder.…")
            are accepted only without a cache.
        patch: {name of a point: Patch(where, value)}, values to replace.
        keep_states: see `advance`.

    Raises:
        ValueError: see `advance`.
    """
    if cache is not None:
        require_autoregressive(model)
        if source is not None:
            raise ValueError("source was given with a cache; the cache has read its source")
    tokens, segments = as_array("tokens", tokens), as_array("segments", segments)
    check_tokens(tokens, model.config, segments)
    if cache is None:
        read = model.read_source(source)
        if read is not None and len(read.tokens) != len(tokens):
            raise ValueError(f"source has {len(read.tokens)} rows; tokens have {len(tokens)}")
        model.check(variables)
        read_tokens = Inputs(jnp.asarray(tokens), segments)
        inputs = (
            read_tokens
            if read is None
            else replace(read_tokens, source=read.tokens, source_segments=read.segments)
        )
        hooks = hooks_of_texts(capture, patch, model.points, inputs)
        return _inspect(model, variables, inputs, None, hooks, None, False)
    hooks = checked_hooks(capture, patch, model.points, length=cache.capacity)
    if any(name.startswith("encoder.") for name in (*hooks.capture, *hooks.patch)):
        raise ValueError(
            "points of the encoder cannot be captured or patched with a cache, which has already "
            "read the source"
        )
    live = checked_slots(model, cache, tokens, segments)
    run = _inspect_in_trace if isinstance(cache.length, jax.core.Tracer) else _inspect
    inputs = Inputs(jnp.asarray(tokens), segments)
    return run(model, variables, inputs, cache, hooks, live, bool(keep_states))


def _inspect_in_trace(
    model: LanguageModel,
    variables: Variables,
    inputs: Inputs,
    cache: Cache | None,
    hooks: Hooks,
    live: int | None,
    keep_states: bool,
) -> Inspection:
    weights, prefix = weights_of(variables), None
    if cache is not None:
        prefix = cache.live_prefix(live)
    passed = model.forward(weights, inputs, prefix, hooks=hooks, keeps_states=keep_states)
    after = None if cache is None else cache.merge_prefix(passed.cache)
    return Inspection(model.logits(weights, passed.hidden), passed.captured, after)


_inspect = partial(jax.jit, static_argnums=(0, 5, 6))(_inspect_in_trace)
