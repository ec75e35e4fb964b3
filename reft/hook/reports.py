"""Who is told of one rank's versions: counters, the events' file, the node's daemon, the rendezvous store."""

from __future__ import annotations

from collections.abc import Callable

from reft.events import EventLog
from reft.grid import Coordinate
from reft.hook.job import JobRecord
from reft.hook.rates import Rates
from reft.snapshot.stats import SnapshotStats
from reft.store.client import DaemonClient
from reft.store.label import Label


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
    ) -> None:
        self._stats = stats
        self._events = events
        self._daemon = daemon
        self._record = record
        self._at = at
        self._unprotected = unprotected
        self._rates = rates

    def committed(self, label: Label) -> None:
        """All ranks have the version."""
        if self._record is not None:
            self._record.note_commit(label)
        stats = self._stats.to_json()
        due, told_of_rates = self._rates.committed(label)
        stats |= told_of_rates
        self._daemon.notify_commit(label, self._at, stats, unprotected=self._unprotected(), due=due)
        # With the counters: a rank that is killed leaves no "closed" event.
        told = {key: stats[key] for key in ("taken", "bytes_per_rank", "traffic", "stall_secs_median")}
        self._events.write("commit", step=label.step, copy_secs=self._stats.copy_secs.newest, **told)

    def skipped(self, step: int, cause: str) -> None:
        """A version was given up."""
        self._daemon.notify_skip(step, cause, self._stats.to_json())
        self._events.write("skip", step=step, cause=cause)
