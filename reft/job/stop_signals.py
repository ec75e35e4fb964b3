"""What signals tell a launcher: to stop, or that its node is to leave the job."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException

from reft.job.exits import STOP_SIGNALS

LEAVE_SIGNAL = signal.SIGUSR1
_IMPATIENT_SECS = 1.0


class StopSignals:
    """Turns the first signal to stop into TorchElastic's exception; later ones do not disturb the end.

    A second Ctrl-C by a person cuts the grace short.

    Attributes:
        agent: :class:`reft.job.agent.ReftAgent`, which ends the trainers.
        received: the signal to stop; None: there was none.
        asked_to_leave: SIGUSR1 asks for this node to leave the job; whoever has seen to it resets it.
    """

    def __init__(self) -> None:
        self.agent: Any = None
        self.received: signal.Signals | None = None
        self.asked_to_leave = False
        self._at = 0.0
        self._quiet = False

    def install(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        signal.signal(LEAVE_SIGNAL, self._ask_to_leave)

    def elapsed_secs(self) -> float:
        """Time since the signal; 0 if there was none."""
        return time.monotonic() - self._at if self.received is not None else 0.0

    def quieten(self) -> None:
        """From here on the launcher tidies up, which is bounded, and is not interrupted."""
        self._quiet = True

    def ignore(self) -> None:
        """The exit code stands: the interpreter would restore the default actions while it ends."""
        for number in (*STOP_SIGNALS, LEAVE_SIGNAL):
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is not None or self._quiet:
            if number == signal.SIGINT and now - self._at > _IMPATIENT_SECS and self.agent is not None:
                self.agent.wait_no_more()
            return
        self.received, self._at = signal.Signals(number), now
        if self.agent is not None:
            self.agent.told_to_stop = True
        raise SignalException(f"told to stop by {self.received.name}", sigval=self.received)

    def _ask_to_leave(self, number: int, frame: FrameType | None) -> None:
        self.asked_to_leave = True
