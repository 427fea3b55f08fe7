"""The processes that train a model, the signals that stop them, and errors that end them.

Several processes connect through JAX's distributed runtime. Each process has its own devices. All
run the same program on the same order of data. Only process 0 writes the log. Without `join` there
is one process, and no function here waits.
"""

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
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

_LONG = 7 * 24 * 3_600_000  # milliseconds; process 0 may read text for hours while others wait
SHUTDOWN = 10  # seconds that an ending process waits for the others, which may have failed
MOST_STEPS = 10  # between two exchanges of the time and the signals


def join(processes: Processes) -> None:
    """Connects to the other processes. Call it before JAX initializes its devices.

    If some processes do not connect in time, this process ends with one line and exit status 2.
    JAX itself would abort with a stack trace.

    Raises:
        ValueError: The coordinator is "auto" and JAX does not detect a cluster.
    """
    if processes.coordinator is None:
        return
    message = (
        f"not all processes connected within {processes.process_timeout} s (--process-timeout; "
        f"--coordinator {processes.coordinator}); start every process, each with a different "
        "--process-id"
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
    except ValueError as error:  # its message names an argument of JAX
        if not is_auto:
            raise
        raise ValueError(
            "coordinator is 'auto', but JAX detects no cluster (Slurm, Open MPI, Kubernetes or "
            f"a TPU pod); give the HOST:PORT of process 0 instead. JAX: {error}"
        ) from None
    missing.cancel()


def is_first() -> bool:
    """Returns whether this is process 0, which writes the files of the run."""
    return jax.process_index() == 0


def are_several() -> bool:
    """Returns whether several processes train together."""
    return jax.process_count() > 1


def wait_for_all(what: str) -> None:
    """Waits until every process has made this call.

    Args:
        what: The name of the call, which must be unique.
    """
    if are_several():
        from orbax.checkpoint import multihost  # here, because importing orbax takes long

        multihost.get_barrier_sync_fn()(key=f"jaxformer {what}", timeout_ms=_LONG)


def done_by_first(what: str, action: Callable[[], None]) -> None:
    """Runs an action in process 0 while the other processes wait.

    Args:
        what: The name of the action, which must be unique.
        action: The action.

    Raises:
        ValueError: In the other processes, if the action raises an exception in process 0.
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
        ValueError: In every process, if the settings of a process differ from those of process 0.
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
    """Ends this process with one line, after another process has failed.

    It does not wait for the other processes. JAX's runtime would wait and then abort with a stack
    trace.
    """
    say(f"jaxformer: {message}", sys.stderr)
    os._exit(status)


def gather(*values: float) -> list[list[float]]:
    """Returns the values of every process, in all processes: a list per process."""
    words = np.asarray(values, np.float64).view(np.int32)  # JAX would round float64 to float32
    gathered = np.asarray(multihost_utils.process_allgather(words, tiled=False))
    return gathered.reshape(-1, words.size).view(np.float64).tolist()


class Agreement:
    """The time and the signals of a run, the same in all processes.

    All processes must stop and change the learning rate at the same step. They exchange their
    signals and times every second or, if updates are fast, every `MOST_STEPS` steps, and use the
    time of process 0. One process alone uses its own clock and needs no exchange.
    """

    def __init__(self, clock: Clock, step: int = 0):
        """Starts at the time of the clock.

        Args:
            clock: The clock of this process.
            step: The number of steps that are made.
        """
        self._clock = clock
        self._agreed, self._step = clock.seconds, step  # at the last exchange
        self._next = step + 1  # the step of the next exchange

    @property
    def seconds(self) -> float:
        """Seconds of training; with several processes, those of process 0 at the last exchange."""
        return self._agreed if are_several() else self._clock.seconds

    def signal(self, step: int, own: Signals | None) -> Signals | None:
        """Returns the signal to stop after a step, if any process received one.

        Args:
            step: The number of steps that are made.
            own: The signal that this process received.
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
