"""The arena that is being filled with a version, and what is known about its blocks so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from reft.control.control import WorkerControl
from reft.errors import ArenaError, TransferError
from reft.grid import Section, Topology
from reft.memory.arena import Arena
from reft.memory.header import checksum
from reft.memory.stream import HashingCopier, Ranges, hashing_copier
from reft.naming import Label
from reft.protect.codes import pack_checksums
from reft.snapshot.plan import GroupLayout, PlacedBlock
from reft.snapshot.stats import Kind, Traffic, kind_of
from reft.state.blob import LateBlob


@dataclass
class Filling:
    """An arena in state WRITING and what is known about its blocks so far."""

    slot: int
    arena: Arena
    layout: GroupLayout
    label: Label
    _data: torch.Tensor
    traffic: Traffic = field(default_factory=Traffic)
    checksums: dict[PlacedBlock, int] = field(default_factory=dict)
    # what is read of blocks that come from a device to hash them: where it has numbers
    scanned: dict[PlacedBlock, Ranges] = field(default_factory=dict)
    not_finite: set[PlacedBlock] = field(
        default_factory=set
    )  # blocks with a NaN or an infinity among their numbers
    _lengths: dict[PlacedBlock, int] = field(default_factory=dict)
    _expected: dict[PlacedBlock, int] = field(default_factory=dict)

    @property
    def local_blocks(self) -> tuple[PlacedBlock, ...]:
        """Blocks that are copied from this rank's own device: all but what only a peer has."""
        return self.layout.mine.local

    def _peer_blocks(self, member: int) -> list[PlacedBlock]:
        """What only ``member`` has: its owned blocks, then its host block, in plan order."""
        plan = self.layout.plan.members[self.layout.member]
        source = plan.own if member == self.layout.member else plan.redundant
        return [b for b in source if b.key.member == member and b.key.section is not Section.REPLICATED]

    def length(self, placed: PlacedBlock) -> int:
        return self._lengths.get(placed, placed.block.nbytes)

    def tensor(self, placed: PlacedBlock) -> torch.Tensor:
        """The block's bytes in the arena, 1-D uint8, true length."""
        return self._data[placed.arena_offset : placed.arena_offset + self.length(placed)]

    def write_host(self, placed: PlacedBlock, blob: bytes | bytearray) -> None:
        """Write the host block; waits for what of it is still under way from a device."""
        if isinstance(blob, LateBlob):
            blob.settle()
        self._lengths[placed] = len(blob)
        self.arena.data[placed.arena_offset : placed.arena_offset + len(blob)] = blob
        self.traffic.to_host[Kind.HOST_STATE] += len(blob)

    def hash(self, placed: PlacedBlock) -> None:
        begin = placed.arena_offset
        if placed not in self.scanned:
            self.checksums[placed] = checksum(self.arena.data[begin : begin + self.length(placed)])
            return
        hasher = hashing_copier()
        hasher.copy(self.scanned[placed])
        self.take(placed, hasher)

    def take(self, placed: PlacedBlock, hasher: HashingCopier) -> None:
        """Note what was hashed: all of a block."""
        self.checksums[placed] = hasher.take()
        if hasher.not_finite:
            self.not_finite.add(placed)

    def hash_rest(self) -> None:
        """Checksum every local block that has none yet."""
        for placed in self.local_blocks:
            if placed not in self.checksums and placed.key.section is not Section.GRADIENTS:
                self.hash(placed)
        own = self.layout.mine.own
        for placed in (b for b in own if b.key.section is Section.CHECKSUMS):
            # Of this member's own shard: what a peer that decodes it compares with (P5).
            data = pack_checksums(self.checksums[b] for b in own if b.key.section is Section.REPLICATED)
            self.traffic.to_host[Kind.CHECKSUMS] += len(data)
            self.arena.data[placed.arena_offset : placed.arena_offset + len(data)] = data
            self.hash(placed)

    # -- exchange with ring peers ------------------------------------------------------------------

    def facts_length(self, member: int) -> int:
        return 1 + len(self._peer_blocks(member))

    def own_facts(self) -> torch.Tensor:
        """Length of the host blob and the checksums of what goes to ring peers, int64; 0 for what could not
        be hashed, which is no version then."""
        blocks = self._peer_blocks(self.layout.member)
        host = next(b for b in blocks if b.key.section is Section.HOST)
        values = [self.length(host), *(self.checksums.get(b, 0) for b in blocks)]
        return torch.from_numpy(np.array(values, np.uint64).view(np.int64))

    def expect(self, member: int, facts: torch.Tensor) -> None:
        """Take note of what ``member`` said it will send."""
        host_bytes, *sums = facts.tolist()
        for placed, value in zip(self._peer_blocks(member), sums, strict=True):
            if placed.key.section is Section.HOST:
                if not 0 <= host_bytes <= placed.block.nbytes:
                    raise TransferError(
                        f"member {member} announced {host_bytes} bytes of host state; "
                        f"{placed.block.nbytes} were agreed"
                    )
                self._lengths[placed] = host_bytes
            self._expected[placed] = value & (2**64 - 1)

    def wanted(self, member: int) -> torch.Tensor:
        """Which blocks ``member`` has to send, in plan order, uint8: all but those of its partition that were
        recomputed here and are what it has itself."""
        return torch.tensor([self._lacks(b) for b in self._peer_blocks(member)], dtype=torch.uint8)

    def _lacks(self, placed: PlacedBlock) -> bool:
        if placed.key.section is not Section.OWNED or placed not in self.checksums:
            return True
        return self.checksums[placed] != self._expected[placed]

    def always_sent(self, member: int) -> int:
        """Blocks that ``member`` sends with every version: all but its partition."""
        return sum(b.key.section is not Section.OWNED for b in self._peer_blocks(member))

    def selection(self, member: int, wanted: torch.Tensor) -> list[torch.Tensor]:
        """Bytes of those blocks of ``member`` that are ``wanted``, in plan order."""
        chosen = zip(self._peer_blocks(member), wanted.tolist(), strict=True)
        return [t for t in (self.tensor(b) for b, yes in chosen if yes) if t.numel()]

    def selected_bytes(self, wanted: torch.Tensor) -> Counter[Kind]:
        """What a peer is sent that wants those blocks of this member."""
        me, counted = self.layout.member, Counter[Kind]()
        for placed, yes in zip(self._peer_blocks(me), wanted.tolist(), strict=True):
            if yes:
                counted[kind_of(placed.key, me)] += self.length(placed)
        return counted

    def partition(self, member: int) -> torch.Tensor:
        """The bytes of a member's partition: own or kept, 1-D uint8."""
        blocks = [b for b in self.layout.mine.blocks if b.key.section is Section.OWNED]
        return self._together([b for b in blocks if b.key.member == member])

    def gradients(self, member: int) -> torch.Tensor:
        """The bytes of the gradients of that member's partition, 1-D uint8."""
        return self._together([b for b in self.layout.mine.gradients if b.key.member == member])

    def _together(self, blocks: Sequence[PlacedBlock]) -> torch.Tensor:
        """The memory of blocks that lie one behind the other: they are cut at multiples of the alignment."""
        if not blocks:
            return self._data[:0]
        return self._data[blocks[0].arena_offset : blocks[-1].arena_offset + blocks[-1].block.nbytes]

    def hash_partition(self, member: int) -> None:
        """Checksum the blocks of a kept partition that was recomputed."""
        for placed in self._peer_blocks(member):
            if placed.key.section is Section.OWNED:
                self.hash(placed)

    def check_received(self, arrived: Mapping[int, torch.Tensor]) -> int:
        """Compare what arrived with the owners' checksums (P5). Returns the bytes received; raises ArenaError
        where a block arrived changed: the version must not be committed."""
        total = 0
        for member, wanted in arrived.items():
            for placed, yes in zip(self._peer_blocks(member), wanted.tolist(), strict=True):
                if not yes:
                    continue
                self.hash(placed)
                if self.checksums[placed] != self._expected[placed]:
                    raise ArenaError(f"block {placed.key} arrived with another checksum than its owner took")
                total += self.length(placed)
        return total

    def seal(self) -> None:
        blocks = self.layout.mine.blocks
        table = self.layout.table.copy()
        table["checksum"] = [self.checksums[b] for b in blocks]
        for row, placed in enumerate(blocks):
            if placed.key.section is Section.HOST:
                table["nbytes"][row] = table["image_bytes"][row] = self.length(placed)
        self.arena.seal(table)


# -- what a version needs of other ranks before it is sealed ---------------------------------------


class RingExchange:
    """The exchange of one rank with the members of its sharding group."""

    def __init__(self, control: WorkerControl, topology: Topology) -> None:
        self._control = control
        self._topology = topology

    def facts(self, filling: Filling) -> None:
        """Tell ring predecessors lengths and checksums; learn the successors'. Collective in the group.
        Raises TransferError where a peer vanished or announced what was not agreed."""
        holders, kept = self._peers(filling)
        facts = filling.own_facts()
        incoming = {m: torch.empty(filling.facts_length(m), dtype=torch.int64) for m in kept}
        self._control.exchange(
            {rank: [facts] for rank in holders.values()}, {kept[m]: [t] for m, t in incoming.items()}
        )
        for rank in holders.values():
            self.count(filling, rank, Counter({Kind.CHECKSUMS: facts.nbytes}))
        for member, peer_facts in incoming.items():
            filling.expect(member, peer_facts)

    def differs(self, sums: Mapping[int, int]) -> bool:
        """Whether the successor has other sums. Collective in the group."""
        at = self._topology.coordinates[self._control.rank]
        ranks = self._topology.group(at.pp, at.tp)
        before, behind = (ranks[(at.dp + way) % len(ranks)] for way in (-1, 1))
        if len(ranks) == 1 or not sums:
            return False
        mine = torch.tensor([checksum(np.array([*sums.items()]).tobytes()) - 2**63])
        theirs = torch.empty_like(mine)
        self._control.exchange({before: [mine]}, {behind: [theirs]})
        return not torch.equal(mine, theirs)

    def blocks(self, filling: Filling) -> dict[int, torch.Tensor]:
        """Send the blocks that the predecessors lack, take those that this rank lacks. Collective. Returns
        which blocks have arrived, by member: see :meth:`Filling.check_received`."""
        holders, kept = self._peers(filling)
        me = filling.layout.member
        lacking = {m: filling.wanted(m) for m in kept}
        asked = {h: torch.ones(filling.facts_length(me) - 1, dtype=torch.uint8) for h in holders}
        if filling.layout.plan.sizes.recomputed:
            self._control.exchange(
                {kept[m]: [mask] for m, mask in lacking.items()}, {holders[h]: [t] for h, t in asked.items()}
            )
        self._control.exchange(
            {holders[h]: filling.selection(me, mask) for h, mask in asked.items()},
            {kept[m]: filling.selection(m, mask) for m, mask in lacking.items()},
        )
        for holder, mask in asked.items():
            self.count(filling, holders[holder], filling.selected_bytes(mask))
        return lacking

    def count(self, filling: Filling, rank: int, sent: Counter[Kind]) -> None:
        """Note what was sent to a rank, if it is on another node."""
        nodes = self._topology.nodes
        if nodes[rank] != nodes[self._control.rank]:
            filling.traffic.sent.update(sent)

    def _peers(self, filling: Filling) -> tuple[dict[int, int], dict[int, int]]:
        """Ranks by member: of those that keep this rank's bytes, and of those whose bytes it keeps."""
        at = self._topology.coordinates[self._control.rank]
        ranks = self._topology.group(at.pp, at.tp)
        placement, me = filling.layout.plan.placement, filling.layout.member
        return (
            {h: ranks[h] for h in placement.holders_of(me)[1:]},
            {m: ranks[m] for m in placement.kept_by(me)[1:]},
        )


class PeerTraffic:
    """Gemini's inter-node traffic: a copy of everything a rank keeps, to another rank, over the network.

    The bytes land in memory that recovery knows nothing of; what it uses is the same in every variant.
    """

    def __init__(self, control: WorkerControl, block_bytes: int) -> None:
        self._control = control
        self._block_bytes = block_bytes
        self._sizes: Sequence[int] = ()
        self._memory: torch.Tensor | None = None

    def agree(self, nbytes: int) -> None:
        """Tell all ranks how much this one keeps. Collective."""
        self._sizes = [size for (size,) in self._control.gather_ints([nbytes])]
        self._memory = None

    def send(self, data: memoryview) -> tuple[int, int]:
        """Send to the next rank and receive from the one before. Collective. Returns the rank that was sent
        to, and the bytes."""
        rank, world = self._control.rank, self._control.world_size
        if world == 1:
            return rank, 0
        if self._memory is None:
            self._memory = torch.empty(self._sizes[rank - 1], dtype=torch.uint8)
        mine = torch.frombuffer(data, dtype=torch.uint8)[: self._sizes[rank]]
        self._control.exchange(
            {(rank + 1) % world: torch.split(mine, self._block_bytes)},
            {(rank - 1) % world: torch.split(self._memory, self._block_bytes)},
        )
        return (rank + 1) % world, mine.numel()
