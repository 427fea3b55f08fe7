"""What the processes of a run agree on: the seconds of training and the signal to stop."""

from signal import Signals

from jaxformer.training.processes import are_several, gather
from jaxformer.training.speed import Clock

MOST_STEPS = 10  # between two exchanges


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
