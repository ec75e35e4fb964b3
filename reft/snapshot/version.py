"""A version's life on one rank, from the hand-over to its end, as a pure transition system.

    queued ─► copying ─► released ─► (drained) ─► sealed ─► committed
       └─────────┴───────────┴────────────┴──────────┴────► abandoned (cause)

``step(state, event)`` returns the next state and the effects to carry out. In production the
training thread and the snapshot worker call this function (:mod:`reft.snapshot.worker`). The model
in tests/snapshot/version_model.py calls the same function with every order of events, with an error
at every task and every effect and a crash after every transition. This module reads no clock, no
file and no network. It defines versions, tasks, events, effects and slots (a rank's numbered places
for a version) first, then the transitions.

All ranks take the same versions in the same order, one at a time, and synchronize at two votes:

1. every rank that is able copies the version into a slot, and all vote "copied";
2. if all have copied it, they exchange bytes with ring peers, hash and seal the slot, and all
   vote "sealed" (the prepare phase of a two-phase commit);
3. if all have sealed it, the version *is committed* at that moment; the ranks may receive the
   result of the vote at different times.

The state of a slot is stored twice. :class:`Slots` holds what this rank knows about its slots, and
decides which slot the rank may write. The header of the slot's arena file is what a recovery reads
after a crash, on this node or on a peer's. The two differ once a version is given up (will not be
committed):

=========================  ===============  ===============  ====================================
what happened              in ``Slots``     in the file      what a recovery may do with it
=========================  ===============  ===============  ====================================
given up before its seal   empty            WRITING          nothing
sealed; the vote said no   empty            SEALED           restore it: all SEALED bytes are the
                                                             true state of their step
sealed; result not known   SEALED (kept)    SEALED           restore it
committed                  COMMITTED        COMMITTED        restore it
=========================  ===============  ===============  ====================================

Who owns what:

- **The live tensors** belong to training, except while :attr:`Version.holds_training`.
- **A slot** belongs to the version that is WRITING or SEALED in it, then to the newest commit.
  Only :meth:`Slots.choose` decides which slot may be written, and only :meth:`Slots.slots_to_free`
  which memory may be freed.
- **The gate**, which admits copies of paced versions only in idle intervals (windows), is
  entered when such a version is handed over and left when no byte of it remains to be copied:
  effects :class:`EnterGate` and :class:`LeaveGate`.
- **The cause** why a version is not committed is set once, by this module, and reported once
  (:class:`GiveUp`).

How the promises are kept:

- **P2** A version that is not completely copied when the tensors change
  (:attr:`Signal.TENSORS_CHANGE`) gets a cause at that signal at the latest, and a rank votes no on
  a version with a cause. So a committed version was read from one state. The script, too, may write
  tensors between the step boundary and that signal. Because a recovery trusts a SEALED slot, a slot
  is recorded as SEALED only after the training thread has compared write counts
  (:class:`TensorsChecked`), on this rank and on the ranks whose bytes this rank stores.
- **P3** :meth:`Slots.choose` never returns the slot of the newest version known here to be
  committed, that of a version whose vote has no known result, or that of the version being
  recovered. A rank overwrites a version only after it has *received* a newer commit; by then all
  ranks have sealed the newer version.
- **P6** Every rank votes on every version that is handed over, even if its copy failed. A rank
  that cannot continue (:class:`ProtocolFailed`) closes its connections at once, so that its
  peers notice, and all ranks connect again (:attr:`Task.REJOIN`). A version that all ranks gave
  up during the reconnection needs no vote. Training waits only while
  :attr:`Version.holds_training`, and only up to a time limit, so :attr:`Signal.TENSORS_CHANGE`
  is always allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from reft.grid import VersionId
from reft.memory.header import ArenaState

NONE_YET = VersionId(-1, -1)  # Stands for "no version"; compares as older than every version


class Stage(Enum):
    """Progress of a version on this rank."""

    QUEUED = auto()
    COPYING = auto()
    # Training need not wait any more: every byte is in the slot or staged on the device
    RELEASED = auto()
    SEALED = auto()
    COMMITTED = auto()
    ABANDONED = auto()


@dataclass(frozen=True)
class SkipCause:
    """The cause why a version is not committed: its kind, by which such versions are counted, and
    details for the log."""

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind

    @classmethod
    def of(cls, error: Exception) -> SkipCause:
        """Make a cause from an error. The kind is the error's type."""
        return cls(type(error).__name__, str(error))


@dataclass(frozen=True)
class Version:
    """One version on this rank."""

    label: VersionId  # Id of the version: incarnation and step
    # True if the version is never cancelled: training waits at the fence until it is copied (after
    # a restore, or before an exit)
    required: bool = False
    # True if the step has no version to copy; the ranks only vote, so that requests to stop reach
    # all of them
    vote_only: bool = False
    # True if the copy is restricted to windows (idle intervals of the pipeline)
    paced: bool = False
    # True until the training thread has checked, by the tensors' version counters
    # (``Tensor._version``), that nothing was written since the step boundary (P2). Never True if
    # training waits for the copy, since nothing can be written then.
    unchecked: bool = False
    # Cause why the version will not be committed; None if it still may be. Set at the hand-over if
    # the state could not be captured
    cause: SkipCause | None = None
    stage: Stage = Stage.QUEUED
    # True if the layout does not fit the version's state; the ranks then have to agree on a new
    # layout first
    layout_mismatch: bool = False
    staged: bool = False  # A part is staged on the device and has yet to be drained to the host

    @property
    def holds_training(self) -> bool:
        """Whether the version's copy still reads the live tensors, which must not change
        meanwhile (P2)."""
        return (
            self.cause is None
            and not self.vote_only
            and self.stage in (Stage.QUEUED, Stage.COPYING)
        )

    @property
    def is_over(self) -> bool:
        """Whether the version is committed or abandoned on this rank."""
        return self.stage in (Stage.COMMITTED, Stage.ABANDONED)


class Task(Enum):
    """Tasks of the worker thread. The comments name the events by which each task ends;
    :class:`ProtocolFailed` ends any task."""

    WAIT = auto()  # Wait for a version, or for the end of the job: `TURN`
    # Copy a version. The worker reports `UNFIT`; or `BEGIN`, `SlotTaken`, `Released`, `COPIED`,
    # in this order; `CopyFailed` may end the task at any point
    COPY = auto()
    VOTE_COPIED = auto()  # Vote on whether all ranks have copied the version: `Voted`
    LAYOUT = auto()  # Agree on a new layout: `LAID_OUT`
    # Exchange bytes with peers and seal the slot: `DRAINED` if a part was staged, then `SEALED`
    # or `SealFailed`
    SEAL = auto()
    VOTE_SEALED = auto()  # Vote on whether all ranks have sealed the version: `Voted`
    SWITCH = auto()  # Change the protection between two versions, if requested: `SWITCHED`
    REJOIN = auto()  # Close all connections and connect again: `Rejoined` or `RejoinFailed`
    END = auto()  # End the thread; no more versions are taken


# -- events ----------------------------------------------------------------------------------------


class Signal(Enum):
    """Events without data. The training thread sends the first two, the worker sends the others."""

    # Training has left the fence, where it waits no longer than the time limit (P2); from now on
    # the optimizer changes the tensors
    TENSORS_CHANGE = auto()
    CLOSING = auto()  # The session is being closed
    TURN = auto()  # The worker is free for the next version
    UNFIT = auto()  # The layout does not fit the version's state
    BEGIN = auto()  # The worker is about to read the live tensors
    COPIED = auto()  # Every byte that was not staged has arrived in the slot
    LAID_OUT = auto()  # All ranks have agreed on a layout for the version
    DRAINED = auto()  # The staged part has arrived in the slot, or was dropped
    SEALED = auto()  # The slot is recorded SEALED
    SWITCHED = auto()  # A requested change of protection is done


@dataclass(frozen=True)
class HandedOver:
    version: Version


@dataclass(frozen=True)
class FenceNear:
    """The optimizer is about to write, so copies that have not started are cancelled."""

    # True if only the host has reached the optimizer step; copies may then still start until the
    # device reaches it
    ahead: bool = False


@dataclass(frozen=True)
class TensorsChecked:
    """The training thread has compared torch's write counts of the tensors with those at the
    hand-over.

    Only the training thread can compare them: torch counts a write when the operation returns, so
    another thread could miss a write in progress.
    """

    # Cause that names the written tensors; None if no tensor was written
    cause: SkipCause | None


@dataclass(frozen=True)
class SlotTaken:
    """The worker is about to write the version into this slot."""

    slot: int


@dataclass(frozen=True)
class Released:
    """Training need not wait any more: every byte was copied, or is staged on the device."""

    staged: bool = False


@dataclass(frozen=True)
class CopyFailed:
    cause: SkipCause


@dataclass(frozen=True)
class Voted:
    """Result of a vote of all ranks."""

    ok: bool  # True if every rank voted yes
    relayout: bool = False  # True if at least one rank needs a new layout


@dataclass(frozen=True)
class SealFailed:
    cause: SkipCause


@dataclass(frozen=True)
class ProtocolFailed:
    """This rank or a peer cannot continue with votes and exchanges, because a message or a task
    failed."""

    detail: str


@dataclass(frozen=True)
class Rejoined:
    """All ranks have connected again and exchanged their :class:`RejoinState`."""

    after: VersionId  # Newest version that was handed to the worker on any rank
    committed: VersionId | None  # Newest version that any rank knows to be committed


@dataclass(frozen=True)
class RejoinFailed:
    """The ranks could not connect again."""

    detail: str


Event = (
    Signal
    | HandedOver
    | FenceNear
    | TensorsChecked
    | SlotTaken
    | Released
    | CopyFailed
    | Voted
    | SealFailed
    | ProtocolFailed
    | Rejoined
    | RejoinFailed
)


# -- effects ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EnterGate:
    """Enter the gate, since a paced version was handed over."""

    draining: bool  # True if an older version is still being drained


@dataclass(frozen=True)
class LeaveGate:
    """Leave the gate, since no paced version is left to copy."""


@dataclass(frozen=True)
class DropStaged:
    """Release the staging memory of a version's part that is still on the device."""


@dataclass(frozen=True)
class Commit:
    """Record the slot as COMMITTED and report the commit."""

    slot: int
    label: VersionId


@dataclass(frozen=True)
class Abort:
    """Free the slot of a version that is not committed. The slot's file stays unchanged until
    the slot is written again. If the file is SEALED, it holds the true state of the version's
    step, and a recovery may use it if it finds the bytes of every member.
    """

    slot: int
    label: VersionId


@dataclass(frozen=True)
class GiveUp:
    """Count a version as skipped, and report the cause."""

    label: VersionId
    cause: SkipCause


Effect = EnterGate | LeaveGate | DropStaged | Commit | Abort | GiveUp


# -- how all ranks resume after a version failed on one of them ------------------------------------


@dataclass(frozen=True)
class RejoinState:
    """State of one rank after the ranks have connected again; also used for the common state on
    which they agree."""

    # Newest version that the training thread has handed to the worker. After reconnecting, every
    # rank gives up all uncommitted versions up to the newest one that any rank names here, without
    # a vote. A version id contains the incarnation (the number of the start), because a job that
    # goes back to an older checkpoint repeats steps.
    newest: VersionId
    committed: VersionId | None  # Newest version that the rank knows to be committed; None if none
    # Step after which all ranks stop, if this rank has received the vote that decides it; otherwise
    # None
    stop_step: int | None


def resume_from(standings: Sequence[RejoinState]) -> RejoinState:
    """Combine the states of all ranks into the common state. Pure: every rank gets the same
    result."""
    newest = max(s.newest for s in standings)
    committed = max((s.committed for s in standings if s.committed is not None), default=None)
    stop_step = min((s.stop_step for s in standings if s.stop_step is not None), default=None)
    # If some rank may have passed the agreed step already, drop it; the request to stop is voted on
    # again.
    late = stop_step is not None and stop_step <= newest.step + 1
    return RejoinState(newest, committed, None if late else stop_step)


# -- slots: which arenas of a rank may be written, and which must stay (P3) ------------------------


@dataclass(frozen=True)
class Slot:
    """State of one slot in this incarnation, as far as this rank knows."""

    state: ArenaState = ArenaState.EMPTY
    label: VersionId | None = None

    @property
    def is_open(self) -> bool:
        """Whether the slot holds a version that is neither committed nor aborted."""
        return self.state in (ArenaState.WRITING, ArenaState.SEALED)


@dataclass(frozen=True)
class Slots:
    """All slots of a rank. Arenas written by earlier incarnations count as EMPTY."""

    # State of every slot, by number. With only one slot, no version can follow the first commit.
    held: tuple[Slot, ...]
    # Slots that hold the version being recovered, as (number, version); empty once a newer version
    # is committed. Numbers beyond the end of ``held`` are slots of an earlier incarnation, which
    # had more slots.
    frozen: tuple[tuple[int, VersionId], ...] = ()

    @classmethod
    def make(cls, count: int, frozen: Mapping[int, VersionId] | None = None) -> Slots:
        """Make ``count`` empty slots. Raises ValueError if ``count`` is less than 1."""
        if count < 1:
            raise ValueError(
                f"{count} slots; expected at least 1 (2 keep a version while the next is written)"
            )
        return cls((Slot(),) * count, tuple(sorted((frozen or {}).items())))

    @property
    def committed_slot(self) -> int | None:
        """Slot of the newest version that this rank knows to be committed."""
        done = [i for i, slot in enumerate(self.held) if slot.state is ArenaState.COMMITTED]
        return max(done, key=self._age, default=None)

    @property
    def committed_label(self) -> VersionId | None:
        """Newest version of this incarnation that this rank knows to be committed."""
        newest = self.committed_slot
        return None if newest is None else self.held[newest].label

    @property
    def open_slot(self) -> int | None:
        """Slot of the version in progress, of which there is at most one; None without one."""
        return next((i for i, slot in enumerate(self.held) if slot.is_open), None)

    @property
    def kept(self) -> frozenset[int]:
        """Slots whose versions a recovery may need, and which therefore must not be written
        (P3)."""
        unknown = {i for i, slot in enumerate(self.held) if slot.is_open}
        newest = self.committed_slot
        return frozenset({*unknown, *dict(self.frozen), *(() if newest is None else (newest,))})

    def choose(self, pinned: Collection[int] = ()) -> int | None:
        """Choose the slot to write next: an empty one or, if there is none, the one with the
        oldest version.

        Args:
            pinned: slots that must not be chosen, because a reader holds them or they are out of
                use.

        Returns:
            The slot; None if this version has to be skipped.
        """
        free = [i for i in range(len(self.held)) if i not in self.kept and i not in pinned]
        return min(free, key=self._age, default=None)

    def slots_to_free(self, count: int, unused: Collection[int] = ()) -> frozenset[int]:
        """Choose slots whose memory can be freed, so that about ``count`` slots remain.

        The slots in :attr:`kept` always remain, and at least one other slot.

        Args:
            count: number of slots to use.
            unused: slots that were freed before, which are preferred.
        """
        kept = self.kept & {*range(len(self.held))}
        order = sorted(
            range(len(self.held)), key=lambda slot: (slot not in kept, slot in unused, slot)
        )
        return frozenset(order[max(count, len(kept) + 1) :])

    def began(self, slot: int, label: VersionId) -> Slots:
        """Record ``slot`` as WRITING the version ``label``. Raises ValueError if :meth:`choose`
        would not allow this slot."""
        if self.choose(set(range(len(self.held))) - {slot}) != slot:
            raise ValueError(
                f"slot {slot} must not be written for {label}: it holds {self._describe(slot)}"
            )
        return self._with(slot, Slot(ArenaState.WRITING, label))

    def sealed(self, slot: int) -> Slots:
        """Record ``slot`` as SEALED. Peers may commit the version from now on, so the slot is
        kept until this rank knows the result of the vote, possibly forever."""
        return self._move(slot, ArenaState.WRITING, ArenaState.SEALED)

    def committed(self, slot: int) -> Slots:
        """Record ``slot`` as COMMITTED, since all ranks have sealed it. From now on older
        versions may be overwritten, including those in frozen slots."""
        return replace(self._move(slot, ArenaState.SEALED, ArenaState.COMMITTED), frozen=())

    def aborted(self, slot: int) -> Slots:
        """Record ``slot`` as empty, after a vote said no or before this rank has voted.

        Not allowed while the result of the vote is unknown, since peers may have committed the
        version.
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

    def _age(self, slot: int) -> VersionId:
        return self.held[slot].label or NONE_YET

    def _describe(self, slot: int) -> str:
        if slot in dict(self.frozen):
            return f"{dict(self.frozen)[slot]}, which is being recovered"
        return f"{self.held[slot].label or 'nothing'}, {self.held[slot].state}"


# -- one rank -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankState:
    """State of one rank: its slots, and the versions in progress."""

    slots: Slots  # State of the rank's slots
    # Versions that were handed over and have not ended, oldest first. The worker works on the
    # first one.
    versions: tuple[Version, ...] = ()
    task: Task = Task.WAIT  # Current task of the worker
    newest: VersionId = NONE_YET  # Newest version that was handed over
    # All versions up to this one were given up by all ranks when they reconnected
    after: VersionId = NONE_YET
    # True once the host has reached the optimizer step. When the device has reached it too,
    # optional versions no longer start, only those marked ``required``.
    fence_near: bool = False
    # True if no further version is accepted; the worker ends after those in progress
    closing: bool = False
    # Reason why this rank takes no more versions; None while it takes them
    broken: str | None = None

    @property
    def head(self) -> Version:
        """The version on which the worker works."""
        return self.versions[0]

    @property
    def accepts(self) -> bool:
        """Whether new versions are accepted."""
        return self.task is not Task.END and not self.closing

    @property
    def holds_training(self) -> bool:
        """Whether the copy of some version still reads the live tensors."""
        return any(version.holds_training for version in self.versions)

    @property
    def may_begin(self) -> bool:
        """Whether there is a version whose copy has not started, and which is lost if the tensors
        change first."""
        return any(version.holds_training and _not_begun(version) for version in self.versions)

    @property
    def waits_in_line(self) -> bool:
        """Whether a version that has not started waits for an older version to end."""
        return any(version.holds_training and _not_begun(version) for version in self.versions[1:])

    @property
    def unchecked(self) -> bool:
        """Whether some copied version still needs the training thread's comparison of write
        counts."""
        return any(v.unchecked and v.cause is None and not v.holds_training for v in self.versions)

    @property
    def staged(self) -> bool:
        """Whether a part of some version is staged on the device."""
        return any(version.staged for version in self.versions)

    @property
    def votes_yes(self) -> bool:
        """Whether this rank votes yes in the current vote."""
        due = Stage.RELEASED if self.task is Task.VOTE_COPIED else Stage.SEALED
        return self.head.stage is due and self.head.cause is None

    @property
    def wants_layout(self) -> bool:
        """Whether this rank requests a new layout in the current vote."""
        return (
            self.task is Task.VOTE_COPIED and self.head.layout_mismatch and self.head.cause is None
        )


NOT_STARTED = SkipCause("not started before the next optimizer step")
OVERRUN = SkipCause("the next optimizer step did not wait for the copy any longer")
LAID_OUT_ANEW = SkipCause("the layout changed")
WRITTEN = "written while it was copied"
PEER_SKIPPED = SkipCause("a peer skipped it")
PEER_NOT_SEALED = SkipCause("a peer could not seal it")

Next = tuple[RankState, tuple[Effect, ...]]

# -- helpers of transitions ------------------------------------------------------------------------


def _check(head: Version, fits: bool) -> None:
    if not fits:
        raise ValueError(f"this cannot happen to {head}")


def _head(state: RankState, **changes: Any) -> RankState:
    """Return the state with changed fields in the first version."""
    return replace(state, versions=(replace(state.head, **changes), *state.versions[1:]))


def _first_task(head: Version) -> Task:
    return Task.VOTE_COPIED if head.vote_only or head.cause is not None else Task.COPY


def _freed(state: RankState) -> RankState:
    """Return the state in which the worker has no task: WAIT, or END if the rank is closing and no
    version is left."""
    ends = state.closing and not state.versions
    return replace(state, task=Task.END if ends else Task.WAIT)


def _not_begun(version: Version) -> bool:
    return version.stage is Stage.QUEUED and not version.required


def _mark_failed(state: RankState, which: Callable[[Version], bool], cause: SkipCause) -> RankState:
    """Return the state with ``cause`` set in all selected versions that have no cause yet; this
    rank will vote no on them."""

    def doomed(version: Version) -> bool:
        return version.cause is None and not version.vote_only and which(version)

    return replace(
        state, versions=tuple(replace(v, cause=cause) if doomed(v) else v for v in state.versions)
    )


def _take_back(state: RankState) -> Next:
    """Drop the staged part of the first version and free its slot. Only allowed before this rank
    has voted "sealed", or after the ranks have voted no."""
    effects: tuple[Effect, ...] = ()
    if state.head.staged:
        effects = (DropStaged(),)
        state = _head(state, staged=False)
    slot = state.slots.open_slot
    if slot is None:
        return state, effects
    return replace(state, slots=state.slots.aborted(slot)), (
        *effects,
        Abort(slot, state.head.label),
    )


def _given_up(version: Version, cause: SkipCause) -> tuple[Effect, ...]:
    """Return the effect of giving up a version. There is none for a vote-only version, which has
    no bytes to lose."""
    return () if version.vote_only else (GiveUp(version.label, cause),)


def _abandon(state: RankState, cause: SkipCause) -> Next:
    """Abandon the first version, since no rank commits it."""
    state, effects = _take_back(state)
    abandoned = _head(state, stage=Stage.ABANDONED, cause=None if state.head.vote_only else cause)
    return abandoned, (*effects, *_leave_gate(state), *_given_up(state.head, cause))


def _leave_gate(state: RankState) -> tuple[Effect, ...]:
    """Return the effect of leaving the gate after the first version's last copy; none if a later
    paced version waits."""
    later = any(v.paced and v.cause is None for v in state.versions[1:])
    return (LeaveGate(),) if state.head.paced and not later else ()


# -- transitions -----------------------------------------------------------------------------------


def step(state: RankState, event: Event) -> Next:  # noqa: PLR0911, PLR0912 -- all that may happen, one by one
    """Return the state after an event.

    Returns:
        The next state, and the effects to carry out, in this order.

    Raises:
        ValueError: the event cannot happen during the worker's current task.
    """
    match state.task, event:
        # Events from the training thread, which are allowed during every task of the worker.
        case _, HandedOver(version):
            return _handed_over(state, version)
        case _, FenceNear(ahead):
            near = state if ahead else _mark_failed(state, _not_begun, NOT_STARTED)
            return replace(near, fence_near=True), ()
        case _, TensorsChecked(cause):
            return _checked(state, cause)
        # P2: give up versions whose copies still read the tensors
        case _, Signal.TENSORS_CHANGE:
            late = _mark_failed(state, lambda version: version.holds_training, OVERRUN)
            return replace(late, fence_near=False), ()
        case _, Signal.CLOSING:
            closing = replace(state, closing=True)
            return (_freed(closing) if state.task is Task.WAIT else closing), ()
        # Events from the worker.
        case Task.WAIT, Signal.TURN:
            return _turn(state)
        case Task.COPY, Signal.UNFIT:
            state, effects = _take_back(state)
            return replace(_head(state, layout_mismatch=True), task=Task.VOTE_COPIED), effects
        # Cancelled at the fence (P2)
        case Task.COPY, Signal.BEGIN if state.head.cause is not None:
            return replace(state, task=Task.VOTE_COPIED), _leave_gate(state)
        case Task.COPY, Signal.BEGIN:
            return _head(state, stage=Stage.COPYING), ()
        case Task.COPY, SlotTaken(slot):
            _check(state.head, state.head.stage is Stage.COPYING)
            return replace(state, slots=state.slots.began(slot, state.head.label)), ()
        case Task.COPY, Released(staged):
            _check(
                state.head, state.head.stage is Stage.COPYING and state.slots.open_slot is not None
            )
            return _head(state, stage=Stage.RELEASED, staged=staged), ()
        case Task.COPY, Signal.COPIED:
            _check(state.head, state.head.stage is Stage.RELEASED)
            return replace(state, task=Task.VOTE_COPIED), () if state.head.staged else _leave_gate(
                state
            )
        case Task.COPY, CopyFailed(cause):
            state, effects = _take_back(state)
            failed = _head(state, cause=state.head.cause or cause)
            return replace(failed, task=Task.VOTE_COPIED), (*effects, *_leave_gate(state))
        case Task.VOTE_COPIED, Voted(ok, relayout):
            return _voted(state, ok, relayout)
        case Task.LAYOUT, Signal.LAID_OUT:
            known = _head(state, layout_mismatch=False)
            return replace(known, task=_first_task(known.head)), ()
        case Task.SEAL, Signal.DRAINED:
            return _head(state, staged=False), (DropStaged(), *_leave_gate(state))
        case Task.SEAL, Signal.SEALED:
            return _sealed(state)
        case Task.SEAL, SealFailed(cause):
            return replace(_head(state, cause=state.head.cause or cause), task=Task.VOTE_SEALED), ()
        case Task.VOTE_SEALED, Voted(ok, _):
            return _decided(state, ok)
        case Task.SWITCH, Signal.SWITCHED:
            return _freed(replace(state, versions=state.versions[1:])), ()
        case _, ProtocolFailed(detail):
            return _broke(state, detail)
        case Task.REJOIN, Rejoined(after, committed):
            return _met(state, after, committed)
        case Task.REJOIN, RejoinFailed(detail):
            broken = SkipCause("broken", detail)
            given_up = tuple(
                effect for version in state.versions for effect in _given_up(version, broken)
            )
            return replace(state, versions=(), task=Task.END, broken=detail), given_up
    raise ValueError(f"{event} while the worker is at {state.task}")


def _handed_over(state: RankState, version: Version) -> Next:
    if not state.accepts:
        cause = SkipCause("closed") if state.broken is None else SkipCause("broken", state.broken)
        return state, _given_up(version, cause)
    if state.task is Task.REJOIN:
        version = replace(version, cause=version.cause or SkipCause("interrupted"))
    effects = (EnterGate(state.staged),) if version.paced and version.cause is None else ()
    return replace(state, versions=(*state.versions, version), newest=version.label), effects


def _turn(state: RankState) -> Next:
    """Begin the next version, on which every rank votes (P6). A version that all ranks gave up
    when they reconnected is abandoned without a vote."""
    if not state.versions:
        return _freed(state), ()
    if state.head.label <= state.after:
        state, effects = _abandon(state, SkipCause("interrupted"))
        return _freed(replace(state, versions=state.versions[1:])), effects
    return replace(state, task=_first_task(state.head)), ()


def _voted(state: RankState, ok: bool, relayout: bool) -> Next:
    """Handle the result of the first vote."""
    head = state.head
    if relayout:
        effects: tuple[Effect, ...] = ()
        if head.stage is Stage.RELEASED:
            # Training has been released, so the tensors may have changed, and the version cannot be
            # copied again with another layout (P2).
            state, effects = _take_back(_head(state, cause=head.cause or LAID_OUT_ANEW))
            effects = (*effects, *_leave_gate(state))
        return replace(state, task=Task.LAYOUT), effects
    if head.vote_only:
        return replace(_head(state, stage=Stage.ABANDONED), task=Task.SWITCH), ()
    if not ok:
        state, effects = _abandon(state, head.cause or PEER_SKIPPED)
        return replace(state, task=Task.SWITCH), effects
    # Take part in the exchange even if the version has failed since this rank voted: peers wait
    # for this rank's blocks.
    _check(head, head.stage is Stage.RELEASED)
    return replace(state, task=Task.SEAL), ()


def _checked(state: RankState, cause: SkipCause | None) -> Next:
    """Handle a comparison of write counts: completely copied versions now count as checked or,
    with a ``cause``, as failed. Versions that are still being copied stay unchecked."""

    def checked(version: Version) -> Version:
        if not version.unchecked or version.cause is not None:
            return version
        if cause is not None:
            return replace(version, cause=cause)
        return replace(version, unchecked=version.holds_training)

    return replace(state, versions=tuple(map(checked, state.versions))), ()


def _sealed(state: RankState) -> Next:
    head, slot = state.head, state.slots.open_slot
    _check(
        head,
        head.stage is Stage.RELEASED and head.cause is None and not (head.staged or head.unchecked),
    )
    assert slot is not None  # The version was copied into this slot
    sealed = replace(state, slots=state.slots.sealed(slot))
    return replace(_head(sealed, stage=Stage.SEALED), task=Task.VOTE_SEALED), ()


def _decided(state: RankState, ok: bool) -> Next:
    """Handle the result of the second vote, which commits the version or abandons it."""
    head, slot = state.head, state.slots.open_slot
    if not ok:
        state, effects = _abandon(state, head.cause or PEER_NOT_SEALED)
        return replace(state, task=Task.SWITCH), effects
    _check(head, state.votes_yes)
    assert slot is not None  # The version is sealed in this slot
    committed = replace(_head(state, stage=Stage.COMMITTED), slots=state.slots.committed(slot))
    return replace(committed, task=Task.SWITCH), (Commit(slot, head.label),)


def _broke(state: RankState, detail: str) -> Next:
    """Handle a failure of the protocol: give up all versions until the ranks have connected
    again.

    A sealed slot is kept, because a peer may have received the commit (P3).
    """
    if state.task in (Task.REJOIN, Task.END):
        return state, ()
    effects: tuple[Effect, ...] = ()
    paced = any(version.paced for version in state.versions)
    if state.versions and state.task is not Task.WAIT:
        if state.staged:
            effects = (DropStaged(),)
        if not state.head.is_over:
            effects = (*effects, *_given_up(state.head, SkipCause("interrupted", detail)))
        state = replace(state, versions=state.versions[1:])
    doomed = _mark_failed(state, lambda version: True, SkipCause("interrupted"))
    return replace(doomed, task=Task.REJOIN), (*effects, LeaveGate()) if paced else effects


def _met(state: RankState, after: VersionId, committed: VersionId | None) -> Next:
    """Handle that all ranks have connected again. If no rank has received the commit of a version,
    every rank aborts it. This is safe: if a rank that received the commit were gone, the ranks
    could not all connect again (:class:`RejoinFailed`)."""
    state, slot = replace(state, after=after), state.slots.open_slot
    if slot is None:
        return _freed(state), ()
    label = state.slots.held[slot].label
    assert label is not None  # An open slot has a version
    if label == committed:
        # This rank has sealed the version, and a peer has received the commit.
        return _freed(replace(state, slots=state.slots.committed(slot))), (Commit(slot, label),)
    return _freed(replace(state, slots=state.slots.aborted(slot))), (Abort(slot, label),)
