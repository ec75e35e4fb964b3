"""The control plane: collectives along a tree, bytes between pairs, and what is heard when a rank is lost."""

from __future__ import annotations

import os
import queue
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from reft.comm import links, overlay, tree
from reft.comm.links import ENV_INTERFACE, Endpoint, Reception
from reft.comm.overlay import Overlay, connect, shared_secret
from reft.comm.peers import Peers
from reft.comm.tree import FANOUT, Tree, children_of, parent_of
from reft.errors import AuthenticationError, ConfigError, ReftError, TransferError
from reft.store.door import Door, knock, listen_locally

DEADLINE_SECS = 120.0
SECRET = b"s" * 32


class Table:
    """A store of this process."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._values: dict[str, bytes] = {}
        self.asked = 0

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self.asked += 1
            self._values[key] = value.encode()
            self._lock.notify_all()

    def get(self, key: str) -> bytes:
        with self._lock:
            self.asked += 1
            assert self._lock.wait_for(lambda: key in self._values, DEADLINE_SECS), key
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self.asked += 1
            value = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(value).encode()
            return value

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            return all(key in self._values for key in keys)


def on_all(act: Callable[[int], Any], world_size: int) -> list[Any]:
    with ThreadPoolExecutor(world_size) as pool:
        return [future.result(DEADLINE_SECS) for future in [pool.submit(act, r) for r in range(world_size)]]


def failure_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except TransferError as error:
        return str(error)
    return ""


def connected(nodes: list[str], secret: bytes = SECRET, prefix: str = "x") -> list[Overlay]:
    """The overlays of ranks that are threads of this process."""
    store, world_size = Table(), len(nodes)

    def one(rank: int) -> Overlay:
        return connect(
            store, prefix, rank=rank, world_size=world_size, node=nodes[rank], secret=secret,
            timeout_secs=DEADLINE_SECS,
        )  # fmt: skip

    return on_all(one, world_size)


def join(store: Table, rank: int) -> Overlay:
    """One of two ranks of a node, which would wait for long."""
    return connect(
        store, "x", rank=rank, world_size=2, node="a", secret=SECRET, timeout_secs=2 * DEADLINE_SECS
    )


@pytest.fixture
def overlays(request: pytest.FixtureRequest) -> Iterator[list[Overlay]]:
    made = connected(request.param)
    yield made
    for one in made:
        one.close()


def per_node(nodes: int, ranks: int) -> list[str]:
    return [f"node{r // ranks}" for r in range(nodes * ranks)]


SHAPES = [["a"], per_node(1, 2), per_node(2, 1), per_node(3, 4), per_node(20, 2), per_node(1, 20)]


@pytest.mark.parametrize("size", [1, 2, 16, 17, 18, 300, 2048])
def test_every_place_but_the_first_is_a_child_of_one(size: int) -> None:
    children = [child for place in range(size) for child in children_of(place, size)]
    assert children == list(range(1, size))
    assert all(child in children_of(parent_of(child), size) for child in children)
    assert max(len(children_of(place, size)) for place in range(size)) <= FANOUT


@pytest.mark.parametrize("overlays", SHAPES, indirect=True, ids=lambda nodes: f"{len(nodes)}")
def test_collectives_give_every_rank_the_same(overlays: list[Overlay]) -> None:
    world_size = len(overlays)
    for _ in range(3):
        found = on_all(lambda r: overlays[r].tree.reduce_min([r + 1, -r, 2**62]), world_size)
        assert found == [[1, 1 - world_size, 2**62]] * world_size
        found = on_all(lambda r: overlays[r].tree.gather(bytes([r]) * r), world_size)
        assert found == [[bytes([r]) * r for r in range(world_size)]] * world_size
    assert max(len(overlay.tree.links) for overlay in overlays) <= 1 + 2 * FANOUT


def test_a_rank_asks_the_store_a_fixed_number_of_questions() -> None:
    asked = []
    for ranks in (4, 12):
        store = Table()
        made = on_all(
            lambda r, store=store, n=ranks: connect(
                store, "x", rank=r, world_size=n, node=f"n{r // 4}", secret=SECRET, timeout_secs=DEADLINE_SECS
            ),
            ranks,
        )
        for one in made:
            one.close()
        asked.append(store.asked / ranks)
    assert asked[1] <= asked[0] + 2


@pytest.mark.parametrize("overlays", [per_node(2, 2)], indirect=True, ids=["2x2"])
def test_messages_longer_than_a_frame_arrive(
    overlays: list[Overlay], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "PART_BYTES", 1000)
    long = random.Random(1).randbytes(123_456)
    found = on_all(lambda r: overlays[r].tree.gather(long if r == 1 else b""), 4)
    assert found == [[b"", long, b"", b""]] * 4


@pytest.mark.parametrize("overlays", [per_node(2, 2)], indirect=True, ids=["2x2"])
def test_ranks_in_different_collectives_are_told_so(overlays: list[Overlay]) -> None:
    def act(rank: int) -> str:
        return failure_of(
            lambda: overlays[rank].tree.gather(b"") if rank else overlays[rank].tree.reduce_min([1])
        )

    said = on_all(act, 4)
    assert all(said)
    assert any("another collective" in text for text in said)


@pytest.mark.parametrize("overlays", [per_node(3, 2)], indirect=True, ids=["3x2"])
@pytest.mark.parametrize("lost", range(6))
def test_p6_a_rank_that_leaves_is_heard_by_all_that_wait_for_a_vote(
    overlays: list[Overlay], lost: int
) -> None:
    def act(rank: int) -> str:
        if rank == lost:
            overlays[rank].close()
        return failure_of(lambda: overlays[rank].tree.reduce_min([rank]))

    assert all(on_all(act, 6))


@pytest.mark.parametrize("overlays", [per_node(3, 2)], indirect=True, ids=["3x2"])
def test_p6_a_rank_that_leaves_is_heard_by_peers_in_an_exchange_that_it_has_no_part_in(
    overlays: list[Overlay],
) -> None:
    waits = threading.Barrier(6)

    def act(rank: int) -> None:
        waits.wait(DEADLINE_SECS)
        if rank == 5:
            overlays[rank].close()
        elif rank == 0:  # its peer never comes
            with pytest.raises((OSError, EOFError)):
                overlays[rank].peers.exchange({}, {1: [memoryview(bytearray(9))]})
            overlays[rank].close()
        elif rank == 1:
            with pytest.raises((OSError, EOFError)):
                overlays[rank].peers.exchange({}, {2: [memoryview(bytearray(9))]})
            overlays[rank].close()
        else:
            with pytest.raises(TransferError):
                overlays[rank].tree.reduce_min([rank])

    on_all(act, 6)


@pytest.mark.parametrize("overlays", [per_node(2, 3)], indirect=True, ids=["2x3"])
def test_bytes_are_exchanged_round_a_ring_in_both_directions(overlays: list[Overlay]) -> None:
    rng = random.Random(2)
    sizes = [0, 1, 5_000_000, 17, *[rng.randrange(2000) for _ in range(200)]]

    def data(source: int, target: int, turn: int) -> list[bytes]:
        return [random.Random(f"{source} {target} {turn} {i}").randbytes(n) for i, n in enumerate(sizes)]

    def act(rank: int) -> None:
        after, before = (rank + 1) % 6, (rank - 1) % 6
        for turn in range(2):
            into = {peer: [bytearray(n) for n in sizes] for peer in (after, before)}
            overlays[rank].peers.exchange(
                {peer: [memoryview(b) for b in data(rank, peer, turn)] for peer in into},
                {peer: [memoryview(b) for b in buffers] for peer, buffers in into.items()},
            )
            for peer, buffers in into.items():
                assert [bytes(b) for b in buffers] == data(peer, rank, turn)

    on_all(act, 6)


def test_p6_who_does_not_come_is_waited_for_only_so_long() -> None:
    with pytest.raises(TransferError, match="only 1 of 2 ranks"):
        connect(Table(), "x", rank=0, world_size=2, node="a", secret=SECRET, timeout_secs=0.05)
    asked = []
    with pytest.raises(TransferError, match="only 1 of 2 ranks"):
        connect(
            Table(), "x", rank=0, world_size=2, node="a", secret=SECRET, timeout_secs=DEADLINE_SECS,
            go_on=lambda: bool(asked.append(1)),
        )  # fmt: skip
    assert asked


@pytest.mark.parametrize("overlays", [per_node(2, 1)], indirect=True, ids=["2x1"])
def test_p6_a_silent_rank_is_waited_for_only_so_long(overlays: list[Overlay]) -> None:
    overlays[0].tree.timeout_secs = 0.05
    assert "silent" in failure_of(lambda: overlays[0].tree.reduce_min([1]))
    overlays[1].peers.timeout_secs = 0.05
    with pytest.raises((OSError, EOFError)):
        overlays[1].peers.exchange({}, {0: [memoryview(bytearray(1))]})


@pytest.mark.parametrize(
    "nodes", [per_node(1, 2), per_node(2, 1), per_node(3, 2)], ids=["Unix", "TCP", "3x2"]
)
def test_p11_a_rank_with_another_secret_is_refused_and_all_hear_of_it(
    nodes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlay, "CONNECT_SECS", 2 * DEADLINE_SECS)
    store, world_size = Table(), len(nodes)

    def one(rank: int) -> BaseException | None:
        secret = b"other" * 6 if rank == world_size - 1 else SECRET
        try:
            made = connect(
                store, "x", rank=rank, world_size=world_size, node=nodes[rank], secret=secret,
                timeout_secs=2 * DEADLINE_SECS,
            )  # fmt: skip
        except Exception as error:
            return error
        try:
            made.tree.reduce_min([rank])
        except Exception as error:
            return error
        finally:
            made.close()
        return None

    errors = on_all(one, world_size)
    assert any(isinstance(error, AuthenticationError) for error in errors)
    assert all(errors)


def test_p11_an_endpoint_that_another_wrote_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint(1, "a", "@somewhere", "somewhere:1")
    assert Endpoint.unpack(endpoint.pack(SECRET), SECRET) == endpoint
    monkeypatch.setattr(msgpack, "unpackb", None)
    for forged in (endpoint.pack(b"other" * 6), endpoint.pack(SECRET)[16:], b""):
        with pytest.raises(AuthenticationError, match="endpoint"):
            Endpoint.unpack(forged, SECRET)


def test_p6_who_cannot_listen_is_heard_by_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    store, listens = Table(), links.listen_remotely

    def listen_on_rank_1_only() -> socket.socket:
        if threading.current_thread().name != "rank 0":
            return listens()
        raise ConfigError("no address")

    monkeypatch.setattr(links, "listen_remotely", listen_on_rank_1_only)

    def come(rank: int) -> str:
        threading.current_thread().name = f"rank {rank}"
        try:
            join(store, rank)
        except ReftError as error:
            return str(error)
        return ""

    assert on_all(come, 2) == ["no address", "rank 0 could not connect with the others; its log says why"]


def test_p6_a_rank_that_came_and_does_not_connect_is_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that is killed just then."""
    monkeypatch.setattr(overlay, "CONNECT_SECS", 0.1)
    store = Table()

    def come(rank: int) -> str:
        if rank == 0:
            return failure_of(lambda: join(store, 0))
        store.get("x/came")  # waits for it
        for count in ("node/a", "came"):
            store.add(f"x/{count}", 1)
        for key in ("at/a/1", "whole"):
            store.set(f"x/{key}", "1")
        return ""

    assert "rank 1 did not connect" in on_all(come, 2)[0]


def test_p6_a_rank_that_listens_and_does_not_answer_is_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that is stopped just then."""
    monkeypatch.setattr(overlay, "CONNECT_SECS", 0.1)
    store = Table()
    stopped = Reception(1, "a", SECRET)
    with listen_locally(f"reft-test-{random.getrandbits(64)}") as silent:
        at = replace(stopped.endpoint, local=f"@{silent.getsockname()[1:].decode()}")
        stopped.close()
        for count in ("node/a", "nodes", "came"):
            store.add(f"x/{count}", 1)
        for key, value in (("at/a/0", "1"), ("leader/0", "1"), ("rank/1", at.pack(SECRET).hex())):
            store.set(f"x/{key}", value)
        assert "timed out" in failure_of(lambda: join(store, 0))
    assert store.check(["x/failed"])


def test_p11_who_knows_a_door_but_not_the_secret_takes_no_place() -> None:
    reception = Reception(0, "a", SECRET)
    try:
        for endpoint in (reception.endpoint.local, reception.endpoint.remote):
            with pytest.raises(AuthenticationError):
                knock(endpoint, b"x" * 32, "control plane", DEADLINE_SECS)
        with pytest.raises(TimeoutError):
            reception.await_call("tree", 1, time.monotonic(), lambda: True)
    finally:
        reception.close()
    with pytest.raises(OSError):
        knock(reception.endpoint.local, SECRET, "control plane", DEADLINE_SECS)


@pytest.mark.parametrize("overlays", [per_node(2, 1)], indirect=True, ids=["2x1"])
def test_p6_a_forked_child_does_not_hide_that_its_rank_is_gone(overlays: list[Overlay]) -> None:
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)
        os.read(told, 1)  # until the test ends
        os._exit(0)
    try:
        os.close(told)
        for link in (*overlays[1].tree.links, *overlays[1].peers.links):
            link.close()  # as the kernel does when a process is killed
        assert failure_of(lambda: overlays[0].tree.reduce_min([1]))
    finally:
        os.close(tell)
        os.waitpid(child, 0)


def test_p6_a_child_forked_during_a_handshake_does_not_keep_the_connection() -> None:
    caller = Reception(0, "a", SECRET)

    def call() -> None:
        with pytest.raises(OSError):
            caller.call(at, "tree", time.monotonic() + 2)

    with listen_locally(f"reft-test-{random.getrandbits(64)}") as silent, ThreadPoolExecutor(1) as pool:
        at = Endpoint(1, caller.endpoint.node, f"@{silent.getsockname()[1:].decode()}", "nowhere:1")
        gave_up = pool.submit(call)
        connection, _ = silent.accept()
        connection.settimeout(DEADLINE_SECS)
        assert connection.recv(1)  # it has begun and waits for an answer
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(tell)
            connection.close()
            os.read(told, 1)  # until the test ends
            os._exit(0)
        try:
            os.close(told)
            gave_up.result(DEADLINE_SECS)
            while connection.recv(100):
                pass
        finally:
            os.close(tell)
            os.waitpid(child, 0)
            connection.close()
            caller.close()


@pytest.mark.parametrize("overlays", [per_node(3, 2), per_node(20, 2)], indirect=True, ids=["3x2", "20x2"])
def test_p6_who_lives_and_does_not_answer_is_named_to_all_and_the_vote_ends_well(
    overlays: list[Overlay],
) -> None:
    world_size = len(overlays)
    silent = world_size - 1
    name, named = f"rank {silent} on node node{silent // 2}", [threading.Event() for _ in overlays]

    def hear(rank: int, missing: list[str]) -> None:
        if name in missing:
            named[rank].set()

    for rank, one in enumerate(overlays):
        one.tree.patience_secs = 0.3
        one.tree.on_silence = lambda missing, secs, rank=rank: hear(rank, missing)

    def act(rank: int) -> list[int]:
        if rank == silent:
            assert all(event.wait(DEADLINE_SECS) for event in named[:silent])
        return overlays[rank].tree.reduce_min([rank])

    for _ in range(2):
        assert on_all(act, world_size) == [[0]] * world_size


@pytest.mark.parametrize("overlays", [per_node(2, 1)], indirect=True, ids=["2x1"])
def test_p6_a_peer_that_sends_nothing_is_named(overlays: list[Overlay]) -> None:
    """Before it has connected, and after."""
    missing: queue.Queue[list[str]] = queue.Queue()
    overlays[1].peers.patience_secs = 0.1
    overlays[1].peers.on_silence = lambda names, secs: missing.put(names)

    def act(rank: int) -> None:
        if rank == 0:
            assert missing.get(timeout=DEADLINE_SECS) == ["rank 0 on node node0"]
            overlays[0].peers.exchange({1: [memoryview(b"x")]}, {})
        else:
            overlays[1].peers.exchange({}, {0: [memoryview(bytearray(1))]})

    for _ in range(2):
        on_all(act, 2)
        while not missing.empty():
            missing.get()


def test_p6_a_handshake_that_was_cut_off_is_tried_again_and_who_left_is_not_waited_for() -> None:
    caller = Reception(0, "a", SECRET)
    listener = listen_locally(f"reft-test-{random.getrandbits(64)}")
    name = f"@{listener.getsockname()[1:].decode()}"
    nobody = socket.socket()
    nobody.bind(("127.0.0.1", 0))  # and does not listen
    remote = f"127.0.0.1:{nobody.getsockname()[1]}"
    other = Endpoint(1, caller.endpoint.node, name, remote)
    served: queue.Queue[Any] = queue.Queue()

    def serve(channel: Any) -> bool:
        served.put(channel)
        return True

    def cut_off_one() -> Door:
        listener.accept()[0].close()
        return Door(listener, SECRET, "control plane", serve)

    with ThreadPoolExecutor(1) as pool:
        door = pool.submit(cut_off_one)
        line = caller.call(other, "tree", time.monotonic() + DEADLINE_SECS)
        door.result(DEADLINE_SECS).stop_listening()
    assert served.get(timeout=DEADLINE_SECS).receive() == ["tree", 0, caller.endpoint.node]
    line.close()
    with pytest.raises(ConnectionRefusedError, match=f"rank 1 .* {remote} .*GLOO_SOCKET_IFNAME"):
        caller.call(other, "tree", time.monotonic() + DEADLINE_SECS)
    caller.close()
    nobody.close()


def test_p6_a_forked_child_does_not_answer_calls_to_a_rank_that_is_gone() -> None:
    at, told = os.pipe()
    rank = os.fork()
    if not rank:
        reception = Reception(0, "a", SECRET)
        tree = Tree(0, 1, None, (), DEADLINE_SECS)
        overlay = Overlay(tree, Peers(reception, lambda _: reception.endpoint, lambda: (), 1.0), reception)
        child = os.fork()
        if child:
            assert overlay.tree is tree
            os.write(told, msgpack.packb([child, reception.endpoint.pack(SECRET)]))
        threading.Event().wait(2 * DEADLINE_SECS)  # it is killed before
        os._exit(0)
    child, packed = msgpack.unpackb(os.read(at, 4096))
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    caller = Reception(1, "a", SECRET)
    try:
        with pytest.raises(ConnectionRefusedError):
            caller.call(Endpoint.unpack(packed, SECRET), "pair", time.monotonic() + DEADLINE_SECS)
    finally:
        os.kill(child, signal.SIGKILL)
        caller.close()
        os.close(at)
        os.close(told)


def test_hosts_of_one_name_meet_over_tcp() -> None:
    """Another host's Unix sockets lead nowhere, though its ranks give their node the same name."""
    caller, called = Reception(0, "localhost", SECRET), Reception(1, "localhost", SECRET)
    elsewhere = f"@reft-test-{random.getrandbits(64)}"
    deadline = time.monotonic() + DEADLINE_SECS
    line = caller.call(replace(called.endpoint, local=elsewhere), "tree", deadline)
    line.send("hello")
    assert called.await_call("tree", 0, deadline, lambda: True).receive() == "hello"
    for one in (line, caller, called):
        one.close()


def test_an_address_of_the_hosts_name_that_is_another_machines_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As behind address translation: loopback would lead no other host here."""
    look_up = socket.getaddrinfo

    def addresses(host: str, port: int, **options: Any) -> list[Any]:
        if host != "of-several-addresses":
            return look_up(host, port, **options)
        return [a for ip in ("192.0.2.7", "127.0.0.3") for a in look_up(ip, port, **options)]

    monkeypatch.delenv(ENV_INTERFACE, raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "of-several-addresses")
    monkeypatch.setattr(socket, "getaddrinfo", addresses)
    reception = Reception(0, "a", SECRET)
    reception.close()
    assert reception.endpoint.remote.startswith("127.0.0.3:")


def test_p6_a_store_with_an_earlier_incarnations_keys_is_refused() -> None:
    store = Table()

    def come(rank: int) -> Any:
        return connect(
            store, "x", rank=rank, world_size=3, node="a", secret=SECRET, timeout_secs=DEADLINE_SECS
        )

    for one in on_all(come, 3):
        one.close()
    for failure in on_all(lambda rank: failure_of(lambda: come(rank)), 3):
        assert "expected 3" in failure


def test_the_first_who_asks_makes_the_secret() -> None:
    store, numbers = Table(), iter(range(1, 10))
    found = on_all(lambda _: shared_secret(store, "key", lambda: bytes([next(numbers)])), 4)
    assert found == [b"\x01"] * 4


def test_a_door_that_serves_a_unix_socket_keeps_what_it_is_told_to_keep() -> None:
    kept, came, go_on = [], threading.Event(), threading.Event()

    def serve(channel: Any) -> bool:
        if channel.receive() == "keep":
            kept.append(channel)
            came.set()
            return go_on.wait(DEADLINE_SECS)
        return False

    door = Door(listen_locally(f"reft-test-{random.getrandbits(64)}"), SECRET, "test", serve)
    name = door.endpoint
    try:
        dropped = knock(name, SECRET, "test", DEADLINE_SECS)
        dropped.send("drop")
        with pytest.raises(EOFError):
            dropped.receive()
        line = knock(name, SECRET, "test", DEADLINE_SECS)
        line.send("keep")
        assert came.wait(DEADLINE_SECS)
        kept[0].send("hello")
        assert line.receive() == "hello"
    finally:
        # It has been taken already, though the door does not know it yet.
        door.stop_listening()
        go_on.set()
    line.send("still there")
    assert kept[0].receive() == "still there"


def test_a_tree_of_one_rank_has_nobody_to_ask() -> None:
    alone = Tree(0, 1, None, (), DEADLINE_SECS)
    assert alone.reduce_min([3, 4]) == [3, 4]
    assert alone.gather(b"x") == [b"x"]
    assert alone.links == ()
    assert socket.gethostname()
