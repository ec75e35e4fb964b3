"""DeepSpeed's hostfile: which hosts train, and with how many trainers each (lines ``HOST slots=N``)."""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
from collections.abc import MutableMapping, Sequence

import psutil

from reft.control.door import DEFAULT_PORT, format_endpoint
from reft.errors import ConfigError

_HIP_DEVICES = "HIP_VISIBLE_DEVICES"


def apply_hostfile(args: argparse.Namespace) -> None:
    """Write what the hostfile says, with ``--include``, ``--exclude`` and ``--num-gpus``, where torchrun's
    options say it, and the devices that are left of this node's into ``args.devices`` (None: all).

    Args:
        args: of :func:`reft.job.options.make_parser`; changed.

    Raises:
        ConfigError: this host is not in it, or is left out, or it contradicts other options.
    """
    args.devices = None
    filtered = bool(args.include or args.exclude)
    if args.num_gpus is not None and args.num_gpus < 1:
        raise ConfigError(f"--num-gpus is {args.num_gpus}; write 1 or more")
    if args.num_gpus is not None and filtered:
        raise ConfigError("--num-gpus cannot be used with --include or --exclude; leave one of them out")
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
            f"{named} names {', '.join(slots) or 'no host'}, and this host is {socket.gethostname()}; "
            f"start the command on the hosts that it names, or add this one"
        )
    given = args.num_gpus or len(slots[here])
    if given > len(slots[here]):
        raise ConfigError(f"--num-gpus is {given}, but {here} has slots={len(slots[here])}; write fewer")
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
        counts = fetch_hostfile(hostfile) if hostfile else {"localhost": get_accelerator().device_count()}
        slots = {host: list(range(number)) for host, number in counts.items()}
        what = f"--include {include!r}" if include else f"--exclude {exclude!r}"
        return slots, dict(parse_resource_filter(slots, include_str=include, exclude_str=exclude))
    except ValueError as error:
        raise ConfigError(
            f"{what}: {error}; write lines HOST slots=N into a hostfile, and HOST or HOST:SLOT,SLOT into a "
            f"filter, with @ between hosts: worker-1@worker-2:0,2"
        ) from error


def left_to_train(there: int, spares: int, named_by: str) -> str:
    """``--nnodes`` where so many nodes are there, and some of them are spares; raises ConfigError if none
    would train."""
    if not 0 <= spares < there:
        raise ConfigError(
            f"--spares is {spares}, but {named_by} has {there} nodes, of which one at least has to train: "
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
    return bool(meant & ours) or any(ipaddress.ip_address(m.partition("%")[0]).is_loopback for m in meant)
