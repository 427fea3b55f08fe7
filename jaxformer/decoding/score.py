"""Log-probability of texts under a model."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.decoding.autoregressive import check_finite_logits, complete_inputs
from jaxformer.decoding.batches import batch_size_for_width, requested_batch_size, split_batch
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.losses.chunked import chunked_token_losses
from jaxformer.functional.positions import DocumentCursor, document_positions
from jaxformer.functional.trees import Weights
from jaxformer.models.autoregressive import require_autoregressive
from jaxformer.models.check import Sources
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.models.sequences import batch_bucket, with_batch_size
from jaxformer.models.sharding.explicit_axes import in_auto_axes


@in_auto_axes
def score(
    model: LanguageModel,
    variables: Variables,
    tokens: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"] | None = None,
    source: Sources | None = None,
    *,
    batch_size: int | None = None,
) -> Float[Array, " batch"]:
    """Computes Σ_i log P(x_i | x_<i) of each sequence, in nats.

    The sum excludes the first token of each document or, with a prefix-LM, the whole prefix.

    Args:
        model: an autoregressive model.
        variables: the model's variables.
        tokens: int [batch, length].
        segment_ids: int [batch, length]; 0 is padding, 1, 1, 2, 2, … are packed documents, each of
            which is scored independently.
        source: for an encoder-decoder, a source for each sequence, as for `init_cache`.
        batch_size: maximum number of sequences per forward pass. By default, a batch has at most
            16,384 tokens. With a mesh in context, the default is all sequences.

    Raises:
        ValueError: An argument is invalid.
        FloatingPointError: The logits are not finite. Inside jit, the score is NaN instead.
    """
    require_autoregressive(model)
    inputs = complete_inputs(model, variables, tokens, segment_ids, source)
    tokens = inputs.tokens
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens is {tokens.dtype} {tokens.shape}; score accepts integer token ids only"
        )
    most = requested_batch_size(len(tokens), batch_size) or batch_size_for_width(tokens.shape[1])
    # The implementation of attention for decoding accepts sequences of any length.
    model = model.clone(execution=model.execution.for_decoding)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(inputs)):
        return _score(model, variables["params"], inputs)
    parts = []
    for part in split_batch(inputs, most):
        number = len(part.tokens)
        fill = partial(with_batch_size, batch_size=batch_bucket(number))
        parts.append(_score(model, variables["params"], jax.tree.map(fill, part))[:number])
    scores = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    if not isinstance(scores, jax.core.Tracer):
        check_finite_logits(np.isnan(scores), variables)
    return scores


@partial(jax.jit, static_argnums=0)
def _score(model: LanguageModel, params: Weights, inputs: Inputs) -> Float[Array, " batch"]:
    hidden, tokens, segment_ids = (
        model.forward(params, inputs).hidden,
        inputs.tokens,
        inputs.segment_ids,
    )
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    if segment_ids is None:
        hidden = hidden[:, :-1]
    else:
        # Each token is predicted from the hidden state of the nearest earlier token that is not
        # padding.
        real = jnp.where(segment_ids != 0, positions, 0)
        before = jax.lax.cummax(real, axis=1)[:, :-1, None]
        hidden = jnp.take_along_axis(hidden, before, axis=1)
        _, positions, _ = document_positions(segment_ids, DocumentCursor.begin(len(segment_ids)))
    head = model.output_map(params)
    kernel, bias, cap = head["kernel"], head.get("bias"), head.get("cap")
    losses = chunked_token_losses(hidden, kernel, tokens[:, 1:], bias=bias, cap=cap)
    return -jnp.where(positions[:, 1:] >= model.minimum_prefill, losses, 0.0).sum(axis=-1)
