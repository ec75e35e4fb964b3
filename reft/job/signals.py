"""Handles a launcher's signals: stop signals, and SIGUSR1, which asks its node to leave the job."""

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

    Later signals do not interrupt the shutdown; a second Ctrl-C ends the trainers' grace period.

    Attributes:
        received: the first stop signal; None before it arrives.
        impatient: whether Ctrl-C was pressed again; the launcher then stops waiting for trainers.
        asked_to_leave: whether SIGUSR1 arrived. Reset by the code that acts on it.
        closing: whether the launcher is shutting down. Shutting down takes a bounded time, so stop
            signals no longer interrupt it.
    """

    def __init__(self) -> None:
        # Stop signals that the parent did not ignore. Read now, because TorchElastic replaces the
        # handlers with each new round.
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

        Processes inherit which signals are ignored, but not handlers. If TorchElastic handled an
        ignored signal while it starts trainers, the trainers would no longer ignore it.
        """
        ignored = {number.name for number in STOP_SIGNALS if number not in self._handled}
        return ",".join(name for name in names.split(",") if name.strip() not in ignored)

    def elapsed_secs(self) -> float:
        """Return the seconds since the stop signal; 0 if there was none."""
        return time.monotonic() - self._received_at if self.received is not None else 0.0

    def ignore(self) -> None:
        """Ignore all signals until this process exits, so that none changes the exit code.

        An exiting interpreter restores the default actions of handled signals, and the default
        action of a stop signal would kill the process.
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
