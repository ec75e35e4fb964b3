"""DeepSpeed's hostfile: which hosts train, and with how many trainers each.

worker-1 slots=4
worker-2 slots=4   # a comment
"""

from __future__ import annotations

import argparse
import ipaddress
import re
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

import psutil

from reft.control.door import DEFAULT_PORT, format_endpoint
from reft.errors import ConfigError
from reft.job.checks import left_to_train

_HIP_DEVICES = "HIP_VISIBLE_DEVICES"
_LINE = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>[1-9]\d*)")


def read_hostfile(path: Path) -> dict[str, int]:
    """Slots by host, in the order of the file.

    Raises:
        ConfigError: it cannot be read, or is no hostfile; says which line.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path} cannot be read: {error}") from error
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = _LINE.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"{path}, line {number}: {text!r}; write HOST slots=N, such as worker-1 slots=8"
            )
        if found["host"] in slots:
            raise ConfigError(f"{path}, line {number}: {found['host']} is there twice; write each host once")
        slots[found["host"]] = int(found["slots"])
    if not slots:
        raise ConfigError(f"{path} names no host; write a line HOST slots=N for each")
    return slots


def apply_hostfile(args: argparse.Namespace) -> None:
    """Write what the hostfile says, with ``--include``, ``--exclude`` and ``--num-gpus``, where torchrun's
    options say it, and the devices that are left of this node's into ``args.devices`` (None: all).

    Args:
        args: of :func:`reft.job.options.make_parser`; changed.

    Raises:
        ConfigError: this host is not in it, or is left out, or it contradicts other options.
    """
    args.devices = None
    filters = bool(args.include or args.exclude)
    if args.num_gpus is not None and args.num_gpus < 1:
        raise ConfigError(f"--num-gpus is {args.num_gpus}; write 1 or more")
    if args.num_gpus is not None and filters:
        raise ConfigError("--num-gpus cannot be used with --include or --exclude; leave one of them out")
    if args.hostfile is None and not filters:
        if args.num_gpus is not None:
            args.nproc_per_node = str(args.num_gpus)
        return
    all_slots = read_hostfile(Path(args.hostfile)) if args.hostfile else {"localhost": _devices_here()}
    slots = _filtered(all_slots, args.include, args.exclude) if filters else _counted(all_slots)
    named = f"--hostfile {args.hostfile}" if args.hostfile else "this host alone"
    if filters:
        named += f" with {'--include ' + args.include if args.include else '--exclude ' + args.exclude}"
    here = next((host for host in slots if is_this_host(host)), None)
    if here is None:
        raise ConfigError(
            f"{named} names {', '.join(slots) or 'no host'}, and this host is {socket.gethostname()}; "
            f"start the command on the hosts that it names, or add this one"
        )
    given = args.num_gpus or len(slots[here])
    if given > len(slots[here]):
        raise ConfigError(f"--num-gpus is {given}, but {here} has slots={len(slots[here])}; write fewer")
    if len(slots[here]) < all_slots[here]:
        args.devices = tuple(slots[here])
    args.nproc_per_node = str(given)
    args.nnodes = left_to_train(len(slots), args.spares, named)
    if len(slots) > 1 and not args.rdzv_endpoint:
        first = next(iter(slots))
        args.rdzv_endpoint = format_endpoint(first, args.master_port or DEFAULT_PORT)


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
        meant = {place[0] for *_, place in socket.getaddrinfo(name, None)}
    except (OSError, UnicodeError):
        return False
    ours = {address.address for found in psutil.net_if_addrs().values() for address in found}
    return bool(meant & ours) or any(ipaddress.ip_address(a).is_loopback for a in meant if _is_address(a))


def _is_address(text: object) -> bool:
    try:
        ipaddress.ip_address(str(text))
    except ValueError:
        return False
    return True


def _counted(slots: Mapping[str, int]) -> dict[str, list[int]]:
    return {host: list(range(number)) for host, number in slots.items()}


def _filtered(slots: Mapping[str, int], include: str, exclude: str) -> dict[str, list[int]]:
    """What DeepSpeed's own launcher leaves of the slots."""
    from deepspeed.launcher.runner import parse_resource_filter

    try:
        return dict(parse_resource_filter(_counted(slots), include_str=include, exclude_str=exclude))
    except ValueError as error:
        what = f"--include {include!r}" if include else f"--exclude {exclude!r}"
        raise ConfigError(
            f"{what}: {error}; write HOST or HOST:SLOT,SLOT, with @ between hosts: worker-1@worker-2:0,2"
        ) from error


def _devices_here() -> int:
    from deepspeed.accelerator import get_accelerator

    return int(get_accelerator().device_count())
