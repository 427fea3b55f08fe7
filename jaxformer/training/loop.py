"""The training loop: steps, and around them what a person and a later start of the run need."""

import json
import shlex
import time
from contextlib import contextmanager
from signal import SIGINT, default_int_handler, signal

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.artifacts.checkpoint import Checkpoints, NotFinite
from jaxformer.artifacts.run import RunFolder
from jaxformer.decoding.generate import generate
from jaxformer.decoding.sampling import Sampler
from jaxformer.models.build import build, parameter_count
from jaxformer.training.batch import Batch
from jaxformer.training.config import TrainingConfig
from jaxformer.training.evaluate import Evaluation, evaluate_documents, evaluate_windows
from jaxformer.training.optimizer import make_optimizer, make_schedule
from jaxformer.training.picture import draw_run
from jaxformer.training.prepare import Prepared
from jaxformer.training.screen import Screen
from jaxformer.training.step import TrainState, init_state, make_step
from jaxformer.training.windows import WindowBatches

FLUSH_EVERY = 10  # steps between looks at the losses, which wait for the device


class Ended(Exception):
    """The run ended before its last step; the message says why and how to go on."""

    status = 1


class Interrupted(Ended):
    """By Ctrl-C, after a checkpoint was saved."""

    status = 130


class Training:
    """A run in progress: its state, what it reads, and the files that it keeps up to date."""

    def __init__(self, config: TrainingConfig, folder: RunFolder, data: Prepared, screen: Screen):
        self.config, self.folder, self.data, self.screen = config, folder, data, screen
        self.model = build(config.model, config.execution)
        self.optimizer = make_optimizer(config.optimizer, config.steps)
        self.schedule = make_schedule(config.optimizer, config.steps)
        self.batches = WindowBatches(
            data.train.ids, config.window, config.batch_size * config.accumulate, config.seed
        )
        self.checkpoints = Checkpoints(folder.checkpoints, config.keep)
        self.state = jax.jit(lambda: init_state(self.model, self.optimizer, config.seed))()
        self.step = 0
        self._pending: list[tuple[int, jax.Array]] = []
        self._clock = _Clock()

    # ---- saving and resuming

    def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one; drop what was logged after it."""
        if self.checkpoints.steps():
            self.step, *parts, progress = self.checkpoints.restore(*self.state.parts())
            self.state = TrainState.of_parts(self.step, *parts)
            self.batches.restore(progress["data"])
            for path in self.checkpoints.set_aside_after(self.step):
                self.screen.say(f"a newer checkpoint cannot be read; it is now {path}")
            self.screen.say(f"resuming from the checkpoint of step {self.step}")
        else:
            self.screen.say("no checkpoint yet: starting from the beginning")
        self.folder.cut_after(self.step)

    def save(self) -> None:
        """A checkpoint of this very step: parameters, optimiser, key and position in the data."""
        self.flush()
        progress = {"data": self.batches.state()}
        with self._clock.paused():
            try:
                self.checkpoints.save(self.step, *self.state.parts(), progress)
            except NotFinite as error:
                raise self._diverged(f"step {self.step} is not saved: {error}") from None

    # ---- the loop

    def run(self) -> None:
        """Train to the last step. Raises Interrupted or Ended when it is not reached."""
        if self.step == self.config.steps:
            if not self._concluded():  # it was to go on, and is to end here
                self.evaluate(whole=True)
            return
        step_function = self._compile()
        with interrupt_flag() as interrupted, self._progress() as advance:
            self._clock.start()
            while self.step < self.config.steps:
                self.state, loss = step_function(self.state, self._next_batch())
                self.step += 1
                self._pending.append((self.step, loss))
                last, stop = self.step == self.config.steps, interrupted()
                if last or self.step % FLUSH_EVERY == 0:
                    advance(self.flush())
                if last or self.step % self.config.evaluate_every == 0:
                    self.evaluate(whole=last)
                if last or self.step % self.config.checkpoint_every == 0 or stop:
                    self.save()
                if stop and not last:
                    raise Interrupted(
                        f"stopped at step {self.step}, which is saved; go on with: "
                        f"jaxformer train --resume --out {shlex.quote(str(self.folder.path))}"
                    )

    def _concluded(self) -> bool:
        """Whether every held-out byte has been scored after this very step."""
        whole = self.data.held_out.num_targets
        lines = self.folder.read_metrics()
        return any(line["step"] == self.step and line.get("scored") == whole for line in lines)

    def _next_batch(self) -> Batch:
        batch = next(self.batches)
        shape = (self.config.accumulate, self.config.batch_size, self.config.window)
        return Batch(*(np.reshape(x, shape) for x in (batch.inputs, batch.targets)))

    def _compile(self):
        """The compiled step; says what it will need before anything is trained."""
        config = self.config
        self.screen.say(f"parameters: {parameter_count(config.model):,}")
        shape = (config.accumulate, config.batch_size, config.window)
        ids = jax.ShapeDtypeStruct(shape, jnp.int32)
        begin = time.perf_counter()
        step = make_step(self.model, self.optimizer, config.label_smoothing)
        compiled = step.lower(self.state, Batch(ids, ids)).compile()
        seconds = time.perf_counter() - begin
        memory = compiled.memory_analysis()
        needed = "unknown on this device"
        if memory is not None:
            size = memory.argument_size_in_bytes + memory.temp_size_in_bytes
            needed = f"{size / 1e6:,.0f} MB for training (state, activations and gradients)"
        self.screen.say(f"memory: {needed}")
        self.screen.say(f"compiled in {seconds:.1f} s")
        return compiled

    # ---- what is written down

    def flush(self) -> dict:
        """Write the pending losses to metrics.jsonl; returns the newest line."""
        if not self._pending:
            return {}
        losses = jax.device_get([loss for _, loss in self._pending])
        tokens = self.config.accumulate * self.config.batch_size * self.config.window
        speed = self._clock.lap(len(losses)) * tokens
        lines = [
            {"step": step, "loss": float(loss), "learning_rate": float(self.schedule(step - 1))}
            for (step, _), loss in zip(self._pending, losses, strict=True)
        ]
        lines[-1]["tokens_per_second"] = round(speed, 1)
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
        """Held-out loss (of every byte too if `whole`), a sample, and the picture."""
        self.flush()
        with self._clock.paused():
            variables = {"params": self.state.params}
            score = self._score_windows(variables)
            line = _held_out_line(score)
            if whole and score.tokens < self.data.held_out.num_targets:
                line = _held_out_line(self._score_all(variables), score)
            self._write([{"step": self.step, **line}])
            self.screen.say(
                f"step {self.step}: held-out loss {score.loss:.4f} nats per token, "
                f"{score.bits_per_byte:.3f} bits per byte"
            )
            if self.config.sample_tokens:
                self._sample(variables)
            name = self.folder.path.name
            title = f"{name}: {parameter_count(self.config.model) / 1e6:.1f} M parameters"
            metrics, whole_text = self.folder.read_metrics(), self.data.held_out.num_targets
            draw_run(metrics, self.folder.picture, title, self.data.baselines, whole_text)

    def _score_windows(self, variables) -> Evaluation:
        return evaluate_windows(
            self.model,
            variables,
            self.data.held_out_documents,
            self.data.held_out.num_bytes,
            windows=self.config.evaluation_windows,
            batch_size=self.config.batch_size,
        )

    def _score_all(self, variables) -> Evaluation:
        with self.screen.count(self.data.held_out.num_targets, "held-out text", "tokens") as scored:
            return evaluate_documents(
                self.model,
                variables,
                self.data.held_out_documents,
                self.data.held_out.num_bytes,
                batch_size=self.config.batch_size,
                on_scored=scored,
            )

    def _sample(self, variables):
        """Append a sample of the model's own to samples.txt, the same for the same run."""
        tokenizer = self.data.tokenizer
        room = self.config.model.max_length - 1
        sample = generate(
            self.model,
            variables,
            [[tokenizer.end_of_text]],
            max_new_tokens=min(self.config.sample_tokens, room),
            sampler=Sampler(temperature=0.8, top_p=0.95),
            key=jax.random.fold_in(jax.random.key(self.config.seed), self.step),
            stop_tokens=(tokenizer.end_of_text,),
        )
        text = tokenizer.decode(sample.tokens[0, : sample.lengths[0]].tolist())
        self.folder.add_sample(self.step, text)

    @contextmanager
    def _progress(self):
        """A progress bar; gives a function that shows the newest line of metrics."""
        steps = self.config.steps
        with self.screen.bar(steps) as show:
            show(self.step, f"step {self.step}/{steps}", "")

            def advance(line: dict) -> None:
                left = self._clock.remaining(steps - self.step)
                said = (
                    f"loss {line['loss']:.3f} · {line['tokens_per_second']:,.0f} tokens/s · "
                    f"{left / 60:.1f} min left"
                )
                show(self.step, f"step {self.step}/{steps}", said)

            yield advance


def _held_out_line(score: Evaluation, windows: Evaluation | None = None) -> dict:
    """What metrics.jsonl says of a score; windows: that of the windows which every evaluation
    scores, where `score` is of more."""
    line = {"held_out_loss": score.loss, "bits_per_byte": score.bits_per_byte}
    line["scored"] = score.tokens
    if windows is not None:
        line["windows_loss"], line["windows_bits_per_byte"] = windows.loss, windows.bits_per_byte
        line["windows_scored"] = windows.tokens
    return line


class _Clock:
    """Seconds of training and, apart from them, of what interrupts it (evaluation, saving)."""

    def __init__(self):
        self.start()

    def start(self):
        self._begin = self._lap = time.perf_counter()
        self._steps = 0

    def lap(self, steps: int) -> float:
        """Steps a second since the last lap."""
        now = time.perf_counter()
        self._steps += steps
        rate, self._lap = steps / (now - self._lap), now
        return rate

    @contextmanager
    def paused(self):
        begin = time.perf_counter()
        yield
        self._lap += time.perf_counter() - begin

    def remaining(self, steps: int) -> float:
        """Seconds that so many more steps will take at the pace so far, pauses counted in."""
        return steps * (time.perf_counter() - self._begin) / max(self._steps, 1)


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
