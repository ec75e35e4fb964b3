"""Computes how many further node losses the versions in memory survive (P4).

The result follows from the nodes that actually hold the versions, not from the requested scheme.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from reft.errors import ReftError
from reft.grid import Coordinate, Degrees
from reft.node.report import HealthSignal, NodeReport
from reft.protect.codes import Scheme
from reft.protect.placement import place_group, tolerance_left


def find_holders(
    nodes: Iterable[NodeReport],
) -> tuple[Degrees | None, dict[Coordinate, NodeReport]]:
    """Find the node that holds each rank's newest version, even if that node is OFFLINE.

    Returns:
        The job's parallel degrees, and each rank's node by the rank's coordinate; (None, {}) if
        there is no version.
    """
    held = [(shard, node) for node in nodes for shard in node.shards]
    if not held:
        return None, {}
    newest_shard, _ = max(held, key=lambda pair: pair[0].label)
    degrees = Degrees(*newest_shard.degrees)
    newest: dict[Coordinate, tuple[tuple[int, int], NodeReport]] = {}
    for shard, node in held:
        at = Coordinate(*shard.at)
        # After the job was made smaller, nodes may still hold shards of ranks that are gone.
        inside = at.pp < degrees.pp and at.dp < degrees.dp and at.tp < degrees.tp
        if inside and (at not in newest or shard.label > newest[at][0]):
            newest[at] = shard.label, node
    return degrees, {at: node for at, (_, node) in newest.items()}


def read_scheme(nodes: Iterable[NodeReport]) -> str:
    """Return the protection scheme of the newest version on any node; empty if unknown."""
    shards = [shard for node in nodes for shard in node.shards]
    return max(shards, key=lambda shard: shard.label).scheme if shards else ""


def tolerance_now(nodes: Sequence[NodeReport], *, without_quiet: bool = False) -> int | None:
    """Return how many further node losses every sharding group survives, wherever they occur.

    A sharding group consists of the data-parallel peers of one pipeline stage and tensor slice.

    Args:
        nodes: reports of all nodes; OFFLINE nodes count as lost.
        without_quiet: whether quiet nodes, which have not reported for a while, count as lost, too.

    Returns:
        The number; -1 if more nodes are lost than the protection survives; None if there is no
        version, or its protection is unknown.
    """
    degrees, holders = find_holders(nodes)
    scheme = read_scheme(nodes)
    if degrees is None or not scheme:
        return None
    groups = set()
    for pp in range(degrees.pp):
        for tp in range(degrees.tp):
            members = [holders.get(Coordinate(pp, dp, tp)) for dp in range(degrees.dp)]
            # P4: a rank without a report counts as lost, in a failure domain of its own.
            domains = tuple(f"?{dp}" if n is None else n.domain for dp, n in enumerate(members))
            lost = frozenset(
                dp
                for dp, n in enumerate(members)
                if n is None
                or n.observed_signal is HealthSignal.OFFLINE
                or (without_quiet and n.quiet)
            )
            groups.add((domains, lost))
    try:
        return min(losses_left(domains, lost, scheme) for domains, lost in groups)
    except ReftError:  # A scheme of another release
        return None


@lru_cache(maxsize=1024)
def losses_left(nodes: tuple[str, ...], lost: frozenset[int], scheme: str) -> int:
    """Return how many further node losses one sharding group survives.

    Args:
        nodes: failure domain of each member.
        lost: indices of the members that are already lost.
        scheme: protection scheme, such as "arc:2+aec".

    Returns:
        The number; -1 if too many members are already lost.

    Raises:
        ReftError: the scheme is unknown.
    """
    parsed = Scheme.parse(scheme)
    return tolerance_left(nodes, place_group(nodes, parsed.copies, parsed.parities), lost)
