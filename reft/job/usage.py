"""What ``reft launch --help`` says: without torch, whose import takes seconds."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from reft.arguments import Parser
from reft.config_read import parse_block
from reft.env import (
    ENV_CONFIG,
    ENV_ETCD_CACERT,
    ENV_ETCD_CERT,
    ENV_ETCD_KEY,
    ENV_ETCD_PASSWORD,
    ENV_ETCD_PASSWORD_FILE,
    ENV_ETCD_USER,
    ENV_EVENTS,
    ENV_JOB_ID,
    ENV_LOG_LEVEL,
    ENV_MEMORY_DIR,
    ENV_NODE_ID,
    ENV_WARM,
)

RESTARTS = 3
"""Failures of trainers that follow each other without a new version in between."""
_FREE_RESTARTS = 10
_STOP_SECS = 1.0
_BY_NODE, _ACROSS_NODES = "by-node", "across-nodes"
DESCRIPTION = (
    "torchrun, with reft: the training script keeps its state in the memory of its peers, and any node may "
    "die and be replaced. Every option of torchrun works as there, but for two defaults: the nodes meet by "
    "c10d, and without --max-restarts trainers that fail are started again until "
    f"{RESTARTS} restarts in a row brought no new version. A number given is for all of the job's life."
)
_ENVIRONMENT = (
    f"Environment: {ENV_LOG_LEVEL}=DEBUG|INFO|WARNING|ERROR, what launchers, daemons and trainers log to "
    "stderr (without it: INFO, and in trainers what the script's logging lets through); "
    f"{ENV_EVENTS}=DIRECTORY, "
    "where every process of reft appends what happens as lines of JSON; for an etcd cluster "
    f"{ENV_ETCD_USER} with {ENV_ETCD_PASSWORD} or {ENV_ETCD_PASSWORD_FILE}, and {ENV_ETCD_CACERT}, "
    f"{ENV_ETCD_CERT}, {ENV_ETCD_KEY} (or --rdzv-conf user=NAME,cacert=FILE,cert=FILE,key=FILE)."
)


def _warm_by_environment() -> bool | None:
    value = os.environ.get(ENV_WARM)
    return None if value is None else value not in ("", "0")


def add_own_options(parser: argparse.ArgumentParser) -> None:
    """Those that torchrun does not have."""
    parser.epilog = _ENVIRONMENT
    ours = parser.add_argument_group("reft")
    ours.add_argument(
        "--memory-dir",
        "--memory_dir",
        default=os.environ.get(ENV_MEMORY_DIR) or str(parse_block({}).memory_dir),
        help=f"tmpfs directory for snapshots on this node ({ENV_MEMORY_DIR}; default: %(default)s). It takes "
        "the place of memory_dir in the reft block.",
    )
    ours.add_argument(
        "--node-id",
        "--node_id",
        default=os.environ.get(ENV_NODE_ID),
        help="name of this node, declared to be a unit that fails by itself; without it the host is that, "
        "whatever runs on it (default: host name and memory directory)",
    )
    ours.add_argument(
        "--job-id",
        "--job_id",
        default=os.environ.get(ENV_JOB_ID),
        help=f"name of the job's memory ({ENV_JOB_ID}; default: --rdzv-id, else made of user, directory, "
        "program and arguments). The same name finds the memory that an earlier launch left.",
    )
    ours.add_argument(
        "--block",
        metavar="FILE",
        default=os.environ.get(ENV_CONFIG),
        help='JSON file with the reft block, {"reft": {...}}, of a program that has no DeepSpeed JSON: '
        f"NVIDIA's Megatron-LM ({ENV_CONFIG})",
    )
    ours.add_argument(
        "--spares",
        type=int,
        default=0,
        metavar="K",
        help="nodes beyond those that train, which wait and take the place of one that is lost: --nnodes 4 "
        "--spares 2 for six nodes, four of which train. Of the nodes of --hostfile or --slurm, K wait. The "
        "job never grows into them (--nnodes 4:6 does: it trains on as many of four to six as are there)",
    )
    ours.add_argument("--no-daemon", "--no_daemon", action="store_true", help="start no node daemon")
    ours.add_argument(
        "--warm",
        action=argparse.BooleanOptionalAction,
        default=_warm_by_environment(),
        help="fork trainers from a process of the node that has imported torch and DeepSpeed "
        f"({ENV_WARM}=1 or 0; default: yes where the node has no device). --no-warm is "
        "for scripts that cannot be forked.",
    )
    ours.add_argument(
        "--preload",
        metavar="MODULES",
        type=lambda text: [name for name in text.split(",") if name],
        default=[],
        help="further modules for that process, with commas between them",
    )
    ours.add_argument(
        "--keep-memory",
        "--keep_memory",
        action="store_true",
        help="keep the memory after a good end, and where no version was taken",
    )
    ours.add_argument(
        "--grace-secs",
        "--grace_secs",
        type=float,
        help="after SIGTERM or Ctrl-C: time for the trainers to commit and persist (default: the reft "
        "block's, 25)",
    )
    ours.add_argument(
        "--stop-secs",
        "--stop_secs",
        type=float,
        default=_STOP_SECS,
        help="time between SIGTERM and SIGKILL for trainers when the job restarts (default: %(default)s)",
    )
    ours.add_argument(
        "--max-peer-restarts",
        "--max_peer_restarts",
        type=int,
        default=_FREE_RESTARTS,
        help="restarts because of lost peers are free until so many came without any progress in between; "
        "then they use up --max-restarts (default: %(default)s)",
    )
    ours.add_argument(
        "--dry-run",
        "--dry_run",
        action="store_true",
        help="start the trainers, build the engine, say what reft would keep, copy and survive or refuse, "
        "and end before the first step. Memory and checkpoints of the job are not touched",
    )
    ours.add_argument(
        "--hostfile",
        "-H",
        metavar="FILE",
        help="DeepSpeed's hostfile (lines HOST slots=N) in the place of --nnodes and --nproc-per-node: start "
        "this command on every host that it names (by pdsh, srun or mpirun; no host is logged in to). The "
        "nodes meet on the first one unless --rdzv-endpoint is given",
    )
    ours.add_argument(
        "--slurm",
        action="store_true",
        help="take from Slurm what is not given: the nodes of this step, a trainer for every GPU, the first "
        "node to meet on, the names of run and memory. Write `srun --ntasks-per-node=1 --no-kill reft launch "
        "--slurm`; settings of Slurm that would end the nodes left over when one is lost are logged",
    )
    ours.add_argument(
        "--num-gpus",
        "--num_gpus",
        type=int,
        metavar="N",
        help="trainers per node, as DeepSpeed's launcher takes it",
    )
    ours.add_argument(
        "--include",
        "-i",
        metavar="HOSTS",
        default="",
        help="hosts and slots of the hostfile to use, as DeepSpeed's launcher takes them: "
        "worker-1@worker-2:0,2. Slots are devices of the node",
    )
    ours.add_argument(
        "--exclude", "-e", metavar="HOSTS", default="", help="hosts and slots not to use, in the same words"
    )
    ours.add_argument(
        "--rank-order",
        "--rank_order",
        type=_rank_turn,
        default=0,
        metavar="ORDER",
        help="by-node: a node's ranks in a row, as torchrun numbers them (default). across-nodes: dealt out "
        "to the nodes in turns, so that DeepSpeed's own order puts the data-parallel peers of a pipeline "
        "stage on different nodes without a change to the script; with a tensor-parallel degree of N, "
        "across-nodes:N keeps its groups on one node. The same on every node",
    )


def _rank_turn(order: str) -> int:
    """What ``--rank-order`` says, as :func:`reft.job.agreement.deal_ranks` takes it."""
    name, _, size = order.partition(":")
    if order == _BY_NODE:
        return 0
    if name == _ACROSS_NODES and (not size or (size.isdecimal() and int(size) > 0)) and order[-1] != ":":
        return int(size or 1)
    raise argparse.ArgumentTypeError(
        f"{order!r}; write {_BY_NODE}, {_ACROSS_NODES}, or {_ACROSS_NODES}:N for a tensor-parallel degree N"
    )


def make_short_parser() -> argparse.ArgumentParser:
    """For ``--help`` alone: reft's options, and those of torchrun that a job usually needs."""
    parser = Parser(prog="reft launch", words="SCRIPT [ARGUMENTS]...", description=DESCRIPTION)
    parser.add_argument("--help-all", action="store_true", help="all of torchrun's options as well")
    common = parser.add_argument_group("torchrun, the usual options")
    common.add_argument("--nnodes", metavar="N", help="nodes of the job, or MIN:MAX to go on with fewer")
    common.add_argument("--nproc-per-node", metavar="N", help="trainers per node, or gpu")
    common.add_argument(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="where `reft rendezvous` runs; of an etcd cluster its members, H1:P1,H2:P2,H3:P3",
    )
    common.add_argument(
        "--rdzv-backend",
        metavar="NAME",
        help="c10d: `reft rendezvous`, or a launcher that serves the store (default); etcd-v3: an etcd "
        "cluster, any minority of whose hosts may die (extra `etcd`)",
    )
    common.add_argument("--rdzv-id", metavar="ID", help="the run; the same on every node")
    common.add_argument("--max-restarts", metavar="N", help="failures of trainers over the job's life")
    common.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m")
    add_own_options(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Command line of ``reft launch``; see :func:`reft.job.launch.main` for the exit codes."""
    if argv[:1] in (["-h"], ["--help"]):
        make_short_parser().print_help()
        return 0
    if argv[:1] == ["--help-all"]:
        from reft.job.options import make_parser

        make_parser().print_help()
        return 0
    from reft.job.launch import main as launch

    return launch(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
