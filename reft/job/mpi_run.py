"""``reft mpi-run``: a training process of an MPI job, as mpiexec, srun or jsrun starts one per rank.

    mpiexec -n 16 reft mpi-run train.py ARGUMENTS

There is no launcher and no rendezvous: ranks, nodes and torch's environment come from MPI. Where an MPI job
dies with its first process, the batch script starts the next step on the nodes that are left and the spares;
memory and daemons have stayed on the nodes, and the new step goes on from there.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from reft.arguments import Parser
from reft.config_read import parse_block
from reft.env import ENV_JOB_ID, ENV_MEMORY_DIR, ENV_NODE_ID

_START_SECS = 600.0
_END_SECS = 300.0
_LINGER_SECS = 3600.0


def make_parser() -> Parser:
    """The command line."""
    parser = Parser(
        prog="reft mpi-run",
        words="SCRIPT [ARGUMENTS]...",
        allow_abbrev=False,
        description="Run a training script as one process of an MPI job: mpiexec -n 16 reft mpi-run "
        "train.py. Ranks, nodes and torch's environment come from MPI. When a process dies, MPI ends the "
        "job; its memory and a daemon stay on every node, and the next mpiexec with the same script goes on "
        "from there.",
    )
    parser.add_argument(
        "--memory-dir",
        default=os.environ.get(ENV_MEMORY_DIR) or str(parse_block({}).memory_dir),
        help=f"tmpfs directory for snapshots on this node ({ENV_MEMORY_DIR}; default: %(default)s)",
    )
    parser.add_argument(
        "--node-id",
        default=os.environ.get(ENV_NODE_ID),
        help="name of this node, declared to be a unit that fails by itself (default: host name and memory "
        "directory)",
    )
    parser.add_argument(
        "--job-id",
        default=os.environ.get(ENV_JOB_ID),
        help=f"name of the job's memory ({ENV_JOB_ID}; default: made of user, directory, program and "
        "arguments). The next step finds the memory of this one by it.",
    )
    parser.add_argument("--no-daemon", action="store_true", help="start no node daemon")
    parser.add_argument("--keep-memory", action="store_true", help="keep the memory after a good end, too")
    parser.add_argument(
        "--start-secs",
        type=float,
        default=_START_SECS,
        help="time for all processes to come (default: %(default)s)",
    )
    parser.add_argument(
        "--end-secs",
        type=float,
        default=_END_SECS,
        help="time for all processes to end after the first has (default: %(default)s)",
    )
    parser.add_argument(
        "--linger-secs",
        type=float,
        default=_LINGER_SECS,
        help="how long a node's daemon waits for the next step (default: %(default)s)",
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="its arguments")
    return parser


def main(argv: Sequence[str]) -> int:
    """Command line of ``reft mpi-run``; returns the exit code: 0, the script's, 2 for wrong use. A process
    that fails ends the whole MPI job and does not return."""
    options = make_parser().parse_args(list(argv))
    from reft.job.mpi_step import run_step

    return run_step(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
