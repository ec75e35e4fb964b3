"""Nodes of one job, their launchers' loops and their store, in simulated time.

The rendezvous is the one that launchers use (:mod:`reft.job.rendezvous.handler`,
:mod:`reft.job.rendezvous.membership`). Simulated are the clock, the store, and what a launcher does around the
rendezvous. One node runs at a time, until it sleeps or calls the store; which one is next follows from a
seed.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any
from unittest.mock import patch

from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError
from torch.distributed.launcher.api import LaunchConfig

from reft.control.keyvalue import StoreError
from reft.errors import FencedError
from reft.job.rendezvous import handler as handler_module
from reft.job.rendezvous.handler import LeftError, StoreRendezvous
from reft.job.rendezvous.membership import LeaveNotified, NodeInfo, ScaleRequested, decode_state
from reft.job.rendezvous.scaling import leavers
from reft.memory.scale_request import ScaleRequest
from reft.naming import committed_key
from reft.relayout.sizes import Sizes

JOB = "job"
_EPOCH = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
_LOOK_SECS = 0.1
_BEAT_SECS = 1
_BEATS = 5
CONFIGS = {
    "join_timeout": 1800,
    "last_call_timeout": 10,
    "keep_alive_interval": _BEAT_SECS,
    "keep_alive_max_attempt": _BEATS,
}
_COMMIT_SECS = 2.0
_RECONNECT_SECS = 1.0


class Killed(BaseException):
    """The node was killed: nothing of it runs any more."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.pause: Callable[[float], None] = lambda secs: None

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return _EPOCH + self.now

    def sleep(self, secs: float) -> None:
        self.pause(secs)


@dataclass
class Table:
    values: dict[str, bytes] = field(default_factory=dict)
    held_by: dict[str, Connection] = field(default_factory=dict)
    left_at: dict[str, float] = field(default_factory=dict)
    leases: dict[str, float] = field(default_factory=dict)
    answers: bool = True

    def forget(self) -> None:
        self.values.clear()
        self.held_by.clear()
        self.left_at.clear()
        self.leases.clear()


class Connection:
    """What the rendezvous needs of a :class:`reft.control.keyvalue.RendezvousStore`."""

    keeps_leases = False

    def __init__(self, table: Table, clock: Clock, randomness: random.Random) -> None:
        self._table, self._clock, self._random = table, clock, randomness
        self.names: set[str] = set()

    def _reach(self) -> Table:
        self._clock.pause(self._random.expovariate(1 / 0.002))
        if not self._table.answers:
            self._clock.pause(5.0)
            if not self._table.answers:
                raise StoreError("the store does not answer")
        return self._table

    def set(self, key: str, value: bytes) -> None:
        self._reach().values[key] = value

    def peek(self, key: str) -> bytes | None:
        return self._reach().values.get(key)

    def compare_set(
        self, key: str, expected: bytes | None, value: bytes
    ) -> tuple[bool, bytes | None]:
        values = self._reach().values
        if values.get(key) == expected:
            values[key] = value
            return True, value
        return False, values.get(key)

    def hold(self, name: str, secs: float) -> None:
        table = self._reach()
        table.held_by[name] = self
        table.left_at.pop(name, None)
        self.names.add(name)

    def alive(self, prefix: str) -> frozenset[str]:
        return frozenset()

    def left(self, prefix: str) -> dict[str, float]:
        table = self._reach()
        return {n: self._clock.now - at for n, at in table.left_at.items() if n.startswith(prefix)}

    def time(self) -> float | None:
        self._reach()
        return self._clock.time()

    def close(self) -> None:
        """The connection breaks: the server sees it at once."""
        for name in self.names:
            if self._table.held_by.get(name) is self:
                del self._table.held_by[name]
                self._table.left_at[name] = self._clock.now


class LeasedConnection(Connection):
    """As etcd's: who lives is told by leases, and missed when they are over."""

    keeps_leases = True

    def __init__(self, table: Table, clock: Clock, randomness: random.Random) -> None:
        super().__init__(table, clock, randomness)
        self._known: set[str] = set()
        self._missed: dict[str, float] = {}

    def time(self) -> float | None:
        return None

    def hold(self, name: str, secs: float) -> None:
        self._reach().leases[name] = self._clock.now + secs
        self.names.add(name)

    def alive(self, prefix: str) -> frozenset[str]:
        now = self._clock.now
        held = {n for n, end in self._reach().leases.items() if n.startswith(prefix) and end > now}
        self._known |= held
        self._missed = {n: self._missed.get(n, now) for n in self._known - held}
        return frozenset(held)

    def left(self, prefix: str) -> dict[str, float]:
        return {n: self._clock.now - at for n, at in self._missed.items() if n.startswith(prefix)}

    def close(self) -> None:
        """The lease is left to its end."""


@dataclass(eq=False)
class Node:
    name: str  # of the node
    world: World
    # the start that its trainers run in, with the names of all nodes of it; None: they do not
    trains: tuple[int, tuple[str, ...]] | None = None
    rounds: list[float] = field(default_factory=list)  # times at which its trainers were started
    end: str = ""  # why its launcher has ended; empty while it runs
    stands_until: float = 0.0  # it is stopped until then
    is_killed: bool = False
    fails: bool = False  # its trainers end in a moment by themselves
    incarnation: int = 0
    _turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def run(self) -> None:
        world = self.world
        self.wait_for_turn()
        connection = world.connection(world.table, world.clock, world.random)
        try:
            self._live(connection)
        except Killed:
            self.end = "killed"
        except LeftError:
            self.end = "left"
        except FencedError:
            self.end = "replaced"
        except BaseException as error:
            self.end = f"failed: {type(error).__name__}: {error}"
        self.trains = None
        with contextlib.suppress(Killed):
            connection.close()
        world.back.release()

    def wait_for_turn(self) -> None:
        self._turn.acquire()
        if self.is_killed:
            raise Killed

    def take_turn(self) -> None:
        self._turn.release()

    def _live(self, connection: Connection) -> None:
        world, store = self.world, connection
        config = LaunchConfig(
            world.least, world.most, 1, run_id=JOB, local_addr=self.name, rdzv_configs=dict(CONFIGS)
        )
        handler = StoreRendezvous(store, config, NodeInfo(self.name, 1), JOB)
        handler.wait_secs = world.wait_secs
        while True:
            try:
                self._one_round(handler, store)
            except (RendezvousConnectionError, StoreError, TimeoutError):
                world.clock.sleep(_RECONNECT_SECS)
            self.trains = None

    def _one_round(self, handler: StoreRendezvous, store: Connection) -> None:
        world = self.world
        known = max(handler.info.incarnation, handler.incarnations.read())
        handler.info = replace(handler.info, incarnation=known)
        agreement = handler.next_rendezvous()
        self.incarnation, members = agreement.incarnation, agreement.nodes
        handler.incarnations.raise_to(self.incarnation)
        self.rounds.append(world.clock.now)
        self.trains = (self.incarnation, members)
        self._train(handler, store, members, members.index(self.name))

    def _train(
        self, handler: StoreRendezvous, store: Connection, members: tuple[str, ...], rank: int
    ) -> None:
        """Until trainers have to be started anew."""
        world, clock = self.world, self.world.clock
        began = beaten = clock.now
        missing_since: float | None = None
        while True:
            clock.sleep(_LOOK_SECS)
            if clock.now - beaten >= _BEAT_SECS:
                handler.heartbeat()
                beaten = clock.now
            if self.fails:
                self.fails = False
                return
            if not handler.is_leaving and handler.newest_incarnation > self.incarnation:
                raise FencedError("replaced")
            if all(world.is_in(name, self.trains) for name in members):
                missing_since = None
            elif missing_since is None:
                missing_since = clock.now
            elif clock.now - missing_since > 0.5:
                return
            try:
                if handler.num_nodes_waiting() > 0:
                    return
            except RendezvousConnectionError:
                continue
            if rank == 0:
                self._lead(handler, store, members, clock.now - began)

    def _lead(
        self, handler: StoreRendezvous, store: Connection, members: tuple[str, ...], secs: float
    ) -> None:
        """Commit, take orders, and tell nodes to leave (:class:`reft.job.rendezvous.scaling.Scaler`)."""
        if secs < _COMMIT_SECS or not self.world.commits:
            return
        with contextlib.suppress(StoreError, RendezvousError):
            self._note_sizes(handler, len(members))
            store.set(committed_key(JOB), b"%d:1" % self.incarnation)
            running = len(members)
            if (order := self.world.order) is not None:
                handler.submit(ScaleRequested(order.number, order.nodes, order.without, running))
            scaling = handler.state.scaling
            if scaling is None or handler.state.leaving:
                return
            if scaling.replaces:
                ranks = tuple(i for i, name in enumerate(members) if name in scaling.without)
                if scaling.round != -1 or not ranks:
                    return
            elif scaling.nodes >= running:
                return
            else:
                ranks = leavers(members, 1, scaling.without)
            handler.submit(LeaveNotified(ranks, running))

    def _note_sizes(self, handler: StoreRendezvous, nodes: int) -> None:
        """As :class:`reft.job.rendezvous.scaling.Scaler` does, of replicas of ``world.stages`` nodes that keep a copy."""
        if not self.world.sizes:
            return
        stages = self.world.stages
        groups = tuple(tuple(range(stage, nodes, stages)) for stage in range(stages))
        handler.note_sizes(
            Sizes(self.world.sizes, scheme="arc", domains=tuple(range(nodes)), groups=groups)
        )


class World:
    """All nodes of a job of ``least`` to ``most``. ``seed``: who is next, and how long everything takes.
    ``least, most``: nodes of a round. ``connection``: to the store, of each node."""

    def __init__(
        self, seed: int, least: int, most: int, connection: type[Connection] = Connection
    ) -> None:
        self.connection = connection
        self.random = random.Random(seed)
        self.clock = Clock()
        self.clock.pause = self._pause
        self.table = Table()
        self.least, self.most = least, most
        self.nodes: list[Node] = []
        self.back = threading.Semaphore(0)
        self.order: ScaleRequest | None = None
        self.sizes: tuple[int, ...] = ()
        self.commits = True
        self.wait_secs: float | None = None
        self.stages = 1
        self._numbers = itertools.count()
        self._queue: list[tuple[float, int, Node]] = []
        self._running: Node | None = None

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(patch.object(handler_module, "time", self.clock))
            stack.enter_context(patch.object(handler_module, "random", self.random))
            stack.enter_context(
                patch.object(StoreRendezvous, "_start_heartbeats", lambda self: None)
            )
            stack.enter_context(
                patch.object(StoreRendezvous, "_stop_heartbeats", lambda self: None)
            )
            yield
            for node in self.nodes:
                self.kill(node)
            self.run(1.0)

    def start(self) -> Node:
        node = Node(f"node{len(self.nodes)}", self)
        self.nodes.append(node)
        threading.Thread(target=node.run, daemon=True).start()
        self._wake(node, self.clock.now)
        return node

    def kill(self, node: Node) -> None:
        """SIGKILL to the launcher; its connection breaks when it would have gone on."""
        node.is_killed = True
        node.stands_until = 0.0

    def stop(self, node: Node, secs: float) -> None:
        """SIGSTOP, and SIGCONT after ``secs``."""
        node.stands_until = self.clock.now + secs

    def scale(self, nodes: int, without: tuple[str, ...] = ()) -> None:
        number = 1 if self.order is None else self.order.number + 1
        self.order = ScaleRequest(number, nodes, without)

    def is_in(self, name: str, start: tuple[int, tuple[str, ...]] | None) -> bool:
        """Whether that node's trainers run in that start; one that stands still is not missed."""
        return any(n.name == name and n.trains == start and not n.is_killed for n in self.nodes)

    @property
    def alive(self) -> list[Node]:
        return [n for n in self.nodes if not n.end and not n.is_killed]

    def run(self, secs: float) -> None:
        until = self.clock.now + secs
        while self._queue and self._queue[0][0] <= until:
            at, _, node = heapq.heappop(self._queue)
            if node.stands_until > at:
                self._wake(node, node.stands_until)
                continue
            self.clock.now = max(self.clock.now, at)
            self._running = node
            node.take_turn()
            self.back.acquire()
        self.clock.now = until

    def _wake(self, node: Node, at: float) -> None:
        heapq.heappush(self._queue, (at, next(self._numbers), node))

    def _pause(self, secs: float) -> None:
        node = self._running
        assert node is not None
        self._wake(node, self.clock.now + max(secs, 1e-6))
        self.back.release()
        node.wait_for_turn()

    def shared(self) -> Any:
        held = self.table.values.get(f"rendezvous/{JOB}")
        return None if held is None else decode_state(held)
