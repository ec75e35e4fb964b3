"""A connection that says nothing: its end tells the other side that this process is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable

from reft.backoff import Backoff
from reft.control.wire import Channel
from reft.errors import AuthenticationError

_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.05, 1.0


class Presence:
    """Keeps a name at the rendezvous store for as long as this process lives. A connection that breaks is
    made again at once, by a thread of its own.

    Args:
        dial: connects to the store.
        name: to be known by.
    """

    def __init__(self, dial: Callable[[], Channel], name: str) -> None:
        self._dial = dial
        self._name = name
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._channel: Channel | None = None
        threading.Thread(target=self._stay, name="presence", daemon=True).start()

    def close(self) -> None:
        """Be gone."""
        with self._lock:
            self._ended.set()
            if self._channel is not None:
                self._channel.shutdown()

    def _stay(self) -> None:
        pauses = Backoff(_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS)
        pause = pauses.pause
        while not self._ended.wait(pause):
            try:
                channel = self._dial()
            except AuthenticationError:
                return  # who asks for something hears of it
            except OSError:
                pause = pauses.failed()
                continue
            try:
                self._hold(channel)
            except (OSError, EOFError, AuthenticationError):
                pauses.reset()
                pause = pauses.pause
            finally:
                channel.close()

    def _hold(self, channel: Channel) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._channel = channel
        channel.send(["hold", self._name])
        channel.receive()
        channel.settimeout(None)
        channel.receive()
