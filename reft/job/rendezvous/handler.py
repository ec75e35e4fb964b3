"""One node's side of the rendezvous: reads and writes the shared membership state in the store.

The decisions are made by pure functions (:mod:`reft.job.rendezvous.membership`).
"""

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
    JoinRequested,
    MembershipState,
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
    has_replacement,
    step,
)
from reft.naming import committed_key
from reft.relayout.sizes import Sizes

logger = logging.getLogger(__name__)

# Largest share of ``join_timeout`` for which a round waits for replacements of lost nodes
_JOIN_SHARE = 0.9
_ALONE_SECS = 5.0
"""Time after which a node that is to be replaced takes its place back if no other node waits."""
_RECONNECT_SECS = 0.5
"""Time in which a living node that has lost its connection connects again."""
_MIN_POLL_SECS, _MAX_POLL_SECS = 0.1, 1.0
_NODES_PER_SEC = 500  # Largest poll rate of all nodes together, because each poll reads all nodes
_START_SKEW_SECS = 0.3  # Random delay that spreads the first requests of nodes started together
_CLOCK_SECS = 60.0  # Interval between measurements of the store's clock
_MAX_NAMED = 4  # Most nodes named in one message
_NEVER = float("-inf")


class LeftError(ReftError, RuntimeError):
    """Raised when this node has left the job on request."""


class StoreRendezvous:
    """Joins one node to the rounds of a job, and keeps its place by heartbeats.

    Args:
        store: the rendezvous store.
        config: torchrun's part of the options.
        info: this node's report for its first round (id, trainers, restarts, newest version).
        job_id: name of the job's memory.

    Attributes:
        info: this node's report for the next round.
        other_nnodes: ``--nnodes`` of those nodes that were started with a different value than this
            one, by node id.
        agreement: what was agreed on for the last round in which this node took part.
        node: unique name of this launcher.
        state: the shared state as of the last heartbeat or poll.
        left: group ranks, in the round before this one, of nodes that left on request.
        wait_secs: longest time that the remaining nodes wait for replacements of lost nodes; None:
            as long as for any round.
        newest_incarnation: number of the newest start of the job, as of the last heartbeat.

    Raises:
        ValueError: an option cannot be used.
    """

    def __init__(
        self, store: RendezvousStore, config: LaunchConfig, info: NodeInfo, job_id: str
    ) -> None:
        def number(name: str, default: int) -> int:
            value = int(config.rdzv_configs.get(name, default))
            if value <= 0:
                raise ValueError(f"{name} is {value}; expected a number above 0")
            return value

        self._store, self._run_id = store, config.run_id
        nnodes = sorted({config.min_nodes, config.max_nodes})
        self.info = replace(info, nnodes=":".join(map(str, nnodes)))
        self.other_nnodes: dict[str, str] = {}
        self.agreement: Agreement | None = None
        # Random, because successive launchers in a container may have the same pid.
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
        self._heartbeat_timeout_secs = number("heartbeat_timeout", 5)
        self.state = MembershipState()
        self._key = f"rendezvous/{config.run_id}"
        self._alive_prefix = f"{self._key}/here/"
        self._poll_secs = min(
            _MAX_POLL_SECS, max(_MIN_POLL_SECS, self.rules.max_nodes / _NODES_PER_SEC)
        )
        self._encoded: bytes | None = None  # Encoded shared state as last read, for compare-and-set
        self._polled_at = self._trusts_after = self._measured_at = _NEVER
        self._offset_secs = time.time() - time.monotonic()
        self._writer_behind_secs = 0.0
        # Time by the store's clock at which each node's lease was last seen held
        self._alive_at: dict[str, float] = {}
        # A lease must outlast the interval between two renewals.
        self._lease_secs = max(self.rules.expiry_secs / 2, self.rules.heartbeat_secs + 1.0)
        self._left_grace_secs = self._lease_secs if store.keeps_leases else _RECONNECT_SECS
        # Guards the state and its encoding, which the heartbeat thread and the agent's thread both
        # update.
        self._lock = threading.Lock()
        self._heartbeats_ended = threading.Event()
        self._heartbeats: threading.Thread | None = None
        self._trains = False
        # The last state that was not empty; heartbeats restore it in a store that lost its state.
        self._last_state = MembershipState()
        self._was_spare = self._has_warned = False
        self._forgotten_until = _NEVER
        self._alone_since: float | None = None
        self.left: frozenset[int] = frozenset()
        self._store_error: str | None = None  # Error of the last heartbeat; None if it succeeded
        self.incarnations = IncarnationRecord(store, job_id)
        self.wait_secs: float | None = None
        self._round_left_at = self._complete_again_at = 0.0
        self.newest_incarnation = 0

    # -- the clock ---------------------------------------------------------------------------------

    def _now(self) -> float:
        """Return the seconds since 1970 by the store's clock.

        All times in the shared state are by this clock. If each node wrote its own host's time, a
        node whose clock is an hour ahead would seem alive for an hour after its death.
        """
        return time.monotonic() + self._offset_secs

    def _measure_clock(self) -> None:
        """Measure the offset between the store's clock and this host's, once a minute.

        Raises:
            StoreError: the store does not answer.
        """
        started_at = time.monotonic()
        if started_at - self._measured_at < _CLOCK_SECS:
            return
        store_time = self._store.time()
        now = time.monotonic()
        if store_time is None:
            # The store has no clock for clients. It keeps leases and expires them itself.
            offset_secs = time.time() - now
        else:
            offset_secs = store_time - (started_at + now) / 2
        has_jumped = abs(offset_secs - self._offset_secs) > self.rules.heartbeat_secs
        if has_jumped and self._measured_at != _NEVER:
            # The store's clock was set, or another host serves the store now. Times in the state
            # are by the old clock, so trust none until every node has had time to renew its own.
            self._trusts_after = now + self.rules.expiry_secs
        self._offset_secs, self._measured_at = offset_secs, now

    def _to_own_clock(self, state: MembershipState, *, is_new: bool) -> MembershipState:
        """Convert times in the state to this host's clock, for a store that has no clock.

        The times are by the clock of the host that wrote the state last. If the state is new, it
        was written just before this poll, so its apparent age is about the difference between that
        clock and this host's.

        Args:
            state: the state that was read.
            is_new: whether the state has changed since the last poll.
        """
        if is_new:
            self._writer_behind_secs = self._now() - state.written
        behind = self._writer_behind_secs
        return replace(
            state,
            deadline=None if state.deadline is None else state.deadline + behind,
            nodes={
                name: node._replace(alive_at=node.alive_at + behind)
                for name, node in state.nodes.items()
            },
        )

    # -- the shared state --------------------------------------------------------------------------

    def _poll(self) -> MembershipState:
        """Return the shared state, at most one poll interval old. Raises RendezvousError."""
        if time.monotonic() - self._polled_at >= self._poll_secs:
            self._exchange(None)
        return self.state

    def _exchange(self, state: MembershipState | None) -> MembershipState:
        """Write ``state`` unless another node has written meanwhile; return the state then stored.

        After this process or the store was suspended, other nodes seem silent although they may be
        alive. Therefore no node is removed until all have had one expiry period to show a sign of
        life. Each call also renews this node's lease, from which other nodes see that it is alive.

        Args:
            state: the new state; None: only read.

        Raises:
            RendezvousConnectionError: the store does not answer.
            RendezvousStateError: the store holds something other than a rendezvous state.
        """
        try:
            self._store.hold(self._alive_prefix + self.node, self._lease_secs)
            self._measure_clock()
            if state is None:
                encoded = self._store.peek(self._key)
            else:
                written = encode_state(replace(state, written=self._now()))
                _, encoded = self._store.compare_set(self._key, self._encoded, written)
            alive = self._store.alive(self._alive_prefix)
            read = MembershipState() if encoded is None else decode_state(encoded)
            left = self._store.left(self._alive_prefix) if read.is_between_rounds else {}
        except StoreError as error:
            raise RendezvousConnectionError(str(error)) from error
        store_now, now = self._now(), time.monotonic()
        if self._store.keeps_leases:
            read = self._to_own_clock(read, is_new=encoded != self._encoded)
        start = len(self._alive_prefix)
        self._alive_at.update((name[start:], store_now) for name in alive)
        if self._has_gap(read, store_now, now):
            self._trusts_after = now + self.rules.expiry_secs
        ended = frozenset(
            name[start:] for name, secs in left.items() if secs > self._left_grace_secs
        )
        event = StateRead(self.node, self._alive_at, ended, trusts=now >= self._trusts_after)
        self.state = step(read, event, store_now, self.rules)
        self._encoded, self._polled_at = encoded, now
        return self.state

    def _has_gap(self, state: MembershipState, store_now: float, now: float) -> bool:
        """Whether this process or the store was suspended since the last poll."""
        gap_secs = now - self._polled_at
        if gap_secs <= self.rules.expiry_secs:
            return False
        if gap_secs != float("inf"):
            return True
        # At the first poll there is nothing to compare with. If no node at all has shown a sign of
        # life for long, assume that the store was suspended.
        alive_at = [
            max(node.alive_at, self._alive_at.get(name, 0.0)) for name, node in state.nodes.items()
        ]
        return max(alive_at, default=store_now) < store_now - self.rules.expiry_secs

    # -- rounds ------------------------------------------------------------------------------------

    def is_closed(self) -> bool:
        """Whether the job has ended; reads the store."""
        with self._lock:
            return bool(self._poll().closed)

    def outcome(self) -> str:
        """Return why the job has ended, as far as this node knows; empty if it has not."""
        with suppress(RendezvousError):
            self.is_closed()
        return self.state.closed

    def shutdown(self, reason: str) -> None:
        """Announce the end of the job to all nodes, including those that join later.

        Does nothing if the job continues without this node.
        """
        own, newest = self.incarnation, 0
        with suppress(StoreError):
            newest = self.incarnations.read()
        if newest > own > 0:
            with suppress(RendezvousError):
                # Call is_closed() only to refresh the state from the store: it tells whether the
                # newer start of the job includes this node or continues without it.
                self.is_closed()
            if not self.has_place:
                logger.error(
                    "the job continues as start %d without this node, which belongs to start %d",
                    newest,
                    own,
                )
                return
        try:
            self._stop_heartbeats()
            self.submit(JobClosed(reason), self._close_secs)
        except (RuntimeError, RendezvousError) as error:
            logger.debug("the rendezvous could not be closed: %s", error)

    @property
    def table(self) -> RendezvousStore:
        """The part of the store in which nodes of the same round exchange messages."""
        return self._store.with_prefix(f"run/{self._run_id}/{self.info.round}")

    def next_rendezvous(self) -> Agreement:
        """Wait for a place in a round, and until the round is complete; return its agreement.

        Raises:
            RendezvousClosedError: the job has ended.
            RendezvousGracefulExitError: the job has ended while this node was a spare.
            RendezvousTimeoutError: too few nodes joined.
            RendezvousConnectionError: the store does not answer.
            LeftError: this node has left the job on request.
            FencedError: another node has replaced this one.
        """
        self._stop_heartbeats()
        # Keep `_was_spare`: if the store has lost its state, only this attribute shows whether this
        # node was a spare.
        self._trains, self._store_error = False, None
        self._complete_again_at, self._has_warned = 0.0, False
        if self.state.agreement is None:
            time.sleep(random.uniform(0, _START_SKEW_SECS))
        self.submit(TrainersExited(self.node), self._join_secs)
        self._round_left_at = self._now()
        members, leaving = self._members, self.state.leaving
        is_leaving = self.node in leaving
        if not is_leaving and self.incarnation:
            self._refuse_if_replaced()
        agreement = self._join(is_leaving)
        gone = leaving | self.state.with_role(Role.SPARE)
        self.left = frozenset(rank for rank, name in enumerate(members) if name in gone)
        self.agreement, self._trains, self.info = agreement, True, self.info.after(agreement)
        self._start_heartbeats()
        return agreement

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that wait until this round's trainers end.

        The number is that of the last heartbeat; this method does not read the store.

        Raises:
            RendezvousConnectionError: the last heartbeat did not reach the store.
        """
        if self._store_error is not None:
            raise RendezvousConnectionError(self._store_error)
        state = self.state
        has_place = not self._trains or self._own.role is Role.TRAINS or state.closed
        if has_place or (
            self.agreement is not None and self.rules.may_return(state, self.agreement)
        ):
            # In a full round a waiting node becomes a spare at its next poll, so no waiting node
            # counts.
            waiting = 0 if self.is_full else self._joining(state)
            return waiting or int(self.is_scaled_down)
        # This node has lost its place: the others train or form a round without it. Report at least
        # one waiting node, so that the agent ends the trainers and joins again.
        return max(1, len(state.with_role(Role.WAITS)))

    # -- joining -----------------------------------------------------------------------------------

    def _refuse_if_replaced(self) -> None:
        """Raise FencedError if another node holds this node's place in a running round."""
        try:
            newest = self.incarnations.read()
        except StoreError as error:
            raise RendezvousConnectionError(str(error)) from error
        if newest > self.incarnation and self.state.complete and not self.has_place:
            raise replaced_error(self.incarnation, newest, by_another=self.is_full)

    def _join(self, is_leaving: bool) -> Agreement:
        """Wait for a place in a round. A spare waits until a node is lost.

        Args:
            is_leaving: whether this node was asked to leave the job.

        Raises:
            LeftError: this node was notified to leave, and the others no longer need it.
        """
        state = self._poll()
        deadline = time.monotonic() + self._join_secs
        while True:
            role, now = state.role(self.node), time.monotonic()
            self._warn_other_nnodes(state)
            if state.closed:
                ended = RendezvousGracefulExitError if role is Role.SPARE else RendezvousClosedError
                raise ended(f"the rendezvous {self._run_id} is closed")
            if state.complete and role is Role.TRAINS and state.agreement is not None:
                return state.agreement
            event = self._join_event(state)
            after = step(state, event, self._now(), self.rules)
            stays_spare = after.role(self.node) is Role.SPARE
            if role is Role.SPARE or event.forgotten:
                deadline = now + self._join_secs
            elif now > deadline and not stays_spare:
                if role is Role.NONE:
                    raise RendezvousTimeoutError
                after = step(state, TrainersExited(self.node), self._now(), self.rules)
            # `is_leaving` was read before this loop. The state may no longer say that this node
            # leaves: the others may have removed the node because it was silent.
            is_idle = role is Role.SPARE and stays_spare and is_leaving
            if is_idle and self._is_dispensable(state):
                self.submit(SpareLeft(self.node))
                raise LeftError(
                    "this node has left the job, as requested; the job continues without it"
                )
            if not stays_spare:
                self._warn_missing_nodes(state)
            self._was_spare = stays_spare
            if after == state:
                time.sleep(self._poll_secs)
                state = self._poll()
                continue
            present, training = len(state.participants | {self.node}), len(after.participants)
            if after.complete and not state.complete and training < present:
                logger.warning(
                    "%d nodes have joined and %d of them train, as many as fit the job's layout "
                    "and batch; the others wait",
                    present,
                    training,
                )
            state = self._exchange(after)

    def _join_event(self, state: MembershipState) -> JoinRequested:
        """Make this node's request for a place.

        If the store has just lost the record that this node is a spare, it may also have lost which
        nodes train. The request then says so (``forgotten``), and gets no place before the training
        nodes have had time to restore the record by their heartbeats.
        """
        now, scaling = time.monotonic(), state.scaling
        replaces = scaling is not None and scaling.replaces
        is_alone = self.is_leaving and replaces and not has_replacement(state)
        if not is_alone:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        if self._was_spare and state.role(self.node) is not Role.SPARE:
            self._forgotten_until = now + self.rules.expiry_secs
        return JoinRequested(
            self.node,
            self.info,
            forgotten=now < self._forgotten_until,
            alone=self._alone_since is not None and now - self._alone_since > _ALONE_SECS,
            wait_until=self._wait_until(state),
        )

    def _wait_until(self, state: MembershipState) -> float | None:
        """Return when a round with enough nodes stops waiting for replacements of lost nodes.

        Returns:
            The time, by the store's clock; None: the deadline of the round applies.
        """
        if self.wait_secs is None or state.complete or state.deadline is None or not self._members:
            return None
        if len(state.participants) < len(set(self._members) - state.leaving):
            return self._round_left_at + min(self.wait_secs, _JOIN_SHARE * self._join_secs)
        # As many nodes as before are present: wait for more only as long as any round does.
        self._complete_again_at = self._complete_again_at or self._now()
        return self._complete_again_at + self.rules.last_call_secs

    def _warn_missing_nodes(self, state: MembershipState) -> None:
        """Warn once if too few nodes are present one heartbeat interval after the last round."""
        present = len(state.participants | state.members)
        required = self.rules.min_nodes
        waited_secs = self._now() - self._round_left_at
        if self._has_warned or not self._members or present >= required:
            return
        if waited_secs < self.rules.heartbeat_secs:
            return
        self._has_warned = True
        logger.warning(
            "%d of %d nodes are here. Start `reft launch` on another node, or again on a lost one, "
            "within %.0f s. Keep the nodes that are here: they hold the job's memory",
            present,
            required,
            self._join_secs,
        )

    def _warn_other_nnodes(self, state: MembershipState) -> None:
        """Warn once for each set of nodes whose ``--nnodes`` differs from this node's.

        Every node decides by its own ``--nnodes`` whether a round is complete, so with different
        values some nodes would wait while others train.
        """
        nnodes = {node.node: node.nnodes for node in state.nodes.values() if node.nnodes}
        others = {node: value for node, value in nnodes.items() if value != self.info.nnodes}
        if others and others != self.other_nnodes:
            self.other_nnodes = others
            logger.warning("%s", self.describe_other_nnodes())

    def describe_other_nnodes(self) -> str:
        """Describe which nodes have a different ``--nnodes`` than this one; empty if none has."""
        if not self.other_nnodes:
            return ""
        names = [f"node {node} with {value}" for node, value in sorted(self.other_nnodes.items())]
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        return (
            f"node {self.info.node} was started with --nnodes {self.info.nnodes}, but "
            f"{', '.join(names[:_MAX_NAMED])}{more}: start all nodes of a job with the same "
            f"--nnodes"
        )

    def _is_dispensable(self, state: MembershipState) -> bool:
        """Whether the other nodes have committed a version in a later start, without this node.

        Until then a recovery may need this node's memory.
        """
        try:
            return state.complete and self.incarnations.committed() > self.incarnation
        except StoreError as error:
            raise RendezvousConnectionError(str(error)) from error

    # -- while trainers run ------------------------------------------------------------------------

    def submit(self, event: Event, secs: float | None = None) -> None:
        """Apply an event to the shared state, and write that to the store if it changes.

        Args:
            event: the event.
            secs: time-out in seconds; None: the heartbeat's time-out.

        Raises:
            RendezvousError: the store does not answer.
        """
        timeout_secs = self._heartbeat_timeout_secs if secs is None else secs
        deadline = time.monotonic() + timeout_secs
        with self._lock:
            state = self._poll()
            # If another node has written meanwhile, apply the event to that node's state. The loop
            # ends once the event has no further effect.
            while (after := step(state, event, self._now(), self.rules)) != state:
                if time.monotonic() > deadline:
                    raise RendezvousTimeoutError
                state = self._exchange(after)

    def leave(self) -> None:
        """Give up this node's place at once, so that a waiting node can take it.

        Raises:
            RendezvousError: the store does not answer.
        """
        self._stop_heartbeats()  # A heartbeat would take the place again
        self._trains = False
        self.submit(TrainersExited(self.node))
        self.submit(SpareLeft(self.node))

    def note_sizes(self, sizes: Sizes) -> None:
        """Record in the shared state the node counts at which the job can train.

        Args:
            sizes: the node counts, derived from a new version. ``members`` is empty: this method
                fills in the launchers of this round.

        Raises:
            RendezvousError: the store does not answer.
        """
        members = self._members
        sizes = replace(sizes, members=members if sizes.groups else ())
        event = SizesKnown(self.info.round, len(members), sizes)
        # Try the event on the cached state first, so that the store is not read without a change.
        if step(self.state, event, self._now(), self.rules) != self.state:
            self.submit(event)

    def refuse_size(self) -> bool:
        """Record that trainers refused to start with this round's number of nodes.

        Returns:
            Whether the job may be able to train on another number of nodes: on more, or on a number
            on which it trained before.

        Raises:
            RendezvousError: the store does not answer.
        """
        number = len(self._members)
        self.submit(SizeRejected(number))
        sizes, rules = self.state.sizes or Sizes(), self.rules
        if number < rules.max_nodes:
            return True
        return bool(sizes.fitting and sizes.of(rules.min_nodes, rules.max_nodes))

    def _start_heartbeats(self) -> None:
        self._heartbeats_ended = ended = threading.Event()

        def run() -> None:
            while not ended.wait(self.rules.heartbeat_secs):
                self.heartbeat()

        self._heartbeats = threading.Thread(target=run, name="rendezvous heartbeat", daemon=True)
        self._heartbeats.start()

    def _stop_heartbeats(self) -> None:
        self._heartbeats_ended.set()
        if self._heartbeats is not None:
            self._heartbeats.join()

    def heartbeat(self) -> None:
        """Renew this node's sign of life, and read the shared state."""
        try:
            agreement = self.agreement if self._trains else None
            last = self._last_state
            self.submit(Heartbeat(self.node, agreement, last.scaling, last.sizes))
            self.newest_incarnation = self.incarnations.raise_to(self.incarnation)
            self._store_error = None
        except RendezvousTimeoutError:
            pass  # The store was suspended and answers again: the next heartbeat will succeed
        except (RendezvousError, AuthenticationError, StoreError) as error:
            self._store_error = str(error)
        if not self.state.is_empty:
            self._last_state = self.state

    # -- derived from the state --------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        """Number of the last start of the job in which this node took part; 0 if none."""
        return 0 if self.agreement is None else self.agreement.incarnation

    @property
    def _members(self) -> tuple[str, ...]:
        return () if self.agreement is None else self.agreement.members

    @property
    def _own(self) -> Node:
        return self.state.nodes.get(self.node, Node())

    @property
    def has_place(self) -> bool:
        """Whether this node is in the running or forming round, or keeps a place between rounds."""
        return self._own.role is Role.TRAINS or self._own.is_member

    @property
    def is_full(self) -> bool:
        """Whether the running round has the largest allowed number of nodes."""
        return self.rules.is_full(self.state)

    @property
    def is_refused(self) -> bool:
        """Whether another launcher uses this node's id and this launcher must end."""
        return self.agreement is not None and self.node in self.agreement.refused

    @property
    def is_leaving(self) -> bool:
        return self._own.leaving

    @property
    def is_spare(self) -> bool:
        return self._own.role is Role.SPARE

    @property
    def nodes(self) -> list[str]:
        """Ids of all present nodes, in the same order on every node."""
        return [node.node for _, node in sorted(self.state.nodes.items()) if node.node]

    @property
    def fitting(self) -> tuple[int, ...]:
        """Numbers of nodes with which the job can train, as far as known."""
        sizes = self.state.sizes or self._last_state.sizes or Sizes()
        return sizes.of(self.rules.min_nodes, self.rules.max_nodes)

    def _joining(self, state: MembershipState) -> int:
        """Return the number of waiting nodes for which a new round is worth a restart.

        These are nodes that lost their place in this round, or that make the next round larger.
        """
        waiting, running = state.with_role(Role.WAITS), len(state.participants)
        if state.sizes is None or waiting.intersection(self._members):
            return len(waiting)
        limit = self.rules.limit(state)
        larger = state.sizes.largest(running + len(waiting), self.rules.min_nodes, limit)
        return len(waiting) if larger > running else 0

    @property
    def is_scaled_down(self) -> bool:
        """Whether some nodes of the running round were asked to leave."""
        scaling = self.state.scaling
        return self._trains and scaling is not None and scaling.round == self.info.round

    @property
    def is_whole(self) -> bool:
        """Whether all nodes of the last round are still present, so that none was lost."""
        return bool(self._members) and self.state.members.issuperset(self._members)

    def can_continue_without(self, gone: int) -> bool:
        """Whether enough nodes remain (or wait) if ``gone`` nodes of this round leave."""
        state = self.state
        waiting = state.with_role(Role.SPARE, Role.WAITS) - state.leaving - set(self._members)
        left = len(self._members) - gone + len(waiting)
        sizes = state.sizes or Sizes()
        return sizes.largest(left, self.rules.min_nodes, self.rules.max_nodes) > 0

    @property
    def all_ended_well(self) -> bool:
        ends = self.state.ends
        return bool(self._members) and all(ends.get(name) == 0 for name in self._members)

    @property
    def stopped(self) -> dict[str, int]:
        """Nodes of this round whose launchers a signal has stopped: the signal by node."""
        agreement, ends = self.agreement, self.state.ends
        if agreement is None or agreement != self.state.agreement:
            return {}
        nodes = zip(agreement.members, agreement.nodes, strict=True)
        return {node: number for member, node in nodes if (number := ends.get(member, 0))}

    @property
    def has_lost_silent_node(self) -> bool:
        """Whether a node was removed from the running round for silence, and enough nodes remain.

        False if another node has taken the removed node's place, or the store does not answer.
        """
        state = self.state
        participants = state.participants
        is_own_round = (
            self._trains
            and state.complete
            and state.agreement == self.agreement
            and self.node in participants
        )
        lost = set(self._members) - participants - state.leaving
        is_enough = len(participants) >= self.rules.min_nodes
        return self._store_error is None and is_own_round and bool(lost) and is_enough


def replaced_error(own: int, newest: int, *, by_another: bool) -> FencedError:
    """Make the error for a node that was cut off while the job continued without it.

    Args:
        own: start number (1 for the first start, higher for each restart) of the last start that
            included this node.
        newest: number of the start that runs without it.
        by_another: True if another node has its place, False if the job runs with fewer nodes.
    """
    how = "another node has replaced it" if by_another else "the job continued with fewer nodes"
    then = "be a spare" if by_another else "join it"
    return FencedError(
        f"this node was cut off and {how}: the job runs as start {newest}, this node as start "
        f"{own}. This launcher ends, with its trainers and its daemon; start `reft launch` here "
        f"again for the node to {then}"
    )


class IncarnationRecord:
    """Reads and writes the number of the job's newest start in the store. Thread-safe."""

    def __init__(self, store: RendezvousStore, job_id: str) -> None:
        self._store = store
        self._key = f"reft/{job_id}/incarnation"
        self._committed_key = committed_key(job_id)

    def read(self) -> int:
        """Return the number of the newest start; 0 if there is none. Raises StoreError."""
        return _parse_number(self._store.peek(self._key))

    def committed(self) -> int:
        """Return the start number (1 for the first start, higher for each restart) of the trainers
        that committed the newest version; 0 if unknown.

        Raises:
            StoreError: the store does not answer.
        """
        value = self._store.peek(self._committed_key)
        return 0 if value is None else _parse_number(value.partition(b":")[0])

    def forget_committed(self) -> None:
        """Delete the store's record of the newest version, if the store answers.

        Call this when the job's memory is removed on purpose: otherwise a later start would be
        refused because the recorded version is missing.
        """
        with suppress(StoreError):
            self._store.delete(self._committed_key)

    def raise_to(self, number: int) -> int:
        """Record the number of a start unless the store knows a greater one.

        This also restores the number in a store that was restarted without its state.

        Returns:
            The number of the newest start.

        Raises:
            StoreError: the store does not answer.
        """
        value = self._store.peek(self._key)
        while (newest := _parse_number(value)) < number:
            done, value = self._store.compare_set(self._key, value, str(number).encode())
            if done:
                return number
        return newest


def _parse_number(value: bytes | None) -> int:
    return int(value) if value is not None and value.isdigit() else 0
