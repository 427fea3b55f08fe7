"""Speed of a run: its time, throughput, utilization and profiler trace."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer.models.flops import training_flops
from jaxformer.models.language_model import LanguageModel
from jaxformer.training.batch import AnyBatch, Batch, num_tokens
from jaxformer.training.devices import device_of
from jaxformer.training.tasks.task import Task

WARM, TRACED = 5, 5  # updates before the trace, updates in the trace


class Clock:
    """Stopwatch for training time, excluding compilation, evaluation and saving.

    Attributes:
        trained: Seconds of training up to the last pause, in all starts of the run.
    """

    def __init__(self):
        """Creates a clock that stands at 0."""
        self.trained = 0.0
        self._since: float | None = None  # start of the current stretch; None: paused
        self._tokens = self._flops = 0
        self._lap = (0.0, 0, 0)

    def start(self, done: float) -> None:
        """Starts the clock.

        Args:
            done: Share of the run that is over.
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
        """Adds the tokens and the operations of an update."""
        self._tokens += tokens
        self._flops += flops

    def lap(self) -> tuple[float, float]:
        """Returns tokens and operations per second since the last call."""
        before, self._lap = self._lap, (self.seconds, self._tokens, self._flops)
        seconds, *done = (now - then for now, then in zip(self._lap, before, strict=True))
        tokens, flops = (number / max(seconds, 1e-9) for number in done)
        return tokens, flops

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock while the context is open."""
        was_running, self.trained, self._since = self._since is not None, self.seconds, None
        yield
        if was_running:
            self._since = time.perf_counter()

    @property
    def seconds_per_token(self) -> float:
        """Seconds of training per token of the updates since `start`."""
        return self._since_start / max(self._tokens, 1)

    @property
    def _since_start(self) -> float:
        return self.seconds - self._started[0]

    def remaining(self, done: float) -> float:
        """Estimates the seconds of training until the run ends, from the pace since `start`.

        Args:
            done: Share of the run that is over.
        """
        return self._since_start * max(0, 1 - done) / max(done - self._started[1], 1e-9)


class ScoringTime:
    """Estimate of the time that the evaluations of a run will take.

    The first evaluation compiles its programs. So the time per target is a guess until the second
    one has been measured.
    """

    def __init__(self, task: Task, every: int):
        """Creates an estimate.

        Args:
            task: The data, and a guess of the cost.
            every: The number of updates between evaluations.
        """
        self._task, self._every = task, every
        self._pace: float | None = None  # seconds per target
        self._is_first = True

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measures an evaluation of the part that is scored each time."""
        begin = time.perf_counter()
        yield
        if not self._is_first:
            self._pace = (time.perf_counter() - begin) / self._targets(1, 0)
        self._is_first = False

    def remaining(self, step: int, done: float, seconds_per_token: float) -> float:
        """Estimates the seconds of all further evaluations, that of this step included.

        Args:
            step: The number of updates so far.
            done: The share of the run that is over.
            seconds_per_token: The time of training.
        """
        last = round(step / max(done, 1e-9))
        parts = 1 + max(0, (last - 1) // self._every - (step - 1) // self._every)
        guess = self._task.scoring_cost * seconds_per_token
        return (guess if self._pace is None else self._pace) * self._targets(parts, 1)

    def _targets(self, parts: int, wholes: int) -> float:
        """Returns the number of targets of evaluations of the part and of all held-out data.

        If the part is all of it, the last evaluation scores it once.
        """
        share = self._task.part
        return self._task.num_targets * (parts * share + wholes * (share < 1))


def update_size(model: LanguageModel, batch: AnyBatch, *, is_lora: bool) -> tuple[int, int]:
    """Returns the tokens of an update without padding, and its operations including padding.

    The operations follow the formula of `models.flops`. Training a LoRA adapter takes a third less,
    because frozen weights have no gradient. A batch of a user's type counts each integer as a
    token, and its operations are unknown (0).
    """
    if not isinstance(batch, Batch):
        integers = (x for x in jax.tree.leaves(batch) if np.issubdtype(x.dtype, np.integer))
        return sum(x.size for x in integers), 0
    source = None if batch.source is None else batch.source.shape[-1]
    accumulate, rows, length = batch.inputs.shape
    flops = accumulate * rows * training_flops(model, length, source)
    return num_tokens(batch), flops * 2 // 3 if is_lora else flops


def utilization(flops_per_second: float, mesh: Mesh | None) -> dict[str, float]:
    """Returns `model_flops_utilization`, the share of the devices' bfloat16 peak that is used.

    Args:
        flops_per_second: Operations of the whole run per second; 0: unknown.
        mesh: The devices; None: the first one of JAX.

    Returns:
        A dict with one entry, or an empty one if the operations or the devices' peak are unknown.

    Reference:
        Chowdhery et al. 2022, appendix B.
    """
    devices = jax.devices()[:1] if mesh is None else mesh.devices.ravel()
    device = device_of(devices[0].device_kind)
    if device is None or not flops_per_second:
        return {}
    return {"model_flops_utilization": round(flops_per_second / (device.flops * len(devices)), 4)}


@contextmanager
def profile(folder: Path, wanted: bool, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Traces updates 6 to 10 of a run; a shorter run reports that there is no trace.

    JAX writes the trace for TensorBoard's profile plugin and for ui.perfetto.dev
    (`perfetto_trace.json.gz` in it).

    Args:
        folder: The folder for the trace.
        wanted: Whether to write a trace.
        say: Receives a line of text about the trace.

    Yields:
        ``updated()``, which starts and stops the trace. Call it after each update.
    """
    left, trace = WARM + TRACED if wanted else 0, ExitStack()

    def updated() -> None:
        nonlocal left
        left -= 1
        if left == TRACED:
            trace.callback(say, f"profile: {folder}")  # at the end, after the trace is written
            trace.enter_context(jax.profiler.trace(folder, create_perfetto_trace=True))
        elif left == 0:
            trace.close()

    try:
        yield updated
    finally:
        trace.close()
        if left > TRACED:
            say(f"no profile was written: it needs more than {WARM} updates")
