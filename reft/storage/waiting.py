"""Waiting for what other nodes put into the working directory of a checkpoint."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reft.backoff import Backoff
from reft.errors import OvertakenError, PersistError
from reft.grid import Coordinate
from reft.storage.assembler import Assembler
from reft.storage.persisted import PersistedInfo, missing_files, read_marker, tag_of
from reft.storage.staging import LEADER, WorkDir, read_record

_POLL_SECS = (0.02, 0.5)


@dataclass(frozen=True)
class PersistProgress:
    """How far a node is.

    Attributes:
        phase: ``staging``, ``staged``, ``assembled``, ``renaming``, ``renamed``, ``latest``.
        nbytes: bytes of images written so far.
        total_bytes: bytes of images this node writes.
    """

    phase: str
    nbytes: int = 0
    total_bytes: int = 0

    def __str__(self) -> str:
        if self.phase != "staging":
            return self.phase
        return f"staging: {self.nbytes / 2**20:.1f} of {self.total_bytes / 2**20:.1f} MiB"


@dataclass(frozen=True)
class PersistOptions:
    """How to write.

    Attributes:
        directory: persist directory that all nodes see.
        keep: newest checkpoints of the job to keep.
        timeout_secs: give up when nothing of a peer has appeared for so long.
        stop: set to give up.
        progress: told what happens.
        assembler: makes the files; None starts a process for this version only.
    """

    directory: Path
    keep: int = 2
    timeout_secs: float = 600.0
    stop: threading.Event = field(default_factory=threading.Event)
    progress: Callable[[PersistProgress], None] = lambda progress: None
    assembler: Assembler | None = None


def published(work: WorkDir) -> PersistedInfo | None:
    """The finished checkpoint of exactly this version, if it is there."""
    info = read_marker(work.root.parent / tag_of(work.label))
    if info is None or (info.job_id, info.label) != (work.job_id, work.label) or missing_files(info):
        return None
    return info


class GivenUpElsewhereError(PersistError):
    """Another node failed; this one could have gone on."""


class OvertakenElsewhereError(GivenUpElsewhereError, OvertakenError):
    """The memory of another node went on, or others write a newer version: this one is never whole."""


def failure_record(node: str, error: BaseException) -> dict[str, Any]:
    """What a node that gives up leaves for the others."""
    overtaken = isinstance(error, OvertakenError)
    return {"node": node, "error": f"{type(error).__name__}: {error}", "overtaken": overtaken}


class Wait:
    """Waits for what other nodes put into the working directory.

    Raises (all methods):
        PersistError: if nothing has appeared for ``timeout_secs``, another node gave up, a newer
            version is being written, or it was told to stop.
    """

    def __init__(self, work: WorkDir, secret: bytes, options: PersistOptions) -> None:
        self._work = work
        self._secret = secret
        self._options = options

    def for_parts(self, coordinates: Sequence[Coordinate]) -> None:
        """Wait for the image files of ``coordinates``."""
        self._until(self._work.part, coordinates, "part")

    def for_files(self, coordinates: Sequence[Coordinate]) -> list[dict[str, dict[str, list[int]]]]:
        """Wait for the checkpoint files of ``coordinates``; returns their records."""
        self._until(self._work.done, coordinates, "checkpoint files")
        found = [read_record(self._work.done(c), self._secret) for c in coordinates]
        return [content for content in found if content is not None]

    def for_name(self) -> PersistedInfo:
        """Wait until the leader has named the checkpoint."""
        found: list[PersistedInfo] = []

        def missing() -> list[str]:
            present = published(self._work)
            found.extend([present] if present is not None else [])
            return [] if found else [f"the node of {LEADER} to name the checkpoint"]

        self._poll(missing, naming=True)
        return found[-1]

    def _until(
        self, path: Callable[[Coordinate], Path], coordinates: Sequence[Coordinate], what: str
    ) -> None:
        missing = list(coordinates)

        def look() -> list[str]:
            missing[:] = [c for c in missing if not path(c).exists()]
            return [f"the {what} of {c}" for c in missing]

        self._poll(look)

    def _poll(self, look: Callable[[], list[str]], naming: bool = False) -> None:
        poll = Backoff(*_POLL_SECS)
        seen = -1
        deadline = 0.0
        while missing := look():
            if len(missing) != seen:
                seen, deadline = len(missing), time.monotonic() + self._options.timeout_secs
            self._check_others(naming)
            if time.monotonic() > deadline:
                raise PersistError(
                    f"{self._work.label}: waited {self._options.timeout_secs:g} s for "
                    f"{', '.join(missing[:4])}{' ...' if missing[4:] else ''}; check that the daemons of all "
                    f"nodes run and see {self._work.root.parent}, or raise persist.timeout_secs"
                )
            if self._options.stop.wait(poll.failed()):
                raise PersistError(f"{self._work.label}: writing was stopped")

    def _check_others(self, naming: bool) -> None:
        # While the leader names the checkpoint, .staging goes first and the directory itself last.
        present = self._work.root if naming else self._work.staging
        if not present.is_dir() and published(self._work) is None:
            raise GivenUpElsewhereError(f"{self._work.label}: given up by the node of {LEADER}")
        for path in self._work.staging.glob("failed-*.json"):
            content = read_record(path, self._secret)
            if content is not None:
                kind = OvertakenElsewhereError if content.get("overtaken") else GivenUpElsewhereError
                raise kind(f"{self._work.label}: node {content['node']} gave up: {content['error']}")
        for _, label in self._work.others():
            if label > self._work.label:
                raise OvertakenElsewhereError(f"{self._work.label}: overtaken by {label}, which others write")
