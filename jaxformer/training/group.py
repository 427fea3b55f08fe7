"""Several runs whose arrays have the same shapes, trained in one program.

Runs of a sweep often differ only in their seed and their learning rate. One program that trains all
of these runs is compiled once, and dispatches each step once. The runs are divided among the
devices.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from signal import Signals
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxformer.artifacts.run import RunFolder
from jaxformer.models.language_model import LanguageModel
from jaxformer.training import processes
from jaxformer.training.batch import AnyBatch
from jaxformer.training.config import OptimizerConfig, RunConfig, WindowTraining
from jaxformer.training.loop import FLUSH_EVERY, Training
from jaxformer.training.optimizer import make_optimizer
from jaxformer.training.screen import Screen, progress
from jaxformer.training.step import Measured, TrainState, Updated, init_state
from jaxformer.training.tasks.task import Task

T = TypeVar("T")
# Minimum number of seconds between two checkpoints of a group.
_SAVE_SECONDS = 60.0
# The training loop computes the learning rate of each step from these settings, so the runs of one
# program may differ in them.
_OF_THE_RATE = ("learning_rate", "schedule", "warmup_steps", "decay_fraction", "final_fraction")


def shared_settings(config: RunConfig) -> RunConfig | None:
    """Returns the settings that all runs of one program must share.

    Two runs can be trained in one program if the returned values are equal.

    Returns:
        The config with default values for the seed and the learning rate schedule. None if the run
        needs its own program, because it has batches of several lengths, a mesh, a time limit, a
        LoRA adapter or a profiler trace.
    """
    is_alone = config.mesh is not None or config.max_minutes is not None or config.profile
    is_alone |= config.lora.lora_rank is not None or not isinstance(config, WindowTraining)
    if is_alone:
        return None
    usual = {name: getattr(OptimizerConfig, name) for name in _OF_THE_RATE}
    return replace(config, seed=0, optimizer=replace(config.optimizer, **usual))


class Member(NamedTuple):
    """A run of a group.

    Attributes:
        config: The settings of the run.
        folder: The run folder, which contains the data.
        task: The data of the run.
    """

    config: RunConfig
    folder: RunFolder
    task: Task


class RunGroup:
    """Runs that one program trains. Each run has its own folder, batches and learning rate.

    A run whose loss is not finite ends, and the other runs continue.

    Attributes:
        ended: The message of each run that ended early, by the path of its folder.
    """

    def __init__(
        self,
        members: Sequence[Member],
        model: LanguageModel,
        screen: Screen,
        next_step: str,
        *,
        scores_all: bool = False,
    ):
        """Makes the training state of each run.

        Args:
            members: The runs, whose `shared_settings` are equal.
            model: The model of all runs.
            screen: Shows the progress of the group.
            next_step: Text that tells the user how to continue after a stop signal.
            scores_all: Whether the last evaluation also scores all held-out data.
        """
        self._mesh = _mesh(len(members))
        seeds = [member.config.seed for member in members]
        states = _initial_states(members[0].config, model, seeds)
        quiet = Screen(quiet=True)
        self._runs = [
            Training(*member, quiet, model=model, next_step=next_step, state=state, draws=False)
            for member, state in zip(members, states, strict=True)
        ]
        self._screen, self._next_step, self._scores_all = screen, next_step, scores_all
        self.ended: dict[str, str] = {}
        self._saved_at = time.monotonic()
        self._pending: list[tuple[int, tuple[float, ...], Measured]] = []

    @property
    def _alive(self) -> list[Training]:
        return [run for run in self._runs if str(run.folder.path) not in self.ended]

    def resume(self) -> None:
        """Restores the newest checkpoint of each run. All checkpoints must be of one step."""
        for run in self._runs:
            run.resume()

    def run(self) -> None:
        """Trains until the runs end.

        Raises:
            Interrupted: A signal ended the runs, after each has saved a checkpoint.
        """
        first = self._runs[0]
        if first.done >= 1:  # Only the last evaluation is missing.
            self._evaluate(whole=self._scores_all)
            return
        with ExitStack() as stack:
            for run in self._runs:
                stack.enter_context(run.writer)
                stack.enter_context(run.log)
            self._state = _stacked([run.state for run in self._runs], self._mesh)
            step = _compiled(first.update, self._mesh)
            show = stack.enter_context(progress(self._screen, first.config.steps))
            stop = stack.enter_context(processes.stop_signal())
            for run in self._runs:
                run.begin(stop)
            while self._alive and first.done < 1:
                self._update(step)
                self._follow_up(stop(), show)

    def _update(self, step: Callable[..., Updated]) -> None:
        batches, rates = zip(*(run.next_batch() for run in self._runs), strict=True)
        stacked = jax.tree.map(lambda *x: np.stack(x), *_padded(batches, self._mesh))
        padded_rates = np.array(_padded(rates, self._mesh), np.float32)
        self._state, measured = step(self._state, stacked, padded_rates)
        self._pending.append((self._runs[0].step, rates, measured))

    def _follow_up(self, signal: Signals | None, show: Callable[[int, float, str], None]) -> None:
        """Handles the reports, checkpoints and evaluations that are due after an update."""
        first = self._runs[0]
        last, config = first.done >= 1, first.config
        saves = bool(signal) or last or self._is_time_to_save()
        evaluates = last or first.step % config.evaluate_every == 0
        if saves or evaluates or first.step % FLUSH_EVERY == 0:
            losses = self._report()
            show(first.step, first.done, f"{len(losses)} runs, loss {_span(losses)}")
        if saves or evaluates:
            states = _by_run(self._state, len(self._runs))
            for run, state in zip(self._runs, states, strict=True):
                run.state = state
        if saves:
            self._each(Training.save)
            self._saved_at = time.monotonic()
        if signal:
            raise processes.Interrupted(
                signal, f"stopped at step {first.step}, which is saved; {self._next_step}"
            )
        if evaluates:
            self._evaluate(whole=last and self._scores_all)

    def _is_time_to_save(self) -> bool:
        """Returns whether a checkpoint of each run is due.

        At multiples of `keep_period`, a checkpoint is always due. At other multiples of
        `checkpoint_every`, a checkpoint is due only if the last one is `_SAVE_SECONDS` old, because
        a checkpoint takes about a tenth of a second for each run.
        """
        config, step = self._runs[0].config, self._runs[0].step
        if config.keep_period is not None and step % config.keep_period == 0:
            return True
        is_late = time.monotonic() - self._saved_at >= _SAVE_SECONDS
        return is_late and step % config.checkpoint_every == 0

    def _report(self) -> list[float]:
        """Writes the measurements of each run to its log. Returns the newest losses."""
        for step, rates, measured in jax.device_get(self._pending):
            for i, (run, rate) in enumerate(zip(self._runs, rates, strict=True)):
                run.log.update(step, rate, jax.tree.map(lambda x, i=i: x[i], measured))
        self._pending = []
        lines = self._each(Training.flush)
        return [line[-1]["loss"] for line in lines if line and "loss" in line[-1]]

    def _evaluate(self, *, whole: bool) -> None:
        """Evaluates each run, with one thread for each device."""
        evaluate = self._unless_ended(partial(Training.evaluate, whole=whole))
        with ThreadPoolExecutor(self._mesh.size) as pool:
            list(pool.map(evaluate, self._alive))

    def _each(self, action: Callable[[Training], T]) -> list[T]:
        """Calls a function with each run that has not ended, and returns the results."""
        attempt = self._unless_ended(action)
        return [result for run in self._alive for result in attempt(run)]

    def _unless_ended(self, action: Callable[[Training], T]) -> Callable[[Training], list[T]]:
        """Wraps `action` so that it returns [result], or [] if the run ends early."""

        def attempt(run: Training) -> list[T]:
            try:
                return [action(run)]
            except processes.Interrupted:
                raise
            except processes.Ended as error:
                self.ended[str(run.folder.path)] = str(error)
                self._screen.say(f"{run.folder.path.name} ended early: {error}")
                return []

        return attempt


def _span(losses: list[float]) -> str:
    return f"{min(losses):.3f} … {max(losses):.3f}" if losses else "not finite"


def _mesh(num_runs: int) -> Mesh:
    """Returns the devices among which the runs are divided."""
    return Mesh(np.array(jax.devices()[:num_runs]), ("runs",))


def _padded(items: Sequence[T], mesh: Mesh) -> list[T]:
    """Repeats the last item, so that each device has the same number of items."""
    return [*items, *[items[-1]] * (-len(items) % mesh.size)]


def _initial_states(
    config: RunConfig, model: LanguageModel, seeds: Sequence[int]
) -> list[TrainState]:
    averages = config.optimizer.ema_decay is not None
    make = partial(init_state, model, make_optimizer(config.optimizer), averages=averages)
    states = jax.jit(partial(jax.lax.map, make))(np.array(seeds, np.uint32))
    return [_take(states, index) for index in range(len(seeds))]


def _compiled(update: Callable[..., Updated], mesh: Mesh) -> Callable[..., Updated]:
    """Returns the jitted update of all runs, `(states, batches, rates) -> (states, measured)`.

    A CPU updates one run after another, because XLA:CPU multiplies single matrices faster than
    stacked matrices.
    """

    def on_one_device(
        states: TrainState, batches: AnyBatch, rates: Float[Array, " runs"]
    ) -> Updated:
        if jax.default_backend() == "cpu":
            return jax.lax.map(lambda of_one: update(*of_one), (states, batches, rates))
        return jax.vmap(update)(states, batches, rates)

    divided = {"mesh": mesh, "in_specs": P("runs"), "out_specs": P("runs"), "check_vma": False}
    return jax.jit(jax.shard_map(on_one_device, **divided), donate_argnums=0)


def _stacked(states: list[TrainState], mesh: Mesh) -> TrainState:
    """Stacks states and divides them among the devices."""

    def stack(*arrays: Array) -> Array | np.ndarray:
        if jax.dtypes.issubdtype(arrays[0].dtype, jax.dtypes.prng_key):
            return jnp.stack(jax.device_put(arrays, mesh.devices[0]))
        return np.stack(arrays)

    stacked = jax.tree.map(stack, *_padded(states, mesh))
    return jax.device_put(stacked, NamedSharding(mesh, P("runs")))


def _by_run(states: TrainState, number: int) -> list[TrainState]:
    """Returns the states of the first `number` runs, each on the device that trains the run."""

    def on_device(place: int) -> TrainState:
        def local(x: Array) -> Array:
            shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
            return shards[place].data

        return jax.tree.map(local, states)

    found: list[TrainState] = []
    for place in range(len(states.step.addressable_shards)):
        stacked = on_device(place)
        found += [_take(stacked, index) for index in range(stacked.step.shape[0])]
    return found[:number]


@jax.jit
def _take(states: TrainState, index: int) -> TrainState:
    return jax.tree.map(lambda x: x[index], states)
