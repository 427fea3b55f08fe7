"""What is refused before a model computes anything."""

from collections.abc import Mapping
from difflib import get_close_matches

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.functional.kernels import Int8Table, Kernel
from jaxformer.functional.spread import refuse_explicit
from jaxformer.functional.taps import Hooks, Patch
from jaxformer.models.rows import bucket, padded, row_of_ids


def as_array(name: str, x):
    """Lists as NumPy arrays (inside a jit, jnp would trace even what is known); None stays."""
    if x is None or hasattr(x, "dtype"):
        return x
    try:
        return np.asarray(x)
    except ValueError:
        raise ValueError(
            f"{name} are rows of unequal lengths; pad them to one length, with segments 0 there"
        ) from None


def check_variables(variables):
    """Refuse what is not {"params": …} with parameters that are floats."""
    if not isinstance(variables, Mapping) or "params" not in variables:
        held = ", ".join(map(str, variables)) if isinstance(variables, Mapping) else variables
        raise ValueError(f"variables hold {held}; they must hold 'params' (model.init gives them)")
    refuse_explicit("variables", variables["params"])
    for name, leaf in _leaves(variables["params"]).items():
        is_float = isinstance(leaf, _VALUES) or jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        if not is_float:
            raise ValueError(f"parameter {name} is {jnp.result_type(leaf)}; parameters are floats")


def check_parameters(part: str, given, shapes):
    """Refuse parameters that are not, by name and shape, those that the model makes."""
    given, wanted = _leaves(given), _leaves(shapes)
    for name in wanted.keys() | given.keys():
        found, right = (side[name].shape if name in side else None for side in (given, wanted))
        if found != right:
            is_, must = (x or "not there" for x in (found, right))
            raise ValueError(f"parameter {part}/{name} is {is_}; for this config it must be {must}")


_VALUES = (Kernel, Int8Table)  # what may stand where a matrix or a table does


def _leaves(tree) -> dict:
    def is_value(x):
        return isinstance(x, _VALUES)

    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_value)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def check_tokens(tokens, config, segments=None):
    """Refuse what can be seen to be wrong; ids are looked at where they are known (not in jit)."""
    _check_ids("tokens", tokens, config.vocab_size, config.embed_dim)
    if tokens.shape[1] > config.max_length and segments is None:
        raise ValueError(
            f"tokens are {tokens.shape[1]} long; max_length is {config.max_length} positions"
        )
    _check_segments("segments", segments, "tokens", tokens)


def check_source(source, config, segments, batch_size: int):
    """The same of a source: one for each of batch_size rows, none of them empty."""
    if source is None:
        raise ValueError("source is None; this model reads one, int [batch, source length]")
    _check_ids("source", source, config.source_vocab_size, config.embed_dim)
    if not len(source):
        raise ValueError("source has no rows; it must have one for each row of tokens")
    if source.shape[1] > config.max_source_length:
        raise ValueError(
            f"source is {source.shape[1]} long; max_source_length is {config.max_source_length}"
        )
    _check_segments("source_segments", segments, "source", source)
    if len(source) != batch_size:
        raise ValueError(f"source has {len(source)} rows; tokens have {batch_size}")
    if segments is not None and not isinstance(segments, jax.core.Tracer):
        empty = ~(np.asarray(segments) != 0).any(axis=1)
        if empty.any():
            raise ValueError(f"source {int(empty.argmax())} is nothing but padding")
    elif source.shape[1] == 0:
        raise ValueError("source has no tokens")


def checked_tokens(tokens, config, segments):
    """(tokens, segments) for JAX, lists too, once `check_tokens` has accepted them."""
    tokens, segments = as_array("tokens", tokens), as_array("segments", segments)
    refuse_explicit("tokens", (tokens, segments))
    check_tokens(tokens, config, segments)
    return jnp.asarray(tokens), None if segments is None else jnp.asarray(segments)


def checked_source(source, config, segments, batch_size: int):
    """The same of a source; it is one text, whatever its segments are called: 1, 0 for padding."""
    source, segments = as_array("source", source), as_array("source_segments", segments)
    check_source(source, config, segments, batch_size)
    return jnp.asarray(source), None if segments is None else jnp.asarray(segments != 0, int)


def padded_source(source, config, name: str):
    """(ids, segments) int [batch, length] of rows of ids, padded on the right to a bucket of
    lengths; an array stays as it is, segments None. ValueError says what is wrong with them."""
    if source is None:
        raise ValueError(f"source is None; a {name} reads one: a row of ids for each prompt")
    if getattr(source, "ndim", None) == 2:
        check_source(source, config, None, len(source))
        return source, None
    vocab_size = config.source_vocab_size
    rows = [
        row_of_ids(f"source {i}", row, vocab_size, "source_vocab_size")
        for i, row in enumerate(source)
    ]
    for i, row in enumerate(rows):
        if not row.size:
            raise ValueError(f"source {i} is empty; it must have at least one token")
        if row.size > config.max_source_length:
            raise ValueError(
                f"source {i} has {row.size} tokens; max_source_length is {config.max_source_length}"
            )
    if not rows:
        raise ValueError("source is empty; it must hold a row of ids for each prompt")
    return padded(rows, min(config.max_source_length, bucket(max(map(len, rows)))))


def checked_hooks(capture, patch, points, *, in_steps: bool = False) -> Hooks:
    """Hooks at a model's points; ValueError for names that are none of them, and for patches that
    are none. in_steps: tokens are generated, so that patches may name steps."""
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
        if entry.steps is not None and not in_steps:
            raise ValueError(f"patch {name!r} has steps; only generate has them: use positions")
        rows = [_row(f"patch {name!r}: positions", entry.positions)]
        rows.append(_row(f"patch {name!r}: steps", entry.steps))
        patch[name] = Patch(entry.where, entry.value, *rows)
    return Hooks(tuple(capture), patch)


def _row(name: str, values):
    """Whole numbers in a row, as an array; None stays."""
    if values is None:
        return None
    row = jnp.asarray(values)
    if row.ndim != 1 or not jnp.issubdtype(row.dtype, jnp.integer):
        raise ValueError(f"{name} are {values!r}; they must be a row of whole numbers")
    return row


def _check_ids(name, tokens, vocab_size, embed_dim):
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


def checked_token_types(token_types, tokens, num_token_types: int):
    """The types of the tokens as an array; ValueError unless there is one for each, in range."""
    types = as_array("token_types", token_types)
    _check_segments("token_types", types, "tokens", tokens)
    if not num_token_types:
        raise ValueError("token_types were given; num_token_types is 0: this model has none")
    if not isinstance(types, jax.core.Tracer) and types.size:
        low, high = int(np.min(types)), int(np.max(types))
        if low < 0 or high >= num_token_types:
            bad = low if low < 0 else high
            raise ValueError(f"token_types hold {bad}; num_token_types is {num_token_types}")
    return types


def _check_segments(name, segments, of, tokens):
    if segments is not None and segments.shape != tokens.shape[:2]:
        raise ValueError(f"{name} are {segments.shape}; {of} are {tokens.shape[:2]}")
