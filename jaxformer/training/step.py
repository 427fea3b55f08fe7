"""The training step: its state, its shardings and the jitted update function."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, ArrayLike, Int, PRNGKeyArray

from jaxformer.models.config.lora import LoraConfig
from jaxformer.models.language_model import LanguageModel
from jaxformer.models.lora import adapt
from jaxformer.models.parameters import init
from jaxformer.models.sharding.explicit_axes import in_auto_axes
from jaxformer.models.sharding.parameters import AnyMesh, replicated, shardings
from jaxformer.models.trainable import combine, partition, trainable_value_and_grad
from jaxformer.training.batch import AnyBatch
from jaxformer.training.objectives import (
    CrossEntropy,
    Objective,
    Scalar,
    Sums,
    check_batch,
    check_objective,
    check_scalar,
    check_sums,
)


class TrainState(NamedTuple):
    """The training state, which each update replaces.

    Attributes:
        step: The number of updates so far.
        params: The model's parameters.
        optimizer: The optimizer state of the trainable parameters (see `models.trainable`).
        key: The random key for dropout.
        average: The moving average of the trainable parameters, or None without averaging.
    """

    step: Array
    params: dict
    optimizer: optax.OptState
    key: Array
    average: dict | None = None

    def weights(self) -> dict:
        """Returns the parameters for evaluation: the moving average, if the state has one."""
        return self.params if self.average is None else self._with(self.average)

    def parts(self) -> tuple[dict, dict]:
        """Returns the arrays of a checkpoint as (parameters, remaining arrays).

        The parameters are the moving average, if the state has one. Frozen parameters are excluded.
        """
        trainable, _ = partition(self.params)
        rest = {"optimizer": self.optimizer, "key": jax.random.key_data(self.key)}
        if self.average is None:
            return trainable, rest
        return self.average, {**rest, "params": trainable}

    def restored(self, step: int, params: Any, rest: Any) -> "TrainState":
        """Returns a state with the arrays of a checkpoint and the frozen parameters of this state.

        Args:
            step: The step of the checkpoint.
            params: The first dict that `parts` returned when the checkpoint was saved.
            rest: The second dict that `parts` returned when the checkpoint was saved.
        """
        key, optimizer = jax.random.wrap_key_data(rest["key"]), rest["optimizer"]
        if self.average is None:
            return TrainState(jnp.int32(step), self._with(params), optimizer, key)
        return TrainState(jnp.int32(step), self._with(rest["params"]), optimizer, key, params)

    def _with(self, trainable: dict) -> dict:
        """Returns all parameters, with `trainable` in place of the current trainable parameters."""
        return combine(trainable, partition(self.params)[1])


def init_state(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    seed: int,
    base: dict | None = None,
    *,
    lora: LoraConfig = LoraConfig(),  # noqa: B008 (frozen)
    averages: bool = False,
) -> TrainState:
    """Creates the parameters, the optimizer state and the dropout key from one seed.

    Args:
        model: The model.
        optimizer: An optax optimizer.
        seed: The seed.
        base: The initial parameters; random parameters if None.
        lora: LoRA settings. If `lora.lora_rank` is given, low-rank updates of the kernels in `base`
            are the only trainable parameters.
        averages: Whether to keep a moving average of the trainable parameters.
    """
    params_key, dropout_key = jax.random.split(jax.random.key(seed))
    if base is None:
        params = init(model, params_key)["params"]
    else:
        params = base if lora.lora_rank is None else adapt(params_key, base, lora)
    trainable, _ = partition(params)
    average = jax.tree.map(jnp.copy, trainable) if averages else None
    state = TrainState(jnp.int32(0), params, optimizer.init(trainable), dropout_key, average)
    return _with_own_buffers(state)


def _with_own_buffers(state: TrainState) -> TrainState:
    """Copies arrays that occur more than once in the state.

    A step donates the state, and a buffer can be donated only once. Optimizers such as Prodigy keep
    a reference to the initial parameters.
    """
    seen = set()

    def own(x: Array) -> Array:
        if id(x) in seen:
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(own, state)


def state_shardings(model: LanguageModel, mesh: AnyMesh, shapes: TrainState) -> TrainState:
    """Returns the sharding of each array of a training state.

    An array of the optimizer state gets the sharding of the parameter with the same path and shape.
    All other arrays are replicated.

    Args:
        model: The model.
        mesh: The device mesh.
        shapes: The shapes and dtypes of the state.
    """
    params = shardings(shapes.params, model, mesh)
    whole = replicated(mesh)
    (trainable, _), (learnt, _) = partition(shapes.params), partition(params)

    places = dict(jax.tree_util.tree_leaves_with_path(learnt))
    sizes = {path: x.shape for path, x in jax.tree_util.tree_leaves_with_path(trainable)}

    def parameter_sharding(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        # The path of an array in the optimizer state ends with the path of its parameter.
        for start in range(len(path)):
            if sizes.get(path[start:]) == leaf.shape:
                return places[path[start:]]
        return whole

    state = jax.tree_util.tree_map_with_path(parameter_sharding, shapes.optimizer)
    average = None if shapes.average is None else learnt
    # The fields of this state are shardings, not arrays.
    return TrainState._make((whole, params, state, whole, average))


def init_on(
    mesh: Mesh | None,
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    seed: int,
    base: dict | None = None,
    lora: LoraConfig = LoraConfig(),  # noqa: B008 (frozen)
    averages: bool = False,
) -> TrainState:
    """Creates the training state (see `init_state`) with each array on its devices.

    Args:
        mesh: The device mesh; one device if None.
        model: The model.
        optimizer: An optax optimizer.
        seed: The seed.
        base: The initial parameters, which are donated; random parameters if None.
        lora: See `init_state`.
        averages: See `init_state`.
    """
    make = partial(init_state, model, optimizer, seed, lora=lora, averages=averages)
    if mesh is None:
        return jax.jit(make, donate_argnums=0)(base)
    where = state_shardings(model, mesh, jax.eval_shape(make, base))
    if base is not None:
        base = jax.device_put(base, shardings(base, model, mesh))
    return jax.jit(make, out_shardings=where, donate_argnums=0)(base)


class Measured(NamedTuple):
    """Measurements of one update.

    Attributes:
        figures: The sums that the objective reports, divided by the value of `Objective.count` for
            the whole batch. The entry `loss` is always present. For `CrossEntropy`, the loss is in
            nats per counted token, before the update and without label smoothing.
        gradient_norm: The global norm of the gradient before clipping.
    """

    figures: dict[str, Array]
    gradient_norm: Array

    @property
    def loss(self) -> Array:
        """The reported loss."""
        return self.figures["loss"]


Updated = tuple[TrainState, Measured]
Step = Callable[[TrainState, AnyBatch, ArrayLike], Updated]
# The sums of the objective, and the gradient of the mean loss.
_Accumulated = tuple[Sums, dict]


def make_step(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    objective: Objective = CrossEntropy(),  # noqa: B008 (frozen)
    *,
    skip_non_finite: bool = False,
    ema_decay: float | None = None,
) -> jax.stages.Wrapped:
    """Builds the jitted training step ``(state, batch, learning_rate=1) -> (state, Measured)``.

    The step donates its input state, so the buffers are reused. `batch` is of the objective's type,
    with micro-batches along the first axis of its arrays. `learning_rate` multiplies the
    optimizer's updates; leave it at 1 for an optimizer that has a schedule. The step uses the
    gradient of the mean over the whole batch, even if the micro-batches have unequal counts.
    Optimizers that need a `value` (Momo, `polyak_sgd`, `reduce_on_plateau`) receive the loss.

    Args:
        model: The model.
        optimizer: An optax optimizer. If the optimizer's update needs further arguments (as in
            `lbfgs`), the step raises ValueError.
        objective: The quantity that an update minimizes.
        skip_non_finite: Whether to skip updates whose loss or gradient is not finite. A skipped
            update increments only the step.
        ema_decay: The decay rate of the moving average; None for a state without an average.

    Raises:
        ValueError: `objective` is not an `Objective`, or it is not hashable.
    """
    check_objective(objective)

    @in_auto_axes
    def scaled_sums(
        params: dict, batch: AnyBatch, key: PRNGKeyArray, inverse_count: Scalar
    ) -> Sums:
        sums = objective.scaled_loss(model, params, batch, key, inverse_count)
        return check_sums(objective, sums)

    def accumulate(params: dict, batch: AnyBatch, key: PRNGKeyArray) -> _Accumulated:
        """Returns the means over all micro-batches, and the gradient of the mean loss."""
        num_micro = check_batch(objective, batch)
        gradient = trainable_value_and_grad(scaled_sums, has_aux=True)
        keys = jax.random.split(key, num_micro)
        count = objective.count(batch)
        check_scalar(objective, "count", count)
        inverse_count = 1.0 / jnp.where(count == 0, 1.0, count)

        def add(
            sums: _Accumulated, micro: tuple[AnyBatch, PRNGKeyArray]
        ) -> tuple[_Accumulated, None]:
            return jax.tree.map(jnp.add, sums, gradient(params, *micro, inverse_count)), None

        sums = gradient(params, *jax.tree.map(lambda x: x[0], (batch, keys)), inverse_count)
        if num_micro > 1:
            sums, _ = jax.lax.scan(add, sums, jax.tree.map(lambda x: x[1:], (batch, keys)))
        return sums

    @partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, batch: AnyBatch, learning_rate: ArrayLike = 1.0) -> Updated:
        key = jax.random.fold_in(state.key, state.step)
        (loss, figures), gradients = accumulate(state.params, batch, key)
        trainable, frozen = partition(state.params)
        updates, optimizer_state = _update(
            optimizer, gradients, state.optimizer, trainable, value=loss
        )
        updates = jax.tree.map(lambda update: learning_rate * update, updates)
        params, average = optax.apply_updates(trainable, updates), state.average
        if ema_decay is not None:
            average = update_average(average, params, state.step, ema_decay)
        learnt = (params, optimizer_state, average)
        measured = Measured({"loss": loss, **figures}, optax.tree.norm(gradients))
        if skip_non_finite:
            good = jnp.isfinite(loss) & jnp.isfinite(measured.gradient_norm)
            before = (trainable, state.optimizer, state.average)
            learnt = jax.tree.map(lambda new, old: jnp.where(good, new, old), learnt, before)
        params, optimizer_state, average = learnt
        params = combine(params, frozen)
        return TrainState(state.step + 1, params, optimizer_state, state.key, average), measured

    return step


def _update(
    optimizer: optax.GradientTransformation,
    gradients: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    *,
    value: Scalar,
) -> tuple[optax.Updates, optax.OptState]:
    """Calls the optimizer's update, and passes the loss as `value` if the update accepts it.

    Raises:
        ValueError: The optimizer needs arguments other than `value`.
    """
    accepted = signature(optimizer.update).parameters.values()
    has_value = any(x.name == "value" or x.kind == x.VAR_KEYWORD for x in accepted)
    extra = {"value": value} if has_value else {}
    try:
        return optimizer.update(gradients, state, params, **extra)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise ValueError(
            "optimizer needs arguments that make_step does not pass; make_step passes gradients, "
            f"state, params and value (the loss). Write your own step for this optimizer ({error})"
        ) from error


def updates(
    step: Step[AnyBatch], state: TrainState, batches: Iterable[AnyBatch], rates: Iterable[float]
) -> Iterator[Updated]:
    """Makes updates until `batches` or `rates` is exhausted.

    Args:
        step: The function that `make_step` returns, or its `jax.vmap`.
        state: The initial state, which is donated.
        batches: The batch of each update.
        rates: The learning rate of each update.

    Yields:
        (state, measured) after each update. The next update donates this state.
    """
    for rate, batch in zip(rates, batches, strict=False):
        state, measured = step(state, batch, np.float32(rate))
        yield state, measured


def update_average(average: Any, params: Any, step: Int[ArrayLike, ""], decay: float) -> Any:
    """Updates a bias-corrected exponential moving average of the parameters.

    After update t = step + 1, the average is Σ_s d^(t−s) θ_s / Σ_s d^(t−s) over s = 1 … t. The code
    computes m_t = m_{t−1} + w (θ_t − m_{t−1}) with w = (1 − d) / (1 − d^t), so w = 1 at t = 1.

    Args:
        average: The average before this update.
        params: The parameters after this update.
        step: The number of updates before this one.
        decay: The decay rate d.

    Reference:
        Kingma & Ba 2015, §3 (bias correction).
    """
    # Use expm1 of the logarithm, because 1 − d^t loses most digits where d^t is close to 1.
    correction = -jnp.expm1((step + 1) * math.log(decay))
    return optax.incremental_update(params, average, (1 - decay) / correction)


class CompiledStep:
    """Training step with one compiled program per batch shape, compiled on first use.

    XLA needs about six seconds on two cores to compile a program, and a translation run has batches
    of six widths. Training starts as soon as the first program is compiled.
    """

    def __init__(
        self, step: jax.stages.Wrapped, compiling: Callable[[int], AbstractContextManager]
    ):
        """Wraps a step without compiling it.

        Args:
            step: The function that `make_step` returns.
            compiling: Receives the width of a batch and returns a context manager, which is open
                while the program for this width is compiled.
        """
        self._step, self._compiling = step, compiling
        self._programs: dict[Hashable, jax.stages.Compiled] = {}

    def compile(self, state: TrainState, batch: AnyBatch) -> jax.stages.Compiled:
        """Returns the compiled program for this batch shape, and compiles it on first use."""
        leaves, structure = jax.tree.flatten(batch)
        shapes = structure, *(leaf.shape for leaf in leaves)
        if shapes not in self._programs:
            rate = jax.ShapeDtypeStruct((), np.float32)
            with self._compiling(width(batch)):
                self._programs[shapes] = self._step.lower(state, batch, rate).compile()
        return self._programs[shapes]

    def __call__(self, state: TrainState, batch: AnyBatch, rate: np.float32) -> Updated:
        """Makes one update."""
        return self.compile(state, batch)(state, batch, rate)


def width(batch: AnyBatch) -> int:
    """Returns the size of the last axis of a batch's first array, such as tokens per sequence."""
    return jax.tree.leaves(batch)[0].shape[-1]


def num_bytes(program: jax.stages.Compiled) -> int | None:
    """Returns the bytes that a program needs per device, or None if this number is unknown.

    An output that reuses an input's buffer is counted once.
    """
    used = program.memory_analysis()
    if used is None:
        return None
    output = used.output_size_in_bytes - used.alias_size_in_bytes
    return used.argument_size_in_bytes + used.temp_size_in_bytes + output


def memory_line(program: jax.stages.Compiled) -> str:
    """Returns a line about the memory per device that a training step needs."""
    size = num_bytes(program)
    if size is None:
        return "memory per device: unknown on this platform"
    return f"memory per device: {size / 1e6:,.0f} MB (state, activations and gradients)"
