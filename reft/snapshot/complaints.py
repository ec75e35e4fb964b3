"""What failed on the snapshot worker: said once per cause, here and, at the next vote, by every peer (P6)."""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping

from reft.errors import ReftError

logger = logging.getLogger(__name__)

_REMEMBERED = 256
_PASSED_ON = 8  # most causes that peers are told of in one vote, the newest
_CHARACTERS = 300  # most of a cause that peers are told
_NAMED = 8  # Ranks whose complaints are written out; the others are counted


class Complaints:
    """Of one worker. Any thread may complain."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told = deque[str](maxlen=_REMEMBERED)
        self._unheard = deque[str](maxlen=_PASSED_ON)

    def tell(self, what: str, error: Exception) -> None:
        """Say what failed, once per cause, and with where it came from if nobody foresaw it."""
        cause = f"{what}: {type(error).__name__}: {error}"
        known = re.sub(r"\d+", "0", cause)  # the same cause names another step every time
        with self._lock:
            new = known not in self._told
            if new:
                self._told.append(known)
                self._unheard.append(cause[:_CHARACTERS])
        if new:
            logger.warning("%s", cause, exc_info=None if isinstance(error, ReftError | OSError) else error)

    def attempt(self, what: str, act: Callable[[], object]) -> None:
        """Do what the protocol of the versions does not depend on."""
        try:
            act()
        except Exception as error:
            self.tell(what, error)

    def unheard(self) -> list[str]:
        """What no peer has heard of, oldest first."""
        with self._lock:
            return [*self._unheard]

    def heard(self, causes: Collection[str]) -> None:
        """The peers know these."""
        with self._lock:
            self._unheard = deque((c for c in self._unheard if c not in causes), _PASSED_ON)


def say(complaints: Mapping[int, Collection[str]]) -> None:
    """Log what peers complain of, by rank."""
    for rank in sorted(complaints)[:_NAMED]:
        for cause in complaints[rank]:
            logger.warning("rank %d reports: %s. See its log", rank, cause)
    if len(complaints) > _NAMED:
        logger.warning("%d more ranks report problems; see their logs", len(complaints) - _NAMED)
