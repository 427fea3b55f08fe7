"""Scoring: the log-probability of a text under a model."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.decoding.autoregressive import check_finite_logits, complete_inputs
from jaxformer.decoding.batches import in_parts, rows_of_caller, rows_within
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.losses.chunked import chunked_token_losses
from jaxformer.functional.positions import DocumentCursor, document_positions
from jaxformer.functional.trees import Weights
from jaxformer.models.autoregressive import require_autoregressive
from jaxformer.models.explicit_axes import in_auto_axes
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.models.rows import batch_bucket, with_batch_size


@in_auto_axes
def score(
    model: LanguageModel,
    variables: Variables,
    tokens: Int[Array, "batch length"],
    segments: Int[Array, "batch length"] | None = None,
    source: Any = None,
    *,
    batch_size: int | None = None,
) -> Float[Array, " batch"]:
    """Computes Σ_i log P(x_i | x_<i) in nats over each row.

    The first token of each document is not scored; with a prefix-LM, no token of the prefix is.

    Args:
        model: an autoregressive model.
        variables: its variables.
        tokens: int [batch, length].
        segments: int [batch, length]; 0 is padding, 1, 1, 2, 2, … are packed documents, each of
            which is scored independently.
        source: for a model that reads one, a source for each row, as for `start`.
        batch_size: the largest number of rows to compute at once. None: as many as have 16,384
            tokens; all rows with a mesh in context.

    Raises:
        ValueError: an argument is not accepted.
        FloatingPointError: the logits are not finite; inside jit the score is NaN instead.
    """
    require_autoregressive(model)
    inputs = complete_inputs(model, variables, tokens, segments, source)
    tokens = inputs.tokens
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens are {tokens.dtype} {tokens.shape}; score needs their ids")
    most = rows_of_caller(len(tokens), batch_size) or rows_within(tokens.shape[1])
    model = model.clone(execution=model.execution.for_decoding)  # any length is accepted
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(inputs)):
        return _score(model, variables["params"], inputs)
    parts = []
    for part in in_parts(inputs, most):
        number = len(part.tokens)
        fill = partial(with_batch_size, batch_size=batch_bucket(number))
        parts.append(_score(model, variables["params"], jax.tree.map(fill, part))[:number])
    scores = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    if not isinstance(scores, jax.core.Tracer):
        check_finite_logits(np.isnan(scores), variables)
    return scores


@partial(jax.jit, static_argnums=0)
def _score(model: LanguageModel, params: Weights, inputs: Inputs) -> Float[Array, " batch"]:
    hidden, tokens, segments = model.forward(params, inputs).hidden, inputs.tokens, inputs.segments
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    if segments is None:
        hidden = hidden[:, :-1]
    else:  # a token is predicted at the last real token before it, with or without padding between
        real = jnp.where(segments != 0, positions, 0)
        before = jax.lax.cummax(real, axis=1)[:, :-1, None]
        hidden = jnp.take_along_axis(hidden, before, axis=1)
        _, positions, _ = document_positions(segments, DocumentCursor.begin(len(segments)))
    head = model.output_map(params)
    kernel, bias, cap = head["kernel"], head.get("bias"), head.get("cap")
    losses = chunked_token_losses(hidden, kernel, tokens[:, 1:], bias=bias, cap=cap)
    return -jnp.where(positions[:, 1:] >= model.minimum_prefill, losses, 0.0).sum(axis=-1)
