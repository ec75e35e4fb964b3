"""Numbers on a launcher's command line: torchrun takes them as they come and stumbles over them later."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import Any

from torch.distributed.launcher.api import LaunchConfig

from reft.errors import ConfigError

_MOST_PORT = 65535
_SECONDS = (
    "timeout",
    "join_timeout",
    "last_call_timeout",
    "close_timeout",
    "heartbeat_timeout",
    "read_timeout",
    "connect_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
)
"""Keys of ``--rdzv-conf`` that hold a number."""


def check_numbers(args: argparse.Namespace, config: LaunchConfig) -> None:
    """Refuse what cannot be meant.

    Args:
        args: the command line.
        config: what torchrun made of it.

    Raises:
        ConfigError: names the option, what was found and what is expected.
    """
    _at_least("--nproc-per-node", config.nproc_per_node, 1)
    _at_least("--nnodes", config.min_nodes, 1)
    _at_least("--node-rank", args.node_rank, 0)
    _at_least("--spares", args.spares, 0)
    if args.node_rank >= config.max_nodes + args.spares:
        raise ConfigError(
            f"--node-rank is {args.node_rank}; write 0 to {config.max_nodes + args.spares - 1}: --nnodes is "
            f"{args.nnodes}"
        )
    _at_least("--max-peer-restarts", args.max_peer_restarts, 0)
    _port("--master-port", args.master_port)
    if not (args.monitor_interval > 0 and math.isfinite(args.monitor_interval)):
        raise ConfigError(
            f"--monitor-interval is {args.monitor_interval:g}; write seconds above 0, such as 0.1"
        )
    for name, secs in (("--grace-secs", args.grace_secs), ("--stop-secs", args.stop_secs)):
        if secs is not None and not 0 <= secs < math.inf:
            raise ConfigError(f"{name} is {secs:g}; write seconds from 0 on")
    _check_rendezvous(config.rdzv_configs)


def left_to_train(there: int, spares: int, named_by: str) -> str:
    """``--nnodes`` where so many nodes are there, and some of them are spares.

    Raises:
        ConfigError: none would train.
    """
    _at_least("--spares", spares, 0)
    if spares >= there:
        raise ConfigError(
            f"--spares is {spares}, but {named_by} has {there} nodes, of which one at least has to train: "
            f"write {there - 1} or fewer"
        )
    return str(there - spares)


def _check_rendezvous(conf: Mapping[str, Any]) -> None:
    for key in _SECONDS:
        if key not in conf:
            continue
        try:
            good = 0 < float(conf[key]) < math.inf
        except (TypeError, ValueError):
            good = False
        if not good:
            raise ConfigError(f"--rdzv-conf {key} is {conf[key]!r}; write a number above 0")


def _at_least(option: str, found: int, least: int) -> None:
    if found < least:
        raise ConfigError(f"{option} is {found}; write {least} or more")


def _port(option: str, found: int) -> None:
    if not 0 <= found <= _MOST_PORT:
        raise ConfigError(f"{option} is {found}; write a port from 0 (any free one) to {_MOST_PORT}")
