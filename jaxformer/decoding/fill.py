"""Filling in masked tokens with a bidirectional model."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.decoding.autoregressive import check_finite_logits
from jaxformer.decoding.batches import rows_of_caller, rows_within
from jaxformer.models.explicit_axes import in_auto_axes
from jaxformer.models.kinds import Encoder
from jaxformer.models.language_model import LanguageModel
from jaxformer.models.mesh import to_host
from jaxformer.models.rows import batch_bucket, bucket, padded, row_of_ids, with_batch_size


class Filled(NamedTuple):
    """The most probable tokens at each masked position of a row, the best first."""

    positions: np.ndarray  # int [places]
    tokens: np.ndarray  # int [places, top_k]
    probabilities: np.ndarray  # float32 [places, top_k]


@in_auto_axes
def fill(
    model: LanguageModel,
    variables: Mapping[str, Any],
    rows: Iterable[Any],
    mask_token: int,
    top_k: int = 1,
    *,
    batch_size: int | None = None,
) -> list[Filled]:
    """Returns the tokens that an encoder expects at each `mask_token` in rows of ids.

    Each position is predicted independently.

    Args:
        model: an Encoder.
        variables: its variables.
        rows: rows of ids.
        mask_token: the id that stands for a masked token.
        top_k: number of tokens to return for each position.
        batch_size: the largest number of rows to compute at once. None: as many as have 16,384
            tokens and 1 GiB of logits; all rows with a mesh in context.

    Raises:
        ValueError: the model has another type, an id or a length is not accepted, or top_k is not
            in 1 … vocab_size.
        FloatingPointError: logits of a row are not finite.
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
    width = min(config.max_length, bucket(longest))
    by_bounds = rows_within(width, 4 * width * config.vocab_size)
    most, found = rows_of_caller(len(rows), batch_size) or by_bounds, []
    for at in range(0, len(rows), most):
        some = rows[at : at + most]
        tokens, segments = padded(with_batch_size(some, batch_bucket(len(some))), width)
        result = _most_probable(model, variables, tokens, segments, top_k)
        best, probabilities = map(to_host, result)
        broken = np.isnan(probabilities).any(axis=(1, 2))
        check_finite_logits(np.pad(broken, (at, 0)), variables)  # it names the row of the call
        for row, ids in enumerate(some):
            places = np.flatnonzero(ids == mask_token)
            found.append(Filled(places, best[row, places], probabilities[row, places]))
    return found


@partial(jax.jit, static_argnums=(0, 4))
def _most_probable(
    model: LanguageModel,
    variables: Mapping[str, Any],
    tokens: Int[Array, "batch length"],
    segments: Int[Array, "batch length"],
    top_k: int,
) -> tuple[Int[Array, "batch length top_k"], Float[Array, "batch length top_k"]]:
    """Returns (ids, probabilities), both [batch, length, top_k], the best first."""
    predicted = jax.nn.softmax(model.apply(variables, tokens, segments))
    probabilities, ids = jax.lax.top_k(predicted, top_k)
    return ids, probabilities
