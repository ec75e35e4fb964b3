"""What ``reft launch --help`` says: without torch, whose import takes seconds."""

from __future__ import annotations

import argparse
import os
from typing import Any

from reft import env
from reft.config import parse_block

ETCD_BACKEND = "etcd-v3"
RESTARTS = 3  # Failures of trainers that follow each other without a new version in between
_BY_NODE, _ACROSS_NODES = "by-node", "across-nodes"
DESCRIPTION = (
    "Start this node's trainers like torchrun, with reft: the training state is kept in the memory of "
    "peers, and any node may die and be replaced. Every option of torchrun works (--help-all; a job "
    "usually needs --nnodes N or MIN:MAX, --nproc-per-node N or gpu, --rdzv-endpoint HOST:PORT, where "
    "`reft rendezvous` runs, and --rdzv-id), but two defaults differ: the nodes meet by c10d, or by "
    f"--rdzv-backend {ETCD_BACKEND} at an etcd cluster, of whose hosts any minority may die (extra "
    f"`etcd`); and without --max-restarts, failed trainers are restarted until {RESTARTS} restarts in a "
    "row have brought no new version. A given --max-restarts counts over the job's whole life."
)
_ENVIRONMENT = (
    f"Environment: {env.ENV_LOG_LEVEL}=DEBUG|INFO|WARNING|ERROR, what launchers, daemons and trainers log "
    "to stderr (default: INFO; in trainers, the level of the script's logging); "
    f"{env.ENV_EVENTS}=DIRECTORY, where every reft process appends its events as JSON lines; for an etcd "
    f"cluster {env.ENV_ETCD_USER} with {env.ENV_ETCD_PASSWORD} or {env.ENV_ETCD_PASSWORD_FILE}, and "
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
        f"tmpfs directory for snapshots on this node ({env.ENV_MEMORY_DIR}; default: %(default)s). It "
        "overrides memory_dir in the reft block.",
        default=value(env.ENV_MEMORY_DIR) or str(parse_block({}).memory_dir),
    )
    add(
        "node-id",
        "name of this node, which declares it to be a failure domain; without it, the host is the failure "
        "domain (default: host name and memory directory)",
        default=value(env.ENV_NODE_ID),
    )
    add(
        "job-id",
        f"name of the job's memory ({env.ENV_JOB_ID}; default: --rdzv-id, or a name made from user, "
        "directory, program and arguments). The same name finds the memory that an earlier launch left.",
        default=value(env.ENV_JOB_ID),
    )
    add(
        "block",
        'JSON file with the reft block, {"reft": {...}}, for a program that has no DeepSpeed JSON, such as '
        f"NVIDIA's Megatron-LM ({env.ENV_CONFIG})",
        metavar="FILE",
        default=value(env.ENV_CONFIG),
    )
    add(
        "spares",
        "spare nodes that wait and replace lost nodes: --nnodes 4 --spares 2 for six nodes, four of which "
        "train. With --hostfile or --slurm, K of those nodes wait. The job never grows into its spares "
        "(with --nnodes 4:6 it trains on four to six nodes, as many as there are)",
        type=int,
        default=0,
        metavar="K",
    )
    add("no-daemon", "start no node daemon", action="store_true")
    warm = value(env.ENV_WARM)
    add(
        "warm",
        f"fork trainers from a process on the node that has imported torch and DeepSpeed ({env.ENV_WARM}=1 "
        "or 0; default: yes where the node has no device). --no-warm is for scripts that cannot be forked.",
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
        "seconds between SIGTERM and SIGKILL for trainers when the job restarts (default: %(default)s)",
        type=float,
        default=1.0,
    )
    add(
        "max-peer-restarts",
        "free restarts after the loss of peers without any progress in between; further ones count against "
        "--max-restarts (default: %(default)s)",
        type=int,
        default=10,
    )
    add(
        "dry-run",
        "start the trainers, build the engine, print what reft would keep, copy, survive or refuse, and "
        "end before the first step. The job's memory and checkpoints are not touched",
        action="store_true",
    )
    add(
        "hostfile",
        "DeepSpeed's hostfile (lines HOST slots=N) instead of --nnodes and --nproc-per-node: start this "
        "command on every host that it names (with pdsh, srun or mpirun; reft does not log in to any "
        "host). The nodes meet on the first one unless --rdzv-endpoint is given",
        "-H",
        metavar="FILE",
    )
    add(
        "slurm",
        "take missing options from Slurm: the nodes of this step, one trainer per GPU, the first node as "
        "rendezvous, the names of run and memory. Write `srun --ntasks-per-node=1 --no-kill reft launch "
        "--slurm`; reft warns about Slurm settings that would end the remaining nodes when one is lost",
        action="store_true",
    )
    add("num-gpus", "trainers per node, as in DeepSpeed's launcher", type=int, metavar="N")
    add(
        "include",
        "hosts and slots of the hostfile to use, as in DeepSpeed's launcher: worker-1@worker-2:0,2. Slots "
        "are devices of the node",
        "-i",
        metavar="HOSTS",
        default="",
    )
    add("exclude", "hosts and slots not to use, in the same form", "-e", metavar="HOSTS", default="")
    add(
        "rank-order",
        "by-node: consecutive ranks on each node, as in torchrun (default). across-nodes: ranks are dealt "
        "to the nodes in turn, so that DeepSpeed's own order puts the data-parallel peers of a pipeline "
        "stage on different nodes without a change to the script; with a tensor-parallel degree of N, "
        "across-nodes:N keeps tensor-parallel groups on one node. Give the same on every node",
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
