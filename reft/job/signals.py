"""The signals of a launcher: stop signals, and SIGUSR1, which requests that its node leaves."""

from __future__ import annotations

import signal
import time
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

from reft.job.script import STOP_SIGNALS, not_ignored

LEAVE_SIGNAL = signal.SIGUSR1
_IMPATIENT_SECS = 1.0  # A second Ctrl-C within this time may be the same key press


class StopSignals:
    """Turns the first stop signal into TorchElastic's exception.

    Later signals do not interrupt the shutdown, but a second Ctrl-C cuts the grace period short.

    Attributes:
        received: the stop signal; None before it arrives.
        impatient: whether Ctrl-C was pressed again, so that trainers are no longer waited for.
        asked_to_leave: whether SIGUSR1 arrived. Reset by the code that acts on it.
        closing: whether the launcher is shutting down, which takes bounded time and is not
            interrupted.
    """

    def __init__(self) -> None:
        # Read once at the start, because TorchElastic replaces the handlers with each new round.
        self._handled = not_ignored(STOP_SIGNALS)
        self.received: signal.Signals | None = None
        self.impatient = False
        self.asked_to_leave = False
        self.closing = False
        self._received_at = 0.0

    def install(self) -> None:
        """Set the handlers; signals that were ignored when this process started stay ignored."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle if number in self._handled else signal.SIG_IGN)
        signal.signal(LEAVE_SIGNAL, self._ask_to_leave)

    def handled_names(self, names: str) -> str:
        """Remove ignored signals from ``names``, a comma-separated list.

        If TorchElastic handled such a signal while it starts trainers, they would not inherit that
        the signal is ignored.
        """
        ignored = {number.name for number in STOP_SIGNALS if number not in self._handled}
        return ",".join(name for name in names.split(",") if name.strip() not in ignored)

    def elapsed_secs(self) -> float:
        """Seconds since the stop signal; 0 if there was none."""
        return time.monotonic() - self._received_at if self.received is not None else 0.0

    def ignore(self) -> None:
        """Ignore all signals from here on, so that none changes the exit code.

        While it exits, the interpreter restores the default actions, which would kill the process.
        """
        for number in (*STOP_SIGNALS, LEAVE_SIGNAL):
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is not None or self.closing:
            if number == signal.SIGINT and now - self._received_at > _IMPATIENT_SECS:
                self.impatient = True
            return
        self.received, self._received_at = signal.Signals(number), now
        raise SignalException(f"stopped by {self.received.name}", sigval=self.received)

    def _ask_to_leave(self, number: int, frame: FrameType | None) -> None:
        self.asked_to_leave = True
