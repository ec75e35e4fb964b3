"""Changing the protection while the job runs, at one version boundary on all ranks: by order, or
for want of memory.

An order (:mod:`reft.node.client`) on any node travels in the votes of the versions, and so does how
far each rank would go down the ladder (:mod:`reft.protect.placement`) for the memory its node has
left; every rank hears the newest order and the lowest level from the same vote. Once that version
is through the protocol the worker threads, and only they,

1. agree on the order's text and check that the scheme suits the group and that its arenas fit on
  every node;
2. reserve arenas of the new size in every slot but that of the newest committed version, which
  stays as it
   is and recoverable until a version under the new scheme is committed (P3);
3. say on every node what is in force now, for ``reft status`` and for the next start.

An order that does not fit is refused on all ranks before anything is given up (P9). Training waits
for none of this: a version that would begin meanwhile is skipped and counted. A kill at any point
leaves arenas that each say what they hold, and records of which the newest counts.
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
# a level up must leave so many margins free, so that it is not given up at once
_ROOM_AFTER_RISE = 1.5


class MemoryGuard:
    """Which level one rank wants, from how much memory its node has left.

    Down at once when less than the margin is free, a level at a time. Up when the next level would
    leave half as much again as the margin, and has for ``calm_secs``; that while doubles whenever
    what came back had to be given up again."""

    def __init__(self, margin_bytes: int, calm_secs: float = CALM_SECS) -> None:
        self.margin_bytes = margin_bytes
        self._calm = Backoff(calm_secs, _MOST_CALMS * calm_secs)
        self._calm_since: float | None = None
        self._rose_at: float | None = None

    def wanted_level(
        self, level: int, levels: int, free_bytes: int, growth: Callable[[], int], now: float
    ) -> int:
        """The level to be on. ``level``: the one in force; 0 is what is wanted. ``levels``: of the
        ladder. ``free_bytes``: memory of the node that nobody has taken. ``growth``: bytes that the
        node would take for the next level up. ``now``: seconds of a monotonic clock."""
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
        """All ranks are on another level."""
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

    needed: int  # for all its arenas
    held: int  # by those it has now
    free: int  # on its node, not taken by anybody
    limit: int  # most that this rank's arenas may take; negative: no limit
    margin: int  # that must stay free on its node if more is taken

    @classmethod
    def of(
        cls, arenas: ArenaSet, layout: GroupLayout, count: int, margin_bytes: int = 0
    ) -> MemoryBudget:
        """What ``count`` arenas of a layout would take."""
        limit = _NO_LIMIT if arenas.limit_bytes is None else arenas.limit_bytes
        needed = arenas.needed_bytes(layout, count)
        return cls(needed, arenas.held_bytes(), arenas.free_bytes(), limit, margin_bytes)

    @property
    def over_limit(self) -> bool:
        return 0 <= self.limit < self.needed

    @property
    def left_bytes(self) -> int:
        """Of the node's memory; negative where the limit has been lowered below what is needed."""
        return self.limit - self.needed if self.over_limit else self.free

    @property
    def growth_bytes(self) -> int:
        """More than now; more than any node has where the limit forbids it."""
        return _NEVER if self.over_limit else self.needed - self.held


def agree_on_room(control: ControlGroup, topology: Topology, room: MemoryBudget) -> str | None:
    """What is missing on the first rank or node that lacks memory, in words; None where all have
    enough. Collective; the same on all ranks. Nodes may differ in what must stay free."""
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
    """The protection of one rank."""

    order: int = 0  # number of the last order that was carried out or refused
    level: int = 0  # how far down the ladder what is in force is; 0 is what is wanted
    heard_order: int = 0  # number of the newest order that a vote named
    heard_level: int = 0  # the level that the last vote named

    def heard(self, order: int, level: int) -> ActiveProtection:
        """A vote named this order and this level, on all ranks the same."""
        return replace(self, heard_order=max(self.heard_order, order), heard_level=level)

    def would_change(self, order: int, level: int) -> bool:
        """Whether a vote with this order and level has a change follow."""
        return order > self.order or level != self.level

    @property
    def due(self) -> bool:
        """Whether something is to be changed now; all ranks say the same after the same vote."""
        return self.would_change(self.heard_order, self.heard_level)

    @property
    def ordered(self) -> bool:
        """Whether what is due is an order: it goes before a level."""
        return self.heard_order > self.order

    def targets(self, levels: int) -> Sequence[int]:
        """Levels to try, until all ranks move: up one alone, down past those that cannot be
        reserved."""
        return (
            (self.heard_level,)
            if self.heard_level < self.level
            else range(self.heard_level, levels)
        )

    def moves(self, failed: Sequence[bool]) -> bool:
        """Whether the ranks use what they have tried, given of every rank whether it could not
        reserve its
        arenas: all of them do, or none."""
        return not any(failed)

    def followed(self, order: int) -> ActiveProtection:
        """An order was carried out, or refused."""
        return replace(self, order=order, heard_order=order)

    def now_on(self, level: int) -> ActiveProtection:
        """All ranks are on this level."""
        return replace(self, level=level, heard_level=level)

    def resync(self, order: int, levels: int) -> ActiveProtection:
        """The ranks have come together again. How far down the ladder is found out anew with the
        layout."""
        return self.followed(order).now_on(min(self.level, levels - 1))


class RequestPoll:
    """Looks for a new order, at the cost of one ``stat`` while there is none."""

    def __init__(self, job_dir: Path) -> None:
        self._path = job_dir / REQUEST_FILE
        self._seen: tuple[int, int] | None = None
        self._order: ProtectionRequest | None = None

    def newest(self) -> ProtectionRequest | None:
        """The newest order found so far; a file that cannot be read is none."""
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
    """Settings of what is kept."""

    versions: int = 2  # per rank, if there is memory
    margin_bytes: int = 0  # memory of a node that versions must leave free
    look_secs: float = 1.0  # between two looks at the node's memory
    calm_secs: float = CALM_SECS  # how long there must have been room before something comes back


class SchemeSwitch(SchemePolicy):
    """The protection in force on one rank, and how it changes. Used by the worker thread.

    Args:
        control, topology: carry the agreement.
        arenas: this rank's memory.
        record: what this incarnation begins with, the same on all ranks.
        orders: where this node's orders are found; None: only those of others are followed.
        keeping: how much is kept.
        on_change: called with the new record after every change and refusal.
        reach: called between reserving memory and saying so, with the step.
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
        self.settled = False  # whether a version was committed under what is in force
        self._look_failed = False
        self._above: GroupLayout | None = None

    @property
    def wanted(self) -> ProtectionLevel:
        """What is kept if there is memory."""
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
        """Number of the newest order that this rank knows of: what it says in a vote."""
        order = self._orders.newest() if self._orders is not None else None
        return max(self.record.number, order.number if order is not None else 0)

    def wanted_level(self, layout: GroupLayout | None) -> int:
        """The level that this rank would be on, by the memory its node has left: what it says in a
        vote. Looked at now and then, and only once a version is committed under what is in force:
        what the last change gave back is not free before."""
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
                # Whether versions can be taken is another question, which the arenas answer.
                if not self._look_failed:
                    logger.warning("the node's memory use cannot be read: %s", error)
                self._look_failed = True
        return self._wanted_level

    def _growth(self, layout: GroupLayout) -> int:
        """What this node would take for the next level up, as far as one rank can tell."""
        level = self._ladder[self.in_force.level - 1]
        if self._above is None:
            self._above = self._under(layout, level)
        room = MemoryBudget.of(self._arenas, self._above, level.arenas)
        node = self._topology.nodes[self._control.rank]
        return room.growth_bytes * len(self._topology.local_ranks(node))

    # -- changes, collective -----------------------------------------------------------------------

    def rejoined(self) -> None:
        """The ranks have come together again: some may have carried out what others have not. The
        newest record counts; how far down the ladder is found out anew with the layout
        (:meth:`fit`)."""
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
        """A new layout, planned for what is wanted: take the first level that every node has memory
        for, or the last. Collective; nothing is reserved yet."""
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
        """For peers that wait for it: where the memory cannot be looked at, there is none."""
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
        """Do what is due, between two versions; returns the layout to go on with. ``label``: the
        version after which the change takes place. ``layout``: in force; None before the first
        version."""
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
        """Go down, past levels that cannot be reserved; or up, since there is room again on every
        node, it seems."""
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
        """Reserve what a level needs; all ranks do, or none. Returns why not, or the new layout."""
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
        """This is the level in force, on all ranks; returns whether it is another one."""
        before = self.in_force.level
        self._arenas.use(self._ladder[level].arenas)
        self._watch.moved(before, level, time.monotonic())
        self.in_force, self._wanted_level = self.in_force.now_on(level), level
        self.settled = False
        self._above = None
        return level != before

    def _publish(self, label: VersionId, cause: str | None) -> None:
        """Note what is in force since the version after ``label``, and why it is not what is
        wanted."""
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
        """The newest that any rank knows of."""
        order = (self._orders.newest() if self._orders is not None else None) or ProtectionRequest(
            0, ""
        )
        told = self._control.gather_bytes(json.dumps(astuple(order)).encode())
        return ProtectionRequest(*max(json.loads(data) for data in told))
