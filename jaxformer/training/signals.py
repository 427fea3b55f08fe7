"""Ctrl-C, and the signal by which a scheduler takes its machine back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import SIG_DFL, SIGINT, SIGTERM, Signals, default_int_handler, signal

_USUAL = {SIGINT: default_int_handler, SIGTERM: SIG_DFL}


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
