"""Screen output: lines of text with progress bars below them, and the progress of a run."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.segment import Segment, Segments
from rich.text import Text

from jaxformer.terminal import visible

_GAP, _LONG_GAP = 10.0, 60.0  # seconds between lines of a log, in its first minute and later
# AdamW divides a gradient by its size plus 1e-8, so smaller gradients no longer move a parameter.
_LEAST_GRADIENT = 1e-8


class Screen:
    """Prints text exactly as it is, with control characters as visible escapes.

    rich would interpret `[…]` as markup and `:…:` as an emoji, break long lines and expand tabs. A
    terminal would execute escape sequences in a sample, a path or a name.
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
        """Whether the output is a terminal; only a terminal shows progress bars."""
        return self._console.is_interactive

    def say(self, text: str) -> None:
        """Prints one or more lines of text."""
        self._console.print(Segments([Segment(f"{visible(text)}\n")]))

    @contextmanager
    def bar(
        self, total: int | None, name: str = "", detail: str | None = ""
    ) -> Iterator[Callable[[int, str, str], None]]:
        """Shows a progress bar while the context is open, if the output is a terminal.

        A second bar appears below the first.

        Args:
            total: The value of `completed` at which the bar is full; None: unknown.
            name: The text on its left at first.
            detail: The text on its right at first; None: the elapsed seconds.

        Yields:
            ``show(completed, name, detail)``, which updates the bar, the text on its left and the
            text on its right.
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
    def waiting(self, name: str) -> Iterator[None]:
        """Shows `name` while the context is open; on a terminal, also the elapsed seconds."""
        if not self.is_interactive:
            self.say(f"{name} …")
        with self.bar(None, name, None):
            yield

    @contextmanager
    def count(self, total: int, name: str, unit: str) -> Iterator[Callable[[int], None]]:
        """Shows a progress bar with the remaining time while the context is open.

        Args:
            total: The number of units.
            name: The text on the left of the bar.
            unit: The name of the units.

        Yields:
            ``advance(done)``, which sets the number of units that are done.
        """
        begin = time.perf_counter()
        with self.bar(total, name, f"0 of {total:,} {unit}") as show:

            def advance(done: int) -> None:
                left = (time.perf_counter() - begin) * (total - done) / max(done, 1)
                detail = f"{done:,} of {total:,} {unit}"
                show(done, name, detail + f" · {left / 60:.1f} min left" * (done > 0))

            yield advance


class _Detail(ProgressColumn):
    """Column with the text on the right of a bar, or the elapsed seconds if there is no text."""

    def render(self, task: Task) -> Text:
        detail = task.fields["detail"]
        return Text(f"{task.elapsed or 0.0:.0f} s" if detail is None else detail)


def progress_line(line: dict, minutes_left: float) -> str:
    """Returns the loss, the speed and the remaining time as text.

    Args:
        line: A line of metrics.
        minutes_left: The remaining time.
    """
    loss = f"loss {line['loss']:.3f} · " if "loss" in line else ""
    return f"{loss}{line['tokens_per_second']:,.0f} tokens/s · {minutes_left:.1f} min left"


@contextmanager
def progress(
    screen: Screen, total: int | None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int, float, str], None]]:
    """Shows the progress of a run while the context is open.

    Args:
        screen: Shows the bar or the lines.
        total: The number of steps of the run; None: the run is limited by minutes.
        clock: Returns the time in seconds, to space the lines of a log file.

    Yields:
        ``show(step, done, detail)``: it shows the step, the share of the run that is over, and a
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
    """Returns a warning if the gradients of all these steps are too small to train with.

    Args:
        lines: Lines of metrics.
        num_parameters: The number of trained parameters.
    """
    norms = [line["gradient_norm"] for line in lines if "gradient_norm" in line]
    least = _LEAST_GRADIENT * num_parameters**0.5
    if not norms or max(norms) >= least:
        return None
    return (
        f"warning: the gradient norm of the first {len(lines)} steps is {max(norms):.1e} at most; "
        f"below {least:.1e} (1e-8 for each of {num_parameters:,} parameters) updates are too small "
        "to learn. Try a norm and a residual (--norm rms --residual), or fewer layers"
    )


def late_peak(warmup: int, step: int, done: float) -> str | None:
    """Returns a warning if the warm-up takes more than half of the updates of a run.

    Args:
        warmup: The number of updates of the warm-up.
        step: The number of updates so far.
        done: The share of the run that is over.
    """
    updates = step / done if done else math.inf
    if warmup <= 0.5 * updates:
        return None
    return (
        f"warning: at this speed the run has about {updates:,.0f} updates, and the learning rate "
        f"rises during the first {warmup:,}; it reaches its peak earlier with --warmup-steps "
        f"{max(1, round(updates / 10))}"
    )
