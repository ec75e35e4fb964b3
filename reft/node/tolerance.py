"""How many more node losses the versions in memory survive, by their actual placement (P4)."""

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
    """Find the node that holds the newest version of each rank, whether OFFLINE or not.

    Returns:
        The job's degrees, and the nodes by coordinate; (None, {}) if there is no version.
    """
    held = [(shard, node) for node in nodes for shard in node.shards]
    if not held:
        return None, {}
    newest_shard, _ = max(held, key=lambda pair: pair[0].label)
    degrees = Degrees(*newest_shard.degrees)
    newest: dict[Coordinate, tuple[tuple[int, int], NodeReport]] = {}
    for shard, node in held:
        at = Coordinate(*shard.at)
        # If the job was made smaller, shards of ranks that it no longer has may be left.
        inside = at.pp < degrees.pp and at.dp < degrees.dp and at.tp < degrees.tp
        if inside and (at not in newest or shard.label > newest[at][0]):
            newest[at] = shard.label, node
    return degrees, {at: node for at, (_, node) in newest.items()}


def read_scheme(nodes: Iterable[NodeReport]) -> str:
    """The protection of the newest version on any node; empty if unknown."""
    shards = [shard for node in nodes for shard in node.shards]
    return max(shards, key=lambda shard: shard.label).scheme if shards else ""


def tolerance_now(nodes: Sequence[NodeReport], *, without_quiet: bool = False) -> int | None:
    """Further node losses that every sharding group survives, by the actual placement.

    Args:
        nodes: reports of all nodes; OFFLINE nodes count as lost.
        without_quiet: quiet nodes count as lost, too.

    Returns:
        -1 if more nodes are lost than the protection survives; None if there is no version, or its
        protection is unknown.
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
    """Further node losses that one sharding group survives.

    Args:
        nodes: failure domain of each member.
        lost: members that are already lost.
        scheme: protection, such as "arc:2+aec".

    Returns:
        A negative number if the group is lost.

    Raises:
        ReftError: the scheme is unknown.
    """
    parsed = Scheme.parse(scheme)
    return tolerance_left(nodes, place_group(nodes, parsed.copies, parsed.parities), lost)
