"""Checks of variables and inputs, before a model computes anything."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from jaxformer.functional.attention.masks import Mask
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.linear.kernels import Int8Table, Kernel
from jaxformer.functional.symbolic import Size, exceeds
from jaxformer.functional.taps import Hooks, Patch
from jaxformer.models.config.check import shown
from jaxformer.models.config.model import ModelConfig
from jaxformer.models.rows import bucket, padded, row_of_ids

AnyArray = Shaped[Array | np.ndarray, "..."]


def as_array(name: str, x: Any) -> Any:
    """Converts lists, and arrays of other libraries, to NumPy arrays.

    Arrays of JAX and NumPy, and None, are returned unchanged. The results are NumPy arrays because
    inside a jit `jnp.asarray` would trace even known values.
    """
    if x is None or isinstance(getattr(x, "dtype", None), np.dtype):
        return x
    try:
        return np.asarray(x)
    except ValueError:
        raise ValueError(
            f"{name} are rows of unequal lengths; pad them to one length, with segments 0 there"
        ) from None


def check_variables(variables: object) -> None:
    """Raises ValueError unless the variables are {"params": …} with parameters that are floats."""
    if not isinstance(variables, Mapping) or "params" not in variables:
        names = ", ".join(map(str, variables)) if isinstance(variables, Mapping) else variables
        raise ValueError(f"variables hold {names}; they must hold 'params' (model.init gives them)")
    for name, leaf in _leaves(variables["params"]).items():
        is_float = isinstance(leaf, _VALUES) or jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        if not is_float:
            raise ValueError(f"parameter {name} is {jnp.result_type(leaf)}; parameters are floats")


def check_parameters(part: str, given: Any, shapes: Any) -> None:
    """Raises ValueError unless parameters have the names and shapes that the model creates."""
    given, wanted = _leaves(given), _leaves(shapes)
    for name in wanted.keys() | given.keys():
        found, right = (side[name].shape if name in side else None for side in (given, wanted))
        if found != right:
            is_, must = (x or "absent" for x in (found, right))
            raise ValueError(f"parameter {part}/{name} is {is_}; for this config it must be {must}")


_VALUES = (Kernel, Int8Table)  # accepted in place of a matrix or a table


def _leaves(tree: Any) -> dict:
    def is_value(x: object) -> bool:
        return isinstance(x, _VALUES)

    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_value)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def check_tokens(tokens: AnyArray, config: ModelConfig, segments: AnyArray | None = None) -> None:
    """Raises ValueError for tokens that do not fit; ids inside jit are unknown and not checked."""
    _check_ids("tokens", tokens, config.vocab_size, config.embed_dim)
    if exceeds(tokens.shape[1], config.max_length) and segments is None:
        raise ValueError(
            f"tokens are {tokens.shape[1]} long; max_length is {config.max_length} positions"
        )
    _check_segments("segments", segments, "tokens", tokens)


def check_source(
    source: AnyArray | None, config: ModelConfig, segments: AnyArray | None, batch_size: Size
) -> None:
    """Raises ValueError unless there is one non-empty source for each of `batch_size` rows."""
    if source is None:
        raise ValueError("source is None; this model reads one, int [batch, source length]")
    _check_ids("source", source, config.num_source_ids, config.embed_dim)
    if source.shape[0] == 0:
        raise ValueError("source has no rows; it must have one for each row of tokens")
    if exceeds(source.shape[1], config.longest_source):
        raise ValueError(
            f"source is {source.shape[1]} long; max_source_length is {config.longest_source}"
        )
    _check_segments("source_segments", segments, "source", source)
    if source.shape[0] != batch_size:
        raise ValueError(f"source has {source.shape[0]} rows; tokens have {batch_size}")
    if segments is not None and not isinstance(segments, jax.core.Tracer):
        empty = ~(np.asarray(segments) != 0).any(axis=1)
        if empty.any():
            raise ValueError(f"source {int(empty.argmax())} is nothing but padding")
    elif source.shape[1] == 0:
        raise ValueError("source has no tokens")


def checked_inputs(inputs: Inputs, config: ModelConfig) -> Inputs:
    """Returns the inputs as JAX arrays after all checks; they may be lists.

    A source is one text: its segment ids become 1, except for 0, which is padding.
    """
    given = {x.name: as_array(x.name, getattr(inputs, x.name)) for x in fields(inputs)}
    tokens, segments, types, source, source_segments = given.values()
    check_tokens(tokens, config, segments)
    if types is not None:
        check_token_types(types, tokens, config.num_token_types)
    if config.reads_source:
        check_source(source, config, source_segments, tokens.shape[0])
        if source_segments is not None:
            source_segments = jnp.asarray(source_segments != 0, int)
    elif source is not None or source_segments is not None:
        raise ValueError(f"source was given; a model of {type(config).__name__} reads none")
    arrays = (tokens, segments, types, source, source_segments)
    return Inputs(*(None if x is None else jnp.asarray(x) for x in arrays))


def check_own_mask(mask: Any, config: ModelConfig, attends: bool) -> None:
    """Raises ValueError unless the mask is None or a `Mask` that a model of this config can use.

    Args:
        mask: the mask of the module.
        config: its config.
        attends: whether the model has self-attention.
    """
    if mask is None:
        return
    if not attends:
        raise ValueError(f"mask was given; a model of {type(config).__name__} has no attention")
    if not isinstance(mask, Mask):
        raise ValueError(
            f"mask is a {type(mask).__name__}; it must be a Mask, a rule about positions"
        )
    try:
        hash(mask)
    except TypeError as error:
        raise ValueError(
            f"mask is {shown(mask)}, which is not hashable ({error}): use hashable "
            "fields, such as a tuple in place of a list or an array"
        ) from None
    for name in ("window", "prefix"):
        if getattr(config, name):
            raise ValueError(
                f"{name} is {getattr(config, name)}; with a mask it must not be set: the "
                "mask alone determines which tokens see which"
            )


def padded_source(source: Any, config: ModelConfig, name: str) -> Inputs | None:
    """Returns rows of ids, padded on the right to a bucket of lengths, as an encoder's inputs.

    An array is not padded.

    Args:
        source: rows of ids of any lengths, or an array [batch, length].
        config: the model's config.
        name: the name of the model's class.

    Returns:
        The source; None if the model reads none.

    Raises:
        ValueError: there is no source, or one is empty, too long or has an unknown id; or the model
            reads none and there is one.
    """
    if not config.reads_source:
        if source is not None:
            raise ValueError(f"source was given, but a {name} reads none")
        return None
    if source is None:
        raise ValueError(f"source is None; a {name} reads one: a row of ids for each prompt")
    if getattr(source, "ndim", None) == 2:
        check_source(source, config, None, len(source))
        return Inputs(jnp.asarray(source))
    vocab_size = config.num_source_ids
    rows = [
        row_of_ids(f"source {i}", row, vocab_size, "source_vocab_size")
        for i, row in enumerate(source)
    ]
    for i, row in enumerate(rows):
        if not row.size:
            raise ValueError(f"source {i} is empty; it must have at least one token")
        if row.size > config.longest_source:
            raise ValueError(
                f"source {i} has {row.size} tokens; max_source_length is {config.longest_source}"
            )
    if not rows:
        raise ValueError("source is empty; it must hold a row of ids for each prompt")
    ids, segments = padded(rows, min(config.longest_source, bucket(max(map(len, rows)))))
    return Inputs(jnp.asarray(ids), jnp.asarray(segments))


def checked_hooks(
    capture: Iterable[str],
    patch: Mapping[str, Patch] | None,
    points: Collection[str],
    *,
    length: int | None = None,
    source_length: int | None = None,
    steps: int | None = None,
) -> Hooks:
    """Returns the hooks for these captures and patches.

    Args:
        capture: names of points to capture.
        patch: {name: Patch}, or None.
        points: the names of the model's points.
        length: the most tokens of a text; None: unlimited.
        source_length: the most tokens of a source; None: unlimited.
        steps: the number of tokens to generate; None: the pass generates none, so patches may not
            have steps.

    Raises:
        ValueError: a name is not in `points`, or a patch is invalid. Inside jit, a position or step
            that does not exist changes nothing instead.
    """
    if isinstance(capture, str):
        raise ValueError(f"capture is {capture!r}; it must be a tuple of names: ({capture!r},)")
    if not isinstance(patch, Mapping | None):
        raise ValueError(f"patch is a {type(patch).__name__}; it must map names to Patch values")
    patch = dict(patch or {})
    for name in (*capture, *patch):
        if name not in points:
            nearest = get_close_matches(str(name), points, 1, 0)
            raise ValueError(
                f"no point is named {name!r} (nearest: {nearest[0]!r}); there are "
                f"{', '.join(points)}"
            )
    for name, entry in patch.items():
        if not isinstance(entry, Patch):
            raise ValueError(
                f"patch {name!r} is a {type(entry).__name__}; it must be a Patch(where, value)"
            )
        for part, x in (("where", entry.where), ("value", entry.value)):
            if x is None or as_array(f"patch {name!r}: {part}", x).dtype == object:
                raise ValueError(
                    f"patch {name!r}: {part} is a {type(x).__name__}; it must be an array"
                )
        if entry.steps is not None and steps is None:
            raise ValueError(f"patch {name!r} has steps; only generate has them: use positions")
        of_source = name.startswith("encoder.")
        limit, whose = (source_length, "source") if of_source else (length, "text")
        positions = _row(f"patch {name!r}: positions", entry.positions)
        _check_range(f"patch {name!r}: positions", positions, limit, f"tokens of a {whose}")
        steps_of_patch = _row(f"patch {name!r}: steps", entry.steps)
        _check_range(f"patch {name!r}: steps", steps_of_patch, steps, "generated tokens")
        patch[name] = Patch(entry.where, entry.value, positions, steps_of_patch)
    return Hooks(tuple(capture), patch)


def hooks_of_texts(
    capture: Iterable[str],
    patch: Mapping[str, Patch] | None,
    points: Collection[str],
    inputs: Inputs,
) -> Hooks:
    """Returns the hooks of a pass over complete texts; see `checked_hooks`."""
    length = longest_text(inputs.tokens, inputs.segments)
    source_length = None
    if inputs.source is not None:
        source_length = longest_text(inputs.source, inputs.source_segments)
    return checked_hooks(capture, patch, points, length=length, source_length=source_length)


def _row(name: str, values: Any) -> Int[Array, " values"] | None:
    """Returns whole numbers as an array of one axis; None remains None."""
    if values is None:
        return None
    row = jnp.asarray(values)
    if row.ndim != 1 or not jnp.issubdtype(row.dtype, jnp.integer):
        raise ValueError(f"{name} are {values!r}; they must be a row of whole numbers")
    return row


def _check_range(name: str, row: Array | None, limit: int | None, what: str) -> None:
    """Raises ValueError if an entry is negative, or not below the limit; None: no limit."""
    if row is None or isinstance(row, jax.core.Tracer):
        return
    for value in np.asarray(row):
        if value < 0 or (limit is not None and value >= limit):
            accepted = "they must not be negative"
            if limit is not None:
                accepted = f"they must be in 0 … {limit - 1}, the {what}"
            raise ValueError(f"{name} hold {value}; {accepted}")


def longest_text(tokens: AnyArray, segments: AnyArray | None) -> int:
    """Returns the most tokens of a document, without padding if the segments are known."""
    if segments is None or isinstance(segments, jax.core.Tracer):
        return tokens.shape[1]
    rows = np.asarray(segments)
    found = (np.unique(row[row != 0], return_counts=True)[1] for row in rows)
    return max((int(counts.max()) for counts in found if counts.size), default=0)


def _check_ids(name: str, tokens: AnyArray, vocab_size: int, embed_dim: int) -> None:
    is_id = jnp.issubdtype(tokens.dtype, jnp.integer)
    if tokens.ndim != (2 if is_id else 3) or (not is_id and tokens.shape[2] != embed_dim):
        raise ValueError(
            f"{name} are {tokens.dtype} {tokens.shape}; they must be int [batch, length] or float "
            f"[batch, length, {embed_dim}] (embeddings)"
        )
    if is_id and not isinstance(tokens, jax.core.Tracer) and tokens.size:
        ids = np.asarray(tokens)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            limit = "vocab_size" if name == "tokens" else f"{name}_vocab_size"
            raise ValueError(f"{name} hold id {bad}; {limit} is {vocab_size}")


def check_token_types(types: AnyArray, tokens: AnyArray, num_token_types: int) -> None:
    """Raises ValueError if the model has no types, a token has none, or one is out of range."""
    _check_segments("token_types", types, "tokens", tokens)
    if not num_token_types:
        raise ValueError("token_types were given; num_token_types is 0: this model has none")
    if not isinstance(types, jax.core.Tracer) and types.size:
        low, high = int(np.min(types)), int(np.max(types))
        if low < 0 or high >= num_token_types:
            bad = low if low < 0 else high
            raise ValueError(f"token_types hold {bad}; num_token_types is {num_token_types}")


def _check_segments(name: str, segments: AnyArray | None, of: str, tokens: AnyArray) -> None:
    if segments is not None and segments.shape != tokens.shape[:2]:
        raise ValueError(f"{name} are {segments.shape}; {of} are {tokens.shape[:2]}")
