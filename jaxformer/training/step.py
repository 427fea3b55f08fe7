"""One update: gradients of a batch, micro-batch by micro-batch, then the optimiser; one jit."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxformer.models.build import init
from jaxformer.models.config.lora import LoraConfig
from jaxformer.models.lora import adapted, init_adapter
from jaxformer.training.batch import Batch
from jaxformer.training.loss import summed_loss


class TrainState(NamedTuple):
    """All that an update reads and writes. step: updates made so far; params: what is learnt, the
    model's parameters or an adapter; key: of dropout; average: of the params, where one is kept;
    frozen: the parameters that an adapter is of."""

    step: Array
    params: dict
    optimizer: optax.OptState
    key: Array
    average: dict | None = None
    frozen: dict | None = None

    def weights(self, lora_scale: float = 1.0) -> dict:
        """What the model is scored by, and used with: of the average, where one is kept."""
        params = self.params if self.average is None else self.average
        return params if self.frozen is None else adapted(self.frozen, params, lora_scale)

    def parts(self):
        """What a checkpoint holds: (params to use the model with, the other arrays)."""
        rest = {"optimizer": self.optimizer, "key": jax.random.key_data(self.key)}
        if self.average is None:
            return self.params, rest
        return self.average, {**rest, "params": self.params}

    def restored(self, step: int, params, rest) -> "TrainState":
        """The state of such a checkpoint; what is frozen stays as it is."""
        key = jax.random.wrap_key_data(rest["key"])
        if self.average is None:
            learnt = {"params": params}
        else:
            learnt = {"params": rest["params"], "average": params}
        return self._replace(step=jnp.int32(step), optimizer=rest["optimizer"], key=key, **learnt)


def init_state(
    model,
    optimizer,
    seed: int,
    base: dict | None = None,
    *,
    lora: LoraConfig = LoraConfig(),  # noqa: B008 (frozen)
    averages: bool = False,
) -> TrainState:
    """Parameters, optimiser state and dropout key, all from one seed.

    base: the parameters to begin with, or, with a LoRA rank, to learn an adapter of; None: fresh
    ones. averages: an average of what is learnt is kept.
    """
    params_key, dropout_key = jax.random.split(jax.random.key(seed))
    frozen = None
    if base is None:
        params = init(model, params_key)["params"]
    elif lora.lora_rank is None:
        params = base
    else:
        params, frozen = init_adapter(params_key, base, lora), base
    average = jax.tree.map(jnp.copy, params) if averages else None
    state = TrainState(jnp.int32(0), params, optimizer.init(params), dropout_key)
    return state._replace(average=average, frozen=frozen)


class Measured(NamedTuple):
    """Of an update: the loss before it, nats per counted token over the whole batch, and the
    gradient's global norm before it is clipped."""

    loss: Array
    gradient_norm: Array


def make_step(
    model,
    optimizer,
    label_smoothing: float = 0.0,
    *,
    skip_non_finite: bool = False,
    lora_scale: float = 1.0,
    average_decay: float | None = None,
):
    """(state, batch, learning_rate=1) → (state, Measured), jitted; the state given is donated: its
    buffers are reused.

    batch: micro-batches along its first axis. learning_rate: what the optimiser's updates are
    multiplied by; 1 for one that has a schedule of its own. Micro-batches add up sums, not means,
    so they give the full batch's gradient however unequal their token counts are. skip_non_finite:
    where the loss or the gradient is not finite, all but the step stays as it is. lora_scale: of an
    adapter's updates; average_decay: of the average, where the state has one.
    """
    dropout = model.config.dropout > 0

    def loss_of(params, frozen, batch, key):
        params = params if frozen is None else adapted(frozen, params, lora_scale)
        return summed_loss(model, params, batch, key if dropout else None, label_smoothing)

    def accumulate(params, frozen, batch, key):
        """Σ loss, Σ count and Σ gradient over the micro-batches."""
        gradient = jax.value_and_grad(loss_of, has_aux=True)
        keys = jax.random.split(key, len(batch.inputs))

        def add(sums, micro):
            (loss, count), gradients = gradient(params, frozen, *micro)
            return jax.tree.map(jnp.add, sums, (loss, count, gradients)), None

        first, rest = (
            jax.tree.map(lambda x, i=i: x[i], (batch, keys)) for i in (0, slice(1, None))
        )
        (loss, count), gradients = gradient(params, frozen, *first)
        if len(batch.inputs) == 1:
            return loss, count, gradients
        return jax.lax.scan(add, (loss, count, gradients), rest)[0]

    @partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, batch: Batch, learning_rate=1.0):
        key = jax.random.fold_in(state.key, state.step)
        loss, count, gradients = accumulate(state.params, state.frozen, batch, key)
        # A product can be fused into what reads it; a quotient would be a pass over the gradients.
        inverse = 1.0 / jnp.where(count == 0, 1.0, count)
        gradients = jax.tree.map(lambda g: g * inverse, gradients)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        updates = jax.tree.map(lambda update: learning_rate * update, updates)
        params = optax.apply_updates(state.params, updates)
        average = state.average
        if average is not None:
            average = moved_average(average, params, state.step, average_decay)
        learnt = (params, optimizer_state, state.key, average)
        measured = Measured(loss * inverse, optax.global_norm(gradients))
        if skip_non_finite:
            good = jnp.isfinite(measured.loss) & jnp.isfinite(measured.gradient_norm)
            before = (state.params, state.optimizer, state.key, state.average)
            learnt = jax.tree.map(lambda new, old: jnp.where(good, new, old), learnt, before)
        return TrainState(state.step + 1, *learnt, state.frozen), measured

    return step


def moved_average(average, params, step, decay: float):
    """The exponential moving average after update number step + 1, its bias corrected as Adam's
    are (Kingma & Ba 2015): Σ_s d^(t−s) θ_s / Σ_s d^(t−s) over the updates s = 1 … t.

    Kept as it is used: m_t = m_{t−1} + w (θ_t − m_{t−1}) with w = (1 − d) / (1 − d^t), 1 at first.
    """
    # By logarithms: 1 − d^t of two numbers near 1 would lose most of its digits.
    correction = -jnp.expm1((step + 1) * math.log(decay))
    return optax.incremental_update(params, average, (1 - decay) / correction)
