"""Masked language modelling: replaces tokens that an encoder learns to predict."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray


def mask_tokens(
    key: PRNGKeyArray,
    tokens: Int[Array, "*batch length"],
    mask_token: int,
    vocab_size: int,
    *,
    rate: float = 0.15,
    segment_ids: Int[Array, "*batch length"] | None = None,
    special: Sequence[int] = (),
) -> tuple[Int[Array, "*batch length"], Float[Array, "*batch length"]]:
    """Chooses each token as a target with probability `rate`, and masks most targets.

    Of the chosen tokens, 80% become `mask_token`, 10% become a random token and 10% remain
    unchanged. The model therefore also learns predictions at positions without `mask_token`.

    Args:
        key: a random key.
        tokens: the token ids.
        mask_token: the id that replaces masked tokens.
        vocab_size: the number of token ids, for random tokens.
        rate: the probability that a token is chosen.
        segment_ids: 0 for tokens that are never chosen, such as padding; all tokens may be chosen
            if None.
        special: ids that are never chosen and never drawn as a random token, such as [CLS] and
            [SEP]. The function adds `mask_token` to `special`.

    Returns:
        (inputs, weights): the partly masked tokens, and a float that is 1 for each chosen token.

    Raises:
        ValueError: `rate` or `mask_token` is out of range, or every id is special.

    Reference:
        Devlin et al. 2019 (BERT), §3.1.
    """
    if not 0.0 < rate <= 1.0:
        raise ValueError(f"rate is {rate}; it must be in (0, 1]")
    if not 0 <= mask_token < vocab_size:
        raise ValueError(f"mask_token is {mask_token}; it must be in 0 … {vocab_size - 1}")
    chosen_key, how_key, other_key = jax.random.split(key, 3)
    excluded = np.unique([token for token in (*special, mask_token) if 0 <= token < vocab_size])
    if len(excluded) == vocab_size:
        raise ValueError(f"special has all {vocab_size} ids; at least one must not be special")
    chosen = jax.random.bernoulli(chosen_key, jnp.float32(rate), tokens.shape) & ~jnp.isin(
        tokens, excluded
    )
    if segment_ids is not None:
        chosen &= segment_ids != 0
    how = jax.random.uniform(how_key, tokens.shape, jnp.float32)
    number = jax.random.randint(
        other_key, tokens.shape, 0, vocab_size - len(excluded), tokens.dtype
    )
    # The n-th ordinary id is n plus the number of special ids below this id.
    below = jnp.searchsorted(excluded - np.arange(len(excluded)), number, side="right")
    other = number + below.astype(tokens.dtype)
    replaced = jnp.where(how < 0.8, mask_token, jnp.where(how < 0.9, other, tokens))
    return jnp.where(chosen, replaced, tokens), chosen.astype(jnp.float32)
