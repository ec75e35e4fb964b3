"""TorchElastic's rendezvous over reft's store.

Four things differ from :class:`DynamicRendezvousHandler`. The state that nodes share is reft's own
(:mod:`reft.job.rendezvous.state`). A node that was struck out while it stood still, or while the store did,
takes its place again; TorchElastic's never beats again and never sees who waits for it. A spare, a node
beyond ``max_nodes``, takes the place of a dead node alone: TorchElastic's also takes that of a healthy one,
which leaves its round to join the next when trainers are restarted, and whose memory is then out of the
job's reach. And a job goes to another number of nodes on request: those that leave are spares, with their
memory, until the others have committed a version without them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    _Action,
    _DistributedRendezvousOpExecutor,
    _NodeDesc,
    _RendezvousContext,
    _RendezvousExitOp,
    _RendezvousJoinOp,
    _RendezvousKeepAliveOp,
    _should_keep_alive,
)
from torch.distributed.elastic.rendezvous.utils import _delay

from reft.control.keyvalue import RendezvousStore, StoreError
from reft.errors import AuthenticationError, FencedError, ReftError
from reft.job.rendezvous.state import (
    IncarnationRecord,
    JobState,
    Scaling,
    Sizes,
    StateHolder,
    limited,
    look_secs,
    member_of,
    secs_from_now,
)

logger = logging.getLogger(__name__)

LOOPBACK = RendezvousStoreInfo("127.0.0.1", 0)  # where trainers meet is arranged by `reft.job.trainer_store`
_JOIN_PART = 0.9  # of ``join_timeout``, after which whoever waits ends
_ALONE_SECS = 5.0
"""A node that is to be replaced takes its place again where for so long no other has waited for it."""


class LeftError(ReftError, RuntimeError):
    """This node has left the job, as it was told to."""


class _Context(_RendezvousContext):
    state: JobState


class StoreRendezvous(DynamicRendezvousHandler):
    """Elastic rendezvous of one node over reft's store. Raises ValueError: a parameter cannot be used."""

    _state_holder: StateHolder
    _op_executor: RendezvousExecutor

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
        self._place: tuple[int, int] | None = None  # Round and rank
        self._members: dict[_NodeDesc, int] = {}
        self._last_scaling: Scaling | None = None
        self._last_sizes: Sizes | None = None
        self._last_round = -1
        self._told_to_leave = self._was_spare = self._said = False
        self._forgotten_until = float("-inf")
        self._alone_since: float | None = None
        self.left: frozenset[int] = frozenset()
        """Ranks that nodes had in the round before which have left since, as they were told to."""
        self._lost: str | None = None
        self.incarnations: IncarnationRecord | None = None
        """What the store knows of the starts of the job; None: nobody asks."""
        self.wait_secs: float | None = None
        """How long those that are left wait for others in the place of lost nodes; None: as for any round."""
        self._began = self._again_as_many_at = 0.0
        self.incarnation = 0  # number of the start that this node took part in last; 0: none
        self.newest_incarnation = 0  # the newest one, as the last heartbeat found it in the store
        holder = StateHolder(store, node, settings)
        self._alive_secs = holder.alive_secs
        super().__init__(node, settings, parameters.backend, store, holder)  # type: ignore[arg-type]
        self._op_executor = RendezvousExecutor(node, holder, settings)

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._stop_heartbeats()
        self._place, self._lost, self._was_spare = None, None, False
        self._began, self._again_as_many_at, self._said = time.monotonic(), 0.0, False
        if self.state.round == 0:
            _delay(seconds=(0, 0.3))
        deadline = self._get_deadline(self._settings.timeout.join)
        self._op_executor.run(_RendezvousExitOp(), deadline)
        leaving = self.state.leaving
        self.left = frozenset(rank for node, rank in self._members.items() if node in leaving)
        self._told_to_leave = self.is_leaving
        if not self._told_to_leave:
            self._refuse_if_replaced()
        self._op_executor.run(self._join, deadline, self._get_deadline)
        self._told_to_leave = False
        rank, size = self._get_world()
        state, current = self.state, self.state.round
        self.left |= {rank for node, rank in self._members.items() if node in state.redundancy_list}
        self._place, self._members = (current, rank), dict(state.participants)
        self._last_round = current
        self._start_heartbeats()
        store: Any = self._store
        return RendezvousInfo(
            store.with_prefix(f"run/{self._settings.run_id}/{current}"), rank, size, LOOPBACK
        )

    def _refuse_if_replaced(self) -> None:
        """End where a round goes on that another node has joined in this one's place."""
        if self.incarnations is None or not self.incarnation:
            return
        try:
            newest = self.incarnations.read()
        except StoreError as error:
            raise RendezvousConnectionError(str(error)) from error
        if newest > self.incarnation and self.state.complete and not self.has_place:
            raise replaced(self.incarnation, newest, by_another=self.is_full)

    def _join(self, context: _Context, deadline: float) -> _Action:
        """Join where there is a place: a spare waits until a node is struck out, one that leaves until it is
        not needed any more, and then raises LeftError."""
        state, node = context.state, self._this_node
        leaving = state.leaving
        most, trains = self._most(state, context.settings), state.participants.keys()
        taken = (state.seats.keys() | trains | state.wait_list) - leaving
        is_free = len(taken) < most and self._may_take_a_place(state)
        # One that the others went on without keeps nobody from training, although it had a seat.
        is_one_too_many = state.complete and node not in trains and len(trains - leaving) >= most
        is_forgotten = self._is_forgotten(state)
        may_join = is_free and not is_forgotten
        if state.closed or may_join or (node in taken and not is_one_too_many):
            self._was_spare = False
            if state.complete:
                # A round that is over: how many the next one may have is counted above.
                context.settings = self._settings
            if not state.closed and node in leaving and node not in state.redundancy_list:
                leaving.discard(node)  # a node was lost: its place is taken
            self._wait_for_lost(state)
            self._say_what_is_waited_for(state)
            return _RendezvousJoinOp()(context, deadline)
        if is_forgotten and _is_empty(state):
            return _Action.SYNC
        if node not in state.redundancy_list:
            state.wait_list.discard(node)
            return _Action.ADD_TO_REDUNDANCY_LIST
        # One that fell silent meanwhile was struck out: nobody else knows any more that it leaves.
        if self._told_to_leave and self._is_dispensable(state):
            self._op_executor.run(self._leave, self._get_deadline(self._settings.timeout.heartbeat))
            raise LeftError("this node has left the job, as requested; the job continues without it")
        return _Action.KEEP_ALIVE if _should_keep_alive(context) else _Action.SYNC

    def _wait_for_lost(self, state: JobState) -> None:
        """Set until when those that have come wait for others, of whom there are enough; written with this
        node's next heartbeat."""
        if self.wait_secs is None or state.complete or state.deadline is None or not self._members:
            return
        until = self._began + min(self.wait_secs, _JOIN_PART * self._settings.timeout.join.total_seconds())
        if len(state.participants) >= len(self._members.keys() - state.leaving):
            self._again_as_many_at = self._again_as_many_at or time.monotonic()
            until = self._again_as_many_at + self._settings.timeout.last_call.total_seconds()
        state.deadline = secs_from_now(timedelta(seconds=until - time.monotonic()))

    def _say_what_is_waited_for(self, state: JobState) -> None:
        """Once, where trainers of this node have ended and no round has formed within a heartbeat."""
        patience = self._settings.keep_alive_interval.total_seconds()
        least, here = self._settings.min_nodes, len(state.participants | state.seats)
        if self._said or not self._members or here >= least or time.monotonic() - self._began < patience:
            return
        self._said = True
        logger.warning(
            "%d of %d nodes are here; waiting up to %.0f s for `reft launch` on another node",
            *(here, least, self._settings.timeout.join.total_seconds()),
        )

    def _most(self, state: JobState, settings: RendezvousSettings) -> int:
        """Nodes that may train. While others do, as many as fit of those that are there: a node that left
        their round comes back, any other waits until its coming makes it larger."""
        sizes = state.sizes
        if sizes is None or not state.complete or self._last_round == state.round:
            return settings.max_nodes
        there = (state.participants.keys() | state.wait_list | state.redundancy_list) - state.leaving
        return sizes.largest(len(there | {self._this_node}), settings.min_nodes, settings.max_nodes)

    def _is_forgotten(self, state: JobState) -> bool:
        """Whether the store has lately lost that this node is a spare: it may have lost as well who trains,
        and they tell it with their next heartbeats."""
        now = time.monotonic()
        if self._this_node in state.redundancy_list:
            self._was_spare = True
        elif self._was_spare:
            self._was_spare, self._forgotten_until = False, now + self._alive_secs
        return now < self._forgotten_until

    def _may_take_a_place(self, state: JobState) -> bool:
        """While nodes leave, a place that is free is theirs: one was lost. Where they are replaced it is that
        of a node that waits, and theirs again where none has waited for long."""
        leaving, scaling = state.leaving, state.scaling
        if not leaving:
            return True
        is_leaving = self._this_node in leaving
        if scaling is None or not scaling.replaces:
            return is_leaving
        if not is_leaving or state.redundancy_list - leaving:
            self._alone_since = None
            return not is_leaving
        self._alone_since = self._alone_since or time.monotonic()
        return time.monotonic() - self._alone_since > _ALONE_SECS

    def _is_dispensable(self, state: JobState) -> bool:
        """Whether the others have committed without this node; until then they may need its memory."""
        if not state.complete or self.incarnations is None:
            return False
        try:
            return self.incarnations.committed() > self.incarnation
        except StoreError as error:
            raise RendezvousConnectionError(str(error)) from error

    def _leave(self, context: _Context, deadline: float) -> _Action:
        state, node = context.state, self._this_node
        if node not in state.redundancy_list:
            return _Action.FINISH
        if time.monotonic() > deadline:
            return _Action.ERROR_TIMEOUT
        state.leaving.discard(node)
        state.seats.pop(node, None)
        state.last_heartbeats.setdefault(node, datetime.now(UTC))
        return _Action.REMOVE_FROM_REDUNDANCY_LIST

    @property
    def has_place(self) -> bool:
        """Whether this node is in the round that runs or forms, or goes from one to the next."""
        state = self.state
        return self._this_node in state.participants.keys() | state.seats.keys()

    @property
    def is_full(self) -> bool:
        state = self.state
        return state.complete and len(state.participants) >= limited(self._settings, state).max_nodes

    @property
    def is_leaving(self) -> bool:
        return self._this_node in self.state.leaving

    def scale(self, change: Callable[[JobState], Scaling | None]) -> None:
        """Have the job go to another number of nodes: what ``change`` makes of the shared state, in which it
        may name nodes that leave; None: nothing new. Raises RendezvousError: the store does not answer."""

        def ask(state: JobState) -> bool:
            scaling = change(state)
            if scaling is None or scaling == state.scaling:
                return False
            state.scaling = scaling
            return True

        self._change(ask)

    def _change(self, change: Callable[[JobState], bool]) -> None:

        def act(context: _Context, deadline: float) -> _Action:
            if not change(context.state):
                return _Action.FINISH
            return _Action.ERROR_TIMEOUT if time.monotonic() > deadline else _Action.KEEP_ALIVE

        with self._heartbeat_lock:
            self._op_executor.run(act, self._get_deadline(self._settings.timeout.heartbeat))

    def note_sizes(self, sizes: Sizes) -> None:
        """Have all nodes know with how many the job can train, as a version of this node's round tells, whose
        members are filled in where it says what they hold. Raises RendezvousError: the store is silent."""
        by_rank = sorted(self._members, key=lambda node: self._members[node])
        members = tuple(map(member_of, by_rank)) if sizes.groups else ()

        def known(state: JobState) -> Sizes | None:
            if self._place is None or not state.complete or state.round != self._place[0]:
                return None
            refused = (state.sizes or Sizes()).refused
            return replace(sizes, members=members, refused=tuple(n for n in refused if n != len(by_rank)))

        if known(self.state) not in (None, self.state.sizes):
            self._share_sizes(known)

    def refuse_size(self) -> bool:
        """Trainers were refused with as many nodes as this round has: it is not tried again. Whether another
        number may do: fewer, where this is not all that may come, or what fitted before. Raises
        RendezvousError: the store does not answer."""
        number = len(self._members)
        self._share_sizes(lambda state: (state.sizes or Sizes()).refusing(number))
        sizes, settings = self.state.sizes or Sizes(), self._settings
        return number < settings.max_nodes or bool(
            sizes.fitting and sizes.of(settings.min_nodes, settings.max_nodes)
        )

    def _share_sizes(self, sizes_of: Callable[[JobState], Sizes | None]) -> None:
        def share(state: JobState) -> bool:
            sizes = sizes_of(state)
            if sizes is None or sizes == state.sizes or state.closed:
                return False
            state.sizes = sizes
            return True

        self._change(share)

    @property
    def fitting(self) -> tuple[int, ...]:
        sizes = self.state.sizes or self._last_sizes or Sizes()
        return sizes.of(self._settings.min_nodes, self._settings.max_nodes)

    @property
    def state(self) -> JobState:
        """What the nodes share, as the last heartbeat saw it: as old is all that is said of it here."""
        return self._state_holder.state

    @property
    def is_spare(self) -> bool:
        return self._this_node in self.state.redundancy_list

    def num_nodes_waiting(self) -> int:
        """Nodes that this round's trainers keep waiting; does not wait for the store. Raises
        RendezvousConnectionError: the last heartbeat did not reach the store."""
        if self._lost is not None:
            raise RendezvousConnectionError(self._lost)
        state = self.state
        has_place = self._place is None or self._this_node in state.participants or state.closed
        if has_place or self._may_take_its_place(state):
            # For whom there is no place, it sees that itself, and is a spare then.
            waiting = 0 if self.is_full else self._joining(state)
            return waiting or int(self.is_scaled_down)
        # The job goes on, or gathers, without this node: it joins again.
        return max(1, len(state.wait_list))

    def _joining(self, state: JobState) -> int:
        """Nodes that wait for the next round, where they make it larger, or have left this one."""
        sizes, running = state.sizes, len(state.participants)
        waiting = len(state.wait_list)
        if sizes is None or state.wait_list & self._members.keys():
            return waiting
        settings = limited(self._settings, state)
        larger = sizes.largest(running + waiting, settings.min_nodes, settings.max_nodes)
        return waiting if larger > running else 0

    @property
    def is_scaled_down(self) -> bool:
        scaling = self.state.scaling
        return self._place is not None and scaling is not None and scaling.round == self._place[0]

    @property
    def is_whole(self) -> bool:
        """Whether all nodes of this round are there: nothing has failed."""
        return bool(self._members) and self._members.keys() <= self.state.seats.keys()

    def goes_on_without(self, gone: int) -> bool:
        """Whether enough nodes are left, with those that wait, where so many of this round have ended."""
        state, settings = self.state, self._settings
        waiting = (state.redundancy_list | state.wait_list) - state.leaving - self._members.keys()
        left = len(self._members) - gone + len(waiting)
        return (state.sizes or Sizes()).largest(left, settings.min_nodes, settings.max_nodes) > 0

    @property
    def is_left_by_silent(self) -> bool:
        """Whether a node of the round that runs was struck out, no other has come, and those that are left
        are enough for a round."""
        state = self.state
        if self._lost is not None or self._place is None or not state.complete:
            return False
        trains = state.participants.keys()
        same = state.round == self._place[0] and self._this_node in trains
        lost = self._members.keys() - trains - state.leaving
        return same and bool(lost) and len(trains) >= limited(self._settings, state).min_nodes

    def _may_take_its_place(self, state: JobState) -> bool:
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

    def _beat(self, context: _Context, deadline: float) -> _Action:
        state = context.state
        missing = self._this_node not in state.participants and not state.closed
        self._last_scaling = state.scaling or self._last_scaling
        self._last_sizes = state.sizes or self._last_sizes
        if self._place is not None and missing and self._may_take_its_place(state):
            if time.monotonic() > deadline:
                return _Action.ERROR_TIMEOUT
            if _is_empty(state) and self._last_scaling is not None:
                state.scaling = self._last_scaling
            if _is_empty(state) and self._last_sizes is not None:
                state.sizes = self._last_sizes
            state.round, state.participants[self._this_node] = self._place
            state.complete = True
            return _Action.KEEP_ALIVE
        return _RendezvousKeepAliveOp()(context, deadline)


def replaced(mine: int, newest: int, *, by_another: bool) -> FencedError:
    """Why this node ends: it took part in start ``mine`` of the job, was cut off, and ``newest`` runs without
    it, with as many nodes as it may have (``by_another``) or with fewer."""
    how = "another node has replaced it" if by_another else "the job continued with fewer nodes"
    then = "be a spare" if by_another else "join it"
    return FencedError(
        f"this node was cut off and {how}: the job runs as start {newest}, this node as start {mine}. This "
        "launcher ends, with its trainers and its daemon; start `reft launch` here again for the node to "
        f"{then}"
    )


def _is_empty(state: JobState) -> bool:
    return not (state.complete or state.closed or state.participants or state.wait_list or state.round)


def _secs(parameters: RendezvousParameters, name: str) -> timedelta | None:
    value = parameters.get_as_int(name)
    return None if value is None else timedelta(seconds=value)


class RendezvousExecutor(_DistributedRendezvousOpExecutor):
    """TorchElastic's, which looks once a second: gathering takes several looks, one after the other, while
    the whole job waits. This one looks more often where there are not hundreds of nodes to do so. A round
    is complete with as many nodes as were asked for, and as fit the job (:mod:`reft.job.rendezvous.state`).
    """

    _state_holder: StateHolder
    _state: JobState

    def __init__(self, node: _NodeDesc, holder: StateHolder, settings: RendezvousSettings) -> None:
        super().__init__(node, holder, settings)
        self._given = settings

    def run(
        self,
        state_handler: Callable[[_Context, float], _Action],
        deadline: float,
        update_deadline: Callable[[timedelta], float] | None = None,
    ) -> None:
        while True:
            self._state_holder.sync()
            self._state = self._state_holder.state
            self._settings = limited(self._given, self._state)
            context = _Context(self._node, self._state, self._settings)
            action = state_handler(context, deadline)
            if action is _Action.FINISH:
                return
            if action is _Action.ERROR_CLOSED or action is _Action.ERROR_TIMEOUT:
                raise RendezvousClosedError if action is _Action.ERROR_CLOSED else RendezvousTimeoutError
            if action is _Action.SYNC:
                time.sleep(look_secs(self._given.max_nodes))
                continue
            getattr(self, f"_{action.name.lower()}")()
            if action is _Action.REMOVE_FROM_REDUNDANCY_LIST and update_deadline is not None:
                deadline = update_deadline(self._settings.timeout.join)
            self._state_holder.mark_dirty()

    def _mark_rendezvous_complete(self) -> None:
        """With the nodes that fit: the others become spares. Without any, later."""
        state, sizes = self._state, self._state.sizes
        if sizes is not None:
            there = {member_of(node): node for node in sorted(state.participants)}
            staying = sizes.staying(tuple(there), self._settings.min_nodes, self._settings.max_nodes)
            if staying is None:
                state.deadline = secs_from_now(self._settings.timeout.last_call)
                return
            for node in (node for member, node in there.items() if member not in staying):
                del state.participants[node]
                state.seats.pop(node, None)
                state.redundancy_list.add(node)
            if len(staying) < len(there):
                logger.warning(
                    "%d nodes have joined and %d of them train, as many as fit the job's layout and batch; "
                    "the others wait",
                    *(len(there), len(staying)),
                )
        super()._mark_rendezvous_complete()
