"""How a run ends before its time: Ctrl-C, and the signal by which a scheduler takes its machine
back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import SIG_DFL, SIGINT, SIGTERM, Signals, default_int_handler, signal

_USUAL = {SIGINT: default_int_handler, SIGTERM: SIG_DFL}


class Ended(Exception):
    """The run ended before its last step; the message says why and how to go on."""

    status = 1


class Stopped(Exception):
    """There was a signal while something was scored."""


class Interrupted(Ended):
    """By Ctrl-C, or by a scheduler, after a checkpoint was saved."""

    def __init__(self, signal: Signals, message: str):
        super().__init__(message)
        self.status = 128 + signal


@contextmanager
def stop_signal() -> Iterator[Callable[[], Signals | None]]:
    """While open, the first signal is only remembered, and given by the function, so that no update
    is torn apart while its buffers are donated; a second one ends the process at once."""
    received: list[Signals] = []

    def remember(number, _):
        received.append(Signals(number))
        for which, handler in _USUAL.items():
            signal(which, handler)

    before = {which: signal(which, remember) for which in _USUAL}
    try:
        yield lambda: received[0] if received else None
    finally:
        for which, handler in before.items():
            signal(which, handler)
