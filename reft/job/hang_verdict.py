"""Detects trainers that hang: the nodes of a round exchange reports and name the culprit.

Every trainer publishes what it is doing in a progress page, a shared-memory page in the job
directory, which its launcher reads. While a trainer is stalled, its launcher writes a report with
the activities of all its trainers into the store's table of the round, and reads the other nodes'
reports there. :func:`reft.node.hangs.name_culprit` compares the reports. All launchers compare the
same reports, so all reach the same verdict, and each restarts its own trainers.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from reft.control.keyvalue import RendezvousStore
from reft.errors import ReftError
from reft.job.script import EX_PEER_FAILED, ExitCause, TrainerFailure
from reft.node.hangs import (
    STOPPED,
    WAITING,
    ActivityTracker,
    HangDiagnosis,
    TrainerActivity,
    name_culprit,
    step_limit_secs,
)
from reft.node.progress import STACKS_SUFFIX, read_pages

logger = logging.getLogger(__name__)

_POLL_SECS = 0.5
_COURTESY_SECS = 2.0  # Head start for the culprit's node, so that it logs the stacks first
# Time for a removed node to return, which a living node does with its next heartbeat
_SILENT_SECS = 2.0
_STACKS_SECS = 3.0
_MOST_STACK_CHARS = 16_000
_SILENT_NODE = (
    "a node was removed because it is silent, and its peers wait for it; they continue without it"
)


class HangDetector:
    """Watches the trainers of one node, in one round at a time.

    Attributes:
        activities: what each trainer was doing at the last poll.
    """

    def __init__(self, node: str, job_dir: Path) -> None:
        self._node = node
        self._job_dir = job_dir
        self._timers = ActivityTracker()
        self.activities: list[TrainerActivity] = []
        self._polled_at = time.monotonic()
        self.clear()

    def clear(self) -> None:
        """Forget the trainers of the last round."""
        self._timers.clear()
        self.activities = []
        self._written: bytes | None = None
        self._exchange_failed = False
        self._exchanged_at = 0.0
        self._suspected_since: float | None = None
        self._named_at: float | None = None
        self._silent_since: float | None = None

    def poll(self, pids: Collection[int]) -> list[TrainerActivity]:
        """Return the activities of the trainers with the given process ids.

        Processes that have not published a progress page in the job directory are left out.
        """
        elapsed = time.monotonic() - self._polled_at
        if elapsed >= _POLL_SECS:
            self._polled_at += elapsed
            pages = [page for page in read_pages(self._job_dir) if page.pid in pids]
            self.activities = [
                replace(activity, node=self._node) for activity in self._timers.poll(pages, elapsed)
            ]
        return [activity for activity in self.activities if activity.page.pid in pids]

    def judge(
        self,
        local: list[TrainerActivity],
        table: RendezvousStore,
        index: int,
        size: int,
        *,
        silent: bool = False,
    ) -> TrainerFailure | None:
        """Decide whether the job hangs, so that this node's trainers have to be restarted.

        The store is read only while a trainer of this node is stalled.

        Args:
            local: activities of this node's trainers.
            table: the store's table of this round.
            index: index of this node in the round.
            size: number of nodes of the round.
            silent: True if a node of this round was removed because its heartbeats stopped, and
                enough nodes remain to continue without it.

        Returns:
            The reason to restart the trainers; None if they continue.
        """
        if silent and self._waits_for_silent_node(local):
            activities = "; ".join(map(str, local))
            logger.error("the job hangs: %s (%s)", _SILENT_NODE, activities)
            local_rank = local[0].page.local_rank
            return TrainerFailure(ExitCause.PEER, local_rank, EX_PEER_FAILED, _SILENT_NODE)
        if not silent:
            self._silent_since = None
        now = time.monotonic()
        stalled = any(activity.stalled for activity in local)
        # Exchange reports while a trainer is stalled, and once more when all move again: an empty
        # report then replaces this node's last one.
        has_news = stalled or self._written is not None
        if not has_news or now - self._exchanged_at < _POLL_SECS:
            return None
        self._exchanged_at = now
        reports = self._exchange(table, index, size, local if stalled else [])
        diagnosis = self._diagnose(reports, size, now)
        if diagnosis is None:
            return None
        culprits = [activity for activity in local if activity.page.rank in diagnosis.ranks]
        if self._named_at is None:
            self._named_at = now
        if diagnosis.ranks and not culprits and now - self._named_at < _COURTESY_SECS:
            return None
        logger.error("the job hangs: %s", diagnosis.reason)
        for activity in culprits or local:
            logger.error("%s\n%s", activity, read_stacks(self._job_dir, activity))
        local_rank = (culprits or local)[0].page.local_rank
        if culprits:
            return TrainerFailure(ExitCause.OWN, local_rank, 1, diagnosis.reason)
        return TrainerFailure(ExitCause.PEER, local_rank, EX_PEER_FAILED, diagnosis.reason)

    def _waits_for_silent_node(self, local: list[TrainerActivity]) -> bool:
        """Whether communication has stalled because trainers wait for a removed node."""
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
        if now - self._silent_since <= _SILENT_SECS:
            return False
        # A trainer in a local phase, such as a save, does not wait for the lost node.
        return any(a.suspected or (a.stalled and a.communicates) for a in local)

    def _diagnose(
        self, reports: dict[int, list[TrainerActivity]], size: int, now: float
    ) -> HangDiagnosis | None:
        """Compare the reports; return None if no culprit is found or other nodes may yet report."""
        activities = [activity for report in reports.values() for activity in report]
        # An empty report means that the trainers of that node move again: the job does not hang.
        diagnosis = name_culprit(activities) if all(reports.values()) else None
        if diagnosis is None:
            self._suspected_since = self._named_at = None
            return None
        if self._suspected_since is None:
            self._suspected_since = now
        # If a node has not reported, its trainers may still move. Assume so until the limit has
        # passed.
        limit_secs = max(
            max(activity.page.hang_timeout_secs, step_limit_secs(activity.page))
            for activity in activities
        )
        if len(reports) < size and now - self._suspected_since < limit_secs:
            return None
        return diagnosis

    def _exchange(
        self, table: RendezvousStore, index: int, size: int, local: list[TrainerActivity]
    ) -> dict[int, list[TrainerActivity]]:
        """Write this node's report if it has changed; return the reports of all nodes by index."""
        reports = {index: local}
        try:
            report = WAITING.dump_json(local) if local else None
            if report != self._written:
                table.set(f"hang/{index}", report or b"[]")
                self._written = report
            for other in range(size):
                if other != index and (report := table.peek(f"hang/{other}")) is not None:
                    reports[other] = WAITING.validate_json(report)
        except (ReftError, RuntimeError, OSError, ValueError) as error:
            if not self._exchange_failed:
                logger.warning("cannot exchange reports on hanging trainers: %s", error)
            self._exchange_failed = True
        return reports


def read_stacks(job_dir: Path, activity: TrainerActivity) -> str:
    """Return a trainer's kernel stack, and its Python stacks if the process can run."""
    page = activity.page
    if page.state == STOPPED:
        python_stack = "a stopped process cannot write its stacks"
    elif page.stack_signal:
        path = job_dir / f"{page.local_rank}{STACKS_SUFFIX}"
        python_stack = _read_python_stack(path, page.pid, page.stack_signal)
    else:
        python_stack = ""
    return "\n".join(filter(None, (_read_kernel_stack(page.pid), python_stack)))


def _read_python_stack(path: Path, pid: int, number: int) -> str:
    """Signal a trainer to append its Python stacks to the file at ``path``, and return them."""
    try:
        before = content = path.read_bytes()
        os.kill(pid, number)
        deadline = time.monotonic() + _STACKS_SECS
        is_complete = False
        while not is_complete and time.monotonic() < deadline:
            time.sleep(0.2)
            previous, content = content, path.read_bytes()
            # The file has no end mark: it is complete when it has grown and then stays unchanged.
            is_complete = content == previous != before
    except OSError as error:
        return f"its stacks cannot be read: {error}"
    text = content[len(before) :].decode(errors="replace").strip()
    return text[:_MOST_STACK_CHARS] or f"it has written no stacks in {_STACKS_SECS:.0f} s"


def _read_kernel_stack(pid: int) -> str:
    """Return the process state and kernel stack, as far as this user may read them."""
    lines = []
    for name in ("status", "wchan", "stack"):
        with suppress(OSError):
            text = Path(f"/proc/{pid}/{name}").read_text().strip()
            if name == "status":
                for line in text.splitlines():
                    if line.startswith("State:"):
                        lines.append(" ".join(line.split()))
            elif text not in ("", "0"):
                lines.append(f"{name}: {text}")
    return "\n".join(lines)
