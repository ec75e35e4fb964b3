"""When this process came to what lies between its start and its first step: the parts of a recovery that a
trainer knows. Light: it is imported before the script."""

from __future__ import annotations

import time

BEGAN, GROUPS, GROUPED, ENGINE, BUILT = "began", "groups", "grouped", "engine", "built"
SURVEY, AGREED = "survey", "agreed"
_times: dict[str, float] = {}


def mark(name: str) -> None:
    """Note the time; the first time counts."""
    _times.setdefault(name, time.time())


def times() -> dict[str, float]:
    """Unix seconds of this host, by name: the script begins, process groups are made and are there, the
    engine likewise, memory is looked at, and all ranks agree on what to restore. What did not happen is
    missing."""
    return dict(_times)
