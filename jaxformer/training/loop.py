"""The training loop: updates, evaluations, checkpoints and progress reports."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from signal import SIGINT, Signals
from typing import NoReturn

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer.artifacts.checkpoint import Checkpoints, CheckpointWriter, NotFinite
from jaxformer.artifacts.run import RunFolder
from jaxformer.models.config.generation import GenerationDefaults
from jaxformer.models.kinds import build
from jaxformer.models.language_model import Variables
from jaxformer.models.parameters import parameter_count
from jaxformer.models.sizes import describe_sizes
from jaxformer.models.trainable import num_trainable
from jaxformer.training import processes
from jaxformer.training.config import RunConfig
from jaxformer.training.log import RunLog
from jaxformer.training.mesh import place_batch, placed_shapes, share_of
from jaxformer.training.optimizer import Schedule, make_optimizer
from jaxformer.training.screen import Screen, late_peak, progress, progress_line, vanishing
from jaxformer.training.speed import Clock, ScoringTime, profile, update_size, utilization
from jaxformer.training.step import CompiledStep, Measured, init_on, make_step, memory_line, width
from jaxformer.training.tasks.task import Score, Task

FLUSH_EVERY = 10  # steps between reads of the measurements, which wait for the device
MOST_SKIPPED = 100  # consecutive skipped updates that end the run


class Training:
    """A run in progress: its state, its batches and its files."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        task: Task,
        screen: Screen,
        mesh: Mesh | None = None,
        base: dict | None = None,
        generation: GenerationDefaults = GenerationDefaults(),  # noqa: B008 (frozen)
        *,
        next_step: str,
    ):
        """Builds the model and its state.

        Args:
            config: The settings of the run.
            folder: The folder of the run's files.
            task: The data and its score.
            screen: Receives the reports.
            mesh: The devices, a mesh that is also in context; None: one device.
            base: Initial parameters, which are donated; None: random ones.
            generation: The settings of generation for samples and translations.
            next_step: How to continue the run after a signal, for the message.
        """
        self.config, self.folder, self.task, self.screen = config, folder, task, screen
        self.mesh, self._next_step = mesh, next_step
        self.model = build(config.model, config.execution, generation=generation)
        optimizer = make_optimizer(config.optimizer)
        self.schedule = Schedule(config.optimizer, config.steps, config.minutes)
        self.share = share_of(mesh)
        self.batches = task.batches(self.share)
        self.checkpoints = Checkpoints(folder.checkpoints)
        self.writer = CheckpointWriter(folder.checkpoints, config.keep, config.keep_every)
        self.log = RunLog(folder, config, task)
        decay, skips = config.optimizer.average_decay, config.non_finite == "skip"
        initial = (config.seed, base, config.lora, decay is not None)
        self.state = init_on(mesh, self.model, optimizer, *initial)
        self.update = make_step(
            self.model, optimizer, task.objective, skip_non_finite=skips, average_decay=decay
        )
        self.step = 0
        self._clock, self._has_base = Clock(), base is not None
        self._scoring = ScoringTime(task, config.evaluate_every)
        self._agreement = processes.Agreement(self._clock)
        self._rate: float | None = None  # of the last update
        self._unfinished: Measured | None = None  # of the last update
        self._skipped = 0  # number of consecutive skipped updates, up to the last one
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
            processes.wait_for_all("until the checkpoint is read")
            for path in self.checkpoints.set_aside_after(self.step) if processes.is_first() else ():
                self.screen.say(f"warning: a newer checkpoint is unreadable; it is moved to {path}")
            self.screen.say(f"resuming from the checkpoint of step {self.step}")
        else:
            self.screen.say("no checkpoint yet: starting from the beginning")
        if processes.is_first():
            self.folder.cut_after(self.step)
        processes.wait_for_all("until later checkpoints are put aside")

    def save(self) -> None:
        """Saves a checkpoint of this step, in the background.

        It holds the parameters, the optimizer state, the random key and the position in the data.
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
        """Share of the run that is over; at 1 or more, the steps or the minutes are used up."""
        return self.schedule.done(self.step, self._agreement.seconds)

    def run(self) -> None:
        """Trains to the end of the run.

        Raises:
            Interrupted: A signal ended the run.
            Ended: The run diverged.
        """
        if self.done >= 1:
            if not self.log.has_scored(self.step, self.task.num_targets):
                self.evaluate(whole=True)  # a new limit makes this step the last one
            self.screen.say(
                f"step {self.step} was the last; to train further, set more steps or minutes"
            )
            return
        with self.writer, self.log:
            if self._has_base and self.checkpoints.is_empty:
                self.save()  # so that resuming does not need the base checkpoint
            steps = self._compile()
            traced = profile(self.folder.profile, self.config.profile, self.screen.say)
            bar = progress(self.screen, self.config.steps)
            with traced as updated, processes.stop_signal() as self._stop, bar as self._show:
                self._show(self.step, self.done, "")
                if self.log.owes(self.step):  # the run stopped between saving and evaluating
                    self.evaluate(whole=False)
                self._clock.start(self.done)
                is_over = False
                while not is_over:
                    self._update(steps)
                    updated()
                    is_over = self._follow_up()

    def _follow_up(self) -> bool:
        """Reports, saves and evaluates the last update if that is due; ends the run on a signal.

        Returns:
            Whether the run is over.
        """
        signal = self._agreement.signal(self.step, self._stop())
        last = self.done >= 1
        if last or self.step % FLUSH_EVERY == 0:
            self._advance(self.flush())
            last = self.done >= 1
        if last or self.step % self.config.checkpoint_every == 0:
            self.save()
        if signal:  # before an evaluation, which would delay the end
            self._end(signal)
        if last or self.step % self.config.evaluate_every == 0:
            self.evaluate(whole=last)
        return last

    def _update(self, step: CompiledStep) -> None:
        """Makes one update with the next batch."""
        rate = self.schedule.rate(self.step, self._agreement.seconds, self._rate)
        batch = next(self.batches)
        is_lora = self.config.lora.lora_rank is not None
        tokens, flops = update_size(self.model, batch, is_lora=is_lora)
        self._clock.count(tokens * self.share.count, flops * self.share.count)
        if self.mesh is not None:
            batch = place_batch(batch, self.mesh, self.share)
        self.state, measured = step(self.state, batch, np.float32(rate))
        if self.config.minutes is not None:
            # The clock is then at most one update behind, and the learning rate falls smoothly.
            jax.block_until_ready(self._unfinished)
        self.step, self._rate, self._unfinished = self.step + 1, rate, measured
        self.log.update(self.step, rate, measured)

    def _advance(self, lines: list[dict]) -> None:
        """Shows the newest line of metrics, and warnings after the first lines of a run."""
        if self.step <= FLUSH_EVERY:
            size = num_trainable(self.state.params)
            warnings = [vanishing(lines, size)]
            if self.config.minutes is not None:
                warnings.append(late_peak(self.schedule.warmup, self.step, self.done))
            for warning in filter(None, warnings):
                self.screen.say(warning)
        training = self._clock.remaining(self.done)
        pace = self._clock.seconds_per_token
        left = (training + self._scoring.remaining(self.step, self.done, pace)) / 60
        self._show(self.step, self.done, progress_line(lines[-1], left) if lines else "")

    def _compile(self) -> CompiledStep:
        """Compiles the step for the widest batches; reports the model's sizes and the memory."""
        for line in describe_sizes(self.config.model):
            self.screen.say(line)
        part = f" (frozen), {num_trainable(self.state.params):,} of an adapter"
        part = "" if self.config.lora.lora_rank is None else part
        self.screen.say(f"parameters: {parameter_count(self.config.model):,}{part}")
        widest = max(self.batches.shapes(), key=width)
        if self.mesh is not None:
            widest = placed_shapes(widest, self.mesh, self.share)
        step, begin = CompiledStep(self.update, self._compiling), time.perf_counter()
        self.screen.say(memory_line(step.compile(self.state, widest)))
        self.screen.say(f"compiled in {time.perf_counter() - begin:.1f} s")
        return step

    @contextmanager
    def _compiling(self, width: int) -> Iterator[None]:
        """Pauses the clock while the context is open, after the pending updates are finished."""
        jax.block_until_ready(self.state.step)
        with self._clock.paused(), self.screen.waiting(f"compiling for rows of {width} tokens"):
            yield

    # ---- metrics and evaluations

    def flush(self) -> list[dict]:
        """Writes the measurements since the last call and returns their lines.

        Raises:
            Ended: A loss or gradient is not finite and the config does not skip such updates, or
                too many consecutive updates were skipped.
        """
        jax.block_until_ready(self.state.step)  # the timed updates are finished
        tokens, flops = self._clock.lap()
        pace = {"tokens_per_second": round(tokens, 1), "seconds": round(self._clock.seconds, 1)}
        pace |= utilization(flops, self.mesh)
        lines = self.log.flush(pace)
        for line in lines:
            bad = line.get("not_finite")
            self._skipped = self._skipped + 1 if bad else 0
            if bad:
                what = f"the {bad[0].replace('_', ' ')} is not finite at step {line['step']}"
                if self.config.non_finite == "stop":
                    raise self._diverged(what)
                if self._skipped >= MOST_SKIPPED:
                    raise self._diverged(f"{what} and at the {MOST_SKIPPED - 1} steps before")
                self.screen.say(f"warning: {what}; this update is skipped")
        return lines

    def _diverged(self, what: str) -> processes.Ended:
        self.writer.wait()
        return processes.Ended(
            f"{what}; {self.checkpoints.last()}. A smaller --learning-rate may help"
        )

    def _end(self, signal: Signals) -> NoReturn:
        """Saves this step and ends the run because of a signal."""
        self.save()
        self.writer.wait()
        by = "" if signal == SIGINT else f" by {signal.name}"
        raise processes.Interrupted(
            signal, f"stopped{by} at step {self.step}, which is saved; {self._next_step}"
        )

    def evaluate(self, whole: bool) -> None:
        """Scores the held-out data, writes a sample and draws the picture.

        A signal during scoring ends the run. The evaluation is then made when the run is resumed.

        Args:
            whole: Whether to score all held-out data as well as the part of every evaluation.

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
            figure = f" nats per token, {part.measure:.3f} {measure.label}" if measure else ""
            self.screen.say(f"step {self.step}: held-out loss {part.loss:.4f}{figure}")
            if whole and part.targets < self.task.num_targets:
                all_of_it = self._score(variables, whole=True)
            self.log.evaluation(self.step, part, all_of_it, sample)

    def _score(self, variables: Variables, whole: bool) -> Score:
        """Scores held-out data; a signal ends the run, unless other processes take part."""
        bar = self.screen.count(self.task.num_targets, "held-out text", "tokens")
        with bar if whole else nullcontext(lambda count: None) as show:

            def scored(count: int) -> None:
                if (signal := self._stop()) and not processes.are_several():
                    self._end(signal)
                show(count)

            return self.task.score(self.model, variables, whole=whole, on_scored=scored)
