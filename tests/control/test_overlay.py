"""How ranks find each other and connect, and what is heard where one does not (P6, P11)."""

from __future__ import annotations

import os
import queue
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from reft.control import control, transport
from reft.control.control import TreeTransport, shared_secret
from reft.control.transport import (
    FANOUT,
    PART_BYTES,
    Buffers,
    Endpoint,
    ReceiveQueue,
    TransferLimits,
    Tree,
    find_children,
    find_parent,
)
from reft.control.wire import AuthenticatedServer, Channel, connect_authenticated, listen_locally
from reft.errors import AuthenticationError, ConfigError, ReftError, TransferError

from .ranks import DEADLINE_SECS, SECRET, Table, connected, failure_of, join, on_all, per_node


@pytest.fixture
def overlays(request: pytest.FixtureRequest) -> Iterator[list[TreeTransport]]:
    made = connected(request.param)
    yield made
    for one in made:
        one.close()


def test_a_rank_asks_the_store_a_fixed_number_of_questions() -> None:
    asked = []
    for ranks in (4, 12):
        store = Table()
        made = on_all(lambda r, store=store, n=ranks: join(store, r, n, f"n{r // 4}"), ranks)
        for one in made:
            one.close()
        asked.append(store.asked / ranks)
    assert asked[1] <= asked[0] + 2


def test_p6_who_does_not_come_is_waited_for_only_so_long() -> None:
    with pytest.raises(TransferError, match="only 1 of 2 ranks"):
        join(Table(), 0, timeout_secs=0.05)
    asked = []
    with pytest.raises(TransferError, match="only 1 of 2 ranks"):
        join(Table(), 0, keep_waiting=lambda: bool(asked.append(1)))
    assert asked


@pytest.mark.parametrize(
    "nodes", [per_node(1, 2), per_node(2, 1), per_node(3, 2)], ids=["Unix", "TCP", "3x2"]
)
def test_p11_a_rank_with_another_secret_is_refused_and_all_hear_of_it(
    nodes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "CONNECT_SECS", 2 * DEADLINE_SECS)
    store, world_size = Table(), len(nodes)

    def one(rank: int) -> BaseException | None:
        secret = b"other" * 6 if rank == world_size - 1 else SECRET
        try:
            with closing(join(store, rank, world_size, nodes[rank], secret=secret)) as made:
                made.reduce_min([rank])
        except Exception as error:
            return error
        return None

    errors = on_all(one, world_size)
    assert any(isinstance(error, AuthenticationError) for error in errors)
    assert all(errors)


def test_p6_who_cannot_listen_is_heard_by_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    store, listens = Table(), transport.listen_remotely

    def listen_on_rank_1_only() -> socket.socket:
        if threading.current_thread().name != "rank 0":
            return listens()
        raise ConfigError("no address")

    monkeypatch.setattr(transport, "listen_remotely", listen_on_rank_1_only)

    def come(rank: int) -> str:
        threading.current_thread().name = f"rank {rank}"
        try:
            join(store, rank)
        except ReftError as error:
            return str(error)
        return ""

    assert on_all(come, 2) == [
        "no address",
        "rank 0 could not connect with the others; its log says why",
    ]


def test_p6_a_rank_that_came_and_does_not_connect_is_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that is killed just then."""
    monkeypatch.setattr(control, "CONNECT_SECS", 0.1)
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


def test_p6_a_store_with_an_earlier_incarnations_keys_is_refused() -> None:
    store = Table()
    for one in on_all(lambda rank: join(store, rank, 3), 3):
        one.close()
    for failure in on_all(lambda rank: failure_of(lambda: join(store, rank, 3)), 3):
        assert "expected 3" in failure


def test_the_first_who_asks_makes_the_secret() -> None:
    store, numbers = Table(), iter(range(1, 10))
    found = on_all(lambda _: shared_secret(store, "key", lambda: bytes([next(numbers)])), 4)
    assert found == [b"\x01"] * 4


# -- the tree, and pairs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 16, 17, 18, 300, 2048])
def test_every_place_but_the_first_is_a_child_of_one(size: int) -> None:
    children = [child for place in range(size) for child in find_children(place, size)]
    assert children == list(range(1, size))
    assert all(child in find_children(find_parent(child), size) for child in children)
    assert max(len(find_children(place, size)) for place in range(size)) <= FANOUT


@pytest.mark.parametrize(
    "overlays", [["a"], per_node(20, 2), per_node(1, 20)], indirect=True, ids=len
)
def test_collectives_give_every_rank_the_same(overlays: list[TreeTransport]) -> None:
    world_size = len(overlays)
    found = on_all(lambda r: overlays[r].reduce_min([r + 1, -r, 2**62]), world_size)
    assert found == [[1, 1 - world_size, 2**62]] * world_size
    found = on_all(lambda r: overlays[r].gather(bytes([r]) * r), world_size)
    assert found == [[bytes([r]) * r for r in range(world_size)]] * world_size
    assert max(len(overlay.links) for overlay in overlays) <= 1 + 2 * FANOUT


@pytest.mark.parametrize("overlays", [per_node(2, 1)], indirect=True, ids=["2x1"])
def test_p6_a_peer_that_sends_nothing_is_named(overlays: list[TreeTransport]) -> None:
    """Before it has connected, and after."""
    missing: queue.Queue[list[str]] = queue.Queue()
    overlays[1].limits.patience_secs = 0.1
    overlays[1].limits.on_silence = lambda names, secs: missing.put(names)

    def act(rank: int) -> None:
        if rank == 0:
            assert missing.get(timeout=DEADLINE_SECS) == ["rank 0 on node node0"]
            overlays[0].stream({1: [memoryview(b"x")]}, {})
        else:
            overlays[1].stream({}, {0: Buffers([memoryview(bytearray(1))])})

    for _ in range(2):
        on_all(act, 2)
        while not missing.empty():
            missing.get()


@pytest.mark.parametrize("stands_still", ["while it sends", "before it reads"])
def test_p6_who_stands_still_in_the_middle_of_a_message_is_named_and_the_rest_of_it_taken(
    stands_still: str,
) -> None:
    """A message of several frames, each longer than the kernel keeps of a connection."""
    ours, theirs = socket.socketpair()
    named, long = threading.Event(), bytes(20 * 2**20)
    with ThreadPoolExecutor(2) as pool:
        end = pool.submit(
            Channel, theirs, SECRET, server=False, line="the line", handshake_secs=60.0
        )
        channel = Channel(ours, SECRET, server=True, line="the line", handshake_secs=60.0)
        root = Tree(0, None, [channel], TransferLimits(DEADLINE_SECS, 0.3))
        leaf = end.result(DEADLINE_SECS)
        root.links[0].peer = "rank 1"
        root.limits.on_silence = lambda missing, secs: (
            named.set() if missing == ["rank 1"] else None
        )
        sends = stands_still == "while it sends"
        gathered = pool.submit(root.gather, b"y" if sends else long)
        mine = long if sends else b"x"
        body = msgpack.packb(["gather, number 1", [[1, mine]]])
        parts = [body[at : at + PART_BYTES] for at in range(0, len(body), PART_BYTES)]
        frames = b"".join(
            leaf.make_frame([len(parts), part] if part is parts[0] else part) for part in parts
        )
        theirs.sendall(frames[: len(frames) // 2 if sends else len(frames)])
        assert named.wait(DEADLINE_SECS)
        theirs.sendall(frames[len(frames) // 2 :] if sends else b"")
        number, first = leaf.receive()
        result = msgpack.unpackb(b"".join([first, *(leaf.receive() for _ in range(number - 1))]))
        assert result == gathered.result(DEADLINE_SECS) == [b"y" if sends else long, mine]
    root.close()
    leaf.close()


def test_p11_an_endpoint_that_another_wrote_is_not_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint = Endpoint(1, "a", "@somewhere", "somewhere:1")
    assert Endpoint.unpack(endpoint.pack(SECRET), SECRET) == endpoint
    monkeypatch.setattr(msgpack, "unpackb", None)
    for forged in (endpoint.pack(b"other" * 6), endpoint.pack(SECRET)[16:], b""):
        with pytest.raises(AuthenticationError, match="endpoint"):
            Endpoint.unpack(forged, SECRET)


def test_p11_who_knows_a_door_but_not_the_secret_takes_no_place() -> None:
    reception = ReceiveQueue(0, "a", SECRET)
    try:
        for endpoint in (reception.endpoint.local, reception.endpoint.remote):
            with pytest.raises(AuthenticationError):
                connect_authenticated(endpoint, b"x" * 32, "control plane", DEADLINE_SECS)
        with pytest.raises(TimeoutError):
            reception.await_call("tree", 1, time.monotonic(), lambda: True)
    finally:
        reception.close()
    with pytest.raises(OSError):
        connect_authenticated(reception.endpoint.local, SECRET, "control plane", DEADLINE_SECS)


@pytest.mark.process
@pytest.mark.parametrize("overlays", [per_node(2, 1)], indirect=True, ids=["2x1"])
def test_p6_a_forked_child_does_not_hide_that_its_rank_is_gone(
    overlays: list[TreeTransport],
) -> None:
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)
        os.read(told, 1)  # until the test ends
        os._exit(0)
    try:
        os.close(told)
        for link in (*overlays[1].links, *overlays[1].pairs.values()):
            link.close()  # as the kernel does when a process is killed
        assert failure_of(lambda: overlays[0].reduce_min([1]))
    finally:
        os.close(tell)
        os.waitpid(child, 0)


def test_p6_a_handshake_that_was_cut_off_is_tried_again_and_who_left_is_not_waited_for() -> None:
    caller = ReceiveQueue(0, "a", SECRET)
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

    def cut_off_one() -> AuthenticatedServer:
        listener.accept()[0].close()
        return AuthenticatedServer(listener, SECRET, "control plane", serve)

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


def test_hosts_of_one_name_meet_over_tcp() -> None:
    """Another host's Unix sockets lead nowhere, though its ranks give their node the same name."""
    caller, called = ReceiveQueue(0, "localhost", SECRET), ReceiveQueue(1, "localhost", SECRET)
    elsewhere = f"@reft-test-{random.getrandbits(64)}"
    deadline = time.monotonic() + DEADLINE_SECS
    line = caller.call(replace(called.endpoint, local=elsewhere), "tree", deadline)
    line.send("hello")
    assert called.await_call("tree", 0, deadline, lambda: True).receive() == "hello"
    for one in (line, caller, called):
        one.close()
