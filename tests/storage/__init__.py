"""Checkpoints on storage, as tests look at them."""

from __future__ import annotations

from pathlib import Path

from reft.storage.persisted import PersistedInfo, check_files, list_persisted, read_marker


def latest_persisted(directory: Path, job_id: str | None = None) -> PersistedInfo | None:
    """The newest complete checkpoint in a job's directory."""
    found = list_persisted(directory, job_id)
    return found[-1] if found else None


def verify_persisted(directory: Path, tag: str | None = None) -> list[str]:
    """What is wrong with a checkpoint, the newest one without a tag; empty if all is well."""
    info = latest_persisted(directory) if tag is None else read_marker(directory / tag)
    assert info is not None
    return check_files(info.path, info.files)
