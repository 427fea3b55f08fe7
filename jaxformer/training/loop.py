"""The training loop: updates, and around them what a person and a later start of the run need."""

import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from signal import SIGINT, Signals
from typing import NoReturn

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer.artifacts.checkpoint import Checkpoints
from jaxformer.artifacts.checkpoint_writer import CheckpointWriter, NotFinite
from jaxformer.artifacts.run import RunFolder
from jaxformer.models.build import build, parameter_count
from jaxformer.training.batch import Batch, num_tokens
from jaxformer.training.clock import Clock
from jaxformer.training.compiled_step import CompiledStep
from jaxformer.training.config import TrainingConfig
from jaxformer.training.log import RunLog
from jaxformer.training.optimizer import Schedule, make_optimizer
from jaxformer.training.placed import init_on, place_batch, placed_shapes, share_of
from jaxformer.training.processes import are_several, gather, is_first, wait_for_all
from jaxformer.training.profile import Profile
from jaxformer.training.screen import Screen
from jaxformer.training.signals import Ended, Interrupted, Stopped, stop_signal
from jaxformer.training.step import Measured, TrainState, make_step
from jaxformer.training.tasks.task import Score, Task
from jaxformer.training.utilization import update_flops, utilization

FLUSH_EVERY = 10  # steps between looks at what was measured, which wait for the device
MOST_SKIPPED = 100  # updates in a row that are left out, and the run ends


def updates(
    step, state: TrainState, batches: Iterable[Batch], rates: Iterable[float]
) -> Iterator[tuple[TrainState, Measured]]:
    """The loop of every training: (state, measured) after each update, as long as there are batches
    and learning rates for them.

    step: as of `make_step`, or vmapped. The state that is given, and each one that was yielded
    before, is donated to the next update.
    """
    for rate, batch in zip(rates, batches, strict=False):
        state, measured = step(state, batch, np.float32(rate))
        yield state, measured


class Training:
    """A run in progress: its state, what it reads, and the files that it keeps up to date."""

    def __init__(
        self,
        config: TrainingConfig,
        folder: RunFolder,
        task: Task,
        screen: Screen,
        mesh: Mesh | None = None,
        base: dict | None = None,
    ):
        """mesh: of devices, which is also the one in context; None: one device. base: parameters to
        begin with, which are given away; None: fresh ones."""
        self.config, self.folder, self.task, self.screen = config, folder, task, screen
        self.mesh = mesh
        self.model = build(config.model, config.execution)
        optimizer = make_optimizer(config.optimizer)
        self.schedule = Schedule(config.optimizer, config.steps, config.minutes)
        self.share = share_of(mesh)
        self.batches = task.batches(self.share)
        self.checkpoints = Checkpoints(folder.checkpoints)
        self.writer = CheckpointWriter(folder.checkpoints, config.keep, config.keep_every)
        self.log = RunLog(folder, config, task)
        decay, lora = config.optimizer.average_decay, config.lora
        how = {"lora": lora, "averages": decay is not None}
        self.state = init_on(mesh, self.model, optimizer, config.seed, base, **how)
        how = {"lora_scale": lora.scale, "average_decay": decay}
        how["skip_non_finite"] = config.non_finite == "skip"
        self.update = make_step(self.model, optimizer, config.label_smoothing, **how)
        self.step = 0
        self._clock, self._has_base = Clock(), base is not None
        self._agreed = 0.0
        self._skipped = 0  # the last so many updates
        self._stop: Callable[[], Signals | None] = lambda: None

    # ---- saving and resuming

    def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one; drop what was logged after it."""
        if not self.checkpoints.is_empty:
            self.step, *parts, progress = self.checkpoints.restore(*self.state.parts())
            where = jax.tree.map(lambda x: x.sharding, self.state)
            self.state = jax.device_put(self.state.restored(self.step, *parts), where)
            self.batches.restore(progress["data"])
            self._clock.trained = self._agreed = progress.get("seconds", 0.0)
            wait_for_all("until the checkpoint is read")
            for path in self.checkpoints.set_aside_after(self.step) if is_first() else ():
                self.screen.say(f"a newer checkpoint cannot be read; it is now {path}")
            self.screen.say(f"resuming from the checkpoint of step {self.step}")
        else:
            self.screen.say("no checkpoint yet: starting from the beginning")
        if is_first():
            self.folder.cut_after(self.step)
        wait_for_all("until later checkpoints are put aside")

    def save(self) -> None:
        """A checkpoint of this very step: parameters, optimiser, key and position in the data. It
        is written while training goes on."""
        self.flush()
        with self._clock.paused():
            progress = {"data": self.batches.state(), "seconds": self._clock.trained}
            try:
                self.writer.save(self.step, *self.state.parts(), progress)
            except NotFinite as error:
                raise self._diverged(f"step {self.step} is not saved: {error}") from None

    # ---- the loop

    @property
    def done(self) -> float:
        """Share of the run that is over; from 1 on its steps or its minutes are used up."""
        return self.schedule.done(self.step, self._seconds)

    @property
    def _seconds(self) -> float:
        """Of training; of several processes, what the first had when they last agreed."""
        return self._agreed if are_several() else self._clock.seconds

    def _agree(self) -> Signals | None:
        """The signal to stop, if there was one. Several processes tell one another from time to
        time, since all must end, and change the learning rate, at the same step."""
        if not are_several():
            return self._stop()
        if self.step % FLUSH_EVERY:
            return None
        told = gather(self._clock.seconds, float(self._stop() or 0))
        self._agreed = told[0][0]
        received = max(int(signal) for _, signal in told)
        return Signals(received) if received else None

    def run(self) -> None:
        """Train to the end. Raises Interrupted or Ended when it is not reached."""
        if self.done >= 1:
            if not self.log.has_scored(self.step, self.task.num_targets):
                self.evaluate(whole=True)  # it was to go on, and is to end here
            self.screen.say(f"step {self.step} was the last; more --steps or --minutes go on")
            return
        with ExitStack() as opened:
            opened.enter_context(self.writer)
            opened.enter_context(self.log)
            if self._has_base and self.checkpoints.is_empty:
                self.save()  # to go on from without the checkpoint that it began from
            steps = self._compile()
            profiled = (self.folder.profile, self.config.profile, self.screen.say)
            profile = opened.enter_context(Profile(*profiled))
            self._stop = opened.enter_context(stop_signal())
            advance = opened.enter_context(self._progress())
            if self.log.owes(self.step):  # ended between a checkpoint and its evaluation
                self.evaluate(whole=False)
            self._clock.start(self.done)
            for state, measured in updates(steps, self.state, self._counted(), self._rates()):
                self.state, self.step = state, self.step + 1
                self.log.update(self.step, self._last_rate, measured)
                profile.updated()
                signal = self._agree()
                last = self.done >= 1
                if last or self.step % FLUSH_EVERY == 0:
                    advance(self.flush())
                    last = self.done >= 1
                if last or self.step % self.config.checkpoint_every == 0:
                    self.save()
                if signal:  # whoever sent it does not wait for an evaluation
                    self._end(signal)
                if last or self.step % self.config.evaluate_every == 0:
                    self.evaluate(whole=last)
                if last:
                    return

    def _counted(self) -> Iterator[Batch]:
        for batch in self.batches:
            tokens, flops = num_tokens(batch), update_flops(self.config, batch)
            self._clock.count(tokens * self.share.count, flops * self.share.count)
            yield batch if self.mesh is None else place_batch(batch, self.mesh, self.share)

    def _rates(self) -> Iterator[float]:
        while True:
            self._last_rate = self.schedule.rate(self.step, self._seconds)
            yield self._last_rate

    def _compile(self) -> CompiledStep:
        """Says what it will need before anything is trained."""
        learnt = sum(leaf.size for leaf in jax.tree.leaves(self.state.params))
        part = "" if self.state.frozen is None else f" (frozen), {learnt:,} of an adapter"
        self.screen.say(f"parameters: {parameter_count(self.config.model):,}{part}")
        self.screen.say("compiling …")
        begin, batches = time.perf_counter(), self.batches.shapes()
        if self.mesh is not None:
            batches = [placed_shapes(batch, self.mesh, self.share) for batch in batches]
        step = CompiledStep.of(self.update, self.state, batches)
        seconds, size = time.perf_counter() - begin, step.num_bytes
        needed = "unknown on this device"
        if size is not None:
            needed = f"{size / 1e6:,.0f} MB for training (state, activations and gradients)"
        self.screen.say(f"memory: {needed}")
        self.screen.say(f"compiled in {seconds:.1f} s")
        return step

    # ---- what is written down

    def flush(self) -> dict:
        """Write down what was measured; returns the newest line. Raises Ended if the loss or the
        gradient is not finite, and updates are not to be left out, or too many were."""
        jax.block_until_ready(self.state.step)  # what is timed is over
        seconds = round(self._clock.seconds, 1)
        tokens, flops = self._clock.lap()
        pace = {"tokens_per_second": round(tokens, 1), "seconds": seconds}
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
                    raise self._diverged(f"{what}, nor at the {MOST_SKIPPED - 1} steps before")
                self.screen.say(f"{what}: that update is left out")
        return lines[-1] if lines else {}

    def _diverged(self, what: str) -> Ended:
        self.writer.wait()
        return Ended(f"{what}; {self.checkpoints.last()}. A smaller --learning-rate may help")

    def _end(self, signal: Signals) -> NoReturn:
        """By a signal, once this very step is saved."""
        self.save()
        self.writer.wait()
        by = "" if signal == SIGINT else f" by {signal.name}"
        raise Interrupted(
            signal,
            f"stopped{by} at step {self.step}, which is saved; go on with: "
            f"jaxformer train --resume --out {shlex.quote(str(self.folder.path))}",
        )

    def evaluate(self, whole: bool) -> None:
        """Held-out score (of all that is held out too, if `whole`), a sample, and the picture. A
        signal meanwhile ends the run: it is evaluated when it goes on."""
        self.flush()
        try:
            with self._clock.paused():
                self._evaluate(whole)
        except Stopped:
            self._end(self._stop())

    def _evaluate(self, whole: bool) -> None:
        measure, weights = self.task.measure, self.state.weights(self.config.lora.scale)
        variables = {"params": weights}
        part, all_of_it = self._score(variables, whole=False), None
        if whole and part.targets < self.task.num_targets:
            all_of_it = self._score(variables, whole=True)
        self.screen.say(
            f"step {self.step}: held-out loss {part.loss:.4f} nats per token, "
            f"{part.measure:.3f} {measure.label}"
        )
        key = jax.random.fold_in(jax.random.key(self.config.seed), self.step)
        sample = self.task.sample(self.model, variables, key)
        self.log.evaluation(self.step, part, all_of_it, sample)

    def _score(self, variables, whole: bool) -> Score:
        """One of several processes cannot leave the others in the middle."""
        bar = self.screen.count(self.task.num_targets, "held-out text", "tokens")
        with bar if whole else nullcontext(lambda count: None) as show:

            def scored(count: int) -> None:
                if self._stop() and not are_several():
                    raise Stopped
                show(count)

            return self.task.score(self.model, variables, whole=whole, on_scored=scored)

    @contextmanager
    def _progress(self):
        """A progress bar; gives a function that shows the newest line of metrics."""
        total = self.config.steps
        name = "step {}" if total is None else f"step {{}}/{total}"
        with self.screen.bar(1000) as show:

            def advance(line: dict) -> None:
                loss = f"loss {line['loss']:.3f} · " if "loss" in line else ""
                said = (
                    f"{loss}{line['tokens_per_second']:,.0f} tokens/s · "
                    f"{self._clock.remaining(self.done) / 60:.1f} min left"
                )
                show(round(1000 * self.done), name.format(self.step), said)

            show(round(1000 * self.done), name.format(self.step), "")
            yield advance
