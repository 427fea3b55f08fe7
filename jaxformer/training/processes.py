"""Several processes that train one model, each with devices of its own, through JAX's own runtime.

All run the same program on the same order of data; the first alone writes what a person reads.
Without `join` there is one process, and nothing here waits.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from threading import Timer
from typing import NoReturn

_LONG = 7 * 24 * 3_600_000  # milliseconds; reading much text takes its time
SHUTDOWN = 10  # seconds that a process which ends waits for the others, which may have failed


@dataclass(frozen=True)
class Processes:
    """Who trains this model; without a coordinator, this process alone."""

    coordinator: str | None = None
    """HOST:PORT of the first of several processes that train together, or "auto" where Slurm,
    Open MPI, Kubernetes or a TPU pod say so; None: this process alone"""
    num_processes: int | None = None
    """how many processes there are; None: as the cluster says"""
    process_id: int | None = None
    """which of them this is, from 0; None: as the cluster says"""
    process_timeout: int = 300
    """seconds until a process that does not come is missed"""

    def __post_init__(self):
        if self.process_timeout < 1:
            raise ValueError(f"process_timeout is {self.process_timeout}; it must be at least 1")
        given = (self.num_processes, self.process_id)
        if self.coordinator in (None, "auto"):
            if given != (None, None):
                raise ValueError(
                    f"num_processes and process_id are {given}, but coordinator is "
                    f"{self.coordinator!r}; they go with the HOST:PORT of the first process"
                )
            return
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"coordinator is {self.coordinator!r}; it must be HOST:PORT or auto")
        if None in given:
            raise ValueError(
                f"num_processes and process_id are {given}; with a coordinator both must be given"
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"process_id is {self.process_id}; it must be in 0 … {self.num_processes - 1}"
            )


def join(processes: Processes) -> None:
    """Meet the other processes, before JAX is asked for its devices.

    The process ends with one line, and exit status 2, if they do not all come in time: JAX's own
    way is to abort with a trace of its stack.
    """
    if processes.coordinator is None:
        return
    import jax  # here, since the command line is quick to say what it accepts

    missing = Timer(processes.process_timeout, _give_up, [processes])
    missing.daemon = True
    missing.start()
    later = processes.process_timeout + 60
    if processes.coordinator == "auto":
        try:
            how = {"initialization_timeout": later, "shutdown_timeout_seconds": SHUTDOWN}
            jax.distributed.initialize(**how)
        except ValueError as error:  # what it asks for is JAX's own argument
            raise ValueError(
                "coordinator is 'auto', but nothing here says who takes part (Slurm, Open MPI, "
                f"Kubernetes and TPU pods do): {error}"
            ) from None
    else:
        jax.distributed.initialize(
            processes.coordinator,
            processes.num_processes,
            processes.process_id,
            initialization_timeout=later,
            shutdown_timeout_seconds=SHUTDOWN,
        )
    missing.cancel()


def _give_up(processes: Processes) -> None:
    leave(
        f"not all processes came within {processes.process_timeout} s (--process-timeout; "
        f"--coordinator {processes.coordinator}); each must be started, and no two with the same "
        "--process-id",
        status=2,
    )


def is_first() -> bool:
    """Whether this process writes what is written once."""
    import jax

    return jax.process_index() == 0


def are_several() -> bool:
    import jax

    return jax.process_count() > 1


def wait_for_all(what: str) -> None:
    """Until every process has come to this place, which has a name of its own."""
    if are_several():
        from orbax.checkpoint import multihost

        multihost.get_barrier_sync_fn()(key=f"jaxformer {what}", timeout_ms=_LONG)


def done_by_first(what: str, action: Callable[[], None]) -> None:
    """Done by the first process, while the others wait; what it refuses they refuse too."""
    if not are_several():
        return action()
    from orbax.checkpoint import multihost

    told, key = multihost.get_jax_distributed_client(), f"jaxformer {what}"
    if not is_first():
        if error := told.blocking_key_value_get(key, _LONG):
            raise ValueError(f"the first process failed: {error}")
        return None
    try:
        action()
    except BaseException as error:
        told.key_value_set(key, str(error) or type(error).__name__)
        raise
    told.key_value_set(key, "")
    return None


def require_same(settings: dict[str, object]) -> None:
    """ValueError, in every process, unless all have the same settings as the first."""
    if not are_several():
        return
    import jax
    from orbax.checkpoint import multihost

    told, names = multihost.get_jax_distributed_client(), sorted(settings)
    said = json.dumps([[name, str(settings[name])] for name in names])
    told.key_value_set(f"jaxformer settings {jax.process_index()}", said)
    for process in range(1, jax.process_count()):
        first, other = (
            dict(json.loads(told.blocking_key_value_get(f"jaxformer settings {number}", _LONG)))
            for number in (0, process)
        )
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"{name} is {other.get(name)} in process {process} and {first.get(name)} in "
                    "the first; all must be started alike"
                )


def leave(message: str, status: int = 1) -> NoReturn:
    """End this process with one line, without waiting for others, of which one has failed: JAX's
    runtime would, and then abort with a trace of its stack."""
    print(f"jaxformer: {message}", file=sys.stderr, flush=True)
    os._exit(status)


def gather(*values: float) -> list[list[float]]:
    """What each process gave, on all of them."""
    import numpy as np
    from jax.experimental import multihost_utils

    words = np.asarray(values, np.float64).view(np.int32)  # JAX would round to 32 bits
    found = np.asarray(multihost_utils.process_allgather(words, tiled=False))
    return found.reshape(-1, words.size).view(np.float64).tolist()
