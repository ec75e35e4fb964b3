"""Options of ``reft launch``: those of torchrun, and reft's own.

The parser is torchrun's own, from the installed version of torch, with one more group of options;
hence argparse, not typer. Torch is imported only to parse a command line, so ``reft launch --help``
does not wait for it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import os
import re
import socket
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reft import env
from reft.config import parse_block, read_block
from reft.control.wire import format_endpoint
from reft.errors import ConfigError
from reft.job.warm import DEFAULT_MODULES
from reft.naming import BLOCK_NAME, is_name, own_name, safe_name
from reft.refusal import Parser

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

logger = logging.getLogger(__name__)

REFT_BACKEND, ETCD_BACKEND = "c10d", "etcd-v3"
MAX_FAILURES = 3  # Restarts without a new version in between, after which the job ends
_BY_NODE, _ACROSS_NODES = "by-node", "across-nodes"
DESCRIPTION = (
    "Start this node's trainers like torchrun, with reft: the training state is kept in the memory "
    "of peers, and any node may die and be replaced. Every option of torchrun works (--help-all; a "
    "job usually needs --nnodes N or MIN:MAX, --nproc-per-node N or gpu, --rdzv-endpoint "
    "HOST:PORT, where `reft rendezvous` runs, and --rdzv-id). Two defaults differ. The rendezvous "
    f"backend is c10d, or --rdzv-backend {ETCD_BACKEND} for an etcd cluster, which survives the "
    "loss of a minority of its hosts (extra `etcd`). Without --max-restarts, failed trainers are "
    f"restarted until {MAX_FAILURES} restarts in a row have brought no new version; a given "
    "--max-restarts counts over the job's whole life."
)
_ENVIRONMENT = (
    f"Environment: {env.ENV_LOG_LEVEL}=DEBUG|INFO|WARNING|ERROR is the level at which launchers, "
    "daemons and trainers log to stderr (default: INFO; in trainers, the level of the script's "
    f"logging); {env.ENV_EVENTS}=DIRECTORY is where every reft process appends its events as JSON "
    f"lines; an etcd cluster needs {env.ENV_ETCD_USER} with {env.ENV_ETCD_PASSWORD} or "
    f"{env.ENV_ETCD_PASSWORD_FILE}, and {env.ENV_ETCD_CACERT}, {env.ENV_ETCD_CERT}, "
    f"{env.ENV_ETCD_KEY} (or --rdzv-conf user=NAME,cacert=FILE,cert=FILE,key=FILE)."
)


def add_own_options(parser: argparse.ArgumentParser) -> None:
    """Add reft's options to a parser. As in torchrun, names may have dashes or underscores."""
    parser.epilog = _ENVIRONMENT
    group = parser.add_argument_group("reft")

    def add(name: str, help: str, *short: str, **how: Any) -> None:
        names = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}", *short))
        group.add_argument(*names, help=help, **how)

    value = os.environ.get
    add(
        "memory-dir",
        f"tmpfs directory for snapshots on this node ({env.ENV_MEMORY_DIR}; default: %(default)s). "
        "It overrides memory_dir in the reft block.",
        default=value(env.ENV_MEMORY_DIR) or str(parse_block({}).memory_dir),
    )
    add(
        "node-id",
        "name of this node, which declares it to be a failure domain; without it, the host is the "
        "failure domain (default: host name and memory directory)",
        default=value(env.ENV_NODE_ID),
    )
    add(
        "job-id",
        f"name of the job's memory ({env.ENV_JOB_ID}; default: --rdzv-id, or a name made from "
        "user, directory, program and arguments). The same name finds the memory that an earlier "
        "launch left.",
        default=value(env.ENV_JOB_ID),
    )
    add(
        "block",
        'JSON file with the reft block, {"reft": {...}}, for a program that has no DeepSpeed '
        "JSON, such as "
        f"NVIDIA's Megatron-LM ({env.ENV_CONFIG})",
        metavar="FILE",
        default=value(env.ENV_CONFIG),
    )
    add(
        "spares",
        "spare nodes that wait and replace lost nodes: --nnodes 4 --spares 2 for six nodes, four "
        "of which train. With --hostfile or --slurm, K of those nodes wait. The job never grows "
        "into its spares (with --nnodes 4:6 it trains on four to six nodes, as many as there are)",
        type=int,
        default=0,
        metavar="K",
    )
    add("no-daemon", "start no node daemon", action="store_true")
    warm = value(env.ENV_WARM)
    add(
        "warm",
        "fork trainers from a process on the node that has imported torch and DeepSpeed "
        f"({env.ENV_WARM}=1 or 0; default: yes where the node has no device). --no-warm is for "
        "scripts that cannot be forked.",
        action=argparse.BooleanOptionalAction,
        default=None if warm is None else warm not in ("", "0"),
    )
    add(
        "preload",
        "more modules for that process to import, separated by commas",
        metavar="MODULES",
        type=lambda text: [name for name in text.split(",") if name],
        default=[],
    )
    add(
        "keep-memory",
        "keep the memory when the job ends well, and when no version was taken",
        action="store_true",
    )
    add(
        "grace-secs",
        "seconds after SIGTERM or Ctrl-C for the trainers to commit and persist (default: the reft "
        "block's, 25)",
        type=float,
    )
    add(
        "stop-secs",
        "seconds between SIGTERM and SIGKILL for trainers when the job restarts (default: "
        "%(default)s)",
        type=float,
        default=1.0,
    )
    add(
        "max-peer-restarts",
        "free restarts after the loss of peers without any progress in between; further ones count "
        "against --max-restarts (default: %(default)s)",
        type=int,
        default=10,
    )
    add(
        "await-replacement",
        "wait for another node when one is stopped by a signal, as for a node that is lost: for "
        "systems that replace what they stop, such as Kubernetes. Without this option, and "
        "without a spare that waits, all nodes of the job end with it",
        action="store_true",
    )
    add(
        "dry-run",
        "start the trainers, build the engine, print what reft would keep, copy, survive or "
        "refuse, and end before the first step. The job's memory and checkpoints are not touched",
        action="store_true",
    )
    add(
        "hostfile",
        "DeepSpeed's hostfile (lines HOST slots=N) instead of --nnodes and --nproc-per-node: start "
        "this command on every host that it names (with pdsh, srun or mpirun; reft does not log in "
        "to any host). The nodes meet on the first one unless --rdzv-endpoint is given",
        "-H",
        metavar="FILE",
    )
    add(
        "slurm",
        "take missing options from Slurm: the nodes of this step, one trainer per GPU, the first "
        "node as rendezvous, the names of run and memory. Write `srun --ntasks-per-node=1 "
        "--no-kill reft launch --slurm`; reft warns about Slurm settings that would end the "
        "remaining nodes when one is lost",
        action="store_true",
    )
    add("num-gpus", "trainers per node, as in DeepSpeed's launcher", type=int, metavar="N")
    add(
        "include",
        "hosts and slots of the hostfile to use, as in DeepSpeed's launcher: "
        "worker-1@worker-2:0,2. Slots are devices of the node",
        "-i",
        metavar="HOSTS",
        default="",
    )
    add(
        "exclude", "hosts and slots not to use, in the same form", "-e", metavar="HOSTS", default=""
    )
    add(
        "rank-order",
        "by-node: consecutive ranks on each node, as in torchrun (default). across-nodes: ranks "
        "are dealt to the nodes in turn, so that DeepSpeed's own order puts the data-parallel "
        "peers of a pipeline stage on different nodes without a change to the script; with a "
        "tensor-parallel degree of N, across-nodes:N keeps tensor-parallel groups on one node. "
        "Give the same on every node",
        type=_rank_stride,
        default=0,
        metavar="ORDER",
    )


def _rank_stride(order: str) -> int:
    """Parse ``--rank-order`` into the stride of :func:`reft.job.trainer_store.deal_ranks`."""
    name, _, size = order.partition(":")
    if order == _BY_NODE:
        return 0
    if (
        name == _ACROSS_NODES
        and (not size or (size.isdecimal() and int(size) > 0))
        and order[-1] != ":"
    ):
        return int(size or 1)
    raise argparse.ArgumentTypeError(
        f"{order!r}; write {_BY_NODE}, {_ACROSS_NODES}, or {_ACROSS_NODES}:N for a "
        "tensor-parallel degree N"
    )


_AUTO = "auto"
_SMALL_JOB_NODES = 32
_MAX_PORT = 65535
_IN_MEMORY = ("tmpfs", "ramfs")
_CONTAINER_SHM_BYTES = 64 * 2**20
_OF_DEEPSPEED = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"}
_MAX_RUN_ID_BYTES = 240  # A file name may have 255 bytes, and TorchElastic appends 9
_NUMBERS = frozenset(
    f"{name}_timeout" for name in ("join", "last_call", "close", "heartbeat", "read", "connect")
) | {"timeout", "keep_alive_interval", "keep_alive_max_attempt"}
"""Keys of ``--rdzv-conf`` that hold a number."""


@dataclass(frozen=True)
class LaunchOptions:
    """The options of one launcher, with all defaults filled in."""

    config: LaunchConfig  # torchrun's part of the options
    entrypoint: str  # Program that is started as trainer, usually the Python interpreter
    script: Path | None  # The training script; None for a module or another program
    arguments: tuple[str, ...]  # Arguments of the entrypoint
    memory_dir: Path  # Directory on tmpfs with one directory per job
    node: str  # Id of this node
    node_declared: bool  # Whether the user gave the id, and so declared a failure domain
    job_id: str  # Name of the job's directory in memory_dir
    block_file: Path | None  # File with the ``reft`` block; None if DeepSpeed's JSON has it
    dry_run: bool  # Whether trainers end before the first step, after printing reft's plan
    daemon: bool  # Whether to start a node daemon
    keep_memory: bool  # Whether the memory stays when the job ends well
    # Seconds for trainers to commit and exit after a stop signal; None: the value in the reft block
    grace_secs: float | None
    stop_secs: float  # Seconds for trainers to end when a round is over, before SIGKILL
    # Number of consecutive restarts after lost peers, without progress, that do not count against
    # ``--max-restarts``
    free_restarts: int
    restarts_renew: bool  # Whether each new version resets the count of used restarts
    # Whether a node that was stopped by a signal is replaced, rather than ending the whole job
    awaits_replacement: bool
    # Consecutive ranks that a node gets in each turn of the round-robin; 0: all at once
    rank_stride: int
    devices: tuple[int, ...] | None  # Devices of this node that its trainers see; None: all
    warm: bool  # Whether trainers are forked from a process that has imported torch
    preload: tuple[str, ...]  # Modules imported by the process from which trainers are forked

    @property
    def join_timeout_secs(self) -> float:
        """Longest time in seconds that a node waits for a round to form."""
        return float(self.config.rdzv_configs.get("join_timeout", 600))


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the whole command line."""
    import torch.distributed.run as torchrun

    parser = Parser(
        prog="reft launch",
        words="SCRIPT [ARGUMENTS]...",
        description=DESCRIPTION,
        parents=[torchrun.get_args_parser()],
        add_help=False,  # torchrun's parser has it
    )
    parser.set_defaults(
        rdzv_backend=os.environ.get("PET_RDZV_BACKEND", _AUTO),
        max_restarts=os.environ.get("PET_MAX_RESTARTS"),
        # None marks options that were not given: --slurm fills them in before torchrun's defaults.
        nnodes=os.environ.get("PET_NNODES"),
        nproc_per_node=os.environ.get("PET_NPROC_PER_NODE"),
    )
    add_own_options(parser)
    return parser


def parse_options(argv: Sequence[str]) -> LaunchOptions:
    """Parse and complete a command line.

    Raises:
        ConfigError: options contradict each other; the message says what to write.
        SystemExit: argparse refuses an option, or ``--help`` is given.
    """
    return collect_options(make_parser().parse_args(list(argv)))


def collect_options(args: argparse.Namespace) -> LaunchOptions:
    """Check the parsed options and fill in defaults.

    Args:
        args: options parsed by the parser of :func:`make_parser`, or by one that extends it.

    Raises:
        ConfigError: options contradict each other; the message says what to write.
    """
    import torch.distributed.run as torchrun

    from reft.job.hosts import apply_hostfile, apply_slurm

    args.devices = None
    if args.hostfile is not None or args.include or args.exclude or args.num_gpus is not None:
        apply_hostfile(args)
    if args.slurm:
        apply_slurm(args)
    args.nnodes, args.nproc_per_node = args.nnodes or "1:1", args.nproc_per_node or "1"
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", args.nnodes):
        raise ConfigError(
            f"--nnodes is {args.nnodes!r}; write a number such as 4, or MIN:MAX such as 2:4"
        )
    minimum, _, maximum = args.nnodes.partition(":")
    if maximum and int(minimum) > int(maximum):
        raise ConfigError(
            f"--nnodes is {args.nnodes}, whose minimum is above its maximum; write "
            f"{maximum}:{minimum}"
        )
    if args.spares < 0:
        raise ConfigError(f"--spares is {args.spares}; write 0 or more")
    memory_dir = _memory_dir(args)
    job_id = safe_name(f"dry-run-{_job_id(args)}") if args.dry_run else _job_id(args)
    restarts_renew = args.max_restarts is None
    if restarts_renew:
        args.max_restarts = MAX_FAILURES
    if args.rdzv_id in ("", "none"):
        # Without an id, two jobs that share a rendezvous store would be taken for one job.
        args.rdzv_id = job_id
    if "/" in args.rdzv_id or len(os.fsencode(args.rdzv_id)) > _MAX_RUN_ID_BYTES:
        # TorchElastic uses the run id as the name of its log directory.
        args.rdzv_id = safe_name(args.rdzv_id)
    try:
        _choose_rendezvous(args)
        _check_program(args)
        config, _, _ = torchrun.config_from_args(args)
        _check_rendezvous(config)
        _check_numbers(args, config)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        if isinstance(error, ConfigError):
            raise
        if "nproc_per_node" in str(error):
            raise ConfigError(
                f"--nproc-per-node is {args.nproc_per_node!r}; write a number such as 8, or gpu, "
                "cpu or auto for as many trainers as the node has of them"
            ) from error
        raise ConfigError(f"these options cannot be used: {error}") from error
    _complete_rendezvous_conf(config)
    entrypoint, arguments = _program(args)
    block_file = Path(args.block).absolute() if args.block else None
    if block_file is not None:
        parse_block(read_block(block_file))  # Raises for an invalid block before trainers start
    has_device = any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd")))
    return LaunchOptions(
        config=config,
        entrypoint=entrypoint,
        script=None if args.module or args.no_python else Path(args.training_script),
        arguments=arguments,
        memory_dir=memory_dir,
        node=args.node_id or default_node_id(memory_dir),
        node_declared=bool(args.node_id),
        job_id=job_id,
        block_file=block_file,
        dry_run=args.dry_run,
        daemon=not args.no_daemon,
        keep_memory=args.keep_memory,
        grace_secs=args.grace_secs,
        stop_secs=args.stop_secs,
        free_restarts=args.max_peer_restarts,
        restarts_renew=restarts_renew,
        awaits_replacement=args.await_replacement,
        rank_stride=args.rank_order,
        devices=args.devices,
        # Warm starts are untested on nodes with a device, so there the user has to request them.
        warm=not args.no_python and (not has_device if args.warm is None else args.warm),
        preload=tuple(dict.fromkeys([*DEFAULT_MODULES, *args.preload])),
    )


def _choose_rendezvous(args: argparse.Namespace) -> None:
    """Choose the rendezvous backend as torchrun does, but always one that can replace nodes."""
    max_nodes = int(args.nnodes.rpartition(":")[2])
    old_style = (
        args.master_port is not None or args.master_addr != "127.0.0.1" or args.node_rank != 0
    )
    if args.standalone or (
        args.rdzv_backend == _AUTO
        and not args.rdzv_endpoint
        and max_nodes + args.spares == 1
        and not old_style
    ):
        args.rdzv_backend, args.rdzv_endpoint = REFT_BACKEND, "localhost:0"
        args.rdzv_id = str(uuid.uuid4()) if args.standalone else args.rdzv_id
    elif args.rdzv_backend == _AUTO and args.rdzv_endpoint:
        args.rdzv_backend = REFT_BACKEND
    elif args.rdzv_backend == "static" or (args.rdzv_backend == _AUTO and old_style):
        # In torchrun, these options give nodes fixed ranks, so that no node can be replaced. Here
        # they only say where the store is: on node 0.
        args.rdzv_backend = REFT_BACKEND
        args.rdzv_endpoint = args.rdzv_endpoint or format_endpoint(
            args.master_addr, args.master_port or 29500
        )
        args.rdzv_conf = ",".join(filter(None, (args.rdzv_conf, f"is_host={args.node_rank == 0}")))
    elif args.rdzv_backend == _AUTO:
        spares = f" with --spares {args.spares}" if args.spares else ""
        raise ConfigError(
            f"--nnodes is {args.nnodes}{spares}, but no option says where the nodes meet: start "
            "`reft rendezvous` on a host that does not train and give its address as "
            "--rdzv-endpoint HOST:PORT to every node"
        )
    if args.master_port is None:
        args.master_port = 29500


def _check_rendezvous(config: LaunchConfig) -> None:
    """Refuse backends whose store does not authenticate its clients (P11)."""
    backend, store = config.rdzv_backend, config.rdzv_configs.get("store_type", "tcp")
    if backend not in (REFT_BACKEND, ETCD_BACKEND) or store != "tcp":
        option = f"--rdzv-backend {backend}"
        if store != "tcp":
            option = f"--rdzv-conf store_type={store}"
        raise ConfigError(
            f"{option} cannot be used: TorchElastic unpickles what it finds there, whoever wrote "
            "it. Leave it out, or give --rdzv-backend c10d: start `reft rendezvous` on a host that "
            "does not train and give its address as --rdzv-endpoint HOST:PORT. For an etcd cluster "
            f"write --rdzv-backend {ETCD_BACKEND}"
        )


def _check_numbers(args: argparse.Namespace, config: LaunchConfig) -> None:
    """Refuse impossible numbers, which torchrun would accept here and fail on later."""
    max_rank = config.max_nodes + args.spares - 1
    for option, number, minimum, maximum in (
        ("--nproc-per-node", config.nproc_per_node, 1, math.inf),
        ("--nnodes", config.min_nodes, 1, math.inf),
        ("--node-rank", args.node_rank, 0, max_rank),
        ("--max-peer-restarts", args.max_peer_restarts, 0, math.inf),
        ("--master-port", args.master_port, 0, _MAX_PORT),
        ("--monitor-interval", args.monitor_interval, sys.float_info.min, sys.float_info.max),
        ("--grace-secs", args.grace_secs or 0, 0, sys.float_info.max),
        ("--stop-secs", args.stop_secs, 0, sys.float_info.max),
    ):
        if not minimum <= number <= maximum:
            up_to = f" to {maximum}" if maximum < sys.float_info.max else " or more"
            allowed = "above 0" if 0 < minimum < 1 else f"{minimum}{up_to}"
            raise ConfigError(f"{option} is {number:g}; write {allowed}")
    for key in _NUMBERS & config.rdzv_configs.keys():
        try:
            is_valid = 0 < float(config.rdzv_configs[key]) < math.inf
        except (TypeError, ValueError):
            is_valid = False
        if not is_valid:
            raise ConfigError(
                f"--rdzv-conf {key} is {config.rdzv_configs[key]!r}; write a number above 0"
            )


def _check_program(args: argparse.Namespace) -> None:
    if getattr(args, "run_path", False):
        # Not needed: reft.job.script already runs every script as torchrun's --run-path would.
        args.run_path = False
    if args.no_python:
        if args.module:
            raise ConfigError("--no-python and --module exclude each other; leave one of them out")
        logger.warning(
            "--no-python: %s is started as it is, reft is not installed into it. It is protected "
            "only if it calls reft.attach() or reft.initialize() itself",
            args.training_script,
        )


def default_node_id(memory_dir: Path) -> str:
    """Make a node id from host name and memory directory; it is the same after a restart."""
    digest = hashlib.blake2b(os.fsencode(memory_dir.resolve()), digest_size=3).hexdigest()
    return f"{socket.gethostname()}-{digest}"


def _program(args: argparse.Namespace) -> tuple[str, tuple[str, ...]]:
    if args.no_python:
        return args.training_script, tuple(args.training_script_args)
    module = ("-m",) if args.module else ()
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    script = (args.training_script, *args.training_script_args)
    # -P: reft's own imports must not find modules in the working directory.
    return python, ("-u", "-P", "-m", "reft.job.script", *module, *script)


def _complete_rendezvous_conf(config: LaunchConfig) -> None:
    """Set time-outs for a job whose nodes are replaced, unless the user has set them."""
    conf: dict[str, Any] = config.rdzv_configs
    # Seconds that the remaining nodes wait for a replacement of a lost node.
    conf.setdefault("join_timeout", 1800)
    # A node without heartbeat for interval x attempts is removed, and its place is free (torch's
    # defaults: 5 s x 3). A heartbeat writes the state of all nodes, so large jobs send fewer.
    conf.setdefault("keep_alive_interval", 1 if config.max_nodes <= _SMALL_JOB_NODES else 5)
    conf.setdefault("keep_alive_max_attempt", 5 if config.max_nodes <= _SMALL_JOB_NODES else 3)
    # Limits the wait for the address of the trainers' store: the first node may die before it
    # publishes the address.
    conf.setdefault("read_timeout", min(30.0, float(conf["join_timeout"])))
    if config.min_nodes < config.max_nodes:
        conf.setdefault("last_call_timeout", 10)


def _memory_dir(args: argparse.Namespace) -> Path:
    if not str(args.memory_dir):
        raise ConfigError(
            "--memory-dir is empty; write a directory on tmpfs, such as /dev/shm/reft"
        )
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"the working directory was removed ({error.strerror}): cd to one that is there, and "
            "start again"
        ) from error
    try:
        Path(args.memory_dir).resolve()
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"--memory-dir is {args.memory_dir}, which cannot be followed ({error}); write a "
            "directory that is no link to itself"
        ) from error
    return Path(args.memory_dir).absolute()


def find_warnings(options: LaunchOptions) -> list[str]:
    """Return warnings about options that are valid but probably mistakes."""
    warnings, directory = [], options.memory_dir
    kind = _find_file_system(directory)
    if kind not in (*_IN_MEMORY, ""):
        warnings.append(
            f"--memory-dir {directory} is on {kind}, which is not memory: every version is written "
            "there, at its speed. Write a directory on tmpfs, such as /dev/shm/reft"
        )
    if not directory.parent.exists():
        warnings.append(f"--memory-dir {directory}: {directory.parent} does not exist, and is made")
    words = [part for word in options.arguments for part in (word, word.partition("=")[2])]
    configs = [(word, config) for word in words if (config := _deepspeed_json(word)) is not None]
    has_block = options.block_file is not None or any(BLOCK_NAME in config for _, config in configs)
    if configs and not has_block and not os.environ.get(env.ENV_PROFILE):
        warnings.append(
            f'{configs[0][0]} has no "{BLOCK_NAME}" block: this job is not protected, unless its '
            f'script adds the block. Write "{BLOCK_NAME}": {{"enabled": true}} into it'
        )
    return warnings


def check_memory_size(memory_dir: Path) -> None:
    """Refuse a file system of 64 MiB or less, in which no version would fit (P9).

    Containers have a /dev/shm of that size by default.

    Raises:
        ConfigError: the file system is too small.
    """
    directory = memory_dir
    while not directory.exists():
        directory = directory.parent
    stats = os.statvfs(directory)
    total_bytes = stats.f_blocks * stats.f_frsize
    if 0 < total_bytes <= _CONTAINER_SHM_BYTES:  # 0: a pseudo file system, such as /proc
        raise ConfigError(
            f"--memory-dir {memory_dir} has {total_bytes / 2**20:.0f} MiB in all, as /dev/shm has "
            "in a container unless it asks for more: no version would fit. In Kubernetes mount a "
            "volume at /dev/shm, `emptyDir: {medium: Memory, sizeLimit: SIZE}` (k8s/ has an "
            "example); with docker and podman write --shm-size=SIZE. `reft plan` prints the size"
        )


def _find_file_system(path: Path) -> str:
    """Return the type of the file system at a path, such as tmpfs; empty if it is unknown."""
    target, kind, longest = path.resolve(), "", 0
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, mounted, name, *_ = line.split()
            point = mounted.replace("\\040", " ")
            # If two file systems are mounted at one directory, the later one covers the other.
            if target.is_relative_to(point) and len(point) >= longest:
                kind, longest = name, len(point)
    return kind


def _deepspeed_json(path: str) -> dict[str, Any] | None:
    """Read DeepSpeed's configuration from a file; None if the file is something else."""
    if not path.endswith(".json"):
        return None
    with suppress(OSError, ValueError):
        content = json.loads(Path(path).read_text())
        if isinstance(content, dict) and _OF_DEEPSPEED & content.keys():
            return content
    return None


def _job_id(args: argparse.Namespace) -> str:
    job_id: str = args.job_id or ""
    if job_id and not is_name(job_id):
        raise ConfigError(
            f"job id is {job_id!r}; expected 1 to 128 letters, digits, dots, dashes or "
            "underscores, no dot first: give --job-id"
        )
    if job_id:
        return job_id
    if args.rdzv_id not in ("", "none"):
        return safe_name(args.rdzv_id)
    return own_name(args.training_script, args.training_script_args, module=args.module)
