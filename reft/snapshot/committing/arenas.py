"""This rank's memory: a few arenas, of which one is free to be written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

from reft.backoff import Backoff
from reft.errors import ArenaError, OutOfMemoryError, ReftError
from reft.grid import Coordinate, Degrees
from reft.memory.arena import Arena, ArenaHeader, ArenaState, SlotFiles, free_bytes, reserved_bytes
from reft.naming import Label
from reft.snapshot.committing.version import Slots
from reft.snapshot.copying.engine import CopyEngine
from reft.snapshot.filling import Filling
from reft.snapshot.plan import GroupLayout

logger = logging.getLogger(__name__)

_PIN_POLL_SECS = 0.005
_PIN_SECS = 60.0
_MAX_BACKOFF_VERSIONS = 64


@dataclass(frozen=True)
class ArenaIdentity:
    """What every header of this rank says about its owner."""

    job_id: str
    node: str
    degrees: Degrees
    coordinate: Coordinate


class ArenaSet:
    """The arenas of one rank.

    Args:
        files: where they lie.
        identity: written into every header.
        frozen: slots that hold the version being recovered; not written until a newer one is
            committed globally (P3).
        limit_bytes: most bytes that this rank's arenas may take; None means what is free.
        engine: copies into the arenas; told about each of them once.
        remake: makes the job's directory again, if somebody removed it.
    """

    def __init__(
        self,
        files: SlotFiles,
        identity: ArenaIdentity,
        *,
        frozen: Mapping[int, Label],
        limit_bytes: int | None,
        engine: CopyEngine | None = None,
        remake: Callable[[], object] | None = None,
    ) -> None:
        self._files = files
        self._identity = identity
        self._engine = engine
        self._remake = remake
        self.pin_secs = _PIN_SECS
        """Most that a version which must be taken waits for readers; others do not wait."""
        self.limit_bytes = limit_bytes  # most bytes that this rank's arenas may take; None means what is free
        self._leftovers_removed = False
        self._arenas: dict[int, Arena] = {}
        self.slots = Slots.make(files.count, self._with_room(frozen))
        """What is known about the arenas; kept up to date by whoever drives the versions."""
        self._wanted = files.count
        self._unused: frozenset[int] = frozenset()
        self._refusals = Backoff(1, _MAX_BACKOFF_VERSIONS)
        self._skip_versions = 0
        self.unsettled = False  # whether memory is reserved behind the next commit, which takes a while

    def begin(
        self, label: Label, layout: GroupLayout, *, wait: bool, taken: Callable[[int], None]
    ) -> Filling:
        """Choose a slot and bring it into state WRITING. ``taken`` is told which one before it is touched.
        Raises ArenaError: every slot is in use."""
        if self._skip_versions and not wait:
            self._skip_versions -= 1
            raise OutOfMemoryError("waiting before memory is asked for again")
        slot = self._free_slot(wait)
        taken(slot)
        try:
            arena = self._arena(slot, layout)
        except OutOfMemoryError:
            self._skip_versions = int(self._refusals.failed())
            raise
        self._refusals.reset()
        arena.begin(
            ArenaHeader(
                job_id=self._identity.job_id,
                node=self._identity.node,
                degrees=self._identity.degrees,
                coordinate=self._identity.coordinate,
                label=label,
                state=ArenaState.WRITING,
                layout=layout.layout_hash,
                coding=layout.plan.code.describe() if layout.plan.code else "",
                scheme=str(layout.plan.placement.scheme),
            )
        )
        data = torch.frombuffer(arena.data, dtype=torch.uint8)
        return Filling(slot, arena, layout, label, data)

    def _with_room(self, frozen: Mapping[int, Label]) -> dict[int, Label]:
        """Slots that hold the version being recovered. If these are all there are, as where files of two
        ranks were exchanged, one is set aside, another rank's first: a version must find a place."""
        kept = dict(frozen)
        mine = [slot for slot in kept if slot < self._files.count]
        if len(mine) < self._files.count:
            return kept
        paths = {slot: self._files.path(slot) for slot in mine}
        own = {s: self._files.coordinate_in(path) == self._identity.coordinate for s, path in paths.items()}
        slot = min(mine, key=lambda slot: (own[slot], -slot))
        try:
            aside = self._files.set_aside(paths[slot])
        except OSError as error:
            logger.warning("%s cannot be reserved: %s", paths[slot].name, error)
            return kept
        logger.warning(
            "%s and all other slots of this rank hold the version that was recovered; it is kept as %s until "
            "the next commit",
            *(paths[slot].name, aside.name),
        )
        del kept[slot]
        return kept

    # -- what others may do to the files -----------------------------------------------------------

    def look_after(self) -> bool:
        """Notice what has become of the files since the last version; what is lost is made anew (P3). Returns
        whether something was lost: nobody may keep an arena mapped then."""
        lost = {slot: cause for slot, arena in self._arenas.items() if (cause := arena.lost()) is not None}
        for slot, cause in lost.items():
            self._lose(slot, cause)
        job_dir = self._files.job_dir
        if not job_dir.is_dir() and self._remake is not None:
            logger.error("%s was removed, with all versions on this node; it is made again", job_dir)
            self._remake()
        return bool(lost)

    def _lose(self, slot: int, cause: str) -> None:
        arena = self._arenas.pop(slot)
        protected = slot == self.slots.committed_slot
        logger.error(
            "%s %s; it is made again. %s",
            *(arena.path, cause),
            f"This rank's part of {self.slots.committed_label} was there: only its peers can restore that, "
            f"until the next version is committed"
            if protected
            else "It held no version that is needed",
        )
        self._forget(arena)
        arena.unlock()
        self.unsettled = True
        # Another rank's arena in this place may be all that is left of that rank's part.
        found = self._files.coordinate_in(arena.path)
        if found not in (None, self._identity.coordinate):
            with suppress(OSError):
                self._files.set_aside(arena.path)
            self._leftovers_removed = False

    def reserve(self, layout: GroupLayout) -> str | None:
        """Allocate and touch every slot that may be written now, so that no snapshot pays for it later (P9,
        trap 17), and give back what another layout took there. What does not fit is refused when a version
        needs it. Returns why a slot could not be reserved, if one could not."""
        tried: list[int] = []
        pinned = False
        try:
            while (slot := self.slots.choose([*tried, *self._unused])) is not None:
                tried.append(slot)
                try:
                    self._arena(slot, layout).unlock()
                except OutOfMemoryError:
                    raise
                except ArenaError as error:  # a reader has it; a version that needs it then asks again
                    logger.info("memory for snapshots: %s", error)
                    pinned = True
        except (ReftError, OSError, RuntimeError) as error:
            logger.warning("memory for snapshots: %s", error)
            return str(error)
        finally:
            self.unsettled = pinned or len(tried) < self.count
        self._refusals.reset()
        self._skip_versions = 0
        return None

    def use(self, count: int) -> None:
        """Hold so many versions from now on, at most those of the start: fewer free the memory of slots that
        hold nothing that is needed (P3), of which there is always at least one."""
        self._wanted = count
        self._unused = self.slots.given_up(count, self._unused)
        for slot in self._unused:
            arena = self._arenas.pop(slot, None)
            if arena is not None:
                self._forget(arena)
                arena.unlock()
            with suppress(OSError):  # it stays, then, and so does what it takes
                self._files.path(slot).unlink(missing_ok=True)

    def settle(self, layout: GroupLayout) -> None:
        """After a commit: reserve what could not be before, because it held the version of another layout
        or incarnation that this one has replaced."""
        if self.unsettled:
            self.use(self._wanted)
            self.reserve(layout)
            self.unsettled = False

    # -- what it takes -----------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Versions that this rank holds."""
        return self._files.count - len(self._unused)

    def needed_bytes(self, layout: GroupLayout, count: int) -> int:
        """Memory of ``count`` arenas under a layout."""
        return count * reserved_bytes(layout.mine.data_bytes, len(layout.mine.blocks))

    def held_bytes(self) -> int:
        """Memory that the files in this rank's slots take now."""
        return self._files.held_bytes

    def free_bytes(self) -> int:
        """Memory of the node that nobody has taken."""
        return free_bytes(self._files.job_dir)

    def commit(self, filling: Filling) -> None:
        """All ranks have sealed the version: it counts, whether or not that can be noted here."""
        try:
            filling.arena.commit()
            # What an earlier incarnation with more slots or more ranks left here. Only after a commit: until
            # then one of them may hold the version that was recovered (P3).
            if not self._leftovers_removed:
                self._leftovers_removed = True
                self._files.remove_leftovers(self._unused)
        except (ArenaError, OSError) as error:
            logger.warning("the commit of step %d cannot be recorded: %s", filling.label.step, error)
        finally:
            filling.arena.unlock()

    def abort(self, filling: Filling) -> None:
        """Free the slot. What was sealed stays readable until the slot is written again: it is the
        true state of that step, and a recovery may use it if every member's bytes are there."""
        filling.arena.unlock()

    def close(self) -> None:
        """Forget the mappings; the files stay."""
        for arena in self._arenas.values():
            self._forget(arena)
        self._arenas.clear()

    def _forget(self, arena: Arena) -> None:
        if self._engine is not None:
            self._engine.unregister(arena.data)

    def _free_slot(self, wait: bool) -> int:
        deadline = time.monotonic() + (self.pin_secs if wait else 0.0)
        while True:
            pinned = [*self._unused]
            while (slot := self.slots.choose(pinned)) is not None:
                arena = self._arenas.get(slot)
                if arena is None or arena.try_lock_exclusive():
                    return slot
                pinned.append(slot)
            if time.monotonic() >= deadline:
                raise ArenaError(
                    f"all slots are in use (pinned by a reader: {pinned}; recovered: "
                    f"{sorted(dict(self.slots.frozen))})"
                )
            time.sleep(_PIN_POLL_SECS)

    def _arena(self, slot: int, layout: GroupLayout) -> Arena:
        """The arena of a free slot, of the layout's size and locked for writing."""
        wanted = layout.mine.data_bytes
        entries = len(layout.mine.blocks)
        arena = self._arenas.get(slot)
        if arena is not None and (arena.data_bytes, arena.max_entries) == (wanted, entries):
            if not arena.try_lock_exclusive():
                raise ArenaError(f"{arena.path.name} is pinned by a reader")
            return arena
        if self.limit_bytes is not None and wanted * self.count > self.limit_bytes:
            raise OutOfMemoryError(
                f"{self.count} arenas of {wanted / 2**20:.1f} MiB need {wanted * self.count / 2**20:.1f} "
                f"MiB, but reft.memory_limit_bytes leaves this rank {self.limit_bytes / 2**20:.1f} MiB; "
                f"raise the limit, or lower reft.copies or reft.arenas (at least 2)"
            )
        if arena is not None:
            self._forget(arena)
            arena.unlock()
        del arena
        self._arenas.pop(slot, None)
        arena = self._files.create(slot, wanted, entries)
        if not arena.try_lock_exclusive():
            raise ArenaError(f"{arena.path.name} is pinned by a reader")
        if self._engine is not None:
            self._engine.register(arena.data)
        self._arenas[slot] = arena
        return arena
