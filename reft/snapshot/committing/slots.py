"""What a rank knows about its arenas: which one may be written, and which must stay (P3). Pure: in production
:class:`~reft.snapshot.committing.arenas.ArenaSet` does to the files what is decided here, and the model in
tests/snapshot/version_model.py explores it together with :mod:`reft.snapshot.committing.version`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from reft.memory.header import ArenaState
from reft.naming import Label
from reft.snapshot.committing.protocol import NONE_YET


@dataclass(frozen=True)
class Slot:
    """What a rank knows about one of its arenas in this incarnation."""

    state: ArenaState = ArenaState.EMPTY
    label: Label | None = None

    @property
    def is_open(self) -> bool:
        """Whether its version's fate is not known."""
        return self.state in (ArenaState.WRITING, ArenaState.SEALED)


@dataclass(frozen=True)
class Slots:
    """Which of a rank's arenas may be written. Those written by earlier incarnations count as EMPTY.

    Attributes:
        held: every slot. With one slot, nothing can be written once a version is committed.
        frozen: slots that hold the version being recovered, until a newer one is committed. May name slots
            beyond those held, left by an earlier incarnation that had more.
    """

    held: tuple[Slot, ...]
    frozen: tuple[tuple[int, Label], ...] = ()

    @classmethod
    def make(cls, count: int, frozen: Mapping[int, Label] | None = None) -> Slots:
        """Nothing is written yet.

        Raises:
            ValueError: for fewer than one slot.
        """
        if count < 1:
            raise ValueError(
                f"{count} slots; expected at least 1 (2 keep a version while the next is written)"
            )
        return cls((Slot(),) * count, tuple(sorted((frozen or {}).items())))

    @property
    def committed_slot(self) -> int | None:
        """Slot of the newest version known here to be committed."""
        done = [i for i, slot in enumerate(self.held) if slot.state is ArenaState.COMMITTED]
        return max(done, key=self._age, default=None)

    @property
    def committed_label(self) -> Label | None:
        """Newest version known here to be committed in this incarnation."""
        newest = self.committed_slot
        return None if newest is None else self.held[newest].label

    @property
    def open_slot(self) -> int | None:
        """Slot of the version whose fate is not known; there is one at most."""
        return next((i for i, slot in enumerate(self.held) if slot.is_open), None)

    @property
    def kept(self) -> frozenset[int]:
        """Slots that hold what may be needed: they are not written, whatever happens (P3)."""
        unknown = {i for i, slot in enumerate(self.held) if slot.is_open}
        newest = self.committed_slot
        return frozenset({*unknown, *dict(self.frozen), *(() if newest is None else (newest,))})

    def choose(self, pinned: Collection[int] = ()) -> int | None:
        """Slot to write next: an empty one, else the one with the oldest version.

        Args:
            pinned: slots that a reader holds, or that must not be used for another reason.

        Returns:
            The slot, or None: this version has to be skipped.
        """
        free = [i for i in range(len(self.held)) if i not in self.kept and i not in pinned]
        return min(free, key=self._age, default=None)

    def given_up(self, count: int, unused: Collection[int] = ()) -> frozenset[int]:
        """Slots whose memory is given back where ``count`` versions are to be held: none that is kept, and
        one that may be written always stays.

        Args:
            count: versions to hold.
            unused: slots that were given up before: one that exists is not given up for one that would have
                to be made.
        """
        kept = self.kept & {*range(len(self.held))}
        order = sorted(range(len(self.held)), key=lambda slot: (slot not in kept, slot in unused, slot))
        return frozenset(order[max(count, len(kept) + 1) :])

    def began(self, slot: int, label: Label) -> Slots:
        """``slot`` is to be recorded WRITING. Only for a slot that :meth:`choose` would allow.

        Raises:
            ValueError: if the slot must not be written.
        """
        if self.choose(set(range(len(self.held))) - {slot}) != slot:
            raise ValueError(f"slot {slot} must not be written for {label}: it holds {self._describe(slot)}")
        return self._with(slot, Slot(ArenaState.WRITING, label))

    def sealed(self, slot: int) -> Slots:
        """``slot`` is recorded SEALED. From here on others may commit it: it stays until the result of the
        vote is known, also if it never is."""
        return self._move(slot, ArenaState.WRITING, ArenaState.SEALED)

    def committed(self, slot: int) -> Slots:
        """All ranks sealed the version: what is older may be overwritten, frozen slots included."""
        return replace(self._move(slot, ArenaState.SEALED, ArenaState.COMMITTED), frozen=())

    def aborted(self, slot: int) -> Slots:
        """A vote said no, or this rank gave the version up before it voted: the slot is free. Not for a vote
        whose result was not learned: others may have committed the version.

        Raises:
            ValueError: if no version is open in the slot.
        """
        if not self.held[slot].is_open:
            raise ValueError(f"slot {slot} cannot be aborted: it holds {self._describe(slot)}")
        return self._with(slot, Slot())

    def _move(self, slot: int, expected: ArenaState, new: ArenaState) -> Slots:
        if self.held[slot].state is not expected:
            raise ValueError(
                f"slot {slot} cannot become {new}: it holds {self._describe(slot)}, not {expected}"
            )
        return self._with(slot, Slot(new, self.held[slot].label))

    def _with(self, slot: int, new: Slot) -> Slots:
        return replace(self, held=(*self.held[:slot], new, *self.held[slot + 1 :]))

    def _age(self, slot: int) -> Label:
        return self.held[slot].label or NONE_YET

    def _describe(self, slot: int) -> str:
        if slot in dict(self.frozen):
            return f"{dict(self.frozen)[slot]}, which is being recovered"
        return f"{self.held[slot].label or 'nothing'}, {self.held[slot].state}"
