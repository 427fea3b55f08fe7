"""Prediction of masked tokens with a bidirectional model."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.decoding.autoregressive import check_finite_logits
from jaxformer.decoding.batches import batch_size_for_width, requested_batch_size
from jaxformer.models.kinds import Encoder
from jaxformer.models.language_model import LanguageModel
from jaxformer.models.sequences import batch_bucket, bucket, id_sequence, padded, with_batch_size
from jaxformer.models.sharding.explicit_axes import in_auto_axes
from jaxformer.models.sharding.parameters import to_host


class Filled(NamedTuple):
    """The most probable tokens at each masked position of a text, the most probable first.

    Attributes:
        positions: int [num_masked], the masked positions.
        tokens: int [num_masked, top_k], the token ids.
        probabilities: float32 [num_masked, top_k], the probabilities of the tokens.
    """

    positions: np.ndarray
    tokens: np.ndarray
    probabilities: np.ndarray


@in_auto_axes
def fill(
    model: LanguageModel,
    variables: Mapping[str, Any],
    texts: Iterable[Any],
    mask_token: int,
    top_k: int = 1,
    *,
    batch_size: int | None = None,
) -> list[Filled]:
    """Predicts the token at each `mask_token`, independently of the other masked positions.

    Args:
        model: an Encoder.
        variables: the model's variables.
        texts: the token ids of each text.
        mask_token: the id of the mask token.
        top_k: number of tokens to return per masked position.
        batch_size: maximum number of texts per forward pass. By default, a batch has at most 16,384
            tokens and 1 GiB of logits. With a mesh in context, the default is all texts.

    Raises:
        ValueError: The model is not an Encoder, an id or a length is invalid, or top_k is not in
            1 … vocab_size.
        FloatingPointError: Logits of a text are not finite.
    """
    if not isinstance(model, Encoder):
        raise ValueError(f"model has class {type(model).__name__}, but fill needs an Encoder")
    config = model.config
    if not 1 <= top_k <= config.vocab_size:
        raise ValueError(f"top_k is {top_k}; it must be in 1 … vocab_size ({config.vocab_size})")
    texts = [id_sequence(f"text {i}", text, config.vocab_size) for i, text in enumerate(texts)]
    longest = max(map(len, texts), default=0)
    if not 1 <= longest <= config.max_length:
        raise ValueError(
            f"the longest text has {longest} tokens; 1 to {config.max_length} are accepted"
        )
    width = min(config.max_length, bucket(longest))
    by_bounds = batch_size_for_width(width, 4 * width * config.vocab_size)
    most, found = requested_batch_size(len(texts), batch_size) or by_bounds, []
    for at in range(0, len(texts), most):
        some = texts[at : at + most]
        tokens, segment_ids = padded(with_batch_size(some, batch_bucket(len(some))), width)
        result = _most_probable(model, variables, tokens, segment_ids, top_k)
        best, probabilities = map(to_host, result)
        broken = np.isnan(probabilities).any(axis=(1, 2))
        # `at` entries in front turn the index in the error message into an index of `texts`.
        check_finite_logits(np.pad(broken, (at, 0)), variables)
        for index, ids in enumerate(some):
            places = np.flatnonzero(ids == mask_token)
            found.append(Filled(places, best[index, places], probabilities[index, places]))
    return found


@partial(jax.jit, static_argnums=(0, 4))
def _most_probable(
    model: LanguageModel,
    variables: Mapping[str, Any],
    tokens: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"],
    top_k: int,
) -> tuple[Int[Array, "batch length top_k"], Float[Array, "batch length top_k"]]:
    """Returns (ids, probabilities), both [batch, length, top_k], the most probable first."""
    predicted = jax.nn.softmax(model.apply(variables, tokens, segment_ids))
    probabilities, ids = jax.lax.top_k(predicted, top_k)
    return ids, probabilities
