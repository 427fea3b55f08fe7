"""Speed of a training run: training time, throughput, utilization and profiler trace."""

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer.models.flops import training_flops
from jaxformer.models.language_model import LanguageModel
from jaxformer.training.batch import AnyBatch, Batch, num_tokens
from jaxformer.training.devices import device_specs
from jaxformer.training.tasks.task import Task

# The profiler skips the first `WARM` updates and traces the next `TRACED` updates.
WARM, TRACED = 5, 5


class Clock:
    """Stopwatch for training time, which excludes compilation, evaluation and saving.

    Attributes:
        trained: Seconds of training up to the last pause, including all earlier sessions of the
            run.
    """

    def __init__(self):
        """Creates a clock at 0 seconds."""
        self.trained = 0.0
        self._since: float | None = None  # Time of the last call of `start`; None while paused.
        self._tokens = self._flops = 0
        self._lap = (0.0, 0, 0)

    def start(self, done: float) -> None:
        """Starts the clock.

        Args:
            done: The completed fraction of the run.
        """
        self._since = time.perf_counter()
        self._started = (self.seconds, done)
        self._lap = (self.seconds, self._tokens, self._flops)

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self.trained + running

    def count(self, tokens: int, flops: int = 0) -> None:
        """Adds the tokens and the FLOPs of an update."""
        self._tokens += tokens
        self._flops += flops

    def lap(self) -> tuple[float, float]:
        """Returns tokens per second and FLOP/s since the last call."""
        before, self._lap = self._lap, (self.seconds, self._tokens, self._flops)
        seconds, *done = (now - then for now, then in zip(self._lap, before, strict=True))
        tokens, flops = (number / max(seconds, 1e-9) for number in done)
        return tokens, flops

    @contextmanager
    def paused(self) -> Generator[None]:
        """Pauses the clock while the context is open."""
        was_running, self.trained, self._since = self._since is not None, self.seconds, None
        yield
        if was_running:
            self._since = time.perf_counter()

    @property
    def seconds_per_token(self) -> float:
        """Seconds of training per token since `start`."""
        return self._since_start / max(self._tokens, 1)

    @property
    def _since_start(self) -> float:
        return self.seconds - self._started[0]

    def remaining(self, done: float) -> float:
        """Estimates the remaining seconds of training from the pace since `start`.

        Args:
            done: The completed fraction of the run.
        """
        return self._since_start * max(0, 1 - done) / max(done - self._started[1], 1e-9)


class ScoringTime:
    """Estimate of the time that the remaining evaluations of a run take.

    The first evaluation includes compilation, so its duration is not used. Until the second
    evaluation has been measured, the time per target is a guess.
    """

    def __init__(self, task: Task, every: int):
        """Creates an estimate.

        Args:
            task: The task, whose `scoring_cost` gives the first estimate of the time per target.
            every: The number of updates between evaluations.
        """
        self._task, self._every = task, every
        self._pace: float | None = None  # Seconds per target.
        self._is_first = True

    @contextmanager
    def measured(self) -> Generator[None]:
        """Measures the duration of an evaluation on the fixed part of the held-out data."""
        begin = time.perf_counter()
        yield
        if not self._is_first:
            self._pace = (time.perf_counter() - begin) / self._targets(1, 0)
        self._is_first = False

    def remaining(self, step: int, done: float, seconds_per_token: float) -> float:
        """Estimates the seconds of the remaining evaluations, including the one at this step.

        Args:
            step: The number of updates so far.
            done: The completed fraction of the run.
            seconds_per_token: Seconds of training per token.
        """
        last = round(step / max(done, 1e-9))
        parts = 1 + max(0, (last - 1) // self._every - (step - 1) // self._every)
        guess = self._task.scoring_cost * seconds_per_token
        return (guess if self._pace is None else self._pace) * self._targets(parts, 1)

    def _targets(self, parts: int, wholes: int) -> float:
        """Returns the number of targets that several evaluations score.

        Args:
            parts: The number of evaluations on the fixed part of the held-out data.
            wholes: The number of evaluations on all held-out data. If the fixed part contains
                all held-out data, `wholes` is ignored.
        """
        share = self._task.part
        return self._task.num_targets * (parts * share + wholes * (share < 1))


def update_size(model: LanguageModel, batch: AnyBatch, *, is_lora: bool) -> tuple[int, int]:
    """Returns the tokens of an update without padding, and its FLOPs including padding.

    The FLOPs follow the formulas in `models.flops`. Training a LoRA adapter takes a third fewer
    FLOPs, because frozen weights have no gradient. If the batch is of a user's type, every integer
    counts as a token and the FLOPs are unknown (0).
    """
    if not isinstance(batch, Batch):
        integers = (x for x in jax.tree.leaves(batch) if np.issubdtype(x.dtype, np.integer))
        return sum(x.size for x in integers), 0
    source = None if batch.source is None else batch.source.shape[-1]
    accumulate, batch_size, length = batch.inputs.shape
    flops = accumulate * batch_size * training_flops(model, length, source)
    return num_tokens(batch), flops * 2 // 3 if is_lora else flops


def utilization(flops_per_second: float, mesh: Mesh | None) -> dict[str, float]:
    """Returns `model_flops_utilization`: model FLOP/s as a fraction of the devices' bfloat16 peak.

    Args:
        flops_per_second: FLOP/s of the whole run, or 0 if unknown.
        mesh: The device mesh; JAX's first device if None.

    Returns:
        A dict with one entry. The dict is empty if the FLOP/s or the devices' peak are unknown.

    Reference:
        Chowdhery et al. 2022, appendix B.
    """
    devices = jax.devices()[:1] if mesh is None else mesh.devices.ravel()
    device = device_specs(devices[0].device_kind)
    if device is None or not flops_per_second:
        return {}
    return {"model_flops_utilization": round(flops_per_second / (device.flops * len(devices)), 4)}


@contextmanager
def profile(
    folder: Path, wanted: bool, say: Callable[[str], None]
) -> Generator[Callable[[], AbstractContextManager[None]]]:
    """Traces updates 6 to 10 of a run.

    If the run has at most 5 updates, the function reports that no trace was written. JAX writes the
    trace for TensorBoard's profile plugin, and `perfetto_trace.json.gz` for ui.perfetto.dev.

    Args:
        folder: The folder for the trace.
        wanted: Whether to write a trace.
        say: Called with a line of text about the trace.

    Yields:
        ``update()``, a context for each update that starts and stops the trace.

    Raises:
        ValueError: `folder` is a file.
    """
    if wanted and folder.is_file():
        raise ValueError(
            f"{folder} is a file, but the profile needs a folder of this name; move the file"
        )
    number, trace = 0, ExitStack()

    @contextmanager
    def update() -> Generator[None]:
        nonlocal number
        number += 1
        if wanted and number == WARM + 1:
            # The exit stack calls `say` after the trace has been written.
            trace.callback(say, f"profile: {folder}")
            trace.enter_context(jax.profiler.trace(folder, create_perfetto_trace=True))
        yield
        if number == WARM + TRACED:
            trace.close()

    try:
        yield update
    finally:
        trace.close()
        if wanted and number <= WARM:
            say(f"no profile was written: a profile needs more than {WARM} updates")
