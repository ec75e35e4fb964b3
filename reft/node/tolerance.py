"""How many more node losses the versions in memory survive, from where they really lie (P4)."""

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
    """The job's degrees, and the node that holds the newest version of each rank, OFFLINE or not;
    (None, {}) if there is no version."""
    held = [(shard, node) for node in nodes for shard in node.shards]
    if not held:
        return None, {}
    newest_shard, _ = max(held, key=lambda pair: pair[0].label)
    degrees = Degrees(*newest_shard.degrees)
    newest: dict[Coordinate, tuple[tuple[int, int], NodeReport]] = {}
    for shard, node in held:
        at = Coordinate(*shard.at)
        # A job that now has smaller degrees may have left shards of ranks that it has no more.
        inside = at.pp < degrees.pp and at.dp < degrees.dp and at.tp < degrees.tp
        if inside and (at not in newest or shard.label > newest[at][0]):
            newest[at] = shard.label, node
    return degrees, {at: node for at, (_, node) in newest.items()}


def read_scheme(nodes: Iterable[NodeReport]) -> str:
    """The protection of the newest version on any node; "" if unknown."""
    shards = [shard for node in nodes for shard in node.shards]
    return max(shards, key=lambda shard: shard.label).scheme if shards else ""


def tolerance_now(nodes: Sequence[NodeReport], *, without_quiet: bool = False) -> int | None:
    """Further node losses that every sharding group survives, by the real placement.

    Args:
        nodes: reports of all nodes; those that are OFFLINE count as lost.
        without_quiet: nodes that are quiet count as lost, too.

    Returns:
        -1 if more is lost already than the protection survives; None if there is no version, or its
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
                if n is None or n.seen is HealthSignal.OFFLINE or (without_quiet and n.quiet)
            )
            groups.add((domains, lost))
    try:
        return min(losses_left(domains, lost, scheme) for domains, lost in groups)
    except ReftError:  # a scheme of another release
        return None


@lru_cache(maxsize=1024)
def losses_left(nodes: tuple[str, ...], lost: frozenset[int], scheme: str) -> int:
    """Further node losses that one sharding group survives.

    Args:
        nodes: failure domain of each member.
        lost: members that are lost already.
        scheme: protection, such as "arc:2+aec".

    Returns:
        Below 0 if the group is lost.

    Raises:
        ReftError: there is no such scheme.
    """
    parsed = Scheme.parse(scheme)
    return tolerance_left(nodes, place_group(nodes, parsed.copies, parsed.parities), lost)
