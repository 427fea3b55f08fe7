"""Runs measurements in processes of their own, and reports the memory of a process."""

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
    """Returns measure(*arguments), computed in a new process with these environment variables."""
    before = dict(os.environ)
    os.environ.update(environment or {})
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(measure, *arguments).result()
    finally:
        os.environ.clear()
        os.environ.update(before)


def peak_memory() -> int:
    """Returns the largest memory of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux `getrusage` counts the peak of the parent process too
        return int(re.findall(r"VmHWM:\s*(\d+) kB", status.read_text())[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
