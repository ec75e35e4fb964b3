"""Redundant placement on the ring of a sharding group, and the tolerance that follows from it.

ARC (REFT paper, section on asynchronous redundant copying): member d keeps its own shard
and the shards of its k ring successors, all cut from its own replica, so no bytes cross the
network. ``peer`` (Gemini): what a member alone owns (its ZeRO partition, its host state) is sent to
its k ring predecessors. Both therefore have the same holders, and one map serves for both. Under an
erasure code parities stand in for copies of replicated state; what a member alone owns is still
copied to as many peers as the code survives losses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import comb, exp, prod

from reft.errors import ConfigError
from reft.grid import Topology, ring_order
from reft.protect.codes import Code, Scheme, fatal_loss, make_code


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
        """How the replicated section is protected. Raises ConfigError where the group is too
        small."""
        return make_code(self.scheme, self.ring)

    def kept_by(self, member: int) -> tuple[int, ...]:
        """Members whose own bytes ``member`` keeps: itself first, then its ring successors."""
        at = self.ring.index(member)
        return tuple(self.ring[(at + i) % self.size] for i in range(self._span))

    def holders_of(self, member: int) -> tuple[int, ...]:
        """Members that keep the own bytes of ``member``: itself first, then its ring
        predecessors."""
        at = self.ring.index(member)
        return tuple(self.ring[(at - i) % self.size] for i in range(self._span))

    @property
    def _span(self) -> int:
        return min(self.copies + self.parities + 1, self.size)


def place_group(nodes: Sequence[str], copies: int, parities: int = 0) -> GroupPlacement:
    """Placement of a sharding group whose member d sits on ``nodes[d]``. Pure and deterministic."""
    return GroupPlacement(ring=ring_order(nodes), copies=copies, parities=parities)


def fatal_nodes(
    nodes: Sequence[str], placement: GroupPlacement, gone: Collection[int] = ()
) -> tuple[str, ...]:
    """One of the smallest sets of nodes whose loss takes some member's bytes for good (P4), where
    the members ``gone`` are lost already; empty: these have taken them.

    Computed from the real nodes, not from the scheme's name. What a member alone owns is lost with
    all its holders; replicated state under an erasure code by the rank of what is left, except
    where that is known:

    - With a node for each member nothing smaller is fatal than all holders of a member: those are
      one more than the members that may be lost in any case
      (:attr:`reft.protect.codes.Scheme.certain_losses`).
    - Under parities alone every member has a piece of every stripe, so that any loss of more
      members than there are parities is fatal, and no other: the fewest nodes that hold so many.

    Raises:
        ConfigError: the group has no room for an erasure code.
    """
    holders = (
        {nodes[h] for h in placement.holders_of(m) if h not in gone} for m in range(len(nodes))
    )
    fewest = min(holders, key=len)
    lost = tuple(sorted(fewest))
    if not placement.parities:
        return lost
    placement.scheme.check_room(len(nodes))
    if not gone and len(set(nodes)) == len(nodes):
        return lost
    if placement.copies:
        return min(lost, fatal_loss(placement.code(), nodes, gone, most=len(lost)), key=len)
    left = [node for member, node in enumerate(nodes) if member not in gone]
    return min(lost, _fullest(left, placement.parities - len(gone)), key=len)


def _fullest(nodes: Sequence[str], members: int) -> tuple[str, ...]:
    """The fewest nodes that hold more than so many members, or all nodes."""
    found: list[str] = []
    for node in sorted(set(nodes), key=lambda n: (-nodes.count(n), nodes.index(n))):
        if sum(nodes.count(n) for n in found) > members:
            break
        found.append(node)
    return tuple(found)


def tolerance_left(
    nodes: Sequence[str], placement: GroupPlacement, gone: Collection[int] = ()
) -> int:
    """Largest f such that *every* loss of f further nodes leaves the group recoverable, when the
    members ``gone`` are lost already (P4); -1: it is not.

    0 where members share a node with their copies. A group never "survives" the loss of all its
    nodes.
    """
    return len(fatal_nodes(nodes, placement, gone)) - 1


def tolerance(topology: Topology, copies: int, parities: int = 0) -> int:
    """Node losses that every sharding group of the job survives at once: the minimum over groups.
    Raises ConfigError where the groups have no room for the scheme."""
    return len(fatal(topology, copies, parities)) - 1


def fatal(topology: Topology, copies: int, parities: int = 0) -> tuple[str, ...]:
    """A smallest set of nodes whose loss some sharding group of the job does not survive. Raises
    ConfigError as above."""
    return min(
        (
            fatal_nodes(nodes, place_group(nodes, copies, parities))
            for nodes in group_patterns(topology)
        ),
        key=len,
    )


def group_patterns(topology: Topology) -> tuple[tuple[str, ...], ...]:
    """The nodes of one sharding group for each way in which members sit together: what a placement
    survives depends on nothing else, and most groups of a job are alike."""
    found: dict[tuple[int, ...], tuple[str, ...]] = {}
    for group in topology.groups():
        nodes = topology.group_nodes(*group)
        found.setdefault(tuple(nodes.index(n) for n in nodes), nodes)
    return tuple(found.values())


def surviving_schemes(topology: Topology) -> tuple[Scheme, ...]:
    """Schemes under which every sharding group survives the loss of one of these nodes, where
    members of a group share one: of copies, of copies and parities, and of parities alone the one
    that keeps least."""
    together = max(nodes.count(node) for nodes in group_patterns(topology) for node in set(nodes))
    tried = (Scheme(1), Scheme(1, 1), Scheme(0, together))
    fitting = (s for s in tried if s.why_no_room(topology.degrees.dp) is None)
    return tuple(s for s in fitting if tolerance(topology, s.copies, s.parities))


LEAST_ARENAS = 2  # the committed version, and the one that is being written (P3)


@dataclass(frozen=True)
class ProtectionLevel:
    """One way to keep versions: redundancy, and versions held per rank."""

    scheme: Scheme
    arenas: int

    def __str__(self) -> str:
        return f"{self.scheme} with {self.arenas} versions"


def ladder(scheme: Scheme, arenas: int, members: int) -> tuple[ProtectionLevel, ...]:
    """From what is wanted down to the least."""
    levels = [ProtectionLevel(scheme, count) for count in range(arenas, LEAST_ARENAS, -1)]
    least = min(arenas, LEAST_ARENAS)
    return (*levels, *(ProtectionLevel(s, least) for s in (scheme, *_cheaper(scheme, members))))


def _cheaper(scheme: Scheme, members: int) -> Iterator[Scheme]:
    """Schemes that keep less of the replicated section and no more copies of owned state, each less
    than the one before: those that survive most first, of equal ones the smallest step."""
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


# -- how likely a job survives: formulas -----------------------------------------------------------
#
# A node survives t seconds with probability q(t) = exp(-(t/scale)^shape), the product over
# independent causes (hardware, software). With groups of D nodes that survive any k losses
# (REFT paper, survival):
#
#     P_reft(k) = [ sum over j <= k of C(D,j) (1-q)^j q^(D-j) ]^(N/D)        P_ckpt = q^N
#
# This is exact for AEC and Reed-Solomon and a lower bound for ARC, which also survives many larger
# losses.


_PRECISION = 1e-9


@dataclass(frozen=True)
class Weibull:
    """One cause of failure of a node.

    The λ of the published form exp(-λ t^c) is ``scale_secs ** -shape``."""

    # time by which a node has failed with probability 1 - 1/e; for shape 1 the mean time between
    # failures of one node
    scale_secs: float
    # 1 for a constant rate; below 1 young nodes fail more often, above 1 old ones
    shape: float = 1.0

    def __post_init__(self) -> None:
        if self.scale_secs <= 0 or self.shape <= 0:
            raise ConfigError(f"found {self}; expected a positive scale and a positive shape")

    def survival(self, secs: float) -> float:
        """Probability that a node still works after ``secs`` seconds."""
        return exp(-((max(0.0, secs) / self.scale_secs) ** self.shape))


def node_survival(secs: float, causes: Sequence[Weibull]) -> float:
    """q(t): every cause must spare the node."""
    return prod(cause.survival(secs) for cause in causes)


def losses_within(size: int, tolerance: int) -> tuple[int, ...]:
    """Of every number of lost nodes, how many sets are survived if any ``tolerance`` are and no
    more."""
    return tuple(comb(size, j) if j <= tolerance else 0 for j in range(size + 1))


def protected_survival(q: float, nodes: int, survived: Sequence[int]) -> float:
    """P_reft: all of the ``nodes / D`` groups survive, each node with probability ``q``."""
    size = len(survived) - 1
    if size < 1 or nodes % size:
        raise ValueError(f"found {nodes} nodes in groups of {size}; expected a multiple")
    group = sum(count * (1 - q) ** j * q ** (size - j) for j, count in enumerate(survived))
    return float(group ** (nodes // size))


def persist_interval_secs(
    target: float, causes: Sequence[Weibull], nodes: int, survived: Sequence[int]
) -> float:
    """The advised interval between checkpoints on storage: the t at which P_reft(t) meets
    ``target``, between 0 and 1. Within it, memory alone carries the job with at least that
    probability."""
    if not 0 < target < 1 or not causes:
        raise ConfigError(
            f"found a target survival of {target} and {len(causes)} causes of failure; expected a "
            "target above 0 and below 1, such as 0.999, and at least one cause"
        )

    def met(secs: float) -> bool:
        return protected_survival(node_survival(secs, causes), nodes, survived) >= target

    if not met(0.0):
        raise ConfigError(
            f"found a group that survives nothing, not even without losses: {tuple(survived)}"
        )
    low = high = min(cause.scale_secs for cause in causes)
    while not met(low):
        low /= 2
    while met(high):
        high *= 2
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if met(middle) else (low, middle)
    return low
