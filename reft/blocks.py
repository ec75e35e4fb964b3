"""What a block is called: the words that saving, storing and loading share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

ALIGNMENT_BYTES = 64
"""Tensor, shard and block boundaries are multiples of this, so that any dtype can be viewed in place."""


class Section(StrEnum):
    REPLICATED = "replicated"
    OWNED = "owned"
    HOST = "host"


@dataclass(frozen=True, order=True)
class BlockKey:
    """Identity of a block within its sharding group and version.

    Attributes:
        section: section of the stage image.
        member: dp index of the shard (replicated) or of the owner (owned, host).
        index: position within that shard, 0-based.
    """

    section: Section
    member: int
    index: int
