"""Bytes of one version by what they are, counted where they are moved and not where they are planned.

What reaches host memory is compared with the formulas of REFERENCE 1.4 and 1.5, and what leaves the node
shows whether protection is free on the network: copies and parities are cut from the rank's own replica.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from reft.blocks import BlockKey, Section


class Kind(StrEnum):
    """What a byte is.

    ``SHARD``: of this rank's own shard of the replicated section. ``COPIES``: of other members' shards, cut
    from the own replica. ``PARITY``: encoded from it. ``OWNED``: of the ZeRO partition. ``HOST_STATE``: what
    only the host knows. ``CHECKSUMS``: eight bytes a block, and the length of the host state, with which
    peers verify. ``GRADIENTS``: of ring peers' partitions, from which these are recomputed. ``MIRROR``:
    everything once more, under the baseline ``inter_node``.
    """

    SHARD = "shard"
    COPIES = "copies"
    PARITY = "parity"
    OWNED = "owned"
    HOST_STATE = "host_state"
    CHECKSUMS = "checksums"
    GRADIENTS = "gradients"
    MIRROR = "mirror"


_KINDS = {
    Section.OWNED: Kind.OWNED,
    Section.HOST: Kind.HOST_STATE,
    Section.PARITY: Kind.PARITY,
    Section.CHECKSUMS: Kind.CHECKSUMS,
    Section.GRADIENTS: Kind.GRADIENTS,
}


def kind_of(key: BlockKey, member: int) -> Kind:
    """What a block is to the ``member`` that stores it."""
    if key.section is Section.REPLICATED:
        return Kind.SHARD if key.member == member else Kind.COPIES
    return _KINDS[key.section]


@dataclass
class Traffic:
    """Bytes of one version, or of several, on one rank.

    Attributes:
        to_host: copied from the device, or written by the host, to this rank's arena.
        sent: sent to ranks on other nodes, once for each of them. What goes to another rank of the same node
            is not counted, nor is the byte a block by which peers say what they lack (AOR).
    """

    to_host: Counter[Kind] = field(default_factory=Counter)
    sent: Counter[Kind] = field(default_factory=Counter)

    def add(self, other: Traffic) -> None:
        """Count another version's bytes too."""
        self.to_host.update(other.to_host)
        self.sent.update(other.sent)

    def to_json(self) -> dict[str, Any]:
        """Kinds of which there was nothing are left out."""
        return {"to_host": _bytes(self.to_host), "sent": _bytes(self.sent)}


def _bytes(counted: Counter[Kind]) -> dict[str, int]:
    return {kind.value: counted[kind] for kind in Kind if counted[kind]}
