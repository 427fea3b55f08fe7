"""How probable a text is under a model."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.decoding.autoregressive import refuse_broken
from jaxformer.decoding.protocol import require_autoregressive
from jaxformer.functional.losses import chunked_token_losses
from jaxformer.functional.positions import DocumentCursor, document_positions
from jaxformer.models.check import as_array, check_tokens


def score(
    model, variables, tokens: Int[Array, "batch length"], segments=None, source=None
) -> Float[Array, " batch"]:
    """Σ_i log P(x_i | x_<i) in nats over each row, the first token of each document given (of a
    prefix-LM the prefix, which its outputs have seen).

    source: a row for each, as for `start`. segments: int [batch, length]; 0 is padding, 1, 1, 2, 2,
    … packed documents, none of which scores the first token of the next. FloatingPointError if the
    logits are not finite; inside jit the score is then NaN.
    """
    require_autoregressive(model)
    tokens, segments = as_array("tokens", tokens), as_array("segments", segments)
    check_tokens(tokens, model.config, segments)
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens are {tokens.dtype} {tokens.shape}; score needs their ids")
    read = model.read_source(source)
    if read is not None and len(read.tokens) != len(tokens):
        raise ValueError(f"source has {len(read.tokens)} rows; tokens have {len(tokens)}")
    model.check(variables)
    scores = _score(model, variables["params"], tokens, segments, read)
    if not isinstance(scores, jax.core.Tracer):
        refuse_broken(np.isnan(scores), variables)
    return scores


@partial(jax.jit, static_argnums=0)
def _score(model, params, tokens, segments, source):
    hidden = model.forward(params, jnp.asarray(tokens), segments=segments, source=source).hidden
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    if segments is None:
        hidden = hidden[:, :-1]
    else:  # a token is predicted where the last real one before it stands, padding between or not
        real = jnp.where(segments != 0, positions, 0)
        before = jax.lax.cummax(real, axis=1)[:, :-1, None]
        hidden = jnp.take_along_axis(hidden, before, axis=1)
        _, positions, _ = document_positions(segments, DocumentCursor.begin(len(segments)))
    head = model.output_map(params)
    output = {"bias": head.get("bias"), "cap": head.get("cap")}
    losses = chunked_token_losses(hidden, head["kernel"], tokens[:, 1:], **output)
    return -jnp.where(positions[:, 1:] >= model.minimum_prefill, losses, 0.0).sum(axis=-1)
