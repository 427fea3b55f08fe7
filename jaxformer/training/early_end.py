"""Early ends of a run: signals, a device without memory, and a full disk."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import SIG_DFL, SIGINT, SIGTERM, Signals, default_int_handler, signal

_USUAL = {SIGINT: default_int_handler, SIGTERM: SIG_DFL}


class Ended(Exception):
    """Raised when a run ends before its last step; the message gives the reason and a next step."""

    status = 1


class Interrupted(Ended):
    """Raised when a signal ended the run, after a checkpoint was saved."""

    def __init__(self, signal: Signals, message: str):
        """Sets the exit status to 128 plus the number of the signal."""
        super().__init__(message)
        self.status = 128 + signal


@contextmanager
def stop_signal() -> Iterator[Callable[[], Signals | None]]:
    """Records the first signal instead of ending the process, while the context is open.

    So no signal interrupts an update, whose buffers are donated. A second signal has its usual
    effect and ends the process.

    Yields:
        A function that returns the recorded signal, or None.
    """
    received: list[Signals] = []

    def remember(number: int, _: object) -> None:
        received.append(Signals(number))
        for which, handler in _USUAL.items():
            signal(which, handler)

    before = {which: signal(which, remember) for which in _USUAL}
    try:
        yield lambda: received[0] if received else None
    finally:
        for which, handler in before.items():
            signal(which, handler)


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether a device ran out of memory. XLA reports this only in the message's text."""
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "Out of memory" in text or ("RESOURCE_EXHAUSTED" in text and not disk_is_full(error))
    )


def disk_is_full(error: BaseException | None) -> bool:
    """Returns whether a full disk caused the error or an error in its chain of causes."""
    full = ("No space left", "Disk quota exceeded", "RESOURCE_EXHAUSTED: No space")
    return error is not None and (
        getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        or any(words in str(error) for words in full)
        or disk_is_full(error.__cause__ or error.__context__)
    )
