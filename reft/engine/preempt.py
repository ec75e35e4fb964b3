"""SIGTERM and Ctrl-C: finish the step, commit, persist, exit."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

_REPEAT_SECS = 2.0


class Preemption:
    """Notes the wish to stop. The next votes carry it to all ranks, so that all stop after the same
    step. Batch systems signal every process of a job and the launcher passes its own on, so repeats
    within two seconds mean the same; a later one acts at once, as if reft were not there."""

    def __init__(self) -> None:
        self.requested = False
        self._signal = signal.SIGTERM
        self._since_secs = 0.0
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as a shell reports it."""
        return 128 + int(self._signal)

    @property
    def waited_secs(self) -> float:
        """Time since the wish; 0 if there was none."""
        return time.monotonic() - self._since_secs if self.requested else 0.0

    def install(self) -> str | None:
        """Take over SIGTERM and SIGINT; only the main thread can. Returns what to say where it cannot."""
        if threading.current_thread() is not threading.main_thread():
            return (
                "reft was attached outside the main thread: SIGTERM will not flush a snapshot. Call "
                "deepspeed.initialize in the main thread"
            )
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        return None

    def uninstall(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, previous in self._previous.items():
                signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if time.monotonic() - self._since_secs < _REPEAT_SECS:
                return
            self.uninstall()
            signal.raise_signal(number)
            return
        self._since_secs = time.monotonic()
        self.requested = True
        self._signal = signal.Signals(number)
