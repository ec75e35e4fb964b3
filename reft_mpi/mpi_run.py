"""``reft mpi-run``: runs one training process of an MPI job. mpiexec, srun or jsrun starts one
for each rank.

    mpiexec -n 16 reft mpi-run train.py ARGUMENTS

There is no launcher and no rendezvous: ranks, nodes and torch's environment come from MPI. An
MPI job dies as soon as any of its processes dies. The batch script then starts a new job step on
the remaining nodes and the spares. Memory and daemons stay on the nodes, and the new job step
resumes from that memory.
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
"""Open MPI's local rank. It is set to LOCAL_RANK, because DeepSpeed refuses to start if the two
differ, as they do on a host with several nodes."""
_MPI_VARIABLES = ("PMI", "OMPI_", "PRTE_", "MPIR_")
_SECRET_PURPOSE = b"reft-mpi-secret"
_WRONG_USE = 2
_PING_SECS = 5.0
_DAEMON_END_SECS = 30.0
_FORK_SECS = 30.0
_LAST_WORDS_SECS = 1.0
_START_SECS = 600.0
_END_SECS = 300.0
_LINGER_SECS = 3600.0


class ProcessLocation(NamedTuple):
    """Facts about one process that it sends to all others."""

    node: str
    kernel: str
    pid: int
    # Code derived from the secret: equal for equal secrets, without revealing them
    secret_code: bytes
    job_id: str


@dataclass(frozen=True)
class NodeRanks:
    """The ranks on this process's node, and the nodes of the job. Pure.

    The first rank of a node is its leader. Nodes are numbered in the order of their leaders.
    """

    rank: int
    size: int
    local: tuple[int, ...]  # Ranks on this node
    leaders: tuple[int, ...]  # Leaders of all nodes

    @classmethod
    def find(cls, rank: int, nodes: Sequence[str]) -> NodeRanks:
        """Derive the fields from the node of every rank."""
        local = tuple(r for r, node in enumerate(nodes) if node == nodes[rank])
        leaders = tuple(r for r, node in enumerate(nodes) if node not in nodes[:r])
        return cls(rank, len(nodes), local, leaders)

    @property
    def leads(self) -> bool:
        return self.local[0] == self.rank

    def environ(self, port: int) -> dict[str, str]:
        """Return the environment variables that torch needs; ``port`` is the port of the
        trainers' store on this node.
        """
        local_rank = self.local.index(self.rank)
        node_rank = self.leaders.index(self.local[0])
        variables = trainer_environ(
            (self.rank, self.size),
            (local_rank, len(self.local)),
            (node_rank, len(self.leaders)),
            port,
        )
        return {**variables, "NODE_RANK": str(node_rank)}


def check_consistent(locations: Sequence[ProcessLocation]) -> None:
    """Check that all processes belong to the same job. Pure.

    Raises:
        AuthenticationError: the processes have different secrets.
        ConfigError: the processes name the job differently, or two hosts have the same node id.
    """
    if len({location.secret_code for location in locations}) > 1:
        raise AuthenticationError(
            "the processes of this MPI job have different secrets: share ~/.reft/secret between "
            f"the nodes, or set {ENV_SECRET} to the same on all"
        )
    names = {location.job_id for location in locations}
    if len(names) > 1:
        raise ConfigError(
            f"the processes of this MPI job give it different names: {', '.join(sorted(names))}. "
            f"Give all the same --job-id NAME"
        )
    kernels: dict[str, str] = {}
    for location in locations:
        if kernels.setdefault(location.node, location.kernel) != location.kernel:
            raise ConfigError(
                f"two hosts call themselves node {location.node}; leave --node-id out, or give "
                f"each its own"
            )


class MpiStep:
    """This process's part in an MPI job step, from start to end. All methods are collective.

    Raises:
        ReftError, OSError: an error in this or another process.
    """

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
                f"underscores, no dot first: give --job-id"
            )
        secret_code = mac(b"", self._secret, _SECRET_PURPOSE)
        own = ProcessLocation(self._node, kernel_id(), os.getpid(), secret_code, self.job_id)
        packed = transport.gather(bytes(msgpack.packb(own)))
        locations = [ProcessLocation(*msgpack.unpackb(data)) for data in packed]
        check_consistent(locations)
        self._ranks = NodeRanks.find(rank, [location.node for location in locations])
        self._leader_pid = locations[self._ranks.local[0]].pid
        self._memory = NodeMemory(memory_dir, self.job_id, self._node)
        self._store: TrainerStore | None = None

    def prepare(self) -> None:
        """Prepare the node's memory, daemon and trainers' store, and set torch's variables."""
        self._run_on_all(self._prepare_memory)
        endpoint = self._run_on_all(self._serve_store)[0].decode()
        self._run_on_all(lambda: self._relay_store(endpoint))
        port = self._store.port if self._store else 0
        ports = self._transport.gather(str(port).encode())
        variables = self._ranks.environ(int(ports[self._ranks.local[0]]))
        if OMPI_LOCAL_RANK in os.environ:
            variables[OMPI_LOCAL_RANK] = variables["LOCAL_RANK"]
        os.environ.update(variables)
        # The leader (first rank of the node) holds the memory's lock for all trainers of the
        # node.
        declared = bool(self._options.node_id)
        os.environ.update(self._memory.environ(self._secret, self._leader_pid, declared=declared))

    def _run_on_all(self, act: Callable[[], bytes]) -> list[bytes]:
        """Run ``act`` in all processes and return their results; if it fails in one, raise in
        all."""
        own_error: Exception | None = None
        result = b""
        try:
            result = act()
        except (ReftError, OSError) as error:
            own_error = error
        report = [own_error is None, str(own_error or ""), result]
        # Gather even after an error, because the other processes wait for this report.
        packed = self._transport.gather(bytes(msgpack.packb(report)))
        if own_error is not None:
            raise own_error
        reports = [msgpack.unpackb(data) for data in packed]
        for rank, (succeeded, reason, _) in enumerate(reports):
            if not succeeded:
                raise TransferError(f"the step cannot start: rank {rank}: {reason}")
        return [result for _, _, result in reports]

    def _prepare_memory(self) -> bytes:
        if self._ranks.leads:
            job_dir = self._memory.prepare(self._secret)
            if not self._options.no_daemon:
                keep_daemon(job_dir, self._options.linger_secs)
        return b""

    def _serve_store(self) -> bytes:
        """Serve the trainers' store, and return its endpoint for the other nodes. Only rank 0
        does this."""
        if self._ranks.rank:
            return b""
        self._store = TrainerStore.serve()
        if len(self._ranks.leaders) == 1:
            return b""
        listener = listen_remotely()
        host = str(listener.getsockname()[0])
        return format_endpoint(host, self._store.admit_relays(listener, self._secret)).encode()

    def _relay_store(self, endpoint: str) -> bytes:
        """Relay the store to this node's trainers. Only the leaders of the other nodes do this."""
        if self._ranks.leads and self._ranks.rank:
            self._store = TrainerStore.relay(endpoint, self._secret)
        return b""

    def end(self, code: int) -> int:
        """Wait for the other processes; if all have succeeded, remove the job's memory.

        Args:
            code: exit code of this process's script.

        Returns:
            The first nonzero exit code of any process; 0 if there is none.

        Raises:
            TransferError: not all processes arrived in time.
        """
        self._transport.limits.timeout_secs = self._options.end_secs
        codes = [int(data) for data in self._transport.gather(str(code).encode())]
        worst = next((each for each in codes if each), 0)
        if self._ranks.leads and not worst and not self._options.keep_memory:
            job_dir = self._memory.job_dir
            if job_dir is not None and not self._options.no_daemon:
                end_daemon(job_dir)
            self._memory.remove()
        elif self._ranks.leads and worst:
            self._memory.discard_unused()
        # This gather is a barrier: no process may end before the memory is removed on all nodes.
        self._transport.gather(b"")
        if self._store is not None:
            self._store.close()
        return worst


def keep_daemon(job_dir: JobDir, linger_secs: float) -> None:
    """Make sure that a daemon runs on this node that outlives the step.

    A new daemon has its own session and standard streams, and its parent has exited. So the
    daemon is not killed with the job step (Slurm's ``proctrack/linuxproc`` kills descendants),
    and mpiexec does not wait for the daemon.

    Args:
        job_dir: the job's memory on this node.
        linger_secs: time for which the daemon waits for the next job step.
    """
    try:
        request(job_dir.path, job_dir.secret, "ping", timeout_secs=_PING_SECS)
        return
    except (OSError, EOFError, ReftError):
        pass
    linger = ["--linger-secs", str(linger_secs)]
    command = [sys.executable, "-P", "-m", "reft.node.daemon", str(job_dir.path), *linger]
    # Remove MPI's variables: with them, libraries would treat the daemon as a rank.
    environ = {k: v for k, v in os.environ.items() if not k.startswith(_MPI_VARIABLES)}
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
                "the node daemon cannot be started: %s; training continues without it", error
            )


def end_daemon(job_dir: JobDir) -> None:
    """End the node's daemon, and wait until it has ended.

    The caller then removes the job's directory, which a running daemon would create again.
    """
    with suppress(OSError, EOFError, ReftError, psutil.Error):
        pid = int(request(job_dir.path, job_dir.secret, "ping", timeout_secs=_PING_SECS))
        request(job_dir.path, job_dir.secret, "shutdown", timeout_secs=_PING_SECS)
        psutil.Process(pid).wait(_DAEMON_END_SECS)


def main(argv: Sequence[str]) -> int:
    """Run the script as one process of this job step: the command ``reft mpi-run``.

    If the script fails, this ends the whole MPI job and does not return, because the other
    processes would wait forever.

    Returns:
        The exit code: 0, the script's exit code, or 2 for wrong usage.
    """
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
        open_transport = mpi_carrier(world.rank, world.size, "", options.start_secs)
        transport = open_transport(options.start_secs, lambda: True, lambda missing, secs: None)
        step = MpiStep(options, transport, world.rank)
        set_place(step.job_id, f"rank {world.rank}")
        step.prepare()
    except (ReftError, OSError) as error:
        logger.error("%s", error)
        is_wrong_use = isinstance(error, ConfigError | AuthenticationError)
        _abort(world, _WRONG_USE if is_wrong_use else 1)
    deliberate, code = _run_script(options)
    if code and not deliberate:
        _abort(world, code)
    if mpi.Is_finalized():
        logger.warning(
            "the script has called MPI.Finalize(), so the processes cannot synchronise at the end, "
            "and the job's memory stays. Remove that call"
        )
        return code
    # Close the sessions before the memory is removed: a session takes its last version when it
    # closes, which would create the memory again.
    if (hook := sys.modules.get("reft.engine.attach")) is not None:
        hook.close_sessions()
    try:
        return step.end(code)
    except TransferError as error:
        logger.error(
            "this process has ended with exit code %d, but not all others have: %s", code, error
        )
        _abort(world, code or 1)


def _run_script(options: argparse.Namespace) -> tuple[bool, int]:
    """Run the script; return whether the script has chosen the exit code itself, and the code."""
    words = [*(["-m"] if options.module else []), options.script, *options.arguments]
    if not sys.flags.safe_path:
        del sys.path[0]  # Remove this command's entry; the script gets its own
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
    # Wait, because MPICH's mpiexec drops output that it has not read yet, such as the traceback.
    time.sleep(_LAST_WORDS_SECS)
    world.Abort(code)
    # By the standard Abort() does not return; end this process even if a library's Abort() does.
    os._exit(code)


def make_parser() -> Parser:
    """Make the parser of the command line."""
    parser = Parser(
        prog="reft mpi-run",
        words="SCRIPT [ARGUMENTS]...",
        allow_abbrev=False,
        description="Run a training script as one process of an MPI job: mpiexec -n 16 reft "
        "mpi-run train.py. Ranks, nodes and torch's environment come from MPI. When a process "
        "dies, MPI ends the job; its memory and a daemon stay on every node, and the next mpiexec "
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
        "memory directory)",
    )
    parser.add_argument(
        "--job-id",
        default=os.environ.get(ENV_JOB_ID),
        help=f"name of the job's memory ({ENV_JOB_ID}; default: made from user, directory, program "
        "and arguments). The next step finds this step's memory by that name.",
    )
    parser.add_argument("--no-daemon", action="store_true", help="start no node daemon")
    parser.add_argument(
        "--keep-memory", action="store_true", help="keep the memory also when the job ends well"
    )
    for option, default_secs, meaning in (
        ("--start-secs", _START_SECS, "seconds to wait for all processes at the start"),
        ("--end-secs", _END_SECS, "seconds to wait for all processes after the first has ended"),
        ("--linger-secs", _LINGER_SECS, "seconds that a node's daemon waits for the next step"),
    ):
        parser.add_argument(
            option, type=float, default=default_secs, help=f"{meaning} (default: %(default)s)"
        )
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
