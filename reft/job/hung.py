"""What the launcher does with trainers that stand still: asks the other nodes, names the culprit, has the
stacks written. The agent ends them, as trainers that failed."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from reft.errors import ReftError
from reft.job.exits import EX_PEER_FAILED, Cause, Failure
from reft.node.hangs import (
    LEAST_OTHER_SECS,
    STOPPED,
    WAITING,
    Verdict,
    Waiting,
    name_culprit,
    step_limit_secs,
)
from reft.node.progress import STACKS_SUFFIX

logger = logging.getLogger(__name__)

_ASK_SECS = 0.5
_COURTESY_SECS = 2.0  # the culprit's node ends its trainers first: it has their stacks written
_SILENT_SECS = 2.0  # a node that was struck out and lives takes its place again with its next heartbeat
_STACKS_SECS = 3.0
_MOST_STACK_CHARS = 16_000


class Hangs:
    """Of one node's trainers, in one round at a time."""

    def __init__(self, node: str, job_dir: Path) -> None:
        self._node = node
        self._job_dir = job_dir
        self._waiting: list[Waiting] = []
        self.clear()

    def take(self, answer: Any) -> None:
        """What the daemon says its trainers are at; called by another thread."""
        with suppress(ValueError):
            self._waiting = [replace(w, node=self._node) for w in WAITING.validate_python(answer)]

    def clear(self) -> None:
        """Another round: nobody is suspected."""
        self._waiting = []
        self._told: bytes | None = None
        self._cannot_ask = False
        self._asked_at = 0.0
        self._open_since: float | None = None
        self._named_at: float | None = None
        self._silent_since: float | None = None

    def judge(
        self, table: Any, index: int, size: int, pids: Collection[int], *, silent: bool = False
    ) -> Failure | None:
        """Why the trainers have to be restarted; None: go on. Looks at the table of the round in the store
        only while one of them is quiet. ``silent``: a node of this round was struck out for its silence, and
        the others may go on without it."""
        mine = [w for w in self._waiting if w.seen.pid in pids]
        now = time.monotonic()
        self._silent_since = (self._silent_since or now) if silent else None
        # It waits for another node: it is quiet, and not at what may take its time alone.
        waits = any(w.suspected or (w.quiet and w.communicates) for w in mine)
        if self._silent_since is not None and now - self._silent_since > _SILENT_SECS and waits:
            reason = "a node was struck out for its silence, and its peers wait for it; they go on without"
            logger.error("the job hangs: %s (%s)", reason, "; ".join(map(str, mine)))
            return Failure(Cause.PEER, mine[0].seen.local_rank, EX_PEER_FAILED, reason)
        quiet = any(w.quiet for w in mine)
        if (not quiet and self._told is None) or now - self._asked_at < _ASK_SECS:
            return None
        self._asked_at = now
        reports = self._exchange(table, index, size, mine if quiet else [])
        known = [w for report in reports.values() for w in report]
        # A node that has told, and tells of nobody now, goes on.
        verdict = name_culprit(known) if all(reports.values()) else None
        if verdict is None:
            self._open_since = self._named_at = None
            return None
        self._open_since = self._open_since or now
        # The trainers of nodes that have not told go on, as far as these know.
        patience = max(max(w.seen.patience * LEAST_OTHER_SECS, step_limit_secs(w.seen)) for w in known)
        if len(reports) < size and now - self._open_since < patience:
            return None
        self._named_at = self._named_at or now
        own = [w for w in mine if w.seen.rank in verdict.ranks]
        if verdict.ranks and not own and now - self._named_at < _COURTESY_SECS:
            return None
        return self._failure(verdict, own, mine)

    def _exchange(self, table: Any, index: int, size: int, mine: list[Waiting]) -> dict[int, list[Waiting]]:
        """Tell what this node's trainers are at, and hear of the others'; by number of the node."""
        reports = {index: mine}
        try:
            told = WAITING.dump_json(mine) if mine else None
            if told != self._told:
                table.set(f"hang/{index}", told or b"[]")
                self._told = told
            for other in range(size):
                if other != index and table.check([f"hang/{other}"]):
                    reports[other] = WAITING.validate_json(table.get(f"hang/{other}"))
        except (ReftError, RuntimeError, OSError, ValueError) as error:
            if not self._cannot_ask:
                logger.warning("other nodes cannot be asked what their trainers wait for: %s", error)
            self._cannot_ask = True
        return reports

    def _failure(self, verdict: Verdict, own: Sequence[Waiting], mine: Sequence[Waiting]) -> Failure:
        logger.error("the job hangs: %s", verdict.reason)
        for waiting in own or mine:
            logger.error("%s\n%s", waiting, stacks(self._job_dir, waiting))
        culprit = (own or mine)[0].seen
        if own:
            return Failure(Cause.OWN, culprit.local_rank, 1, verdict.reason)
        return Failure(Cause.PEER, culprit.local_rank, EX_PEER_FAILED, verdict.reason)


def stacks(job_dir: Path, waiting: Waiting) -> str:
    """Where a trainer's threads are, by itself if it runs; and what the kernel tells."""
    seen = waiting.seen
    told = [_of_kernel(seen.pid)]
    if seen.state == STOPPED:
        told.append("a stopped process cannot write its stacks")
    elif seen.stack_signal:
        told.append(_of_trainer(job_dir / f"{seen.local_rank}{STACKS_SUFFIX}", seen.pid, seen.stack_signal))
    return "\n".join(filter(None, told))


def _of_trainer(path: Path, pid: int, number: int) -> str:
    """Signal it, and wait until it has written."""
    size = path.stat().st_size if path.exists() else 0
    before, deadline = size, time.monotonic() + _STACKS_SECS
    with suppress(OSError):
        os.kill(pid, number)
    while time.monotonic() < deadline:
        time.sleep(0.2)
        now = path.stat().st_size if path.exists() else 0
        if now > size and now == before:
            break
        before = now
    with suppress(OSError):
        text = path.read_bytes()[size:].decode(errors="replace").strip()
        return text[:_MOST_STACK_CHARS] or f"it has written no stacks in {_STACKS_SECS:.0f} s"
    return "its stacks cannot be read"


def _of_kernel(pid: int) -> str:
    """Its state; where it waits in the kernel, as far as this user may see that."""
    told = []
    for name in ("wchan", "stack"):
        with suppress(OSError):
            text = Path(f"/proc/{pid}/{name}").read_text().strip()
            if text not in ("", "0"):
                told.append(f"{name}: {text}")
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        told.insert(0, next((" ".join(line.split()) for line in lines if line.startswith("State:")), ""))
    return "\n".join(told)
