"""The training step: its state, its shardings, and the jitted function that makes an update."""

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
from jaxformer.models.explicit_axes import in_auto_axes
from jaxformer.models.language_model import LanguageModel
from jaxformer.models.lora import adapt
from jaxformer.models.mesh import AnyMesh, replicated, shardings
from jaxformer.models.parameters import init
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
    """Everything that an update reads and writes.

    Attributes:
        step: The number of updates so far.
        params: The parameters of the model.
        optimizer: The optimizer state of the trainable parameters (see `models.trainable`).
        key: The random key of dropout.
        average: The moving average of the trainable parameters; None: no average.
    """

    step: Array
    params: dict
    optimizer: optax.OptState
    key: Array
    average: dict | None = None

    def weights(self) -> dict:
        """Returns the model's parameters for scoring and use, averaged if there is an average."""
        return self.params if self.average is None else self._with(self.average)

    def parts(self) -> tuple[dict, dict]:
        """Returns the arrays of a checkpoint: (the average or the params, all other arrays).

        Frozen parameters are not included.
        """
        trainable, _ = partition(self.params)
        rest = {"optimizer": self.optimizer, "key": jax.random.key_data(self.key)}
        if self.average is None:
            return trainable, rest
        return self.average, {**rest, "params": trainable}

    def restored(self, step: int, params: Any, rest: Any) -> "TrainState":
        """Returns this state with the arrays of a checkpoint; frozen parameters are unchanged.

        Args:
            step: The step of the checkpoint.
            params: The first of `parts`.
            rest: The second of `parts`.
        """
        key, optimizer = jax.random.wrap_key_data(rest["key"]), rest["optimizer"]
        if self.average is None:
            return TrainState(jnp.int32(step), self._with(params), optimizer, key)
        return TrainState(jnp.int32(step), self._with(rest["params"]), optimizer, key, params)

    def _with(self, trainable: dict) -> dict:
        """Returns the parameters with other values of the trainable ones."""
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
        base: The initial parameters; None: random ones.
        lora: If it has a rank, the kernels of `base` get low-rank updates, which are trained alone.
        averages: Whether the state has a moving average of the trainable parameters.
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
    """Copies each array that occurs again in the state.

    Optimizers such as Prodigy keep the initial parameters. A step donates the state, and a buffer
    can be donated only once.
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

    Arrays of the optimizer's state that have the path and the shape of a parameter have its
    sharding. The remaining arrays are replicated.

    Args:
        model: The model.
        mesh: The mesh.
        shapes: The shapes of the state.
    """
    params = shardings(shapes.params, model, mesh)
    whole = replicated(mesh)
    (trainable, _), (learnt, _) = partition(shapes.params), partition(params)

    places = dict(jax.tree_util.tree_leaves_with_path(learnt))
    sizes = {path: x.shape for path, x in jax.tree_util.tree_leaves_with_path(trainable)}

    def beside(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        for start in range(len(path)):  # the path in the state ends in that of the parameter
            if sizes.get(path[start:]) == leaf.shape:
                return places[path[start:]]
        return whole

    state = jax.tree_util.tree_map_with_path(beside, shapes.optimizer)
    average = None if shapes.average is None else learnt
    return TrainState._make((whole, params, state, whole, average))  # of shardings, not arrays


def init_on(
    mesh: Mesh | None,
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    seed: int,
    base: dict | None = None,
    lora: LoraConfig = LoraConfig(),  # noqa: B008 (frozen)
    averages: bool = False,
) -> TrainState:
    """Creates the state of `init_state` with each array on its devices.

    Args:
        mesh: The mesh; None: one device.
        model: The model.
        optimizer: An optax optimizer.
        seed: The seed.
        base: Initial parameters, which are donated; None: random ones.
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
    """Measurements of an update.

    Attributes:
        figures: The sums of the objective, divided by the count of the whole batch; `loss` is among
            them. For a `CrossEntropy`, the loss is in nats per counted token, without label
            smoothing and before the update.
        gradient_norm: The global norm of the gradient before clipping.
    """

    figures: dict[str, Array]
    gradient_norm: Array

    @property
    def loss(self) -> Array:
        """The loss that is reported."""
        return self.figures["loss"]


Updated = tuple[TrainState, Measured]  # the result of an update
Step = Callable[[TrainState, AnyBatch, ArrayLike], Updated]
_Accumulated = tuple[Sums, dict]  # (the sums of the objective, the gradient)


def make_step(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    objective: Objective = CrossEntropy(),  # noqa: B008 (frozen)
    *,
    skip_non_finite: bool = False,
    average_decay: float | None = None,
) -> jax.stages.Wrapped:
    """Builds the jitted training step ``(state, batch, learning_rate=1) -> (state, Measured)``.

    The step donates its input state: the buffers are reused. `batch` is of the objective's type,
    with micro-batches along the first axis of its arrays. `learning_rate` multiplies the
    optimizer's updates; leave it at 1 for an optimizer that has a schedule. Each micro-batch adds
    its share of the mean over the whole batch. So the result is the gradient of the full batch even
    if the micro-batches have unequal counts. Optimizers that need a `value` (Momo, `polyak_sgd`,
    `reduce_on_plateau`) receive the loss.

    Args:
        model: The model.
        optimizer: An optax optimizer. The step raises ValueError if its update needs further
            arguments, as that of `lbfgs` does.
        objective: What an update reduces.
        skip_non_finite: Whether an update with a loss or gradient that is not finite changes only
            the step.
        average_decay: The decay rate of the moving average; None: the state has none.

    Raises:
        ValueError: `objective` is no hashable `Objective`.
    """
    check_objective(objective)

    @in_auto_axes
    def loss_of(params: dict, batch: AnyBatch, key: PRNGKeyArray, inverse_count: Scalar) -> Sums:
        sums = objective.scaled_loss(model, params, batch, key, inverse_count)
        return check_sums(objective, sums)

    def accumulate(params: dict, batch: AnyBatch, key: PRNGKeyArray) -> _Accumulated:
        """Returns the means over all micro-batches together, and the gradient of the loss."""
        num_micro = check_batch(objective, batch)
        gradient = trainable_value_and_grad(loss_of, has_aux=True)
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
        if average_decay is not None:
            average = moved_average(average, params, state.step, average_decay)
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
    """Calls the optimizer's update, with the loss if it takes extra arguments.

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
            "optimizer needs arguments that make_step does not have; make_step passes gradients, "
            f"state, params and value (the loss). Write a step for this optimizer ({error})"
        ) from error


def updates(
    step: Step[AnyBatch], state: TrainState, batches: Iterable[AnyBatch], rates: Iterable[float]
) -> Iterator[Updated]:
    """Runs updates until the batches or the learning rates end.

    Args:
        step: The function that `make_step` returns, or a vmapped one.
        state: The initial state, which is donated.
        batches: The batch of each update.
        rates: The learning rate of each update.

    Yields:
        (state, measured) after each update. The next update donates the state.
    """
    for rate, batch in zip(rates, batches, strict=False):
        state, measured = step(state, batch, np.float32(rate))
        yield state, measured


def moved_average(average: Any, params: Any, step: Int[ArrayLike, ""], decay: float) -> Any:
    """Updates a bias-corrected exponential moving average of the parameters.

    After update t = step + 1, the average is Σ_s d^(t−s) θ_s / Σ_s d^(t−s) over s = 1 … t. It is
    computed as m_t = m_{t−1} + w (θ_t − m_{t−1}) with w = (1 − d) / (1 − d^t), so w = 1 at t = 1.

    Args:
        average: The average before the update.
        params: The parameters after the update.
        step: The number of updates before this one.
        decay: The decay rate d.

    Reference:
        Kingma & Ba 2015, §3 (bias correction).
    """
    # expm1 of the logarithm: 1 − d^t would lose most of its digits where d^t is close to 1.
    correction = -jnp.expm1((step + 1) * math.log(decay))
    return optax.incremental_update(params, average, (1 - decay) / correction)


class CompiledStep:
    """Training step with one compiled program per batch shape, compiled on first use.

    A translation run has six batch widths. XLA takes about six seconds on two cores for each, so
    training starts after compiling one of them, not all.
    """

    def __init__(
        self, step: jax.stages.Wrapped, compiling: Callable[[int], AbstractContextManager]
    ):
        """Wraps a step without compiling it.

        Args:
            step: The function that `make_step` returns.
            compiling: Returns a context for the width of a batch. The context is open while the
                program of that width is compiled.
        """
        self._step, self._compiling = step, compiling
        self._programs: dict[Hashable, jax.stages.Compiled] = {}

    def compile(self, state: TrainState, batch: AnyBatch) -> jax.stages.Compiled:
        """Returns the program for batches of this shape; compiles it if necessary."""
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
    """Returns the last size of a batch's first array, such as the number of tokens of a row."""
    return jax.tree.leaves(batch)[0].shape[-1]


def num_bytes(program: jax.stages.Compiled) -> int | None:
    """Returns the bytes that a program needs on each device, or None if that is not known.

    Outputs that reuse the buffers of inputs are not counted twice.
    """
    used = program.memory_analysis()
    if used is None:
        return None
    output = used.output_size_in_bytes - used.alias_size_in_bytes
    return used.argument_size_in_bytes + used.temp_size_in_bytes + output


def memory_line(program: jax.stages.Compiled) -> str:
    """Returns a line with the memory that a training step needs on each device."""
    size = num_bytes(program)
    if size is None:
        return "memory: unknown on this device"
    return f"memory: {size / 1e6:,.0f} MB for training (state, activations and gradients)"
