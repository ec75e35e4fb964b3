"""``reft mpi-run``: a training process of an MPI job, as mpiexec, srun or jsrun starts one per
rank.

    mpiexec -n 16 reft mpi-run train.py ARGUMENTS

There is no launcher and no rendezvous: ranks, nodes and torch's environment come from MPI. Where an
MPI job dies with its first process, the batch script starts the next step on the nodes that are
left and the spares; memory and daemons have stayed on the nodes, and the new step goes on from
there.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgpack
import psutil

from reft.authentication import mac
from reft.config import parse_block
from reft.control.transport import Transport, listen_remotely
from reft.control.wire import format_endpoint
from reft.env import ENV_JOB_ID, ENV_MEMORY_DIR, ENV_NODE_ID, ENV_SECRET
from reft.errors import AuthenticationError, ConfigError, ReftError, TransferError
from reft.job import script
from reft.job.node_memory import NodeMemory
from reft.job.options import default_node_id
from reft.job.trainer_store import TrainerStore, trainer_environ
from reft.log import set_place, to_stderr
from reft.memory.job_secret import user_secret
from reft.memory.jobdir import JobDir
from reft.naming import is_name, kernel_id, own_name
from reft.node.client import request
from reft.refusal import Parser
from reft_mpi.mpi import load_mpi, mpi_carrier

logger = logging.getLogger("reft.reft_mpi.mpi_run")

DAEMON_LOG = "daemon.log"
OMPI_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
"""DeepSpeed refuses to start where it is not LOCAL_RANK, as where one host has several nodes of a
job."""
_SAME_SECRET = b"reft-mpi-secret"
_WRONG_USE = 2
_PING_SECS = 5.0
_DAEMON_END_SECS = 30.0
_FORK_SECS = 30.0
_LAST_WORDS_SECS = 1.0
_START_SECS = 600.0
_END_SECS = 300.0
_LINGER_SECS = 3600.0


class ProcessLocation(NamedTuple):
    """What one process says of itself; ``secret`` proves which one it has, without saying it."""

    node: str
    kernel: str
    pid: int
    secret: bytes
    job_id: str


@dataclass(frozen=True)
class NodeRanks:
    """Where one process is among the others; of its node the first rank leads, and the order of all
    nodes' leaders numbers the nodes. Pure."""

    rank: int
    size: int
    local: tuple[int, ...]
    leaders: tuple[int, ...]

    @classmethod
    def among(cls, rank: int, nodes: Sequence[str]) -> NodeRanks:
        local = tuple(r for r, node in enumerate(nodes) if node == nodes[rank])
        leaders = tuple(r for r, node in enumerate(nodes) if node not in nodes[:r])
        return cls(rank, len(nodes), local, leaders)

    @property
    def leads(self) -> bool:
        return self.local[0] == self.rank

    def environ(self, port: int) -> dict[str, str]:
        local, group = self.local.index(self.rank), self.leaders.index(self.local[0])
        ours, node = (local, len(self.local)), (group, len(self.leaders))
        return {
            **trainer_environ((self.rank, self.size), ours, node, port),
            "NODE_RANK": str(group),
        }


def check_together(told: Sequence[ProcessLocation]) -> None:
    """Raises AuthenticationError: the processes have different secrets; ConfigError: they name the
    job differently, or two hosts alike. Pure."""
    if len({each.secret for each in told}) > 1:
        raise AuthenticationError(
            "the processes of this MPI job have different secrets: share ~/.reft/secret between "
            "the nodes, "
            f"or set {ENV_SECRET} to the same on all"
        )
    if len(names := {each.job_id for each in told}) > 1:
        raise ConfigError(
            f"the processes of this MPI job give it different names: {', '.join(sorted(names))}. "
            "Give all "
            f"the same --job-id NAME"
        )
    hosts: dict[str, str] = {}
    for each in told:
        if hosts.setdefault(each.node, each.kernel) != each.kernel:
            raise ConfigError(
                f"two hosts call themselves node {each.node}; leave --node-id out, or give each "
                "its own"
            )


class StartStep:
    """This process's part in a step. Raises ReftError, OSError: something does not fit, here or in
    another process."""

    def __init__(self, options: argparse.Namespace, transport: Transport, rank: int) -> None:
        self._options = options
        self._transport = transport
        self._secret = user_secret()
        memory_dir = Path(options.memory_dir).absolute()
        self._node = options.node_id or default_node_id(memory_dir)
        self.job_id: str = options.job_id or own_name(
            options.script, options.arguments, module=options.module
        )
        if not is_name(self.job_id):
            raise ConfigError(
                f"job id is {self.job_id!r}; expected 1 to 128 letters, digits, dots, dashes or "
                "underscores, "
                f"no dot first: give --job-id"
            )
        mine = ProcessLocation(
            self._node, kernel_id(), os.getpid(), mac(b"", self._secret, _SAME_SECRET), self.job_id
        )
        told = [
            ProcessLocation(*msgpack.unpackb(data))
            for data in transport.gather(bytes(msgpack.packb(mine)))
        ]
        check_together(told)
        self.place = NodeRanks.among(rank, [each.node for each in told])
        self._leader_pid = told[self.place.local[0]].pid
        self._memory = NodeMemory(memory_dir, self.job_id, self._node)
        self._store: TrainerStore | None = None

    def prepare(self) -> None:
        """Hold the node's memory, start its daemon, and say where torch's store is. Collective."""
        self._all_or_none(self._hold)
        endpoint = self._all_or_none(self._serve)[0].decode()

        def relay() -> bytes:
            if self.place.leads and self.place.rank:
                self._store = TrainerStore.relay(endpoint, self._secret)
            return b""

        self._all_or_none(relay)
        ports = self._transport.gather(str(self._store.port if self._store else 0).encode())
        environ = self.place.environ(int(ports[self.place.local[0]]))
        if OMPI_LOCAL_RANK in os.environ:
            environ[OMPI_LOCAL_RANK] = environ["LOCAL_RANK"]
        # The leader holds the memory for this node's trainers.
        declared = bool(self._options.node_id)
        os.environ.update(
            environ | self._memory.environ(self._secret, self._leader_pid, declared=declared)
        )

    def _all_or_none(self, act: Callable[[], bytes]) -> list[bytes]:
        """Run ``act`` in all processes; what it returned in each. Where it fails in one, all
        raise."""
        own: Exception | None = None
        result = b""
        try:
            result = act()
        except (ReftError, OSError) as error:
            own = error
        said = self._transport.gather(bytes(msgpack.packb([own is None, str(own or ""), result])))
        if own is not None:
            raise own
        told = [msgpack.unpackb(data) for data in said]
        if failed := [
            f"rank {rank}: {why}" for rank, (well, why, _) in enumerate(told) if not well
        ]:
            raise TransferError(f"the step cannot start: {failed[0]}")
        return [body for _, _, body in told]

    def _hold(self) -> bytes:
        if self.place.leads:
            job_dir = self._memory.prepare(self._secret)
            if not self._options.no_daemon:
                keep_daemon(job_dir, self._options.linger_secs)
        return b""

    def _serve(self) -> bytes:
        if self.place.rank:
            return b""
        self._store = TrainerStore.serve()
        if len(self.place.leaders) == 1:
            return b""
        listener = listen_remotely()
        host = str(listener.getsockname()[0])
        return format_endpoint(host, self._store.let_relays_in(listener, self._secret)).encode()

    def end(self, code: int) -> int:
        """Meet the others at the end; where all ended well, the memory goes. Returns the first exit
        code that is not 0. Raises TransferError: not all came in the time that was allowed."""
        self._transport.limits.timeout_secs = self._options.end_secs
        codes = [int(data) for data in self._transport.gather(str(code).encode())]
        worst = next((each for each in codes if each), 0)
        if self.place.leads and not worst and not self._options.keep_memory:
            job_dir = self._memory.job_dir
            if job_dir is not None and not self._options.no_daemon:
                end_daemon(job_dir)
            self._memory.remove()
        elif self.place.leads and worst:
            self._memory.discard_unused()
        self._transport.gather(b"")
        if self._store is not None:
            self._store.close()
        return worst


def keep_daemon(job_dir: JobDir, linger_secs: float) -> None:
    """Have a daemon on this node that outlives the step: the one that is there, else a new one.

    It has a session and streams of its own, and a parent that has ended, so that neither the end of
    the step ends it (Slurm's ``proctrack/linuxproc`` kills descendants) nor mpiexec waits for
    it."""
    try:
        request(job_dir.path, job_dir.secret, "ping", timeout_secs=_PING_SECS)
        return
    except (OSError, EOFError, ReftError):
        pass
    linger = ["--linger-secs", str(linger_secs)]
    command = [sys.executable, "-P", "-m", "reft.node.daemon", str(job_dir.path), *linger]
    # Without what names this rank to MPI: the daemon is none.
    environ = {
        k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_", "PRTE_", "MPIR_"))
    }
    with open(job_dir.path / DAEMON_LOG, "ab") as output:
        try:
            subprocess.run(
                ["/bin/sh", "-c", '"$@" &', "sh", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=environ,
                timeout=_FORK_SECS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning(
                "the node daemon cannot be started: %s; training goes on without it", error
            )


def end_daemon(job_dir: JobDir) -> None:
    """End the node's daemon, and wait until it has: it would take a directory that is being removed
    for one that somebody else has made again."""
    with suppress(OSError, EOFError, ReftError, psutil.Error):
        pid = int(request(job_dir.path, job_dir.secret, "ping", timeout_secs=_PING_SECS))
        request(job_dir.path, job_dir.secret, "shutdown", timeout_secs=_PING_SECS)
        psutil.Process(pid).wait(_DAEMON_END_SECS)


def main(argv: Sequence[str]) -> int:
    """Command line of ``reft mpi-run``: the script as one process of this step; returns the exit
    code: 0, the script's, 2 for wrong use. A process that fails ends the whole MPI job and does not
    return: the others would wait for it."""
    options = make_parser().parse_args(list(argv))
    set_place("", "mpi-run")
    to_stderr()
    try:
        mpi = load_mpi()
    except ConfigError as error:
        logger.error("%s", error)
        return _WRONG_USE
    world = mpi.COMM_WORLD
    try:
        connect = mpi_carrier(world.rank, world.size, "", options.start_secs)
        transport = connect(options.start_secs, lambda: True, lambda missing, secs: None)
        step = StartStep(options, transport, world.rank)
        set_place(step.job_id, f"rank {world.rank}")
        step.prepare()
    except (ReftError, OSError) as error:
        logger.error("%s", error)
        _abort(world, _WRONG_USE if isinstance(error, ConfigError | AuthenticationError) else 1)
    deliberate, code = _run_script(options)
    if code and not deliberate:
        _abort(world, code)
    if mpi.Is_finalized():
        logger.warning(
            "the script has called MPI.Finalize(), so the processes cannot synchronise at the "
            "end, and the "
            "job's memory stays. Remove that call"
        )
        return code
    # The version of the last step is taken while sessions close: later, it would make the memory
    # again.
    if (hook := sys.modules.get("reft.engine.deepspeed")) is not None:
        hook.close_sessions()
    try:
        return step.end(code)
    except TransferError as error:
        logger.error(
            "this process has ended with exit code %d, but not all others have: %s", code, error
        )
        _abort(world, code or 1)


def _run_script(options: argparse.Namespace) -> tuple[bool, int]:
    """Whether the script ended by itself, and its exit code."""
    words = [*(["-m"] if options.module else []), options.script, *options.arguments]
    if not sys.flags.safe_path:
        del sys.path[0]  # this command's; the script gets its own
    try:
        code = script.run(words)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return True, stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return code == 0, code


def _abort(world: Any, code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    # MPICH's mpiexec drops what it has not read yet, the traceback with it.
    time.sleep(_LAST_WORDS_SECS)
    world.Abort(code)
    # It does not return; where a library lets it, this process ends all the same.
    os._exit(code)


def make_parser() -> Parser:
    parser = Parser(
        prog="reft mpi-run",
        words="SCRIPT [ARGUMENTS]...",
        allow_abbrev=False,
        description="Run a training script as one process of an MPI job: mpiexec -n 16 reft "
        "mpi-run "
        "train.py. Ranks, nodes and torch's environment come from MPI. When a process dies, "
        "MPI ends the job; its memory and a daemon stay on every node, and the next mpiexec "
        "with the same script continues from there.",
    )
    parser.add_argument(
        "--memory-dir",
        default=os.environ.get(ENV_MEMORY_DIR) or str(parse_block({}).memory_dir),
        help=f"tmpfs directory for snapshots on this node ({ENV_MEMORY_DIR}; default: %(default)s)",
    )
    parser.add_argument(
        "--node-id",
        default=os.environ.get(ENV_NODE_ID),
        help="name of this node, which declares it to be a failure domain (default: host name and "
        "memory "
        "directory)",
    )
    parser.add_argument(
        "--job-id",
        default=os.environ.get(ENV_JOB_ID),
        help=f"name of the job's memory ({ENV_JOB_ID}; default: made from user, directory, "
        "program and "
        "arguments). The next step finds this step's memory by that name.",
    )
    parser.add_argument("--no-daemon", action="store_true", help="start no node daemon")
    parser.add_argument(
        "--keep-memory", action="store_true", help="keep the memory also when the job ends well"
    )
    for option, secs, says in (
        ("--start-secs", _START_SECS, "seconds to wait for all processes at the start"),
        ("--end-secs", _END_SECS, "seconds to wait for all processes after the first has ended"),
        ("--linger-secs", _LINGER_SECS, "seconds that a node's daemon waits for the next step"),
    ):
        parser.add_argument(option, type=float, default=secs, help=f"{says} (default: %(default)s)")
    parser.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m"
    )
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="its arguments"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
