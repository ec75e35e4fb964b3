"""Redundant placement on the ring of a sharding group, and the tolerance that follows from it.

- ARC (REFT paper, asynchronous redundant copying): member d keeps its own shard and the shards
  of its k ring successors. All of them are copied from the member's own replica, so no bytes
  cross the network.
- ``peer`` (Gemini): state that only one member owns (its ZeRO partition, its host state) is sent to
  its k ring predecessors.

In both, the bytes of member d end up on its k ring predecessors, so one map serves both. With an
erasure code that survives m losses, parities replace the copies of replicated state, and state with
a single owner is still copied m times.
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
    """Placement of the members' bytes in one sharding group."""

    # Members in ring order; copies of a member's bytes are on its predecessors
    ring: tuple[int, ...]
    copies: int  # Number k of redundant copies of every shard
    parities: int = 0  # Parities of every stripe of the replicated section; 0 for no erasure code

    @property
    def size(self) -> int:
        return len(self.ring)

    @property
    def scheme(self) -> Scheme:
        return Scheme(self.copies, self.parities)

    def code(self) -> Code:
        """Return the code of the replicated section.

        Raises:
            ConfigError: the group is too small for the scheme.
        """
        return make_code(self.scheme, self.ring)

    def kept_by(self, member: int) -> tuple[int, ...]:
        """Return the members whose bytes ``member`` stores: itself first, then its ring
        successors."""
        at = self.ring.index(member)
        return tuple(self.ring[(at + i) % self.size] for i in range(self._span))

    def holders_of(self, member: int) -> tuple[int, ...]:
        """Return the members that store the bytes of ``member``: itself first, then its ring
        predecessors.
        """
        at = self.ring.index(member)
        return tuple(self.ring[(at - i) % self.size] for i in range(self._span))

    @property
    def _span(self) -> int:
        return min(self.copies + self.parities + 1, self.size)


def place_group(nodes: Sequence[str], copies: int, parities: int = 0) -> GroupPlacement:
    """Choose the ring order of a sharding group, so that neighbours are on different nodes if
    possible.

    Args:
        nodes: node of each member.
        copies: redundant copies of every shard.
        parities: parities of every stripe.
    """
    return GroupPlacement(ring=ring_order(nodes), copies=copies, parities=parities)


def fatal_nodes(
    nodes: Sequence[str], placement: GroupPlacement, gone: Collection[int] = ()
) -> tuple[str, ...]:
    """Return a smallest set of nodes whose loss destroys bytes of the group (P4).

    The set is computed from the real nodes, not from the scheme's name. State that only one member
    owns is lost if all members that hold it are lost. For replicated state under an erasure code,
    the rank of the remaining equations is tested, except in two cases with a known result:

    - If each member has its own node, no set with fewer nodes than the members that hold one
      member's bytes is fatal, because the number of members that hold a member's bytes exceeds the
      number of losses that are always survived (:attr:`reft.protect.codes.Scheme.certain_losses`).
    - Under parities alone, every member has a piece of every stripe. A loss is therefore fatal
      exactly if more members are lost than a stripe has parities.

    Args:
        nodes: node of each member.
        placement: placement of the group.
        gone: members that are lost already.

    Returns:
        The nodes; empty if the loss of the members in ``gone`` alone is fatal.

    Raises:
        ConfigError: the group is too small for the erasure code.
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
    """Return the smallest set of nodes that has more than ``members`` members; all nodes if no set
    has."""
    found: list[str] = []
    for node in sorted(set(nodes), key=lambda n: (-nodes.count(n), nodes.index(n))):
        if sum(nodes.count(n) for n in found) > members:
            break
        found.append(node)
    return tuple(found)


def tolerance_left(
    nodes: Sequence[str], placement: GroupPlacement, gone: Collection[int] = ()
) -> int:
    """Return the largest f such that the group survives *every* loss of f further nodes (P4).

    The result is 0 if members share a node with their copies. A group never survives the loss of
    all its nodes.

    Args:
        nodes: node of each member.
        placement: placement of the group.
        gone: members that are lost already.

    Returns:
        The number f; -1 if the loss of the members in ``gone`` alone is fatal.
    """
    return len(fatal_nodes(nodes, placement, gone)) - 1


def tolerance(topology: Topology, copies: int, parities: int = 0) -> int:
    """Return the number of simultaneous node losses that every sharding group of the job
    survives.

    Raises:
        ConfigError: the groups are too small for the scheme.
    """
    return len(fatal(topology, copies, parities)) - 1


def fatal(topology: Topology, copies: int, parities: int = 0) -> tuple[str, ...]:
    """Return a smallest set of nodes whose loss some sharding group of the job does not survive.

    Raises:
        ConfigError: the groups are too small for the scheme.
    """
    return min(
        (
            fatal_nodes(nodes, place_group(nodes, copies, parities))
            for nodes in group_patterns(topology)
        ),
        key=len,
    )


def group_patterns(topology: Topology) -> tuple[tuple[str, ...], ...]:
    """Return the nodes of one sharding group for each distinct pattern in which members share
    nodes.

    Tolerance depends only on the pattern, and most groups of a job have the same pattern.
    """
    found: dict[tuple[int, ...], tuple[str, ...]] = {}
    for group in topology.groups():
        nodes = topology.group_nodes(*group)
        found.setdefault(tuple(nodes.index(n) for n in nodes), nodes)
    return tuple(found.values())


def surviving_schemes(topology: Topology) -> tuple[Scheme, ...]:
    """Return the cheapest schemes with which a job whose sharding groups have several members on
    one node survives the loss of any node.

    Three kinds of schemes are tested: copies, copies with parities, and parities alone.
    """
    together = max(nodes.count(node) for nodes in group_patterns(topology) for node in set(nodes))
    tried = (Scheme(1), Scheme(1, 1), Scheme(0, together))
    fitting = (s for s in tried if s.why_no_room(topology.degrees.dp) is None)
    return tuple(s for s in fitting if tolerance(topology, s.copies, s.parities))


# Fewest arenas of a rank: one for the committed version, one for the version being written (P3)
LEAST_ARENAS = 2


@dataclass(frozen=True)
class ProtectionLevel:
    """A level of protection: a scheme, and the number of versions (arenas) that each rank keeps."""

    scheme: Scheme
    arenas: int

    def __str__(self) -> str:
        return f"{self.scheme} with {self.arenas} versions"


def ladder(scheme: Scheme, arenas: int, members: int) -> tuple[ProtectionLevel, ...]:
    """Return the levels of protection, from the requested one down to the cheapest.

    Args:
        scheme: requested scheme.
        arenas: requested number of versions that each rank keeps.
        members: size of the sharding groups.
    """
    levels = [ProtectionLevel(scheme, count) for count in range(arenas, LEAST_ARENAS, -1)]
    least = min(arenas, LEAST_ARENAS)
    return (*levels, *(ProtectionLevel(s, least) for s in (scheme, *_cheaper(scheme, members))))


def _cheaper(scheme: Scheme, members: int) -> Iterator[Scheme]:
    """Yield schemes that need less memory than ``scheme``, in decreasing order of memory.

    Each scheme stores less of the replicated section than the previous one, and no more copies of
    owned state. Of several such schemes, the next one is that which survives most losses; of equal
    ones, that which needs most memory.
    """
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


# -- probability that a job survives ---------------------------------------------------------------
#
# A node survives t seconds with probability q(t) = exp(-(t/scale)^shape), the product over
# independent causes (hardware, software). With groups of D nodes that survive any k losses
# (REFT paper, survival):
#
#     P_reft(k) = [ sum over j <= k of C(D,j) (1-q)^j q^(D-j) ]^(N/D)        P_ckpt = q^N
#
# P_reft is exact for AEC and Reed-Solomon. For ARC it is a lower bound, since ARC also survives
# many losses of more than k nodes.


_PRECISION = 1e-9


@dataclass(frozen=True)
class Weibull:
    """Weibull distribution of the time to a node's failure from one cause.

    The λ of the published form exp(-λ t^c) is ``scale_secs ** -shape``."""

    # Time by which a node has failed with probability 1 - 1/e; for shape 1, the mean time between
    # failures of one node
    scale_secs: float
    # 1 for a constant rate; below 1, the rate decreases with time, above 1 it increases
    shape: float = 1.0

    def __post_init__(self) -> None:
        if self.scale_secs <= 0 or self.shape <= 0:
            raise ConfigError(f"found {self}; expected a positive scale and a positive shape")

    def survival(self, secs: float) -> float:
        """Return the probability that a node still works after ``secs`` seconds."""
        return exp(-((max(0.0, secs) / self.scale_secs) ** self.shape))


def node_survival(secs: float, causes: Sequence[Weibull]) -> float:
    """Return q(t), the probability that a node has not failed from any cause after ``secs``
    seconds."""
    return prod(cause.survival(secs) for cause in causes)


def losses_within(size: int, tolerance: int) -> tuple[int, ...]:
    """Return, for each number of lost nodes, how many sets of that many nodes a group survives,
    if it survives the loss of up to ``tolerance`` nodes and no more.
    """
    return tuple(comb(size, j) if j <= tolerance else 0 for j in range(size + 1))


def protected_survival(q: float, nodes: int, survived: Sequence[int]) -> float:
    """Return P_reft, the probability that all ``nodes / D`` groups survive if each node survives
    with probability ``q``.

    Args:
        q: probability that a node survives.
        nodes: number of nodes.
        survived: result of :func:`losses_within`; the group size D is its length minus 1.
    """
    size = len(survived) - 1
    if size < 1 or nodes % size:
        raise ValueError(f"found {nodes} nodes in groups of {size}; expected a multiple")
    group = sum(count * (1 - q) ** j * q ** (size - j) for j, count in enumerate(survived))
    return float(group ** (nodes // size))


def persist_interval_secs(
    target: float, causes: Sequence[Weibull], nodes: int, survived: Sequence[int]
) -> float:
    """Return the advised interval between checkpoints on storage, in seconds: the t at which
    P_reft(t) = ``target``.

    Within this interval, memory alone survives with at least the target probability.

    Args:
        target: probability between 0 and 1.
        causes: causes of failure of a node.
        nodes: number of nodes.
        survived: result of :func:`losses_within`.

    Raises:
        ConfigError: the target or the causes are invalid.
    """
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
