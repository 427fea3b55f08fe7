"""What a person who watches sees: lines of text, and progress bars below them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.segment import Segment


class Screen:
    """Shows text as it is, since samples, paths and names are the user's own.

    rich would read `[…]` as markup and `:…:` as an emoji, break long lines, expand tabs and drop
    control characters.
    """

    def __init__(self, **options):
        """options: those of rich's Console (stderr, file, …)."""
        self._console = Console(soft_wrap=True, **options)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[said]}", markup=False),
        )
        self._bars = Progress(*columns, console=self._console, transient=True)

    def say(self, text: str) -> None:
        """A line of text, or several, unchanged."""
        self._console.print(_Verbatim(text))

    @contextmanager
    def bar(self, total: int) -> Iterator[Callable[[int, str, str], None]]:
        """A progress bar while open, on a terminal; a second one stands below the first.

        Gives ``show(completed, name, said)``: how much is done, and the text on its left and right.
        """
        if not self._console.is_interactive:
            yield lambda completed, name, said: None
            return
        task = self._bars.add_task("", total=total, said="")
        self._bars.start()
        try:
            yield lambda completed, name, said: self._bars.update(
                task, completed=completed, description=name, said=said
            )
        finally:
            self._bars.remove_task(task)
            if not self._bars.tasks:
                self._bars.stop()

    @contextmanager
    def count(self, total: int, name: str, unit: str) -> Iterator[Callable[[int], None]]:
        """A bar with the time that is left; gives a function of how many of a unit are done."""
        begin = time.perf_counter()
        with self.bar(total) as show:

            def advance(done: int) -> None:
                left = (time.perf_counter() - begin) * (total - done) / max(done, 1)
                said = f"{done:,} of {total:,} {unit}"
                show(done, name, said + f" · {left / 60:.1f} min left" * (done > 0))

            yield advance


class _Verbatim:
    """Text that reaches the file character by character."""

    def __init__(self, text: str):
        self._text = text

    def __rich_console__(self, console, options):
        yield Segment(f"{self._text}\n")
