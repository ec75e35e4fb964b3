"""A process that is slower than it could be."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PERIOD_SECS = 0.06


@contextmanager
def slowed(pid: int, factor: float) -> Iterator[None]:
    """The process runs for 1 / ``factor`` of the time, as under a quota of the processor, until it has ended."""
    ended = threading.Event()

    def hold() -> None:
        with suppress(ProcessLookupError):
            while not ended.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(_PERIOD_SECS * (1 - 1 / factor))
                os.kill(pid, signal.SIGCONT)
                time.sleep(_PERIOD_SECS / factor)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
