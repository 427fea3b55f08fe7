"""A lock on a file, which the system takes back when the process ends, by a kill too."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold the lock on a file of its own while open; the file stays, and means nothing.

    False if there are no locks here: not on this system, or not on this file system (a cluster's
    may have none). BlockingIOError if another process holds it.
    """
    with path.open("a") as file:
        yield _lock(file)


def _lock(file) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True
