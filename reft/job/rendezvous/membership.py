"""The members of a job: which nodes train in a round, wait for one, are spares or must leave.

Only :func:`step` changes membership, and it is pure: it takes the shared state, an event and the
time, and returns the next state. A node writes that state by compare-and-set
(:mod:`reft.job.rendezvous.handler`). If two nodes step from the same state, one write succeeds; the
other node repeats its step from the new state.

It differs from TorchElastic's rendezvous in three points:

- A node that was removed while it or the store was suspended takes its place again.
- A spare (a node beyond the largest number) takes the place of a dead node only. It cannot displace
  a healthy node between two rounds, which would put that node's memory out of the job's reach.
- A job changes its number of nodes on request. Nodes that leave become spares and keep their memory
  until the others have committed a version without them.
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

    node: str  # Node id
    workers: int  # Number of its trainers
    rank_stride: int = 0  # Stride of the round-robin rank assignment (`deal_ranks`)
    restarts_renew: bool = False  # Restarts are counted since the last new version
    round: int = 0  # Last round in which this launcher took part; 0: none
    size: int = 0  # Number of nodes of that round
    restarts_used: int = 0  # Restarts that the job had used up to that round
    known_step: int = -1  # Newest committed step that any node of that round knew; -1: none
    newest_step: int = -1  # Newest committed step that this node knows now; -1: none
    incarnation: int = 0  # Number of the newest start of the job that this node knows
    cause: ExitCause | None = None  # Why its trainers of that round failed; None: they did not
    failure: str = ""  # The same as a message
    nnodes: str = ""  # Its ``--nnodes``; empty: unknown

    def after(self, agreement: Agreement) -> NodeInfo:
        """What this node brings into the next round, unless its trainers fail in this one."""
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
    """The outcome of a rendezvous, equal on all nodes. Tuples are in the order of group ranks."""

    round: int  # 1 for the first start of the trainers; each restart adds 1
    members: tuple[str, ...]  # Names of the launchers
    nodes: tuple[str, ...]  # Node ids
    workers: tuple[int, ...]  # Number of trainers of each node
    restarts_used: int  # Restarts of ``--max-restarts`` that the whole job has used
    known_step: int  # Newest committed step that any of the nodes knows; -1: none
    # Number of this start of the job, greater than any that a node or the store knows. A node with
    # a smaller number was replaced and is refused.
    incarnation: int = 1
    failures: tuple[str, ...] = ()  # Why trainers of the last round failed, on remaining nodes
    refused: tuple[str, ...] = ()  # Members that must end: another launcher has their node id
    rank_stride: int = 0  # Stride of the round-robin rank assignment

    def nodes_without(self, members: Collection[str]) -> tuple[str, ...]:
        """Ids of the nodes whose launchers are not among ``members``."""
        return tuple(
            node
            for node, member in zip(self.nodes, self.members, strict=True)
            if member not in members
        )


def agree(infos: Mapping[str, NodeInfo], before: Agreement | None = None) -> Agreement:
    """Compute a round from what its members bring.

    A round that ended with a failure of its own uses one restart of the job, however many nodes
    failed in it. A round that ended because a node vanished or joined uses none.

    Args:
        infos: what each launcher brings, by launcher name in the order of group ranks.
        before: the newest known round, whichever nodes took part in it.
    """
    all_infos = tuple(infos.values())
    last_round = max(info.round for info in all_infos)
    # Nodes that missed the last round are ignored: their counts and failures are older.
    last = [info for info in all_infos if info.round == last_round and last_round]
    causes = {info.cause for info in last}
    node_vanished = bool(last) and len(last) < last[0].size
    # Trainers that ended well are to blame only if their peers failed for lack of them.
    ended_early = ExitCause.ENDED in causes and ExitCause.PEER in causes
    # An abort without a message came from a watchdog if a peer is gone, otherwise from a bug.
    is_own = ExitCause.OWN in causes
    if (ExitCause.UNCLEAR in causes or ended_early) and not node_vanished:
        is_own = True
    newest_step = max(info.newest_step for info in all_infos)
    known_step = max((info.known_step for info in last), default=-1)
    used = max((info.restarts_used for info in last), default=0)
    if all_infos[0].restarts_renew and newest_step > known_step:
        used = 0
    return Agreement(
        round=1 + max(last_round, before.round if before else 0),
        members=tuple(infos),
        nodes=tuple(info.node for info in all_infos),
        workers=tuple(info.workers for info in all_infos),
        restarts_used=used + is_own,
        known_step=max(newest_step, known_step),
        incarnation=1
        + max([before.incarnation if before else 0, *(info.incarnation for info in all_infos)]),
        failures=_describe_failures(last, ended_early=ended_early, node_vanished=node_vanished),
        refused=tuple(name for names in duplicate_nodes(infos) for name in _refused(names, infos)),
        rank_stride=all_infos[0].rank_stride,
    )


def _describe_failures(
    infos: list[NodeInfo], *, ended_early: bool, node_vanished: bool
) -> tuple[str, ...]:
    """Describe a round's failures: only the causes, or the consequences if no cause is known."""
    causes = [ExitCause.OWN, ExitCause.UNCLEAR]
    if ended_early:
        causes.append(ExitCause.ENDED)
    failed = [info for info in infos if info.cause in causes]
    if not failed and not node_vanished:
        failed = [info for info in infos if info.cause not in (None, ExitCause.ENDED)]
    return tuple(f"{info.node}, {info.failure}" for info in failed)


def duplicate_nodes(infos: Mapping[str, NodeInfo]) -> list[list[str]]:
    """Launchers that claim to be the same node, grouped by node."""
    launchers: dict[str, list[str]] = defaultdict(list)
    for name, info in infos.items():
        launchers[info.node].append(name)
    return [names for names in launchers.values() if len(names) > 1]


def _refused(names: list[str], infos: Mapping[str, NodeInfo]) -> list[str]:
    """Of launchers with one node id, those that must end; a launcher that trains keeps the id."""
    first, second, *others = sorted(names, key=lambda name: -infos[name].round)
    return [second, *others] if infos[first].round > infos[second].round else names


class Role(StrEnum):
    """What a node does in the job."""

    NONE = ""  # No place in a round; a member between two rounds has this role
    TRAINS = "trains"  # It takes part in the running or forming round
    WAITS = "waits"  # It waits for the next round
    SPARE = "spare"  # It waits until a node is lost


class Node(NamedTuple):
    """One launcher in the shared state."""

    role: Role = Role.NONE
    alive_at: float = 0.0  # Last sign of life, in seconds since 1970 by the store's clock
    # It took part in the last complete round and was not removed since. It keeps its place between
    # two rounds.
    is_member: bool = False
    leaving: bool = False  # It was notified to leave the job, and is still present
    info: NodeInfo | None = None  # What it brings into the forming round
    node: str = ""  # Its node id
    nnodes: str = ""  # Its ``--nnodes``; empty: unknown


@dataclass(frozen=True)
class GrantedScale:
    """The newest ``reft scale`` request that was granted."""

    number: int  # Number of the request
    nodes: int  # Number of nodes that the job is to have
    limit: int  # Most nodes of the next round; nodes leave in steps that the job survives
    without: tuple[str, ...] = ()  # Ids of the nodes that leave first
    round: int = -1  # Round in which leaving nodes were notified; -1: none yet
    replaces: bool = False  # Waiting nodes take the places of those that leave


@dataclass
class MembershipState:
    """The state that the nodes of a job share."""

    agreement: Agreement | None = None  # The newest round; None: there was none
    complete: bool = False  # The round runs; otherwise the next one forms
    closed: str = ""  # Why the job has ended; empty: it has not
    deadline: float | None = None  # When a round forms from the present nodes, if they are enough
    nodes: dict[str, Node] = field(default_factory=dict)  # By launcher name
    # Members of the running round that have ended: 0 if well, else the signal to their launcher
    ends: dict[str, int] = field(default_factory=dict)
    scaling: GrantedScale | None = None  # None: as many nodes train as ``--nnodes`` allows
    sizes: Sizes | None = None  # Numbers of nodes with which the job can train; None: unknown
    written: float = 0.0  # Time of the last write, by the clock of all times in this state

    def with_role(self, *roles: Role) -> set[str]:
        return {name for name, node in self.nodes.items() if node.role in roles}

    def role(self, name: str) -> Role:
        return self.nodes.get(name, Node()).role

    @property
    def round(self) -> int:
        return 0 if self.agreement is None else self.agreement.round

    @property
    def participants(self) -> set[str]:
        """Nodes of the running round that were not removed, or nodes of the forming round."""
        return self.with_role(Role.TRAINS)

    @property
    def members(self) -> set[str]:
        """Nodes that keep a place between two rounds."""
        return {name for name, node in self.nodes.items() if node.is_member}

    @property
    def leaving(self) -> set[str]:
        return {name for name, node in self.nodes.items() if node.leaving}

    @property
    def is_empty(self) -> bool:
        """Whether the store has lost the state, or no node has joined yet."""
        has_nodes = bool(self.with_role(Role.TRAINS, Role.WAITS))
        return not (self.complete or self.closed or self.agreement or has_nodes)

    @property
    def is_between_rounds(self) -> bool:
        """Whether a node has left its round, and may join the next."""
        return any(node.is_member and node.role is not Role.TRAINS for node in self.nodes.values())


_STATE = TypeAdapter(MembershipState)
_FIELDS = {each.name for each in fields(MembershipState)}


def encode_state(state: MembershipState) -> bytes:
    return _STATE.dump_json(state)


def decode_state(data: bytes) -> MembershipState:
    """Read what :func:`encode_state` wrote.

    The format is JSON: TorchElastic unpickles its state, so a process that writes it can run code
    on every node (P11).

    Raises:
        RendezvousStateError: ``data`` is not such a state.
    """
    try:
        content = json.loads(data)
        if not isinstance(content, dict) or content.keys() != _FIELDS:
            raise ValueError("other fields")
        return _STATE.validate_python(content)
    except (ValueError, RecursionError) as error:
        raise RendezvousStateError(
            f"the rendezvous state in the store is none of reft's ({type(error).__name__}: "
            f"{error}): all nodes need the same version of reft"
        ) from error


@dataclass(frozen=True)
class JobRules:
    """Options with which all nodes of a job were started."""

    min_nodes: int  # Fewest nodes of a round
    max_nodes: int  # Most nodes of a round
    last_call_secs: float  # How long a round with enough nodes waits for more
    heartbeat_secs: float  # Interval between heartbeats
    max_missed_heartbeats: int  # A node that misses more is removed

    @property
    def expiry_secs(self) -> float:
        """Largest age of a node's last sign of life, in seconds."""
        return self.heartbeat_secs * self.max_missed_heartbeats

    def limit(self, state: MembershipState) -> int:
        """Most nodes of a round, after the last ``reft scale``."""
        if state.scaling is None:
            return self.max_nodes
        return max(self.min_nodes, min(self.max_nodes, state.scaling.limit))

    def is_full(self, state: MembershipState) -> bool:
        return state.complete and len(state.participants) >= self.limit(state)

    def may_return(self, state: MembershipState, agreement: Agreement) -> bool:
        """Whether a node that has lost its place in a round may take it again.

        It may if that round still runs without it, or if the store came back empty.
        """
        is_same = state.complete and state.agreement == agreement
        has_room = len(state.participants) < self.max_nodes
        return state.is_empty or (is_same and has_room)

    def capacity(self, state: MembershipState, name: str, info: NodeInfo) -> int:
        """Number of nodes that may train, as one of them computes it.

        While a round runs, this is the largest number of present nodes that fits. A node that left
        this round comes back; any other node waits until it makes the round larger.
        """
        limit = self.limit(state)
        if state.sizes is None or not state.complete or info.round == state.round:
            return limit
        present = state.with_role(Role.TRAINS, Role.WAITS, Role.SPARE) - state.leaving
        return state.sizes.largest(len(present | {name}), self.min_nodes, limit)


# -- events ----------------------------------------------------------------------------------------


class StateRead(NamedTuple):
    """A node has read the state."""

    node: str
    alive: Mapping[str, float]  # Last sign of life of other nodes, from their leases
    ended: frozenset[str]  # Nodes whose launchers have ended
    trusts: bool  # Silent nodes are dead; False if this node or the store may have been suspended


class TrainersExited(NamedTuple):
    """The node's trainers have ended, or it gave up waiting: it is in no round."""

    node: str


class JoinRequested(NamedTuple):
    """The node waits for a place in a round."""

    node: str
    info: NodeInfo
    # The store has just lost that the node is a spare, and perhaps also which nodes train
    forgotten: bool = False
    alone: bool = False  # No other node has waited for a while
    # When to stop waiting for replacements of lost nodes; None: at the deadline of the round
    wait_until: float | None = None


class Heartbeat(NamedTuple):
    """The node is alive. The other fields restore a store that has lost its state."""

    node: str
    agreement: Agreement | None = None  # The round of its trainers; None: they do not run
    scaling: GrantedScale | None = None
    sizes: Sizes | None = None


class NodeFinished(NamedTuple):
    """The node's trainers have ended well, or its launcher was stopped by ``signal``."""

    node: str
    signal: int = 0


class SpareLeft(NamedTuple):
    """A spare leaves the job for good."""

    node: str


class JobClosed(NamedTuple):
    """The job has ended: no further round forms."""

    why: str


class ScaleRequested(NamedTuple):
    """``reft scale`` requests another number of nodes, or other nodes.

    Additional nodes may join at once. Surplus nodes leave when they are notified.
    """

    number: int
    nodes: int
    without: tuple[str, ...]
    running: int  # Number of nodes that train


class LeaveNotified(NamedTuple):
    """The nodes with these group ranks are notified to leave."""

    ranks: tuple[int, ...]
    running: int  # Number of nodes that train


class ScaleCancelled(NamedTuple):
    """A request that was carried out in part is cancelled: the job keeps its number of nodes."""

    number: int
    running: int  # Number of nodes that train


class SizesKnown(NamedTuple):
    """A version shows with how many nodes the job can train."""

    round: int  # Round in which the version was taken
    nodes: int  # Number of nodes of that round
    sizes: Sizes


class SizeRejected(NamedTuple):
    """Trainers refused to start on this number of nodes."""

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


def step(state: MembershipState, event: Event, now: float, rules: JobRules) -> MembershipState:
    """The state after an event; equal to ``state`` if the event changes nothing.

    Args:
        state: the state before; it is not modified.
        event: what happened.
        now: seconds since 1970, by the store's clock.
        rules: options of the job.
    """
    after = replace(state, nodes=dict(state.nodes))
    match event:
        case StateRead():
            _read(after, event, now, rules)
        case TrainersExited():
            role = after.role(event.node)
            if role in (Role.TRAINS, Role.WAITS):
                _set(after, event.node, role=Role.NONE)
            if role is Role.TRAINS:
                _participants_left(after, rules)
        case JoinRequested():
            _join(after, event, now, rules)
            if after.role(event.node) is not Role.NONE:
                _set(after, event.node, node=event.info.node, nnodes=event.info.nnodes)
        case Heartbeat():
            _heartbeat(after, event, now, rules)
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
        name: node
        for name, node in after.nodes.items()
        if node.role or node.is_member or node.leaving
    }
    return after


def _set(state: MembershipState, name: str, **changes: object) -> None:
    state.nodes[name] = state.nodes.get(name, Node())._replace(**changes)  # type: ignore[arg-type]


def _participants_left(state: MembershipState, rules: JobRules) -> None:
    """Update the round after nodes have left it."""
    left = len(state.participants)
    if state.complete and not left:
        state.complete = False
    elif not state.complete and left < rules.min_nodes:
        state.deadline = None


def _read(state: MembershipState, event: StateRead, now: float, rules: JobRules) -> None:
    """Update signs of life and membership, and remove silent nodes."""
    for name, alive_at in event.alive.items():
        if name in state.nodes and state.nodes[name].alive_at < alive_at:
            _set(state, name, alive_at=alive_at)
    if state.complete:
        _update_members(state, rules)
    if not event.trusts:
        return
    # While a round ends, nodes whose launchers have ended are removed at once, so that waiting
    # nodes take their places without waiting for the heartbeats to expire.
    ended = event.ended if state.is_between_rounds else frozenset[str]()
    expired = now - rules.expiry_secs
    lost = {name for name, node in state.nodes.items() if node.alive_at < expired or name in ended}
    lost.discard(event.node)  # A node that has just read the state is alive
    took_part = any(state.role(name) is Role.TRAINS for name in lost)
    for name in lost:
        del state.nodes[name]
    if took_part:
        _participants_left(state, rules)


def _update_members(state: MembershipState, rules: JobRules) -> None:
    """While a round runs, its nodes are members; others lose their place if the round is full."""
    scaling = state.scaling
    # Once nodes were notified to leave, the limit applies to the next round.
    is_notified = scaling is not None and scaling.round == state.round
    is_full = rules.is_full(state) and not is_notified
    for name, node in state.nodes.items():
        is_member = node.role is Role.TRAINS or (node.is_member and not is_full)
        if is_member != node.is_member:
            state.nodes[name] = node._replace(is_member=is_member)


def _heartbeat(state: MembershipState, event: Heartbeat, now: float, rules: JobRules) -> None:
    agreement = event.agreement
    has_lost_place = state.role(event.node) is not Role.TRAINS and not state.closed
    if agreement is None or not has_lost_place or not rules.may_return(state, agreement):
        _keep_alive(state, event.node, now, rules)
        return
    if state.is_empty:
        state.scaling = event.scaling or state.scaling
        state.sizes = event.sizes or state.sizes
    state.agreement, state.complete = agreement, True
    node = agreement.nodes[agreement.members.index(event.node)]
    _set(state, event.node, role=Role.TRAINS, alive_at=now, node=node)


def _keep_alive(state: MembershipState, name: str, now: float, rules: JobRules) -> bool:
    """Renew a sign of life older than a heartbeat interval; returns whether it was renewed."""
    is_known = state.role(name) is not Role.NONE
    is_due = is_known and state.nodes[name].alive_at <= now - rules.heartbeat_secs
    if is_due:
        _set(state, name, alive_at=now)
    return is_due


def _join(state: MembershipState, event: JoinRequested, now: float, rules: JobRules) -> None:
    """Give a node a place in a round, or make it a spare."""
    name, role = event.node, state.role(event.node)
    trains, leaving = state.participants, state.leaving
    capacity = rules.capacity(state, name, event.info)
    taken = (state.members | trains | state.with_role(Role.WAITS)) - leaving
    is_free = len(taken) < capacity and _may_take_place(state, event) and not event.forgotten
    # A node that missed the restart of a full round must not block the others, even if it was a
    # member.
    is_surplus = state.complete and name not in trains and len(trains - leaving) >= capacity
    if not is_free and (name not in taken or is_surplus):
        if role is not Role.SPARE and not (event.forgotten and state.is_empty):
            _set(state, name, role=Role.SPARE, alive_at=now)
        elif role is Role.SPARE:
            _keep_alive(state, name, now, rules)
        return
    # While a round runs, a node may wait for a larger one.
    limit = rules.max_nodes if state.complete else rules.limit(state)
    if role is Role.SPARE:
        if len(trains) == limit:
            _keep_alive(state, name, now, rules)
            return
        _set(state, name, role=Role.NONE)
        _join(state, event, now, rules)
        return
    if name in leaving:
        _set(state, name, leaving=False)  # Another node was lost, so this one has to stay
    _take_place(state, event, now, rules, limit)


def _may_take_place(state: MembershipState, event: JoinRequested) -> bool:
    """Whether a free place is for this node while others leave.

    If nodes leave without replacement, a free place means that another node was lost; the place
    goes to one of those that leave. If they are replaced, it goes to a waiting node, or back to a
    leaving one if no other node has waited for a while.
    """
    leaving, scaling = state.leaving, state.scaling
    if not leaving:
        return True
    is_leaving = event.node in leaving
    if scaling is None or not scaling.replaces:
        return is_leaving
    if is_leaving and not has_replacement(state):
        return event.alone
    return not is_leaving


def has_replacement(state: MembershipState) -> bool:
    """Whether a spare is waiting that can replace a leaving node."""
    return bool(state.with_role(Role.SPARE) - state.leaving)


def _take_place(
    state: MembershipState, event: JoinRequested, now: float, rules: JobRules, limit: int
) -> None:
    """Let a node wait for the next round, or add it to the forming round."""
    name, role, count = event.node, state.role(event.node), len(state.participants)
    if state.complete:
        if role is Role.NONE:
            new_role = Role.SPARE if count >= limit else Role.WAITS
            _set(state, name, role=new_role, alive_at=now)
        elif role is Role.WAITS:
            _keep_alive(state, name, now, rules)
        return
    deadline = state.deadline
    if event.wait_until is not None and deadline is not None:
        deadline = event.wait_until
    if role is Role.TRAINS:
        is_enough = rules.min_nodes <= count <= limit
        if is_enough and deadline is not None and deadline < now:
            _complete(state, now, rules, limit)
        elif _keep_alive(state, name, now, rules):
            state.deadline = deadline
        return
    _set(state, name, role=Role.TRAINS, alive_at=now, info=event.info)
    state.deadline = now + rules.last_call_secs if count + 1 == rules.min_nodes else deadline
    if count + 1 == limit:
        _complete(state, now, rules, limit)


def _complete(state: MembershipState, now: float, rules: JobRules, limit: int) -> None:
    """Complete the round with the nodes that fit; the others become spares.

    The round is postponed if no number of nodes fits, or if two launchers claim the same node and
    one of them may be dead.
    """
    present = sorted(state.participants)
    staying = frozenset(present)
    if state.sizes is not None:
        fitting = state.sizes.staying(present, rules.min_nodes, limit)
        if fitting is None:
            state.deadline = now + rules.last_call_secs
            return
        staying = fitting
    infos = {name: info for name in present if (info := state.nodes[name].info) and name in staying}
    recent = now - 2 * rules.heartbeat_secs
    duplicates = [name for names in duplicate_nodes(infos) for name in names]
    if any(state.nodes[name].alive_at < recent for name in duplicates):
        state.deadline = now + rules.heartbeat_secs
        return
    state.agreement, state.ends = agree(infos, state.agreement), {}
    state.complete, state.deadline = True, None
    for name in present:
        if name not in staying:
            _set(state, name, role=Role.SPARE, is_member=False)
        _set(state, name, info=None)


def _note_sizes(state: MembershipState, event: SizesKnown | SizeRejected) -> None:
    sizes = state.sizes or Sizes()
    if state.closed:
        return
    if isinstance(event, SizeRejected):
        state.sizes = sizes.refusing(event.nodes)
    elif state.complete and state.round == event.round:
        # This number of nodes has taken a version, so it is no longer refused.
        refused = tuple(number for number in sizes.refused if number != event.nodes)
        state.sizes = replace(event.sizes, refused=refused)


def _scale(state: MembershipState, event: ScaleRequested | LeaveNotified | ScaleCancelled) -> None:
    scaling = state.scaling
    if isinstance(event, ScaleCancelled):
        is_same = scaling is not None and scaling.number == event.number
        if scaling is not None and is_same and len(state.participants) == event.running:
            state.scaling = replace(scaling, nodes=event.running, limit=event.running)
        return
    if not state.complete or state.closed:
        return
    if isinstance(event, LeaveNotified):
        _notify_leaving(state, event)
    elif scaling is None or scaling.number < event.number:
        state.scaling = GrantedScale(
            event.number,
            event.nodes,
            limit=max(event.nodes, event.running),
            without=event.without,
            replaces=bool(event.without) and event.nodes == event.running,
        )


def _notify_leaving(state: MembershipState, event: LeaveNotified) -> None:
    scaling = state.scaling
    members = () if state.agreement is None else state.agreement.members
    is_whole = state.participants == set(members) and len(members) == event.running
    if scaling is None or scaling.round == state.round or not is_whole:
        return
    staying = tuple(name for rank, name in enumerate(members) if rank not in event.ranks)
    sizes = None if scaling.replaces else state.sizes
    if sizes is not None and sizes.staying(staying, 1, len(staying)) is None:
        return  # No number of the remaining nodes fits, or they could not recover the version
    for name in set(members) - set(staying):
        _set(state, name, leaving=True)
    limit = event.running if scaling.replaces else event.running - len(event.ranks)
    state.scaling = replace(scaling, limit=limit, round=state.round)
