"""Where the ranks of a job are, and which of them fail as one (P4)."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from reft.control.control import ControlGroup
from reft.env import (
    ENV_NODE_DECLARED,
    ENV_NODE_ID,
)
from reft.grid import Coordinate, Degrees, Topology
from reft.naming import kernel_id
from reft.state.codec import decode, encode


@dataclass(frozen=True)
class NodeIdentity:
    node: str  # what the launcher calls the node, else the host's name
    # somebody gave the node this name (``--node-id``), and thereby says that it fails by itself
    declared: bool
    host_name: str
    kernel: str  # equal for all processes under one kernel, containers too

    @classmethod
    def here(cls) -> NodeIdentity:
        host = socket.gethostname()
        given = os.environ.get(ENV_NODE_ID)
        return cls(
            given or host,
            bool(given) and os.environ.get(ENV_NODE_DECLARED) != "0",
            host,
            kernel_id(),
        )


def read_hosts(places: Sequence[NodeIdentity]) -> tuple[str, ...]:
    """What fails as one (P4), for each place: the declared node, else the host, by the name that
    its first rank gives it. Pure."""
    names: dict[str, str] = {}
    for place in places:
        taken = place.host_name in names.values()
        names.setdefault(
            place.kernel, f"{place.host_name}-{place.kernel[:8]}" if taken else place.host_name
        )
    return tuple(place.node if place.declared else names[place.kernel] for place in places)


def declared_on_one_host(places: Sequence[NodeIdentity]) -> tuple[str, ...]:
    """Declared nodes that share a host with another one: what the tolerance counts is then a claim.
    Pure."""
    nodes = {place.node: place.kernel for place in places if place.declared}
    kernels = list(nodes.values())
    return tuple(sorted(node for node, kernel in nodes.items() if kernels.count(kernel) > 1))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def gather_topology(
    control: ControlGroup, coordinate: Coordinate, degrees: Degrees
) -> tuple[Topology, tuple[NodeIdentity, ...]]:
    """Tell all ranks where this one is; the topology, and the place of every global rank.
    Collective."""
    at = (coordinate.pp, coordinate.dp, coordinate.tp)
    mine = encode([list(at), list(astuple(NodeIdentity.here()))])
    facts = [decode(data) for data in control.gather_bytes(mine)]
    places = tuple(NodeIdentity(*place) for _, place in facts)
    topology = Topology(
        degrees=degrees,
        coordinates=tuple(Coordinate(*at) for at, _ in facts),
        nodes=tuple(place.node for place in places),
        hosts=read_hosts(places),
    )
    return topology, places
