"""Decides which nodes of a job train in a round, wait for one, are spares or have to leave.

A round is one start of the trainers on all participating nodes. Only :func:`step` changes
membership. It is a pure function of the shared state, an event and the time, and returns the next
state. The node writes that state to the store by compare-and-set
(:mod:`reft.job.rendezvous.handler`). If two nodes step from the same state, one write succeeds; the
other node repeats its step from the new state.

This rendezvous differs from TorchElastic's in three points:

- A node that was removed because it or the store was suspended takes its place again.
- A spare (a node beyond the largest number of nodes) takes the place of a dead node only. It cannot
  displace a healthy node between two rounds: that node's memory would be lost to the job.
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
    """The report that a node submits when it joins a round."""

    node: str  # Node id
    workers: int  # Number of trainers of the node
    # Number of consecutive ranks dealt to a node before moving to the next (see ``deal_ranks``); 0:
    # no round-robin
    rank_stride: int = 0
    restarts_renew: bool = False  # Whether each new version resets the count of used restarts
    round: int = 0  # Last round in which this launcher took part; 0: none
    size: int = 0  # Number of nodes of the launcher's last round
    restarts_used: int = 0  # Restarts that the job had used up to the launcher's last round
    known_step: int = -1  # Newest committed step that any node of the last round knew; -1: none
    newest_step: int = -1  # Newest committed step that this node knows now; -1: none
    incarnation: int = 0  # Number of the newest start of the job that this node knows
    # Cause of the failure of the node's trainers in the last round; None: no failure
    cause: ExitCause | None = None
    failure: str = ""  # Message that describes the failure of the node's trainers
    nnodes: str = ""  # Value of ``--nnodes`` on the node; empty: unknown

    def after(self, agreement: Agreement) -> NodeInfo:
        """Return the node's report for the round after ``agreement``'s, as yet without failure."""
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
    """What the nodes agreed on for one round, equal on all nodes. Tuples are by group rank."""

    round: int  # 1 for the first start of the trainers; each restart adds 1
    members: tuple[str, ...]  # Names of the launchers
    nodes: tuple[str, ...]  # Node ids
    workers: tuple[int, ...]  # Number of trainers of each node
    restarts_used: int  # Restarts of the whole job so far that count against ``--max-restarts``
    known_step: int  # Newest committed step that any of the nodes knows; -1: none
    # Counts the starts of the job; each start gets a number greater than any known before. A node
    # still running under a smaller number has been replaced, and is refused.
    incarnation: int = 1
    # Reasons why the last round failed, as the remaining nodes report
    failures: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()  # Members that must end: another launcher has their node id
    # Number of consecutive ranks dealt to a node before moving to the next; 0: no round-robin
    rank_stride: int = 0

    def nodes_without(self, members: Collection[str]) -> tuple[str, ...]:
        """Return the ids of the nodes whose launchers are not among ``members``."""
        return tuple(
            node
            for node, member in zip(self.nodes, self.members, strict=True)
            if member not in members
        )


def agree(infos: Mapping[str, NodeInfo], before: Agreement | None = None) -> Agreement:
    """Compute the agreement of a round from the reports of its members.

    The members are in the order of :func:`order_members`.

    If the last round ended because the script failed, the job uses one restart, however many nodes
    failed. If the round ended because a node vanished or joined, the job uses none.

    Args:
        infos: the members' reports by launcher name.
        before: agreement of the newest known round, whichever nodes took part in it.
    """
    infos = {name: infos[name] for name in order_members(infos, before)}
    all_infos = tuple(infos.values())
    last_round = max(info.round for info in all_infos)
    # Ignore nodes that missed the last round: their counts and failures are older.
    last = [info for info in all_infos if info.round == last_round and last_round]
    causes = {info.cause for info in last}
    node_vanished = bool(last) and len(last) < last[0].size
    # Trainers that ended well caused the failure only if other ranks failed because they lost these
    # trainers.
    ended_early = ExitCause.ENDED in causes and ExitCause.PEER in causes
    # If a node has vanished, an unexplained abort was that of a communication watchdog. Otherwise
    # it counts as the script's fault.
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


def order_members(infos: Mapping[str, NodeInfo], before: Agreement | None) -> list[str]:
    """Order the members of a round by group rank, so that as little memory as possible is on the
    wrong node.

    If as many nodes train as before, every node that trained before keeps its group rank, and with
    it the coordinates of its trainers: only the state of the replaced nodes moves. With another
    number of nodes, those that trained before keep their order. New ones follow the first: the
    ranks after them then need parts of a ZeRO partition of which their node holds a copy, because a
    member also stores the bytes of its ring successors.

    Args:
        infos: the members' reports by launcher name.
        before: agreement of the newest known round; None if there was none.
    """
    old_nodes = () if before is None else before.nodes
    ranks = {node: rank for rank, node in enumerate(old_nodes)}
    kept: dict[int, str] = {}
    new: list[str] = []
    for name in sorted(infos):
        rank = ranks.get(infos[name].node)
        # Two launchers may have the same node id until one of them is refused.
        if rank is None or rank in kept:
            new.append(name)
        else:
            kept[rank] = name
    if len(infos) == len(old_nodes) == len(ranks):
        free = [rank for rank in range(len(infos)) if rank not in kept]
        kept |= zip(free, new, strict=True)
        new = []
    old = [kept[rank] for rank in sorted(kept)]
    return [*old[:1], *new, *old[1:]]


def _describe_failures(
    infos: list[NodeInfo], *, ended_early: bool, node_vanished: bool
) -> tuple[str, ...]:
    """Describe why a round failed: by its causes, or by the consequences if no cause is known."""
    causes = [ExitCause.OWN, ExitCause.UNCLEAR]
    if ended_early:
        causes.append(ExitCause.ENDED)
    failed = [info for info in infos if info.cause in causes]
    if not failed and not node_vanished:
        failed = [info for info in infos if info.cause not in (None, ExitCause.ENDED)]
    return tuple(f"{info.node}, {info.failure}" for info in failed)


def duplicate_nodes(infos: Mapping[str, NodeInfo]) -> list[list[str]]:
    """Return the names of launchers that use the same node id, one list for each such id."""
    launchers: dict[str, list[str]] = defaultdict(list)
    for name, info in infos.items():
        launchers[info.node].append(name)
    return [names for names in launchers.values() if len(names) > 1]


def _refused(names: list[str], infos: Mapping[str, NodeInfo]) -> list[str]:
    """Return which of several launchers with the same node id must end.

    The launcher that took part in the latest round keeps the id; if none did, all must end.
    """
    first, second, *others = sorted(names, key=lambda name: -infos[name].round)
    return [second, *others] if infos[first].round > infos[second].round else names


class Role(StrEnum):
    """The role of a node in the job."""

    NONE = ""  # Has no place in a round, or is a member whose trainers have ended
    TRAINS = "trains"  # Takes part in the running or forming round
    WAITS = "waits"  # Waits for the next round, which will have a place for it
    SPARE = "spare"  # Waits until a node is lost


class Node(NamedTuple):
    """One launcher in the shared state."""

    role: Role = Role.NONE
    alive_at: float = 0.0  # Last sign of life, in seconds since 1970 by the store's clock
    # Whether the launcher took part in the last complete round and was not removed since. A member
    # keeps its place between two rounds.
    is_member: bool = False
    leaving: bool = False  # Whether the launcher was asked to leave the job, and has not left yet
    info: NodeInfo | None = None  # The launcher's report for the round that forms
    node: str = ""  # Node id
    nnodes: str = ""  # Value of ``--nnodes``; empty: unknown


@dataclass(frozen=True)
class GrantedScale:
    """The newest ``reft scale`` request that was granted."""

    number: int  # Number of the request
    nodes: int  # Requested number of nodes
    limit: int  # Largest number of nodes in the next round; lowered in steps that the job survives
    without: tuple[str, ...] = ()  # Ids of the nodes that leave first
    round: int = -1  # Round in which nodes were last asked to leave; -1: none yet
    replaces: bool = False  # Whether waiting nodes take the places of the leaving nodes


@dataclass
class MembershipState:
    """The state that the nodes of a job share."""

    agreement: Agreement | None = None  # Agreement of the newest round; None: there was none
    complete: bool = False  # True while the newest round runs, False while the next one forms
    closed: str = ""  # Reason why the job has ended; empty while it has not
    # Time at which the forming round stops waiting for more nodes; None: too few are present
    deadline: float | None = None
    nodes: dict[str, Node] = field(default_factory=dict)  # By launcher name
    # How each launcher of the running round ended, by launcher name: 0 if its trainers ended well,
    # otherwise the signal that stopped it
    ends: dict[str, int] = field(default_factory=dict)
    scaling: GrantedScale | None = None  # None: as many nodes train as ``--nnodes`` allows
    sizes: Sizes | None = None  # Numbers of nodes with which the job can train; None: unknown
    written: float = 0.0  # Time of the last write, by the same clock as all times in this state

    def with_role(self, *roles: Role) -> set[str]:
        return {name for name, node in self.nodes.items() if node.role in roles}

    def role(self, name: str) -> Role:
        return self.nodes.get(name, Node()).role

    @property
    def round(self) -> int:
        return 0 if self.agreement is None else self.agreement.round

    @property
    def participants(self) -> set[str]:
        """Launchers in the running round, without those removed; or in the forming round."""
        return self.with_role(Role.TRAINS)

    @property
    def members(self) -> set[str]:
        """Launchers that keep a place between two rounds."""
        return {name for name, node in self.nodes.items() if node.is_member}

    @property
    def leaving(self) -> set[str]:
        return {name for name, node in self.nodes.items() if node.leaving}

    @property
    def is_empty(self) -> bool:
        """Whether no node has joined yet, or the store has lost its state."""
        has_nodes = bool(self.with_role(Role.TRAINS, Role.WAITS))
        return not (self.complete or self.closed or self.agreement or has_nodes)

    @property
    def is_between_rounds(self) -> bool:
        """Whether a member's trainers have ended, so that a new round is about to form."""
        return any(node.is_member and node.role is not Role.TRAINS for node in self.nodes.values())


_STATE = TypeAdapter(MembershipState)
_FIELDS = {each.name for each in fields(MembershipState)}


def encode_state(state: MembershipState) -> bytes:
    return _STATE.dump_json(state)


def decode_state(data: bytes) -> MembershipState:
    """Decode a state that :func:`encode_state` has encoded.

    The format is JSON rather than pickle, as in TorchElastic: whoever can write a pickle into the
    store can run code on every node (P11).

    Raises:
        RendezvousStateError: ``data`` is not an encoded state.
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
    last_call_secs: float  # Time for which a round with enough nodes waits for more
    heartbeat_secs: float  # Interval between heartbeats
    max_missed_heartbeats: int  # Number of intervals without a heartbeat before a node is removed

    @property
    def expiry_secs(self) -> float:
        """Age in seconds of a node's last sign of life at which the node is removed."""
        return self.heartbeat_secs * self.max_missed_heartbeats

    def limit(self, state: MembershipState) -> int:
        """Return the largest number of nodes in a round, after the last ``reft scale``."""
        if state.scaling is None:
            return self.max_nodes
        return max(self.min_nodes, min(self.max_nodes, state.scaling.limit))

    def is_full(self, state: MembershipState) -> bool:
        return state.complete and len(state.participants) >= self.limit(state)

    def may_return(self, state: MembershipState, agreement: Agreement) -> bool:
        """Whether a node that has lost its place in a round may take it again.

        It may if that round still runs with a free place, or if the store has lost its state.
        """
        is_same = state.complete and state.agreement == agreement
        has_room = len(state.participants) < self.max_nodes
        return state.is_empty or (is_same and has_room)

    def capacity(self, state: MembershipState, name: str, info: NodeInfo) -> int:
        """Return how many nodes may train or wait, from the viewpoint of node ``name``.

        This is the node limit, except that during a round a newcomer counts only if adding it lets
        the job train on more nodes.
        """
        limit = self.limit(state)
        if state.sizes is None or not state.complete or info.round == state.round:
            return limit
        present = state.with_role(Role.TRAINS, Role.WAITS, Role.SPARE) - state.leaving
        return state.sizes.largest(len(present | {name}), self.min_nodes, limit)


# -- events ----------------------------------------------------------------------------------------


class StateRead(NamedTuple):
    """A node has read the state; silent nodes are removed."""

    node: str
    alive: Mapping[str, float]  # Time of the last sign of life of each node that holds a lease
    ended: frozenset[str]  # Nodes whose launchers have ended
    trusts: bool  # Whether silence proves death: neither this node nor the store was suspended


class TrainersExited(NamedTuple):
    """The node is in no round: its trainers have ended, or it gave up waiting for a place."""

    node: str


class JoinRequested(NamedTuple):
    """The node waits for a place in a round."""

    node: str
    info: NodeInfo
    # Whether the store has just lost its record that this node is a spare (and perhaps the list of
    # training nodes, too)
    forgotten: bool = False
    # Whether this node is to be replaced, but for 5 s no replacement has been waiting
    alone: bool = False
    # Time at which to stop waiting for replacements of lost nodes; None: the round's deadline
    wait_until: float | None = None


class Heartbeat(NamedTuple):
    """The node is alive. The other fields restore the state if the store has lost it."""

    node: str
    agreement: Agreement | None = None  # Agreement of the node's running round; None: none runs
    scaling: GrantedScale | None = None
    sizes: Sizes | None = None


class NodeFinished(NamedTuple):
    """The node's trainers have ended well, or a signal has stopped its launcher."""

    node: str
    signal: int = 0  # Number of the stop signal; 0: the trainers ended well


class SpareLeft(NamedTuple):
    """A node without a place in the round leaves the job for good."""

    node: str


class JobClosed(NamedTuple):
    """The job has ended: no further round forms."""

    why: str


class ScaleRequested(NamedTuple):
    """``reft scale`` requests a new number of nodes, or the replacement of some nodes.

    Additional nodes may join at once. Surplus nodes leave only when they are asked to
    (:class:`LeaveNotified`).
    """

    number: int  # Number of the request; greater for later requests
    nodes: int  # Requested number of nodes
    without: tuple[str, ...]  # Ids of nodes that leave
    running: int  # Number of nodes that train


class LeaveNotified(NamedTuple):
    """The nodes with the given group ranks are asked to leave the job."""

    ranks: tuple[int, ...]
    running: int  # Number of nodes that train


class ScaleCancelled(NamedTuple):
    """A request that was carried out in part is cancelled: the job keeps its number of nodes."""

    number: int  # Number of the request
    running: int  # Number of nodes that train


class SizesKnown(NamedTuple):
    """Event: the node counts at which the job can train have become known from a new version."""

    round: int  # Round in which the version was taken
    nodes: int  # Number of nodes with which the version was taken
    sizes: Sizes


class SizeRejected(NamedTuple):
    """Trainers refused to start on the given number of nodes."""

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
    """Return the state after an event; equal to ``state`` if the event changes nothing.

    Args:
        state: the state before the event; it is not modified.
        event: the event.
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
    """End a running round without nodes; stop the countdown of a forming round with too few."""
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
    # While a round ends, remove nodes whose launchers have ended without waiting for the heartbeats
    # to expire, so that waiting nodes can take their places at once.
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
    """Make the running round's nodes members; if it is full, no other node stays a member."""
    scaling = state.scaling
    # Once nodes were asked to leave, the lowered limit applies to the next round, not to this one.
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
    """Renew a node's sign of life if it is older than a heartbeat interval.

    Returns:
        Whether the sign of life was renewed.
    """
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
    # A node that missed the restart must not block a round that is full without it, even if it was
    # a member.
    is_surplus = state.complete and name not in trains and len(trains - leaving) >= capacity
    if not is_free and (name not in taken or is_surplus):
        if role is not Role.SPARE and not (event.forgotten and state.is_empty):
            _set(state, name, role=Role.SPARE, alive_at=now)
        elif role is Role.SPARE:
            _keep_alive(state, name, now, rules)
        return
    # While a round runs, nodes may wait for a larger round than the current limit allows.
    limit = rules.max_nodes if state.complete else rules.limit(state)
    if role is Role.SPARE:
        if len(trains) == limit:
            _keep_alive(state, name, now, rules)
            return
        _set(state, name, role=Role.NONE)
        _join(state, event, now, rules)
        return
    if name in leaving:
        _set(state, name, leaving=False)  # The place is free because another node was lost: stay
    _take_place(state, event, now, rules, limit)


def _may_take_place(state: MembershipState, event: JoinRequested) -> bool:
    """Whether the node that requests a free place may have it, while nodes are leaving.

    - If the leaving nodes are not replaced, a free place means that another node was lost. Only a
      leaving node may take it, and then stays.
    - If they are replaced, a node that does not leave may take the place; a leaving node may take
      it back if no other node has waited for a while.
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
    """Let a node wait for the next round while one runs; otherwise add it to the forming round."""
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
    """Complete the forming round with as many nodes as can train; the others become spares.

    The deadline is postponed instead if the job cannot train on any possible number of nodes, or if
    two launchers use the same node id and one of them may be dead.
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
        # A version was taken on this number of nodes, so the number no longer counts as refused.
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
        return  # The job cannot train on the remaining nodes, or they could not recover its state
    for name in set(members) - set(staying):
        _set(state, name, leaving=True)
    limit = event.running if scaling.replaces else event.running - len(event.ranks)
    state.scaling = replace(scaling, limit=limit, round=state.round)
