"""TorchElastic's rendezvous over reft's store, and its ``static`` one.

Three things differ from :class:`DynamicRendezvousHandler`. The state that nodes share is JSON, read field
by field: TorchElastic unpickles it, so that whoever writes it runs code on every node (P11). A node
that was struck out while it stood still, or while the store did, takes its place again; TorchElastic's
never beats again and never sees who waits for it. And a spare, a node beyond ``max_nodes``, takes the place
of a dead node alone: TorchElastic's also takes that of a healthy one, which leaves its round to join the next
when trainers are restarted, and whose memory is then out of the job's reach.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    _Action,
    _NodeDesc,
    _remove_participant_epilogue,
    _RendezvousContext,
    _RendezvousExitOp,
    _RendezvousJoinOp,
    _RendezvousKeepAliveOp,
    _RendezvousState,
    _RendezvousStateHolder,
    _should_keep_alive,
)
from torch.distributed.elastic.rendezvous.utils import _delay

from reft.elastic.incarnation import IncarnationRecord
from reft.elastic.rendezvous_executor import RendezvousExecutor, look_secs
from reft.errors import AuthenticationError, FencedError
from reft.store.rendezvous_store import RendezvousStore, StoreError

_GRACE_SECS = 0.5
"""In which a node that lives, and has lost its connection, connects again; a lost lease is taken again with
the next heartbeat."""
_ZONE = UTC if hasattr(dynamic_rendezvous, "timezone") else None
"""Of the times that TorchElastic compares: torch 2.4's are in UTC too, and do not say so."""
_LOOPBACK = RendezvousStoreInfo("127.0.0.1", 0)
"""Where trainers meet is arranged by :mod:`reft.elastic.trainer_store`."""


def encode_state(state: _RendezvousState) -> bytes:
    """The shared state as JSON."""
    fields = {
        "round": state.round,
        "complete": state.complete,
        "closed": state.closed,
        "deadline": state.deadline and _seconds(state.deadline),
        "participants": [[*_node_fields(n), rank] for n, rank in state.participants.items()],
        "wait_list": [_node_fields(n) for n in sorted(state.wait_list)],
        "redundancy_list": [_node_fields(n) for n in sorted(state.redundancy_list)],
        "last_heartbeats": [[*_node_fields(n), _seconds(at)] for n, at in state.last_heartbeats.items()],
        "seats": [[*_node_fields(n), _seconds(at)] for n, at in seats_of(state).items()],
    }
    return json.dumps(fields).encode()


def decode_state(data: bytes) -> _RendezvousState:
    """Read what :func:`encode_state` wrote.

    Raises:
        RendezvousStateError: it is something else.
    """
    try:
        fields = json.loads(data)
        deadline = fields["deadline"]
        state = _RendezvousState()
        state.round = int(fields["round"])
        state.complete = bool(fields["complete"])
        state.closed = bool(fields["closed"])
        state.deadline = None if deadline is None else _time(deadline)
        state.participants = {_node(f[:3]): int(f[3]) for f in fields["participants"]}
        state.wait_list = {_node(f) for f in fields["wait_list"]}
        state.redundancy_list = {_node(f) for f in fields["redundancy_list"]}
        state.last_heartbeats = {_node(f[:3]): _time(f[3]) for f in fields["last_heartbeats"]}
        seats_of(state).update({_node(f[:3]): _time(f[3]) for f in fields["seats"]})
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, OSError) as error:
        raise RendezvousStateError(
            f"the rendezvous state in the store is none of reft's ({type(error).__name__}: {error}): all "
            f"nodes need the same version of reft"
        ) from error
    return state


def seats_of(state: _RendezvousState) -> dict[_NodeDesc, datetime]:
    """Nodes that took part in the last complete round and have not been struck out since, with the time when
    they were seen taking part: they keep their place while they go from one round to the next."""
    seats: dict[_NodeDesc, datetime] = state.__dict__.setdefault("seats", {})
    return seats


def _node_fields(node: _NodeDesc) -> list[Any]:
    return [node.addr, node.pid, node.local_id]


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
    to show itself again.

    Args:
        store: of the job.
        node: this node.
        settings: of the rendezvous.
    """

    def __init__(self, store: RendezvousStore, node: _NodeDesc, settings: RendezvousSettings) -> None:
        self.store = store
        self._node = node
        self._settings = settings
        self._key = f"rendezvous/{settings.run_id}"
        self._here = f"{self._key}/here/"
        self._look_secs = look_secs(settings.max_nodes)
        self._alive_secs = (settings.keep_alive_interval * settings.keep_alive_max_attempt).total_seconds()
        self._state = _RendezvousState()
        self._held: bytes | None = None
        self._dirty = False
        self.synced_at = float("-inf")
        self._trusts_after = float("-inf")
        self._seen: dict[str, datetime] = {}
        # Longer than the time between two looks.
        interval = settings.keep_alive_interval.total_seconds()
        self._lease_secs = max(self._alive_secs / 2, interval + 1.0)
        self.grace_secs = self._lease_secs if store.keeps_leases else _GRACE_SECS

    @property
    def state(self) -> _RendezvousState:
        return self._state

    def mark_dirty(self) -> None:
        self._dirty = True

    def sync(self) -> bool | None:
        """Write the state if it was changed here, else read it; whether it was written, None if read.

        Raises:
            RendezvousConnectionError: the store does not answer.
            RendezvousStateError: it holds something else.
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
        self._state = _RendezvousState() if self._held is None else decode_state(self._held)
        self._note_alive(alive)
        self._dirty = False
        now = time.monotonic()
        gap = now - self.synced_at
        # On the first look there is none to go by: where nobody has beaten, the store may have stood still.
        if self._all_are_silent() if gap == float("inf") else gap > self._alive_secs:
            self._trusts_after = now + self._alive_secs
        self.synced_at = now
        if self._state.complete:
            seen = {
                n: self._state.last_heartbeats.get(n, _time(time.time())) for n in self._state.participants
            }
            seats_of(self._state).update(seen)
        if now >= self._trusts_after:
            self._strike_out()
        return written

    def _note_alive(self, names: Iterable[str]) -> None:
        """Whoever has a lease lives now, whatever was written of it."""
        now = _time(time.time())
        self._seen.update(dict.fromkeys(names, now))
        for times in (self._state.last_heartbeats, seats_of(self._state)):
            times.update({n: max(at, self._seen.get(self._name_of(n), at)) for n, at in times.items()})

    def _all_are_silent(self) -> bool:
        last_seen = {**seats_of(self._state), **self._state.last_heartbeats}
        expired = _time(time.time()) - timedelta(seconds=self._alive_secs)
        return bool(last_seen) and all(at < expired for at in last_seen.values())

    def _strike_out(self) -> None:
        """Those that are silent, and while a round is left for the next one those whose launchers have ended:
        whoever waits for their places need not wait until they are silent for long."""
        state = self._state
        expired = _time(time.time()) - timedelta(seconds=self._alive_secs)
        # A node on its way from one round to the next has its seat alone.
        last_seen = {**seats_of(state), **state.last_heartbeats}
        ended = self._ended() if seats_of(state).keys() - state.participants.keys() else set()
        lost = {n for n, at in last_seen.items() if at < expired or self._name_of(n) in ended} - {self._node}
        took_part = not lost.isdisjoint(state.participants)
        for node in lost:
            state.last_heartbeats.pop(node, None)
            state.participants.pop(node, None)
            seats_of(state).pop(node, None)
        state.wait_list -= lost
        state.redundancy_list -= lost
        if took_part:
            _remove_participant_epilogue(state, self._settings)

    def _ended(self) -> set[str]:
        """Names of launchers that have ended."""
        try:
            left = self.store.left(self._here)
        except StoreError as error:
            raise RendezvousConnectionError(str(error)) from error
        return {name for name, secs in left.items() if secs > self.grace_secs}

    def _name_of(self, node: _NodeDesc) -> str:
        return f"{self._here}{node.addr}/{node.pid}/{node.local_id}"


class StoreRendezvous(DynamicRendezvousHandler):
    """Elastic rendezvous of one node over reft's store.

    Args:
        store: of the job.
        parameters: as ``torchrun`` makes them.

    Raises:
        ValueError: a parameter cannot be used.
    """

    def __init__(self, store: RendezvousStore, parameters: RendezvousParameters) -> None:
        node = self._node_desc_generator.generate(parameters.local_addr)
        settings = RendezvousSettings(
            parameters.run_id,
            parameters.min_nodes,
            parameters.max_nodes,
            RendezvousTimeout(
                **{n: _secs(parameters, f"{n}_timeout") for n in ("join", "last_call", "close", "heartbeat")}
            ),
            keep_alive_interval=timedelta(seconds=int(parameters.get("keep_alive_interval", 5))),
            keep_alive_max_attempt=int(parameters.get("keep_alive_max_attempt", 3)),
        )
        self._place: tuple[int, int] | None = None
        self._lost: str | None = None
        self.incarnations: IncarnationRecord | None = None
        """What the store knows of the starts of the job; None: nobody asks."""
        self.incarnation = 0
        """Number of the start that this node took part in last; 0: none."""
        self.newest_incarnation = 0
        """The newest one, as the last heartbeat found it in the store."""
        holder = StateHolder(store, node, settings)
        super().__init__(node, settings, parameters.backend, store, holder)  # type: ignore[arg-type]
        self._op_executor = RendezvousExecutor(node, holder, settings)

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round; see TorchElastic."""
        self._stop_heartbeats()
        self._place, self._lost = None, None
        if self._state_holder.state.round == 0:
            _delay(seconds=(0, 0.3))
        deadline = self._get_deadline(self._settings.timeout.join)
        self._op_executor.run(_RendezvousExitOp(), deadline)
        self._refuse_if_replaced()
        self._op_executor.run(self._join, deadline, self._get_deadline)
        rank, size = self._get_world()
        current = self._state_holder.state.round
        self._place = current, rank
        self._start_heartbeats()
        store: Any = self._store
        prefix = f"run/{self._settings.run_id}/{current}"
        return RendezvousInfo(store.with_prefix(prefix), rank, size, _LOOPBACK)

    def _refuse_if_replaced(self) -> None:
        """End where a round goes on that another node has joined in this one's place."""
        if self.incarnations is None or not self.incarnation:
            return
        try:
            newest = self.incarnations.read()
        except StoreError as error:
            raise RendezvousConnectionError(str(error)) from error
        state = self._state_holder.state
        has_place = self._this_node in state.participants or self._this_node in seats_of(state)
        if newest > self.incarnation and state.complete and not has_place:
            raise replaced(self.incarnation, newest)

    def _join(self, context: _RendezvousContext, deadline: float) -> _Action:
        """Join where there is a place: a spare waits until a node is struck out, as long as that takes."""
        state, node = context.state, self._this_node
        taken = seats_of(state).keys() | state.participants.keys() | state.wait_list
        if state.closed or node in taken or len(taken) < self._settings.max_nodes:
            return _RendezvousJoinOp()(context, deadline)
        if node not in state.redundancy_list:
            return _Action.ADD_TO_REDUNDANCY_LIST
        return _Action.KEEP_ALIVE if _should_keep_alive(context) else _Action.SYNC

    @property
    def is_spare(self) -> bool:
        """Whether this node waits for the place of another one, as the last heartbeat saw it."""
        return self._this_node in self._state_holder.state.redundancy_list

    def num_nodes_waiting(self) -> int:
        """Nodes that this round's trainers keep waiting, as the last heartbeat saw it; does not wait for
        the store.

        Raises:
            RendezvousConnectionError: the last heartbeat did not reach the store.
        """
        if self._lost is not None:
            raise RendezvousConnectionError(self._lost)
        state = self._state_holder.state
        if self._place is None or not self._has_lost_its_place(state):
            return len(state.wait_list)
        # The job goes on, or gathers, without this node: it joins again.
        return max(1, len(state.wait_list))

    def _has_lost_its_place(self, state: _RendezvousState) -> bool:
        if self._place is None or self._this_node in state.participants or state.closed:
            return False
        return not self._may_take_its_place(state)

    def _may_take_its_place(self, state: _RendezvousState) -> bool:
        """Whether this node's round still runs and its place is free: it was struck out, or the store
        came back empty."""
        assert self._place is not None
        if _is_empty(state):
            return True
        same = state.complete and state.round == self._place[0]
        return same and len(state.participants) < self._settings.max_nodes

    def _keep_alive(self) -> None:
        with self._heartbeat_lock:
            try:
                self._op_executor.run(self._beat, self._get_deadline(self._settings.timeout.heartbeat))
                if self.incarnations is not None:
                    self.newest_incarnation = self.incarnations.raise_to(self.incarnation)
                self._lost = None
            except RendezvousTimeoutError:
                pass  # the store stood still and goes on: the next beat is in time
            except (RendezvousError, AuthenticationError, StoreError) as error:
                self._lost = str(error)

    def _beat(self, context: _RendezvousContext, deadline: float) -> _Action:
        state = context.state
        missing = self._this_node not in state.participants and not state.closed
        if self._place is not None and missing and self._may_take_its_place(state):
            if time.monotonic() > deadline:
                return _Action.ERROR_TIMEOUT
            state.round, state.participants[self._this_node] = self._place
            state.complete = True
            return _Action.KEEP_ALIVE
        return _RendezvousKeepAliveOp()(context, deadline)


def replaced(mine: int, newest: int) -> FencedError:
    """Why this node ends: it was cut off, and the job has been started anew without it."""
    return FencedError(
        f"this node was cut off and another one has taken its place: the job runs as start {newest}, this "
        f"node as start {mine}. It ends, with its trainers and its daemon; start `reft launch` here again "
        f"for it to be a spare"
    )


def _is_empty(state: _RendezvousState) -> bool:
    return not (state.complete or state.closed or state.participants or state.wait_list or state.round)


def _secs(parameters: RendezvousParameters, name: str) -> timedelta | None:
    value = parameters.get_as_int(name)
    return None if value is None else timedelta(seconds=value)


class StaticRendezvous(RendezvousHandler):
    """A fixed set of nodes, numbered by ``--node-rank``.

    Args:
        store: of the job, served by node 0.
        rank: of this node.
        size: number of nodes.
        run_id: of the job.
    """

    def __init__(self, store: RendezvousStore, rank: int, size: int, run_id: str) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._run_id = run_id

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store: Any = self._store.with_prefix(f"run/{self._run_id}")
        return RendezvousInfo(store, self._rank, self._size, _LOOPBACK)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    is_spare = False
    newest_incarnation = 0
    incarnation = 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True
