"""What the processes of a run agree on: the seconds of training and the signal to stop."""

from signal import Signals

from jaxformer.training.processes import are_several, gather
from jaxformer.training.speed import Clock


class Agreement:
    """The time and the signals of a run, the same in all processes.

    All processes must stop and change the learning rate at the same step. They exchange their
    signals and times every few steps, and use the time of process 0. One process alone uses its own
    clock and needs no exchange.
    """

    def __init__(self, clock: Clock, every: int):
        """Starts at the time of the clock.

        Args:
            clock: The clock of this process.
            every: Steps between two exchanges.
        """
        self._clock, self._every = clock, every
        self._agreed = clock.seconds

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
        if step % self._every:
            return None
        gathered = gather(self._clock.seconds, float(own or 0))
        self._agreed = gathered[0][0]
        received = max(int(signal) for _, signal in gathered)
        return Signals(received) if received else None
