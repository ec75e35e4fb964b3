"""A finding: something that a job is told before or at its start, and what to change."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How a finding affects the start of a job.

    REFUSED: the job does not start. WARNING: it starts, unless the block says ``"strict": true``.
    NOTE: it starts.
    """

    REFUSED = "REFUSED"
    WARNING = "WARNING"
    NOTE = "NOTE"


@dataclass(frozen=True)
class Finding:
    """One line of the list.

    Attributes:
        severity: how it affects the start.
        found: what was found, and what that means.
        change: what to write.
        line: of the training script; 0 if it is about something else.
    """

    severity: Severity
    found: str
    change: str = ""
    line: int = 0

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        return f"{where}{self.found}" + (f"; {self.change}" if self.change else "")
