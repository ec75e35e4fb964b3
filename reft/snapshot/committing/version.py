"""A version's life on one rank, from the hand-over to its end, as a pure transition system.

    queued ─► copying ─► copied ─► (drained) ─► sealed ─► committed
       └─────────┴──────────┴───────────┴──────────┴────► abandoned (cause)

``step(state, event)`` gives the next state and the effects to carry out. In production the training thread
and the snapshot worker drive it (:mod:`reft.snapshot.handover`, :mod:`reft.snapshot.worker`). The model in
tests/snapshot/version_model.py drives the same function through every order of events, with an error at
every task and every effect and a crash after every transition. Nothing here reads a clock, a file or the
network. The words (versions, tasks, events, effects) are in :mod:`reft.snapshot.committing.protocol`.

All ranks take the same versions in the same order, one at a time, and are in lock step at two votes:

1. a rank that may copies the version into a slot; vote "copied";
2. if all did: exchange with the ring peers, hash, seal the slot; vote "sealed" (the prepare phase);
3. if all did, the version *is committed* at that moment; every rank learns it at its own time.

Who owns what:

- **The live tensors** belong to training, except while :attr:`Version.holds_training`.
- **A slot** belongs to the version that is WRITING or SEALED in it, then to the newest commit.
  :meth:`Slots.choose` alone says which one may be written, :meth:`Slots.given_up` which may go.
- **The permit to copy** (the gate of the windows) is held from the hand-over of a paced version until
  nothing of it is left to copy: effects :class:`EnterGate` and :class:`LeaveGate`.
- **The cause** why a version is not committed is set once, here, and told once (:class:`GiveUp`).

How the promises are kept:

- **P2** A version that is not wholly copied when the tensors change (:class:`TensorsChange`) gets a cause,
  at the latest then, and no rank approves a version that has a cause: what is committed was read from one
  state.
- **P3** :meth:`Slots.choose` never gives the slot of the newest version known here to be committed, of one
  whose fate is not known, or of what is being recovered. A rank retires a version only when it has
  *learned* of a newer commit, at which point all ranks have sealed the newer one.
- **P6** Every version that is handed over is voted on by every rank, whatever became of it. Whoever cannot go
  on (:class:`Broke`) leaves its peers' groups at once, so that they hear of it, and meets them in new ones
  (:attr:`Task.MEET`); a version that all ranks gave up while they met needs no vote. Training waits only for
  :attr:`Version.holds_training`, and its fence is bounded: :class:`TensorsChange` is always allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from reft.naming import Label
from reft.snapshot.committing.protocol import (
    NONE_YET,
    Abort,
    Begin,
    Broke,
    Cause,
    Closing,
    Commit,
    Copied,
    CopyFailed,
    Drained,
    DropStaged,
    Effect,
    EnterGate,
    Event,
    FenceNear,
    GiveUp,
    HandedOver,
    LaidOut,
    LeaveGate,
    Met,
    Parted,
    Released,
    Sealed,
    SealFailed,
    SlotTaken,
    Stage,
    Switched,
    Task,
    TensorsChange,
    Turn,
    Unfit,
    Version,
    Voted,
)
from reft.snapshot.committing.slots import Slots

# -- one rank -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """One rank.

    Attributes:
        slots: its arenas.
        versions: those handed over whose end is not known, oldest first. The worker is at the first one.
        task: what the worker does.
        newest: the last version that was handed over.
        after: versions up to this one were given up by all ranks when they met.
        fence_near: the optimizer is about to write. Where the device is there too, no version begins to be
            copied, unless it must.
        closing: no version is taken any more once those handed over are through.
        broken: why no version is taken any more; None while they are.
    """

    slots: Slots
    versions: tuple[Version, ...] = ()
    task: Task = Task.WAIT
    newest: Label = NONE_YET
    after: Label = NONE_YET
    fence_near: bool = False
    closing: bool = False
    broken: str | None = None

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
    def staged(self) -> bool:
        """Whether a part of some version is kept on the device."""
        return any(version.staged for version in self.versions)

    @property
    def approves(self) -> bool:
        """What this rank says in the vote that is due."""
        due = Stage.COPIED if self.task is Task.VOTE_COPIED else Stage.SEALED
        return self.head.stage is due and self.head.cause is None

    @property
    def wants_layout(self) -> bool:
        """Whether this rank says in the vote that the layout has to be agreed anew."""
        return self.task is Task.VOTE_COPIED and self.head.unfit and self.head.cause is None


NOT_STARTED = Cause("not started before the next optimizer step")
OVERRUN = Cause("the next optimizer step did not wait for the copy any longer")
LAID_OUT_ANEW = Cause("the layout changed")
PEER_SKIPPED = Cause("a peer skipped it")
PEER_NOT_SEALED = Cause("a peer could not seal it")

Next = tuple[State, tuple[Effect, ...]]

# -- parts of transitions --------------------------------------------------------------------------


def _check(head: Version, fits: bool) -> None:
    if not fits:
        raise ValueError(f"this cannot happen to {head}")


def _head(state: State, **changes: Any) -> State:
    """The first version changes."""
    return replace(state, versions=(replace(state.head, **changes), *state.versions[1:]))


def _first_task(head: Version) -> Task:
    return Task.VOTE_COPIED if head.idle or head.cause is not None else Task.COPY


def _freed(state: State) -> State:
    """The worker has nothing to do."""
    ends = state.closing and not state.versions
    return replace(state, task=Task.END if ends else Task.WAIT)


def _not_begun(version: Version) -> bool:
    return version.stage is Stage.QUEUED and not version.must


def _doom(state: State, which: Callable[[Version], bool], cause: Cause) -> State:
    """Give those versions a cause that have none; they are voted down when it is their turn."""

    def doomed(version: Version) -> bool:
        return version.cause is None and not version.idle and which(version)

    return replace(state, versions=tuple(replace(v, cause=cause) if doomed(v) else v for v in state.versions))


def _take_back(state: State) -> Next:
    """Nothing of the first version is kept; before any vote for it as sealed, or after one that said no."""
    effects: tuple[Effect, ...] = ()
    if state.head.staged:
        effects = (DropStaged(),)
        state = _head(state, staged=False)
    slot = state.slots.open_slot
    if slot is None:
        return state, effects
    return replace(state, slots=state.slots.aborted(slot)), (*effects, Abort(slot, state.head.label))


def _given_up(version: Version, cause: Cause) -> tuple[Effect, ...]:
    """Nothing is lost with an idle version: there was nothing to take."""
    return () if version.idle else (GiveUp(version.label, cause),)


def _abandon(state: State, cause: Cause) -> Next:
    """Nobody commits the first version."""
    state, effects = _take_back(state)
    abandoned = _head(state, stage=Stage.ABANDONED, cause=None if state.head.idle else cause)
    return abandoned, (*effects, *_leave_gate(state), *_given_up(state.head, cause))


def _leave_gate(state: State) -> tuple[Effect, ...]:
    """Nothing of the first version is to be copied any more; a later one may have been handed over."""
    later = any(v.paced and v.cause is None for v in state.versions[1:])
    return (LeaveGate(),) if state.head.paced and not later else ()


# -- transitions -----------------------------------------------------------------------------------


def step(state: State, event: Event) -> Next:
    """The next state and what is to be done, in this order.

    Raises:
        ValueError: the event does not fit the state: whoever drives the system is wrong.
    """
    transition, tasks = _TRANSITIONS[type(event)]
    if tasks and state.task not in tasks:
        raise ValueError(f"{event} while the worker is at {state.task}; expected {tasks}")
    return transition(state, event)


# Of the training thread, whatever the worker does.


def _handed_over(state: State, event: HandedOver) -> Next:
    version = event.version
    if not state.accepts:
        cause = Cause("closed") if state.broken is None else Cause("broken", state.broken)
        return state, _given_up(version, cause)
    if state.task is Task.MEET:
        version = replace(version, cause=version.cause or Cause("interrupted"))
    effects = (EnterGate(state.staged),) if version.paced and version.cause is None else ()
    return replace(state, versions=(*state.versions, version), newest=version.label), effects


def _fence_near(state: State, event: FenceNear) -> Next:
    near = state if event.ahead else _doom(state, _not_begun, NOT_STARTED)
    return replace(near, fence_near=True), ()


def _tensors_change(state: State, _: TensorsChange) -> Next:
    """P2: what still reads them is lost."""
    late = _doom(state, lambda version: version.holds_training, OVERRUN)
    return replace(late, fence_near=False), ()


def _closing(state: State, _: Closing) -> Next:
    closing = replace(state, closing=True)
    return (_freed(closing) if state.task is Task.WAIT else closing), ()


# Of the worker.


def _turn(state: State, _: Turn) -> Next:
    """The next version, which every rank votes on (P6); those that all have given up are told of."""
    if not state.versions:
        return _freed(state), ()
    if state.head.label <= state.after:
        state, effects = _abandon(state, Cause("interrupted"))
        return _freed(replace(state, versions=state.versions[1:])), effects
    return replace(state, task=_first_task(state.head)), ()


def _unfit(state: State, _: Unfit) -> Next:
    state, effects = _take_back(state)
    return replace(_head(state, unfit=True), task=Task.VOTE_COPIED), effects


def _begin(state: State, _: Begin) -> Next:
    if state.head.cause is not None:  # the fence came first (P2)
        return replace(state, task=Task.VOTE_COPIED), _leave_gate(state)
    return _head(state, stage=Stage.COPYING), ()


def _slot_taken(state: State, event: SlotTaken) -> Next:
    _check(state.head, state.head.stage is Stage.COPYING)
    return replace(state, slots=state.slots.began(event.slot, state.head.label)), ()


def _released(state: State, event: Released) -> Next:
    _check(state.head, state.head.stage is Stage.COPYING and state.slots.open_slot is not None)
    return _head(state, stage=Stage.COPIED, staged=event.staged), ()


def _copied(state: State, _: Copied) -> Next:
    _check(state.head, state.head.stage is Stage.COPIED)
    effects = () if state.head.staged else _leave_gate(state)
    return replace(state, task=Task.VOTE_COPIED), effects


def _copy_failed(state: State, event: CopyFailed) -> Next:
    state, effects = _take_back(state)
    failed = _head(state, cause=state.head.cause or event.cause)
    return replace(failed, task=Task.VOTE_COPIED), (*effects, *_leave_gate(state))


def _voted(state: State, event: Voted) -> Next:
    if state.task is Task.VOTE_SEALED:
        return _decided(state, event.ok)
    head = state.head
    if event.relayout:
        effects: tuple[Effect, ...] = ()
        if head.stage is Stage.COPIED:
            # Training was let go on: these tensors are no longer the state of this step (P2).
            state, effects = _take_back(_head(state, cause=head.cause or LAID_OUT_ANEW))
            effects = (*effects, *_leave_gate(state))
        return replace(state, task=Task.LAYOUT), effects
    if head.idle:
        return replace(_head(state, stage=Stage.ABANDONED), task=Task.SWITCH), ()
    if not event.ok:
        state, effects = _abandon(state, head.cause or PEER_SKIPPED)
        return replace(state, task=Task.SWITCH), effects
    _check(head, state.approves)
    return replace(state, task=Task.SEAL), ()


def _decided(state: State, ok: bool) -> Next:
    """The result of the second vote: from here on the version is committed, or it never is."""
    head, slot = state.head, state.slots.open_slot
    if not ok:
        state, effects = _abandon(state, head.cause or PEER_NOT_SEALED)
        return replace(state, task=Task.SWITCH), effects
    _check(head, state.approves)
    assert slot is not None  # the version is sealed in it
    committed = replace(_head(state, stage=Stage.COMMITTED), slots=state.slots.committed(slot))
    return replace(committed, task=Task.SWITCH), (Commit(slot, head.label),)


def _laid_out(state: State, _: LaidOut) -> Next:
    known = _head(state, unfit=False)
    return replace(known, task=_first_task(known.head)), ()


def _drained(state: State, _: Drained) -> Next:
    return _head(state, staged=False), (DropStaged(), *_leave_gate(state))


def _sealed(state: State, _: Sealed) -> Next:
    head, slot = state.head, state.slots.open_slot
    _check(head, head.stage is Stage.COPIED and head.cause is None and not head.staged)
    assert slot is not None  # the version was copied into it
    sealed = replace(state, slots=state.slots.sealed(slot))
    return replace(_head(sealed, stage=Stage.SEALED), task=Task.VOTE_SEALED), ()


def _seal_failed(state: State, event: SealFailed) -> Next:
    return replace(_head(state, cause=state.head.cause or event.cause), task=Task.VOTE_SEALED), ()


def _switched(state: State, _: Switched) -> Next:
    return _freed(replace(state, versions=state.versions[1:])), ()


def _broke(state: State, event: Broke) -> Next:
    """Until the ranks have met, nothing is copied nor waited for. What this rank may have sealed stays as it
    is: a peer may have learned that all had (P3)."""
    if state.task in (Task.MEET, Task.END):
        return state, ()
    effects: tuple[Effect, ...] = ()
    paced = any(version.paced for version in state.versions)
    if state.versions and state.task is not Task.WAIT:
        if state.staged:
            effects = (DropStaged(),)
        if not state.head.is_over:
            effects = (*effects, *_given_up(state.head, Cause("interrupted", event.detail)))
        state = replace(state, versions=state.versions[1:])
    doomed = _doom(state, lambda version: True, Cause("interrupted"))
    return replace(doomed, task=Task.MEET), (*effects, LeaveGate()) if paced else effects


def _met(state: State, event: Met) -> Next:
    """What none of the ranks knows to be committed was not, and is given up everywhere."""
    state, slot = replace(state, after=event.after), state.slots.open_slot
    if slot is None:
        return _freed(state), ()
    label = state.slots.held[slot].label
    assert label is not None  # of the version that is open in it
    if label == event.committed:
        # This rank had sealed it, and a peer has learned that all had.
        return _freed(replace(state, slots=state.slots.committed(slot))), (Commit(slot, label),)
    return _freed(replace(state, slots=state.slots.aborted(slot))), (Abort(slot, label),)


def _parted(state: State, event: Parted) -> Next:
    cause = Cause("broken", event.detail)
    given_up = tuple(effect for version in state.versions for effect in _given_up(version, cause))
    return replace(state, versions=(), task=Task.END, broken=event.detail), given_up


_ANY: tuple[Task, ...] = ()
_TRANSITIONS: Mapping[type[Event], tuple[Callable[[State, Any], Next], tuple[Task, ...]]] = {
    HandedOver: (_handed_over, _ANY),
    FenceNear: (_fence_near, _ANY),
    TensorsChange: (_tensors_change, _ANY),
    Closing: (_closing, _ANY),
    Turn: (_turn, (Task.WAIT,)),
    Unfit: (_unfit, (Task.COPY,)),
    Begin: (_begin, (Task.COPY,)),
    SlotTaken: (_slot_taken, (Task.COPY,)),
    Released: (_released, (Task.COPY,)),
    Copied: (_copied, (Task.COPY,)),
    CopyFailed: (_copy_failed, (Task.COPY,)),
    Voted: (_voted, (Task.VOTE_COPIED, Task.VOTE_SEALED)),
    LaidOut: (_laid_out, (Task.LAYOUT,)),
    Drained: (_drained, (Task.SEAL,)),
    Sealed: (_sealed, (Task.SEAL,)),
    SealFailed: (_seal_failed, (Task.SEAL,)),
    Switched: (_switched, (Task.SWITCH,)),
    Broke: (_broke, _ANY),
    Met: (_met, (Task.MEET,)),
    Parted: (_parted, (Task.MEET,)),
}
"""What each event does, and what the worker must be at when it happens."""
