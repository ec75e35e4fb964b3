"""A Slurm of several nodes on this machine: real slurmctld, slurmd and munged, each node a small host of its own.

A node has its own processes, network, host name and /dev/shm (Linux namespaces), as a host of a cluster has; the
file system is shared, as on a cluster. Its death is that of a host: its link goes down first, so that nobody hears
of the end of its processes, then all of them are killed, and its memory is gone. Everything lives under one
process, with whose end the kernel ends all the rest. Nothing is written outside of one directory, no port of this
machine is opened, and no systemd is needed.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType, TracebackType

import psutil

PROGRAMS = (
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scontrol",
    "munged",
    "unshare",
    "nsenter",
    "ip",
)
PACKAGES = "slurmctld slurmd slurm-client munge iproute2 util-linux"
_HEAD = "login"
_NETWORK = "10.77.0"
_WAIT_SECS = 120.0
_END_SECS = 60.0
_POLL_SECS = 0.1
_GPUS = 8
_NOTHING: Mapping[str, str] = MappingProxyType({})
_NAMESPACES = (
    "--net",
    "--mount",
    "--uts",
    "--ipc",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)
_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


@cache
def missing() -> str | None:
    """Why there can be no Slurm here; None if there can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install --no-install-recommends {PACKAGES}"
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no namespaces can be made: {tried.stderr.strip()}" if tried.returncode else None


@dataclass
class Host:
    """A namespace of its own and the process that is its first."""

    name: str  # of the host
    process: subprocess.Popen[bytes]  # that was started here
    pid: int  # the first process of its namespace, as this machine sees it


class SlurmCluster:
    """A running Slurm; use it as a context manager. ``directory``: for its files, logs and spools; its path
    is short (munge's socket lies in it). ``nodes``: number of compute nodes, ``node1`` and so on, each
    with 64 processors and 8 GPUs that are not there. ``config``: further lines for slurm.conf. ``env``:
    set for its daemons and for what is submitted."""

    def __init__(
        self,
        directory: Path,
        nodes: int = 3,
        config: Sequence[str] = (),
        env: Mapping[str, str] = _NOTHING,
    ) -> None:
        self.directory = directory
        self.names = [f"node{i}" for i in range(1, nodes + 1)]
        self._config = config
        self._head: Host | None = None
        self.hosts: dict[str, Host] = {}
        self.env = {"PATH": _PATH, **env, "SLURM_CONF": str(directory / "slurm.conf")}

    def __enter__(self) -> SlurmCluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- start -------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._write_files()
        self._head = self._make_host(_HEAD, None, "umask 022; sleep infinity")
        head = str(self._head.pid)
        self._tell(self._head)
        for words in (
            "ip link set lo up",
            "ip link add br0 type bridge",
            f"ip addr add {_NETWORK}.254/24 dev br0",
            "ip link set br0 up",
        ):
            _call("nsenter", "-t", head, "-n", *words.split())
        _call(
            "nsenter",
            "-t",
            head,
            "-m",
            "mount",
            "--bind",
            str(self.directory / "hosts"),
            "/etc/hosts",
        )
        self._daemon("munged", *self._munged())
        self.wait_until((self.directory / "munge.socket").exists, "munged")
        self._daemon("slurmctld", "slurmctld", "-D", "-c")
        for number, name in enumerate(self.names, 1):
            self._start_node(name, number)
        self.wait_until_whole()

    def _start_node(self, name: str, number: int) -> None:
        head = self._head
        assert head is not None
        log = self.directory / f"slurmd.{name}.out"
        host = self.hosts[name] = self._make_host(
            name, head, f"slurmd -D -N {name} > {log} 2>&1 & wait"
        )
        peer = ("peer", "name", "eth0", "netns", str(host.pid))
        _call(
            "nsenter", "-t", str(head.pid), "-n", "ip", "link", "add", name, "type", "veth", *peer
        )
        for words in (f"ip link set {name} master br0", f"ip link set {name} up"):
            _call("nsenter", "-t", str(head.pid), "-n", *words.split())
        for words in (
            "ip link set lo up",
            f"ip addr add {_NETWORK}.{number}/24 dev eth0",
            "ip link set eth0 up",
        ):
            _call("nsenter", "-t", str(host.pid), "-n", *words.split())
        self._tell(host)

    def wait_until_whole(self) -> None:
        """Until a job that is submitted now gets nodes that answer, whichever it gets."""
        idle = dict.fromkeys(self.names, "IDLE")
        self.wait_until(lambda: self.states() == idle, "all nodes to be idle")
        self.wait_until(self.answers, "all nodes to answer")
        self.wait_until(lambda: self.states() == idle, "all nodes to be idle again")

    def start_again(self, name: str) -> None:
        """Boot a node that was killed."""
        self._start_node(name, self.names.index(name) + 1)

    def _make_host(self, name: str, within: Host | None, command: str) -> Host:
        """A host that has its name, and runs ``command`` once it is told that its network is there."""
        enter = () if within is None else ("nsenter", "-t", str(within.pid), "-a")
        script = (
            f"hostname {name}; mount -t tmpfs tmpfs /dev/shm -o mode=1777; read -r _; {command}"
        )
        process = subprocess.Popen(
            [*enter, "unshare", *_NAMESPACES, "bash", "-c", script],
            stdin=subprocess.PIPE,
            env={**os.environ, **self.env},
            cwd=self.directory,
            start_new_session=True,
        )
        found: list[int] = []

        def first() -> bool:
            found[:] = [
                p.pid
                for p in psutil.Process(process.pid).children(recursive=True)
                if _is_first(p.pid)
            ]
            return bool(found)

        self.wait_until(first, f"the namespaces of {name}")
        return Host(name, process, found[-1])

    @staticmethod
    def _tell(host: Host) -> None:
        assert host.process.stdin is not None
        host.process.stdin.write(b"\n")
        host.process.stdin.flush()

    def _daemon(self, name: str, *command: str) -> None:
        with (self.directory / f"{name}.out").open("ab") as out:
            # Whose end it is waited for by nobody: it ends with its namespace.
            subprocess.Popen(
                [*self.inside(), *command], stdout=out, stderr=out, env=self.environ(), cwd="/"
            )

    def _munged(self) -> list[str]:
        directory = self.directory
        files = (
            "key-file=munge.key",
            "pid-file=munged.pid",
            "seed-file=munge.seed",
            "socket=munge.socket",
        )
        paths = [
            f"--{name}={directory / file}" for name, _, file in (f.partition("=") for f in files)
        ]
        return ["munged", "--foreground", "--force", *paths]

    def _write_files(self) -> None:
        directory = self.directory
        for name in ("state", *(f"spool.{n}" for n in self.names)):
            (directory / name).mkdir(parents=True)
        directory.chmod(0o755)
        key = directory / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        hosts = [f"{_NETWORK}.{i} {name}" for i, name in enumerate(self.names, 1)]
        text = "\n".join(["127.0.0.1 localhost", f"{_NETWORK}.254 {_HEAD}", *hosts, ""])
        (directory / "hosts").write_text(text)
        for number in range(_GPUS):  # Slurm looks whether they are there, and no more
            os.mknod(
                directory / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3)
            )  # /dev/null's
        (directory / "gres.conf").write_text(f"Name=gpu File={directory}/gpu[0-{_GPUS - 1}]\n")
        (directory / "slurm.conf").write_text("\n".join([*self._slurm_conf(), *self._config, ""]))

    def _slurm_conf(self) -> list[str]:
        directory, last = self.directory, len(self.names)
        return [
            "ClusterName=test",
            f"SlurmctldHost={_HEAD}",
            "SlurmUser=root",
            "AuthType=auth/munge",
            # How long a requeued job waits is bound to the life of a credential.
            f"AuthInfo=socket={directory / 'munge.socket'},cred_expire=5",
            "CredType=cred/munge",
            f"StateSaveLocation={directory / 'state'}",
            f"SlurmdSpoolDir={directory}/spool.%n",
            f"SlurmctldPidFile={directory}/slurmctld.pid",
            f"SlurmdPidFile={directory}/slurmd.%n.pid",
            f"SlurmctldLogFile={directory}/slurmctld.log",
            f"SlurmdLogFile={directory}/slurmd.%n.log",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SwitchType=switch/none",
            "MpiDefault=none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "GresTypes=gpu",
            "SlurmdParameters=config_overrides",
            "SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1",
            "SlurmdTimeout=10",
            "SlurmctldTimeout=10",
            "TCPTimeout=2",
            "KillWait=180",
            "JobRequeue=1",
            "ReturnToService=2",
            f"NodeName=node[1-{last}] CPUs=64 Sockets=1 CoresPerSocket=64 ThreadsPerCore=1 Gres=gpu:8 State=UNKNOWN",
            f"PartitionName=batch Nodes=node[1-{last}] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO",
        ]

    # -- use ---------------------------------------------------------------------------------------

    def inside(self, name: str | None = None) -> list[str]:
        """What makes a command run on the login node, or on another."""
        host = self._head if name is None else self.hosts[name]
        assert host is not None
        return ["nsenter", "-t", str(host.pid), "-a"]

    def environ(self) -> dict[str, str]:
        """For its commands: this process's, without what an outer Slurm has set."""
        kept = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("SLURM_", "SBATCH_", "PET_", "REFT_JOB"))
        }
        return {**kept, **self.env}

    def call(
        self, *command: str, node: str | None = None, check: bool = True, cwd: Path | None = None
    ) -> str:
        """Run a command on the login node, or on another; what it prints."""
        done = subprocess.run(
            # nsenter goes to the root of the namespace.
            [*self.inside(node), f"--wd={cwd or self.directory}", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if check else subprocess.PIPE,
            text=True,
            check=False,
            timeout=_WAIT_SECS,
            env=self.environ(),
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
        return done.stdout

    def states(self) -> dict[str, str]:
        """What Slurm says of each node."""
        lines = self.call("sinfo", "--noheader", "-N", "-o", "%N %T", check=False).splitlines()
        return {name: state.upper() for name, state in (line.split() for line in lines)}

    def answers(self) -> bool:
        """Whether every node starts a task now: Slurm says IDLE of one that boots before its slurmd can."""
        words = ("srun", f"--nodes={len(self.names)}", "--immediate=10", "hostname")
        return sorted(self.call(*words, check=False).split()) == self.names

    def job(self, number: str) -> dict[str, str]:
        """What Slurm says of a job."""
        words = self.call("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def kill_node(self, name: str) -> None:
        """The host is lost, without a word to anybody: its link, its processes, its memory."""
        host, head = self.hosts.pop(name), self._head
        assert head is not None
        _call("nsenter", "-t", str(head.pid), "-n", "ip", "link", "delete", name)
        os.kill(host.pid, signal.SIGKILL)
        host.process.wait(_END_SECS)

    def processes(self, name: str) -> list[psutil.Process]:
        """What runs on a node, without its first process, slurmd and what this asks."""
        own = {self.hosts[name].pid}
        wanted = _namespace(self.hosts[name].pid)
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                same = _namespace(process.pid) == wanted and process.pid not in own
                if same and process.status() != psutil.STATUS_ZOMBIE and process.name() != "slurmd":
                    found.append(process)
        return found

    def wait_until(
        self, condition: Callable[[], object], what: str, secs: float = _WAIT_SECS
    ) -> None:
        deadline = time.monotonic() + secs
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited {secs:.0f} s for {what}\n{self.logs()}")
            time.sleep(_POLL_SECS)

    def logs(self) -> str:
        """The ends of the logs."""
        ends = (
            f"--- {p.name}\n{p.read_text(errors='replace')[-1500:]}"
            for p in sorted(self.directory.glob("*.log"))
        )
        return "\n".join(ends)

    # -- end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """End everything; the directory stays."""
        if self._head is None:
            return
        with suppress(ProcessLookupError):
            os.kill(self._head.pid, signal.SIGKILL)
        for host in (self._head, *self.hosts.values()):
            host.process.wait(_END_SECS)
        self._head = None


def _is_first(pid: int) -> bool:
    """Whether a process is the first of a namespace."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return line.split()[-1] == "1" and "bash" in Path(f"/proc/{pid}/comm").read_text()
    return False


def _namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/pid")


def _call(*command: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": _PATH}
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
