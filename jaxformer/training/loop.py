"""The training loop: updates, and around them what a person and a later start of the run need."""

import json
import shlex
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from signal import SIGINT, default_int_handler, signal
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer.artifacts.checkpoint import Checkpoints, NotFinite
from jaxformer.artifacts.run import RunFolder
from jaxformer.models.build import build, parameter_count
from jaxformer.training.batch import Batch, num_tokens
from jaxformer.training.clock import Clock
from jaxformer.training.config import TrainingConfig
from jaxformer.training.optimizer import Schedule, make_optimizer
from jaxformer.training.picture import draw_run
from jaxformer.training.placed import init_on, place_batch, placed_shapes
from jaxformer.training.screen import Screen
from jaxformer.training.step import TrainState, make_step
from jaxformer.training.tasks.task import Score, Task

FLUSH_EVERY = 10  # steps between looks at the losses, which wait for the device


class Ended(Exception):
    """The run ended before its last step; the message says why and how to go on."""

    status = 1


class Interrupted(Ended):
    """By Ctrl-C, after a checkpoint was saved."""

    status = 130


def updates(
    step, state: TrainState, batches: Iterable[Batch], rates: Iterable[float]
) -> Iterator[tuple[TrainState, jax.Array]]:
    """The loop of every training: (state, loss) after each update, as long as there are batches and
    learning rates for them.

    step: as of `make_step`, or vmapped. The state that is given, and each one that was yielded
    before, is donated to the next update.
    """
    for rate, batch in zip(rates, batches, strict=False):
        state, loss = step(state, batch, np.float32(rate))
        yield state, loss


class CompiledStep(NamedTuple):
    """A training step, compiled for each shape of batch."""

    programs: dict[tuple[int, ...], jax.stages.Compiled]

    def __call__(self, state: TrainState, batch: Batch, learning_rate):
        return self.programs[batch.inputs.shape](state, batch, learning_rate)


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
        self.batches = task.batches()
        self.checkpoints = Checkpoints(folder.checkpoints, config.keep)
        decay, lora = config.optimizer.average_decay, config.lora
        how = {"lora": lora, "averages": decay is not None}
        self.state = init_on(mesh, self.model, optimizer, config.seed, base, **how)
        how = {"lora_scale": lora.scale, "average_decay": decay}
        self.update = make_step(self.model, optimizer, config.label_smoothing, **how)
        self.step = 0
        self._pending: list[tuple[int, float, jax.Array]] = []  # step, learning rate, loss
        self._clock = Clock()

    # ---- saving and resuming

    def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one; drop what was logged after it."""
        if self.checkpoints.steps():
            self.step, *parts, progress = self.checkpoints.restore(*self.state.parts())
            where = jax.tree.map(lambda x: x.sharding, self.state)
            self.state = jax.device_put(self.state.restored(self.step, *parts), where)
            self.batches.restore(progress["data"])
            self._clock.trained = progress.get("seconds", 0.0)
            for path in self.checkpoints.set_aside_after(self.step):
                self.screen.say(f"a newer checkpoint cannot be read; it is now {path}")
            self.screen.say(f"resuming from the checkpoint of step {self.step}")
        else:
            self.screen.say("no checkpoint yet: starting from the beginning")
        self.folder.cut_after(self.step)

    def save(self) -> None:
        """A checkpoint of this very step: parameters, optimiser, key and position in the data."""
        self.flush()
        with self._clock.paused():
            progress = {"data": self.batches.state(), "seconds": self._clock.trained}
            try:
                self.checkpoints.save(self.step, *self.state.parts(), progress)
            except NotFinite as error:
                raise self._diverged(f"step {self.step} is not saved: {error}") from None

    # ---- the loop

    @property
    def done(self) -> float:
        """Share of the run that is over; from 1 on its steps or its minutes are used up."""
        return self.schedule.done(self.step, self._clock.seconds)

    def run(self) -> None:
        """Train to the end. Raises Interrupted or Ended when it is not reached."""
        if self.done >= 1:
            if not self._concluded():  # it was to go on, and is to end here
                self.evaluate(whole=True)
            return
        steps = self._compile()
        with interrupt_flag() as interrupted, self._progress() as advance:
            self._clock.start(self.done)
            for state, loss in updates(steps, self.state, self._counted(), self._rates()):
                self.state, self.step = state, self.step + 1
                self._pending.append((self.step, self._last_rate, loss))
                last, stop = self.done >= 1, interrupted()
                if last or self.step % FLUSH_EVERY == 0:
                    advance(self.flush())
                    last = self.done >= 1
                if last or self.step % self.config.evaluate_every == 0:
                    self.evaluate(whole=last)
                if last or self.step % self.config.checkpoint_every == 0 or stop:
                    self.save()
                if last:
                    return
                if stop:
                    raise Interrupted(
                        f"stopped at step {self.step}, which is saved; go on with: "
                        f"jaxformer train --resume --out {shlex.quote(str(self.folder.path))}"
                    )

    def _counted(self) -> Iterator[Batch]:
        for batch in self.batches:
            self._clock.count(num_tokens(batch))
            yield batch if self.mesh is None else place_batch(batch, self.mesh)

    def _rates(self) -> Iterator[float]:
        while True:
            self._last_rate = self.schedule.rate(self.step, self._clock.seconds)
            yield self._last_rate

    def _concluded(self) -> bool:
        """Whether all that is held out has been scored after this very step."""
        whole = self.task.num_targets
        lines = self.folder.read_metrics()
        return any(line["step"] == self.step and line.get("scored") == whole for line in lines)

    def _compile(self) -> CompiledStep:
        """The compiled step, for each shape of batch; says what it will need before anything is
        trained."""
        learnt = sum(leaf.size for leaf in jax.tree.leaves(self.state.params))
        part = "" if self.state.frozen is None else f" (frozen), {learnt:,} of an adapter"
        self.screen.say(f"parameters: {parameter_count(self.config.model):,}{part}")
        begin = time.perf_counter()
        rate = jax.ShapeDtypeStruct((), np.float32)
        compiled = {}
        for batch in self.batches.shapes():
            shape = batch.inputs.shape
            batch = batch if self.mesh is None else placed_shapes(batch, self.mesh)
            compiled[shape] = self.update.lower(self.state, batch, rate).compile()
        seconds = time.perf_counter() - begin
        found = [program.memory_analysis() for program in compiled.values()]
        needed = "unknown on this device"
        if None not in found:
            size = max(x.argument_size_in_bytes + x.temp_size_in_bytes for x in found)
            needed = f"{size / 1e6:,.0f} MB for training (state, activations and gradients)"
        self.screen.say(f"memory: {needed}")
        self.screen.say(f"compiled in {seconds:.1f} s")
        return CompiledStep(compiled)

    # ---- what is written down

    def flush(self) -> dict:
        """Write the pending losses to metrics.jsonl; returns the newest line."""
        if not self._pending:
            return {}
        losses = jax.device_get([loss for *_, loss in self._pending])
        lines = [
            {"step": step, "loss": float(loss), "learning_rate": rate}
            for (step, rate, _), loss in zip(self._pending, losses, strict=True)
        ]
        lines[-1]["tokens_per_second"] = round(self._clock.lap(), 1)
        lines[-1]["seconds"] = round(self._clock.seconds, 1)
        self._pending = []
        self._write(lines)
        if not np.isfinite(losses).all():
            bad = next(line["step"] for line in lines if not np.isfinite(line["loss"]))
            raise self._diverged(f"the loss is not finite at step {bad}")
        return lines[-1]

    def _diverged(self, what: str) -> Ended:
        return Ended(f"{what}; {self.checkpoints.last()}. A smaller --learning-rate may help")

    def _write(self, lines: list[dict]) -> None:
        with self.folder.metrics.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def evaluate(self, whole: bool) -> None:
        """Held-out score (of all that is held out too, if `whole`), a sample, and the picture."""
        self.flush()
        with self._clock.paused():
            weights, measure = self.state.weights(self.config.lora.scale), self.task.measure
            variables = {"params": weights}
            score = self.task.score(self.model, variables, whole=False)
            line = score_line(measure.name, score)
            if whole and score.targets < self.task.num_targets:
                line = score_line(measure.name, self._score_all(variables), score)
            self._write([{"step": self.step, **line}])
            self.screen.say(
                f"step {self.step}: held-out loss {score.loss:.4f} nats per token, "
                f"{score.measure:.3f} {measure.label}"
            )
            key = jax.random.fold_in(jax.random.key(self.config.seed), self.step)
            if text := self.task.sample(self.model, variables, key):
                self.folder.add_sample(self.step, text)
            name = self.folder.path.name
            title = f"{name}: {parameter_count(self.config.model) / 1e6:.1f} M parameters"
            metrics, path = self.folder.read_metrics(), self.folder.picture
            draw_run(metrics, path, title, measure, self.task.baselines, self.task.num_targets)

    def _score_all(self, variables) -> Score:
        with self.screen.count(self.task.num_targets, "held-out text", "tokens") as scored:
            return self.task.score(self.model, variables, whole=True, on_scored=scored)

    @contextmanager
    def _progress(self):
        """A progress bar; gives a function that shows the newest line of metrics."""
        total = self.config.steps
        name = "step {}" if total is None else f"step {{}}/{total}"
        with self.screen.bar(1000) as show:

            def advance(line: dict) -> None:
                said = (
                    f"loss {line['loss']:.3f} · {line['tokens_per_second']:,.0f} tokens/s · "
                    f"{self._clock.remaining(self.done) / 60:.1f} min left"
                )
                show(round(1000 * self.done), name.format(self.step), said)

            yield advance


def score_line(measure: str, score: Score, part: Score | None = None) -> dict:
    """What metrics.jsonl says of a score; part: that of the part which every evaluation scores,
    where `score` is of all."""
    line = {"held_out_loss": score.loss, measure: score.measure, "scored": score.targets}
    if part is not None:
        line |= {"part_loss": part.loss, f"part_{measure}": part.measure}
        line["part_scored"] = part.targets
    return line


@contextmanager
def interrupt_flag():
    """While open, the first Ctrl-C only sets the flag that is given, so that no update is torn
    apart while its buffers are donated; a second one interrupts at once."""
    pressed = []

    def handler(*_):
        pressed.append(True)
        signal(SIGINT, default_int_handler)

    before = signal(SIGINT, handler)
    try:
        yield lambda: bool(pressed)
    finally:
        signal(SIGINT, before)
