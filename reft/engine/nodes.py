"""Finds the node of every rank, and the ranks that fail together (P4)."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from reft.control.control import ControlGroup
from reft.env import (
    ENV_NODE_DECLARED,
    ENV_NODE_ID,
    ENV_RACK,
    ENV_SLURM_ADDRESS,
    ENV_SLURM_PATTERN,
)
from reft.grid import Coordinate, Degrees, Topology
from reft.naming import kernel_id
from reft.state.codec import decode, encode


@dataclass(frozen=True)
class NodeIdentity:
    """The node of one rank.

    Attributes:
        node: name given by the launcher, otherwise the host's name.
        declared: True if the user has named the node (``--node-id``) and thereby declared that
            it fails independently of other nodes.
        host_name: name of the host.
        kernel: identity of the running kernel, equal for all processes and containers on a host.
        rack: rack or switch of the host; "" if unknown.
    """

    node: str
    declared: bool
    host_name: str
    kernel: str
    rack: str = ""

    @classmethod
    def here(cls) -> NodeIdentity:
        host = socket.gethostname()
        given = os.environ.get(ENV_NODE_ID)
        return cls(
            given or host,
            bool(given) and os.environ.get(ENV_NODE_DECLARED) != "0",
            host,
            kernel_id(),
            read_rack(),
        )


def read_rack() -> str:
    """Return the rack of this host, as the user has named it; otherwise the switches above it, as
    Slurm knows them; otherwise ""."""
    switches = os.environ.get(ENV_SLURM_PATTERN, "").split(".").count("switch")
    address = os.environ.get(ENV_SLURM_ADDRESS, "").split(".")
    return os.environ.get(ENV_RACK) or ".".join(address[:switches])


def read_hosts(places: Sequence[NodeIdentity]) -> tuple[str, ...]:
    """Return the failure domain of each rank (P4): the declared node, or the host if none is
    declared. Pure.

    All ranks of a host use the host name that its first rank sees, since containers may have
    host names of their own.
    """
    names: dict[str, str] = {}
    for place in places:
        taken = place.host_name in names.values()
        names.setdefault(
            place.kernel, f"{place.host_name}-{place.kernel[:8]}" if taken else place.host_name
        )
    return tuple(place.node if place.declared else names[place.kernel] for place in places)


def declared_on_one_host(places: Sequence[NodeIdentity]) -> tuple[str, ...]:
    """Return the declared nodes that share a host with another node. Pure. The tolerance relies
    on the user's declaration that they fail independently, which cannot be checked.
    """
    nodes = {place.node: place.kernel for place in places if place.declared}
    kernels = list(nodes.values())
    return tuple(sorted(node for node, kernel in nodes.items() if kernels.count(kernel) > 1))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def gather_topology(
    control: ControlGroup, coordinate: Coordinate, degrees: Degrees
) -> tuple[Topology, tuple[NodeIdentity, ...]]:
    """Gather coordinate and node of each rank. Collective.

    Returns:
        The topology, and the node of every global rank.
    """
    at = (coordinate.pp, coordinate.dp, coordinate.tp)
    message = encode([list(at), list(astuple(NodeIdentity.here()))])
    facts = [decode(reply) for reply in control.gather_bytes(message)]
    places = tuple(NodeIdentity(*place) for _, place in facts)
    topology = Topology(
        degrees=degrees,
        coordinates=tuple(Coordinate(*at) for at, _ in facts),
        nodes=tuple(place.node for place in places),
        hosts=read_hosts(places),
        racks=tuple(place.rack for place in places),
    )
    return topology, places
