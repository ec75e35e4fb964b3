"""Defines a finding: a result of the checks made before a job and at its start."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """Effect of a finding on the start of a job.

    - REFUSED: the job does not start.
    - WARNING: the job starts, unless the ``reft`` block says ``"strict": true``.
    - NOTE: the job starts.
    """

    REFUSED = "REFUSED"
    WARNING = "WARNING"
    NOTE = "NOTE"


@dataclass(frozen=True)
class Finding:
    """What a check has found, and what the user should change.

    Attributes:
        severity: effect on the start of the job.
        found: what was found, and its consequence.
        change: what the user should change; empty if nothing.
        line: line of the training script; 0 if the finding is not about the script.
    """

    severity: Severity
    found: str
    change: str = ""
    line: int = 0

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        return f"{where}{self.found}" + (f"; {self.change}" if self.change else "")
