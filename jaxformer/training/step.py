"""One update: gradients of a batch, micro-batch by micro-batch, then the optimiser; one jit."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxformer.models.build import init
from jaxformer.training.batch import Batch
from jaxformer.training.loss import summed_loss


class TrainState(NamedTuple):
    """All that an update reads and writes. step: updates made so far; key: of dropout."""

    step: Array
    params: dict
    optimizer: optax.OptState
    key: Array

    def parts(self):
        """What a checkpoint holds: (params, the other arrays)."""
        return self.params, {"optimizer": self.optimizer, "key": jax.random.key_data(self.key)}

    @classmethod
    def of_parts(cls, step: int, params, rest) -> "TrainState":
        """The state of such a checkpoint."""
        key = jax.random.wrap_key_data(rest["key"])
        return cls(jnp.int32(step), params, rest["optimizer"], key)


def init_state(model, optimizer, seed: int) -> TrainState:
    """Parameters, optimiser state and dropout key, all from one seed."""
    params_key, dropout_key = jax.random.split(jax.random.key(seed))
    params = init(model, params_key)["params"]
    return TrainState(jnp.int32(0), params, optimizer.init(params), dropout_key)


class Measured(NamedTuple):
    """Of an update: the loss before it, nats per counted token over the whole batch, and the
    gradient's global norm before it is clipped."""

    loss: Array
    gradient_norm: Array


def make_step(model, optimizer, label_smoothing: float = 0.0, skip_non_finite: bool = False):
    """(state, batch, learning_rate=1) → (state, Measured), jitted; the state given is donated: its
    buffers are reused.

    batch: micro-batches along its first axis. learning_rate: what the optimiser's updates are
    multiplied by; 1 for one that has a schedule of its own. Micro-batches add up sums, not means,
    so they give the full batch's gradient however unequal their token counts are. skip_non_finite:
    where the loss or the gradient is not finite, parameters and optimiser stay as they are.
    """
    dropout = model.config.dropout > 0

    def loss_of(params, batch, key):
        return summed_loss(model, params, batch, key if dropout else None, label_smoothing)

    def accumulate(params, batch, key):
        """Σ loss, Σ count and Σ gradient over the micro-batches."""
        gradient = jax.value_and_grad(loss_of, has_aux=True)
        keys = jax.random.split(key, len(batch.inputs))

        def add(sums, micro):
            (loss, count), gradients = gradient(params, *micro)
            return jax.tree.map(jnp.add, sums, (loss, count, gradients)), None

        first, rest = (
            jax.tree.map(lambda x, i=i: x[i], (batch, keys)) for i in (0, slice(1, None))
        )
        (loss, count), gradients = gradient(params, *first)
        if len(batch.inputs) == 1:
            return loss, count, gradients
        return jax.lax.scan(add, (loss, count, gradients), rest)[0]

    @partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, batch: Batch, learning_rate=1.0):
        key = jax.random.fold_in(state.key, state.step)
        loss, count, gradients = accumulate(state.params, batch, key)
        # A product can be fused into what reads it; a quotient would be a pass over the gradients.
        inverse = 1.0 / jnp.where(count == 0, 1.0, count)
        gradients = jax.tree.map(lambda g: g * inverse, gradients)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        updates = jax.tree.map(lambda update: learning_rate * update, updates)
        params = optax.apply_updates(state.params, updates)
        measured = Measured(loss * inverse, optax.global_norm(gradients))
        if skip_non_finite:
            good = jnp.isfinite(measured.loss) & jnp.isfinite(measured.gradient_norm)
            params, optimizer_state = jax.tree.map(
                lambda new, old: jnp.where(good, new, old),
                (params, optimizer_state),
                (state.params, state.optimizer),
            )
        return TrainState(state.step + 1, params, optimizer_state, state.key), measured

    return step
