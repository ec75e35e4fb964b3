"""Who is told of one rank's versions: counters, the events' file, the node's daemon, the rendezvous store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reft.engine.memory import CommitNotes, JobRecord
from reft.engine.rates import Rates
from reft.grid import Coordinate
from reft.log import EventLog
from reft.naming import Label
from reft.node.client import DaemonClient
from reft.snapshot.complaints import Complaints
from reft.snapshot.stats import SnapshotStats


class Reports:
    """Called by the worker thread.

    Args:
        stats: the counters.
        events: the events' file.
        daemon: of this node.
        record: in the rendezvous store; None on all ranks but one.
        at: this rank's coordinate.
        unprotected: whether the loss of a node, survived before, is not any more.
        rates: how often versions are taken, and go to storage.
        complaints: told of what cannot be told.
    """

    def __init__(
        self,
        *,
        stats: SnapshotStats,
        events: EventLog,
        daemon: DaemonClient,
        record: JobRecord | None,
        at: Coordinate,
        unprotected: Callable[[], bool],
        rates: Rates,
        complaints: Complaints,
    ) -> None:
        self._stats = stats
        self._events = events
        self._daemon = daemon
        self._notes = None if record is None else CommitNotes(record, complaints)
        self._at = at
        self._unprotected = unprotected
        self._rates = rates
        self._complaints = complaints

    def committed(self, label: Label) -> None:
        """All ranks have the version. Whatever cannot be told costs nobody else the news. Other threads wait
        for the answers of the daemon and of the rendezvous store: the next vote must not."""
        stats = self._stats.to_json()
        due, told_of_rates = self._of_rates(label)
        self._complaints.attempt(
            "the daemon cannot be told of a commit",
            lambda: self._tell(label, stats | told_of_rates, due),
        )
        # With the counters: a rank that is killed leaves no "closed" event.
        told = {key: stats[key] for key in ("taken", "bytes_per_rank", "traffic", "stall_secs_median")}
        self._events.write("commit", step=label.step, copy_secs=self._stats.copy_secs.newest, **told)
        if self._notes is not None:
            self._notes.committed(label)

    def _of_rates(self, label: Label) -> tuple[bool, dict[str, Any]]:
        """Whether the version goes to storage, and what is told of the rates."""
        try:
            return self._rates.committed(label)
        except Exception as error:
            self._complaints.tell("the rates of versions cannot be computed", error)
            return False, {}

    def _tell(self, label: Label, stats: dict[str, Any], due: bool) -> None:
        self._daemon.notify_commit(label, self._at, stats, unprotected=self._unprotected(), due=due)

    def skipped(self, step: int, cause: str) -> None:
        """A version was given up."""
        self._daemon.notify_skip(step, cause, self._stats.to_json())
        self._events.write("skip", step=step, cause=cause)

    def close(self) -> None:
        """Have the last commit noted, for two seconds at most."""
        if self._notes is not None:
            self._notes.close()
