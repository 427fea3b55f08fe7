"""Functions of every autoregressive model: prepare, start, advance and inspect."""

import os
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.decoding.loop_cache import checked_slots
from jaxformer.functional.cache.key_values import Cache, CacheSize
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.machine import platform
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
    broken: Bool[np.ndarray, " batch"] | np.bool_,
    variables: Variables,
    rows: Int[np.ndarray, " batch"] | None = None,
) -> None:
    """Raises FloatingPointError if the logits of a row are NaN, since no token follows from them.

    The message names the row and the weights that are not finite, if there are any.

    Args:
        broken: bool [batch], True for rows whose logits are NaN.
        variables: the model's variables.
        rows: the numbers of the rows in the call; None: 0, 1, 2, …
    """
    if not broken.any():
        return
    row = int(broken.argmax() if rows is None else rows[broken.argmax()])
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    names = [jax.tree_util.keystr(path) for path, x in leaves if not jnp.isfinite(x).all()]
    why = f"nor are the weights {', '.join(names[:3])}" if names else "the weights are"
    raise FloatingPointError(f"the logits of row {row} are not finite; {why}")


@in_auto_axes
def prepare(model: LanguageModel, variables: Variables) -> Variables:
    """Returns {"prepared": …}, which `start`, `advance` and `generate` accept as variables.

    These are the weights in the layout for decoding, a second copy in memory. `generate` and
    `beam_search` prepare params at every call: prepare them once yourself, or use
    `checkpoint.prepared()`, to generate repeatedly.

    Args:
        model: an autoregressive model.
        variables: its variables, {"params": …}; a result of `prepare` is returned unchanged.

    Raises:
        ValueError: the model is not autoregressive, or the variables have no params.
    """
    require_autoregressive(model)
    if "prepared" in variables:
        return variables
    return {"prepared": prepare_weights(model, weights_of(variables), parallel_parts())}


@partial(jax.jit, static_argnums=(0, 2))
def prepare_weights(model: LanguageModel, params: Weights, parts: int) -> Weights:
    """Repacks the params in one compiled program; see `prepare`."""
    return model.prepare(params, parts)


def parallel_parts() -> int:
    """Returns the number of parts of a product that XLA computes in parallel.

    It is the number of cores of a CPU, at most 8, and 1 for an accelerator.
    """
    return min(os.cpu_count() or 1, 8) if platform() == "cpu" else 1


def weights_of(variables: Variables) -> Weights:
    """Returns the weights of variables, for the methods of a model.

    Raises:
        ValueError: the variables have no weights.
    """
    for name in ("prepared", "params"):
        if name in variables:
            return variables[name]
    raise ValueError(
        f"variables hold {', '.join(variables) or 'nothing'}; they must hold 'prepared' or "
        "'params' (model.init gives 'params', prepare 'prepared')"
    )


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
    read = model.read_source(source)
    if read is not None and batch_size % len(read.tokens):
        raise ValueError(
            f"source has {len(read.tokens)} rows; batch_size, {batch_size}, must be a multiple of "
            "that"
        )
    if ring and model.reach is None:
        raise ValueError(
            f"ring is True; not all layers of this {type(model).__name__} have a window, so it "
            "needs every slot"
        )
    return start_cache(model, weights_of(variables), read, size, NO_HOOKS)[0]


@partial(jax.jit, static_argnums=(0, 3))
def start_cache(
    model: LanguageModel, weights: Weights, source: Inputs | None, size: CacheSize, hooks: Hooks
) -> tuple[Any, dict[str, Array]]:
    """Starts the cache in one compiled program; see `start`.

    Returns:
        (the cache, the values captured while the source was read).
    """
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
    if cache is None:
        inputs = complete_inputs(model, variables, tokens, segments, source)
        hooks = hooks_of_texts(capture, patch, model.points, inputs)
        return _inspect(model, variables, inputs, None, hooks, None, False)
    require_autoregressive(model)
    if source is not None:
        raise ValueError("source was given with a cache; the cache has read its source")
    tokens, segments = as_array("tokens", tokens), as_array("segments", segments)
    check_tokens(tokens, model.config, segments)
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


def complete_inputs(
    model: LanguageModel,
    variables: Variables,
    tokens: AnyArray,
    segments: AnyArray | None,
    source: Any,
) -> Inputs:
    """Returns complete sequences and their sources as inputs.

    Raises:
        ValueError: the tokens, the segments, the source or the variables are not accepted.
    """
    tokens, segments = as_array("tokens", tokens), as_array("segments", segments)
    check_tokens(tokens, model.config, segments)
    model.check(variables)
    read = model.read_source(source)
    if read is None:
        return Inputs(tokens, segments)
    if len(read.tokens) != len(tokens):
        raise ValueError(f"source has {len(read.tokens)} rows; tokens have {len(tokens)}")
    return Inputs(tokens, segments, None, read.tokens, read.segments)


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
