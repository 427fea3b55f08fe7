"""Cross-entropy loss of a batch, for every kind of model."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxformer.functional.chunked_losses import chunked_cross_entropy
from jaxformer.functional.inputs import Inputs
from jaxformer.functional.kernels import is_kernel
from jaxformer.models.activation_sharding import gather_vectors, num_parts, row_axes, shard_rows
from jaxformer.training.batch import Batch


def summed_loss(
    model, params, batch: Batch, dropout_key=None, label_smoothing: float = 0.0
) -> tuple[Array, Array]:
    """Computes the summed loss of a batch in nats, and the number of tokens that count.

    Sums of batches with different token counts can be added. If the rows are sharded, each device
    sums the head's gradient over its own rows. So the devices exchange it once, not once per chunk
    of tokens.

    Args:
        model: The model.
        params: Its parameters.
        batch: The batch.
        dropout_key: The random key of dropout; None: no dropout.
        label_smoothing: The share of the target probability that is spread over all tokens.
    """
    hidden = _hidden(model, params, batch, dropout_key)
    head = model.output_map(params)
    kernel = head["kernel"]
    kernel = kernel if is_kernel(kernel) else gather_vectors(kernel.T, hidden.dtype).T
    mean_loss = partial(chunked_cross_entropy, bias=head.get("bias"), cap=head.get("cap"))

    def of_rows(hidden, targets, weights):
        mean = mean_loss(hidden, kernel, targets, weights, label_smoothing=label_smoothing)
        return mean * (jnp.float32(targets.size) if weights is None else weights.sum())

    rows = (hidden, batch.targets, batch.weights)
    axes = row_axes(kernel.shape[-1])
    if (parts := num_parts(len(hidden), axes)) == 1:
        return of_rows(*rows), counted(batch)
    rows = (shard_rows(hidden), *rows[1:])  # so that its gradient is sharded like the model's work
    rows = jax.tree.map(lambda x: shard_rows(x.reshape(parts, -1, *x.shape[1:]), axes), rows)
    return jax.vmap(of_rows)(*rows).sum(), counted(batch)


def counted(batch: Batch) -> Array:
    """Returns the number of targets that count, float32."""
    return jnp.float32(batch.targets.size) if batch.weights is None else batch.weights.sum()


def summed_correct(model, params, batch: Batch) -> Array:
    """Returns the number of counted targets that are the model's most probable token."""
    hidden = _hidden(model, params, batch, None)
    rows = jax.lax.map(lambda row: model.logits(params, row[None])[0].argmax(axis=-1), hidden)
    right = rows == batch.targets
    return right.sum() if batch.weights is None else jnp.where(right, batch.weights, 0.0).sum()


def _hidden(model, params, batch: Batch, dropout_key) -> Array:
    inputs = Inputs(batch.inputs, batch.segments, None, batch.source, batch.source_segments)
    return model.forward(params, inputs, dropout_key=dropout_key).hidden
