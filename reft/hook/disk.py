"""Checkpoints on disk, as the last rung of the ladder: which one is newest, and what reft adds to it."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reft.state.codec import decode, encode
from reft.topology import Coordinate

logger = logging.getLogger(__name__)

_TAG_STEP = re.compile(r"^global_step(\d+)$")


@dataclass(frozen=True)
class DiskCheckpoint:
    """A DeepSpeed checkpoint that ``latest`` names.

    Attributes:
        directory: what ``load_checkpoint`` takes as ``load_dir``.
        tag: its tag.
        step: optimizer steps it has seen; -1 if that cannot be told without loading it.
    """

    directory: Path
    tag: str
    step: int

    def __str__(self) -> str:
        return f"{self.directory / self.tag}"

    def encode(self) -> bytes:
        return encode([str(self.directory), self.tag, self.step])

    @classmethod
    def decode(cls, data: bytes) -> DiskCheckpoint:
        directory, tag, step = decode(data)
        return cls(Path(directory), tag, step)


def newest_on_disk(load_dir: Path | None, persist_dir: Path | None) -> DiskCheckpoint | None:
    """The newer of the user's checkpoint directory and reft's persist directory, or None."""
    from reft.store.persisted import latest_persisted

    found: list[DiskCheckpoint] = []
    if load_dir is not None and (candidate := _latest(load_dir)) is not None:
        found.append(candidate)
    if persist_dir is not None and (persisted := latest_persisted(persist_dir)) is not None:
        found.append(DiskCheckpoint(persist_dir, persisted.tag, persisted.label.step))
    return max(found, key=lambda c: c.step, default=None)


def _latest(directory: Path) -> DiskCheckpoint | None:
    try:
        tag = (directory / "latest").read_text().strip()
    except OSError:
        return None
    return DiskCheckpoint(directory, tag, _step_of(directory / tag, tag))


def _step_of(checkpoint: Path, tag: str) -> int:
    if match := _TAG_STEP.match(tag):
        return int(match.group(1))
    files = sorted(checkpoint.glob("reft_host-*.msgpack"))
    for file in files[:1]:
        state = _read_host_file(file)
        if state is not None:
            return int(state.get("engine", {}).get("global_steps", -1))
    return -1


def host_file(checkpoint: Path, coordinate: Coordinate) -> Path:
    """Where a rank's host state lies beside DeepSpeed's own files, which ignore it."""
    from reft.state.deepspeed_format import host_file_name

    return checkpoint / host_file_name(coordinate)


def read_host_state(checkpoint: Path, coordinate: Coordinate) -> dict[str, Any] | None:
    """Host state that reft saved beside a DeepSpeed checkpoint; None if there is none."""
    return _read_host_file(host_file(checkpoint, coordinate))


def _read_host_file(path: Path) -> dict[str, Any] | None:
    from reft.state.deepspeed_format import read_host_file

    try:
        return read_host_file(path)
    except FileNotFoundError:
        return None
