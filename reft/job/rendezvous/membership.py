"""Who belongs to a job: which nodes take part in its rounds, which wait, are spare or have to
leave.

:func:`step` alone changes any of it, and is pure: what the nodes share, an event and the time go
in, what they share next comes out. A node writes that by compare-and-set
(:mod:`reft.job.rendezvous.handler`): of two steps from one state one counts, and the other is made
again from what is there then.

Three things are not as in TorchElastic's rendezvous. A node that was struck out while it stood
still, or while the store did, takes its place again. A spare, a node beyond the largest number,
takes the place of a dead node alone, and not that of a healthy one between two rounds, whose memory
would then be out of the job's reach. And a job goes to another number of nodes on request: those
that leave are spares, with their memory, until the others have committed a version without them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import NamedTuple

from pydantic import TypeAdapter
from torch.distributed.elastic.rendezvous.api import RendezvousStateError

from reft.job.script import ExitCause
from reft.relayout.sizes import Sizes


@dataclass(frozen=True)
class NodeInfo:
    """What one node brings into a round."""

    node: str
    workers: int
    turn: int = 0  # how many ranks each node gets in its turn (`deal_ranks`)
    # restarts are counted from the last new version on, not over the job's life
    renews: bool = False
    # last round this launcher took part in, with its number of nodes and ``restarts_used``; 0: it
    # is new
    round: int = 0
    size: int = 0
    restarts_used: int = 0
    # newest committed step that any node of that round knew of; ``newest_step``: that this node
    # knows of now; -1: none
    known_step: int = -1
    newest_step: int = -1
    incarnation: int = 0  # number of the newest start of the job that this node knows of
    # why the node's trainers of that round ended; None if they did not fail; ``failure``: in words
    cause: ExitCause | None = None
    failure: str = ""
    nnodes: str = ""  # its ``--nnodes``; empty: not known

    def after(self, agreement: Agreement) -> NodeInfo:
        """What this node brings into the next round, if the trainers of this one do not fail."""
        return replace(
            self,
            round=agreement.round,
            size=len(agreement.members),
            restarts_used=agreement.restarts_used,
            known_step=agreement.known_step,
            incarnation=agreement.incarnation,
            cause=None,
            failure="",
        )


@dataclass(frozen=True)
class Agreement:
    """The outcome, equal on all nodes."""

    round: int  # 1 for the first start of the trainers, one more after every restart
    members: tuple[str, ...]  # members, nodes: launchers and node ids of this round, by group rank
    nodes: tuple[str, ...]
    workers: tuple[int, ...]  # trainers of each node
    restarts_used: int  # of ``--max-restarts``, by the whole job
    known_step: int  # newest committed step that any of the nodes knows of; -1: none
    # number of this start of the job, greater than any that a node, or the store, knows of. Whoever
    # carries a lower one was replaced and is refused.
    incarnation: int = 1
    # why trainers of the round before ended, on the nodes that are still there
    failures: tuple[str, ...] = ()
    # members that have to go: they claim to be a node that another is
    refused: tuple[str, ...] = ()
    turn: int = 0  # ranks that each node gets in its turn

    def nodes_without(self, members: Collection[str]) -> tuple[str, ...]:
        return tuple(
            n for n, member in zip(self.nodes, self.members, strict=True) if member not in members
        )


def agree(infos: Mapping[str, NodeInfo], before: Agreement | None = None) -> Agreement:
    """Work out a round from what its members bring, in the order of group ranks. ``before``: the
    newest round that is known of, whoever took part in it.

    A round that ended with at least one failure by own cause uses one restart of the job, however
    many nodes failed in it; one that ended because a node vanished, or because somebody joined,
    uses none.
    """
    all_infos = tuple(infos.values())
    last_round = max(c.round for c in all_infos)
    last = [c for c in all_infos if c.round == last_round and last_round]
    causes = {c.cause for c in last}
    somebody_vanished = bool(last) and len(last) < last[0].size
    # An abort without a word is a watchdog's if a peer is gone, and a bug of its own otherwise.
    # Trainers that end well are to blame only if their peers lost them.
    ended_early = ExitCause.ENDED in causes and ExitCause.PEER in causes
    own = ExitCause.OWN in causes or (
        (ExitCause.UNCLEAR in causes or ended_early) and not somebody_vanished
    )
    newest = max(c.newest_step for c in all_infos)
    known = max((c.known_step for c in last), default=-1)
    renewed = all_infos[0].renews and newest > known
    used = 0 if renewed else max((c.restarts_used for c in last), default=0)
    # Causes, not consequences: that peers were lost is said only where nothing else is known.
    named = (ExitCause.OWN, ExitCause.UNCLEAR, *([ExitCause.ENDED] if ended_early else []))
    told = [c for c in last if c.cause in named]
    if not told and not somebody_vanished:
        told = [c for c in last if c.cause not in (None, ExitCause.ENDED)]
    return Agreement(
        round=1 + max(last_round, before.round if before else 0),
        members=tuple(infos),
        nodes=tuple(c.node for c in all_infos),
        workers=tuple(c.workers for c in all_infos),
        restarts_used=used + own,
        known_step=max(newest, known),
        incarnation=1
        + max([before.incarnation if before else 0, *(c.incarnation for c in all_infos)]),
        failures=tuple(f"{c.node}, {c.failure}" for c in told),
        refused=tuple(name for same in doubles(infos) for name in _refused(same, infos)),
        turn=all_infos[0].turn,
    )


def doubles(infos: Mapping[str, NodeInfo]) -> list[list[str]]:
    """Launchers that claim to be the same node, by node."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, info in infos.items():
        found[info.node].append(name)
    return [same for same in found.values() if len(same) > 1]


def _refused(same: list[str], infos: Mapping[str, NodeInfo]) -> list[str]:
    """Whoever is new has to go; the one that trains already keeps its name."""
    first, second, *others = sorted(same, key=lambda name: -infos[name].round)
    return [second, *others] if infos[first].round > infos[second].round else same


class Role(StrEnum):
    NONE = ""  # on its way from one round to the next, if it has a seat
    TRAINS = "trains"  # takes part in the round that runs or forms
    WAITS = "waits"  # for the next round
    SPARE = "spare"


class Node(NamedTuple):
    role: Role = Role.NONE
    seen: float = 0.0  # when it was last known to live, in seconds since 1970 by the store's clock
    # it took part in the last complete round and has not been struck out since: it keeps its place
    # from one round to the next
    seated: bool = False
    leaving: bool = False  # it is to leave the job, and is still there
    info: NodeInfo | None = None  # what it brings into a round that forms
    node: str = ""  # its id
    nnodes: str = ""  # its ``--nnodes``; empty: not known


@dataclass(frozen=True)
class GrantedScale:
    """The newest ``reft scale`` that was granted."""

    number: int  # of the order
    nodes: int  # that the job is to have
    # nodes that the next round may have: fewer leave at once than the job survives the loss of
    limit: int
    without: tuple[str, ...] = ()  # ids of the nodes that leave first
    round: int = -1  # in which those were told that are leaving; -1: nobody was
    replaces: bool = False  # nodes that wait take the places of those that leave


@dataclass
class JobState:
    """What the nodes of a job share; ``nodes``: by launcher."""

    agreement: Agreement | None = None  # of the newest round; None: there was none
    complete: bool = False  # that round runs; else another forms
    closed: str = ""  # why the job has ended; empty: it has not
    deadline: float | None = None  # when those that have come are a round, if they are enough
    nodes: dict[str, Node] = field(default_factory=dict)
    # members of the round that runs which have ended: 0: well; else the signal that stopped their
    # launcher
    ends: dict[str, int] = field(default_factory=dict)
    scaling: GrantedScale | None = None  # None: as many nodes take part as there may be
    sizes: Sizes | None = None  # with how many nodes the job can train; None: nothing is known
    written: float = 0.0  # when, by the clock by which the times above are meant

    def those(self, *roles: Role) -> set[str]:
        return {name for name, node in self.nodes.items() if node.role in roles}

    def role(self, name: str) -> Role:
        return self.nodes.get(name, Node()).role

    @property
    def round(self) -> int:
        return 0 if self.agreement is None else self.agreement.round

    @property
    def participants(self) -> set[str]:
        """Those of the round that runs that were not struck out; or of the round that forms."""
        return self.those(Role.TRAINS)

    @property
    def seats(self) -> set[str]:
        return {name for name, node in self.nodes.items() if node.seated}

    @property
    def leaving(self) -> set[str]:
        return {name for name, node in self.nodes.items() if node.leaving}

    @property
    def is_empty(self) -> bool:
        """Whether the store has lost it, or nobody was here yet."""
        return not (
            self.complete or self.closed or self.agreement or self.those(Role.TRAINS, Role.WAITS)
        )

    @property
    def is_between_rounds(self) -> bool:
        """Whether a node has left its round, and may join the next."""
        return any(node.seated and node.role is not Role.TRAINS for node in self.nodes.values())


_STATE = TypeAdapter(JobState)
_FIELDS = {each.name for each in fields(JobState)}


def encode_state(state: JobState) -> bytes:
    return _STATE.dump_json(state)


def decode_state(data: bytes) -> JobState:
    """Read what :func:`encode_state` wrote; TorchElastic unpickles it, so that whoever writes it
    runs code on every node (P11). Raises RendezvousStateError: it is something else."""
    try:
        found = json.loads(data)
        if not isinstance(found, dict) or found.keys() != _FIELDS:
            raise ValueError("other fields")
        return _STATE.validate_python(found)
    except (ValueError, RecursionError) as error:
        raise RendezvousStateError(
            f"the rendezvous state in the store is none of reft's ({type(error).__name__}: "
            f"{error}): all "
            f"nodes need the same version of reft"
        ) from error


@dataclass(frozen=True)
class JobRules:
    """What all nodes of a job were started with."""

    least: int  # least, most: nodes of a round
    most: int
    last_call_secs: float  # how long more nodes than the least number are waited for
    beat_secs: float  # so often a node tells that it lives
    beats: int  # so many may be missed

    @property
    def alive_secs(self) -> float:
        return self.beat_secs * self.beats

    def limit(self, state: JobState) -> int:
        """Nodes that a round may have: no more than were asked for."""
        scaling = state.scaling
        return self.most if scaling is None else max(self.least, min(self.most, scaling.limit))

    def is_full(self, state: JobState) -> bool:
        return state.complete and len(state.participants) >= self.limit(state)

    def is_free(self, state: JobState, agreement: Agreement) -> bool:
        """Whether a node that has lost its place in a round may take it again: the round still runs
        and it was struck out, or the store came back empty."""
        same = state.complete and state.agreement == agreement
        return state.is_empty or (same and len(state.participants) < self.most)

    def room(self, state: JobState, name: str, info: NodeInfo) -> int:
        """Nodes that may train, as one of them sees it. While others do, as many as fit of those
        that are
        there: a node that left their round comes back, any other waits until its coming makes it
        larger."""
        most = self.limit(state)
        if state.sizes is None or not state.complete or info.round == state.round:
            return most
        there = state.those(Role.TRAINS, Role.WAITS, Role.SPARE) - state.leaving
        return state.sizes.largest(len(there | {name}), self.least, most)


# -- events ----------------------------------------------------------------------------------------


class StateRead(NamedTuple):
    """A node has read the state. ``alive``: when others were last known to live, as it knows of
    their leases; ``ended``: those whose launchers have ended; ``trusts``: whether their silence is
    their own."""

    node: str
    alive: Mapping[str, float]
    ended: frozenset[str]
    trusts: bool


class TrainersExited(NamedTuple):
    """Its trainers have ended, or it has waited too long: it is in no round, and waits for none."""

    node: str


class JoinRequested(NamedTuple):
    """It waits for a place in a round. ``forgotten``: the store has lately lost that it is a spare,
    and may have lost as well who trains. ``alone``: for long no other node has waited.
    ``wait_until``: for others, in the place of lost nodes; None: as all do."""

    node: str
    info: NodeInfo
    forgotten: bool = False
    alone: bool = False
    wait_until: float | None = None


class Heartbeat(NamedTuple):
    """It lives. ``agreement``: of the round that its trainers run in; None: in none. ``scaling,
    sizes``: as it saw them last, for a store that has lost them."""

    node: str
    agreement: Agreement | None = None
    scaling: GrantedScale | None = None
    sizes: Sizes | None = None


class NodeFinished(NamedTuple):
    """Its trainers have ended well; or its launcher was told to stop, by ``signal``."""

    node: str
    signal: int = 0


class SpareLeft(NamedTuple):
    """A spare leaves the job for good."""

    node: str


class JobClosed(NamedTuple):
    """The job has ended, and why: no round forms any more."""

    why: str


class ScaleRequested(NamedTuple):
    """``reft scale`` asks for so many nodes, of which ``running`` train. More may join now; fewer
    leave when they are told."""

    number: int
    nodes: int
    without: tuple[str, ...]
    running: int


class LeaveNotified(NamedTuple):
    """Those of ``running`` nodes with these ranks are told to leave."""

    ranks: tuple[int, ...]
    running: int


class ScaleCancelled(NamedTuple):
    """The job stays at the number of nodes that it has, in the place of an order that went half
    way."""

    number: int
    running: int


class SizesKnown(NamedTuple):
    """With how many nodes the job can train, by a version of that round."""

    round: int
    nodes: int  # of that round
    sizes: Sizes


class SizeRejected(NamedTuple):
    """Trainers refused to start on so many nodes."""

    nodes: int


Event = (
    StateRead
    | TrainersExited
    | JoinRequested
    | Heartbeat
    | NodeFinished
    | SpareLeft
    | JobClosed
    | ScaleRequested
    | LeaveNotified
    | ScaleCancelled
    | SizesKnown
    | SizeRejected
)


def step(state: JobState, event: Event, now: float, rules: JobRules) -> JobState:
    """What the nodes share after ``event``; equal to ``state`` where nothing follows from it."""
    after = replace(state, nodes=dict(state.nodes))
    match event:
        case StateRead():
            _poll(after, event, now, rules)
        case TrainersExited():
            role = after.role(event.node)
            if role in (Role.TRAINS, Role.WAITS):
                _set(after, event.node, role=Role.NONE)
            if role is Role.TRAINS:
                _thin(after, rules)
        case JoinRequested():
            _join(after, event, now, rules)
            if after.role(event.node) is not Role.NONE:
                _set(after, event.node, node=event.info.node, nnodes=event.info.nnodes)
        case Heartbeat():
            _beat(after, event, now, rules)
        case NodeFinished():
            after.ends = {**after.ends, event.node: event.signal}
        case SpareLeft():
            after.nodes.pop(event.node, None)
        case JobClosed():
            after.closed = event.why
        case SizesKnown() | SizeRejected():
            _note_sizes(after, event)
        case _:
            _scale(after, event)
    after.nodes = {
        n: node for n, node in after.nodes.items() if node.role or node.seated or node.leaving
    }
    return after


def _set(state: JobState, name: str, **changes: object) -> None:
    state.nodes[name] = state.nodes.get(name, Node())._replace(**changes)  # type: ignore[arg-type]


def _thin(state: JobState, rules: JobRules) -> None:
    """Nodes are in their round no more."""
    left = len(state.participants)
    if state.complete and not left:
        state.complete = False
    elif not state.complete and left < rules.least:
        state.deadline = None


def _poll(state: JobState, event: StateRead, now: float, rules: JobRules) -> None:
    for name, at in event.alive.items():
        if name in state.nodes and state.nodes[name].seen < at:
            _set(state, name, seen=at)
    if state.complete:
        scaling = state.scaling
        # Where nodes were told to leave, the limit is that of the next round.
        is_told = scaling is not None and scaling.round == state.round
        # There is no place for those that a full round went on without.
        full = rules.is_full(state) and not is_told
        for name, node in state.nodes.items():
            seated = node.role is Role.TRAINS or (node.seated and not full)
            if seated != node.seated:
                state.nodes[name] = node._replace(seated=seated)
    if not event.trusts:
        return
    # Struck out are those that are silent, and while a round is left for the next one those whose
    # launchers have ended: whoever waits for their places need not wait until they are silent for
    # long. A node does not strike out itself.
    ended = event.ended if state.is_between_rounds else frozenset[str]()
    expired = now - rules.alive_secs
    lost = {name for name, node in state.nodes.items() if node.seen < expired or name in ended}
    lost.discard(event.node)
    took_part = any(state.role(name) is Role.TRAINS for name in lost)
    for name in lost:
        del state.nodes[name]
    if took_part:
        _thin(state, rules)


def _beat(state: JobState, event: Heartbeat, now: float, rules: JobRules) -> None:
    role, mine = state.role(event.node), event.agreement
    if (
        mine is not None
        and role is not Role.TRAINS
        and not state.closed
        and rules.is_free(state, mine)
    ):
        if state.is_empty:
            state.scaling = event.scaling or state.scaling
            state.sizes = event.sizes or state.sizes
        state.agreement, state.complete = mine, True
        node = mine.nodes[mine.members.index(event.node)]
        _set(state, event.node, role=Role.TRAINS, seen=now, node=node)
    else:
        _keep_alive(state, event.node, now, rules)


def _keep_alive(state: JobState, name: str, now: float, rules: JobRules) -> bool:
    """Note that a node lives, if it is time to; whether it is."""
    due = state.role(name) is not Role.NONE and state.nodes[name].seen <= now - rules.beat_secs
    if due:
        _set(state, name, seen=now)
    return due


def _join(state: JobState, event: JoinRequested, now: float, rules: JobRules) -> None:
    name, role = event.node, state.role(event.node)
    trains, leaving = state.participants, state.leaving
    room = rules.room(state, name, event.info)
    taken = (state.seats | trains | state.those(Role.WAITS)) - leaving
    is_free = len(taken) < room and _may_take_a_place(state, event) and not event.forgotten
    # One that the others went on without keeps nobody from training, although it had a seat.
    is_one_too_many = state.complete and name not in trains and len(trains - leaving) >= room
    # of a round that is over counts the room
    most = rules.most if state.complete else rules.limit(state)
    if not is_free and (name not in taken or is_one_too_many):
        if role is not Role.SPARE and not (event.forgotten and state.is_empty):
            _set(state, name, role=Role.SPARE, seen=now)
        elif role is Role.SPARE:
            _keep_alive(state, name, now, rules)
    elif role is Role.SPARE:
        if len(trains) == most:
            _keep_alive(state, name, now, rules)
            return
        _set(state, name, role=Role.NONE)
        _join(state, event, now, rules)
    else:
        if name in leaving:
            _set(state, name, leaving=False)  # a node was lost: its place is taken
        _take_place(state, event, now, rules, most)


def _may_take_a_place(state: JobState, event: JoinRequested) -> bool:
    """While nodes leave, a place that is free is theirs: one was lost. Where they are replaced it
    is that of a node that waits, and theirs again where none has waited for long."""
    leaving, scaling = state.leaving, state.scaling
    if not leaving:
        return True
    is_leaving = event.node in leaving
    if scaling is None or not scaling.replaces:
        return is_leaving
    return event.alone if is_leaving and not waits_for_them(state) else not is_leaving


def waits_for_them(state: JobState) -> bool:
    """Whether a spare is there that may replace a node that leaves."""
    return bool(state.those(Role.SPARE) - state.leaving)


def _take_place(
    state: JobState, event: JoinRequested, now: float, rules: JobRules, most: int
) -> None:
    name, role, count = event.node, state.role(event.node), len(state.participants)
    if state.complete:
        if role is Role.NONE:
            full = count >= most
            _set(state, name, role=Role.SPARE if full else Role.WAITS, seen=now)
        elif role is Role.WAITS:
            _keep_alive(state, name, now, rules)
        return
    waits = event.wait_until is not None and state.deadline is not None
    deadline = event.wait_until if waits else state.deadline
    if role is Role.TRAINS:
        if rules.least <= count <= most and deadline is not None and deadline < now:
            _complete(state, now, rules, most)
        elif _keep_alive(state, name, now, rules):
            state.deadline = deadline
        return
    _set(state, name, role=Role.TRAINS, seen=now, info=event.info)
    state.deadline = now + rules.last_call_secs if count + 1 == rules.least else deadline
    if count + 1 == most:
        _complete(state, now, rules, most)


def _complete(state: JobState, now: float, rules: JobRules, most: int) -> None:
    """The round is complete with the nodes that fit, and the others become spares. Later, without
    any, or while it is not clear which of two launchers that claim to be one node is still
    there."""
    there = sorted(state.participants)
    staying = frozenset(there)
    if state.sizes is not None:
        found = state.sizes.staying(there, rules.least, most)
        if found is None:
            state.deadline = now + rules.last_call_secs
            return
        staying = found
    infos = {name: info for name in there if (info := state.nodes[name].info) and name in staying}
    fresh = now - 2 * rules.beat_secs
    if any(state.nodes[name].seen < fresh for same in doubles(infos) for name in same):
        state.deadline = now + rules.beat_secs
        return
    state.agreement, state.ends = agree(infos, state.agreement), {}
    state.complete, state.deadline = True, None
    for name in there:
        if name not in staying:
            _set(state, name, role=Role.SPARE, seated=False)
        _set(state, name, info=None)


def _note_sizes(state: JobState, event: SizesKnown | SizeRejected) -> None:
    known = state.sizes or Sizes()
    if state.closed:
        return
    if isinstance(event, SizeRejected):
        state.sizes = known.refusing(event.nodes)
    elif state.complete and state.round == event.round:
        refused = tuple(n for n in known.refused if n != event.nodes)
        state.sizes = replace(event.sizes, refused=refused)


def _scale(state: JobState, event: ScaleRequested | LeaveNotified | ScaleCancelled) -> None:
    scaling, running = state.scaling, event.running
    if isinstance(event, ScaleCancelled):
        if (
            scaling is not None
            and scaling.number == event.number
            and len(state.participants) == running
        ):
            state.scaling = replace(scaling, nodes=running, limit=running)
        return
    if not state.complete or state.closed:
        return
    if isinstance(event, ScaleRequested):
        if scaling is None or scaling.number < event.number:
            replaces = bool(event.without) and event.nodes == running
            most = max(event.nodes, running)
            state.scaling = GrantedScale(
                event.number, event.nodes, most, event.without, replaces=replaces
            )
        return
    members = () if state.agreement is None else state.agreement.members
    whole = state.participants == set(members) and len(members) == running
    if scaling is None or scaling.round == state.round or not whole:
        return
    stay = tuple(name for rank, name in enumerate(members) if rank not in event.ranks)
    sizes = state.sizes
    if sizes is not None and not scaling.replaces and sizes.staying(stay, 1, len(stay)) is None:
        return  # no number of those that stay fits, or could recover the version
    for name in set(members) - set(stay):
        _set(state, name, leaving=True)
    limit = running if scaling.replaces else running - len(event.ranks)
    state.scaling = replace(scaling, limit=limit, round=state.round)
