"""The loss of every model: cross-entropy of a batch's targets."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxformer.functional.contexts import Source
from jaxformer.functional.losses import chunked_cross_entropy
from jaxformer.training.batch import Batch


def summed_loss(
    model, params, batch: Batch, dropout_key=None, label_smoothing: float = 0.0
) -> tuple[Array, Array]:
    """(Σ loss, tokens that count), in nats: sums, so that batches of any sizes may be added up.

    dropout_key: None when the model is scored.
    """
    hidden = _hidden(model, params, batch, dropout_key)
    head = model.output_map(params)
    count = jnp.float32(batch.targets.size) if batch.weights is None else batch.weights.sum()
    mean = chunked_cross_entropy(
        hidden,
        head["kernel"],
        batch.targets,
        batch.weights,
        bias=head.get("bias"),
        cap=head.get("cap"),
        label_smoothing=label_smoothing,
    )
    return mean * count, count


def summed_correct(model, params, batch: Batch) -> Array:
    """Of the targets that count, how many the model thinks more probable than any other token."""
    hidden = _hidden(model, params, batch, None)
    rows = jax.lax.map(lambda row: model.logits(params, row[None])[0].argmax(axis=-1), hidden)
    right = rows == batch.targets
    return right.sum() if batch.weights is None else jnp.where(right, batch.weights, 0.0).sum()


def _hidden(model, params, batch: Batch, dropout_key) -> Array:
    source = None if batch.source is None else Source(batch.source, batch.source_segments)
    return model.forward(
        params, batch.inputs, segments=batch.segments, source=source, dropout_key=dropout_key
    ).hidden
