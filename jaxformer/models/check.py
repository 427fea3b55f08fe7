"""What is refused before a model computes anything."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.models.rows import bucket, padded, row_of_ids


def as_array(x):
    """Lists as NumPy arrays (inside a jit, jnp would trace even what is known); None stays."""
    return x if x is None or hasattr(x, "dtype") else np.asarray(x)


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
    config = config.complete
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
    tokens, segments = as_array(tokens), as_array(segments)
    check_tokens(tokens, config, segments)
    return jnp.asarray(tokens), None if segments is None else jnp.asarray(segments)


def checked_source(source, config, segments, batch_size: int):
    """The same of a source; it is one text, whatever its segments are called: 1, 0 for padding."""
    source, segments = as_array(source), as_array(segments)
    check_source(source, config, segments, batch_size)
    return jnp.asarray(source), None if segments is None else jnp.asarray(segments != 0, int)


def padded_source(source, config, name: str):
    """(ids, segments) int [batch, length] of rows of ids, padded on the right to a bucket of
    lengths; an array stays as it is, segments None. ValueError says what is wrong with them."""
    config = config.complete
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


def check_points(names, points):
    """Refuse a name that is none of a model's points."""
    for name in names:
        if name not in points:
            raise ValueError(f"no point is named {name!r}; there are {', '.join(points)}")


def _check_ids(name, tokens, vocab_size, embed_dim):
    is_id = jnp.issubdtype(tokens.dtype, jnp.integer)
    if tokens.ndim != (2 if is_id else 3) or (not is_id and tokens.shape[2] != embed_dim):
        raise ValueError(
            f"{name} are {tokens.dtype} {tokens.shape}; they must be int [batch, length] or float "
            f"[batch, length, {embed_dim}] (embeddings)"
        )
    if is_id and not isinstance(tokens, jax.core.Tracer) and tokens.size:
        known = np.asarray(tokens)
        low, high = int(known.min()), int(known.max())
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            limit = "vocab_size" if name == "tokens" else f"{name}_vocab_size"
            raise ValueError(f"{name} hold id {bad}; {limit} is {vocab_size}")


def _check_segments(name, segments, of, tokens):
    if segments is not None and segments.shape != tokens.shape[:2]:
        raise ValueError(f"{name} are {segments.shape}; {of} are {tokens.shape[:2]}")
