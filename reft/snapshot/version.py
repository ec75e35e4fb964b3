"""A version's life on one rank, from the hand-over to its end, as a pure transition system.

    queued ─► copying ─► released ─► (drained) ─► sealed ─► committed
       └─────────┴───────────┴────────────┴──────────┴────► abandoned (cause)

``step(state, event)`` gives the next state and the effects to carry out. In production the training
thread and the snapshot worker drive it (:mod:`reft.snapshot.worker`). The model in
tests/snapshot/version_model.py drives the same function through every order of events, with an
error at every task and every effect and a crash after every transition. Nothing here reads a clock,
a file or the network. First come the words (versions, tasks, events, effects) and the slots, then
the rules that connect them.

All ranks take the same versions in the same order, one at a time, and are in lock step at two
votes:

1. every rank that is able copies the version into a slot; vote "copied";
2. if all did: exchange with the ring peers, hash, seal the slot; vote "sealed" (the prepare phase);
3. if all did, the version *is committed* at that moment; every rank learns it at its own time.

A slot is seen from two sides. :class:`Slots` is what this rank knows, and says what it may write.
The header of the arena file is what a recovery finds after a crash, on this node or a peer's. They
differ once a version is given up:

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
  :meth:`Slots.choose` alone says which one may be written, :meth:`Slots.given_up` which may go.
- **The permit to copy** (the gate of the windows) is held from the hand-over of a paced version
  until nothing of it is left to copy: effects :class:`EnterGate` and :class:`LeaveGate`.
- **The cause** why a version is not committed is set once, here, and told once (:class:`GiveUp`).

How the promises are kept:

- **P2** A version that is not wholly copied when the tensors change (:attr:`Signal.TENSORS_CHANGE`)
  gets a cause, at the latest then, and no rank votes for a version that has a cause: what is
  committed was read from one state. A script may write tensors between the boundary and that
  signal. So a slot is recorded SEALED, which a recovery would trust, only after the training thread
  has compared write counts (:class:`TensorsChecked`), here and on the ranks whose bytes it keeps.
- **P3** :meth:`Slots.choose` never gives the slot of the newest version known here to be committed,
  of one whose fate is not known, or of what is being recovered. A rank retires a version only when
  it has *learned* of a newer commit, at which point all ranks have sealed the newer one.
- **P6** Every version that is handed over is voted on by every rank, whatever became of it. Whoever
  cannot go on (:class:`ProtocolFailed`) leaves its peers' groups at once, so that they hear of it,
  and meets them in new ones (:attr:`Task.REJOIN`); a version that all ranks gave up while they met
  needs no vote. Training waits only for :attr:`Version.holds_training`, and its fence is bounded:
  :attr:`Signal.TENSORS_CHANGE` is always allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from reft.grid import VersionId
from reft.memory.header import ArenaState

NONE_YET = VersionId(-1, -1)  # Older than every version


class Stage(Enum):
    """How far a version is on this rank."""

    QUEUED = auto()
    COPYING = auto()
    RELEASED = auto()  # Training is released: all was read, and is in the slot or staged
    SEALED = auto()
    COMMITTED = auto()
    ABANDONED = auto()


@dataclass(frozen=True)
class SkipCause:
    """Why a version is not committed: a kind, by which it is counted, and what there is to say."""

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind

    @classmethod
    def of(cls, error: Exception) -> SkipCause:
        """An error is counted by its type."""
        return cls(type(error).__name__, str(error))


@dataclass(frozen=True)
class Version:
    """One version on this rank."""

    label: VersionId  # its name
    # copied whatever it takes: the fence waits until it is (restore, last version before an exit)
    required: bool = False
    # nothing to take after this step; the ranks only vote, so that what travels in votes gets
    # around
    vote_only: bool = False
    paced: bool = False  # its copy keeps to the windows
    # the training thread has not yet compared what was copied with the state of the boundary (P2);
    # False where training waits for the version and cannot write meanwhile
    unchecked: bool = False
    # why it is not committed; set at the hand-over where the state could not be captured
    cause: SkipCause | None = None
    stage: Stage = Stage.QUEUED  # how far it is
    layout_mismatch: bool = (
        False  # the layout was not made for its state; the ranks have to agree on another one first
    )
    staged: bool = False  # a part of it is kept on the device, to be drained

    @property
    def holds_training(self) -> bool:
        """Whether it still needs the live tensors as they are: they must not change meanwhile
        (P2)."""
        return (
            self.cause is None
            and not self.vote_only
            and self.stage in (Stage.QUEUED, Stage.COPYING)
        )

    @property
    def is_over(self) -> bool:
        """Whether it is known what became of it."""
        return self.stage in (Stage.COMMITTED, Stage.ABANDONED)


class Task(Enum):
    """What the worker thread does. Each ends with one of the events named, or with
    :class:`ProtocolFailed`."""

    WAIT = auto()  # For a version or the end: `TURN`
    # `UNFIT`; or `BEGIN`, `SlotTaken`, `Released` and then `COPIED`; or, at any point, `CopyFailed`
    COPY = auto()
    VOTE_COPIED = auto()  # `Voted`
    LAYOUT = auto()  # Agree on a layout anew: `LAID_OUT`
    SEAL = auto()  # `DRAINED` if a part was staged, then `SEALED` or `SealFailed`
    VOTE_SEALED = auto()  # `Voted`
    SWITCH = auto()  # Between two versions, change the protection if the votes say so: `SWITCHED`
    REJOIN = auto()  # Leave the groups and meet all ranks in new ones: `Rejoined` or `RejoinFailed`
    END = auto()  # No version is taken any more


# -- events ----------------------------------------------------------------------------------------


class Signal(Enum):
    """Those without content: of the training thread, then of the worker."""

    # The optimizer writes from here on: the fence has waited, as long as it may (P2)
    TENSORS_CHANGE = auto()
    CLOSING = auto()  # The job ends
    TURN = auto()  # The worker is free
    UNFIT = auto()  # The layout is not made for this state
    BEGIN = auto()  # The worker would begin to read the live tensors
    COPIED = auto()  # What was not staged has arrived in the slot
    LAID_OUT = auto()  # All ranks have agreed on a layout for the version
    DRAINED = auto()  # Nothing is kept on the device any more, whether or not it arrived
    SEALED = auto()  # The slot is recorded SEALED
    SWITCHED = auto()  # What was due between two versions is done


@dataclass(frozen=True)
class HandedOver:
    version: Version


@dataclass(frozen=True)
class FenceNear:
    """The optimizer is about to write: what has not begun is not begun any more; ``ahead``: the
    host has come there, its device may not have, and versions may begin until it has."""

    ahead: bool = False


@dataclass(frozen=True)
class TensorsChecked:
    """The training thread has looked which tensors were written since the hand-over. Whatever it
    wrote is counted by now: torch counts a write when the operation returns, so a worker thread
    could not tell."""

    cause: SkipCause | None  # names what was written; None if nothing was


@dataclass(frozen=True)
class SlotTaken:
    """The version will be written there."""

    slot: int


@dataclass(frozen=True)
class Released:
    """Training may go on: all was copied, or is kept on the device (``staged``)."""

    staged: bool = False


@dataclass(frozen=True)
class CopyFailed:
    cause: SkipCause


@dataclass(frozen=True)
class Voted:
    """What all ranks said together."""

    ok: bool  # all ranks approved
    relayout: bool = False  # a rank wants another layout


@dataclass(frozen=True)
class SealFailed:
    cause: SkipCause


@dataclass(frozen=True)
class ProtocolFailed:
    """This rank, or a peer, cannot go on: it has lost its place in the protocol."""

    detail: str


@dataclass(frozen=True)
class Rejoined:
    """All ranks are together again and have told what they know."""

    after: VersionId  # the newest version that any rank was handed
    committed: VersionId | None  # the newest version that any rank knows to be committed


@dataclass(frozen=True)
class RejoinFailed:
    """The ranks did not come together again."""

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
    """A paced version was handed over; ``draining``: while an older one is drained."""

    draining: bool


@dataclass(frozen=True)
class LeaveGate:
    """Nothing paced is left to copy."""


@dataclass(frozen=True)
class DropStaged:
    """Forget what is kept on the device."""


@dataclass(frozen=True)
class Commit:
    """Note in the slot that its version is committed, and tell of it."""

    slot: int
    label: VersionId


@dataclass(frozen=True)
class Abort:
    """Free the slot for writing. Its file stays as it is until then. If it is SEALED, it holds the
    true state of that step, and a recovery may use it if it finds the bytes of every member."""

    slot: int
    label: VersionId


@dataclass(frozen=True)
class GiveUp:
    """Count the version as skipped, and tell why."""

    label: VersionId
    cause: SkipCause


Effect = EnterGate | LeaveGate | DropStaged | Commit | Abort | GiveUp


# -- where all ranks go on after a version broke off on one of them --------------------------------


@dataclass(frozen=True)
class RejoinState:
    """What one rank knows when the ranks have come together again; and where all of them go on."""

    # last version that was handed over. Versions up to the last one of any rank are given up
    # everywhere, without a vote; not by the step alone: a job that goes back to an older checkpoint
    # takes its steps again, in a new incarnation
    newest: VersionId
    committed: VersionId | None  # newest version that it knows to be committed
    stop_step: int | None  # after which it heard that all stop; None: it has heard of none


def resume_from(standings: Sequence[RejoinState]) -> RejoinState:
    """What all ranks make of what each has told. Pure: equal everywhere."""
    newest = max(s.newest for s in standings)
    committed = max((s.committed for s in standings if s.committed is not None), default=None)
    stop_step = min((s.stop_step for s in standings if s.stop_step is not None), default=None)
    # A step that some rank may have passed is no longer one to stop at: the request is voted on
    # again.
    late = stop_step is not None and stop_step <= newest.step + 1
    return RejoinState(newest, committed, None if late else stop_step)


# -- what a rank knows about its arenas: which may be written, and which must stay (P3) ------------


@dataclass(frozen=True)
class Slot:
    """What a rank knows about one of its arenas in this incarnation."""

    state: ArenaState = ArenaState.EMPTY
    label: VersionId | None = None

    @property
    def is_open(self) -> bool:
        """Whether its version's fate is not known."""
        return self.state in (ArenaState.WRITING, ArenaState.SEALED)


@dataclass(frozen=True)
class Slots:
    """Which of a rank's arenas may be written. Those written by earlier incarnations count as
    EMPTY."""

    # every slot. With one slot, nothing can be written once a version is committed.
    held: tuple[Slot, ...]
    # slots that hold the version being recovered, until a newer one is committed. May name slots
    # beyond those held, left by an earlier incarnation that had more.
    frozen: tuple[tuple[int, VersionId], ...] = ()

    @classmethod
    def make(cls, count: int, frozen: Mapping[int, VersionId] | None = None) -> Slots:
        """Nothing is written yet."""
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
    def committed_label(self) -> VersionId | None:
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
        """Slot to write next: an empty one, else the one with the oldest version; None: this
        version has to be skipped. ``pinned``: slots that a reader holds, or that must not be used
        for another reason."""
        free = [i for i in range(len(self.held)) if i not in self.kept and i not in pinned]
        return min(free, key=self._age, default=None)

    def given_up(self, count: int, unused: Collection[int] = ()) -> frozenset[int]:
        """Slots whose memory is given back where ``count`` versions are to be held: none that is
        kept, and one that may be written always stays; ``unused`` ones, given up before, rather
        than one that exists."""
        kept = self.kept & {*range(len(self.held))}
        order = sorted(
            range(len(self.held)), key=lambda slot: (slot not in kept, slot in unused, slot)
        )
        return frozenset(order[max(count, len(kept) + 1) :])

    def began(self, slot: int, label: VersionId) -> Slots:
        """``slot`` is to be recorded WRITING. Raises ValueError if :meth:`choose` would not allow
        it."""
        if self.choose(set(range(len(self.held))) - {slot}) != slot:
            raise ValueError(
                f"slot {slot} must not be written for {label}: it holds {self._describe(slot)}"
            )
        return self._with(slot, Slot(ArenaState.WRITING, label))

    def sealed(self, slot: int) -> Slots:
        """``slot`` is recorded SEALED. From here on others may commit it: it stays until the result
        of the vote is known, also if it never is."""
        return self._move(slot, ArenaState.WRITING, ArenaState.SEALED)

    def committed(self, slot: int) -> Slots:
        """All ranks sealed the version: what is older may be overwritten, frozen slots included."""
        return replace(self._move(slot, ArenaState.SEALED, ArenaState.COMMITTED), frozen=())

    def aborted(self, slot: int) -> Slots:
        """A vote said no, or this rank gave the version up before it voted: the slot is free. Not
        for a vote whose result was not learned: others may have committed the version."""
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
    """One rank."""

    slots: Slots  # its arenas
    # those handed over whose end is not known, oldest first. The worker is at the first one.
    versions: tuple[Version, ...] = ()
    task: Task = Task.WAIT  # what the worker does
    newest: VersionId = NONE_YET  # the last version that was handed over
    after: VersionId = NONE_YET  # versions up to this one were given up by all ranks when they met
    # the optimizer is about to write. Where the device is there too, no version begins to be
    # copied, unless it must.
    fence_near: bool = False
    closing: bool = False  # no version is taken any more once those handed over are through
    broken: str | None = None  # why no version is taken any more; None while they are

    @property
    def head(self) -> Version:
        """The version that the worker is at."""
        return self.versions[0]

    @property
    def accepts(self) -> bool:
        """Whether versions are taken."""
        return self.task is not Task.END and not self.closing

    @property
    def holds_training(self) -> bool:
        """Whether some version still needs the live tensors as they are."""
        return any(version.holds_training for version in self.versions)

    @property
    def may_begin(self) -> bool:
        """Whether some version is lost if it has not begun before the tensors change."""
        return any(version.holds_training and _not_begun(version) for version in self.versions)

    @property
    def waits_in_line(self) -> bool:
        """Whether the worker is busy with an older version than one that has not begun."""
        return any(version.holds_training and _not_begun(version) for version in self.versions[1:])

    @property
    def unchecked(self) -> bool:
        """Whether some version is copied, and waits for the training thread to compare its
        tensors."""
        return any(v.unchecked and v.cause is None and not v.holds_training for v in self.versions)

    @property
    def staged(self) -> bool:
        """Whether a part of some version is kept on the device."""
        return any(version.staged for version in self.versions)

    @property
    def votes_yes(self) -> bool:
        """What this rank says in the vote that is due."""
        due = Stage.RELEASED if self.task is Task.VOTE_COPIED else Stage.SEALED
        return self.head.stage is due and self.head.cause is None

    @property
    def wants_layout(self) -> bool:
        """Whether this rank says in the vote that the layout has to be agreed anew."""
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

# -- parts of transitions --------------------------------------------------------------------------


def _check(head: Version, fits: bool) -> None:
    if not fits:
        raise ValueError(f"this cannot happen to {head}")


def _head(state: RankState, **changes: Any) -> RankState:
    """The first version changes."""
    return replace(state, versions=(replace(state.head, **changes), *state.versions[1:]))


def _first_task(head: Version) -> Task:
    return Task.VOTE_COPIED if head.vote_only or head.cause is not None else Task.COPY


def _freed(state: RankState) -> RankState:
    """The worker has nothing to do."""
    ends = state.closing and not state.versions
    return replace(state, task=Task.END if ends else Task.WAIT)


def _not_begun(version: Version) -> bool:
    return version.stage is Stage.QUEUED and not version.required


def _mark_failed(state: RankState, which: Callable[[Version], bool], cause: SkipCause) -> RankState:
    """Give those versions a cause that have none; they are voted down when it is their turn."""

    def doomed(version: Version) -> bool:
        return version.cause is None and not version.vote_only and which(version)

    return replace(
        state, versions=tuple(replace(v, cause=cause) if doomed(v) else v for v in state.versions)
    )


def _take_back(state: RankState) -> Next:
    """Nothing of the first version is kept; before any vote for it as sealed, or after one that
    said no."""
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
    """Nothing is lost with an idle version: there was nothing to take."""
    return () if version.vote_only else (GiveUp(version.label, cause),)


def _abandon(state: RankState, cause: SkipCause) -> Next:
    """Nobody commits the first version."""
    state, effects = _take_back(state)
    abandoned = _head(state, stage=Stage.ABANDONED, cause=None if state.head.vote_only else cause)
    return abandoned, (*effects, *_leave_gate(state), *_given_up(state.head, cause))


def _leave_gate(state: RankState) -> tuple[Effect, ...]:
    """Nothing of the first version is to be copied any more; a later one may have been handed
    over."""
    later = any(v.paced and v.cause is None for v in state.versions[1:])
    return (LeaveGate(),) if state.head.paced and not later else ()


# -- transitions -----------------------------------------------------------------------------------


def step(state: RankState, event: Event) -> Next:  # noqa: PLR0911, PLR0912 -- all that may happen, one by one
    """The next state and what is to be done, in this order. Raises ValueError: the event cannot
    happen while the worker is at its task."""
    match state.task, event:
        # Of the training thread, whatever the worker does.
        case _, HandedOver(version):
            return _handed_over(state, version)
        case _, FenceNear(ahead):
            near = state if ahead else _mark_failed(state, _not_begun, NOT_STARTED)
            return replace(near, fence_near=True), ()
        case _, TensorsChecked(cause):
            return _checked(state, cause)
        case _, Signal.TENSORS_CHANGE:  # P2: what still reads them is lost
            late = _mark_failed(state, lambda version: version.holds_training, OVERRUN)
            return replace(late, fence_near=False), ()
        case _, Signal.CLOSING:
            closing = replace(state, closing=True)
            return (_freed(closing) if state.task is Task.WAIT else closing), ()
        # Of the worker.
        case Task.WAIT, Signal.TURN:
            return _turn(state)
        case Task.COPY, Signal.UNFIT:
            state, effects = _take_back(state)
            return replace(_head(state, layout_mismatch=True), task=Task.VOTE_COPIED), effects
        case Task.COPY, Signal.BEGIN if state.head.cause is not None:  # the fence came first (P2)
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
    """The next version, which every rank votes on (P6); those that all have given up are told
    of."""
    if not state.versions:
        return _freed(state), ()
    if state.head.label <= state.after:
        state, effects = _abandon(state, SkipCause("interrupted"))
        return _freed(replace(state, versions=state.versions[1:])), effects
    return replace(state, task=_first_task(state.head)), ()


def _voted(state: RankState, ok: bool, relayout: bool) -> Next:
    """The result of the first vote."""
    head = state.head
    if relayout:
        effects: tuple[Effect, ...] = ()
        if head.stage is Stage.RELEASED:
            # Training was let go on: these tensors are no longer the state of this step (P2).
            state, effects = _take_back(_head(state, cause=head.cause or LAID_OUT_ANEW))
            effects = (*effects, *_leave_gate(state))
        return replace(state, task=Task.LAYOUT), effects
    if head.vote_only:
        return replace(_head(state, stage=Stage.ABANDONED), task=Task.SWITCH), ()
    if not ok:
        state, effects = _abandon(state, head.cause or PEER_SKIPPED)
        return replace(state, task=Task.SWITCH), effects
    # It may have got a cause since this rank voted; the peers take part in the exchange all the
    # same.
    _check(head, head.stage is Stage.RELEASED)
    return replace(state, task=Task.SEAL), ()


def _checked(state: RankState, cause: SkipCause | None) -> Next:
    """A version that is wholly copied was read from the state of its boundary, or ``cause`` says
    why not."""

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
    assert slot is not None  # the version was copied into it
    sealed = replace(state, slots=state.slots.sealed(slot))
    return replace(_head(sealed, stage=Stage.SEALED), task=Task.VOTE_SEALED), ()


def _decided(state: RankState, ok: bool) -> Next:
    """The result of the second vote: from here on the version is committed, or it never is."""
    head, slot = state.head, state.slots.open_slot
    if not ok:
        state, effects = _abandon(state, head.cause or PEER_NOT_SEALED)
        return replace(state, task=Task.SWITCH), effects
    _check(head, state.votes_yes)
    assert slot is not None  # the version is sealed in it
    committed = replace(_head(state, stage=Stage.COMMITTED), slots=state.slots.committed(slot))
    return replace(committed, task=Task.SWITCH), (Commit(slot, head.label),)


def _broke(state: RankState, detail: str) -> Next:
    """Until the ranks have met, nothing is copied nor waited for. What this rank may have sealed
    stays as it
    is: a peer may have learned that all had (P3)."""
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
    """All ranks are present and have said what they know. If no rank saw the commit of a version,
    none took place, and the version is given up everywhere. (A rank that is gone may have seen it:
    then the ranks cannot meet, see :class:`RejoinFailed`.)"""
    state, slot = replace(state, after=after), state.slots.open_slot
    if slot is None:
        return _freed(state), ()
    label = state.slots.held[slot].label
    assert label is not None  # of the version that is open in it
    if label == committed:
        # This rank had sealed it, and a peer has learned that all had.
        return _freed(replace(state, slots=state.slots.committed(slot))), (Commit(slot, label),)
    return _freed(replace(state, slots=state.slots.aborted(slot))), (Abort(slot, label),)
