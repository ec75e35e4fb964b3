"""Changes the protection scheme of a running job, after the same version on all ranks.

A change has one of two causes: a request (:mod:`reft.memory.protection_record`) on any node, or
a lack of memory. Each rank's ballot contains the newest request it has read, and the level that
its node's free memory permits: a position in the *ladder*, a list of ever cheaper protections
(:mod:`reft.protect.placement`). The result of the vote is the newest request and the cheapest
level of all ranks, the same on every rank. After the protocol of the version that was voted on,
the worker threads

1. agree on the text of the request, and check that the scheme is possible in the groups and that
   its arenas fit into every node's memory;
2. reserve arenas of the new size in all slots except that of the newest committed version, which
   stays recoverable until a version under the new scheme is committed (P3);
3. record the new protection on every node, for ``reft status`` and for the next start.

A request that does not fit is refused on all ranks before any memory is released (P9). Training
does not wait: a version that would begin during a change is skipped and counted. If a process is
killed at any point, every arena's header still identifies its content, and the restart uses the
newest record.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from reft.backoff import Backoff
from reft.config import FaultPoint
from reft.control.control import ControlGroup, WorkerControl
from reft.errors import ConfigError
from reft.grid import Topology, VersionId
from reft.memory.protection_record import (
    REQUEST_FILE,
    Degradation,
    ProtectionRecord,
    ProtectionRequest,
    Refusal,
    parse_request,
    read_request,
)
from reft.protect.codes import Scheme
from reft.protect.placement import ProtectionLevel, ladder, tolerance
from reft.snapshot.arenas import ArenaSet
from reft.snapshot.extension import CopiedVersion, Halt, SchemePolicy, VoteResult
from reft.snapshot.plan import GroupLayout, layout_under
from reft.snapshot.version import SkipCause

logger = logging.getLogger(__name__)

_NO_LIMIT = -1
_NEVER = 2**62

CALM_SECS = 10.0
_MOST_CALMS = 64
# Memory that must be free after a move up, as a multiple of the margin, so that the move is not
# reversed at once
_ROOM_AFTER_RISE = 1.5


class MemoryGuard:
    """Proposes one rank's level of the ladder from the free memory of its node.

    The guard proposes the next level down (cheaper) as soon as less than the margin is free. It
    proposes the next level up when, for ``calm_secs``, that level would have left 1.5 times the
    margin free. This time doubles whenever a move up had to be reversed.
    """

    def __init__(self, margin_bytes: int, calm_secs: float = CALM_SECS) -> None:
        self.margin_bytes = margin_bytes
        self._calm = Backoff(calm_secs, _MOST_CALMS * calm_secs)
        self._calm_since: float | None = None
        self._rose_at: float | None = None

    def wanted_level(
        self, level: int, levels: int, free_bytes: int, growth: Callable[[], int], now: float
    ) -> int:
        """Return the proposed level.

        Args:
            level: level in force; 0 is the requested protection.
            levels: number of levels in the ladder.
            free_bytes: free memory of the node.
            growth: returns the bytes that the node needs for the next level up.
            now: seconds of a monotonic clock.
        """
        if free_bytes < self.margin_bytes:
            self._calm_since = None
            return min(level + 1, levels - 1)
        if level == 0 or free_bytes - growth() < _ROOM_AFTER_RISE * self.margin_bytes:
            self._calm_since = None
            return level
        if self._calm_since is None:
            self._calm_since = now
        return level - 1 if now - self._calm_since >= self._calm.pause else level

    def moved(self, before: int, after: int, now: float) -> None:
        """Record that all ranks moved from level ``before`` to ``after``."""
        self._calm_since = None
        if after < before:
            self._rose_at = now
        elif self._rose_at is not None:
            flapped = now - self._rose_at < 2 * self._calm.pause
            if flapped:
                self._calm.failed()
            else:
                self._calm.reset()
            self._rose_at = None


@dataclass(frozen=True)
class MemoryBudget:
    """Memory of one rank under a layout, in bytes."""

    needed: int  # Size of all arenas of the rank under the layout
    held: int  # Size of the arenas that the rank has now
    free: int  # Free memory of the rank's node
    limit: int  # Limit on the size of this rank's arenas; negative for no limit
    margin: int  # Memory of the node that must stay free if the rank's arenas grow

    @classmethod
    def of(
        cls, arenas: ArenaSet, layout: GroupLayout, count: int, margin_bytes: int = 0
    ) -> MemoryBudget:
        """Return the budget for ``count`` arenas of a layout."""
        limit = _NO_LIMIT if arenas.limit_bytes is None else arenas.limit_bytes
        needed = arenas.needed_bytes(layout, count)
        return cls(needed, arenas.held_bytes(), arenas.free_bytes(), limit, margin_bytes)

    @property
    def over_limit(self) -> bool:
        return 0 <= self.limit < self.needed

    @property
    def left_bytes(self) -> int:
        """Free memory of the node; negative if the limit is below the needed size."""
        return self.limit - self.needed if self.over_limit else self.free

    @property
    def growth_bytes(self) -> int:
        """Bytes needed in addition to the present arenas; a number larger than any node's memory
        if the limit forbids the growth."""
        return _NEVER if self.over_limit else self.needed - self.held


def agree_on_room(control: ControlGroup, topology: Topology, room: MemoryBudget) -> str | None:
    """Check that every rank and node has enough memory. Collective.

    Returns:
        Text on the first rank or node that lacks memory and how much it lacks, the same on all
        ranks; None if all have enough.
    """
    rooms = [MemoryBudget(*values) for values in control.gather_ints(astuple(room))]
    for rank, found in enumerate(rooms):
        if found.over_limit:
            return (
                f"needs {_mib(found.needed)} for the arenas of rank {rank}, but "
                f"reft.memory_limit_bytes leaves it {_mib(found.limit)}"
            )
    for node in dict.fromkeys(topology.nodes):
        there = [r for r, at in zip(rooms, topology.nodes, strict=True) if at == node]
        more = sum(r.needed - r.held for r in there)
        free, margin = min(r.free for r in there), max(r.margin for r in there)
        if more > 0 and more > free - margin:
            return (
                f"needs {_mib(more)} more than now on node {node}, where {_mib(free)} are free, of "
                f"which reft.memory_margin_bytes keeps {_mib(margin)}"
            )
    return None


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


@dataclass(frozen=True)
class ActiveProtection:
    """The protection in force on one rank, and what votes have requested since."""

    order: int = 0  # Number of the last request that was carried out or refused
    level: int = 0  # Level in force; 0 is the requested protection
    heard_order: int = 0  # Number of the newest request in any vote's result
    heard_level: int = 0  # Level in the last vote's result

    def heard(self, order: int, level: int) -> ActiveProtection:
        """Return a copy with a vote's result, which is the same on all ranks."""
        return replace(self, heard_order=max(self.heard_order, order), heard_level=level)

    def would_change(self, order: int, level: int) -> bool:
        """Return whether a vote with this result requires a change."""
        return order > self.order or level != self.level

    @property
    def due(self) -> bool:
        """Whether a change is due now; the same on all ranks after the same vote."""
        return self.would_change(self.heard_order, self.heard_level)

    @property
    def ordered(self) -> bool:
        """Whether the due change is a request; requests are carried out before changes of the
        level."""
        return self.heard_order > self.order

    def targets(self, levels: int) -> Sequence[int]:
        """Return the levels to try in order, until all ranks can reserve one.

        A move up has a single target. A move down may skip levels that cannot be reserved.
        """
        return (
            (self.heard_level,)
            if self.heard_level < self.level
            else range(self.heard_level, levels)
        )

    def moves(self, failed: Sequence[bool]) -> bool:
        """Return whether the ranks change to the new level, which all of them do or none.

        Args:
            failed: for each rank, whether it could not reserve its arenas.
        """
        return not any(failed)

    def followed(self, order: int) -> ActiveProtection:
        """Return a copy after a request was carried out or refused."""
        return replace(self, order=order, heard_order=order)

    def now_on(self, level: int) -> ActiveProtection:
        """Return a copy after all ranks have changed to this level."""
        return replace(self, level=level, heard_level=level)

    def resync(self, order: int, levels: int) -> ActiveProtection:
        """Return the state after the ranks have reconnected; the level is determined again with
        the next layout."""
        return self.followed(order).now_on(min(self.level, levels - 1))


class RequestPoll:
    """Reads this node's newest request. A call costs one ``stat`` if the file is unchanged."""

    def __init__(self, job_dir: Path) -> None:
        self._path = job_dir / REQUEST_FILE
        self._seen: tuple[int, int] | None = None
        self._order: ProtectionRequest | None = None

    def newest(self) -> ProtectionRequest | None:
        """Return the newest request found so far; unreadable files are ignored."""
        try:
            info = self._path.stat()
        except OSError:
            return self._order
        seen = (info.st_mtime_ns, info.st_ino)
        if seen != self._seen:
            self._seen = seen
            self._order = read_request(self._path.parent) or self._order
        return self._order


@dataclass(frozen=True)
class RetentionConfig:
    """Settings for the versions that are kept."""

    versions: int = 2  # Number of versions that each rank keeps if there is enough memory
    margin_bytes: int = 0  # Bytes of a node's memory that versions must leave free
    look_secs: float = 1.0  # Seconds between two checks of the node's memory
    calm_secs: float = CALM_SECS  # Seconds for which enough memory must be free before a move up


class SchemeSwitch(SchemePolicy):
    """Changes the protection of one rank. Used by the worker thread.

    Args:
        control: messages between the worker threads of all ranks.
        topology: placement of the ranks.
        arenas: this rank's arenas.
        record: protection at the start of this incarnation, the same on all ranks.
        orders: reads this node's requests; None if only other nodes' requests are followed.
        keeping: settings for the versions that are kept.
        on_change: called with the new record after every change and refusal.
        reach: called between reserving memory and recording the change, with the step; for fault
            injection.

    Attributes:
        settled: whether a version was committed under the protection in force.
    """

    def __init__(
        self,
        control: WorkerControl,
        topology: Topology,
        arenas: ArenaSet,
        record: ProtectionRecord,
        orders: RequestPoll | None = None,
        *,
        keeping: RetentionConfig = RetentionConfig(),
        on_change: Callable[[ProtectionRecord], None] = lambda record: None,
        reach: Callable[[FaultPoint, int], None] = lambda point, step: None,
    ) -> None:
        self._control = control
        self._topology = topology
        self._arenas = arenas
        self._reach = reach
        self._orders = orders
        self._keeping = keeping
        self._on_change = on_change
        self.record = record
        self._ladder = self._ladder_of(record)
        self.in_force = ActiveProtection(record.number, heard_order=record.number)
        self._watch = MemoryGuard(keeping.margin_bytes, keeping.calm_secs)
        self._wanted_level = 0
        self._looked = 0.0
        self.settled = False
        self._look_failed = False
        self._above: GroupLayout | None = None

    @property
    def wanted(self) -> ProtectionLevel:
        """The requested protection, which is in force if there is enough memory."""
        return self._ladder[0]

    @property
    def scheme(self) -> Scheme:
        return self.wanted.scheme

    # -- votes -------------------------------------------------------------------------------------

    def neutral_ballot(self) -> tuple[int, ...]:
        return self.record.number, self.in_force.level

    def ballot(self, cause: SkipCause | None, layout: GroupLayout | None) -> tuple[int, ...]:
        return self.newest_order(), self.wanted_level(layout)

    def delays_votes(self, numbers: tuple[int, ...]) -> bool:
        order, level = numbers
        return self.in_force.would_change(order, level)

    def voted(self, result: VoteResult, numbers: tuple[int, ...]) -> Halt | None:
        order, level = numbers
        self.in_force = self.in_force.heard(order, level)
        return None

    def committed(self, version: CopiedVersion) -> None:
        self.settled = True

    def newest_order(self) -> int:
        """Return the number of the newest request that this rank has read; part of its ballot."""
        order = self._orders.newest() if self._orders is not None else None
        return max(self.record.number, order.number if order is not None else 0)

    def wanted_level(self, layout: GroupLayout | None) -> int:
        """Return the level that this rank's node has memory for; part of its ballot.

        The memory is checked at most once in ``look_secs``, and only after a version was
        committed under the protection in force: before that, memory that the last change gives
        up is not free yet.
        """
        now = time.monotonic()
        if layout is not None and self.settled and now - self._looked >= self._keeping.look_secs:
            self._looked = now
            try:
                room = MemoryBudget.of(self._arenas, layout, self._arenas.count)
                self._wanted_level = self._watch.wanted_level(
                    self.in_force.level,
                    len(self._ladder),
                    room.left_bytes,
                    lambda: self._growth(layout),
                    now,
                )
            except OSError as error:
                # Only log this, since taking versions depends only on their arenas.
                if not self._look_failed:
                    logger.warning("the node's memory use cannot be read: %s", error)
                self._look_failed = True
        return self._wanted_level

    def _growth(self, layout: GroupLayout) -> int:
        """Return the number of bytes that this node needs for the next level up, estimated from
        this rank's share.
        """
        level = self._ladder[self.in_force.level - 1]
        if self._above is None:
            self._above = self._under(layout, level)
        room = MemoryBudget.of(self._arenas, self._above, level.arenas)
        node = self._topology.nodes[self._control.rank]
        return room.growth_bytes * len(self._topology.local_ranks(node))

    # -- changes, collective -----------------------------------------------------------------------

    def rejoined(self) -> None:
        """Agree on the protection again after the ranks have reconnected. Collective.

        Some ranks may have carried out a change that others have not; all continue with the
        newest record. The level is determined again with the next layout (:meth:`fit`).
        """
        gathered = self._control.gather_bytes(json.dumps(self.record.to_json()).encode())
        records = [ProtectionRecord.from_json(json.loads(data)) for data in gathered]
        newest = max(records, key=lambda r: (r.number, r.step))
        if newest != self.record:
            self.record = newest
            self._ladder = self._ladder_of(newest)
            self._on_change(newest)
        self.in_force = self.in_force.resync(newest.number, len(self._ladder))
        self._wanted_level = self.in_force.level
        self.settled = False
        self._above = None

    def fit(self, label: VersionId, layout: GroupLayout) -> GroupLayout:
        """Choose the level for a new layout, without reserving memory. Collective.

        Args:
            label: the version that has the new layout.
            layout: layout planned for the requested protection.

        Returns:
            The layout for the first level that every node has memory for, or for the last level.
        """
        cause = None
        for level in self._ladder:
            found = self._under(layout, level)
            short = agree_on_room(self._control, self._topology, self._room(found, level.arenas))
            if short is None:
                break
            cause = cause or f"{level} {short}"
        if self._now_on(self._ladder.index(level)):
            self._publish(label, cause)
        return found

    def _room(self, layout: GroupLayout, count: int) -> MemoryBudget:
        """Return the budget for a layout. Never raises, because the peers wait for this rank's
        budget.

        If the node's free memory cannot be determined, it counts as 0.
        """
        try:
            return MemoryBudget.of(self._arenas, layout, count, self._keeping.margin_bytes)
        except OSError as error:
            logger.warning("the node's memory use cannot be read: %s", error)
            needed = self._arenas.needed_bytes(layout, count)
            return MemoryBudget(needed, 0, 0, _NO_LIMIT, self._keeping.margin_bytes)

    @property
    def is_due(self) -> bool:
        return self.in_force.due

    def change(self, label: VersionId, layout: GroupLayout | None) -> GroupLayout | None:
        """Carry out the due change between two versions. Collective.

        Args:
            label: version after which the change takes place.
            layout: layout in force; None before the first version.

        Returns:
            The layout of the next version.
        """
        if self.in_force.ordered:
            return self._follow_order(label, layout)
        if layout is None:
            self.in_force = self.in_force.now_on(self.in_force.level)
            return layout
        return self._change_level(label, layout)

    def _follow_order(self, label: VersionId, layout: GroupLayout | None) -> GroupLayout | None:
        order = self._agree_on_order()
        cause: str | None
        new: GroupLayout | None = None
        try:
            scheme = parse_request(order.scheme, aor=self.record.aor)
            scheme.check_room(self._topology.degrees.dp)
        except ConfigError as error:
            cause = str(error)
        else:
            cause, new = self._move(ProtectionLevel(scheme, self._keeping.versions), layout)
        self._reach(FaultPoint.DURING_SWITCH, label.step)
        self.in_force = self.in_force.followed(order.number)
        if cause is None:
            self.record = replace(
                self.record, scheme=str(scheme), number=order.number, refused=None, ordered=True
            )
            self._ladder = self._ladder_of(self.record)
            self._now_on(0)
            self._publish(label, None)
        else:
            refused = Refusal(order.scheme, cause, label.step)
            self.record = replace(self.record, number=order.number, refused=refused)
            self._on_change(self.record)
        return new or layout

    def _change_level(self, label: VersionId, layout: GroupLayout) -> GroupLayout:
        """Move down, skipping levels whose arenas cannot be reserved, or move up by one level."""
        down = self.in_force.heard_level > self.in_force.level
        degraded = self.record.degraded
        why = self._why_short(layout) if down else degraded.cause if degraded is not None else None
        new, target = None, self.in_force.level
        for target in self.in_force.targets(len(self._ladder)):
            _, new = self._move(self._ladder[target], layout)
            if new is not None:
                break
        self._reach(FaultPoint.DURING_SWITCH, label.step)
        if self._now_on(target if new is not None else self.in_force.level):
            self._publish(label, why)
        return new or layout

    def _move(
        self, level: ProtectionLevel, layout: GroupLayout | None
    ) -> tuple[str | None, GroupLayout | None]:
        """Reserve the arenas of a level, on all ranks or on none.

        Returns:
            None and the new layout; or, after a failure, the cause and None.
        """
        if layout is None:
            return None, None
        new, arenas = self._under(layout, level), self._arenas
        cause = agree_on_room(self._control, self._topology, self._room(new, level.arenas))
        if cause is not None:
            return cause, None
        before = arenas.count
        arenas.use(level.arenas)
        problem = arenas.reserve(new)
        failed = [
            bool(values[0]) for values in self._control.gather_ints([int(problem is not None)])
        ]
        if self.in_force.moves(failed):
            return None, new
        arenas.use(before)
        arenas.reserve(layout)
        nodes = sorted({n for n, bad in zip(self._topology.nodes, failed, strict=True) if bad})
        return (
            f"memory could not be reserved on {', '.join(nodes)}: {problem or 'see their logs'}",
            None,
        )

    def _why_short(self, layout: GroupLayout) -> str:
        room = self._room(layout, self._arenas.count)
        gathered = self._control.gather_ints([room.left_bytes, self._keeping.margin_bytes])
        (left, margin), node = min(zip(gathered, self._topology.nodes, strict=True))
        return (
            f"node {node} has {max(0, left) / 2**20:.1f} MiB of memory left, "
            f"reft.memory_margin_bytes keeps {margin / 2**20:.1f} MiB free"
        )

    def _now_on(self, level: int) -> bool:
        """Record the level that is now in force on all ranks; return whether it has changed."""
        before = self.in_force.level
        self._arenas.use(self._ladder[level].arenas)
        self._watch.moved(before, level, time.monotonic())
        self.in_force, self._wanted_level = self.in_force.now_on(level), level
        self.settled = False
        self._above = None
        return level != before

    def _publish(self, label: VersionId, cause: str | None) -> None:
        """Record the protection in force after ``label``.

        Args:
            label: the version before the change.
            cause: why the requested protection is not in force; None if it is.
        """
        level = self._ladder[self.in_force.level]
        degraded = None
        if self.in_force.level:
            degraded = Degradation(str(level.scheme), level.arenas, cause or "", label.step)
        self.record = replace(
            self.record,
            step=label.step,
            incarnation=label.incarnation,
            tolerance=tolerance(self._topology, level.scheme.copies, level.scheme.parities),
            degraded=degraded,
        )
        self._on_change(self.record)

    def _ladder_of(self, record: ProtectionRecord) -> tuple[ProtectionLevel, ...]:
        return ladder(record.parsed, self._keeping.versions, self._topology.degrees.dp)

    @staticmethod
    def _under(layout: GroupLayout, level: ProtectionLevel) -> GroupLayout:
        same = layout.plan.placement.scheme == level.scheme
        return layout if same else layout_under(layout, level.scheme)

    def _agree_on_order(self) -> ProtectionRequest:
        """Return the newest request that any rank has read. Collective."""
        order = (self._orders.newest() if self._orders is not None else None) or ProtectionRequest(
            0, ""
        )
        told = self._control.gather_bytes(json.dumps(astuple(order)).encode())
        return ProtectionRequest(*max(json.loads(data) for data in told))
