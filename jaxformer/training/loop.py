"""The training loop: updates, evaluations, checkpoints and progress reports."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from signal import SIGINT, Signals
from typing import NoReturn

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer.artifacts.checkpoint import Checkpoints, CheckpointWriter, NotFinite
from jaxformer.artifacts.run import RunFolder
from jaxformer.models.language_model import LanguageModel, Variables
from jaxformer.models.parameters import parameter_count
from jaxformer.models.sizes import describe_sizes
from jaxformer.models.trainable import num_trainable
from jaxformer.training import processes
from jaxformer.training.batch import AnyBatch
from jaxformer.training.config import RunConfig
from jaxformer.training.log import MOST_SKIPPED, RunLog
from jaxformer.training.mesh import place_batch, process_share, sharded_batch_shapes
from jaxformer.training.optimizer import Schedule, make_optimizer
from jaxformer.training.screen import Screen, late_peak, progress, progress_line, vanishing
from jaxformer.training.speed import Clock, ScoringTime, profile, update_size, utilization
from jaxformer.training.step import (
    CompiledStep,
    Measured,
    TrainState,
    init_on,
    make_step,
    memory_line,
    width,
)
from jaxformer.training.tasks.task import Score, Task

# Number of steps between two transfers of the measurements to the host. Each transfer waits for the
# device.
FLUSH_EVERY = 10


def make_update(config: RunConfig, model: LanguageModel, task: Task) -> jax.stages.Wrapped:
    """Builds the jitted training step of a run (see `make_step`)."""
    return make_step(
        model,
        make_optimizer(config.optimizer),
        task.objective,
        skip_non_finite=config.non_finite == "skip",
        ema_decay=config.optimizer.ema_decay,
    )


class Training:
    """A training run: its state, batches and files."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        task: Task,
        screen: Screen,
        mesh: Mesh | None = None,
        base: dict | None = None,
        *,
        model: LanguageModel,
        next_step: str,
        state: TrainState | None = None,
        draws: bool = True,
    ):
        """Initializes the training state.

        Args:
            config: The settings of the run.
            folder: The run folder.
            task: Provides the training data and the evaluation.
            screen: Shows progress and messages.
            mesh: The device mesh, which the caller has set by `jax.set_mesh`; one device if None.
            base: The initial parameters, which are donated; random parameters if None.
            model: The model of `config`. Samples and translations use the model's generation
                settings.
            next_step: Text that tells the user how to continue the run after a stop signal.
            state: The training state at step 0. If None, the state is made from the seed and
                `base`.
            draws: Whether each evaluation draws the loss curve.
        """
        self.config, self.folder, self.task, self.screen = config, folder, task, screen
        self.mesh, self._next_step = mesh, next_step
        self.model = model
        self.schedule = Schedule(config.optimizer, config.steps, config.max_minutes)
        self.share = process_share(mesh)
        self.batches = task.batches(self.share)
        self.checkpoints = Checkpoints(folder.checkpoints)
        self.writer = CheckpointWriter(folder.checkpoints, config.max_to_keep, config.keep_period)
        self.log = RunLog(folder, config, task, draws=draws)
        if state is None:
            averages = config.optimizer.ema_decay is not None
            optimizer = make_optimizer(config.optimizer)
            state = init_on(mesh, model, optimizer, config.seed, base, config.lora, averages)
        self.state = state
        self.update = make_update(config, model, task)
        self.step = 0
        self._clock, self._has_base = Clock(), base is not None
        self._scoring = ScoringTime(task, config.evaluate_every)
        self._agreement = processes.Agreement(self._clock)
        # Learning rate and measurements of the last update. The device may not have computed the
        # measurements yet.
        self._rate: float | None = None
        self._unfinished: Measured | None = None
        # Number of consecutive skipped updates up to the last update.
        self._skipped = 0
        self._stop: Callable[[], Signals | None] = lambda: None

    # ---- saving and resuming

    def resume(self) -> None:
        """Restores the newest checkpoint, if there is one, and deletes later log entries."""
        if not self.checkpoints.is_empty:
            self.step, *parts, progress = self.checkpoints.restore(*self.state.parts())
            where = jax.tree.map(lambda x: x.sharding, self.state)
            self.state = jax.device_put(self.state.restored(self.step, *parts), where)
            self.batches.restore(progress["data"])
            self._clock.trained = progress.get("seconds", 0.0)
            self._agreement = processes.Agreement(self._clock, self.step)
            self._rate = progress.get("learning_rate")
            processes.wait_for_all("every process has read the checkpoint")
            for path in self.checkpoints.set_aside_after(self.step) if processes.is_first() else ():
                self.screen.say(
                    f"warning: a newer checkpoint is unreadable and was moved to {path}"
                )
            self.screen.say(f"resuming from the checkpoint of step {self.step}")
        else:
            self.screen.say("no checkpoint found: starting at step 0")
        if processes.is_first():
            self.folder.cut_after(self.step)
        processes.wait_for_all("process 0 has moved the checkpoints of later steps")

    def save(self) -> None:
        """Saves a checkpoint of the current step in the background.

        A checkpoint contains the parameters, the optimizer state, the random key and the data
        position.
        """
        self.flush()
        with self._clock.paused():
            data, seconds = self.batches.state(), self._clock.trained
            progress = {"data": data, "seconds": seconds, "learning_rate": self._rate}
            try:
                self.writer.save(self.step, *self.state.parts(), progress)
            except NotFinite as error:
                raise self._diverged(f"step {self.step} is not saved: {error}") from None

    # ---- the loop

    @property
    def done(self) -> float:
        """Completed fraction of the run, 1 when the step limit or the time limit is reached."""
        return self.schedule.done(self.step, self._agreement.seconds)

    def run(self) -> None:
        """Trains until the run ends.

        Raises:
            Interrupted: A signal ended the run.
            Ended: The loss or the gradient diverged.
        """
        if self.done >= 1:
            if not self.log.has_scored(self.step, self.task.num_targets):
                # The run was resumed with fewer steps or minutes, so this step is the last step.
                self.evaluate(whole=True)
            self.screen.say(
                f"step {self.step} was the last step; to train further, raise --steps or "
                "--max-minutes"
            )
            return
        with self.writer, self.log:
            if self._has_base and self.checkpoints.is_empty:
                # With this checkpoint, a resumed run does not need the base checkpoint.
                self.save()
            steps = self._compile()
            traced = profile(self.folder.profile, self.config.profile, self.screen.say)
            bar = progress(self.screen, self.config.steps)
            with traced as update, processes.stop_signal() as stop, bar as self._show:
                self._show(self.step, self.done, "")
                self.begin(stop)
                is_over = False
                while not is_over:
                    with update():
                        self._update(steps)
                    is_over = self._follow_up()

    def begin(self, stop: Callable[[], Signals | None]) -> None:
        """Runs an evaluation that is due, and starts the training clock.

        Args:
            stop: Returns the signal that ends the run, or None.
        """
        self._stop = stop
        # A run may end after it saved a checkpoint and before its evaluation.
        if self.log.owes(self.step):
            self.evaluate(whole=False)
        self._clock.start(self.done)

    def _follow_up(self) -> bool:
        """Handles the report, the checkpoint and the evaluation that are due after an update.

        After a stop signal, the run ends before the evaluation.

        Returns:
            Whether the run is complete.
        """
        signal = self._agreement.signal(self.step, self._stop())
        last = self.done >= 1
        if last or self.step % FLUSH_EVERY == 0:
            self._advance(self.flush())
            last = self.done >= 1
        if last or self.step % self.config.checkpoint_every == 0:
            self.save()
        # The signal is handled first, because an evaluation would delay the end of the run.
        if signal:
            self._end(signal)
        if last or self.step % self.config.evaluate_every == 0:
            self.evaluate(whole=last)
        return last

    def _update(self, step: CompiledStep) -> None:
        """Makes an update with the next batch."""
        batch, rate = self.next_batch()
        if self.mesh is not None:
            batch = place_batch(batch, self.mesh, self.share)
        self.state, measured = step(self.state, batch, np.float32(rate))
        if self.config.max_minutes is not None:
            # Wait for the previous update, so that at most one dispatched update is missing in the
            # measured time. The learning rate then decays smoothly.
            jax.block_until_ready(self._unfinished)
        self._unfinished = measured
        self.log.update(self.step, rate, measured)

    def next_batch(self) -> tuple[AnyBatch, float]:
        """Counts the next update, and returns its batch and its learning rate."""
        rate = self.schedule.rate(self.step, self._agreement.seconds, self._rate)
        self._rate = rate
        self.step += 1
        batch = next(self.batches)
        is_lora = self.config.lora.lora_rank is not None
        tokens, flops = update_size(self.model, batch, is_lora=is_lora)
        self._clock.count(tokens * self.share.count, flops * self.share.count)
        return batch, rate

    def _advance(self, lines: list[dict]) -> None:
        """Shows the newest metrics, and early warnings during the first steps of a run."""
        if self.step <= FLUSH_EVERY:
            size = num_trainable(self.state.params)
            warnings = [vanishing(lines, size)]
            if self.config.max_minutes is not None:
                warnings.append(late_peak(self.schedule.warmup, self.step, self.done))
            for warning in filter(None, warnings):
                self.screen.say(warning)
        training = self._clock.remaining(self.done)
        pace = self._clock.seconds_per_token
        left = (training + self._scoring.remaining(self.step, self.done, pace)) / 60
        self._show(self.step, self.done, progress_line(lines[-1], left) if lines else "")

    def _compile(self) -> CompiledStep:
        """Compiles the step for the widest batches, and reports model size and memory."""
        for line in describe_sizes(self.config.model):
            self.screen.say(line)
        part = f" (frozen) + {num_trainable(self.state.params):,} (LoRA adapter)"
        part = "" if self.config.lora.lora_rank is None else part
        self.screen.say(f"parameters: {parameter_count(self.config.model):,}{part}")
        widest = max(self.batches.shapes(), key=width)
        if self.mesh is not None:
            widest = sharded_batch_shapes(widest, self.mesh, self.share)
        step, begin = CompiledStep(self.update, self._compiling), time.perf_counter()
        self.screen.say(memory_line(step.compile(self.state, widest)))
        self.screen.say(f"compiled in {time.perf_counter() - begin:.1f} s")
        return step

    @contextmanager
    def _compiling(self, width: int) -> Generator[None]:
        """Waits for pending updates, and pauses the training clock while the context is open."""
        jax.block_until_ready(self.state.step)
        with (
            self._clock.paused(),
            self.screen.waiting(f"compiling the training step for sequences of {width} tokens"),
        ):
            yield

    # ---- metrics and evaluations

    def flush(self) -> list[dict]:
        """Writes all pending measurements to metrics.jsonl, and returns the written lines.

        Raises:
            Ended: A loss or gradient is not finite and the config does not skip such updates, or
                too many consecutive updates were skipped.
        """
        # The measured time must include all updates.
        jax.block_until_ready(self.state.step)
        tokens, flops = self._clock.lap()
        pace = {"tokens_per_second": round(tokens, 1), "seconds": round(self._clock.seconds, 1)}
        pace |= utilization(flops, self.mesh)
        lines = self.log.flush(pace)
        for line in lines:
            bad = line.get("not_finite")
            self._skipped = self._skipped + 1 if bad else 0
            if bad:
                what = f"at step {line['step']}, the {bad[0].replace('_', ' ')} is not finite"
                if self.config.non_finite == "stop":
                    raise self._diverged(what)
                if self._skipped >= MOST_SKIPPED:
                    raise self._diverged(
                        f"{what}; the previous {MOST_SKIPPED - 1} steps failed too"
                    )
                self.screen.say(f"warning: {what}; the update was skipped")
        return lines

    def _diverged(self, what: str) -> processes.Ended:
        self.writer.wait()
        return processes.Ended(
            f"{what}; {self.checkpoints.last()}. A smaller --learning-rate may help"
        )

    def _end(self, signal: Signals) -> NoReturn:
        """Saves a checkpoint and ends the run after a signal."""
        self.save()
        self.writer.wait()
        by = "" if signal == SIGINT else f" by {signal.name}"
        raise processes.Interrupted(
            signal, f"stopped{by} at step {self.step}, which is saved; {self._next_step}"
        )

    def evaluate(self, whole: bool) -> None:
        """Evaluates the held-out data, writes a sample and draws the loss curve.

        A signal during the evaluation ends the run. If the run is resumed, it repeats the
        evaluation.

        Args:
            whole: Whether to score all held-out data, in addition to the fixed part that every
                evaluation scores.

        Raises:
            Interrupted: A signal arrived.
        """
        if not self.task.num_targets:
            return
        self.flush()
        measure, variables = self.task.measure, {"params": self.state.weights()}
        with self._clock.paused():
            with self._scoring.measured():
                part, all_of_it = self._score(variables, whole=False), None
                key = jax.random.fold_in(jax.random.key(self.config.seed), self.step)
                sample = self.task.sample(self.model, variables, key)
            figure = (
                f" nats per {measure.target}, {part.measure:.3f} {measure.label}" if measure else ""
            )
            self.screen.say(f"step {self.step}: held-out loss {part.loss:.4f}{figure}")
            if whole and part.targets < self.task.num_targets:
                all_of_it = self._score(variables, whole=True)
            self.log.evaluation(self.step, part, all_of_it, sample)

    def _score(self, variables: Variables, whole: bool) -> Score:
        """Scores held-out data. A stop signal interrupts the scoring if only one process trains."""
        measure = self.task.measure
        unit = "tokens" if measure is None else f"{measure.target}s"
        bar = self.screen.count(self.task.num_targets, "held-out data", unit)
        with bar if whole else nullcontext(lambda count: None) as show:

            def scored(count: int) -> None:
                if (signal := self._stop()) and not processes.are_several():
                    self._end(signal)
                show(count)

            return self.task.score(self.model, variables, whole=whole, on_scored=scored)
