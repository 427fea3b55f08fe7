"""What is refused before a model computes anything."""

import jax
import jax.numpy as jnp
import numpy as np


def check_tokens(tokens, config, segments=None):
    """Refuse what can be seen to be wrong; ids are looked at where they are known (not in jit)."""
    is_id = jnp.issubdtype(tokens.dtype, jnp.integer)
    if tokens.ndim != (2 if is_id else 3) or (not is_id and tokens.shape[2] != config.embed_dim):
        raise ValueError(
            f"tokens are {tokens.dtype} {tokens.shape}; they must be int [batch, length] or float "
            f"[batch, length, {config.embed_dim}] (embeddings)"
        )
    if tokens.shape[1] > config.max_length and segments is None:
        raise ValueError(
            f"tokens are {tokens.shape[1]} long; max_length is {config.max_length} positions"
        )
    if segments is not None and segments.shape != tokens.shape[:2]:
        raise ValueError(f"segments are {segments.shape}; tokens are {tokens.shape[:2]}")
    if is_id and not isinstance(tokens, jax.core.Tracer) and tokens.size:
        known = np.asarray(tokens)  # NumPy: inside a jit, jnp would trace even what is known
        low, high = int(known.min()), int(known.max())
        if low < 0 or high >= config.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"tokens hold id {bad}; vocab_size is {config.vocab_size}")
