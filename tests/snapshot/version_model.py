"""An exhaustive model of snapshots over the production transition system.

Every rank is a real :class:`~reft.snapshot.version.RankState`, moved by the real ``step``; around it stand
its arena files, its training thread and a worker that does each task, in every order, with an error at
every task and every effect. Where ranks go on after an interruption is the real :func:`resume_from`, who keeps
whose bytes is the real :func:`place_group`, and the version to restore is chosen by the real
:func:`preferred_label`.

:mod:`tests.snapshot.version_search` explores what ranks can do together, and what crashes leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from reft.grid import VersionId
from reft.memory.header import ArenaState
from reft.policy.switching import ActiveProtection
from reft.protect.placement import ProtectionLevel
from reft.recover.decide import preferred_label
from reft.snapshot import version
from reft.snapshot.version import (
    Commit,
    CopyFailed,
    EnterGate,
    Event,
    FenceNear,
    GiveUp,
    HandedOver,
    LeaveGate,
    Next,
    ProtocolFailed,
    RankState,
    Rejoined,
    RejoinFailed,
    Released,
    SealFailed,
    Signal,
    SkipCause,
    Slots,
    SlotTaken,
    Stage,
    Task,
    TensorsChecked,
    Version,
    Voted,
)

SOME = SkipCause("some")
NOBODY = -1


class Held(NamedTuple):
    """What an arena holds: version, state, whether its bytes are of that version alone (P2, P5), and the layout
    under which it was written, where that is explored."""

    label: VersionId | None
    state: ArenaState
    good: bool = True
    layout: object = None


EMPTY = Held(None, ArenaState.EMPTY)
Choose = Callable[[dict[VersionId, list[tuple[int, int]]], VersionId | None], VersionId | None]


@dataclass(frozen=True)
class Rules:
    steps: int = 3  # versions that are handed over
    ahead: int = 2  # most versions that are handed over and not over
    vote_only: frozenset[int] = frozenset()  # steps whose versions are only voted on
    paced: bool = False  # whether copies keep to the windows
    writes: bool = False  # whether the script may write tensors between the hand-over and the fence
    # whether there is a device, up to two steps behind the host: it reads and writes in the order of its two
    # streams
    behind: bool = False
    stream_fence: bool = (
        True  # whether its writes wait for what was queued to be copied before them
    )
    errors: bool = True  # whether anything fails
    meetings: int = 2  # most interruptions
    slots: Slots = field(default_factory=lambda: Slots.make(2))  # this rank's arenas at the start
    step: Callable[[RankState, Event], Next] = version.step  # the transition system
    choose: Choose = preferred_label  # which recoverable version is restored
    # per order, the first being in force at the start, its levels; none: what a rank keeps does not change
    ladders: tuple[tuple[ProtectionLevel, ...], ...] = ()
    changes: int = 1  # most changes of what is kept that a rank hears of
    short: bool = True  # whether arenas may not be had
    in_force: ActiveProtection = field(default_factory=ActiveProtection)  # decides what is kept


@dataclass(frozen=True)
class Ballot:
    label: VersionId
    task: Task
    ok: bool
    relayout: bool = False
    order: int = 0
    level: int = 0


@dataclass(frozen=True)
class Verdict:
    """What all ranks say together, where more is asked than :class:`Voted`."""

    voted: Voted
    order: int = 0
    level: int = 0


@dataclass(frozen=True)
class Rank:
    state: RankState  # of the transition system
    files: tuple[Held, ...]  # what a reader finds in its arenas
    tensors: int = 1  # step after which the live tensors are as they are, to the host
    device: int = (
        1  # the same to the device, which may be behind; without one it follows the host at once
    )
    queued: bool = False  # whether a copy of the first version is queued there and has not run
    handed: bool = False  # whether that version was handed over
    # steps of which the version in the open slot has bytes; negative: with what the script wrote after the hand-over
    read: frozenset[int] = frozenset()
    written: bool = False  # whether the script has written tensors since the hand-over
    cast: Ballot | None = None  # its vote, of which it has not learned the result
    result: Voted | Verdict | None = None  # of that vote, once all have cast it
    keeps: Any = None  # its protection, where that is explored (`tests.snapshot.switch_model`)
    gate: bool = False  # whether it holds the permit to copy within the windows


@dataclass(frozen=True)
class PromiseError(Exception):
    """A promise is broken, and how it comes about: the results of the votes, then what each rank did."""

    promise: str
    what: str
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join((*self.trace, f"{self.promise}: {self.what}"))


Move = tuple[str, Rank]


class OneRank:
    """Everything that one rank may do by itself."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._found: dict[Rank, list[Move]] = {}

    def start(self) -> Rank:
        slots = self.rules.slots
        return Rank(RankState(slots), (EMPTY,) * len(slots.held))

    def moves(self, rank: Rank) -> list[Move]:
        if rank not in self._found:
            self._found[rank] = list(self._moves(rank))
        return self._found[rank]

    def _moves(self, rank: Rank) -> Iterator[Move]:
        yield from self.training(rank)
        yield from self._on_device(rank)
        if rank.cast is None:
            yield from self._working(rank)
        elif rank.result is not None:
            yield from self.hears(rank, rank.result)

    def hears(self, rank: Rank, result: Voted | Verdict) -> Iterator[Move]:
        assert isinstance(result, Voted)
        yield from self._effects(
            f"learns {say(result)}", replace(rank, cast=None, result=None), result
        )

    def results(
        self, cast: Sequence[tuple[Rank, Ballot]]
    ) -> Iterator[tuple[Voted | Verdict, list[Rank]]]:
        relayout = [r for r, ballot in cast if ballot.relayout]
        if any(ballot.ok for _, ballot in cast):
            yield Voted(True), [r for r, ballot in cast if ballot.ok]
        if any(not ballot.ok and not ballot.relayout for _, ballot in cast):
            yield Voted(False), [r for r, ballot in cast if not ballot.relayout]
        if relayout:
            yield Voted(False, relayout=True), [r for r, _ in cast]

    def tell(self, rank: Rank, event: Event) -> Rank:
        """The rank after an event; P6: nothing that may happen is refused, nothing is dropped in silence."""
        return self._tell(rank, event)[0]

    def _tell(self, rank: Rank, event: Event) -> tuple[Rank, tuple[object, ...]]:
        before = rank.state
        try:
            after, effects = self.rules.step(before, event)
        except ValueError as error:
            raise PromiseError("P6", f"{event} is refused: {error}") from error
        known = {e.label for e in effects if isinstance(e, GiveUp)}
        if lost := [label for label in known if label.step in self.rules.vote_only]:
            raise PromiseError("P6", f"{lost[0]} had nothing to take, and is counted as lost")
        refused = isinstance(event, HandedOver) and len(after.versions) == len(before.versions)
        if refused and not event.version.vote_only and event.version.label not in known:
            raise PromiseError("P6", f"{event.version.label} is not taken, and nobody is told")
        for gone in before.versions[: max(0, len(before.versions) - len(after.versions))]:
            if not (gone.is_over or gone.vote_only or gone.label in known):
                raise PromiseError("P6", f"{gone.label} is dropped, and nobody is told")
        if after.task in (Task.REJOIN, Task.END) and after.holds_training:
            raise PromiseError("P6", f"training waits for a worker at {after.task}")
        gate = rank.gate
        for effect in effects:
            gate = isinstance(effect, EnterGate) or (gate and not isinstance(effect, LeaveGate))
        waits = [
            v
            for v in after.versions
            if v.paced and v.cause is None and (v.holds_training or v.staged)
        ]
        if waits and not gate:
            raise PromiseError("P6", f"{waits[0].label} is to be copied, and has no permit")
        if gate and not after.versions:
            raise PromiseError("P6", "nothing is left to copy, and the permit is kept")
        return replace(rank, state=_plain(after), gate=gate), effects

    def _on_device(self, rank: Rank) -> Iterator[Move]:
        """What the device does next on either stream. What is given up is waited for, and leaves nothing."""
        copied = rank.state.head.label.step if rank.queued else None
        if rank.device < rank.tensors and not (self.rules.stream_fence and copied == rank.device):
            yield f"the device writes {rank.device + 1}", replace(rank, device=rank.device + 1)
        if copied is not None and copied <= rank.device:
            yield "the device copies", replace(rank, queued=False, read=frozenset({rank.device}))

    def training(self, rank: Rank) -> Iterator[Move]:
        state, rules = rank.state, self.rules
        if rank.tensors > rules.steps:
            if not state.closing:
                yield "closes", self.tell(rank, Signal.CLOSING)
        elif not rank.handed:
            if len(state.versions) < rules.ahead:
                made = Version(
                    VersionId(1, rank.tensors),
                    required=rank.tensors == 1,
                    vote_only=rank.tensors in rules.vote_only,
                    paced=rules.paced and rank.tensors not in rules.vote_only,
                    unchecked=rules.writes and rank.tensors not in rules.vote_only,
                )
                handed = replace(rank, handed=True)
                yield f"hands {rank.tensors} over", self.tell(handed, HandedOver(made))
                if rules.errors and not made.vote_only:
                    layout_mismatch = HandedOver(replace(made, cause=SOME))
                    yield f"cannot capture {rank.tensors}", self.tell(handed, layout_mismatch)
        elif rules.writes and not rank.written and not state.fence_near:
            yield "writes tensors", replace(rank, written=True)
            yield "comes to the fence", self.tell(rank, FenceNear())
        elif not state.fence_near:
            yield "comes to the fence", self.tell(rank, FenceNear())
            if rules.behind:
                ahead = self.tell(rank, FenceNear(ahead=True))
                if rank.state.may_begin and not ahead.state.may_begin:
                    raise PromiseError(
                        "P6", "a version is given up, and the device is not at the write"
                    )
                yield "comes to the fence, ahead of the device", ahead
        elif state.may_begin and rank.device == rank.tensors:
            yield "waits until the device is at the fence", self.tell(rank, FenceNear())
        elif (rules.errors or not state.holds_training) and rank.tensors - rank.device < 2:
            checked = (
                self.tell(rank, TensorsChecked(SOME if rank.written else None))
                if rules.writes
                else rank
            )
            changed = self.tell(checked, Signal.TENSORS_CHANGE)
            after = rank.tensors + 1
            device = rank.device if rules.behind else after
            yield (
                "changes the tensors",
                replace(changed, tensors=after, handed=False, written=False, device=device),
            )

    def _working(self, rank: Rank) -> Iterator[Move]:
        state = rank.state
        match state.task:
            case Task.WAIT if state.versions:
                yield "takes its turn", self.tell(rank, Signal.TURN)
            case Task.COPY:
                yield from self._copying(rank)
            case Task.VOTE_COPIED | Task.VOTE_SEALED:
                yield from self.voting(rank)
            case Task.LAYOUT:
                yield from self.laying_out(rank)
            case Task.SEAL:
                yield from self._sealing(rank)
            case Task.SWITCH:
                yield from self.switching(rank)

    def voting(self, rank: Rank) -> Iterator[Move]:
        state = rank.state
        ballot = Ballot(state.head.label, state.task, state.votes_yes, state.wants_layout)
        yield f"votes {say(ballot)}", replace(rank, cast=ballot)
        if self.rules.errors and ballot.ok:
            yield "cannot tell how it is, votes no", replace(rank, cast=replace(ballot, ok=False))

    def laying_out(self, rank: Rank) -> Iterator[Move]:
        yield "has agreed on a layout", self.tell(rank, Signal.LAID_OUT)

    def switching(self, rank: Rank) -> Iterator[Move]:
        yield "goes on", self.tell(rank, Signal.SWITCHED)

    def slot(self, rank: Rank) -> int | None:
        return rank.state.slots.choose()

    def layout(self, rank: Rank) -> object:
        return None

    def _copying(self, rank: Rank) -> Iterator[Move]:
        state, errors = rank.state, self.rules.errors
        slot, head = state.slots.open_slot, state.head
        if head.stage is Stage.QUEUED:
            yield "begins to copy", self.tell(rank, Signal.BEGIN)
        elif head.stage is Stage.COPYING and slot is None:
            free = self.slot(rank)
            if free is None:
                yield "has no slot", self.tell(rank, CopyFailed(SOME))
            else:
                read = frozenset[int]() if self.rules.behind else frozenset({_bytes_of(rank)})
                taken = replace(self.tell(rank, SlotTaken(free)), read=read)
                text = f"begins {head.label} in slot {free}, over {describe(rank.files[free])}"
                held = Held(head.label, ArenaState.WRITING, False, self.layout(rank))
                yield text, write(taken, free, held)
        elif head.stage is Stage.COPYING:
            if self.rules.behind:
                read = replace(rank, queued=True)
            else:
                read = replace(rank, read=rank.read | {_bytes_of(rank)})
            yield f"has copied {head.label}", self.tell(read, Released())
            yield f"has copied and staged {head.label}", self.tell(read, Released(staged=True))
        elif not rank.queued:
            yield "has what it copied", self.tell(rank, Signal.COPIED)
        if errors and head.stage in (Stage.QUEUED, Stage.COPYING):
            yield "needs another layout", self.tell(rank, Signal.UNFIT)
        if errors and not rank.queued:
            yield f"fails to copy {head.label}", self.tell(rank, CopyFailed(SOME))

    def _sealing(self, rank: Rank) -> Iterator[Move]:
        state, errors = rank.state, self.rules.errors
        slot, head = state.slots.open_slot, state.head
        if slot is None:
            raise PromiseError("P3", f"{head.label} is to be sealed, and has no slot")
        if head.staged:
            drained = self.tell(rank, Signal.DRAINED)
            yield "drains", drained
            if errors:
                yield "fails to drain", self.tell(drained, SealFailed(SOME))
            return
        if head.cause is not None:
            yield "does not seal what was written to", self.tell(rank, SealFailed(head.cause))
        elif head.unchecked:
            pass  # it waits for the training thread
        elif rank.files[slot].state is ArenaState.WRITING:
            good = rank.read == {head.label.step}
            sealed = rank.files[slot]._replace(state=ArenaState.SEALED, good=good)
            yield f"seals {head.label}", write(rank, slot, sealed)
        else:
            yield "has sealed", self.tell(rank, Signal.SEALED)
        if errors and head.cause is None:
            yield f"fails to seal {head.label}", self.tell(rank, SealFailed(SOME))

    def _effects(self, text: str, rank: Rank, event: Event) -> Iterator[Move]:
        """An event that may commit a version: noting that may fail, in two ways."""
        after, effects = self._tell(rank, event)
        commits = [effect for effect in effects if isinstance(effect, Commit)]
        noted = after
        for commit in commits:
            held = after.files[commit.slot]._replace(label=commit.label, state=ArenaState.COMMITTED)
            noted = write(noted, commit.slot, held)
        yield text, noted
        if commits and self.rules.errors:
            yield f"{text}, cannot note it", after

    def interrupted(self, rank: Rank) -> Rank:
        return self.tell(
            replace(rank, cast=None, result=None, queued=False), ProtocolFailed("some")
        )

    def parted(self, rank: Rank) -> Rank:
        """The ranks do not come together again. Nothing is written any more."""
        return self.tell(rank, RejoinFailed("some"))

    def record(self, rank: Rank) -> tuple[int, ...]:
        """What else it tells when the ranks meet; the newest counts."""
        return ()

    def met(self, rank: Rank, event: Rejoined, record: tuple[int, ...]) -> Iterator[Move]:
        yield from self._effects(f"meets all: {say(event)}", rank, event)


def _bytes_of(rank: Rank) -> int:
    return -rank.tensors if rank.written else rank.tensors


def _plain(state: RankState) -> RankState:
    """Any cause is like any other."""
    if all(v.cause in (None, SOME) for v in state.versions):
        return state
    return replace(
        state,
        versions=tuple(
            replace(v, cause=SOME) if v.cause is not None else v for v in state.versions
        ),
    )


def write(rank: Rank, slot: int, held: Held) -> Rank:
    return replace(rank, files=(*rank.files[:slot], held, *rank.files[slot + 1 :]))


def describe(held: Held) -> str:
    return "nothing" if held.label is None else f"{held.label} {held.state}"


def say(what: Ballot | Voted | Verdict | Rejoined) -> str:
    match what:
        case Rejoined(after, committed):
            return f"they go on after {after}, {committed or 'nothing'} is committed"
        case Verdict(voted, order, level):
            return f"{say(voted)}, order {order}, level {level}"
        case Ballot() | Voted():
            return "that the layout is old" if what.relayout else ("yes" if what.ok else "no")
