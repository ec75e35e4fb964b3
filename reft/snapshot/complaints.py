"""What failed on the snapshot worker: said once per cause (P6)."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable

from reft.errors import ReftError

logger = logging.getLogger(__name__)

_REMEMBERED = 256


class Complaints:
    """Of one worker."""

    def __init__(self) -> None:
        self._told = deque[str](maxlen=_REMEMBERED)

    def tell(self, what: str, error: Exception) -> None:
        """Say what failed, once per cause, and with where it came from if nobody foresaw it."""
        cause = f"{what}: {type(error).__name__}: {error}"
        known = re.sub(r"\d+", "0", cause)  # the same cause names another step every time
        if known not in self._told:
            self._told.append(known)
            logger.warning("%s", cause, exc_info=None if isinstance(error, ReftError | OSError) else error)

    def attempt(self, what: str, act: Callable[[], object]) -> None:
        """Do what the protocol of the versions does not depend on."""
        try:
            act()
        except Exception as error:
            self.tell(what, error)
