"""Cross-entropy loss of a batch, for every kind of model."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxformer.functional.inputs import Forward, Inputs
from jaxformer.functional.linear.kernels import is_kernel
from jaxformer.functional.losses.chunked import Losses, chunked_weighted_sums
from jaxformer.functional.trees import Weights
from jaxformer.models.activation_sharding import gather_vectors, num_parts, row_axes, shard_rows
from jaxformer.models.explicit_axes import in_auto_axes
from jaxformer.models.language_model import LanguageModel
from jaxformer.training.batch import Batch


@in_auto_axes
def summed_loss(model: LanguageModel, params: Weights, batch: Batch) -> Array:
    """Computes the sum of a batch's losses in nats, each multiplied by its target's weight.

    Sums of batches with different token counts can be added.

    Args:
        model: The model.
        params: Its parameters.
        batch: The batch.
    """
    return head_losses(model, params, read_batch(model, params, batch).hidden, batch).loss


def read_batch(
    model: LanguageModel, params: Weights, batch: Batch, dropout_key: PRNGKeyArray | None = None
) -> Forward:
    """Runs one pass over the inputs of a batch.

    Args:
        model: The model.
        params: Its parameters.
        batch: The batch.
        dropout_key: The random key of dropout; None: no dropout.
    """
    inputs = Inputs(batch.inputs, batch.segments, None, batch.source, batch.source_segments)
    return model.forward(params, inputs, dropout_key=dropout_key)


def head_losses(
    model: LanguageModel,
    params: Weights,
    hidden: Float[Array, "batch length dim"],
    batch: Batch,
    label_smoothing: float = 0.0,
) -> Losses:
    """Computes the sums of a batch's losses with and without label smoothing.

    Sums of batches with different token counts can be added. If the rows are sharded, each device
    sums the head's gradient over its own rows. So the devices exchange it once, not once per chunk
    of tokens.

    Args:
        model: The model.
        params: Its parameters.
        hidden: The input of the head, from `read_batch`.
        batch: The batch.
        label_smoothing: The share of the target probability that is spread over all tokens.
    """
    head = model.output_map(params)
    kernel = head["kernel"]
    kernel = kernel if is_kernel(kernel) else gather_vectors(kernel.T, hidden.dtype).T

    def of_rows(
        hidden: Float[Array, "rows length dim"],
        targets: Int[Array, "rows length"],
        weights: Float[Array, "rows length"],
    ) -> Losses:
        return chunked_weighted_sums(
            hidden, kernel, targets, weights, head.get("bias"), head.get("cap"), label_smoothing
        )

    rows = (hidden, batch.targets, target_weights(batch))
    axes = row_axes(kernel.shape[-1])
    if (parts := num_parts(len(hidden), axes)) == 1:
        return of_rows(*rows)
    rows = (shard_rows(hidden), *rows[1:])  # so that its gradient is sharded like the model's work
    rows = jax.tree.map(lambda x: shard_rows(x.reshape(parts, -1, *x.shape[1:]), axes), rows)
    return jax.tree.map(jnp.sum, jax.vmap(of_rows)(*rows))


def target_weights(batch: Batch) -> Array:
    """Returns the weight of each target, float32."""
    if batch.weights is None:
        return jnp.ones(batch.targets.shape, jnp.float32)
    return batch.weights.astype(jnp.float32)


def counted(batch: Batch) -> Array:
    """Returns the sum of the targets' weights, float32."""
    return jnp.float32(batch.targets.size) if batch.weights is None else batch.weights.sum()


def summed_correct(model: LanguageModel, params: Weights, batch: Batch) -> Array:
    """Returns the number of counted targets that are the model's most probable token."""
    hidden = read_batch(model, params, batch).hidden
    rows = jax.lax.map(lambda row: model.logits(params, row[None])[0].argmax(axis=-1), hidden)
    right = rows == batch.targets
    return right.sum() if batch.weights is None else jnp.where(right, batch.weights, 0.0).sum()
