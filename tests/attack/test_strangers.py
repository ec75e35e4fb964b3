"""P11: whoever does not know the secret gets nothing, and nothing that it sends is run."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from reft.control import wire
from reft.control.authenticated import AuthenticatedServer, connect_authenticated, listen, purpose_key
from reft.control.keyvalue import PURPOSE, KeyValueServer, KeyValueStore, StoreError
from reft.control.wire import Channel
from reft.errors import AuthenticationError
from reft.job.rendezvous.server import RendezvousServer
from tests.attack.jobs import launched, wait_for
from tests.job.cluster import SCRIPTS, WatchedCluster, cluster
from tests.machine import free_port

SECRET = b"k" * 32
WAIT_SECS = 60.0


@pytest.fixture
def server() -> Iterator[KeyValueServer]:
    served = KeyValueServer(listen("127.0.0.1", 0), SECRET, {"secret plan": b"attack at dawn"})
    yield served
    served.close()


def endpoint(server: KeyValueServer) -> str:
    return f"127.0.0.1:{server.port}"


def read_until_closed(connection: socket.socket) -> bytes:
    connection.settimeout(WAIT_SECS)
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            got += data
    return got


# -- a stranger at the port --------------------------------------------------------------------------


def test_p11_a_raw_socket_gets_a_challenge_and_a_closed_door(server: KeyValueServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + b"x" * 100)
        got = read_until_closed(stranger)
    # Its challenge and the proof for ours: nothing that depends on what the store holds.
    assert len(got) <= 64
    assert KeyValueStore(endpoint(server), SECRET).get("secret plan") == b"attack at dawn"


def test_p11_another_secret_is_refused_and_told_so(server: KeyValueServer) -> None:
    with pytest.raises(AuthenticationError, match=r"another secret.*~/.reft/secret.*REFT_SECRET"):
        KeyValueStore(endpoint(server), b"x" * 32).get("secret plan")


def test_p11_a_proof_for_one_door_opens_no_other(server: KeyValueServer) -> None:
    with pytest.raises(AuthenticationError):
        connect_authenticated(endpoint(server), SECRET, "trainers' store", WAIT_SECS)


def test_p11_a_reflected_handshake_is_refused(server: KeyValueServer) -> None:
    """A stranger who sends back whatever it receives knows nothing."""
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.settimeout(WAIT_SECS)
        for _ in range(2):
            stranger.sendall(stranger.recv(32))
        assert len(read_until_closed(stranger)) <= 32


@pytest.mark.parametrize("change", ["flip", "replay", "reorder", "shrink"])
def test_p11_a_changed_or_repeated_frame_ends_the_connection(server: KeyValueServer, change: str) -> None:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_SECS)
    recorder = _Recorder(connection)
    channel = Channel(
        recorder, purpose_key(SECRET, PURPOSE), server=False, line="the line", handshake_secs=60.0
    )  # type: ignore[arg-type]
    recorder.frames = frames = []
    channel.send(["set", "a", b"1"])
    channel.send(["set", "b", b"2"])
    first, second = frames
    body = {
        "flip": first[:-1] + bytes([first[-1] ^ 1]),
        "replay": first + first,
        "reorder": second + first,
        "shrink": b"\x00\x00\x00\x01" + first[4:],
    }[change]
    connection.sendall(body)
    if change == "replay":
        assert channel.receive() == [True, None]
    assert read_until_closed(connection) == b""
    connection.close()
    store = KeyValueStore(endpoint(server), SECRET)
    assert store.check(["a"]) is (change == "replay")
    assert not store.check(["b"])


class _Recorder:
    """A connection whose frames are kept instead of sent, from the time on when there is a list for them."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.frames: list[bytes] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def sendall(self, data: bytes) -> None:
        if self.frames is None:
            self._connection.sendall(data)
        else:
            self.frames.append(data)


def test_p11_a_huge_frame_is_not_read(server: KeyValueServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_SECS) as connection:
        Channel(connection, purpose_key(SECRET, PURPOSE), server=False, line="the line", handshake_secs=60.0)
        connection.sendall((wire.MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
        assert read_until_closed(connection) == b""


def test_p11_strangers_who_say_nothing_do_not_shut_others_out(
    server: KeyValueServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough for whoever knows the secret, on a machine that has other things to do.
    monkeypatch.setattr("reft.control.authenticated.HANDSHAKE_SECS", 2.0)
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
    try:
        assert KeyValueStore(endpoint(server), SECRET).check(["secret plan"])
        for connection in silent:
            assert len(read_until_closed(connection)) <= 32
    finally:
        for connection in silent:
            connection.close()


def test_p11_a_dribble_of_bytes_does_not_hold_the_door_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte in time, all of them never: the handshake as a whole is bounded."""
    monkeypatch.setattr("reft.control.authenticated.HANDSHAKE_SECS", 0.5)
    door = AuthenticatedServer(listen("127.0.0.1", 0), SECRET, "test", lambda channel: None)
    try:
        with socket.create_connection(("127.0.0.1", door.port)) as stranger:
            stranger.settimeout(0.1)
            deadline, open_still = time.monotonic() + WAIT_SECS, True
            while open_still and time.monotonic() < deadline:
                try:
                    stranger.sendall(b"x")
                    open_still = stranger.recv(1) != b""
                except TimeoutError:
                    continue
                except ConnectionError:
                    open_still = False
            assert not open_still
    finally:
        door.close()


def test_p6_a_door_without_descriptors_or_threads_opens_again(
    server: KeyValueServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that cannot be started costs that connection, not the door."""
    store = KeyValueStore(endpoint(server), SECRET, timeout_secs=WAIT_SECS)
    start, refused = threading.Thread.start, []

    def fail_once(thread: threading.Thread) -> None:
        if thread.name == PURPOSE and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    with pytest.raises(StoreError):
        store.check([])
    assert refused
    assert KeyValueStore(endpoint(server), SECRET).check(["secret plan"])


def test_p11_keys_differ_by_purpose() -> None:
    assert purpose_key(SECRET, "rendezvous") != purpose_key(SECRET, "trainers' store") != SECRET


# -- addresses ---------------------------------------------------------------------------------------


def listening(pid: int) -> set[str]:
    return {c.laddr.ip for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def test_p11_it_listens_where_it_was_asked_to() -> None:
    server = RendezvousServer("127.0.0.1", 0, SECRET)
    try:
        assert server.info.address == "127.0.0.1"
        with pytest.raises(OSError):
            # Another address of this host, if it has one.
            socket.create_connection(("127.0.0.2", server.info.port), timeout=WAIT_SECS)
    finally:
        server.close()


# -- a whole job -------------------------------------------------------------------------------------


class Bomb:
    """Runs a command where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self._path}",)


def throw(port: int, run_id: str, bomb: bytes) -> None:
    """Write ``bomb`` as TorchElastic's rendezvous state, with torch's own client."""
    with contextlib.suppress(RuntimeError, TimeoutError):
        store = TCPStore(
            "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5)
        )
        store.set(f"torch.rendezvous.{run_id}", b64encode(bomb).decode())


@pytest.mark.integration
@pytest.mark.parametrize(
    "given",
    [
        pytest.param(True, id="REFT_SECRET", marks=pytest.mark.nightly),
        pytest.param(False, id="~/.reft/secret"),
    ],
)
def test_p11_a_job_runs_no_strangers_code_and_tells_no_secret(tmp_path: Path, given: bool) -> None:
    """Two nodes train while a stranger writes a pickle where TorchElastic would read one."""
    home = tmp_path / "home"
    home.mkdir()
    secret = "5e" * 32 if given else ""
    env = {"REFT_SECRET": secret, "HOME": str(home)}
    with cluster(tmp_path, "allreduce.py", "100000", nodes=2, env=env) as job:
        port = int(job.endpoint.rpartition(":")[2])
        traces = tmp_path / "bombed"
        throw(port, job.job_id, pickle.dumps(Bomb(traces)))
        job.wait_for("step", 2, 240, step=5)
        throw(port, job.job_id, pickle.dumps(Bomb(traces)))
        used = bytes.fromhex(secret or (home / ".reft" / "secret").read_text().strip())
        if given:
            assert not (home / ".reft").exists()
        else:
            assert (home / ".reft" / "secret").stat().st_mode & 0o777 == 0o600
        held = held_by(job, used)
        assert any(key.startswith("run/") for key in held)
        for key, value in held.items():
            assert used not in value, key
            assert used.hex().encode() not in value, key
        assert_doors_are_on_loopback(job)
        environ = job.trainers(1)[0].environ()
        assert environ["MASTER_ADDR"] == "127.0.0.1"
        assert port != int(environ["MASTER_PORT"])
        job.finish()
        assert job.wait(240) == {0: 0, 1: 0}
        assert not traces.exists()


def held_by(job: WatchedCluster, secret: bytes) -> dict[str, bytes]:
    """Everything that nodes of the job wrote: what the round's keys and the state hold."""
    store = KeyValueStore(job.endpoint, secret)
    keys = [f"rendezvous/{job.job_id}"]
    for current in range(4):
        table = f"run/{job.job_id}/{current}/reft/round/0"
        keys += [f"{table}/node/{i}" for i in range(2)] + [f"{table}/trainers"]
    return {key: value for key in keys if (value := store.peek(key)) is not None}


def assert_doors_are_on_loopback(job: WatchedCluster) -> None:
    """The launchers and the rendezvous listen on the address asked for; --local-addr is loopback here.
    What gloo opens between trainers is not ours (docs/security.md)."""
    assert job.rendezvous is not None
    pids = [job.rendezvous.pid, *(node.process.pid for node in job.current.values())]
    assert {address for pid in pids for address in listening(pid)} == {"127.0.0.1"}


@pytest.mark.integration
def test_p11_a_node_with_another_secret_is_told_so(tmp_path: Path) -> None:
    server = RendezvousServer("127.0.0.1", 0, SECRET)
    try:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "reft.job.launch", "--nnodes", "2", "--local-addr", "127.0.0.1"),
                *("--rdzv-endpoint", server.info.endpoint, "--memory-dir", str(tmp_path / "memory")),
                *("--rdzv-id", "other", str(SCRIPTS / "light.py"), "end"),
            ],
            env={**os.environ, "TEST_EVENTS": str(tmp_path), "REFT_SECRET": "ab" * 32},
            capture_output=True,
            check=False,
            text=True,
            timeout=240,
        )
    finally:
        server.close()
    assert done.returncode == 2
    assert "has another secret than this node" in done.stderr
    assert "Traceback" not in done.stderr


@contextlib.contextmanager
def launch(folder: Path, *arguments: str, env: Mapping[str, str]) -> Iterator[list[Any]]:
    """`reft launch` without a rendezvous of its own, one for each of ``arguments``; its processes go with it."""
    (folder / "events").mkdir()
    with contextlib.ExitStack() as stack:
        started = []
        for number, words in enumerate(arguments):
            options = (*words.split(), "--memory-dir", str(folder / f"memory{number}"))
            place = {"cwd": folder, "out": folder / f"out{number}", "options": options}
            given = {"TEST_EVENTS": str(folder / "events"), **env}
            script = (SCRIPTS / "allreduce.py", "100000", "raise@3:1:0")
            started.append(stack.enter_context(launched(*script, **place, env=given)).processes[0])
        yield started


def trains(folder: Path, attempt: int, number: int, launchers: list[Any]) -> bool:
    """Whether so many trainers of an attempt have begun; no launcher has ended."""
    assert [launcher.poll() for launcher in launchers] == [None] * len(launchers)
    written = [path.read_text() for path in (folder / "events").glob("worker-*")]
    return sum(f'"attempt": {attempt}' in text for text in written) >= number


@pytest.mark.process
def test_p11_one_node_needs_no_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`reft launch script.py`, nothing else said: a secret is made, and nothing listens beyond loopback."""
    monkeypatch.delenv("REFT_SECRET")
    options = "--nproc-per-node 2 --job-id alone --max-restarts 1"
    with launch(tmp_path, options, env={"HOME": str(tmp_path)}) as launchers:
        wait_for(lambda: trains(tmp_path, 1, 2, launchers), "two trainers, once more")
        assert listening(launchers[0].pid) == {"127.0.0.1"}
        (tmp_path / "events" / "finish").touch()
        assert launchers[0].wait(240) == 0
        assert (tmp_path / ".reft" / "secret").stat().st_mode & 0o777 == 0o600


@pytest.mark.integration
def test_p11_the_store_that_node_0_serves_asks_for_the_secret_too(tmp_path: Path) -> None:
    """torchrun's --master-addr: two nodes, a restart, and the same closed doors."""
    port = free_port()
    common = f"--nnodes 2 --master-addr 127.0.0.1 --master-port {port} --job-id static --max-restarts 1"
    nodes = [f"{common} --node-rank {n} --node-id n{n} --local-addr 127.0.0.1" for n in range(2)]
    with launch(tmp_path, *nodes, env={"REFT_SECRET": SECRET.hex()}) as launchers:
        wait_for(lambda: trains(tmp_path, 1, 1, launchers), "a restart")
        assert {address for launcher in launchers for address in listening(launcher.pid)} == {"127.0.0.1"}
        with pytest.raises(AuthenticationError):
            KeyValueStore(f"127.0.0.1:{port}", b"x" * 32).check([])
        (tmp_path / "events" / "finish").touch()
        assert [launcher.wait(240) for launcher in launchers] == [0, 0]
