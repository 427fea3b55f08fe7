"""How long a run has trained."""

import time
from contextlib import contextmanager


class Clock:
    """Seconds of training, in all starts of a run; compiling, evaluating and saving not counted.

    trained: seconds before it was last started or stopped.
    """

    def __init__(self):
        self.trained = 0.0
        self._since: float | None = None  # when it was started; None: it stands
        self._tokens = self._flops = 0
        self._lap = (0.0, 0, 0)

    def start(self, done: float) -> None:
        """Training begins when that share of the run is over."""
        self._since = time.perf_counter()
        self._begun = (self._since, done)
        self._lap = (self.seconds, self._tokens, self._flops)

    @property
    def seconds(self) -> float:
        """Of training so far."""
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self.trained + running

    def count(self, tokens: int, flops: int = 0) -> None:
        """So many tokens more are being learnt from, which takes so many operations."""
        self._tokens += tokens
        self._flops += flops

    def lap(self) -> tuple[float, float]:
        """(tokens, operations) a second since the last lap."""
        before, self._lap = self._lap, (self.seconds, self._tokens, self._flops)
        seconds, *done = (now - then for now, then in zip(self._lap, before, strict=True))
        tokens, flops = (number / max(seconds, 1e-9) for number in done)
        return tokens, flops

    @contextmanager
    def paused(self):
        """While open, what happens is not training."""
        was_running, self.trained, self._since = self._since is not None, self.seconds, None
        yield
        if was_running:
            self._since = time.perf_counter()

    def remaining(self, done: float) -> float:
        """Seconds until the end when that share of the run is over, at the pace since the start,
        pauses counted in."""
        begun, before = self._begun
        return (time.perf_counter() - begun) * max(0, 1 - done) / max(done - before, 1e-9)
