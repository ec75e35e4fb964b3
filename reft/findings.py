"""A finding of a check before or at the start of a job, with the change that it requires."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """Effect of a finding on the start of a job.

    - REFUSED: the job does not start.
    - WARNING: it starts, unless the block says ``"strict": true``.
    - NOTE: it starts.
    """

    REFUSED = "REFUSED"
    WARNING = "WARNING"
    NOTE = "NOTE"


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        severity: effect on the start.
        found: what was found, and its consequence.
        change: what to change; "" if nothing.
        line: line of the training script; 0 if the finding is not about the script.
    """

    severity: Severity
    found: str
    change: str = ""
    line: int = 0

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        return f"{where}{self.found}" + (f"; {self.change}" if self.change else "")
