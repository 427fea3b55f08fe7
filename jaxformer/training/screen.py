"""Screen output: lines of text, progress bars below the text, and the metrics of a run."""

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.segment import Segment, Segments
from rich.text import Text

from jaxformer.terminal import visible

# Two log lines are at least `_GAP` seconds apart in the first minute of a run, and at least
# `_LONG_GAP` seconds apart afterwards.
_GAP, _LONG_GAP = 10.0, 60.0

# AdamW divides by the gradient's size plus 1e-8, so a gradient below 1e-8 hardly moves a parameter.
_LEAST_GRADIENT = 1e-8


class Screen:
    """Prints text verbatim, with control characters as visible escapes.

    rich would interpret `[…]` as markup and `:…:` as an emoji, break long lines and expand tabs. A
    terminal would execute escape sequences in samples, paths or names.
    """

    def __init__(self, **options: Any):
        """Creates a screen.

        Args:
            **options: Options of rich's `Console` (stderr, file, …).
        """
        self._console = Console(soft_wrap=True, **options)
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), _Detail())
        self._bars = Progress(*columns, console=self._console, transient=True)

    @property
    def is_interactive(self) -> bool:
        """Whether the output is a terminal. Progress bars appear on terminals only."""
        return self._console.is_interactive

    def say(self, text: str) -> None:
        """Prints one or more lines of text."""
        self._console.print(Segments([Segment(f"{visible(text)}\n")]))

    @contextmanager
    def bar(
        self, total: int | None, name: str = "", detail: str | None = ""
    ) -> Generator[Callable[[int, str, str], None]]:
        """Shows a progress bar while the context is open, if the output is a terminal.

        A second bar appears below the first bar.

        Args:
            total: The value of `completed` that fills the bar; None if unknown.
            name: The initial text on the left.
            detail: The initial text on the right. If None, the bar shows the elapsed seconds.

        Yields:
            ``show(completed, name, detail)``, which updates the bar and the texts on its left and
            right.
        """
        if not self.is_interactive:
            yield lambda completed, name, detail: None
            return
        task = self._bars.add_task(visible(name), total=total, detail=detail and visible(detail))
        self._bars.start()
        try:
            yield lambda completed, name, detail: self._bars.update(
                task, completed=completed, description=visible(name), detail=visible(detail)
            )
        finally:
            self._bars.remove_task(task)
            if not self._bars.tasks:
                self._bars.stop()

    @contextmanager
    def waiting(self, name: str) -> Generator[None]:
        """Shows `name` while the context is open. On a terminal, also shows the elapsed seconds."""
        if not self.is_interactive:
            self.say(f"{name} …")
        with self.bar(None, name, None):
            yield

    @contextmanager
    def count(self, total: int, name: str, unit: str) -> Generator[Callable[[int], None]]:
        """Shows a progress bar with the remaining time while the context is open.

        Args:
            total: The number of units of work.
            name: The text on the left of the bar.
            unit: The plural name of the unit, such as "tokens".

        Yields:
            ``advance(done)``, which sets the number of completed units.
        """
        begin = time.perf_counter()
        with self.bar(total, name, f"0 of {total:,} {unit}") as show:

            def advance(done: int) -> None:
                left = (time.perf_counter() - begin) * (total - done) / max(done, 1)
                detail = f"{done:,} of {total:,} {unit}"
                show(done, name, detail + f" · {left / 60:.1f} min left" * (done > 0))

            yield advance


class _Detail(ProgressColumn):
    """Column to the right of a bar, which shows a text or the elapsed seconds."""

    def render(self, task: Task) -> Text:
        detail = task.fields["detail"]
        return Text(f"{task.elapsed or 0.0:.0f} s" if detail is None else detail)


def progress_line(line: dict, minutes_left: float) -> str:
    """Formats the loss, the speed and the remaining time of a run.

    Args:
        line: A line of metrics.
        minutes_left: The remaining time in minutes.
    """
    loss = f"loss {line['loss']:.3f} · " if "loss" in line else ""
    return f"{loss}{line['tokens_per_second']:,.0f} tokens/s · {minutes_left:.1f} min left"


@contextmanager
def progress(
    screen: Screen, total: int | None, clock: Callable[[], float] = time.monotonic
) -> Generator[Callable[[int, float, str], None]]:
    """Shows the progress of a run while the context is open.

    Args:
        screen: Shows a progress bar on a terminal, and log lines elsewhere.
        total: The number of steps of the run; None if only the time is limited.
        clock: Returns the current time in seconds, to limit the rate of log lines.

    Yields:
        ``show(step, done, detail)``, which shows the step, the completed fraction of the run and a
        text.
    """
    name = "step {}" if total is None else f"step {{}}/{total}"
    begin, shown = clock(), float("-inf")
    with screen.bar(1000) as bar:

        def show(step: int, done: float, detail: str) -> None:
            nonlocal shown
            bar(round(1000 * done), name.format(step), detail)
            now = clock()
            gap = _GAP if now - begin < _LONG_GAP else _LONG_GAP
            if detail and not screen.is_interactive and now - shown >= gap:
                shown = now
                screen.say(f"{name.format(step)}: {detail}")

        yield show


def vanishing(lines: list[dict], num_parameters: int) -> str | None:
    """Returns a warning if the gradients of all given steps are too small for training.

    Args:
        lines: Lines of metrics.
        num_parameters: The number of trainable parameters.
    """
    norms = [line["gradient_norm"] for line in lines if "gradient_norm" in line]
    least = _LEAST_GRADIENT * num_parameters**0.5
    if not norms or max(norms) >= least:
        return None
    return (
        f"warning: the gradient norm of the first {len(lines)} steps is at most {max(norms):.1e}, "
        f"but a model with {num_parameters:,} trainable parameters needs about {least:.1e} to "
        "learn. Try a norm and a residual (--norm rms --residual), or fewer layers"
    )


def late_peak(warmup: int, step: int, done: float) -> str | None:
    """Returns a warning if the warm-up takes more than half of the updates of a run.

    Args:
        warmup: The number of warm-up updates.
        step: The number of updates so far.
        done: The completed fraction of the run.
    """
    updates = step / done if done else math.inf
    if warmup <= 0.5 * updates:
        return None
    return (
        f"warning: at this speed, the run makes about {updates:,.0f} updates, but the learning "
        f"rate rises during the first {warmup:,}. For a shorter warm-up, set --warmup-steps "
        f"{max(1, round(updates / 10))}"
    )
