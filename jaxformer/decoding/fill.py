"""Filling in: which tokens a bidirectional model expects at the places of a mask."""

from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from jaxformer.decoding.autoregressive import refuse_broken
from jaxformer.models.encoder import Encoder
from jaxformer.models.placement import to_host
from jaxformer.models.rows import bucket, padded, row_of_ids


class Filled(NamedTuple):
    """The most probable tokens at each masked place of a row, the best first."""

    positions: np.ndarray  # int [places]
    tokens: np.ndarray  # int [places, top_k]
    probabilities: np.ndarray  # float32 [places, top_k]


def fill(model, variables, rows, mask_token: int, top_k: int = 1) -> list[Filled]:
    """What an encoder expects wherever `mask_token` stands in rows of ids, each place by itself.

    ValueError for another kind of model, an id or a length that is not accepted, or a top_k outside
    1 … vocab_size.
    """
    if not isinstance(model, Encoder):
        raise ValueError(f"model is a {type(model).__name__}; fill needs an Encoder")
    config = model.config
    if not 1 <= top_k <= config.vocab_size:
        raise ValueError(f"top_k is {top_k}; it must be in 1 … vocab_size ({config.vocab_size})")
    rows = [row_of_ids(f"row {i}", row, config.vocab_size) for i, row in enumerate(rows)]
    longest = max(map(len, rows), default=0)
    if not 1 <= longest <= config.max_length:
        raise ValueError(f"rows have up to {longest} tokens; 1 … {config.max_length} are accepted")
    tokens, segments = padded(rows, min(config.max_length, bucket(longest)))
    best, probabilities = map(to_host, _most_probable(model, variables, tokens, segments, top_k))
    refuse_broken(np.isnan(probabilities).any(axis=(1, 2)), variables)
    places = [np.flatnonzero(ids == mask_token) for ids in rows]
    return [Filled(at, best[row, at], probabilities[row, at]) for row, at in enumerate(places)]


@partial(jax.jit, static_argnums=(0, 4))
def _most_probable(model, variables, tokens, segments, top_k: int):
    """(ids, probabilities) [batch, length, top_k], the best first."""
    probabilities, ids = jax.lax.top_k(
        jax.nn.softmax(model.apply(variables, tokens, segments)), top_k
    )
    return ids, probabilities
