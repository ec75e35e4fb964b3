"""P11: whoever does not know the secret gets nothing, and nothing that it sends is run."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
from base64 import b64encode
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from benchmarks.local_cluster import LocalCluster
from tests.attack.jobs import launched, wait_for
from tests.job.cluster import SCRIPTS, WatchedCluster, cluster
from tests.machine import free_port

WAIT_SECS = 60.0
MOST_TOLD = 64  # bytes: a challenge and the proof for the caller's


def read_all(caller: socket.socket) -> bytes:
    caller.settimeout(WAIT_SECS)
    got = b""
    with contextlib.suppress(OSError):
        while data := caller.recv(1 << 16):
            got += data
    return got


def listening(pid: int) -> set[str]:
    return {c.laddr.ip for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN}


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
    assert {address for pid in pids for address in listening(pid)} == {"127.0.0.1"}


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
        assert listening(launchers[0].pid) == {"127.0.0.1"}
        (tmp_path / "events" / "finish").touch()
        assert launchers[0].wait(240) == 0
        assert (tmp_path / ".reft" / "secret").stat().st_mode & 0o777 == 0o600


@pytest.mark.integration
def test_p11_the_store_that_node_0_serves_asks_for_the_secret_too(tmp_path: Path) -> None:
    port = free_port()
    common = f"--nnodes 2 --master-addr 127.0.0.1 --master-port {port} --job-id static --max-restarts 1"
    nodes = [f"{common} --node-rank {n} --node-id n{n} --local-addr 127.0.0.1" for n in range(2)]
    with launch(tmp_path, *nodes, env={"REFT_SECRET": "5e" * 32}) as launchers:
        wait_for(lambda: trains(tmp_path, 1, 1, launchers), "a restart")
        assert {address for launcher in launchers for address in listening(launcher.pid)} == {"127.0.0.1"}
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + b"x" * 100)
            assert len(read_all(stranger)) <= MOST_TOLD
        (tmp_path / "events" / "finish").touch()
        assert [launcher.wait(240) for launcher in launchers] == [0, 0]
