"""Redundant placement on the ring of a sharding group, and the tolerance that follows from it.

ARC (paper section on asynchronous redundant copying, REFERENCE 1.4): member d keeps its own shard
and the shards of its k ring successors, all cut from its own replica, so no bytes cross the network.
``peer`` (Gemini): what a member alone owns (its ZeRO partition, its host state) is sent to its k
ring predecessors. Both therefore have the same holders, and one map serves for both. Under an erasure
code parities stand in for copies of replicated state; what a member alone owns is still copied to as many
peers as the code survives losses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from reft.backoff import Backoff
from reft.grid import Topology, ring_order
from reft.protect.codes import Code, Scheme, make_code
from reft.protect.decode import fatal_loss, survives


@dataclass(frozen=True)
class GroupPlacement:
    """Who keeps whose bytes in one sharding group of ``size`` members."""

    ring: tuple[int, ...]  # members in ring order; the copies of a member live on its predecessors
    copies: int  # redundant copies of every shard (k); 0 means none
    parities: int = 0  # parities of every stripe of the replicated section; 0 means no erasure code

    @property
    def size(self) -> int:
        return len(self.ring)

    @property
    def scheme(self) -> Scheme:
        return Scheme(self.copies, self.parities)

    def code(self) -> Code:
        """How the replicated section is protected. Raises ConfigError where the group is too small."""
        return make_code(self.scheme, self.ring)

    def kept_by(self, member: int) -> tuple[int, ...]:
        """Members whose own bytes ``member`` keeps: itself first, then its ring successors."""
        at = self.ring.index(member)
        return tuple(self.ring[(at + i) % self.size] for i in range(self._span))

    def holders_of(self, member: int) -> tuple[int, ...]:
        """Members that keep the own bytes of ``member``: itself first, then its ring predecessors."""
        at = self.ring.index(member)
        return tuple(self.ring[(at - i) % self.size] for i in range(self._span))

    @property
    def _span(self) -> int:
        return min(self.copies + self.parities + 1, self.size)


def place_group(nodes: Sequence[str], copies: int, parities: int = 0) -> GroupPlacement:
    """Placement of a sharding group whose member d sits on ``nodes[d]``. Pure and deterministic."""
    return GroupPlacement(ring=ring_order(nodes), copies=copies, parities=parities)


def fatal_nodes(nodes: Sequence[str], placement: GroupPlacement) -> tuple[str, ...]:
    """One of the smallest sets of nodes whose loss takes some member's bytes for good (P4).

    Computed from the real nodes, not from the scheme's name. What a member alone owns is lost with all its
    holders; replicated state under an erasure code by the rank of what is left, except where that is known:

    - With a node for each member nothing smaller is fatal than all holders of a member: those are one more
      than the members that may be lost in any case (:attr:`reft.protect.codes.Scheme.certain_losses`).
    - Under parities alone every member has a piece of every stripe, so that any loss of more members than
      there are parities is fatal, and no other: the fewest nodes that hold so many.

    Raises:
        ConfigError: the group has no room for an erasure code.
    """
    holders = ({nodes[h] for h in placement.holders_of(m)} for m in range(len(nodes)))
    fewest = min(holders, key=len)
    lost = tuple(sorted(fewest))
    if not placement.parities:
        return lost
    placement.scheme.check_room(len(nodes))
    if len(set(nodes)) == len(nodes):
        return lost
    coded = fatal_loss(placement.code(), nodes) if placement.copies else _fullest(nodes, placement.parities)
    return coded if len(coded) < len(lost) else lost


def _fullest(nodes: Sequence[str], members: int) -> tuple[str, ...]:
    """The fewest nodes that hold more than so many members, or all nodes."""
    found: list[str] = []
    for node in sorted(set(nodes), key=lambda n: (-nodes.count(n), nodes.index(n))):
        found.append(node)
        if sum(nodes.count(n) for n in found) > members:
            break
    return tuple(found)


def group_tolerance(nodes: Sequence[str], placement: GroupPlacement) -> int:
    """Largest f such that *every* loss of f nodes leaves one holder of every member's bytes (P4).

    0 where members share a node with their copies. A group never "survives" the loss of all its nodes.
    """
    return len(fatal_nodes(nodes, placement)) - 1


def tolerance_left(nodes: Sequence[str], placement: GroupPlacement, lost: Collection[int]) -> int:
    """Largest f such that every loss of f *further* nodes leaves the group recoverable, when the ``lost``
    members are gone already; -1: what is gone cannot be recovered from what is left. Without any this is
    :func:`group_tolerance`."""
    gone = set(lost)
    left = [n for m, n in enumerate(nodes) if m not in gone]
    if not left:
        return -1
    if not gone:
        return group_tolerance(nodes, placement)
    holders = ({nodes[h] for h in placement.holders_of(m) if h not in gone} for m in range(len(nodes)))
    owned = min(map(len, holders)) - 1
    if owned < 0 or not placement.parities:
        return owned
    if not placement.copies:
        spare = placement.parities - len(gone)
        return min(owned, len(_fullest(left, spare)) - 1) if spare >= 0 else -1
    code, certain = placement.code(), placement.scheme.certain_losses
    for count in range(owned + 1):
        for more in combinations(sorted(set(left)), count):
            dead = gone | {m for m, n in enumerate(nodes) if n in more}
            if len(dead) > certain and not survives(code, dead):
                return count - 1
    return owned


def tolerance(topology: Topology, copies: int, parities: int = 0) -> int:
    """Node losses that every sharding group of the job survives at once: the minimum over groups. Raises
    ConfigError where the groups have no room for the scheme."""
    return len(fatal(topology, copies, parities)) - 1


def fatal(topology: Topology, copies: int, parities: int = 0) -> tuple[str, ...]:
    """A smallest set of nodes whose loss some sharding group of the job does not survive. Raises ConfigError
    as above."""
    return min(
        (fatal_nodes(nodes, place_group(nodes, copies, parities)) for nodes in group_patterns(topology)),
        key=len,
    )


def group_patterns(topology: Topology) -> tuple[tuple[str, ...], ...]:
    """The nodes of one sharding group for each way in which members sit together: what a placement survives
    depends on nothing else, and most groups of a job are alike."""
    found: dict[tuple[int, ...], tuple[str, ...]] = {}
    for group in topology.groups():
        nodes = topology.group_nodes(*group)
        found.setdefault(tuple(nodes.index(n) for n in nodes), nodes)
    return tuple(found.values())


def surviving_schemes(topology: Topology) -> tuple[Scheme, ...]:
    """Schemes under which every sharding group survives the loss of one of these nodes, where members of a
    group share one: of copies, of copies and parities, and of parities alone the one that keeps least."""
    together = max(nodes.count(node) for nodes in group_patterns(topology) for node in set(nodes))
    tried = (Scheme(1), Scheme(1, 1), Scheme(0, together))
    fitting = (s for s in tried if s.why_no_room(topology.degrees.dp) is None)
    return tuple(s for s in fitting if tolerance(topology, s.copies, s.parities))


LEAST_ARENAS = 2  # the committed version, and the one that is being written (P3)

CALM_SECS = 10.0
_MOST_CALMS = 64
_ROOM_AFTER_RISE = 1.5  # a level up must leave so many margins free, so that it is not given up at once


@dataclass(frozen=True)
class Level:
    """One way to keep versions: redundancy, and versions held per rank."""

    scheme: Scheme
    arenas: int

    def __str__(self) -> str:
        return f"{self.scheme} with {self.arenas} versions"


def ladder(scheme: Scheme, arenas: int, members: int) -> tuple[Level, ...]:
    """From what is wanted down to the least."""
    levels = [Level(scheme, count) for count in range(arenas, LEAST_ARENAS, -1)]
    least = min(arenas, LEAST_ARENAS)
    return (*levels, *(Level(s, least) for s in (scheme, *_cheaper(scheme, members))))


def _cheaper(scheme: Scheme, members: int) -> Iterator[Scheme]:
    """Schemes that keep less of the replicated section and no more copies of owned state, each less than the
    one before: those that survive most first, of equal ones the smallest step."""
    losses = scheme.copies + scheme.parities
    while True:
        known = [Scheme(a, t - a) for t in range(losses + 1) for a in range(t + 1)]
        fitting = (s for s in known if s.why_no_room(members) is None)
        less = [s for s in fitting if s.share(members) < scheme.share(members)]
        if not less:
            return
        scheme = max(less, key=lambda s: (s.copies + s.parities, s.share(members), s.copies))
        losses = scheme.copies + scheme.parities
        yield scheme


class MemoryWatch:
    """Which level one rank wants, from how much memory its node has left.

    Down at once when less than the margin is free, a level at a time. Up when the next level would leave half
    as much again as the margin, and has for ``calm_secs``; that while doubles whenever what came back had to
    be given up again."""

    def __init__(self, margin_bytes: int, calm_secs: float = CALM_SECS) -> None:
        self.margin_bytes = margin_bytes
        self._calm = Backoff(calm_secs, _MOST_CALMS * calm_secs)
        self._calm_since: float | None = None
        self._rose_at: float | None = None

    def wanted_level(
        self, level: int, levels: int, free_bytes: int, growth: Callable[[], int], now: float
    ) -> int:
        """The level to be on. ``level``: the one in force; 0 is what is wanted. ``levels``: of the ladder.
        ``free_bytes``: memory of the node that nobody has taken. ``growth``: bytes that the node would
        take for the next level up. ``now``: seconds of a monotonic clock."""
        if free_bytes < self.margin_bytes:
            self._calm_since = None
            return min(level + 1, levels - 1)
        if level == 0 or free_bytes - growth() < _ROOM_AFTER_RISE * self.margin_bytes:
            self._calm_since = None
            return level
        if self._calm_since is None:
            self._calm_since = now
        return level - 1 if now - self._calm_since >= self._calm.pause else level

    def moved(self, before: int, after: int, now: float) -> None:
        """All ranks are on another level."""
        self._calm_since = None
        if after < before:
            self._rose_at = now
        elif self._rose_at is not None:
            flapped = now - self._rose_at < 2 * self._calm.pause
            if flapped:
                self._calm.failed()
            else:
                self._calm.reset()
            self._rose_at = None
