"""A trace of a few updates: which operation took how long, on which device."""

from pathlib import Path

import jax

WARM, TRACED = 5, 5  # updates before the trace, and in it


class Profile:
    """While open, traces the updates of which it is told after the first few; of a run of fewer
    nothing, which is said.

    The trace is JAX's own: for TensorBoard's profile plugin, or for ui.perfetto.dev
    (`perfetto_trace.json.gz` in it).
    """

    def __init__(self, folder: Path, wanted: bool, say=lambda line: None):
        self._folder, self._left = folder, WARM + TRACED if wanted else 0
        self._tracing, self._say = False, say

    def __enter__(self) -> "Profile":
        return self

    def updated(self) -> None:
        """An update was begun."""
        if not self._left:
            return
        self._left -= 1
        if self._left == TRACED:
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
            self._tracing = True
        elif not self._left:
            self.__exit__()

    def __exit__(self, *_) -> None:
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
            self._say(f"profile: {self._folder}")
        elif self._left:
            self._say(f"no profile was written: it begins after {WARM} updates")
