"""The fingerprint of each incarnation (start) of a job, recorded in one file in a node's memory."""

from __future__ import annotations

from pathlib import Path

from reft.memory.jobdir import read_json, write_json

FINGERPRINT_FILE = "fingerprint.json"
# Number of incarnations whose records are kept; arenas hold versions of the last two or three.
_KEPT_INCARNATIONS = 16


def record_fingerprint(directory: Path, incarnation: int, encoded: str) -> None:
    """Record the fingerprint of ``incarnation``. The record also counts for later incarnations
    that have none of their own. Called by one process of each node.

    Raises:
        OSError: the file cannot be written.
    """
    records = {**_read_records(directory), incarnation: encoded}
    kept = sorted(records)[-_KEPT_INCARNATIONS:]
    write_json(directory / FINGERPRINT_FILE, {str(number): records[number] for number in kept})


def recorded_fingerprint(directory: Path, incarnation: int) -> str | None:
    """Return the encoded fingerprint of an incarnation's versions; None if none was recorded."""
    record = newest_record(directory, incarnation)
    return None if record is None else record[1]


def newest_record(directory: Path, incarnation: int) -> tuple[int, str] | None:
    """Return the record that counts for ``incarnation``: its own, or the newest older one.

    If the records of several nodes differ, the one with the highest number counts: a node that
    was absent lacks later records.
    """
    records = _read_records(directory).items()
    return max(((n, text) for n, text in records if n <= incarnation), default=None)


def _read_records(directory: Path) -> dict[int, str]:
    fields = read_json(directory / FINGERPRINT_FILE) or {}
    return {int(n): text for n, text in fields.items() if n.isdecimal() and isinstance(text, str)}
