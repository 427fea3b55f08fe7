"""Training with several processes, signals that stop a run, and errors that end a run.

The processes connect through JAX's distributed runtime. Each process has its own devices. All
processes run the same program and iterate over the data in the same order. Only process 0 writes
the log. If `join` is not called, there is one process, which never waits for other processes.
"""

import errno
import json
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from signal import SIG_DFL, SIGINT, SIGTERM, Signals, default_int_handler, signal
from threading import Timer
from typing import NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxformer.artifacts.files import json_text
from jaxformer.terminal import say
from jaxformer.training.config import Processes
from jaxformer.training.speed import Clock

# The timeout is a week in milliseconds, because process 0 may read text for hours while the other
# processes wait.
_LONG = 7 * 24 * 3_600_000
# At its end, a process waits this number of seconds for the other processes, which may have failed.
SHUTDOWN = 10
# After at most this number of steps, the processes exchange training times and stop signals.
MOST_STEPS = 10


def join(processes: Processes) -> None:
    """Connects to the other processes. Call this function before JAX initializes its devices.

    If some processes do not connect in time, this process prints an error message of one line and
    ends with exit status 2. Without this check, JAX would abort with a stack trace.

    Raises:
        ValueError: The coordinator is "auto" and JAX does not detect a cluster.
    """
    if processes.coordinator is None:
        return
    message = (
        f"not all processes connected to {processes.coordinator} (--coordinator) within "
        f"{processes.process_timeout} s (--process-timeout); start every process, each with a "
        "different --process-id"
    )
    missing = Timer(processes.process_timeout, leave, [message, 2])
    missing.daemon = True
    missing.start()
    is_auto = processes.coordinator == "auto"
    try:
        jax.distributed.initialize(
            None if is_auto else processes.coordinator,
            processes.num_processes,
            processes.process_id,
            initialization_timeout=processes.process_timeout + 60,
            shutdown_timeout_seconds=SHUTDOWN,
        )
    except ValueError as error:
        if not is_auto:
            raise
        # JAX's message refers to an argument of `initialize`, a function that users do not call.
        raise ValueError(
            'coordinator is "auto", but JAX detects no cluster (Slurm, Open MPI, Kubernetes or '
            f"a TPU pod); set coordinator to the HOST:PORT of process 0. JAX's message: {error}"
        ) from None
    missing.cancel()


def is_first() -> bool:
    """Returns whether this process is process 0, which writes the run's files."""
    return jax.process_index() == 0


def are_several() -> bool:
    """Returns whether several processes train together."""
    return jax.process_count() > 1


def wait_for_all(what: str) -> None:
    """Waits until every process has called this function with the same name.

    Args:
        what: The name of the barrier. All barriers of a program must have different names.
    """
    if are_several():
        # Importing orbax is slow.
        from orbax.checkpoint import multihost

        multihost.get_barrier_sync_fn()(key=f"jaxformer {what}", timeout_ms=_LONG)


def done_by_first(what: str, action: Callable[[], None]) -> None:
    """Runs a function in process 0 while the other processes wait.

    Args:
        what: The name of the barrier. All barriers of a program must have different names.
        action: The function.

    Raises:
        ValueError: The function raised an exception in process 0. All other processes raise this
            error.
    """
    if not are_several():
        action()
        return
    from orbax.checkpoint import multihost

    client, key = multihost.get_jax_distributed_client(), f"jaxformer {what}"
    if not is_first():
        if error := client.blocking_key_value_get(key, _LONG):
            raise ValueError(f"process 0 failed: {error}")
        return
    try:
        action()
    except BaseException as error:
        client.key_value_set(key, str(error) or type(error).__name__)
        raise
    client.key_value_set(key, "")


def require_same(settings: dict[str, object]) -> None:
    """Checks that all processes have the same settings.

    Raises:
        ValueError: The settings of a process differ from the settings of process 0. All processes
            raise this error.
    """
    if not are_several():
        return
    from orbax.checkpoint import multihost

    client, key = multihost.get_jax_distributed_client(), "jaxformer settings"
    text = json_text({name: str(value) for name, value in settings.items()})
    client.key_value_set(f"{key} {jax.process_index()}", text)
    published = (
        json.loads(client.blocking_key_value_get(f"{key} {process}", _LONG))
        for process in range(jax.process_count())
    )
    first = next(published)
    for process, other in enumerate(published, 1):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"{name} is {other.get(name)} in process {process} and {first.get(name)} in "
                    "process 0; start all processes with the same options"
                )


def leave(message: str, status: int = 1) -> NoReturn:
    """Ends this process with a one-line message, after another process has failed.

    The process ends without waiting for the other processes. On a normal exit, JAX's runtime would
    wait for the other processes and then abort with a stack trace.
    """
    say(f"jaxformer: {message}", sys.stderr)
    os._exit(status)


def gather(*values: float) -> list[list[float]]:
    """Collects the values of every process, and returns the same list in all processes."""
    words = np.asarray(values, np.float64).view(np.int32)  # JAX would round float64 to float32.
    gathered = np.asarray(multihost_utils.process_allgather(words, tiled=False))
    return gathered.reshape(-1, words.size).view(np.float64).tolist()


class Agreement:
    """Training time and stop signals of a run, synchronised across processes.

    All processes must stop at the same step, and must change the learning rate at the same step.
    The processes therefore exchange their signals and times once per second, or every `MOST_STEPS`
    steps if updates are fast. All processes use the time of process 0. A single process uses its
    own clock.
    """

    def __init__(self, clock: Clock, step: int = 0):
        """Initializes the training time with the time of this process's clock.

        Args:
            clock: The clock that measures training time in this process.
            step: The number of completed steps.
        """
        self._clock = clock
        # Training time and step of the last exchange between the processes, and step of the next
        # exchange.
        self._agreed, self._step = clock.seconds, step
        self._next = step + 1

    @property
    def seconds(self) -> float:
        """Training time in seconds; with several processes, the time that they last exchanged."""
        return self._agreed if are_several() else self._clock.seconds

    def signal(self, step: int, own: Signals | None) -> Signals | None:
        """Returns a stop signal that any process has received, or None.

        Args:
            step: The number of completed steps.
            own: The signal that this process received, or None.
        """
        if not are_several():
            return own
        if step < self._next:
            return None
        gathered = gather(self._clock.seconds, float(own or 0))
        seconds = gathered[0][0]
        per_step = max(seconds - self._agreed, 1e-9) / (step - self._step)
        self._agreed, self._step = seconds, step
        self._next = step + max(1, min(MOST_STEPS, int(1 / per_step)))
        received = max(int(signal) for _, signal in gathered)
        return Signals(received) if received else None


_USUAL = {SIGINT: default_int_handler, SIGTERM: SIG_DFL}


class Ended(Exception):
    """Raised when a run ends before its last step.

    The error message gives the reason, and tells the user what to do next.
    """

    status = 1


class Interrupted(Ended):
    """Raised when a signal ended a run, after a checkpoint was saved."""

    def __init__(self, signal: Signals, message: str):
        """Sets the exit status to 128 plus the signal number."""
        super().__init__(message)
        self.status = 128 + signal


@contextmanager
def stop_signal() -> Generator[Callable[[], Signals | None]]:
    """Records the first signal instead of ending the process, while the context is open.

    A signal must not interrupt an update, because the update donates the buffers of the training
    state. A second signal has the usual effect and ends the process.

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
    """Returns whether a device ran out of memory, which XLA reports only in the error message."""
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "Out of memory" in text or ("RESOURCE_EXHAUSTED" in text and not disk_is_full(error))
    )


def disk_is_full(error: BaseException | None) -> bool:
    """Returns whether an error, or one of its causes, reports a full disk."""
    full = ("No space left", "Disk quota exceeded", "RESOURCE_EXHAUSTED: No space")
    return error is not None and (
        getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        or any(words in str(error) for words in full)
        or disk_is_full(error.__cause__ or error.__context__)
    )
