"""Chooses the number of nodes with which a job trains, and the nodes that train. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, combinations, islice

from reft.errors import ReftError
from reft.grid import Coordinate, Degrees
from reft.node.tolerance import losses_left

_MOST_TRIES = 500  # Largest number of selections that are tried


@dataclass(frozen=True)
class Sizes:
    """Numbers of nodes with which the job can train, and the placement of its newest version.

    The launcher of the first node records this object with the newest version. A round (a start of
    the trainers on a chosen set of nodes) uses the largest possible number of nodes; the other
    nodes wait as spares. The chosen nodes must be able to recover the version from their memory.

    Attributes:
        fitting: possible numbers of nodes, derived from the newest version; empty before the first
            version, when any number may be possible.
        refused: numbers of nodes at which trainers refused to start.
        scheme: protection of the newest version, such as ``arc:2+aec``; "" if unknown.
        members: nodes that hold the newest version, by group rank.
        domains: number of the failure domain of each member.
        groups: for each distinct sharding group, the group ranks of its members' nodes.
    """

    fitting: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
    scheme: str = ""
    members: tuple[str, ...] = ()
    domains: tuple[int, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()

    def of(self, least: int, most: int) -> tuple[int, ...]:
        """Return the node counts from ``least`` to ``most`` on which the job might be able to run
        (not known to be impossible)."""
        return tuple(
            n
            for n in range(least, most + 1)
            if n not in self.refused and n in (self.fitting or (n,))
        )

    def largest(self, there: int, least: int, most: int) -> int:
        """Return the largest possible number of nodes if ``there`` nodes are present; 0 if no
        number is possible."""
        return max(self.of(least, min(most, there)), default=0)

    def refusing(self, nodes: int) -> Sizes:
        """Return a copy that records that trainers refused to start on the given number of
        nodes."""
        return replace(self, refused=tuple(sorted({*self.refused, nodes})))

    def staying(self, there: Sequence[str], least: int, most: int) -> frozenset[str] | None:
        """Select the nodes that train.

        Args:
            there: the present nodes.
            least: smallest number of nodes.
            most: largest number of nodes.

        Returns:
            The selected nodes. None if no number is possible, or if all present nodes together can
            recover the newest version but no possible selection of them can.
        """
        number = self.largest(len(there), least, most)
        if not number:
            return None
        old = [rank for rank, member in enumerate(self.members) if member in set(there)]
        new = [member for member in there if member not in set(self.members)]
        if number >= len(old):
            return frozenset([*(self.members[rank] for rank in old), *new[: number - len(old)]])
        choices = [frozenset(c) for c in islice(self._choices(old, number), _MOST_TRIES)]
        kept = next((c for c in choices if self._recovers(c)), None)
        if kept is None and self._recovers(frozenset(old)):
            return None
        return frozenset(self.members[rank] for rank in (choices[0] if kept is None else kept))

    def leaving(self, number: int, first: Collection[int] = ()) -> tuple[int, ...]:
        """Select nodes that may leave at the same time if no other node is lost.

        Args:
            number: number of nodes that leave.
            first: group ranks that are preferred.

        Returns:
            Group ranks of the leaving nodes, highest first. The remaining nodes can recover the
            version. Empty if no such selection is known.
        """
        everyone = frozenset(range(len(self.members)))
        stay, size = sorted(everyone - set(first)), len(everyone) - number
        if size < 1:
            return ()
        for kept in islice(chain([set(stay[:size])], self._choices(stay, size)), _MOST_TRIES):
            if len(kept) == size and self._recovers(frozenset(kept), unless_known=False):
                return tuple(sorted(everyone - kept, reverse=True))
        return ()

    def tolerance(self) -> int | None:
        """Number of lost nodes, whichever they are, that the version survives; None if unknown."""
        with suppress(ReftError):
            return min((self._tolerance(group, ()) for group in self.groups), default=None)
        return None

    def _choices(self, old: list[int], number: int) -> Iterator[set[int]]:
        """Yield selections of ``number`` of the given group ranks: first those of complete
        replicas, beginning with the lowest."""
        whole = [path for path in self._paths() if path <= set(old)]
        if sum(map(len, whole)) < number:
            kept: set[int] = set().union(*whole)
            whole = [{rank} for rank in old if rank not in kept]
        else:
            kept = set()
        for some in _shorten_sizes(whole, number - len(kept)):
            yield kept.union(*some)
        yield from map(set, combinations(old, number))

    def _paths(self) -> list[set[int]]:
        """Return the nodes of each replica. Replicas that share a node are merged."""
        found: list[set[int]] = []
        for ranks in map(set, zip(*self.groups, strict=True)):
            shared = [path for path in found if path & ranks]
            found = [path for path in found if not path & ranks] + [ranks.union(*shared)]
        return sorted(found, key=min)

    def _recovers(self, kept: frozenset[int], *, unless_known: bool = True) -> bool:
        """Return whether the memory of the given nodes suffices to recover the version."""
        if not self.scheme or not self.groups:
            return unless_known
        try:
            lost = {
                group: [at for at, rank in enumerate(group) if rank not in kept]
                for group in self.groups
            }
            return all(self._tolerance(group, places) >= 0 for group, places in lost.items())
        except ReftError:  # Only another release knows the scheme
            return unless_known

    def _tolerance(self, group: tuple[int, ...], lost: Sequence[int]) -> int:
        nodes = tuple(str(self.domains[rank]) for rank in group)
        return losses_left(nodes, frozenset(lost), self.scheme)


def _shorten_sizes(paths: list[set[int]], number: int) -> Iterator[Iterable[set[int]]]:
    """Yield selections of replicas with ``number`` nodes in total: first the lowest replicas, then
    replicas at equal distances, then all other selections."""
    each = {len(path) for path in paths}
    if len(each) != 1 or number % (one := each.pop()):
        return
    count, most = number // one, len(paths)
    if count <= most:
        apart = (
            [paths[(first + i * most // count) % most] for i in range(count)]
            for first in range(most)
        )
        yield from chain([paths[:count]], apart, combinations(paths, count))


def find_job_sizes(
    fitting: Iterable[int],
    nodes: Sequence[str],
    holders: Mapping[Coordinate, tuple[str, str]],
    degrees: Degrees,
    scheme: str,
) -> Sizes:
    """Derive :class:`Sizes` for the nodes of this round from the newest version.

    Args:
        fitting: possible numbers of nodes.
        nodes: nodes of this round, by group rank.
        holders: node id and failure domain of the node that holds each rank's part of the version.
        degrees: parallel degrees of the version.
        scheme: protection of the version.
    """
    groups = set()
    for pp in range(degrees.pp):
        for tp in range(degrees.tp):
            held = [holders.get(Coordinate(pp, dp, tp), ("", ""))[0] for dp in range(degrees.dp)]
            if not set(held) <= set(nodes):
                return Sizes(tuple(fitting))
            groups.add(tuple(nodes.index(node) for node in held))
    domain_of = dict(holders.values())
    domains = [domain_of.get(node, node) for node in nodes]
    numbers = tuple(domains.index(domain) for domain in domains)
    return Sizes(tuple(fitting), scheme=scheme, domains=numbers, groups=tuple(sorted(groups)))
