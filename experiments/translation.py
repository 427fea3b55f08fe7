"""Training on pairs for so many minutes, going on where a kill ended it, and translating."""

import hashlib
import json
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers
from rich.console import Console
from rich.progress import Progress

import jaxformer as jf
from jaxformer.artifacts.checkpoint import Checkpoints
from jaxformer.artifacts.run import write_whole
from jaxformer.training.loop import interrupt_flag
from jaxformer.training.optimizer import is_matrix
from jaxformer.training.pairs import PairBatches
from jaxformer.training.step import TrainState, init_state, make_step

WARMUP, CHECKPOINT_SECONDS, LOOK_EVERY = 200, 120, 20
console = Console()


class Trainer:
    """A model that learns pairs within a budget of seconds, compilation and checkpoints included.

    The learning rate climbs for WARMUP steps and falls, by half a cosine, with the time that is
    left: so each model makes the most of equal time, whatever its speed.
    """

    def __init__(
        self,
        model,
        pairs,
        folder: Path,
        *,
        seconds,
        optimizer,
        peak,
        tokens,
        end_of_text,
        seed,
        smoothing,
        num_buckets,
    ):
        self.model, self.seconds, self.peak, self.folder = model, seconds, peak, folder
        self.batches = PairBatches(pairs, tokens, end_of_text, seed, num_buckets)
        make = OPTIMIZERS[optimizer]

        def clipped(learning_rate):
            return optax.chain(optax.clip_by_global_norm(1.0), make(learning_rate))

        optimizer = optax.inject_hyperparams(clipped)(learning_rate=0.0)
        self.update = make_step(model, optimizer, smoothing)
        self.state = jax.jit(lambda: init_state(model, optimizer, seed))()
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self.elapsed, self.tokens_read, self.history, self.losses = 0.0, 0, [], []
        if self.checkpoints.steps():
            self._resume()

    @property
    def learning_rate(self) -> float:
        warm = min(1.0, (int(self.state.step) + 1) / WARMUP)
        left = min(1.0, self.elapsed / self.seconds)
        return self.peak * warm * 0.5 * (1 + np.cos(np.pi * left))

    def run(self, name: str) -> None:
        """Train until the seconds are over."""
        began = time.perf_counter() - self.elapsed
        saved = self.elapsed
        with interrupt_flag() as interrupted, Progress(console=console, transient=True) as progress:
            task = progress.add_task(name, total=self.seconds, completed=self.elapsed)
            while self.elapsed < self.seconds:
                batch = next(self.batches)
                self.state, loss = self.update(_at(self.state, self.learning_rate), batch)
                self.losses.append(loss)
                self.tokens_read += int(batch.weights.sum())
                if len(self.losses) == LOOK_EVERY:
                    text = f"{name}: epoch {self.batches.epoch}, loss {self._note():.3f}"
                    progress.update(task, completed=self.elapsed, description=text)
                else:
                    loss.block_until_ready()
                self.elapsed = time.perf_counter() - began
                if self.elapsed - saved > CHECKPOINT_SECONDS:
                    self.save()
                    self.elapsed = saved = time.perf_counter() - began
                if interrupted():
                    self.save()
                    raise KeyboardInterrupt
        if not self.history:  # too short a run for a whole mean
            self._note()
        self.save()
        console.print(
            f"{name}: {int(self.state.step)} steps, {self.batches.epoch} epochs, "
            f"{self.tokens_read / self.elapsed:,.0f} target tokens/s, {self.elapsed:.0f} s"
        )

    def _note(self) -> float:
        """The mean of the losses since the last note goes into the history."""
        mean, self.losses = float(np.mean(jax.device_get(self.losses), dtype=np.float64)), []
        self.history.append((int(self.state.step), round(self.elapsed, 1), mean))
        return mean

    def save(self) -> None:
        progress = {
            "data": self.batches.state(),
            "elapsed": self.elapsed,
            "tokens_read": self.tokens_read,
            "history": self.history,
            "losses": [float(loss) for loss in self.losses],
        }
        self.checkpoints.save(int(self.state.step), *self.state.parts(), progress)

    def _resume(self):
        step, *parts, progress = self.checkpoints.restore(*self.state.parts())
        self.state = TrainState.of_parts(step, *parts)
        self.checkpoints.set_aside_after(step)
        self.batches.restore(progress["data"])
        self.elapsed, self.tokens_read = progress["elapsed"], progress["tokens_read"]
        self.history = [tuple(line) for line in progress["history"]]
        self.losses = progress["losses"]
        console.print(f"going on from step {step}, {self.elapsed:.0f} s of {self.seconds:.0f}")


def _axes_of_kernel(path, x):
    """A kernel is [in, out], or [layers, in, out]; of anything else, None."""
    return MuonDimensionNumbers(x.ndim - 2, x.ndim - 1) if path[-1].key == "kernel" else None


OPTIMIZERS = {
    "adamw": partial(optax.adamw, b1=0.9, b2=0.98, weight_decay=0.01, mask=is_matrix),
    "muon": partial(  # steps of kernels made orthogonal, of the size of Adam's; Adam for the rest
        optax.contrib.muon,
        adam_b2=0.98,
        weight_decay=0.01,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=partial(jax.tree_util.tree_map_with_path, _axes_of_kernel),
    ),
}


def _at(state: TrainState, learning_rate: float) -> TrainState:
    """The state with this learning rate for its next update."""
    optimizer = state.optimizer
    rates = {**optimizer.hyperparams, "learning_rate": jnp.float32(learning_rate)}
    return state._replace(optimizer=optimizer._replace(hyperparams=rates))


def translate(model, params, tokenizer, texts, *, beam_width=1, batch_size=64):
    """The translations of `texts`, in their order, by a beam of that width (1: greedy)."""
    ready = jf.prepare(model, {"params": params})
    ids = tokenizer.encode_many(texts)
    order = np.argsort([len(row) for row in ids], kind="stable")
    found = [""] * len(texts)
    end, greedy = tokenizer.end_of_text, jf.Sampler(temperature=0.0)
    room = model.config.max_length - 1  # the same for a text in whatever company
    for begin in range(0, len(order), batch_size):
        rows = order[begin : begin + batch_size]
        source = [ids[row] for row in rows]
        source += [source[0]] * (batch_size - len(rows))  # one shape for all batches
        how = {"max_new_tokens": room, "stop_tokens": (end,), "source": source}
        if beam_width == 1:
            out = jf.generate(model, ready, [[end]] * batch_size, sampler=greedy, **how)
            tokens, lengths = out.tokens, out.lengths
        else:
            out = jf.beam_search(model, ready, [[end]] * batch_size, beam_width=beam_width, **how)
            tokens, lengths = out.tokens[:, 0], out.lengths[:, 0]
        for row, text, length in zip(rows, tokens, lengths, strict=False):
            found[row] = tokenizer.decode(text[:length].tolist())
    return found


def same_run(folder: Path, settings: dict) -> None:
    """Note what a run is in its folder; ValueError if another one is there already."""
    path = folder / "settings.json"
    text = json.dumps(settings, indent=2)
    if path.exists():
        there = json.loads(path.read_text())
        for name, value in json.loads(text).items():
            if there.get(name) != value:
                raise ValueError(
                    f"{folder} holds a run whose {name} was {there.get(name)}, not {value}; choose "
                    "another --out"
                )
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


def fingerprint(*texts) -> str:
    """Of lists of pairs: other text, another fingerprint."""
    return hashlib.blake2b(json.dumps(texts).encode(), digest_size=8).hexdigest()
