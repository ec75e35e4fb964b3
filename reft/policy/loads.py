"""Cost of a protection scheme for each rank: bytes copied and sent, and host memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from reft.grid import ALIGNMENT_BYTES, aligned
from reft.memory.arena import reserved_bytes
from reft.protect.codes import Scheme
from reft.protect.rs import GRAIN_BYTES as CODED_ALIGNMENT_BYTES

MODEL_BYTES = 2
# Optimizer state of one parameter under mixed precision with Adam: master copy, momentum and
# variance
OPTIMIZER_BYTES = 12
# Size of one parameter's gradient in single precision, which recomputed optimizers (AOR) read
GRADIENT_BYTES = 4
CHECKSUM_BYTES = 8
# Longest acceptable optimizer step on a host; a longer one might not end before the next version
LONGEST_SECS = 1.0
_BESIDE_GRADIENTS_BYTES = 4096
"""Bytes added to an estimate for the alignment of parameter groups (64 bytes) and for the
factors that unscale gradients."""


class PartitionSurvival(StrEnum):
    """Way to protect a ZeRO partition, which only its owner holds.

    - PEER: the owner sends the partition to its ring peers with every version.
    - AOR (asynchronous optimizer recomputing): the same peers repeat the owner's optimizer step
      on their hosts, from the newest version and the gradients of the step.
    """

    PEER = "peer"
    AOR = "aor"


@dataclass(frozen=True)
class RankSections:
    """Sizes of the sections of one rank's state."""

    replicated_bytes: int  # State that is equal on all data-parallel peers
    owned_bytes: int = 0  # The rank's ZeRO partition
    host_bytes: int = 0  # Memory reserved for the encoded host state
    # Part of the partition that does not change (frozen weights): sent once, later only compared
    frozen_owned_bytes: int = 0


@dataclass(frozen=True)
class LinkRates:
    """Rates at which ZeRO partitions are sent or recomputed.

    They are those of the slowest rank, measured at the start, or assumed in a plan.
    """

    copy_bytes_per_sec: float  # From the device to its host
    peer_bytes_per_sec: float  # From a host to the hosts of its ring peers
    adam_parameters_per_sec: float  # Parameters that one core of a host updates in a second
    free_cores: int  # Number of a rank's cores that training does not use

    def partition_secs(self, parameters: float) -> tuple[float, float]:
        """Return the time that each step needs to send, and alternatively to recompute, a number
        of parameters.

        The time to recompute is that of copying the gradients. The optimizer step on the host is
        added only if the free cores cannot complete it in time.

        Args:
            parameters: number of parameters of one rank.

        Returns:
            Seconds to send, and seconds to recompute.
        """
        sent_secs = parameters * OPTIMIZER_BYTES / self.peer_bytes_per_sec
        copied_secs = parameters * GRADIENT_BYTES / self.copy_bytes_per_sec
        host_secs = parameters / self.adam_parameters_per_sec
        beside_training = self.free_cores > 0 and host_secs <= LONGEST_SECS
        return sent_secs, copied_secs + (0.0 if beside_training else host_secs)


@dataclass(frozen=True)
class TrafficEstimate:
    """Bytes that one rank copies, sends and stores for one version."""

    shard_bytes: int  # Copied from the device: the rank's part of the replicated section
    redundant_bytes: int  # Copied from the device: copies and parities for peers
    owned_bytes: int  # Copied from the device: the rank's ZeRO partition
    gradient_bytes: int  # Copied from the device: gradients of ring peers' partitions (AOR)
    sent_bytes: int  # Sent to ring peers: owned and host state
    memory_bytes: int  # Reserved in host memory for all kept versions

    @property
    def to_host_bytes(self) -> int:
        """Bytes copied from the device to the host for one version."""
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
    """Return an upper bound of the traffic of each member of one sharding group, by dp index.

    Every shard and every sub-block counts with the size of the longest one.

    Args:
        sections: sizes of the members' state, by dp index.
        ring: members in ring order.
        scheme: protection of the replicated section.
        owned_by: protection of ZeRO partitions.
        arenas: versions kept in memory.
        block_bytes: largest size of a block.
        exact: whether a host recomputes a partition bit for bit. If not, as on GPUs, the owner
            also sends its partition.
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
        sends_partition = not (recomputed and exact)
        unsent = own.frozen_owned_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        # Under AOR, a version also holds the peers' partitions, and their gradients in single
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
                sent_bytes=peers * (_own(own, checksums, owned=sends_partition) - unsent),
                memory_bytes=arenas * reserved_bytes(data, blocks),
            )
        )
    return tuple(loads)


def _own(sections: RankSections, checksum_bytes: int, *, owned: bool) -> int:
    """Return the size of the state that only one member has, as stored in an arena or sent to a
    peer.
    """
    partition = sections.owned_bytes if owned else 0
    return sum(map(aligned, (partition, sections.host_bytes, checksum_bytes)))


def _replicated(
    nbytes: int, scheme: Scheme, size: int, block_bytes: int
) -> tuple[int, int, int, int]:
    """Return a member's part of the replicated section.

    Returns:
        Bytes of the member's shard, redundant bytes, bytes of checksums, and number of blocks.
    """
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
