"""Finds the hosts that train, and the trainers on each, in DeepSpeed's hostfile or from Slurm.

Either source fills in options of torchrun that the user would otherwise write. A hostfile has lines
``HOST slots=N``. Under Slurm, one srun command (a job step) starts one launcher per node:

    srun --ntasks-per-node=1 --no-kill reft launch --slurm train.py

The names of Slurm's variables are from ``man srun``, "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import re
import socket
import subprocess
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import takewhile

import psutil
import torch.distributed.run as torchrun

from reft.control.wire import DEFAULT_PORT, format_endpoint
from reft.errors import ConfigError
from reft.naming import safe_name

logger = logging.getLogger(__name__)

_HIP_DEVICES = "HIP_VISIBLE_DEVICES"
_COMMAND = "srun --ntasks-per-node=1 --no-kill reft launch --slurm"
_PORTS = 1000
_QUERY_SECS = 20.0
_TASKS = re.compile(r"(\d+)(?:\(x\d+\))?")
# Patterns of options, in the arguments of srun or in the #SBATCH comments of a batch script.
_BAD_EXIT = re.compile(r"\s(?:--kill-on-bad-exit(?:=(\d))?|-[A-Za-z]*K(\d?))(?=\s)")
_NO_KILL = re.compile(r"\s(?:--no-kill(?!=off)(?:=\S*)?|-[A-Za-z]*k)(?=\s)")
_WAIT = re.compile(r"\s(?:--wait[=\s]|-W\s?)(\d+)(?=\s)")
_PROGRAM = re.compile(r"--$|(?:.*/)?(?:reft|python|bash|sh)\b")


# -- DeepSpeed's hostfile --------------------------------------------------------------------------


def apply_hostfile(args: argparse.Namespace) -> None:
    """Turn the hostfile, ``--include``, ``--exclude`` and ``--num-gpus`` into torchrun's options.

    Args:
        args: parsed command line. torchrun's options are set in it, and ``devices``, the devices of
            this node to use.

    Raises:
        ConfigError: this host is not in the hostfile or is excluded, or options contradict each
            other.
    """
    is_filtered = bool(args.include or args.exclude)
    if args.num_gpus is not None and args.num_gpus < 1:
        raise ConfigError(f"--num-gpus is {args.num_gpus}; write 1 or more")
    if args.num_gpus is not None and is_filtered:
        raise ConfigError(
            "--num-gpus cannot be used with --include or --exclude; leave one of them out"
        )
    if args.hostfile is None and not is_filtered:
        if args.num_gpus is not None:
            args.nproc_per_node = str(args.num_gpus)
        return
    source = f"--hostfile {args.hostfile}" if args.hostfile else "this host alone"
    if args.include:
        source += f" with --include {args.include}"
    if args.exclude:
        source += f" with --exclude {args.exclude}"
    all_slots, slots = _read_slots(args.hostfile, args.include, args.exclude)
    own_host = next((host for host in slots if is_this_host(host)), None)
    if own_host is None:
        raise ConfigError(
            f"{source} names {', '.join(slots) or 'no host'}, and this host is "
            f"{socket.gethostname()}; start the command on the hosts that it names, or add this one"
        )
    own_slots = slots[own_host]
    trainers = args.num_gpus or len(own_slots)
    if trainers > len(own_slots):
        raise ConfigError(
            f"--num-gpus is {trainers}, but {own_host} has slots={len(own_slots)}; write fewer"
        )
    if len(own_slots) < len(all_slots[own_host]):
        args.devices = tuple(own_slots)
    args.nproc_per_node = str(trainers)
    args.nnodes = nodes_without_spares(len(slots), args.spares, source)
    if len(slots) > 1 and not args.rdzv_endpoint:
        first_host = next(iter(slots))
        args.rdzv_endpoint = format_endpoint(first_host, args.master_port or DEFAULT_PORT)


def _read_slots(
    hostfile: str | None, include: str, exclude: str
) -> tuple[dict[str, list[int]], ...]:
    """Read each host's slots (device indices) with the functions of DeepSpeed's launcher.

    Returns:
        All slots by host, and the slots that remain after ``include`` and ``exclude``.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.launcher.runner import fetch_hostfile, parse_resource_filter

    if hostfile and not (os.path.isfile(hostfile) and os.access(hostfile, os.R_OK)):
        raise ConfigError(f"--hostfile {hostfile} cannot be read: no such file, or not readable")
    source = f"--hostfile {hostfile}"
    try:
        if hostfile:
            counts = fetch_hostfile(hostfile)
        else:
            counts = {"localhost": get_accelerator().device_count()}
        slots = {host: list(range(number)) for host, number in counts.items()}
        source = f"--include {include!r}" if include else f"--exclude {exclude!r}"
        used = parse_resource_filter(slots, include_str=include, exclude_str=exclude)
        return slots, dict(used)
    except ValueError as error:
        raise ConfigError(
            f"{source}: {error}; write lines HOST slots=N into a hostfile, and HOST or "
            f"HOST:SLOT,SLOT into a filter, with @ between hosts: worker-1@worker-2:0,2"
        ) from error


def nodes_without_spares(nodes: int, spares: int, source: str) -> str:
    """Return the value of ``--nnodes``, the number of nodes that train, without the spares.

    Args:
        nodes: number of all nodes.
        spares: number of nodes that wait to replace a lost one.
        source: where the nodes are listed, for the error message.

    Raises:
        ConfigError: no node would train.
    """
    if not 0 <= spares < nodes:
        raise ConfigError(
            f"--spares is {spares}, but {source} has {nodes} nodes, of which at least one has to "
            f"train: write 0 to {nodes - 1}"
        )
    return str(nodes - spares)


def show_devices(devices: Sequence[int], environ: MutableMapping[str, str]) -> None:
    """Set the environment variables that restrict a process to the given devices of the node."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().set_visible_devices_envs(environ, devices)
    # DeepSpeed sets only CUDA_VISIBLE_DEVICES; if HIP's own variable is set, HIP prefers it.
    if _HIP_DEVICES in environ:
        environ[_HIP_DEVICES] = ",".join(map(str, devices))


def is_this_host(name: str) -> bool:
    """Whether the host called ``name``, or an address to which it resolves, is this machine."""
    if name in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    try:
        addresses = {str(entry[-1][0]) for entry in socket.getaddrinfo(name, None)}
    except (OSError, UnicodeError):
        return False
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    if addresses & own:
        return True
    return any(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in addresses)


# -- Slurm -----------------------------------------------------------------------------------------


def apply_slurm(args: argparse.Namespace) -> None:
    """Fill in options that the user left out from Slurm's environment variables.

    Args:
        args: parsed command line. torchrun's options are set in it, and the names of the run, of
            the job's memory and of the node.

    Raises:
        ConfigError: this process is not in a Slurm step, the step has several tasks on a node, or
            more nodes are requested than the step has.
    """
    environ = os.environ
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    nodes = _number(environ, "SLURM_STEP_NUM_NODES")
    node_list = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    _check_step(job, step, nodes, node_list)
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    name = f"slurm-{array}_{task}" if array and task else f"slurm-{job}"
    is_first = _number(environ, "SLURM_NODEID") == 0
    if not args.nnodes:
        args.nnodes = nodes_without_spares(nodes, args.spares, f"step {job}.{step}")
    if not args.nproc_per_node:
        args.nproc_per_node = str(_number(environ, "SLURM_GPUS_ON_NODE") or 1)
    try:
        min_nodes, max_nodes = torchrun.parse_min_max_nnodes(args.nnodes)
    except (ValueError, RuntimeError):
        min_nodes, max_nodes = 0, nodes  # The parser of --nnodes reports the error later
    if min_nodes > nodes:
        raise ConfigError(
            f"--nnodes is {args.nnodes}, but step {job}.{step} has {nodes} nodes: ask Slurm for "
            f"more (#SBATCH --nodes={min_nodes}), or leave --nnodes out"
        )
    if nodes > max_nodes and is_first:
        logger.info("%d of %d nodes train, the others are spares", max_nodes, nodes)
    if nodes > 1 and not args.rdzv_endpoint:
        # Jobs that share a node use different ports, unless their ids are equal modulo 1,000.
        port = DEFAULT_PORT + int(job) % _PORTS
        args.rdzv_endpoint = format_endpoint(find_first_host(node_list), port)
    if args.rdzv_id in ("", "none"):
        # P7: the job's memory has the same name in all steps of a job, also after a requeue, and
        # a different name for every task of a job array.
        args.job_id = args.job_id or safe_name(name)
        # Every step gets its own run id, because a node cannot join a run that has ended.
        args.rdzv_id = f"{name}.{_number(environ, 'SLURM_RESTART_COUNT')}.{step}"
    # Each Slurm node is a failure domain of its own, even if two report the same host name.
    args.node_id = args.node_id or environ.get("SLURMD_NODENAME")
    if is_first and nodes > 1:
        for warning in find_deadly_settings(job, step, environ):
            logger.warning("%s", warning)


def _check_step(job: str, step: str, nodes: int, node_list: str) -> None:
    """Raise ConfigError unless srun has started exactly one launcher on every node."""
    if not job.isdecimal():
        raise ConfigError(
            f"--slurm: Slurm did not start this process (SLURM_JOB_ID is {job or 'not set'}); "
            f"write `{_COMMAND} ...` in a batch script or under salloc, or leave out --slurm"
        )
    if not step or not nodes or not node_list:
        raise ConfigError(
            f"--slurm: this is job {job}, but no step of it (SLURM_STEP_ID is "
            f"{step or 'not set'}), so that one node alone would train; write `{_COMMAND} ...`"
        )
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    if any(int(count) > 1 for count in _TASKS.findall(tasks)):
        raise ConfigError(
            f"--slurm: srun starts {tasks} tasks on its nodes, expected one on each: reft launch "
            f"starts one trainer for every GPU by itself. Write `{_COMMAND} ...`"
        )


def find_first_host(node_list: str) -> str:
    """Return the first host of a Slurm list: ``nid[0012-0015,0020],login1`` gives ``nid0012``."""
    name = re.match(r"(?:[^,\[]|\[[^\]]*\])*", node_list)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", name[0] if name else "")


def _number(environ: Mapping[str, str], name: str) -> int:
    """Return the number in an environment variable; 0 if it is unset or not a number."""
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def find_deadly_settings(job: str, step: str, environ: Mapping[str, str]) -> list[str]:
    """Find settings by which Slurm ends the remaining nodes when one is lost (P12).

    Slurm does not pass the options of ``srun`` to its tasks, so they are read from the command line
    of the srun process if it runs on this host. The other settings come from Slurm's controller.

    Returns:
        Warnings that say what to write instead.
    """
    site, srun = _query("show", "config"), _find_srun(job, step)
    words = ""
    if srun is not None:
        words, environ = f" {srun[0]} ", srun[1]
    warnings = []
    bad_exit = next(("".join(match) for match in reversed(_BAD_EXIT.findall(words))), None)
    if bad_exit is None:
        bad_exit = environ.get("SLURM_KILL_BAD_EXIT")
    site_kills = re.search(r"^KillOnBadExit\s*=\s*1", site, re.M) is not None
    if (bad_exit is None and site_kills) or bad_exit not in (None, "0"):
        source = "the site's slurm.conf says so" if bad_exit is None else "srun was told so"
        warnings.append(
            f"Slurm ends all nodes of this step when one launcher fails (KillOnBadExit: {source}), "
            "and none is left to continue: write srun --kill-on-bad-exit=0"
        )
    # The option --wait overrides SLURM_WAIT, which overrides WaitTime of the site's configuration.
    waits = [*_WAIT.findall(words)[-1:], environ.get("SLURM_WAIT", "")]
    waits += re.findall(r"^WaitTime\s*=\s*(\d+)", site, re.M)
    wait_secs = int(next((secs for secs in waits if secs.isdecimal()), 0))
    if wait_secs:
        warnings.append(
            f"Slurm ends all nodes of this step {wait_secs} s after the first launcher has ended "
            f"(WaitTime): write srun --wait=0"
        )
    if srun and not ("SLURM_NO_KILL" in environ or _NO_KILL.search(words)):
        warnings.append(
            "Slurm ends this step when one of its nodes fails, and none is left to continue: write "
            "srun --no-kill"
        )
    script = _query("write", "batch_script", job, "-")
    comments = [line.split("#")[1] for line in script.splitlines() if line.startswith("#SBATCH")]
    sbatch_options = f" {' '.join(comments)} "
    if script and "SBATCH_NO_KILL" not in environ and not _NO_KILL.search(sbatch_options):
        warnings.append(
            "Slurm ends this job when one of its nodes fails, unless it was submitted with sbatch "
            "--no-kill, which its script does not say: write #SBATCH --no-kill"
        )
    return warnings


def _find_srun(job: str, step: str) -> tuple[str, Mapping[str, str]] | None:
    """Return the options and environment of this step's srun; None if it runs on another host."""
    process = re.search(r"SrunHost:Pid=([^\s:]+):(\d+)", _query("show", "step", f"{job}.{step}"))
    own_names = (
        socket.gethostname(),
        socket.gethostname().partition(".")[0],
        os.environ.get("SLURMD_NODENAME"),
    )
    if process is None or process[1] not in own_names:
        return None
    try:
        srun = psutil.Process(int(process[2]))
        program, *words = srun.cmdline()
        options = takewhile(lambda word: not _PROGRAM.match(word), words)
        return (" ".join(options), srun.environ()) if "srun" in program else None
    except (psutil.Error, OSError, ValueError) as error:
        logger.debug("srun's options cannot be read: %s", error)
        return None


def _query(*words: str) -> str:
    """Return the output of ``scontrol``; empty if the command fails.

    The output only serves warnings, so a failure must not stop the job.
    """
    command = ["scontrol", *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_QUERY_SECS
        )
        return done.stdout
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("%s: %s", " ".join(command), error)
        return ""
