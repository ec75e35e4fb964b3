"""Fingerprints of the versions in a job's memory: ``fingerprint.json`` in the job's directory.

By incarnation: a version is the work of the newest recorded incarnation that is not newer than it, so that
versions of an older one, with other settings, are still told apart.
"""

from __future__ import annotations

from pathlib import Path

from reft.memory.jobdir import read_json, write_json
from reft.state.fingerprint import Fingerprint

FINGERPRINT_FILE = "fingerprint.json"
_KEPT = 16
"""Incarnations. Arenas hold versions of the last two or three; the others do no harm."""


def record_fingerprint(directory: Path, incarnation: int, fingerprint: Fingerprint) -> None:
    """Note that ``incarnation`` and those after it work with this fingerprint. One process per node does it.

    Raises:
        OSError: it cannot be written.
    """
    known = {**_known(directory), incarnation: fingerprint.encode().decode()}
    kept = sorted(known)[-_KEPT:]
    write_json(directory / FINGERPRINT_FILE, {str(number): known[number] for number in kept})


def recorded_fingerprint(directory: Path, incarnation: int) -> str | None:
    """The encoded fingerprint of a version of ``incarnation``; None if none was recorded."""
    record = newest_record(directory, incarnation)
    return None if record is None else record[1]


def newest_record(directory: Path, incarnation: int) -> tuple[int, str] | None:
    """:func:`recorded_fingerprint` with the incarnation that recorded it: among nodes the highest counts, as
    one that was away does not know of the later ones."""
    return max(((n, text) for n, text in _known(directory).items() if n <= incarnation), default=None)


def _known(directory: Path) -> dict[int, str]:
    found = read_json(directory / FINGERPRINT_FILE) or {}
    return {int(n): text for n, text in found.items() if n.isdecimal() and isinstance(text, str)}
