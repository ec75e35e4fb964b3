"""Compares the state that must be equal on all data-parallel peers, and finds the rank that
differs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import msgpack
import numpy as np
import torch

from reft.control.control import WorkerControl
from reft.grid import Topology, VersionId
from reft.memory.header import checksum
from reft.memory.stream import HashingCopier, find_ranges, hashing_copier
from reft.snapshot.copier import copy_when_admitted, shortened
from reft.snapshot.copy_engine import CopyEngine, Encode, Piece, own_pages
from reft.snapshot.extension import CopiedVersion, Halt, VersionFeature, VoteResult
from reft.snapshot.gate import Gate
from reft.snapshot.plan import GroupLayout, LiveImages
from reft.snapshot.version import SkipCause

logger = logging.getLogger(__name__)

PEERS_DIFFER = "peers differ"

TURNS = 61
"""If only some blocks are compared with each version, every block is compared once in this
number of versions."""


# Number of sums per block; several sums also detect data that moved within the block
_COLUMNS = 64


class PeerCheck(VersionFeature):
    """Compares replicated state between data-parallel peers, and finds the rank that differs.

    Redundancy does not help against a device that computes wrong results, or a bit that flips
    before the copy: wrong bytes are protected like correct ones. Therefore, with every version,
    each member of a sharding group computes checksums of the same bytes in its own replica,
    while training does not change them. Ring neighbours compare their checksums, and a version
    for which they differ is not committed.

    Args:
        by_turns: True to compare only some of the replicated section's blocks with each version,
            so that each block is compared once in :data:`TURNS` versions; False to compare all
            of them.
        block_bytes: size of a block.
        chunk_bytes: number of bytes that are hashed on the host for each permit from the gate.
        on_difference: what happens if peers differ. ``report`` discards the version and training
            continues; ``stop`` ends the job; ``rollback`` restarts the job from the newest
            committed version.
    """

    name = "peers"

    def __init__(
        self,
        *,
        by_turns: bool,
        block_bytes: int,
        chunk_bytes: int = 2**18,
        on_difference: str = "report",
    ) -> None:
        self._turns = TURNS if by_turns else 1
        self._block_bytes, self._chunk_bytes = block_bytes, chunk_bytes
        self._on_difference = on_difference
        self._differing: frozenset[int] = frozenset()
        """Blocks that differed between peers; they are compared with every version until they
        are equal again."""
        self._turn: int | None = None
        """Turn (selection of blocks) of the next version; None until the ranks have voted on a
        version together; until then the version's step is used instead."""
        self._blocks: Sequence[int] = ()  # Blocks compared in the newest version
        self._memory = torch.zeros(0, dtype=torch.int64)
        self._images: LiveImages | None = None  # Images of the newest version
        self._control: WorkerControl | None = None
        self._topology: Topology | None = None

    def connect(self, control: WorkerControl, topology: Topology) -> PeerCheck:
        """Set the connections over which peers compare checksums."""
        self._control, self._topology = control, topology
        return self

    @property
    def sums(self) -> dict[int, int]:
        """Checksum of each compared block of the newest version. On a device, valid only after
        its stream was waited for."""
        return dict(zip(self._blocks, self._memory.tolist(), strict=False))

    # -- checksums of this rank's own replica ------------------------------------------------------

    def read(self, images: LiveImages, label: VersionId, engine: CopyEngine, gate: Gate) -> None:
        self._images = images
        count = self._choose(images, label.step)
        if count > len(self._memory):
            if len(self._memory):
                engine.unregister(self._memory)
            self._memory = own_pages(8 * count).view(torch.int64)
            engine.register(self._memory)
        for part in self._parts(images):
            copy_when_admitted(engine, gate, encode=part)

    def _choose(self, images: LiveImages, step: int) -> int:
        """Choose the blocks to compare with a version; return the largest number of blocks that
        any version compares."""
        count = -(-images.replicated.nbytes // self._block_bytes)
        turn = step if self._turn is None else self._turn
        self._blocks = [
            b for b in range(count) if (b - turn) % self._turns == 0 or b in self._differing
        ]
        return count

    def _parts(self, images: LiveImages) -> Iterator[Encode]:
        """Yield calls that compute the checksums.

        On a device there is one call: it queues all work on the current stream and returns the
        pending copy of the results to the host. On the host, each call reads ``chunk_bytes``.
        """
        image, size = images.replicated, self._block_bytes
        live = [image.live(b * size, min(image.nbytes, (b + 1) * size)) for b in self._blocks]
        if live and image.device.type != "cpu":
            target = self._memory[: len(live)].view(torch.uint8)
            yield lambda: [(torch.stack([*map(_on_device, live)]).view(torch.uint8), target)]
            return
        hasher = hashing_copier()
        for place, views in enumerate(live):
            for view in views:
                for at in range(0, view.numel(), self._chunk_bytes):
                    yield partial(_hash, hasher, view[at : at + self._chunk_bytes])
            self._memory[place] = hasher.take() - 2**63

    # -- comparison --------------------------------------------------------------------------------

    def compare(self, version: CopiedVersion) -> SkipCause | None:
        """Compare with the ring neighbours, by one checksum over all blocks' checksums."""
        assert self._control is not None
        ranks, sums = self._members(), self.sums
        if len(ranks) == 1 or not sums:
            return None
        place = ranks.index(self._control.rank)
        before, after = ranks[place - 1], ranks[(place + 1) % len(ranks)]
        mine = torch.tensor([checksum(np.array([*sums.items()]).tobytes()) - 2**63])
        theirs = torch.empty_like(mine)
        self._control.exchange({before: [mine]}, {after: [theirs]})
        return None if torch.equal(mine, theirs) else SkipCause(PEERS_DIFFER)

    def _members(self) -> tuple[int, ...]:
        """Return the ranks of this rank's sharding group."""
        assert self._topology is not None
        assert self._control is not None
        at = self._topology.coordinates[self._control.rank]
        return self._topology.group(at.pp, at.tp)

    def neutral_ballot(self) -> tuple[int, ...]:
        return (0,)

    def ballot(self, cause: SkipCause | None, layout: GroupLayout | None) -> tuple[int, ...]:
        return (int(cause is not None and cause.kind == PEERS_DIFFER),)

    def voted(self, result: VoteResult, numbers: tuple[int, ...]) -> Halt | None:
        """Advance to the next turn and, if the members of any group differ, find out which
        blocks and ranks."""
        if not result.is_final:
            return None
        step = result.label.step
        self._turn = (step if self._turn is None else self._turn) + 1
        (differs_anywhere,) = numbers
        if not differs_anywhere:
            if result.ok:
                self._differing = frozenset()
            return None
        assert self._topology is not None
        assert self._control is not None
        found = self._find_differing()
        if found and self._topology.coordinates[self._control.rank].dp == 0:
            logger.error("step %d is not committed: %s", step, found)
        if self._on_difference == "report":
            return None
        return Halt(
            found or "data-parallel peers of another stage hold different values",
            restarts=result.has_committed and self._on_difference == "rollback",
        )

    def _find_differing(self) -> str:
        """Find the blocks that differ within this rank's group, and the ranks that have them.
        Collective.

        Returns:
            A description for the log; empty if no block differs.
        """
        assert self._topology is not None
        assert self._control is not None
        assert self._images is not None
        packed = self._control.gather_bytes(msgpack.packb(self.sums))
        ranks = self._members()
        sums = {d: msgpack.unpackb(packed[r], strict_map_key=False) for d, r in enumerate(ranks)}
        blocks = differing(sums)
        if not blocks:
            return ""
        self._differing = frozenset(blocks)
        members = sorted({m for found in blocks.values() for m in found})
        where = " and ".join(
            f"rank {ranks[m]} on {self._topology.nodes[ranks[m]]}" for m in members
        )
        others = "other ranks of its group"
        if len(members) == len(ranks):
            others = "each other; no majority says whose is wrong"
        return (
            f"{self._tensor_names(self._images, sorted(blocks))} of {where} differs from {others}"
        )

    def _tensor_names(self, images: LiveImages, blocks: Sequence[int]) -> str:
        size, image = self._block_bytes, images.replicated
        return shortened(t.name for b in blocks for t in image.tensors_at(b * size, (b + 1) * size))

    def rejoined(self) -> None:
        """Let the step determine the turn again, because some ranks may have missed the last
        vote's result."""
        self._turn, self._differing = None, frozenset()


def _hash(hasher: HashingCopier, view: torch.Tensor) -> Sequence[Piece]:
    hasher.copy(find_ranges([(0, view.data_ptr(), view.numel())]))
    return ()


def _on_device(views: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a checksum of bytes on a device. It consists of integer sums, which do not depend
    on the order of additions."""
    total = torch.zeros(_COLUMNS, dtype=torch.int64, device=views[0].device)
    for view in views:
        wide = view.data_ptr() % 4 == view.numel() % 4 == 0
        words = view.view(torch.int32) if wide else view
        whole = words.numel() // _COLUMNS * _COLUMNS
        total = total * 31 + words[:whole].view(-1, _COLUMNS).sum(0, dtype=torch.int64)
        total[: len(words) - whole] += words[whole:]
    return (total * torch.arange(1, 2 * _COLUMNS, 2, device=total.device)).sum()


def differing(sums: Mapping[int, Mapping[int, int]]) -> dict[int, tuple[int, ...]]:
    """Return the blocks that differ among the members of a group.

    Args:
        sums: checksums by member and block.

    Returns:
        For each differing block, the members that disagree with the majority; all members if
        there is no majority.
    """
    found = {}
    for block in next(iter(sums.values())):
        votes = Counter(of[block] for of in sums.values())
        most, count = votes.most_common(1)[0]
        if len(votes) > 1:
            clear = 2 * count > len(sums)
            found[block] = tuple(m for m, of in sums.items() if not clear or of[block] != most)
    return found
