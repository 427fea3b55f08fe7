"""Runs measurements in separate processes, and measures the peak memory of a process."""

import os
import re
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def alone(
    measure: Callable[..., T], *arguments: object, environment: dict[str, str] | None = None
) -> T:
    """Calls measure(*arguments) in a new process with the given environment variables."""
    before = dict(os.environ)
    os.environ.update(environment or {})
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(measure, *arguments).result()
    finally:
        os.environ.clear()
        os.environ.update(before)


def peak_memory() -> int:
    """Returns the peak memory of this process so far, in bytes."""
    status = Path("/proc/self/status")
    # On Linux, the peak that `getrusage` reports includes the peak of the parent process.
    if status.exists():
        return int(re.findall(r"VmHWM:\s*(\d+) kB", status.read_text())[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
