"""What a block is called: the words that saving, storing and loading share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

ALIGNMENT_BYTES = 64
"""Tensor, shard and block boundaries are multiples of this, so that any dtype can be viewed in place."""


def aligned(nbytes: int, unit: int = ALIGNMENT_BYTES) -> int:
    """``nbytes``, rounded up to whole units."""
    return -(-nbytes // unit) * unit


class Section(StrEnum):
    """What a block is part of.

    The stage image has three sections: ``REPLICATED`` is equal on every data-parallel peer, ``OWNED`` is
    the ZeRO partition of one, ``HOST`` what one rank's host knows. Under an erasure code a member also
    stores ``PARITY`` of the replicated section, and its ring peers keep the ``CHECKSUMS`` of its replicated
    blocks, so that what is decoded can be verified. ``GRADIENTS`` of a ring peer's partition lie beside a
    version while it is being made, and are no part of it.
    """

    REPLICATED = "replicated"
    OWNED = "owned"
    HOST = "host"
    PARITY = "parity"
    CHECKSUMS = "checksums"
    GRADIENTS = "gradients"


STATE_SECTIONS = (Section.REPLICATED, Section.OWNED, Section.HOST)
"""The sections that are restored; the others serve to restore them."""


@dataclass(frozen=True, order=True)
class BlockKey:
    """Identity of a block within its sharding group and version."""

    section: Section  # section of the stage image
    # dp index of the shard (replicated), of the owner (owned, host, checksums) or of the member that computed
    # it (parity)
    member: int
    index: int  # position within that shard, 0-based
