"""The loss of every model: cross-entropy of a batch's targets."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxformer.functional.contexts import Source
from jaxformer.functional.kernels import is_kernel
from jaxformer.functional.losses import chunked_cross_entropy
from jaxformer.functional.spread import gathered, num_parts, row_axes, spread
from jaxformer.training.batch import Batch


def summed_loss(
    model, params, batch: Batch, dropout_key=None, label_smoothing: float = 0.0
) -> tuple[Array, Array]:
    """(Σ loss, tokens that count), in nats: sums, so that batches of any sizes may be added up.

    dropout_key: None when the model is scored. Where rows are spread over devices, each device sums
    the gradient of the head for its own: they exchange it once, and not for every chunk of tokens.
    """
    hidden = _hidden(model, params, batch, dropout_key)
    head = model.output_map(params)
    kernel = head["kernel"]
    kernel = kernel if is_kernel(kernel) else gathered(kernel.T, hidden.dtype).T
    count = jnp.float32(batch.targets.size) if batch.weights is None else batch.weights.sum()

    def of_rows(hidden, targets, weights):
        mean = chunked_cross_entropy(
            hidden,
            kernel,
            targets,
            weights,
            bias=head.get("bias"),
            cap=head.get("cap"),
            label_smoothing=label_smoothing,
        )
        return mean * (jnp.float32(targets.size) if weights is None else weights.sum())

    rows = (hidden, batch.targets, batch.weights)
    axes = row_axes(kernel.shape[-1])
    if (parts := num_parts(len(hidden), axes)) == 1:
        return of_rows(*rows), count
    rows = (spread(hidden), *rows[1:])  # so that its gradient is where the model's work is
    rows = jax.tree.map(lambda x: spread(x.reshape(parts, -1, *x.shape[1:]), axes), rows)
    return jax.vmap(of_rows)(*rows).sum(), count


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
