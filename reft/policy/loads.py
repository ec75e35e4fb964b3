"""What a protection scheme costs every rank: bytes to the host, bytes sent, host memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from reft.grid import ALIGNMENT_BYTES, aligned
from reft.memory.arena import reserved_bytes
from reft.protect.codes import Scheme
from reft.protect.rs import GRAIN_BYTES as CODED_ALIGNMENT_BYTES

MODEL_BYTES = 2
# bytes of a parameter under mixed precision with Adam: master, momentum and variance
OPTIMIZER_BYTES = 12
# bytes of a gradient in single precision, which recomputed optimizers (AOR) read
GRADIENT_BYTES = 4
CHECKSUM_BYTES = 8
LONGEST_SECS = 1.0  # of a host's optimizer step: a longer one may not end before the next version
_BESIDE_GRADIENTS_BYTES = 4096
"""Every parameter group begins at a multiple of 64 bytes, and an unscaled gradient brings its
factor."""


class PartitionSurvival(StrEnum):
    """How a ZeRO partition, which only its owner holds, survives the owner.

    PEER: it is sent to ring peers with every version. AOR: the same peers repeat the optimizer's
    step on the host, from the newest version and the gradients of the step (asynchronous optimizer
    recomputing).
    """

    PEER = "peer"
    AOR = "aor"


@dataclass(frozen=True)
class RankSections:
    """Bytes of one rank's state: equal on all data-parallel peers, its ZeRO partition, and reserved
    for encoded host state."""

    replicated_bytes: int
    owned_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True)
class LinkRates:
    """Rates by which ZeRO partitions are sent or recomputed: measured at attach on the slowest
    rank, or planned."""

    copy_bytes_per_sec: float  # from the device to its host
    peer_bytes_per_sec: float  # from a host to those of its ring peers
    adam_parameters_per_sec: float  # stepped by one core of a host
    free_cores: int  # cores that a rank does not train on

    def partition_secs(self, parameters: float) -> tuple[float, float]:
        """Seconds of a step if this many parameters of a rank are sent, and if as many of its
        peers' are recomputed: copies of gradients, and the optimizer unless a free core steps it in
        time."""
        sent_secs = parameters * OPTIMIZER_BYTES / self.peer_bytes_per_sec
        copied_secs = parameters * GRADIENT_BYTES / self.copy_bytes_per_sec
        host_secs = parameters / self.adam_parameters_per_sec
        beside_training = self.free_cores > 0 and host_secs <= LONGEST_SECS
        return sent_secs, copied_secs + (0.0 if beside_training else host_secs)


@dataclass(frozen=True)
class TrafficEstimate:
    """Bytes of one version on one rank.

    Copied from the device: its part of the replicated section, copies and parities of that, its
    partition, and gradients of the partitions that it keeps for others (AOR). Sent: owned and host
    state for ring peers. Memory: of the host, for all versions that are kept.
    """

    shard_bytes: int
    redundant_bytes: int
    owned_bytes: int
    gradient_bytes: int
    sent_bytes: int
    memory_bytes: int

    @property
    def to_host_bytes(self) -> int:
        """From the device to the host, in every step with a snapshot."""
        return self.shard_bytes + self.redundant_bytes + self.owned_bytes + self.gradient_bytes

    @property
    def moved_bytes(self) -> int:
        return self.to_host_bytes + self.sent_bytes


def group_loads(
    sections: Sequence[RankSections],
    ring: Sequence[int],
    scheme: Scheme,
    owned_by: PartitionSurvival,
    *,
    arenas: int,
    block_bytes: int,
    exact: bool = True,
) -> tuple[TrafficEstimate, ...]:
    """Loads of the members of one sharding group, by dp index.

    The replicated section counts as if every shard and every sub-block were as long as the longest,
    so that no rank takes more than this.

    Args:
        ring: members in ring order.
        exact: whether a host recomputes the owner's partition to the bit. If not, as on GPUs, the
            owner sends every partition after all.
    """
    size = len(ring)
    most = max(s.replicated_bytes for s in sections)
    shard, redundant, checksums, pieces = _replicated(most, scheme, size, block_bytes)
    peers = min(scheme.copies + scheme.parities, size - 1)
    recomputed = owned_by is PartitionSurvival.AOR and peers > 0
    loads = []
    for d, own in enumerate(sections):
        at = ring.index(d)
        next_ones = [ring[(at + i) % size] for i in range(1, peers + 1)]
        # Under AOR a version also holds the peers' partitions, and space for their gradients. A
        # recomputed partition reads its gradients in every step, in single
        # precision.
        parameters = [
            -(-sections[m].owned_bytes // OPTIMIZER_BYTES) for m in next_ones if recomputed
        ]
        gradients = sum(aligned(n * GRADIENT_BYTES) + _BESIDE_GRADIENTS_BYTES for n in parameters)
        kept = sum(_own(sections[m], checksums, owned=True) for m in (d, *next_ones))
        blocks = pieces + (1 + len(next_ones)) * (4 + 2 * own.owned_bytes // block_bytes)
        data = shard + redundant + kept + gradients
        loads.append(
            TrafficEstimate(
                shard_bytes=shard,
                redundant_bytes=redundant,
                owned_bytes=own.owned_bytes,
                gradient_bytes=gradients,
                sent_bytes=peers * _own(own, checksums, owned=not (recomputed and exact)),
                memory_bytes=arenas * reserved_bytes(data, blocks),
            )
        )
    return tuple(loads)


def _own(sections: RankSections, checksum_bytes: int, *, owned: bool) -> int:
    """Bytes in an arena, or sent to a peer, of what only one member has."""
    partition = sections.owned_bytes if owned else 0
    return sum(map(aligned, (partition, sections.host_bytes, checksum_bytes)))


def _replicated(
    nbytes: int, scheme: Scheme, size: int, block_bytes: int
) -> tuple[int, int, int, int]:
    """A member's part of the replicated section: bytes of its shard, redundant bytes, bytes of
    checksums, and blocks."""
    splits = size - scheme.gap if scheme.parities else 1
    alignment = CODED_ALIGNMENT_BYTES if scheme.parities else ALIGNMENT_BYTES
    sub_block = -(-nbytes // (size * splits * alignment)) * alignment
    rows = -(-sub_block // block_bytes)
    pieces = splits * (scheme.copies + 1) + scheme.parities
    redundant = (splits * scheme.copies + scheme.parities) * sub_block
    return (
        splits * sub_block,
        redundant,
        CHECKSUM_BYTES * splits * rows if scheme.parities else 0,
        pieces * rows,
    )
