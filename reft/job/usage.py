"""What ``reft launch --help`` says: without torch, whose import takes seconds."""

from __future__ import annotations

import argparse
import os
from typing import Any

from reft import env
from reft.config_read import parse_block

ETCD_BACKEND = "etcd-v3"
RESTARTS = 3  # Failures of trainers that follow each other without a new version in between
_BY_NODE, _ACROSS_NODES = "by-node", "across-nodes"
DESCRIPTION = (
    "torchrun, with reft: the training script keeps its state in the memory of its peers, and any node may "
    "die and be replaced. Every option of torchrun works as there (--help-all; a job usually needs --nnodes "
    "N or MIN:MAX, --nproc-per-node N or gpu, --rdzv-endpoint HOST:PORT, where `reft rendezvous` runs, and "
    f"--rdzv-id), but for two defaults: the nodes meet by c10d, or by --rdzv-backend {ETCD_BACKEND} at an "
    "etcd cluster, any minority of whose hosts may die (extra `etcd`); and without --max-restarts trainers "
    f"that fail are started again until {RESTARTS} restarts in a row brought no new version. A number given "
    "is for all of the job's life."
)
_ENVIRONMENT = (
    f"Environment: {env.ENV_LOG_LEVEL}=DEBUG|INFO|WARNING|ERROR, what launchers, daemons and trainers log to "
    "stderr (without it: INFO, and in trainers what the script's logging lets through); "
    f"{env.ENV_EVENTS}=DIRECTORY, where every process of reft appends what happens as lines of JSON; for an "
    f"etcd cluster {env.ENV_ETCD_USER} with {env.ENV_ETCD_PASSWORD} or {env.ENV_ETCD_PASSWORD_FILE}, and "
    f"{env.ENV_ETCD_CACERT}, {env.ENV_ETCD_CERT}, {env.ENV_ETCD_KEY} (or --rdzv-conf "
    "user=NAME,cacert=FILE,cert=FILE,key=FILE)."
)


def add_own_options(parser: argparse.ArgumentParser) -> None:
    """Those that torchrun does not have, each with dashes or underscores as there."""
    parser.epilog = _ENVIRONMENT
    group = parser.add_argument_group("reft")

    def add(name: str, help: str, *short: str, **how: Any) -> None:
        names = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}", *short))
        group.add_argument(*names, help=help, **how)

    value = os.environ.get
    add(
        "memory-dir",
        f"tmpfs directory for snapshots on this node ({env.ENV_MEMORY_DIR}; default: %(default)s). It takes "
        "the place of memory_dir in the reft block.",
        default=value(env.ENV_MEMORY_DIR) or str(parse_block({}).memory_dir),
    )
    add(
        "node-id",
        "name of this node, declared to be a unit that fails by itself; without it the host is that, "
        "whatever runs on it (default: host name and memory directory)",
        default=value(env.ENV_NODE_ID),
    )
    add(
        "job-id",
        f"name of the job's memory ({env.ENV_JOB_ID}; default: --rdzv-id, else made of user, directory, "
        "program and arguments). The same name finds the memory that an earlier launch left.",
        default=value(env.ENV_JOB_ID),
    )
    add(
        "block",
        'JSON file with the reft block, {"reft": {...}}, of a program that has no DeepSpeed JSON: NVIDIA\'s '
        f"Megatron-LM ({env.ENV_CONFIG})",
        metavar="FILE",
        default=value(env.ENV_CONFIG),
    )
    add(
        "spares",
        "nodes beyond those that train, which wait and take the place of one that is lost: --nnodes 4 "
        "--spares 2 for six nodes, four of which train. Of the nodes of --hostfile or --slurm, K wait. The "
        "job never grows into them (--nnodes 4:6 does: it trains on as many of four to six as are there)",
        type=int,
        default=0,
        metavar="K",
    )
    add("no-daemon", "start no node daemon", action="store_true")
    warm = value(env.ENV_WARM)
    add(
        "warm",
        "fork trainers from a process of the node that has imported torch and DeepSpeed "
        f"({env.ENV_WARM}=1 or 0; default: yes where the node has no device). --no-warm is for scripts that "
        "cannot be forked.",
        action=argparse.BooleanOptionalAction,
        default=None if warm is None else warm not in ("", "0"),
    )
    add(
        "preload",
        "further modules for that process, with commas between them",
        metavar="MODULES",
        type=lambda text: [name for name in text.split(",") if name],
        default=[],
    )
    add(
        "keep-memory",
        "keep the memory after a good end, and where no version was taken",
        action="store_true",
    )
    add(
        "grace-secs",
        "after SIGTERM or Ctrl-C: time for the trainers to commit and persist (default: the reft block's, "
        "25)",
        type=float,
    )
    add(
        "stop-secs",
        "time between SIGTERM and SIGKILL for trainers when the job restarts (default: %(default)s)",
        type=float,
        default=1.0,
    )
    add(
        "max-peer-restarts",
        "restarts because of lost peers are free until so many came without any progress in between; then "
        "they use up --max-restarts (default: %(default)s)",
        type=int,
        default=10,
    )
    add(
        "dry-run",
        "start the trainers, build the engine, say what reft would keep, copy and survive or refuse, and end "
        "before the first step. Memory and checkpoints of the job are not touched",
        action="store_true",
    )
    add(
        "hostfile",
        "DeepSpeed's hostfile (lines HOST slots=N) in the place of --nnodes and --nproc-per-node: start this "
        "command on every host that it names (by pdsh, srun or mpirun; no host is logged in to). The nodes "
        "meet on the first one unless --rdzv-endpoint is given",
        "-H",
        metavar="FILE",
    )
    add(
        "slurm",
        "take from Slurm what is not given: the nodes of this step, a trainer for every GPU, the first node "
        "to meet on, the names of run and memory. Write `srun --ntasks-per-node=1 --no-kill reft launch "
        "--slurm`; settings of Slurm that would end the nodes left over when one is lost are logged",
        action="store_true",
    )
    add("num-gpus", "trainers per node, as DeepSpeed's launcher takes it", type=int, metavar="N")
    add(
        "include",
        "hosts and slots of the hostfile to use, as DeepSpeed's launcher takes them: worker-1@worker-2:0,2. "
        "Slots are devices of the node",
        "-i",
        metavar="HOSTS",
        default="",
    )
    add("exclude", "hosts and slots not to use, in the same words", "-e", metavar="HOSTS", default="")
    add(
        "rank-order",
        "by-node: a node's ranks in a row, as torchrun numbers them (default). across-nodes: dealt out to "
        "the nodes in turns, so that DeepSpeed's own order puts the data-parallel peers of a pipeline stage "
        "on different nodes without a change to the script; with a tensor-parallel degree of N, "
        "across-nodes:N keeps its groups on one node. The same on every node",
        type=_rank_turn,
        default=0,
        metavar="ORDER",
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
