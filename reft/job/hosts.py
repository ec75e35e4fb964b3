"""Which hosts train, and with how many trainers each, in the place of torchrun's options: by
DeepSpeed's hostfile (lines ``HOST slots=N``), or by what Slurm says of this step.

    srun --ntasks-per-node=1 --no-kill reft launch --slurm train.py

Names of Slurm's variables as of ``man srun``, "OUTPUT ENVIRONMENT VARIABLES".
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
_ASK_SECS = 20.0
_TASKS = re.compile(r"(\d+)(?:\(x\d+\))?")
# Of srun's words, and of the comments for sbatch in a script.
_BAD_EXIT = re.compile(r"\s(?:--kill-on-bad-exit(?:=(\d))?|-[A-Za-z]*K(\d?))(?=\s)")
_NO_KILL = re.compile(r"\s(?:--no-kill(?!=off)(?:=\S*)?|-[A-Za-z]*k)(?=\s)")
_WAIT = re.compile(r"\s(?:--wait[=\s]|-W\s?)(\d+)(?=\s)")
_PROGRAM = re.compile(r"--$|(?:.*/)?(?:reft|python|bash|sh)\b")


def apply_hostfile(args: argparse.Namespace) -> None:
    """Write what the hostfile says, with ``--include``, ``--exclude`` and ``--num-gpus``, where
    torchrun's options say it, and the devices that are left of this node's into ``args.devices``.
    Raises ConfigError: this host is not in it, or is left out, or it contradicts other options."""
    filtered = bool(args.include or args.exclude)
    if args.num_gpus is not None and args.num_gpus < 1:
        raise ConfigError(f"--num-gpus is {args.num_gpus}; write 1 or more")
    if args.num_gpus is not None and filtered:
        raise ConfigError(
            "--num-gpus cannot be used with --include or --exclude; leave one of them out"
        )
    if args.hostfile is None and not filtered:
        args.nproc_per_node = args.nproc_per_node if args.num_gpus is None else str(args.num_gpus)
        return
    named = f"--hostfile {args.hostfile}" if args.hostfile else "this host alone"
    named += f" with --include {args.include}" if args.include else ""
    named += f" with --exclude {args.exclude}" if args.exclude else ""
    all_slots, slots = _read(args.hostfile, args.include, args.exclude)
    here = next((host for host in slots if is_this_host(host)), None)
    if here is None:
        raise ConfigError(
            f"{named} names {', '.join(slots) or 'no host'}, and this host is "
            f"{socket.gethostname()}; "
            f"start the command on the hosts that it names, or add this one"
        )
    given = args.num_gpus or len(slots[here])
    if given > len(slots[here]):
        raise ConfigError(
            f"--num-gpus is {given}, but {here} has slots={len(slots[here])}; write fewer"
        )
    if len(slots[here]) < len(all_slots[here]):
        args.devices = tuple(slots[here])
    args.nproc_per_node = str(given)
    args.nnodes = left_to_train(len(slots), args.spares, named)
    if len(slots) > 1 and not args.rdzv_endpoint:
        args.rdzv_endpoint = format_endpoint(next(iter(slots)), args.master_port or DEFAULT_PORT)


def _read(hostfile: str | None, include: str, exclude: str) -> tuple[dict[str, list[int]], ...]:
    """Slots by host, as DeepSpeed's own launcher reads them: all, and those that are left."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.launcher.runner import fetch_hostfile, parse_resource_filter

    if hostfile and not (os.path.isfile(hostfile) and os.access(hostfile, os.R_OK)):
        raise ConfigError(f"--hostfile {hostfile} cannot be read: no such file, or not readable")
    what = f"--hostfile {hostfile}"
    try:
        counts = (
            fetch_hostfile(hostfile)
            if hostfile
            else {"localhost": get_accelerator().device_count()}
        )
        slots = {host: list(range(number)) for host, number in counts.items()}
        what = f"--include {include!r}" if include else f"--exclude {exclude!r}"
        return slots, dict(parse_resource_filter(slots, include_str=include, exclude_str=exclude))
    except ValueError as error:
        raise ConfigError(
            f"{what}: {error}; write lines HOST slots=N into a hostfile, and HOST or "
            "HOST:SLOT,SLOT into a "
            f"filter, with @ between hosts: worker-1@worker-2:0,2"
        ) from error


def left_to_train(there: int, spares: int, named_by: str) -> str:
    """``--nnodes`` where so many nodes are there, and some of them are spares; raises ConfigError
    if none would train."""
    if not 0 <= spares < there:
        raise ConfigError(
            f"--spares is {spares}, but {named_by} has {there} nodes, of which at least one has "
            "to train: "
            f"write 0 to {there - 1}"
        )
    return str(there - spares)


def show_devices(devices: Sequence[int], environ: MutableMapping[str, str]) -> None:
    """Write into ``environ`` that a process sees these devices of the node alone."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().set_visible_devices_envs(environ, devices)
    if _HIP_DEVICES in environ:  # HIP takes it over CUDA's, which alone DeepSpeed sets
        environ[_HIP_DEVICES] = ",".join(map(str, devices))


def is_this_host(name: str) -> bool:
    """Whether ``name``, or an address that it resolves to, is this machine's."""
    if name in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    try:
        meant = {str(place[0]) for *_, place in socket.getaddrinfo(name, None)}
    except (OSError, UnicodeError):
        return False
    ours = {address.address for found in psutil.net_if_addrs().values() for address in found}
    return bool(meant & ours) or any(
        ipaddress.ip_address(m.partition("%")[0]).is_loopback for m in meant
    )


def apply_slurm(args: argparse.Namespace) -> None:
    """Write what Slurm says where torchrun's options say it; what was given stands. Raises
    ConfigError: this is no step of Slurm's, it has several tasks on a node, or more nodes are asked
    for than it has."""
    environ = os.environ
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    nodes = _number(environ, "SLURM_STEP_NUM_NODES")
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    if not job.isdecimal():
        raise ConfigError(
            f"--slurm: Slurm did not start this process (SLURM_JOB_ID is {job or 'not set'}); "
            "write "
            f"`{_COMMAND} ...` in a batch script or under salloc, or leave out --slurm"
        )
    if not step or not nodes or not listed:
        raise ConfigError(
            f"--slurm: this is job {job}, but no step of it (SLURM_STEP_ID is "
            f"{step or 'not set'}), so that "
            f"one node alone would train; write `{_COMMAND} ...`"
        )
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    if any(int(count) > 1 for count in _TASKS.findall(tasks)):
        raise ConfigError(
            f"--slurm: srun starts {tasks} tasks on its nodes, expected one on each: reft launch "
            "starts one "
            f"trainer for every GPU by itself. Write `{_COMMAND} ...`"
        )
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    name = f"slurm-{array}_{task}" if array and task else f"slurm-{job}"
    is_first = _number(environ, "SLURM_NODEID") == 0
    args.nnodes = args.nnodes or left_to_train(nodes, args.spares, f"step {job}.{step}")
    args.nproc_per_node = args.nproc_per_node or str(_number(environ, "SLURM_GPUS_ON_NODE") or 1)
    try:
        least, most = torchrun.parse_min_max_nnodes(args.nnodes)
    except (ValueError, RuntimeError):
        least, most = 0, nodes  # torchrun's own words are better
    if least > nodes:
        raise ConfigError(
            f"--nnodes is {args.nnodes}, but step {job}.{step} has {nodes} nodes: ask Slurm for "
            "more "
            f"(#SBATCH --nodes={least}), or leave --nnodes out"
        )
    if nodes > most and is_first:
        logger.info("%d of %d nodes train, the others are spares", most, nodes)
    if nodes > 1 and not args.rdzv_endpoint:
        # Jobs that share a node do not share a port, unless their numbers differ by 1,000.
        args.rdzv_endpoint = format_endpoint(first_host(listed), DEFAULT_PORT + int(job) % _PORTS)
    if args.rdzv_id in ("", "none"):
        # Memory (P7): the same for all steps of a job, requeued or not, another for every task of
        # an array.
        args.job_id = args.job_id or safe_name(name)
        # Run: another for every step, since a rendezvous that has ended is not entered again.
        args.rdzv_id = f"{name}.{_number(environ, 'SLURM_RESTART_COUNT')}.{step}"
    # Slurm's nodes fail one by one, whatever their hosts are called.
    args.node_id = args.node_id or environ.get("SLURMD_NODENAME")
    if is_first and nodes > 1:
        for warning in deadly_settings(job, step, environ):
            logger.warning("%s", warning)


def first_host(listed: str) -> str:
    """The first host of Slurm's list: ``nid[0012-0015,0020],login1`` gives ``nid0012``."""
    name = re.match(r"(?:[^,\[]|\[[^\]]*\])*", listed)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", name[0] if name else "")


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def deadly_settings(job: str, step: str, environ: Mapping[str, str]) -> list[str]:
    """What would end the nodes that are left when one is lost, each with what to write instead
    (P12).

    Slurm does not tell a task how its ``srun`` was called: its options are read where srun runs, if
    that is this host, and the rest is asked of the controller.
    """
    site, srun = _query("show", "config"), _find_srun(job, step)
    words, environ = (f" {srun[0]} ", srun[1]) if srun else ("", environ)
    found = []
    bad = next(("".join(match) for match in reversed(_BAD_EXIT.findall(words))), None)
    bad = environ.get("SLURM_KILL_BAD_EXIT") if bad is None else bad
    if (bad is None and re.search(r"^KillOnBadExit\s*=\s*1", site, re.M)) or bad not in (None, "0"):
        whose = "the site's slurm.conf says so" if bad is None else "srun was told so"
        found.append(
            f"Slurm ends all nodes of this step when one launcher fails (KillOnBadExit: {whose}), "
            "and none "
            "is left to continue: write srun --kill-on-bad-exit=0"
        )
    waits = [*_WAIT.findall(words)[-1:], environ.get("SLURM_WAIT", "")]
    waits += re.findall(r"^WaitTime\s*=\s*(\d+)", site, re.M)
    if wait := int(next((secs for secs in waits if secs.isdecimal()), 0)):
        found.append(
            f"Slurm ends all nodes of this step {wait} s after the first launcher has ended "
            "(WaitTime): "
            f"write srun --wait=0"
        )
    if srun and not ("SLURM_NO_KILL" in environ or _NO_KILL.search(words)):
        found.append(
            "Slurm ends this step when one of its nodes fails, and none is left to continue: "
            "write srun "
            "--no-kill"
        )
    script = _query("write", "batch_script", job, "-")
    own = " ".join(line.split("#")[1] for line in script.splitlines() if line.startswith("#SBATCH"))
    if script and "SBATCH_NO_KILL" not in environ and not _NO_KILL.search(f" {own} "):
        found.append(
            "Slurm ends this job when one of its nodes fails, unless it was submitted with sbatch "
            "--no-kill, "
            "which its script does not say: write #SBATCH --no-kill"
        )
    return found


def _find_srun(job: str, step: str) -> tuple[str, Mapping[str, str]] | None:
    """The options and the environment of this step's srun; None if it runs on another host."""
    where = re.search(r"SrunHost:Pid=([^\s:]+):(\d+)", _query("show", "step", f"{job}.{step}"))
    names = (
        socket.gethostname(),
        socket.gethostname().partition(".")[0],
        os.environ.get("SLURMD_NODENAME"),
    )
    if where is None or where[1] not in names:
        return None
    try:
        srun = psutil.Process(int(where[2]))
        program, *words = srun.cmdline()
        own = takewhile(lambda word: not _PROGRAM.match(word), words)
        return (" ".join(own), srun.environ()) if "srun" in program else None
    except (psutil.Error, OSError, ValueError) as error:
        logger.debug("srun's options cannot be read: %s", error)
        return None


def _query(*words: str) -> str:
    """What scontrol answers; nothing if it does not, which costs a warning, not the job."""
    command = ["scontrol", *words]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_ASK_SECS
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("%s: %s", " ".join(command), error)
        return ""
