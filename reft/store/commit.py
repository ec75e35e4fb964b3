"""The commit rules: which slot may be written, how votes are counted, which version to restore.

Pure. Every rank takes one version v at a time, all ranks the same one. Votes are all-reduces, so the
ranks are in lock step at votes and nowhere else:

1. choose a slot, record WRITING, copy; vote "copied";
2. if all did: exchange with the ring peers, hash, record SEALED; vote "sealed" (the prepare phase);
3. if all did: v *is committed* at that moment; every rank learns it at its own time and then records
   COMMITTED.

A rank that skipped or failed votes no, and all ranks abort v. A rank that does not learn a result
(the control group broke) leaves its slot as it is.

What follows, and is explored exhaustively in tests/store/test_commit_model.py (P3):

- A committed version is sealed on every rank, and stays so until a newer one is committed: a rank
  gives it up only after it has *learned* of a newer commit, at which point all ranks have sealed
  the newer one.
- Restoring follows :func:`preferred_label`. The newest version that happens to be whole is not
  good enough: if a rank lacks it that holds an older one, it was never committed, and to settle on
  it gives up copies that the next loss may need.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from reft.store.header import ArenaState
from reft.store.label import Label


class Vote(IntEnum):
    """What one rank says about one version. Ordered, so that an all-reduce MIN decides."""

    NO = 0
    YES = 1


def decide(votes: Iterable[Vote]) -> Vote:
    """The result of a vote: YES only if every rank said so."""
    return min(votes)


def preferred_label(
    held_by: Mapping[Label, Collection[Hashable]], newest_committed: Label | None
) -> Label | None:
    """Which of the recoverable versions to restore.

    Of those not older than the newest version known to be committed, the newest one that is held by
    *every* place which holds an older one. A version v that was committed anywhere is whole at every
    place that is left. A newer one that some place lacks was therefore never committed, and has fewer
    copies: restoring it would let ranks overwrite v while a single loss can still break the newer one.

    Args:
        held_by: per *recoverable* version, the places that hold it SEALED or COMMITTED. A place is
            where arenas lie, whosever bytes they hold: (node, local rank).
        newest_committed: newest version that any arena found says is committed.

    Returns:
        The label, or None if nothing is recoverable.
    """
    current = sorted(label for label in held_by if newest_committed is None or newest_committed <= label)
    chosen: Label | None = None
    seen: set[Hashable] = set()
    for label in current or sorted(held_by):
        if seen <= set(held_by[label]):
            chosen = label
        seen.update(held_by[label])
    return chosen


@dataclass(frozen=True)
class Slot:
    """What a rank knows about one of its arenas in this incarnation."""

    state: ArenaState = ArenaState.EMPTY
    label: Label | None = None


_FREE = Slot()


class SlotTable:
    """Which of a rank's arenas may be written.

    The rule (P3): never the slot of the newest version known *here* to be committed, never one whose
    version is still open (written or sealed, result not learned), never one that holds the version
    being recovered. All others may be: a newer version is committed on all ranks.

    Args:
        slots: arenas of this rank. With 1, nothing can be written once a version is committed.
        frozen: slots that hold the version being recovered, until a newer one is committed. May name
            slots beyond ``slots``, left by an earlier incarnation that had more.

    Raises:
        ValueError: for fewer than one slot.
    """

    def __init__(self, slots: int, frozen: Mapping[int, Label] | None = None) -> None:
        if slots < 1:
            raise ValueError(
                f"{slots} slots; expected at least 1 (2 keep a version while the next is written)"
            )
        self._slots = [_FREE] * slots
        self._frozen = dict(frozen or {})

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What is known about every slot. Those written by earlier incarnations count as EMPTY."""
        return tuple(self._slots)

    @property
    def frozen(self) -> Mapping[int, Label]:
        """Slots that hold the version being recovered."""
        return dict(self._frozen)

    @property
    def committed_slot(self) -> int | None:
        """Slot of the newest version known here to be committed."""
        done = [i for i, slot in enumerate(self._slots) if slot.state is ArenaState.COMMITTED]
        return max(done, key=self._age, default=None)

    @property
    def committed_label(self) -> Label | None:
        """Newest version known here to be committed in this incarnation."""
        newest = self.committed_slot
        return None if newest is None else self._slots[newest].label

    def choose(self, pinned: Collection[int] = ()) -> int | None:
        """Slot to write next: an empty one, else the one with the oldest version.

        Args:
            pinned: slots that a reader holds.

        Returns:
            The slot, or None: this version has to be skipped.
        """
        kept = {self.committed_slot, *self._frozen, *pinned}
        free = [i for i, slot in enumerate(self._slots) if i not in kept and not _is_open(slot)]
        return min(free, key=self._age, default=None)

    def began(self, slot: int, label: Label) -> None:
        """``slot`` is recorded WRITING. Only for a slot that :meth:`choose` would allow.

        Raises:
            ValueError: if the slot must not be written.
        """
        if self.choose(set(range(len(self._slots))) - {slot}) != slot:
            raise ValueError(f"slot {slot} must not be written for {label}: it holds {self._describe(slot)}")
        self._slots[slot] = Slot(ArenaState.WRITING, label)

    def sealed(self, slot: int) -> None:
        """``slot`` is recorded SEALED. From here on others may commit it: it stays until the result
        of the vote is known, also if it never is."""
        self._move(slot, ArenaState.WRITING, ArenaState.SEALED)

    def committed(self, slot: int) -> None:
        """All ranks sealed the version: what is older may be overwritten, frozen slots included."""
        self._move(slot, ArenaState.SEALED, ArenaState.COMMITTED)
        self._frozen.clear()

    def aborted(self, slot: int) -> None:
        """A vote said no, or this rank gave the version up before it voted: the slot is free.

        Not for a vote whose result was not learned: others may have committed the version.

        Raises:
            ValueError: if no version is open in the slot.
        """
        if not _is_open(self._slots[slot]):
            raise ValueError(f"slot {slot} cannot be aborted: it holds {self._describe(slot)}")
        self._slots[slot] = _FREE

    def _move(self, slot: int, expected: ArenaState, new: ArenaState) -> None:
        if self._slots[slot].state is not expected:
            raise ValueError(
                f"slot {slot} cannot become {new}: it holds {self._describe(slot)}, not {expected}"
            )
        self._slots[slot] = Slot(new, self._slots[slot].label)

    def _age(self, slot: int) -> Label:
        return self._slots[slot].label or Label(-1, -1)

    def _describe(self, slot: int) -> str:
        if slot in self._frozen:
            return f"{self._frozen[slot]}, which is being recovered"
        return f"{self._slots[slot].label or 'nothing'}, {self._slots[slot].state}"


def _is_open(slot: Slot) -> bool:
    return slot.state in (ArenaState.WRITING, ArenaState.SEALED)
