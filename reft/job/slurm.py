"""``reft launch --slurm``: what Slurm says of this step, in the place of torchrun's options.

    srun --ntasks-per-node=1 --no-kill reft launch --slurm train.py

Names of variables as of ``man srun``, "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed.run as torchrun

from reft.control.door import DEFAULT_PORT, format_endpoint
from reft.errors import ConfigError
from reft.job.checks import left_to_train
from reft.job.slurm_settings import deadly_settings
from reft.naming import safe_name

logger = logging.getLogger(__name__)

_COMMAND = "srun --ntasks-per-node=1 --no-kill reft launch --slurm"
_PORTS = 1000
_LISTED = re.compile(r"\[([^\]]*)\]")
_TASKS = re.compile(r"(\d+)(?:\(x\d+\))?")


@dataclass(frozen=True)
class SlurmStep:
    """The step that this process belongs to.

    Attributes:
        job: Slurm's number of the job.
        name: of the job: ``1234``, or ``1200_3`` for a task of an array; kept when the job is requeued.
        restarts: how often it was requeued.
        step: number of the step.
        nodes: number of nodes of the step.
        node: this node's number in it, from 0 on.
        first: name of its first node.
        gpus: GPUs that the step may use on this node; 0: none.
    """

    job: str
    name: str
    restarts: int
    step: str
    nodes: int
    node: int
    first: str
    gpus: int

    @property
    def run_id(self) -> str:
        """Another for every step: a rendezvous that has ended is not entered again."""
        return f"slurm-{self.name}.{self.restarts}.{self.step}"

    @property
    def memory_name(self) -> str:
        """The same for every step of the job, requeued or not, and another for every task of an array."""
        return safe_name(f"slurm-{self.name}")

    @property
    def port(self) -> int:
        """Jobs that share a node do not share a port, unless their numbers differ by 1,000."""
        return DEFAULT_PORT + int(self.job) % _PORTS


def read_step(environ: Mapping[str, str]) -> SlurmStep:
    """What the variables of a task say.

    Raises:
        ConfigError: this is no task of Slurm's, or not the only one on its node; says what to write.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if not job.isdecimal():
        raise ConfigError(
            f"--slurm: Slurm did not start this process (SLURM_JOB_ID is {job or 'not set'}); write "
            f"`{_COMMAND} ...` in a batch script or under salloc, or leave out --slurm"
        )
    step, nodes = environ.get("SLURM_STEP_ID", ""), environ.get("SLURM_STEP_NUM_NODES", "")
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    if not step or not nodes.isdecimal() or not listed:
        raise ConfigError(
            f"--slurm: this is job {job}, but no step of it (SLURM_STEP_ID is {step or 'not set'}), so that "
            f"one node alone would train; write `{_COMMAND} ...`"
        )
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    if any(int(count) > 1 for count in _TASKS.findall(tasks)):
        raise ConfigError(
            f"--slurm: srun starts {tasks} tasks on its nodes, expected one on each: reft launch starts one "
            f"trainer for every GPU by itself. Write `{_COMMAND} ...`"
        )
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return SlurmStep(
        job=job,
        name=f"{array}_{task}" if array and task else job,
        restarts=_number(environ, "SLURM_RESTART_COUNT"),
        step=step,
        nodes=int(nodes),
        node=_number(environ, "SLURM_NODEID"),
        first=first_host(listed),
        gpus=_number(environ, "SLURM_GPUS_ON_NODE"),
    )


def first_host(listed: str) -> str:
    """The first host of Slurm's list: ``nid[0012-0015,0020],login1`` gives ``nid0012``."""
    depth, end = 0, len(listed)
    for place, letter in enumerate(listed):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            end = place
            break
    return _LISTED.sub(lambda found: re.split("[-,]", found[1])[0], listed[:end])


def apply_slurm(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> None:
    """Write what Slurm says where torchrun's options say it; what was given stands.

    Args:
        args: of :func:`reft.job.options.make_parser`; changed.
        environ: of this process.

    Raises:
        ConfigError: this is no step of Slurm's, or more nodes are asked for than it has.
    """
    if not args.slurm:
        return
    step = read_step(environ)
    step_name = f"step {step.job}.{step.step}"
    args.nnodes = args.nnodes or left_to_train(step.nodes, args.spares, step_name)
    args.nproc_per_node = args.nproc_per_node or str(step.gpus or 1)
    _check_nodes(args.nnodes, step)
    if step.nodes > 1 and not args.rdzv_endpoint:
        args.rdzv_endpoint = format_endpoint(step.first, step.port)
    # First: the name of the memory is the run's only if the run's was given.
    args.job_id = args.job_id or (step.memory_name if args.rdzv_id in ("", "none") else None)
    if args.rdzv_id in ("", "none"):
        args.rdzv_id = step.run_id
    # Slurm's nodes fail one by one, whatever their hosts are called.
    args.node_id = args.node_id or environ.get("SLURMD_NODENAME")
    if step.node == 0 and step.nodes > 1:
        for warning in deadly_settings(step.job, step.step, environ):
            logger.warning("%s", warning)


def _check_nodes(asked: str, step: SlurmStep) -> None:
    try:
        least, most = torchrun.parse_min_max_nnodes(asked)
    except (ValueError, RuntimeError):
        return  # torchrun's own words are better
    if least > step.nodes:
        raise ConfigError(
            f"--nnodes is {asked}, but step {step.job}.{step.step} has {step.nodes} nodes: ask Slurm for "
            f"more (#SBATCH --nodes={least}), or leave --nnodes out"
        )
    if step.nodes > most and step.node == 0:
        logger.info("%d of %d nodes train, the others are spares", most, step.nodes)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0
