"""The rendezvous of one node, over reft's store; :mod:`reft.job.rendezvous.membership` decides."""

from __future__ import annotations

import logging
import os
import random
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from torch.distributed.launcher.api import LaunchConfig

from reft.control.keyvalue import RendezvousStore, StoreError
from reft.errors import AuthenticationError, FencedError, ReftError
from reft.job.rendezvous.membership import (
    Agreement,
    Event,
    Heartbeat,
    JobClosed,
    JobRules,
    JobState,
    JoinRequested,
    Node,
    NodeInfo,
    Role,
    SizeRejected,
    SizesKnown,
    SpareLeft,
    StateRead,
    TrainersExited,
    decode_state,
    encode_state,
    step,
    waits_for_them,
)
from reft.naming import committed_key
from reft.relayout.sizes import Sizes

logger = logging.getLogger(__name__)

_JOIN_PART = 0.9  # of ``join_timeout``, after which whoever waits ends
_ALONE_SECS = 5.0
"""A node that is to be replaced takes its place again where for so long no other has waited for
it."""
_GRACE_SECS = 0.5
"""In which a node that lives, and has lost its connection, connects again; a lost lease is taken
again with the next heartbeat."""
_LEAST_SECS, _MOST_SECS = 0.1, 1.0
_NODES_PER_SEC = 500  # All nodes together look so often, whose state grows with their number
_SKEW_SECS = 0.3  # Nodes that are started at once do not all ask the store at once
_COMPARE_SECS = 60.0
_MOST_NAMED = 4  # Nodes in one message
_NEVER = float("-inf")


class LeftError(ReftError, RuntimeError):
    """This node has left the job, as it was told to."""


class StoreRendezvous:
    """Elastic rendezvous of one node over reft's store. Raises ValueError: an option cannot be
    used."""

    def __init__(
        self, store: RendezvousStore, config: LaunchConfig, info: NodeInfo, job_id: str
    ) -> None:
        def number(name: str, default: int) -> int:
            found = int(config.rdzv_configs.get(name, default))
            if found <= 0:
                raise ValueError(f"{name} is {found}; expected a number above 0")
            return found

        self._store, self._run_id = store, config.run_id
        nnodes = sorted({config.min_nodes, config.max_nodes})
        self.info = replace(
            info, nnodes=":".join(map(str, nnodes))
        )  # that this node brings into the next round
        # ``--nnodes`` of nodes that have another one, by node id
        self.other_nnodes: dict[str, str] = {}
        self.agreement: Agreement | None = None  # of the last round that this node took part in
        # Unique: in containers, launchers that follow each other have one number.
        address = config.local_addr or socket.getfqdn()
        self.node = f"{address}/{os.getpid()}/{secrets.token_hex(4)}"
        self.rules = JobRules(
            config.min_nodes,
            config.max_nodes,
            number("last_call_timeout", 30),
            number("keep_alive_interval", 5),
            number("keep_alive_max_attempt", 3),
        )
        self._join_secs, self._close_secs = number("join_timeout", 600), number("close_timeout", 30)
        self._heartbeat_secs = number("heartbeat_timeout", 5)
        self.state = (
            JobState()
        )  # What it shares, as the last heartbeat saw it: as old is all that is said of it
        self._key = f"rendezvous/{config.run_id}"
        self._here = f"{self._key}/here/"
        self._look_secs = min(_MOST_SECS, max(_LEAST_SECS, self.rules.most / _NODES_PER_SEC))
        self._held: bytes | None = None
        self._looked_at = self._trusts_after = self._compared_at = _NEVER
        self._offset_secs = time.time() - time.monotonic()
        self._writer_behind_secs = 0.0
        self._alive: dict[str, float] = {}
        # Longer than the time between two looks.
        self._lease_secs = max(self.rules.alive_secs / 2, self.rules.beat_secs + 1.0)
        self._grace_secs = self._lease_secs if store.keeps_leases else _GRACE_SECS
        self._lock = threading.Lock()
        self._end_of_beats = threading.Event()
        self._beats: threading.Thread | None = None
        self._trains = False
        self._known = JobState()  # what was shared last, also where the store has lost it
        self._was_spare = self._said = False
        self._forgotten_until = _NEVER
        self._alone_since: float | None = None
        self.left: frozenset[int] = frozenset()
        """Ranks that nodes had in the round before which have left since, as they were told to."""
        self._lost: str | None = None
        self.incarnations = IncarnationRecord(store, job_id)
        self.wait_secs: float | None = None
        """How long those that are left wait for others in the place of lost nodes; None: as for any
        round."""
        self._began = self._again_as_many_at = 0.0
        self.newest_incarnation = 0  # the newest one, as the last heartbeat found it in the store

    # -- the clock ---------------------------------------------------------------------------------

    def _now(self) -> float:
        """Seconds since 1970 by the store's clock, with which shared ages and deadlines are
        compared: a host whose own clock is an hour ahead would seem alive for an hour after its
        death."""
        return time.monotonic() + self._offset_secs

    def _compare_clocks(self) -> None:
        """Measure how far the store's clock is from this host's monotonic one, once a minute.
        Raises StoreError."""
        began = time.monotonic()
        if began - self._compared_at < _COMPARE_SECS:
            return
        told = self._store.time()
        now = time.monotonic()
        # A store that tells no time has leases, which its own clock ends.
        offset = time.time() - now if told is None else told - (began + now) / 2
        if abs(offset - self._offset_secs) > self.rules.beat_secs and self._compared_at != _NEVER:
            # It was set, or another host serves the store: what nodes wrote before is by another
            # clock.
            self._trusts_after = now + self.rules.alive_secs
        self._offset_secs, self._compared_at = offset, now

    def _in_own_time(self, state: JobState, *, is_new: bool) -> JobState:
        """The state of a store that tells no time: its times are by the clock of the host that
        wrote it last. A new one was written since the last look, so that the clocks differ by its
        age."""
        if is_new:
            self._writer_behind_secs = self._now() - state.written
        behind = self._writer_behind_secs
        return replace(
            state,
            deadline=None if state.deadline is None else state.deadline + behind,
            nodes={
                name: node._replace(seen=node.seen + behind) for name, node in state.nodes.items()
            },
        )

    # -- what all share ----------------------------------------------------------------------------

    def _poll(self) -> JobState:
        """What is shared now, or was a moment ago. Raises as :meth:`_exchange`."""
        if time.monotonic() - self._looked_at >= self._look_secs:
            self._exchange(None)
        return self.state

    def _exchange(self, state: JobState | None) -> JobState:
        """What is shared now; with ``state`` in its place, unless another node has written
        meanwhile. Raises RendezvousConnectionError: the store does not answer;
        RendezvousStateError: it holds something else.

        After a gap in its own view (this process or the store stood still) it gives the others the
        time again in which a living node beats: their silence may have been its own. In a store
        that keeps leases, a lease says that a node lives, and its heartbeats are written nowhere;
        who has lost it has that time, too, to show itself again."""
        try:
            self._store.hold(self._here + self.node, self._lease_secs)
            self._compare_clocks()
            if state is None:
                held = self._store.peek(self._key)
            else:
                written = encode_state(replace(state, written=self._now()))
                _, held = self._store.compare_set(self._key, self._held, written)
            names = self._store.alive(self._here)
            found = JobState() if held is None else decode_state(held)
            left = self._store.left(self._here) if found.is_between_rounds else {}
        except StoreError as error:
            raise RendezvousConnectionError(str(error)) from error
        at, now = self._now(), time.monotonic()
        if self._store.keeps_leases:
            found = self._in_own_time(found, is_new=held != self._held)
        bare = len(self._here)
        self._alive.update((name[bare:], at) for name in names)
        seen = [max(node.seen, self._alive.get(name, 0.0)) for name, node in found.nodes.items()]
        gap = now - self._looked_at
        # On the first look there is none to go by: where nobody has beaten, the store may have
        # stood still.
        stood_still = (
            max(seen, default=at) < at - self.rules.alive_secs if gap == float("inf") else True
        )
        if gap > self.rules.alive_secs and stood_still:
            self._trusts_after = now + self.rules.alive_secs
        ended = frozenset(name[bare:] for name, secs in left.items() if secs > self._grace_secs)
        looked = StateRead(self.node, self._alive, ended, now >= self._trusts_after)
        self.state, self._held, self._looked_at = step(found, looked, at, self.rules), held, now
        return self.state

    # -- rounds ------------------------------------------------------------------------------------

    def is_closed(self) -> bool:
        """Looks at the store."""
        with self._lock:
            return bool(self._poll().closed)

    def outcome(self) -> str:
        """Why the job has ended; empty where it has not, as far as is known."""
        with suppress(RendezvousError):
            self.is_closed()
        return self.state.closed

    def shutdown(self, why: str) -> None:
        """Tell all nodes, also those yet to come, that the job has ended; not from a node that it
        goes on without."""
        mine, newest = self.incarnation, 0
        with suppress(StoreError):
            newest = self.incarnations.read()
        if newest > mine > 0:
            with suppress(RendezvousError):
                self.is_closed()  # looks at the store: that start may not have come about
            if not self.has_place:
                logger.error(
                    "the job continues as start %d without this node, which belongs to start %d",
                    newest,
                    mine,
                )
                return
        try:
            self._stop_heartbeats()
            self.submit(JobClosed(why), self._close_secs)
        except (RuntimeError, RendezvousError) as error:
            logger.debug("the rendezvous could not be closed: %s", error)

    @property
    def table(self) -> RendezvousStore:
        """What the nodes of the last round tell each other."""
        return self._store.with_prefix(f"run/{self._run_id}/{self.info.round}")

    def next_rendezvous(self) -> Agreement:
        """Wait for a place in a round, and for the round to be complete. Raises
        RendezvousClosedError: the job has ended; RendezvousGracefulExitError: while this node was a
        spare; RendezvousTimeoutError: too few nodes came; RendezvousConnectionError: the store does
        not answer; LeftError, FencedError: this node has to go."""
        self._stop_heartbeats()
        self._trains, self._lost, self._was_spare = False, None, False
        self._again_as_many_at, self._said = 0.0, False
        if self.state.agreement is None:
            time.sleep(random.uniform(0, _SKEW_SECS))
        self.submit(TrainersExited(self.node), self._join_secs)
        self._began = self._now()
        members, leaving = self._members, self.state.leaving
        told_to_leave = self.node in leaving
        if not told_to_leave and self.incarnation:
            self._refuse_if_replaced()
        agreement = self._join(told_to_leave)
        gone = leaving | self.state.those(Role.SPARE)
        self.left = frozenset(rank for rank, name in enumerate(members) if name in gone)
        self.agreement, self._trains, self.info = agreement, True, self.info.after(agreement)
        self._start_heartbeats()
        return agreement

    def num_nodes_waiting(self) -> int:
        """Nodes that this round's trainers keep waiting; does not wait for the store. Raises
        RendezvousConnectionError: the last heartbeat did not reach the store."""
        if self._lost is not None:
            raise RendezvousConnectionError(self._lost)
        state = self.state
        has_place = not self._trains or self._me.role is Role.TRAINS or state.closed
        if has_place or (self.agreement is not None and self.rules.is_free(state, self.agreement)):
            # For whom there is no place, it sees that itself, and is a spare then.
            waiting = 0 if self.is_full else self._joining(state)
            return waiting or int(self.is_scaled_down)
        # The job goes on, or gathers, without this node: it joins again.
        return max(1, len(state.those(Role.WAITS)))

    # -- joining -----------------------------------------------------------------------------------

    def _refuse_if_replaced(self) -> None:
        """End where a round goes on that another node has joined in this one's place."""
        try:
            newest = self.incarnations.read()
        except StoreError as error:
            raise RendezvousConnectionError(str(error)) from error
        if newest > self.incarnation and self.state.complete and not self.has_place:
            raise replaced(self.incarnation, newest, by_another=self.is_full)

    def _join(self, told_to_leave: bool) -> Agreement:
        """Join where there is a place: a spare waits until a node is struck out, one that leaves
        until it is not needed any more, and then raises LeftError."""
        state = self._poll()
        deadline = time.monotonic() + self._join_secs
        while True:
            role, now = state.role(self.node), time.monotonic()
            self._report_other_nnodes(state)
            if state.closed:
                ended = RendezvousGracefulExitError if role is Role.SPARE else RendezvousClosedError
                raise ended(f"the rendezvous {self._run_id} is closed")
            if state.complete and role is Role.TRAINS and state.agreement is not None:
                return state.agreement
            event = self._joins(state)
            after = step(state, event, self._now(), self.rules)
            waits_on = after.role(self.node) is Role.SPARE
            if role is Role.SPARE or event.forgotten:
                deadline = now + self._join_secs
            elif now > deadline and not waits_on:
                if role is Role.NONE:
                    raise RendezvousTimeoutError
                after = step(state, TrainersExited(self.node), self._now(), self.rules)
            if role is Role.SPARE and waits_on and told_to_leave and self._is_dispensable(state):
                # One that fell silent meanwhile was struck out: nobody else knows any more that it
                # leaves.
                self.submit(SpareLeft(self.node))
                raise LeftError(
                    "this node has left the job, as requested; the job continues without it"
                )
            if not waits_on:
                self._say_what_is_waited_for(state)
            self._was_spare = waits_on
            if after != state:
                there, train = len(state.participants | {self.node}), len(after.participants)
                if after.complete and not state.complete and train < there:
                    logger.warning(
                        "%d nodes have joined and %d of them train, as many as fit the job's "
                        "layout and "
                        "batch; the others wait",
                        *(there, train),
                    )
                state = self._exchange(after)
            else:
                time.sleep(self._look_secs)
                state = self._poll()

    def _joins(self, state: JobState) -> JoinRequested:
        """What this node has to say of itself. The store may have lost lately that it is a spare:
        then it may have lost as well who trains, and they tell it with their next heartbeats."""
        now, scaling = time.monotonic(), state.scaling
        replaces = scaling is not None and scaling.replaces
        is_alone = self.is_leaving and replaces and not waits_for_them(state)
        self._alone_since = (self._alone_since or now) if is_alone else None
        if self._was_spare and state.role(self.node) is not Role.SPARE:
            self._forgotten_until = now + self.rules.alive_secs
        return JoinRequested(
            self.node,
            self.info,
            forgotten=now < self._forgotten_until,
            alone=self._alone_since is not None and now - self._alone_since > _ALONE_SECS,
            wait_until=self._wait_until(state),
        )

    def _wait_until(self, state: JobState) -> float | None:
        """When those that have come wait no more for others, of whom there are enough."""
        if self.wait_secs is None or state.complete or state.deadline is None or not self._members:
            return None
        if len(state.participants) < len(set(self._members) - state.leaving):
            return self._began + min(self.wait_secs, _JOIN_PART * self._join_secs)
        self._again_as_many_at = self._again_as_many_at or self._now()
        return self._again_as_many_at + self.rules.last_call_secs

    def _say_what_is_waited_for(self, state: JobState) -> None:
        """Once, where trainers of this node have ended and no round has formed within a
        heartbeat."""
        here = len(state.participants | state.seats)
        least, waited = self.rules.least, self._now() - self._began
        if self._said or not self._members or here >= least or waited < self.rules.beat_secs:
            return
        self._said = True
        logger.warning(
            "%d of %d nodes are here; waiting up to %.0f s for `reft launch` on another node",
            *(here, least, self._join_secs),
        )

    def _report_other_nnodes(self, state: JobState) -> None:
        """Once for each group of nodes that disagree: every node decides by its own ``--nnodes``
        whether a round is complete, so that some may wait while others train."""
        found = {node.node: node.nnodes for node in state.nodes.values() if node.nnodes}
        others = {node: nnodes for node, nnodes in found.items() if nnodes != self.info.nnodes}
        if others and others != self.other_nnodes:
            self.other_nnodes = others
            logger.warning("%s", self.describe_other_nnodes())

    def describe_other_nnodes(self) -> str:
        """Which nodes have another ``--nnodes`` than this one; empty if none has."""
        if not self.other_nnodes:
            return ""
        named = [f"node {node} with {nnodes}" for node, nnodes in sorted(self.other_nnodes.items())]
        more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        return (
            f"node {self.info.node} was started with --nnodes {self.info.nnodes}, but "
            f"{', '.join(named[:_MOST_NAMED])}{more}: start all nodes of a job with the same "
            "--nnodes"
        )

    def _is_dispensable(self, state: JobState) -> bool:
        """Whether the others have committed without this node; until then they may need its
        memory."""
        try:
            return state.complete and self.incarnations.committed() > self.incarnation
        except StoreError as error:
            raise RendezvousConnectionError(str(error)) from error

    # -- while trainers run ------------------------------------------------------------------------

    def submit(self, event: Event, secs: float | None = None) -> None:
        """Have an event count in what the nodes share; within so many seconds. Raises
        RendezvousError: the store does not answer."""
        deadline = time.monotonic() + (self._heartbeat_secs if secs is None else secs)
        with self._lock:
            state = self._poll()
            while (after := step(state, event, self._now(), self.rules)) != state:
                if time.monotonic() > deadline:
                    raise RendezvousTimeoutError
                state = self._exchange(after)

    def note_sizes(self, sizes: Sizes) -> None:
        """Have all nodes know with how many the job can train, as a version of this node's round
        tells, whose members are filled in where it says what they hold. Raises RendezvousError: the
        store is silent."""
        members = self._members
        sizes = replace(sizes, members=members if sizes.groups else ())
        event = SizesKnown(self.info.round, len(members), sizes)
        # nobody waits for the store else
        if step(self.state, event, self._now(), self.rules) != self.state:
            self.submit(event)

    def refuse_size(self) -> bool:
        """Trainers were refused with as many nodes as this round has: it is not tried again.
        Whether another number may do: fewer, where this is not all that may come, or what fitted
        before. Raises RendezvousError: the store does not answer."""
        number = len(self._members)
        self.submit(SizeRejected(number))
        sizes, rules = self.state.sizes or Sizes(), self.rules
        return number < rules.most or bool(sizes.fitting and sizes.of(rules.least, rules.most))

    def _start_heartbeats(self) -> None:
        self._end_of_beats = ended = threading.Event()

        def beat() -> None:
            while not ended.wait(self.rules.beat_secs):
                self.beat()

        self._beats = threading.Thread(target=beat, name="rendezvous heartbeat", daemon=True)
        self._beats.start()

    def _stop_heartbeats(self) -> None:
        self._end_of_beats.set()
        if self._beats is not None:
            self._beats.join()

    def beat(self) -> None:
        """Tell that this node lives, and look at what all share."""
        try:
            agreement = self.agreement if self._trains else None
            self.submit(Heartbeat(self.node, agreement, self._known.scaling, self._known.sizes))
            self.newest_incarnation = self.incarnations.raise_to(self.incarnation)
            self._lost = None
        except RendezvousTimeoutError:
            pass  # the store stood still and goes on: the next beat is in time
        except (RendezvousError, AuthenticationError, StoreError) as error:
            self._lost = str(error)
        self._known = self._known if self.state.is_empty else self.state

    # -- what follows from that --------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        """Number of the start that this node took part in last; 0: none."""
        return 0 if self.agreement is None else self.agreement.incarnation

    @property
    def _members(self) -> tuple[str, ...]:
        return () if self.agreement is None else self.agreement.members

    @property
    def _me(self) -> Node:
        return self.state.nodes.get(self.node, Node())

    @property
    def has_place(self) -> bool:
        """Whether this node is in the round that runs or forms, or goes from one to the next."""
        return self._me.role is Role.TRAINS or self._me.seated

    @property
    def is_full(self) -> bool:
        return self.rules.is_full(self.state)

    @property
    def is_refused(self) -> bool:
        return self.agreement is not None and self.node in self.agreement.refused

    @property
    def is_leaving(self) -> bool:
        return self._me.leaving

    @property
    def is_spare(self) -> bool:
        return self._me.role is Role.SPARE

    @property
    def nodes(self) -> list[str]:
        """Ids of all that are there, in the same order on each of them."""
        return [node.node for _, node in sorted(self.state.nodes.items()) if node.node]

    @property
    def fitting(self) -> tuple[int, ...]:
        sizes = self.state.sizes or self._known.sizes or Sizes()
        return sizes.of(self.rules.least, self.rules.most)

    def _joining(self, state: JobState) -> int:
        """Nodes that wait for the next round, where they make it larger, or have left this one."""
        waits, running = state.those(Role.WAITS), len(state.participants)
        if state.sizes is None or waits.intersection(self._members):
            return len(waits)
        larger = state.sizes.largest(
            running + len(waits), self.rules.least, self.rules.limit(state)
        )
        return len(waits) if larger > running else 0

    @property
    def is_scaled_down(self) -> bool:
        scaling = self.state.scaling
        return self._trains and scaling is not None and scaling.round == self.info.round

    @property
    def is_whole(self) -> bool:
        """Whether all nodes of this round are there: nothing has failed."""
        return bool(self._members) and self.state.seats.issuperset(self._members)

    def goes_on_without(self, gone: int) -> bool:
        """Whether enough nodes are left, with those that wait, where so many of this round have
        ended."""
        state = self.state
        waiting = state.those(Role.SPARE, Role.WAITS) - state.leaving - set(self._members)
        left = len(self._members) - gone + len(waiting)
        return (state.sizes or Sizes()).largest(left, self.rules.least, self.rules.most) > 0

    @property
    def all_ended_well(self) -> bool:
        ends = self.state.ends
        return bool(self._members) and all(ends.get(name) == 0 for name in self._members)

    @property
    def stopped(self) -> dict[str, int]:
        """Nodes of this round whose launchers were told to stop, and the signals that said so."""
        agreement, ends = self.agreement, self.state.ends
        if agreement is None or agreement != self.state.agreement:
            return {}
        nodes = zip(agreement.members, agreement.nodes, strict=True)
        return {node: number for member, node in nodes if (number := ends.get(member, 0))}

    @property
    def has_lost_silent_node(self) -> bool:
        """Whether a node of the round that runs was struck out, no other has come, and those that
        are left are enough for a round."""
        state = self.state
        trains = state.participants
        same = (
            self._trains
            and state.complete
            and state.agreement == self.agreement
            and self.node in trains
        )
        lost = set(self._members) - trains - state.leaving
        return self._lost is None and same and bool(lost) and len(trains) >= self.rules.least


def replaced(mine: int, newest: int, *, by_another: bool) -> FencedError:
    """Why this node ends: it took part in start ``mine`` of the job, was cut off, and ``newest``
    runs without it, with as many nodes as it may have (``by_another``) or with fewer."""
    how = "another node has replaced it" if by_another else "the job continued with fewer nodes"
    then = "be a spare" if by_another else "join it"
    return FencedError(
        f"this node was cut off and {how}: the job runs as start {newest}, this node as start "
        f"{mine}. This "
        "launcher ends, with its trainers and its daemon; start `reft launch` here again for the "
        "node to "
        f"{then}"
    )


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
        """The start that has committed the newest version; 0 if none is known of. Raises
        StoreError."""
        held = self._store.peek(self._committed_key)
        return 0 if held is None else _number(held.partition(b":")[0])

    def forget_committed(self) -> None:
        """The job's memory goes on purpose: a later start is not refused for want of it. Best
        effort."""
        with suppress(StoreError):
            self._store.delete(self._committed_key)

    def raise_to(self, number: int) -> int:
        """Have the store know of a start, as one that was lost and came back does not; returns the
        newest that it knows of now. Raises StoreError."""
        held = self._store.peek(self._key)
        while (known := _number(held)) < number:
            done, held = self._store.compare_set(self._key, held, str(number).encode())
            if done:
                return number
        return known


def _number(held: bytes | None) -> int:
    return int(held) if held is not None and held.isdigit() else 0
