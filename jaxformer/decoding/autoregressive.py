"""Functions for every autoregressive model: pack_weights, init_cache, extend and inspect."""

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
from jaxformer.functional.hooks import NO_HOOKS, Hooks, Intervention
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.machine import platform
from jaxformer.functional.trees import Weights
from jaxformer.models.autoregressive import require_autoregressive
from jaxformer.models.check import (
    AnyArray,
    Sources,
    as_array,
    check_tokens,
    checked_hooks,
    hooks_of_texts,
)
from jaxformer.models.config.check import whole_number
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.models.sharding.explicit_axes import in_auto_axes


def check_not_traced(name: str, *trees: Any) -> None:
    """Raises ValueError inside jit, vmap or grad, where a loop on the host cannot run."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(trees)):
        raise ValueError(
            f"{name} was called on traced arrays, but its loop runs on the host; inside jit, vmap "
            "or grad use init_cache and extend"
        )


def check_finite_logits(
    broken: Bool[np.ndarray, " batch"] | np.bool_,
    variables: Variables,
    indices: Int[np.ndarray, " batch"] | None = None,
) -> None:
    """Raises FloatingPointError if the logits of a batch element are NaN.

    The message names the batch element and up to three weights that are not finite.

    Args:
        broken: bool [batch], True for batch elements whose logits are NaN.
        variables: the model's variables.
        indices: the index of each batch element in the caller's arguments; 0, 1, 2, … if None.
    """
    if not broken.any():
        return
    index = int(broken.argmax() if indices is None else indices[broken.argmax()])
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    names = [jax.tree_util.keystr(path) for path, x in leaves if not jnp.isfinite(x).all()]
    listed = ", ".join(names[:3])
    why = f"these weights are not finite: {listed}" if names else "all weights are finite"
    raise FloatingPointError(f"the logits of batch element {index} are not finite; {why}")


@in_auto_axes
def pack_weights(model: LanguageModel, variables: Variables) -> Variables:
    """Returns {"packed": …}, which `init_cache`, `extend` and `generate` accept as variables.

    The packed weights are a second copy in memory, in the layout that decoding uses. `generate` and
    `beam_search` pack unpacked weights at every call. Before repeated calls, pack the weights once
    with this function or with `checkpoint.packed()`.

    Args:
        model: an autoregressive model.
        variables: the model's variables, {"params": …}. Packed variables are returned unchanged.

    Raises:
        ValueError: The model is not autoregressive, or the variables have no params.
    """
    require_autoregressive(model)
    if "packed" in variables:
        return variables
    return {"packed": packed_weights(model, model_weights(variables), parallel_parts())}


@partial(jax.jit, static_argnums=(0, 2))
def packed_weights(model: LanguageModel, params: Weights, parts: int) -> Weights:
    """Packs the weights in one compiled program; see `pack_weights`."""
    return model.pack_weights(params, parts)


def parallel_parts() -> int:
    """Returns the number of parts into which packed kernels are split for parallel computation.

    On a CPU, the result is the number of cores, but at most 8. On other devices, the result is 1.
    """
    return min(os.cpu_count() or 1, 8) if platform() == "cpu" else 1


def model_weights(variables: Variables) -> Weights:
    """Returns the packed weights of `variables`, or else the unpacked weights.

    Raises:
        ValueError: The variables have neither "packed" nor "params".
    """
    for name in ("packed", "params"):
        if name in variables:
            return variables[name]
    raise ValueError(
        f"variables has the keys {', '.join(variables) or '(none)'}; it must have 'params' (from "
        "model.init) or 'packed' (from pack_weights)"
    )


@in_auto_axes
def init_cache(
    model: LanguageModel,
    variables: Variables,
    batch_size: int,
    capacity: int,
    source: Sources | None = None,
    *,
    ring: bool | None = None,
) -> Cache:
    """Returns an empty cache for `batch_size` sequences.

    A layer with a sliding window stores only the tokens in the window, if this needs fewer slots
    than `capacity`.

    Args:
        model: an autoregressive model.
        variables: the model's variables, or the result of `pack_weights`.
        batch_size: number of sequences.
        capacity: maximum number of tokens per sequence, padding included.
        source: for an encoder-decoder, sources of any lengths as for `generate`, or one array with
            a batch axis. Each source is encoded once. Source i serves the sequences i * n to (i +
            1) * n - 1, where n = batch_size / num_sources.
        ring: If True, all layers overwrite their oldest slots, so sequences may exceed `capacity`.
            Every layer must then have a window. Learned positions still limit the length to
            max_length. If False, every layer stores all tokens. This is necessary to rewind the
            cache later, or to capture attention weights. If None, a layer with a window stores the
            window and 64 more tokens.

    Raises:
        ValueError: An argument is invalid.
    """
    require_autoregressive(model)
    batch_size = whole_number("batch_size", batch_size, 1)
    size = CacheSize(batch_size, whole_number("capacity", capacity, 1), ring)
    read = model.read_source(source)
    if read is not None and batch_size % len(read.tokens):
        raise ValueError(
            f"batch_size is {batch_size}, but it must be a multiple of the number of sources "
            f"({len(read.tokens)})"
        )
    if ring and model.reach is None:
        raise ValueError(
            f"ring is True, but some layers of this {type(model).__name__} attend to all tokens; "
            "use ring=None, or a model in which every layer has a window"
        )
    return compiled_cache(model, model_weights(variables), read, size, NO_HOOKS)[0]


@partial(jax.jit, static_argnums=(0, 3))
def compiled_cache(
    model: LanguageModel, weights: Weights, source: Inputs | None, size: CacheSize, hooks: Hooks
) -> tuple[Cache, dict[str, Array]]:
    """Creates the cache and encodes the source in one compiled program; see `init_cache`.

    Returns:
        (the cache, the values captured while the source was encoded).
    """
    return model.init_cache(weights, source, size, hooks)


@in_auto_axes
def extend(
    model: LanguageModel,
    variables: Variables,
    tokens: AnyArray,
    cache: Cache,
    segment_ids: AnyArray | None = None,
    *,
    keep_states: bool = False,
) -> tuple[Float[Array, "batch new vocab"], Cache]:
    """Runs the model on new tokens and returns their logits and the updated cache.

    The given cache is not modified; continue with the returned cache. Outside jit, the time of
    the computation grows with the number of used slots; only the time to copy the cache grows with
    the capacity. Before a loop of your own, call `cache.live_prefix(cache.capacity)`, which zeroes
    the empty slots once for all steps.

    Args:
        model: an autoregressive model.
        variables: the model's variables, or the result of `pack_weights`.
        tokens: [batch, new], any number of new tokens.
        cache: the cache of earlier tokens.
        segment_ids: int [batch, new]; 0 is padding, which takes space in the cache but has no
            position. If None, no token is padding.
        keep_states: whether recurrent layers, and other layers that cache a state, store the state
            after each new token. The stored states allow `cache.rewind` to drop these tokens.
            Attention layers, which cache keys and values, do not need stored states.

    Returns:
        (logits [batch, new, vocab], cache).

    Raises:
        ValueError: An argument is invalid, or there are more tokens than free slots. Inside
            jit, too many tokens give NaN logits instead of an error.
    """
    require_autoregressive(model)
    if cache is None:
        raise ValueError(
            "cache is None; create a cache with init_cache, or call model.apply for complete "
            "sequences"
        )
    logits, _, after = inspect(
        model, variables, tokens, cache, segment_ids, keep_states=keep_states
    )
    return logits, after  # pyrefly: ignore[bad-return] (inspect returns a cache if it is given one)


class Inspection(NamedTuple):
    """Result of `inspect`.

    Attributes:
        logits: float32 [batch, length, vocab].
        captured: {name of a hook point: value}. Values from hook points inside the layers have the
            layer as their first axis.
        cache: the cache after these tokens, or None if no cache was given.
    """

    logits: Array
    captured: dict[str, Array]
    cache: Cache | None


@in_auto_axes
def inspect(
    model: LanguageModel,
    variables: Variables,
    tokens: AnyArray,
    cache: Cache | None = None,
    segment_ids: AnyArray | None = None,
    source: Sources | None = None,
    capture: Iterable[str] = (),
    patch: Mapping[str, Intervention] | None = None,
    keep_states: bool = False,
) -> Inspection:
    """Runs a forward pass that captures or replaces intermediate values.

    Args:
        model: any model or, if `cache` is given, an autoregressive model.
        variables: the model's variables. If `cache` is given, packed variables from
            `pack_weights` are also accepted.
        tokens: [batch, length].
        cache: the cache of earlier tokens. If None, the tokens are complete sequences.
        segment_ids: int [batch, length]; 0 is padding, 1, 1, 2, 2, … are packed documents.
        source: the sources of an encoder-decoder. Must be None with a cache, which already holds
            the encoded sources.
        capture: names of hook points to capture, from `model.hook_points`. Hook points of an
            encoder ("encoder.…") are accepted only without a cache.
        patch: the values to change, {name of a hook point: Patch(where, value) or
            Edit(function, *arrays)}.
        keep_states: see `extend`.

    Raises:
        ValueError: See `extend`.
    """
    if cache is None:
        inputs = complete_inputs(model, variables, tokens, segment_ids, source)
        hooks = hooks_of_texts(capture, patch, model.hook_points, inputs)
        return _inspect(model, variables, inputs, None, hooks, None, False)
    require_autoregressive(model)
    if source is not None:
        raise ValueError(
            "source and cache were both given, but the cache already holds an encoded source; "
            "omit source"
        )
    tokens, segment_ids = as_array("tokens", tokens), as_array("segment_ids", segment_ids)
    check_tokens(tokens, model.config, segment_ids)
    hooks = checked_hooks(capture, patch, model.hook_points, length=cache.capacity)
    if any(name.startswith("encoder.") for name in (*hooks.capture, *hooks.patch)):
        raise ValueError(
            "capture or patch contains a hook point of the encoder, which does not run with a "
            "cache; omit the cache, or this hook point"
        )
    live = checked_slots(model, cache, tokens, segment_ids)
    run = _inspect_in_trace if isinstance(cache.length, jax.core.Tracer) else _inspect
    inputs = Inputs(jnp.asarray(tokens), segment_ids)
    return run(model, variables, inputs, cache, hooks, live, bool(keep_states))


def complete_inputs(
    model: LanguageModel,
    variables: Variables,
    tokens: AnyArray,
    segment_ids: AnyArray | None,
    source: Sources | None,
) -> Inputs:
    """Returns complete sequences and their sources as checked `Inputs`.

    Raises:
        ValueError: The tokens, the segment_ids, the source or the variables are invalid.
    """
    tokens, segment_ids = as_array("tokens", tokens), as_array("segment_ids", segment_ids)
    check_tokens(tokens, model.config, segment_ids)
    model.check(variables)
    read = model.read_source(source)
    if read is None:
        return Inputs(tokens, segment_ids)
    if len(read.tokens) != len(tokens):
        raise ValueError(
            f"source has batch size {len(read.tokens)}, but tokens has batch size {len(tokens)}; "
            "the batch sizes must be equal"
        )
    return Inputs(tokens, segment_ids, None, read.tokens, read.segment_ids)


def _inspect_in_trace(
    model: LanguageModel,
    variables: Variables,
    inputs: Inputs,
    cache: Cache | None,
    hooks: Hooks,
    live: int | None,
    keep_states: bool,
) -> Inspection:
    weights, prefix = model_weights(variables), None
    if cache is not None:
        prefix = cache.live_prefix(live)
    passed = model.forward(weights, inputs, prefix, hooks=hooks, keeps_states=keep_states)
    after = None if cache is None else cache.merge_prefix(passed.cache)
    return Inspection(model.logits(weights, passed.hidden), passed.captured, after)


_inspect = partial(jax.jit, static_argnums=(0, 5, 6))(_inspect_in_trace)
