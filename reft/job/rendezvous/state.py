"""What the nodes of a rendezvous share, and one node's view of it.

It is JSON, read field by field: TorchElastic unpickles it, so that whoever writes it runs code on every
node (P11). Beside TorchElastic's own state it holds the seats of those that took part, and what
``reft scale`` has asked for, and with how many nodes the job can train.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import chain, combinations, islice
from typing import Any

from pydantic import TypeAdapter
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    _NodeDesc,
    _remove_participant_epilogue,
    _RendezvousState,
    _RendezvousStateHolder,
)

from reft.control.keyvalue import RendezvousStore, StoreError
from reft.errors import ReftError
from reft.grid import Coordinate, Degrees
from reft.memory.jobdir import Size
from reft.naming import committed_key
from reft.node.report import losses_left
from reft.protect.codes import Scheme

_GRACE_SECS = 0.5
"""In which a node that lives, and has lost its connection, connects again; a lost lease is taken again with
the next heartbeat."""
_LEAST_SECS, _MOST_SECS = 0.1, 1.0
_NODES_PER_SEC = 500  # All nodes together look so often, whose state grows with their number
_ZONE = UTC if hasattr(dynamic_rendezvous, "timezone") else None
"""Of the times that TorchElastic compares: torch 2.4's are in UTC too, and do not say so."""
Member = tuple[str, int, int]  # a node, as the rendezvous knows it: address, process, number in the process
_MOST_TRIES = 500  # Choices of nodes that are looked at


@dataclass(frozen=True)
class Scaling:
    """The newest ``reft scale`` that was granted."""

    number: int  # of the order
    nodes: int  # that the job is to have
    limit: int  # nodes that the next round may have: fewer leave at once than the job survives the loss of
    without: tuple[str, ...] = ()  # ids of the nodes that leave first
    round: int = -1  # in which those were told that are leaving; -1: nobody was
    replaces: bool = False  # nodes that wait take the places of those that leave


@dataclass(frozen=True)
class Sizes:
    """With how many nodes the job can train, and which of those that are there do so: what the first node's
    launcher notes of the newest version. A round has the largest number of nodes that fits, and the others
    wait as spares; those that stay can recover the version from their memory. Pure."""

    # those that fit by the newest version; empty: there is none yet, any may fit
    fitting: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()  # those at which trainers refused to start
    scheme: str = ""  # protection of the newest version, ``arc:2+aec``; "": not known
    members: tuple[Member, ...] = ()  # nodes that hold it, by group rank
    domains: tuple[int, ...] = ()  # what fails as one with each of them, by number
    # of each sharding group the group ranks of its members' nodes; those that are alike once
    groups: tuple[tuple[int, ...], ...] = ()

    def of(self, least: int, most: int) -> tuple[int, ...]:
        """Those between two numbers that fit, as far as is known."""
        return tuple(
            n for n in range(least, most + 1) if n not in self.refused and n in (self.fitting or (n,))
        )

    def largest(self, there: int, least: int, most: int) -> int:
        """The largest number that fits where so many nodes are there; 0: none does."""
        return max(self.of(least, min(most, there)), default=0)

    def refusing(self, nodes: int) -> Sizes:
        """The same, and that trainers refused to start on so many nodes."""
        return replace(self, refused=tuple(sorted({*self.refused, nodes})))

    def staying(self, there: Sequence[Member], least: int, most: int) -> frozenset[Member] | None:
        """Which of the nodes that have come train; None: no number of them fits, or those that would stay
        could not recover the newest version, but all can."""
        number = self.largest(len(there), least, most)
        if not number:
            return None
        old = [rank for rank, member in enumerate(self.members) if member in set(there)]
        new = [member for member in there if member not in set(self.members)]
        if number >= len(old):
            return frozenset([*(self.members[rank] for rank in old), *new[: number - len(old)]])
        choices = [frozenset(c) for c in islice(self._choices(old, number), _MOST_TRIES)]
        kept = next((c for c in choices if self._recovers(c)), None)
        if kept is None and self._recovers(frozenset(old)):
            return None
        return frozenset(self.members[rank] for rank in (choices[0] if kept is None else kept))

    def leaving(self, number: int, first: Collection[int] = ()) -> tuple[int, ...]:
        """Group ranks of so many nodes that may leave at once while no other is lost: the last ones of those
        without which the others can recover the version; () where none are known."""
        everyone = frozenset(range(len(self.members)))
        stay, size = sorted(everyone - set(first)), len(everyone) - number
        if size < 1:
            return ()
        for kept in islice(chain([set(stay[:size])], self._choices(stay, size)), _MOST_TRIES):
            if len(kept) == size and self._recovers(frozenset(kept), unless_known=False):
                return tuple(sorted(everyone - kept, reverse=True))
        return ()

    def tolerance(self) -> int | None:
        """Node losses that are survived, whichever they are, while none is lost; None: not known."""
        with suppress(ReftError):
            return min((self._tolerance(group, ()) for group in self.groups), default=None)
        return None

    def _choices(self, old: list[int], number: int) -> Iterator[set[int]]:
        """So many of these group ranks: whole data-parallel paths first, the lowest first."""
        whole = [path for path in self._paths() if path <= set(old)]
        if sum(map(len, whole)) < number:
            kept: set[int] = set().union(*whole)
            whole = [{rank} for rank in old if rank not in kept]
        else:
            kept = set()
        for some in _some_of(whole, number - len(kept)):
            yield kept.union(*some)
        yield from map(set, combinations(old, number))

    def _paths(self) -> list[set[int]]:
        """Nodes of each replica; replicas that share a node are one."""
        found: list[set[int]] = []
        for ranks in map(set, zip(*self.groups, strict=True)):
            shared = [path for path in found if path & ranks]
            found = [path for path in found if not path & ranks] + [ranks.union(*shared)]
        return sorted(found, key=min)

    def _recovers(self, kept: frozenset[int], *, unless_known: bool = True) -> bool:
        """Whether the memory of these nodes is enough."""
        if not self.scheme or not self.groups:
            return unless_known
        try:
            lost = {group: [at for at, rank in enumerate(group) if rank not in kept] for group in self.groups}
            return all(self._tolerance(group, places) >= 0 for group, places in lost.items())
        except ReftError:  # another release's scheme
            return unless_known

    def _tolerance(self, group: tuple[int, ...], lost: Sequence[int]) -> int:
        nodes = tuple(str(self.domains[rank]) for rank in group)
        return losses_left(nodes, frozenset(lost), self.scheme)


def _some_of(paths: list[set[int]], number: int) -> Iterator[Iterable[set[int]]]:
    """Paths that have so many nodes together: the lowest, then such as lie far apart, then any."""
    each = {len(path) for path in paths}
    if len(each) != 1 or number % (one := each.pop()):
        return
    count, most = number // one, len(paths)
    if count <= most:
        apart = ([paths[(first + i * most // count) % most] for i in range(count)] for first in range(most))
        yield from chain([paths[:count]], apart, combinations(paths, count))


def sizes_of_job(
    fitting: Iterable[int],
    nodes: Sequence[str],
    holders: Mapping[Coordinate, tuple[str, str]],
    degrees: Degrees,
    scheme: str,
) -> Sizes:
    """What the newest version tells of the nodes of this round, by group rank. ``holders``: node id and
    failure domain of whoever holds each rank's part of it."""
    groups = set()
    for pp in range(degrees.pp):
        for tp in range(degrees.tp):
            held = [holders.get(Coordinate(pp, dp, tp), ("", ""))[0] for dp in range(degrees.dp)]
            if not set(held) <= set(nodes):
                return Sizes(tuple(fitting))
            groups.add(tuple(nodes.index(node) for node in held))
    domain_of = dict(holders.values())
    domains = [domain_of.get(node, node) for node in nodes]
    numbers = tuple(domains.index(domain) for domain in domains)
    return Sizes(tuple(fitting), scheme=scheme, domains=numbers, groups=tuple(sorted(groups)))


def why_not(
    nodes: int,
    workers: int,
    degrees: Degrees,
    size: Size | None,
    parities: Scheme | None,
    *,
    asked: bool = False,
) -> str:
    """Why a job cannot train on so many nodes; "" where it can, as far as is known (:class:`Situation` in
    :mod:`reft.job.rendezvous.scaling`). ``asked``: for so many, although the job could keep those it has."""
    trainers, one = nodes * workers, degrees.pp * degrees.tp
    if trainers % one:
        return (
            f"{nodes} nodes have {trainers} trainers, which do not make whole replicas of {degrees.pp} "
            f"stages x {degrees.tp} slices"
        )
    replicas = trainers // one
    if size is not None and replicas != degrees.dp and size.why_not and (asked or size.fixed):
        return f"the job keeps its data-parallel degree of {degrees.dp}: {size.why_not}"
    if size is not None and size.batch % (size.micro * replicas):
        return (
            f"{replicas} replicas cannot share the {size.batch} samples of a step in micro-batches of "
            f"{size.micro}"
        )
    if parities is not None:
        try:
            parities.check_room(replicas)
        except ReftError as error:
            return str(error)
    return ""


_SCALING, _SIZES = TypeAdapter(Scaling), TypeAdapter(Sizes)
_SETS, _TIMES = ("wait_list", "redundancy_list", "leaving"), ("last_heartbeats", "seats")
"""Of the state: nodes, and when each was last seen."""


class JobState(_RendezvousState):
    """TorchElastic's state, and what else the nodes of a job share."""

    def __init__(self) -> None:
        super().__init__()
        # nodes that took part in the last complete round and have not been struck out since, with the time
        # when they were seen taking part: they keep their place from one round to the next
        self.seats: dict[_NodeDesc, datetime] = {}
        self.leaving: set[_NodeDesc] = set()  # nodes that are to leave the job, and are still there
        # what ``reft scale`` asked for last; None: nothing, as many nodes take part as there may be
        self.scaling: Scaling | None = None
        self.sizes: Sizes | None = None  # with how many nodes the job can train; None: nothing is known


def encode_state(state: JobState) -> bytes:
    fields: dict[str, Any] = {
        "round": state.round,
        "complete": state.complete,
        "closed": state.closed,
        "deadline": state.deadline and _seconds(state.deadline),
        "participants": [[*member_of(n), rank] for n, rank in state.participants.items()],
        "scaling": None if (scaling := state.scaling) is None else asdict(scaling),
        "sizes": None if (sizes := state.sizes) is None else asdict(sizes),
    }
    for name in _SETS:
        fields[name] = [member_of(n) for n in sorted(getattr(state, name))]
    for name in _TIMES:
        fields[name] = [[*member_of(n), _seconds(at)] for n, at in getattr(state, name).items()]
    return json.dumps(fields).encode()


def decode_state(data: bytes) -> JobState:
    """Read what :func:`encode_state` wrote. Raises RendezvousStateError: it is something else."""
    try:
        fields = json.loads(data)
        deadline = fields["deadline"]
        state = JobState()
        state.round = int(fields["round"])
        state.complete = bool(fields["complete"])
        state.closed = bool(fields["closed"])
        state.deadline = None if deadline is None else _time(deadline)
        state.participants = {_node(f[:3]): int(f[3]) for f in fields["participants"]}
        for name in _SETS:
            setattr(state, name, {_node(f) for f in fields[name]})
        for name in _TIMES:
            setattr(state, name, {_node(f[:3]): _time(f[3]) for f in fields[name]})
        if (scaling := fields["scaling"]) is not None:
            state.scaling = _SCALING.validate_python(scaling)
        if (sizes := fields["sizes"]) is not None:
            state.sizes = _SIZES.validate_python(sizes)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, OSError) as error:
        raise RendezvousStateError(
            f"the rendezvous state in the store is none of reft's ({type(error).__name__}: {error}): all "
            f"nodes need the same version of reft"
        ) from error
    return state


def member_of(node: _NodeDesc) -> Member:
    return node.addr, node.pid, node.local_id


def secs_from_now(span: timedelta) -> datetime:
    """A time as TorchElastic compares them."""
    return _time(time.time() + span.total_seconds())


def limited(settings: RendezvousSettings, state: JobState) -> RendezvousSettings:
    """The settings, with no more nodes than were asked for."""
    scaling = state.scaling
    if scaling is None:
        return settings
    return replace(settings, max_nodes=max(settings.min_nodes, min(settings.max_nodes, scaling.limit)))


def look_secs(nodes: int) -> float:
    return min(_MOST_SECS, max(_LEAST_SECS, nodes / _NODES_PER_SEC))


def _node(fields: Iterable[Any]) -> _NodeDesc:
    addr, pid, local_id = fields
    return _NodeDesc(str(addr), int(pid), int(local_id))


def _time(seconds: Any) -> datetime:
    return datetime.fromtimestamp(float(seconds), UTC).replace(tzinfo=_ZONE)


def _seconds(at: datetime) -> float:
    return at.replace(tzinfo=UTC).timestamp()


class StateHolder(_RendezvousStateHolder):
    """This node's view of the shared state; strikes out nodes that fell silent, but never itself.

    After a gap in its own view (this process or the store stood still) it gives the others the time
    again in which a living node beats: their silence may have been its own. In a store that keeps leases, a
    lease says that a node lives, and its heartbeats are written nowhere; who has lost it has that time, too,
    to show itself again."""

    def __init__(self, store: RendezvousStore, node: _NodeDesc, settings: RendezvousSettings) -> None:
        self.store = store
        self._node = node
        self._settings = settings
        self._key = f"rendezvous/{settings.run_id}"
        self._here = f"{self._key}/here/"
        self._look_secs = look_secs(settings.max_nodes)
        self.alive_secs = (settings.keep_alive_interval * settings.keep_alive_max_attempt).total_seconds()
        self._state = JobState()
        self._held: bytes | None = None
        self._dirty = False
        self.synced_at = float("-inf")
        self._trusts_after = float("-inf")
        self._seen: dict[str, datetime] = {}
        # Longer than the time between two looks.
        interval = settings.keep_alive_interval.total_seconds()
        self._lease_secs = max(self.alive_secs / 2, interval + 1.0)
        self.grace_secs = self._lease_secs if store.keeps_leases else _GRACE_SECS

    @property
    def state(self) -> JobState:
        return self._state

    def mark_dirty(self) -> None:
        self._dirty = True

    def sync(self) -> bool | None:
        """Write the state if it was changed here, else read it; whether it was written, None if read. Raises
        RendezvousConnectionError: the store does not answer; RendezvousStateError: it holds something else.
        """
        now = time.monotonic()
        written = None
        try:
            if not self._dirty and now - self.synced_at < self._look_secs:
                return None
            self.store.hold(self._name_of(self._node), self._lease_secs)
            if self._dirty:
                written, self._held = self.store.compare_set(self._key, self._held, encode_state(self._state))
            else:
                self._held = self.store.peek(self._key)
            alive = self.store.alive(self._here)
        except StoreError as error:
            raise RendezvousConnectionError(str(error)) from error
        self._state = JobState() if self._held is None else decode_state(self._held)
        self._note_alive(alive)
        self._dirty = False
        now = time.monotonic()
        gap = now - self.synced_at
        # On the first look there is none to go by: where nobody has beaten, the store may have stood still.
        if self._all_are_silent() if gap == float("inf") else gap > self.alive_secs:
            self._trusts_after = now + self.alive_secs
        self.synced_at = now
        if self._state.complete:
            seen = {
                n: self._state.last_heartbeats.get(n, _time(time.time())) for n in self._state.participants
            }
            seats = self._state.seats
            scaling = self._state.scaling
            # Where nodes were told to leave, the limit is that of the next round.
            is_told = scaling is not None and scaling.round == self._state.round
            if not is_told and len(seen) >= limited(self._settings, self._state).max_nodes:
                seats.clear()  # there is no place for those that it went on without
            seats.update(seen)
        if now >= self._trusts_after:
            self._strike_out()
        return written

    def _note_alive(self, names: Iterable[str]) -> None:
        """Whoever has a lease lives now, whatever was written of it."""
        now = _time(time.time())
        self._seen.update(dict.fromkeys(names, now))
        for times in (self._state.last_heartbeats, self._state.seats):
            times.update({n: max(at, self._seen.get(self._name_of(n), at)) for n, at in times.items()})

    def _all_are_silent(self) -> bool:
        last_seen = {**self._state.seats, **self._state.last_heartbeats}
        expired = _time(time.time()) - timedelta(seconds=self.alive_secs)
        return bool(last_seen) and all(at < expired for at in last_seen.values())

    def _strike_out(self) -> None:
        """Those that are silent, and while a round is left for the next one those whose launchers have ended:
        whoever waits for their places need not wait until they are silent for long."""
        state = self._state
        expired = _time(time.time()) - timedelta(seconds=self.alive_secs)
        # A node on its way from one round to the next has its seat alone.
        last_seen = {**state.seats, **state.last_heartbeats}
        ended = self._ended() if state.seats.keys() - state.participants.keys() else set()
        lost = {n for n, at in last_seen.items() if at < expired or self._name_of(n) in ended} - {self._node}
        took_part = not lost.isdisjoint(state.participants)
        for node in lost:
            state.last_heartbeats.pop(node, None)
            state.participants.pop(node, None)
            state.seats.pop(node, None)
        for group in (state.wait_list, state.redundancy_list, state.leaving):
            group.difference_update(lost)
        if took_part:
            _remove_participant_epilogue(state, self._settings)

    def _ended(self) -> set[str]:
        try:
            left = self.store.left(self._here)
        except StoreError as error:
            raise RendezvousConnectionError(str(error)) from error
        return {name for name, secs in left.items() if secs > self.grace_secs}

    def _name_of(self, node: _NodeDesc) -> str:
        return f"{self._here}{node.addr}/{node.pid}/{node.local_id}"


class IncarnationRecord:
    """What the store knows of the starts of the job. Safe to use from several threads."""

    def __init__(self, store: RendezvousStore, job_id: str) -> None:
        self._store = store
        self._key = f"reft/{job_id}/incarnation"
        self._committed_key = committed_key(job_id)

    def read(self) -> int:
        """The newest start that the store knows of; 0 if none. Raises StoreError."""
        return _number(self._store.peek(self._key))

    def committed(self) -> int:
        """The start that has committed the newest version; 0 if none is known of. Raises StoreError."""
        held = self._store.peek(self._committed_key)
        return 0 if held is None else _number(held.partition(b":")[0])

    def raise_to(self, number: int) -> int:
        """Have the store know of a start, as one that was lost and came back does not; returns the newest
        that it knows of now. Raises StoreError."""
        held = self._store.peek(self._key)
        while (known := _number(held)) < number:
            done, held = self._store.compare_set(self._key, held, str(number).encode())
            if done:
                return number
        return known


def _number(held: bytes | None) -> int:
    return int(held) if held is not None and held.isdigit() else 0
