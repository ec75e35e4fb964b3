"""DeepSpeed's hostfile: which hosts train, and with how many trainers each.

worker-1 slots=4
worker-2 slots=4   # a comment
"""

from __future__ import annotations

import argparse
import re
import socket
from pathlib import Path

from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

from reft.errors import ConfigError
from reft.store.door import DEFAULT_PORT, format_endpoint

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
    """Write what the hostfile says, ``--num-gpus`` included, where torchrun's options say it.

    Args:
        args: of :func:`reft.elastic.options.make_parser`; changed.

    Raises:
        ConfigError: this host is not in it, or it contradicts other options.
    """
    if args.num_gpus is not None and args.num_gpus < 1:
        raise ConfigError(f"--num-gpus is {args.num_gpus}; write 1 or more")
    if args.hostfile is None:
        if args.num_gpus is not None:
            args.nproc_per_node = str(args.num_gpus)
        return
    slots = read_hostfile(Path(args.hostfile))
    here = [host for host in slots if _matches_machine_hostname(host)]
    if not here:
        raise ConfigError(
            f"--hostfile {args.hostfile} names {', '.join(slots)}, and this host is {socket.gethostname()}; "
            f"start the command on the hosts that it names, or add this one"
        )
    given = args.num_gpus or slots[here[0]]
    if given > slots[here[0]]:
        raise ConfigError(f"--num-gpus is {given}, but {here[0]} has slots={slots[here[0]]}; write fewer")
    args.nproc_per_node = str(given)
    args.nnodes = str(len(slots))
    if len(slots) > 1 and not args.rdzv_endpoint:
        first = next(iter(slots))
        args.rdzv_endpoint = format_endpoint(first, args.master_port or DEFAULT_PORT)
