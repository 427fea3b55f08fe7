"""What an encoder learns from: tokens hidden in a text, to be told from both sides."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def mask_tokens(
    key,
    tokens: Int[Array, "*batch length"],
    mask_token: int,
    vocab_size: int,
    *,
    rate: float = 0.15,
    segments: Int[Array, "*batch length"] | None = None,
) -> tuple[Int[Array, "*batch length"], Float[Array, "*batch length"]]:
    """(inputs, weights): each token is chosen with probability `rate`, and weighs 1 as a target.

    Of the chosen, 80% are replaced by mask_token, 10% by a random one, and 10% stay, so that what a
    model sees while it is trained is not always a mask. Padding (segment 0) is never chosen.
    Source: Devlin et al. 2019 (BERT), §3.1.
    """
    if not 0.0 < rate <= 1.0:
        raise ValueError(f"rate is {rate}; it must be in (0, 1]")
    if not 0 <= mask_token < vocab_size:
        raise ValueError(f"mask_token is {mask_token}; it must be in 0 … {vocab_size - 1}")
    chosen_key, how_key, other_key = jax.random.split(key, 3)
    chosen = jax.random.bernoulli(chosen_key, rate, tokens.shape)
    if segments is not None:
        chosen &= segments != 0
    how = jax.random.uniform(how_key, tokens.shape)
    other = jax.random.randint(other_key, tokens.shape, 0, vocab_size, tokens.dtype)
    replaced = jnp.where(how < 0.8, mask_token, jnp.where(how < 0.9, other, tokens))
    return jnp.where(chosen, replaced, tokens), chosen.astype(jnp.float32)
