"""Counters of the versions that one rank takes, and the errors of its snapshot worker."""

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
    """Kind of state, by which bytes are counted.

    Attributes:
        SHARD: this rank's own shard of the replicated section.
        COPIES: other members' shards, copied from this rank's replica.
        PARITY: parity blocks, encoded from this rank's replica.
        OWNED: ZeRO partitions.
        HOST_STATE: encoded host state.
        CHECKSUMS: eight bytes for each block, and the length of the host state.
        GRADIENTS: gradients with which ring peers' partitions are recomputed.
        MIRROR: the second copy of everything that the baseline ``inter_node`` makes.
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
    """Return the kind by which the bytes of a block are counted if ``member`` stores the block."""
    if key.section is Section.REPLICATED:
        return ByteKind.SHARD if key.member == member else ByteKind.COPIES
    return _KINDS[key.section]


@dataclass
class Traffic:
    """Number of bytes that one rank has moved for one or several versions, by kind."""

    # Bytes that were copied from the device, or written by the host, into this rank's arena
    to_host: Counter[ByteKind] = field(default_factory=Counter)
    # Bytes that were sent to ranks on other nodes, counted once for each receiver. Neither traffic
    # within a node nor the masks by which peers request blocks (AOR) are counted.
    sent: Counter[ByteKind] = field(default_factory=Counter)

    def add(self, other: Traffic) -> None:
        """Add the bytes of another version."""
        self.to_host.update(other.to_host)
        self.sent.update(other.sent)

    def to_json(self) -> dict[str, Any]:
        """Return the bytes by kind. Kinds without bytes are left out."""
        return {"to_host": _bytes(self.to_host), "sent": _bytes(self.sent)}


def _bytes(counted: Counter[ByteKind]) -> dict[str, int]:
    return {kind.value: counted[kind] for kind in ByteKind if counted[kind]}


class Samples(deque[float]):
    """The newest values of a quantity in order of arrival. Any thread may read the median."""

    def __init__(self, most: int = 512) -> None:
        super().__init__(maxlen=most)

    def add_to_newest(self, value: float) -> None:
        """Increase the newest sample, if there is one, by ``value``."""
        if self:
            self[-1] += value

    @property
    def newest(self) -> float | None:
        return self[-1] if self else None

    @property
    def median(self) -> float | None:
        """Median of the stored samples; None if there are none."""
        # Copy the samples first, since another thread may append or change one at the same time.
        values = list(self)
        return median(values) if values else None


@dataclass
class RecomputeStats:
    """Counters of recomputed partitions (AOR) on one rank."""

    versions: int = 0  # Number of recomputed partitions that were used, for all versions
    # Number of partitions of which the owner had to send blocks although peers recompute them, by
    # cause
    resynced: dict[str, int] = field(default_factory=dict)
    secs: float = 0.0  # Total seconds spent on recomputing
    cpu_secs: float = 0.0  # CPU seconds of the recomputing thread


@dataclass
class SnapshotStats:
    """Counters of this rank's versions since the start of the incarnation."""

    taken: int = 0  # Versions that were copied to memory completely
    committed: int = 0  # Versions that were committed globally
    # Versions that were given up, by cause
    skipped: Counter[str] = field(default_factory=Counter)
    bytes_per_snapshot: int = 0  # Bytes that this rank stores for a version, own and redundant
    device_bytes: int = 0  # Bytes of a version that are copied from this rank's device
    peer_bytes: int = 0  # Bytes received from ring peers so far
    # Traffic of the newest committed version
    traffic: Traffic = field(default_factory=Traffic)
    # Traffic of all versions so far, including those that were given up
    total_traffic: Traffic = field(default_factory=Traffic)
    # Counters of the partitions that are recomputed for ring peers
    recompute: RecomputeStats = field(default_factory=RecomputeStats)
    # Bytes copied, per tier: 1 in windows, 2 during computation, 3 during communication, 0 while
    # training waited
    tier_bytes: Counter[int] = field(default_factory=Counter)
    staged: int = 0  # Versions of which a part was staged on the device and drained later
    staged_bytes: int = 0  # Total bytes of the staged parts
    # Seconds that it took to drain each staged part, for the newest 512 parts
    drain_secs: Samples = field(default_factory=Samples)
    # Seconds that the training thread spent on each version (capture and fence), for the newest 512
    stalls_secs: Samples = field(default_factory=Samples)
    # Seconds that each copy took on the worker thread, for the newest 512
    copy_secs: Samples = field(default_factory=Samples)
    committed_step: int | None = None  # Newest step known to be committed
    # First step since the newest commit whose version was given up; None if none was
    stale_since_step: int | None = None
    # Reason why the newest versions were given up; None if they were committed
    last_error: str | None = None

    def commit(self, step: int, traffic: Traffic) -> None:
        """Count a committed version and its bytes."""
        self.committed += 1
        self.traffic = traffic
        self.total_traffic.add(traffic)
        self.committed_step = step
        self.stale_since_step = None
        self.last_error = None

    def skip(self, step: int, cause: str, error: str | None = None) -> bool:
        """Count a version that was given up.

        Args:
            step: step of the version.
            cause: kind of the cause, by which it is counted.
            error: full text of the cause.

        Returns:
            True the first time this kind of cause is counted.
        """
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


# -- errors of the worker: each is logged once, and sent to the peers with the next vote (P6) ------


# Largest number of causes that are remembered, so that they are not logged again
_REMEMBERED = 256
# Largest number of causes sent with one vote; if there are more, the newest are sent
_PASSED_ON = 8
_CHARACTERS = 300  # Largest number of characters sent for one cause
# Largest number of ranks whose errors are logged; of further ranks only the number is logged
_NAMED = 8


class PeerErrors:
    """Unexpected errors of one snapshot worker, each logged once and sent to the peers with the
    next vote.

    Any thread may record an error.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # Guards both queues: the worker and other threads record
        self._logged = deque[str](maxlen=_REMEMBERED)
        self._pending = deque[str](maxlen=_PASSED_ON)

    def record(self, what: str, error: Exception) -> None:
        """Log an error, once for each cause, and queue it for the peers. Errors other than
        ReftError and OSError are logged with a traceback.

        Args:
            what: what failed, in a few words, which precede the error in the log.
            error: the error.
        """
        cause = f"{what}: {type(error).__name__}: {error}"
        # Ignore numbers, since the same cause recurs with different steps
        known = re.sub(r"\d+", "0", cause)
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
        """Run ``act``, and record an error instead of raising it. For work whose failure must not
        fail the version."""
        try:
            act()
        except Exception as error:
            self.record(what, error)

    def pending(self) -> list[str]:
        """Return the errors that were not sent to the peers yet, oldest first."""
        with self._lock:
            return [*self._pending]

    def mark_sent(self, causes: Collection[str]) -> None:
        """Record that the peers have received these errors."""
        with self._lock:
            self._pending = deque((c for c in self._pending if c not in causes), _PASSED_ON)


def log_peer_errors(peer_errors: Mapping[int, Collection[str]]) -> None:
    """Log the errors that peers have sent, given as a map from rank to errors."""
    for rank in sorted(peer_errors)[:_NAMED]:
        for cause in peer_errors[rank]:
            logger.warning("rank %d reports: %s. See its log", rank, cause)
    if len(peer_errors) > _NAMED:
        logger.warning("%d more ranks report problems; see their logs", len(peer_errors) - _NAMED)
