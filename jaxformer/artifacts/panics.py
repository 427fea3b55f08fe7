"""Panics of the `tokenizers` library, which is written in Rust, as one-line errors."""

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

_lock = threading.Lock()
_silenced: dict[str, Any] = {"depth": 0}

Result = TypeVar("Result")


def guarded(
    call: Callable[[], Result], *, silent: bool = False, cause: str = "a pattern of the tokenizer"
) -> Result:
    """Runs `call` and turns the library's panics and bare exceptions into a one-line ValueError.

    Args:
      call: Function without arguments that uses the library.
      silent: Whether to hide the message that a panic prints on the terminal.
      cause: The part that the error names if the library reaches its limit of time for a text.
    """
    try:
        with panics_silenced() if silent else nullcontext():
            return call()
    except (KeyboardInterrupt, SystemExit, OSError, ValueError, TypeError, MemoryError):
        raise
    except BaseException as error:  # pyo3's PanicException is no Exception
        reason = " ".join(str(error).split())[:200]
        hint = f"; {cause} takes too long on this text" if "retry-limit" in reason else ""
        raise ValueError(f"the tokenizers library failed: {reason}{hint}") from None


@contextmanager
def panics_silenced() -> Iterator[None]:
    """Hides the messages that the library's panics print on the terminal.

    The library, written in Rust, prints a backtrace to file descriptor 2 before Python sees the
    exception. Inside this context a temporary file replaces that descriptor. At the end, the file's
    content up to the first panic is written to the terminal. Several threads may be inside.
    """
    with _lock:
        _silenced["depth"] += 1
        if _silenced["depth"] == 1:
            sys.stderr.flush()
            _silenced["stderr"] = os.dup(2)
            _silenced["file"] = tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
            os.dup2(_silenced["file"].fileno(), 2)
    try:
        yield
    finally:
        with _lock:
            _silenced["depth"] -= 1
            if _silenced["depth"] == 0:
                sys.stderr.flush()
                os.dup2(_silenced["stderr"], 2)
                os.close(_silenced["stderr"])
                with _silenced["file"] as file:
                    file.seek(0)
                    os.write(2, file.read().partition(b"\nthread '")[0])
