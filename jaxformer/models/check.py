"""What is refused before a model computes anything."""

import jax
import jax.numpy as jnp
import numpy as np


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


def padded_source(source, config, name: str):
    """(ids, segments) int [batch, length] of rows of ids, padded on the right to a bucket of
    lengths; an array stays as it is, segments None. ValueError says what is wrong with them."""
    config = config.complete
    if source is None:
        raise ValueError(f"source is None; a {name} reads one: a row of ids for each prompt")
    if getattr(source, "ndim", None) == 2:
        check_source(source, config, None, len(source))
        return source, None
    rows = [np.asarray(row) for row in source]
    for i, row in enumerate(rows):
        if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
            raise ValueError(f"source {i} is {row.dtype} {row.shape}; it must be a row of ids")
        if not row.size:
            raise ValueError(f"source {i} is empty; it must have at least one token")
        if row.size > config.max_source_length:
            raise ValueError(
                f"source {i} has {row.size} tokens; max_source_length is {config.max_source_length}"
            )
        if row.min() < 0 or row.max() >= config.source_vocab_size:
            bad = row.min() if row.min() < 0 else row.max()
            raise ValueError(
                f"source {i} holds id {bad}; source_vocab_size is {config.source_vocab_size}"
            )
    if not rows:
        raise ValueError("source is empty; it must hold a row of ids for each prompt")
    longest = max(row.size for row in rows)
    width = min(config.max_source_length, max(32, 1 << (longest - 1).bit_length()))
    ids, segments = np.zeros((2, len(rows), width), np.int32)
    for i, row in enumerate(rows):
        ids[i, : row.size], segments[i, : row.size] = row, 1
    return ids, segments


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
        known = np.asarray(tokens)  # NumPy: inside a jit, jnp would trace even what is known
        low, high = int(known.min()), int(known.max())
        if low < 0 or high >= vocab_size:
            bad = low if low < 0 else high
            limit = "vocab_size" if name == "tokens" else f"{name}_vocab_size"
            raise ValueError(f"{name} hold id {bad}; {limit} is {vocab_size}")


def _check_segments(name, segments, of, tokens):
    if segments is not None and segments.shape != tokens.shape[:2]:
        raise ValueError(f"{name} are {segments.shape}; {of} are {tokens.shape[:2]}")
