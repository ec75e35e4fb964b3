"""Counters of the snapshots of one rank, and what is said about them."""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any

from reft.errors import ReftError
from reft.grid import BlockKey, Section

logger = logging.getLogger(__name__)


class ByteKind(StrEnum):
    """What a byte is.

    ``SHARD``: of this rank's own shard of the replicated section. ``COPIES``: of other members'
    shards, cut from the own replica. ``PARITY``: encoded from it. ``OWNED``: of the ZeRO partition.
    ``HOST_STATE``: what only the host knows. ``CHECKSUMS``: eight bytes a block, and the length of
    the host state, with which peers verify. ``GRADIENTS``: of ring peers' partitions, from which
    these are recomputed. ``MIRROR``: everything once more, under the baseline ``inter_node``.
    """

    SHARD = "shard"
    COPIES = "copies"
    PARITY = "parity"
    OWNED = "owned"
    HOST_STATE = "host_state"
    CHECKSUMS = "checksums"
    GRADIENTS = "gradients"
    MIRROR = "mirror"


_KINDS = {
    Section.OWNED: ByteKind.OWNED,
    Section.HOST: ByteKind.HOST_STATE,
    Section.PARITY: ByteKind.PARITY,
    Section.CHECKSUMS: ByteKind.CHECKSUMS,
    Section.GRADIENTS: ByteKind.GRADIENTS,
}


def find_byte_kind(key: BlockKey, member: int) -> ByteKind:
    """What a block is to the ``member`` that stores it."""
    if key.section is Section.REPLICATED:
        return ByteKind.SHARD if key.member == member else ByteKind.COPIES
    return _KINDS[key.section]


@dataclass
class Traffic:
    """Bytes of one version, or of several, on one rank."""

    # copied from the device, or written by the host, to this rank's arena
    to_host: Counter[ByteKind] = field(default_factory=Counter)
    # sent to ranks on other nodes, once for each of them. What goes to another rank of the same
    # node is not counted, nor is the byte a block by which peers say what they lack (AOR).
    sent: Counter[ByteKind] = field(default_factory=Counter)

    def add(self, other: Traffic) -> None:
        """Count another version's bytes too."""
        self.to_host.update(other.to_host)
        self.sent.update(other.sent)

    def to_json(self) -> dict[str, Any]:
        """Kinds of which there was nothing are left out."""
        return {"to_host": _bytes(self.to_host), "sent": _bytes(self.sent)}


def _bytes(counted: Counter[ByteKind]) -> dict[str, int]:
    return {kind.value: counted[kind] for kind in ByteKind if counted[kind]}


class Samples(deque[float]):
    """The newest values, in order of arrival; the median is asked for with every commit, by any
    thread."""

    def __init__(self, most: int = 512) -> None:
        super().__init__(maxlen=most)

    def add_to_newest(self, value: float) -> None:
        """More of the newest sample has become known; nothing if there is none."""
        if self:
            self[-1] += value

    @property
    def newest(self) -> float | None:
        return self[-1] if self else None

    @property
    def median(self) -> float | None:
        """Of the samples kept; None if there are none."""
        values = list(self)  # another thread may be adding to the newest one
        return median(values) if values else None


@dataclass
class RecomputeStats:
    """Counters of one rank."""

    versions: int = 0  # partitions recomputed for a version, equal to their owner's or accepted
    # partitions of which the owner had to send something, by cause
    resynced: dict[str, int] = field(default_factory=dict)
    secs: float = 0.0  # seconds spent on recomputing, all together
    cpu_secs: float = 0.0  # processor time of that, of the one thread


@dataclass
class SnapshotStats:
    """What this rank's snapshots did since the start of the incarnation."""

    taken: int = 0  # versions copied to memory in full
    committed: int = 0  # versions committed globally
    skipped: Counter[str] = field(default_factory=Counter)  # versions given up, by cause
    bytes_per_snapshot: int = 0  # bytes this rank keeps per version, own and redundant
    device_bytes: int = 0  # bytes of a version that are copied from this rank's device
    peer_bytes: int = 0  # bytes received from ring peers so far
    # bytes of the newest committed version, to the host and to other nodes
    traffic: Traffic = field(default_factory=Traffic)
    # the same of all versions so far, those included that were given up
    total_traffic: Traffic = field(default_factory=Traffic)
    # what became of the partitions that are recomputed for ring peers
    recompute: RecomputeStats = field(default_factory=RecomputeStats)
    # bytes copied in bubbles (1), beside computation (2), beside communication (3), and while
    # training waited (0)
    tier_bytes: Counter[int] = field(default_factory=Counter)
    staged: int = 0  # versions of which a part was staged on the device and drained later
    staged_bytes: int = 0  # bytes of these parts
    # seconds each of them took to drain, the newest 512
    drain_secs: Samples = field(default_factory=Samples)
    # seconds the training thread spent on each snapshot (capture and fence), the newest 512
    stalls_secs: Samples = field(default_factory=Samples)
    # seconds each copy took on the worker thread, the newest 512
    copy_secs: Samples = field(default_factory=Samples)
    committed_step: int | None = None  # newest step known to be committed
    # first step since which no version was committed; None while all is well
    stale_since_step: int | None = None
    last_error: str | None = None  # why, if stale

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


# -- what failed on the worker: said once per cause, here and, at the next vote, by every peer (P6)


_REMEMBERED = 256
_PASSED_ON = 8  # most causes that peers are told of in one vote, the newest
_CHARACTERS = 300  # most of a cause that peers are told
_NAMED = 8  # Ranks whose peer_errors are written out; the others are counted


class PeerErrors:
    """Unexpected errors of one worker, each logged once and sent to the peers with the next vote.

    Any thread may record one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged = deque[str](maxlen=_REMEMBERED)
        self._pending = deque[str](maxlen=_PASSED_ON)

    def record(self, what: str, error: Exception) -> None:
        """Log an error once per cause, with a traceback unless it is one that reft raises
        itself."""
        cause = f"{what}: {type(error).__name__}: {error}"
        known = re.sub(r"\d+", "0", cause)  # the same cause names another step every time
        with self._lock:
            is_new = known not in self._logged
            if is_new:
                self._logged.append(known)
                self._pending.append(cause[:_CHARACTERS])
        if is_new:
            logger.warning(
                "%s", cause, exc_info=None if isinstance(error, ReftError | OSError) else error
            )

    def run_guarded(self, what: str, act: Callable[[], object]) -> None:
        """Run ``act``, on which the protocol of the versions does not depend, and record its
        error."""
        try:
            act()
        except Exception as error:
            self.record(what, error)

    def pending(self) -> list[str]:
        """Errors that no peer has received yet, oldest first."""
        with self._lock:
            return [*self._pending]

    def mark_sent(self, causes: Collection[str]) -> None:
        """The peers have received these errors."""
        with self._lock:
            self._pending = deque((c for c in self._pending if c not in causes), _PASSED_ON)


def log_peer_errors(peer_errors: Mapping[int, Collection[str]]) -> None:
    """Log the errors that peers have sent, by rank."""
    for rank in sorted(peer_errors)[:_NAMED]:
        for cause in peer_errors[rank]:
            logger.warning("rank %d reports: %s. See its log", rank, cause)
    if len(peer_errors) > _NAMED:
        logger.warning("%d more ranks report problems; see their logs", len(peer_errors) - _NAMED)
