"""Nodes in network namespaces of their own, behind one switch, and cuts between them.

The namespaces belong to processes, and go with them. The rendezvous has the switch's address. A cut is
silent, as a failed switch is: packets of one direction are sent to a hardware address that nobody has.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from benchmarks.local_cluster import LocalCluster, LocalNode, node_id

STORE = "store"
_NETWORK = "10.213.7"
_NOBODY = "02:00:00:00:00:99"
_STORE_NUMBER = 254


@cache
def why_not() -> str:
    if any(shutil.which(program) is None for program in ("ip", "unshare", "nsenter")):
        return "needs ip, unshare and nsenter (Debian: iproute2, util-linux)"
    tried = subprocess.run(
        [
            "unshare",
            "-n",
            "sh",
            "-c",
            "ip link add br0 type bridge && ip link add name v0 type veth peer name v1",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    return (
        f"network namespaces are not permitted here: {tried.stderr.strip()}"
        if tried.returncode
        else ""
    )


needs_namespaces = pytest.mark.skipif(bool(why_not()), reason=why_not() or "they are there")


class Network:
    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._numbers: dict[str, int] = {}

    def __enter__(self) -> Network:
        self._make(STORE, _STORE_NUMBER)
        self._ip(STORE, "link add br0 type bridge")
        self._ip(STORE, f"addr add {self.address(STORE)}/24 dev br0")
        self._ip(STORE, "link set br0 up")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()

    def plug_in(self, name: str) -> None:
        self._make(name, len(self._numbers))
        port = f"v{self._numbers[name]}"
        self._ip(
            STORE,
            f"link add name {port} type veth peer name eth0 netns {self._processes[name].pid}",
        )
        self._ip(STORE, f"link set {port} master br0 up")
        self._ip(name, f"addr add {self.address(name)}/24 dev eth0")
        self._ip(name, "link set eth0 up")

    def unplug(self, name: str) -> None:
        """Remove a link, silently as a failed switch does, and the namespace as soon as no process uses it."""
        process = self._processes.pop(name, None)
        if process is not None:
            self._ip(STORE, f"link del v{self._numbers[name]}")
            process.kill()
            process.wait()

    def address(self, name: str) -> str:
        return f"{_NETWORK}.{self._numbers[name]}"

    def enter(self, name: str) -> list[str]:
        return ["nsenter", "-t", str(self._processes[name].pid), "-n"]

    def cut(
        self, sources: Iterable[str], targets: Iterable[str], *, both_ways: bool = True
    ) -> None:
        sources, targets = list(sources), list(targets)
        for source in sources:
            for target in targets:
                wrong = f"{self.address(target)} lladdr {_NOBODY} nud permanent {self._dev(source)}"
                self._ip(source, f"neigh replace {wrong}")
        if both_ways:
            self.cut(targets, sources, both_ways=False)

    def heal(self) -> None:
        for name in self._numbers:
            self._ip(name, f"neigh flush {self._dev(name)} nud permanent")

    def _dev(self, name: str) -> str:
        return "dev br0" if name == STORE else "dev eth0"

    def _make(self, name: str, number: int) -> None:
        process = subprocess.Popen(
            ["unshare", "-n", "sh", "-c", "ip link set lo up && echo made && exec sleep infinity"],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout.readline() == b"made\n", f"no namespace for {name}"
        process.stdout.close()
        self._processes[name] = process
        self._numbers[name] = number

    def _ip(self, name: str, words: str) -> None:
        command = [*self.enter(name), "ip", *words.split()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


class NetCluster(LocalCluster):
    def __enter__(self) -> NetCluster:
        self.network = Network().__enter__()
        super().__enter__()
        return self

    def close(self) -> None:
        super().close()
        self.network.__exit__()

    def start_rendezvous(self, port: int = 0) -> None:
        self._enter(STORE)
        super().start_rendezvous(port)

    def start_node(self, index: int) -> LocalNode:
        name = node_id(index, sum(n.index == index for n in self.history))
        self.network.plug_in(name)
        self._enter(name)
        return super().start_node(index)

    def _enter(self, name: str) -> None:
        enter = self.network.enter(name)
        self.popen = lambda command, **options: subprocess.Popen([*enter, *command], **options)  # type: ignore

    def _rendezvous_arguments(self, port: int) -> list[str]:
        mine = super()._rendezvous_arguments(port)
        mine[mine.index("--host") + 1] = self.network.address(STORE)
        return mine

    def _arguments(self, name: str, memory_dir: Path) -> list[str]:
        mine = super()._arguments(name, memory_dir)
        mine[mine.index("--local-addr") + 1] = self.network.address(name)
        return mine

    def _environment(self, name: str) -> dict[str, str]:
        return {
            **super()._environment(name),
            "GLOO_SOCKET_IFNAME": "br0" if name == "rendezvous" else "eth0",
        }
