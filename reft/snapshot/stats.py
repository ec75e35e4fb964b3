"""Counters of the snapshots of one rank, and what is said about them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from reft.snapshot.recompute import RecomputeStats
from reft.snapshot.scheduling.samples import Samples
from reft.snapshot.traffic import Traffic


@dataclass
class SnapshotStats:
    """What this rank's snapshots did since the start of the incarnation.

    Attributes:
        taken: versions copied to memory in full.
        committed: versions committed globally.
        skipped: versions given up, by cause.
        bytes_per_snapshot: bytes this rank keeps per version, own and redundant.
        peer_bytes: bytes received from ring peers so far.
        traffic: bytes of the newest committed version, to the host and to other nodes.
        total_traffic: the same of all versions so far, those included that were given up.
        stalls_secs: seconds the training thread spent on each snapshot (capture and fence), the
            newest 4096.
        recompute: what became of the partitions that are recomputed for ring peers.
        tier_bytes: bytes copied in bubbles (1), beside computation (2), beside communication (3), and
            while training waited (0).
        staged: versions of which a part was staged on the device and drained later.
        staged_bytes: bytes of these parts.
        drain_secs: seconds each of them took to drain, the newest 4096.
        copy_secs: seconds each copy took on the worker thread, the newest 4096.
        committed_step: newest step known to be committed.
        stale_since_step: first step since which no version was committed; None while all is well.
        last_error: why, if stale.
    """

    taken: int = 0
    committed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    bytes_per_snapshot: int = 0
    peer_bytes: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    total_traffic: Traffic = field(default_factory=Traffic)
    recompute: RecomputeStats = field(default_factory=RecomputeStats)
    tier_bytes: Counter[int] = field(default_factory=Counter)
    staged: int = 0
    staged_bytes: int = 0
    drain_secs: Samples = field(default_factory=Samples)
    stalls_secs: Samples = field(default_factory=Samples)
    copy_secs: Samples = field(default_factory=Samples)
    committed_step: int | None = None
    stale_since_step: int | None = None
    last_error: str | None = None

    def commit(self, step: int, traffic: Traffic) -> None:
        self.committed += 1
        self.traffic = traffic
        self.total_traffic.add(traffic)
        self.committed_step = step
        self.stale_since_step = None
        self.last_error = None

    def skip(self, step: int, cause: str, error: str | None = None) -> bool:
        """Count a version that was given up. Returns True the first time this cause is seen."""
        self.skipped[cause] += 1
        if self.stale_since_step is None:
            self.stale_since_step = step
        self.last_error = error or cause
        return self.skipped[cause] == 1

    def to_json(self) -> dict[str, Any]:
        return {
            "taken": self.taken,
            "committed": self.committed,
            "skipped": dict(self.skipped),
            "bytes_per_rank": self.bytes_per_snapshot,
            "peer_bytes": self.peer_bytes,
            "traffic": self.traffic.to_json(),
            "total_traffic": self.total_traffic.to_json(),
            "recomputed": self.recompute.versions,
            "resynced": dict(self.recompute.resynced),
            "recompute_secs": self.recompute.secs,
            "recompute_cpu_secs": self.recompute.cpu_secs,
            "tier_bytes": {str(tier): self.tier_bytes[tier] for tier in range(4)},
            "staged": self.staged,
            "staged_bytes": self.staged_bytes,
            "drain_secs_median": self.drain_secs.median,
            "stall_secs_median": self.stalls_secs.median,
            "copy_secs_median": self.copy_secs.median,
            "committed_step": self.committed_step,
            "stale_since_step": self.stale_since_step,
            "last_error": self.last_error,
        }
