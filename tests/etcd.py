"""A real etcd cluster on loopback, whose members are killed, stopped and started again.

``make etcd`` unpacks Debian's packages into .venv/etcd, without root; ``ETCD_BIN`` names another directory that has
``etcd`` and ``etcdctl``. Tests are skipped where there is neither, nor one on PATH.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.machine import free_port

WAIT_SECS = 120.0
_LOOK_SECS = 0.05


def find() -> Path | None:
    """The directory with etcd and etcdctl."""
    on_path = shutil.which("etcd")
    places = [
        Path(os.environ["ETCD_BIN"]) if "ETCD_BIN" in os.environ else None,
        Path(sys.prefix) / "etcd" / "usr" / "bin",
        Path(on_path).parent if on_path else None,
    ]
    return next(
        (p for p in places if p and (p / "etcd").exists() and (p / "etcdctl").exists()), None
    )


def require() -> Path:
    """The same; a test that needs it is skipped where it is not."""
    found = find()
    if found is None:
        pytest.skip(
            "no etcd: make etcd unpacks it into .venv (or apt-get install etcd-server etcd-client, or ETCD_BIN=DIR)"
        )
    if importlib.util.find_spec("etcd3") is None:
        pytest.skip("no python3-etcd3: pip install -e '.[etcd]'")
    return found


class EtcdCluster:
    """Members on loopback, by number. Use it as a context manager. ``directory``: for data and logs.
    ``size``: number of members. ``options``: further options of every etcd. ``scheme``: ``https`` where
    ``options`` set up TLS."""

    def __init__(
        self, directory: Path, size: int = 3, options: Sequence[str] = (), scheme: str = "http"
    ) -> None:
        self._bin = require()
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._options = list(options)
        self._scheme = scheme
        self._clients = [free_port() for _ in range(size)]
        self._peers = [free_port() for _ in range(size)]
        self._members: dict[int, subprocess.Popen[bytes]] = {}
        self.flags: list[str] = []  # of etcdctl: certificates, user

    def __enter__(self) -> EtcdCluster:
        for index in range(len(self._clients)):
            self.start(index)
        self.wait_for_leader()
        return self

    def __exit__(self, *_: object) -> None:
        for index in list(self._members):
            self.kill(index)

    @property
    def members(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self._clients]

    @property
    def endpoint(self) -> str:
        """For ``--rdzv-endpoint``."""
        return ",".join(self.members)

    def start(self, index: int) -> None:
        """Start a member, with the data that it had."""
        peers = ",".join(f"m{i}=http://127.0.0.1:{port}" for i, port in enumerate(self._peers))
        client = f"{self._scheme}://127.0.0.1:{self._clients[index]}"
        peer = f"http://127.0.0.1:{self._peers[index]}"
        with (self._directory / f"m{index}.log").open("ab") as log:
            self._members[index] = subprocess.Popen(
                [
                    *(
                        self._bin / "etcd",
                        "--name",
                        f"m{index}",
                        "--data-dir",
                        self._directory / f"m{index}",
                    ),
                    *("--listen-client-urls", client, "--advertise-client-urls", client),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", peers, *self._options),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, index: int) -> None:
        process = self._members.pop(index)
        process.kill()
        process.wait()

    def stop(self, index: int) -> None:
        """It stands still."""
        self._members[index].send_signal(signal.SIGSTOP)

    def resume(self, index: int) -> None:
        self._members[index].send_signal(signal.SIGCONT)

    def leader(self) -> int | None:
        """Number of the leader, as those members see it that answer."""
        for endpoint in self.members:
            done = self.ctl("endpoint", "status", "-w", "json", endpoints=[endpoint], check=False)
            if done.returncode == 0 and (status := json.loads(done.stdout)[0]["Status"])["leader"]:
                found = self._number_of(int(status["leader"]))
                if found is not None:
                    return found
        return None

    def wait_for_leader(self, but: int | None = None) -> int:
        """Wait until the cluster takes writes; its leader, which is not ``but``."""
        deadline = time.monotonic() + WAIT_SECS
        while time.monotonic() < deadline:
            found = self.leader()
            if (
                found is not None
                and found != but
                and self.ctl("get", "reft/", check=False).returncode == 0
            ):
                return found
            time.sleep(_LOOK_SECS)
        raise AssertionError(f"the etcd cluster has no leader: {self._directory}")

    def ctl(
        self,
        *command: str,
        endpoints: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """``etcdctl COMMAND``."""
        where = ",".join(f"{self._scheme}://{e}" for e in endpoints or self.members)
        done = subprocess.run(
            [
                self._bin / "etcdctl",
                "--endpoints",
                where,
                "--command-timeout=5s",
                *self.flags,
                *command,
            ],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "ETCDCTL_API": "3", **(env or {})},
            timeout=WAIT_SECS,
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    def revoke_all_leases(self) -> int:
        """Every lease of every client ends, and its keys with it; how many."""
        leases = self._leases()
        for lease in leases:
            while lease in self._leases():
                self.ctl("lease", "revoke", lease, check=False)
        return len(leases)

    def _leases(self) -> list[str]:
        lines = self.ctl("lease", "list").stdout.splitlines()
        return [line.strip() for line in lines if line and not line.startswith("found")]

    def contents(self) -> dict[str, dict[str, Any]]:
        """What etcdctl sees under reft/: mod_revision, lease and value (base64) by key."""
        import base64

        found = json.loads(self.ctl("get", "--prefix", "reft/", "-w", "json").stdout)
        return {base64.b64decode(kv["key"]).decode(): kv for kv in found.get("kvs", [])}

    def _number_of(self, member_id: int) -> int | None:
        done = self.ctl("member", "list", "-w", "json", check=False)
        if done.returncode:
            return None
        names = {int(m["ID"]): m["name"] for m in json.loads(done.stdout)["members"]}
        name = names.get(member_id, "")
        return int(name[1:]) if name[1:].isdigit() else None
