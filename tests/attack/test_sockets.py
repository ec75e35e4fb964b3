"""P11: every socket on which a job listens is in docs/security.md, and no stranger who calls there does harm."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import select
import socket
import time
import urllib.request
from base64 import b64encode
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from benchmarks.local_cluster import LocalCluster
from tests.attack.jobs import launched, wait_for
from tests.etcd import EtcdCluster
from tests.job.cluster import SCRIPTS, WatchedCluster, cluster, deepspeed_json
from tests.machine import free_port

ROOT = Path(__file__).parents[2]
ROW = re.compile(
    r"^\| `(?P<name>[a-z-]+)`: [^|]+\| (?P<process>[^|]+) \|[^|]+\| `(?P<guard>\w+)` \|[^|]+\|$"
)
_ACCEPTS = 0x10000  # of a socket in /proc/net/unix that listens
_CHALLENGE_BYTES = 32
DAEMON_SOCKET = "daemon.sock"
CONFIG = {"gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}
STEPS, RANKS = 8, 4
METRICS_PORT = free_port()
CONTROL_DOORS = 2 * RANKS  # One of each rank for training, one for the snapshot worker


@dataclass(frozen=True)
class Listening:
    process: str  # rendezvous, launcher, daemon, trainer or other
    node: int  # of the process; -1: none
    # host and port, or the name of a Unix socket, an abstract one's with an @ first
    address: tuple[str, int] | str

    def call(self) -> socket.socket:
        if isinstance(self.address, str):
            caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            caller.settimeout(WAIT_SECS)
            with short(self.address) as address:
                caller.connect(address)
            return caller
        return socket.create_connection(self.address, timeout=WAIT_SECS)


@contextlib.contextmanager
def short(address: str) -> Iterator[str]:
    """The name of a Unix socket, of which the kernel takes 107 bytes."""
    if address.startswith("@"):
        yield "\0" + address[1:]
        return
    directory = os.open(Path(address).parent, os.O_PATH)
    try:
        yield f"/proc/self/fd/{directory}/{Path(address).name}"
    finally:
        os.close(directory)


def documented() -> dict[str, str]:
    text = (ROOT / "docs" / "security.md").read_text()
    lines = text.split("## Sockets")[1].split("\n## ")[0].splitlines()
    found = {row["name"]: row["guard"] for line in lines if (row := ROW.match(line))}
    assert len(found) == sum(line.startswith("| `") for line in lines), (
        "a row of the table is malformed"
    )
    return found


def unix_listeners() -> dict[str, str]:
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {row[6]: row[7] if len(row) > 7 else "" for row in rows if int(row[3], 16) & _ACCEPTS}


def inodes(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry.path)):
                    yield found[1]


def processes(job: WatchedCluster) -> Iterator[tuple[str, int, psutil.Process]]:
    kinds = {job.rendezvous.pid: ("rendezvous", -1)} if job.rendezvous else {}
    for index, node in job.current.items():
        kinds[node.process.pid] = "launcher", index
        kinds[(job.status(index) or {})["pid"]] = "daemon", index
        kinds |= {trainer.pid: ("trainer", index) for trainer in job.trainers(index)}
    for process in job.survivors():
        yield *kinds.get(process.pid, ("other", -1)), process


def listening(job: WatchedCluster) -> list[Listening]:
    names, found = unix_listeners(), []
    for kind, node, process in processes(job):
        with contextlib.suppress(psutil.NoSuchProcess):
            connections = process.net_connections("inet")
            assert [c for c in connections if c.type == socket.SOCK_DGRAM] == [], (
                f"{kind} has UDP sockets"
            )
            ends = [c.laddr for c in connections if c.status == psutil.CONN_LISTEN]
            found += [Listening(kind, node, (end.ip, end.port)) for end in ends]
            local = [names[inode] for inode in inodes(process.pid) if inode in names]
            # The daemon binds its own by way of a descriptor.
            local = [
                str(job.job_dir(node) / DAEMON_SOCKET) if DAEMON_SOCKET in n else n for n in local
            ]
            found += [Listening(kind, node, name) for name in local]
    return found


def name_of(at: Listening, master_port: int, first_node: int, doors: Collection[Listening]) -> str:
    is_first, local = at.node == first_node, at.address if isinstance(at.address, str) else ""
    if at.process == "launcher" and not local and at.address[1] == master_port:
        assert at.address[0] == "127.0.0.1"
        return "trainers-store" if is_first else "trainers-relay"
    known = {
        "rendezvous": not local and at.process == "rendezvous",
        "metrics": at.process == "daemon" and at.address == ("127.0.0.1", METRICS_PORT),
        "daemon": at.process == "daemon" and local.endswith(f"/{DAEMON_SOCKET}"),
        "trainers-door": at.process == "launcher" and not local and is_first,
        "control-local": at.process == "trainer" and local.startswith("@reft-"),
        "control": at in doors,
        "gloo": at.process == "trainer" and not local,
    }
    return next((name for name, is_it in known.items() if is_it), "")


def speaking_first(sockets: Iterable[Listening], expected: int) -> set[Listening]:
    """Those that send a challenge to who calls: doors do, gloo waits for the caller's word."""
    callers = {at.call(): at for at in sockets}
    found: set[Listening] = set()
    deadline = time.monotonic() + WAIT_SECS
    while len(found) < expected and time.monotonic() < deadline:
        for caller in select.select(list(callers.keys()), [], [], 1.0)[0]:
            if len(caller.recv(_CHALLENGE_BYTES)) == _CHALLENGE_BYTES:
                found.add(callers[caller])
            del callers[caller]
            caller.close()
    for caller in callers:
        caller.close()
    return found


def attack(at: Listening, guard: str, junk: Iterable[bytes]) -> None:
    for data in junk:
        with at.call() as stranger:
            with contextlib.suppress(OSError):
                stranger.sendall(data)
            if guard == "secret":
                got = read_all(stranger)
                assert len(got) <= MOST_TOLD, f"{at} has told {len(got)} bytes"


def run(tmp_path: Path, config: str, attacked: bool) -> dict[str, list[str]]:
    options = ("--nproc-per-node", "2", "--rank-order", "across-nodes")
    with cluster(
        tmp_path, "stages.py", config, nodes=2, procs_per_node=2, options=options[2:]
    ) as job:
        files = [job.events_dir / f"losses-{rank}" for rank in range(RANKS)]
        made = lambda f: f.exists() and len(f.read_text().splitlines()) == 4  # noqa: E731
        job.wait_until(lambda: all(map(made, files)), 240, "four steps")
        silent = strangers_call(job, tmp_path / "bombed") if attacked else []
        (job.events_dir / "go").touch()
        assert job.wait(240) == {0: 0, 1: 0}, job.log(0)[-3000:]
        for caller in silent:
            assert len(read_all(caller)) <= MOST_TOLD
            caller.close()
        assert not (tmp_path / "bombed").exists()
        return {file.name: file.read_text().splitlines() for file in files}


def metrics() -> bytes:
    with urllib.request.urlopen(
        f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=WAIT_SECS
    ) as page:
        return bytes(page.read())


def strangers_call(job: WatchedCluster, traces: Path) -> list[socket.socket]:
    master_port = {i: int(job.trainers(i)[0].environ()["MASTER_PORT"]) for i in job.current}
    first = next(i for i in job.current for t in job.trainers(i) if t.environ()["RANK"] == "0")
    table, seen, silent = documented(), {}, []
    # Both nodes are on one host here: the second one's daemon finds the port taken. Both are there then.
    job.wait_until(
        lambda: any("no metrics at" in job.log(i) for i in job.current), 240, "both daemons"
    )
    sockets = listening(job)
    trainers = (at for at in sockets if at.process == "trainer" and not isinstance(at.address, str))
    doors = speaking_first(trainers, CONTROL_DOORS)
    for at in sockets:
        name = name_of(at, master_port.get(at.node, 0), first, doors)
        assert name in table, f"{at} is not in the table of docs/security.md"
        seen.setdefault(name, []).append(at)
    # The launchers serve or relay no store here: `reft rendezvous` does.
    assert seen.keys() == table.keys() - {"launcher-store", "etcd-relay"}
    assert {len(seen[name]) for name in ("trainers-store", "trainers-door", "trainers-relay")} == {
        1
    }
    assert [len(seen[name]) for name in ("daemon", "control")] == [2, CONTROL_DOORS]
    bomb = pickle.dumps(Bomb(traces))
    junk = [b"GET / HTTP/1.0\r\n\r\n" + b"x" * 100, b"\xff" * 4096, bomb * 8, bytes(64)]
    for name, those in seen.items():
        for at in those:
            silent.append(at.call())
            attack(at, table[name], junk)
    # Who is silent there holds up the next one for a while, no longer.
    job.wait_until(
        lambda: b'reft_tolerance_left_nodes{job="local"' in metrics(), 240, "the job's metrics"
    )
    logs = [job.log(index) for index in job.current]
    assert sorted(log.count("no metrics at") for log in logs) == [0, 1]
    return silent


@pytest.mark.integration
def test_p11_every_socket_is_listed_and_no_stranger_harms_the_job(tmp_path: Path) -> None:
    block = {"enabled": True, "metrics": {"port": METRICS_PORT}}
    config = deepspeed_json(tmp_path, reft=block, **CONFIG)
    (tmp_path / "attacked").mkdir()
    attacked = run(tmp_path / "attacked", config, attacked=True)
    assert {len(losses) for losses in attacked.values()} == {STEPS}
    (tmp_path / "quiet").mkdir()
    config = deepspeed_json(tmp_path, **CONFIG)
    assert run(tmp_path / "quiet", config, attacked=False) == attacked


@pytest.mark.nightly
@pytest.mark.parametrize("own", ["launcher-store", "etcd-relay"])
def test_p11_what_launchers_listen_on_without_a_rendezvous_of_its_own_is_listed_too(
    tmp_path: Path, own: str
) -> None:
    with contextlib.ExitStack() as stack:
        if own == "etcd-relay":
            etcd = stack.enter_context(EtcdCluster(tmp_path / "etcd"))
            where: dict[str, Any] = {"etcd": etcd.endpoint}
        else:
            where = {"external_rendezvous": False}
        job = stack.enter_context(
            cluster(tmp_path / "job", "light.py", "wait", "plain", nodes=2, **where)
        )
        job.wait_until(lambda: len(job.events("ready")) == 2, 240, "two trainers")
        job.wait_until(
            lambda: all("pid" in (job.status(i) or {}) for i in range(2)), 240, "two daemons"
        )
        environ = {i: job.trainers(i)[0].environ() for i in job.current}
        first = next(i for i, e in environ.items() if e["RANK"] == "0")
        table, seen = documented(), {}
        for at in (at for at in listening(job) if at.process == "launcher"):
            e = environ[at.node]
            if "{}:{}".format(*at.address) == e["REFT_STORE"]:
                name = own
            else:
                name = name_of(at, int(e["MASTER_PORT"]), first, ())
            assert name in table, f"{at} is not in the table of docs/security.md"
            seen.setdefault(name, []).append(at)
        assert seen.keys() == {own, "trainers-store", "trainers-door", "trainers-relay"}
        for at in seen[own] + seen["trainers-door"]:
            assert table[own] == "secret"
            attack(
                at,
                "secret",
                [
                    b"GET / HTTP/1.0\r\n\r\n",
                    b"\xff" * 4096,
                    pickle.dumps(Bomb(tmp_path / "bombed")),
                ],
            )
        assert not (tmp_path / "bombed").exists()
        assert len(job.events("start")) == 2
        assert all(node.process.poll() is None for node in job.current.values())


WAIT_SECS = 60.0
MOST_TOLD = 64  # bytes: a challenge and the proof for the caller's


def read_all(caller: socket.socket) -> bytes:
    caller.settimeout(WAIT_SECS)
    got = b""
    with contextlib.suppress(OSError):
        while data := caller.recv(1 << 16):
            got += data
    return got


def listening_addresses(pid: int) -> set[str]:
    return {
        c.laddr.ip
        for c in psutil.Process(pid).net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    }


class Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self._path}",)


def throw(port: int, run_id: str, bomb: bytes) -> None:
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
        used = secret or (home / ".reft" / "secret").read_text().strip()
        if given:
            assert not (home / ".reft").exists()
        else:
            assert (home / ".reft" / "secret").stat().st_mode & 0o777 == 0o600
        said = [path for kind in ("*.log", "*.jsonl") for path in tmp_path.rglob(kind)]
        assert said
        assert not any(used in path.read_text(errors="replace") for path in said)
        assert not any(used in " ".join(process.cmdline()) for process in job.survivors())
        assert_doors_are_on_loopback(job)
        environ = job.trainers(1)[0].environ()
        assert environ["MASTER_ADDR"] == "127.0.0.1"
        assert port != int(environ["MASTER_PORT"])
        job.finish()
        assert job.wait(240) == {0: 0, 1: 0}
        assert not traces.exists()


def assert_doors_are_on_loopback(job: WatchedCluster) -> None:
    """The launchers and the rendezvous listen on the address asked for; --local-addr is loopback here.
    What gloo opens between trainers is not ours (docs/security.md)."""
    pids = [job.rendezvous.pid, *(node.process.pid for node in job.current.values())]
    assert {address for pid in pids for address in listening_addresses(pid)} == {"127.0.0.1"}


@pytest.mark.integration
def test_p11_a_node_with_another_secret_is_told_so(tmp_path: Path) -> None:
    made = LocalCluster([str(SCRIPTS / "light.py"), "end"], tmp_path, nodes=1)
    with made:
        made.start_rendezvous()
        made.env = {"REFT_SECRET": "ab" * 32}
        made.start_node(0)
        assert made.wait(240) == {0: 2}
    assert "has another secret than this node" in made.log(0)
    assert "Traceback" not in made.log(0)


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
    said = "\n".join(path.read_text()[-4000:] for path in folder.glob("out*") if path.is_file())
    assert [launcher.poll() for launcher in launchers] == [None] * len(launchers), said
    written = [path.read_text() for path in (folder / "events").glob("worker-*")]
    return sum(f'"attempt": {attempt}' in text for text in written) >= number


@pytest.mark.process
def test_p11_one_node_needs_no_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`reft launch script.py`, nothing else said: a secret is made, and nothing listens beyond loopback."""
    monkeypatch.delenv("REFT_SECRET")
    options = "--nproc-per-node 2 --job-id alone --max-restarts 1"
    with launch(tmp_path, options, env={"HOME": str(tmp_path)}) as launchers:
        wait_for(lambda: trains(tmp_path, 1, 2, launchers), "two trainers, once more")
        assert listening_addresses(launchers[0].pid) == {"127.0.0.1"}
        (tmp_path / "events" / "finish").touch()
        assert launchers[0].wait(240) == 0
        assert (tmp_path / ".reft" / "secret").stat().st_mode & 0o777 == 0o600


@pytest.mark.integration
def test_p11_the_store_that_node_0_serves_asks_for_the_secret_too(tmp_path: Path) -> None:
    port = free_port()
    common = (
        f"--nnodes 2 --master-addr 127.0.0.1 --master-port {port} --job-id static --max-restarts 1"
    )
    nodes = [f"{common} --node-rank {n} --node-id n{n} --local-addr 127.0.0.1" for n in range(2)]
    with launch(tmp_path, *nodes, env={"REFT_SECRET": "5e" * 32}) as launchers:
        wait_for(lambda: trains(tmp_path, 1, 1, launchers), "a restart")
        assert {
            address for launcher in launchers for address in listening_addresses(launcher.pid)
        } == {"127.0.0.1"}
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + b"x" * 100)
            assert len(read_all(stranger)) <= MOST_TOLD
        (tmp_path / "events" / "finish").touch()
        assert [launcher.wait(240) for launcher in launchers] == [0, 0]
