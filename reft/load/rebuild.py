"""Decoding lost blocks and storing them, so that the rest of a recovery finds every block somewhere.

One member of the group decodes a lost block, from blocks that reach it verified, checks the result against
its owner's checksum (P5) and seals what it decoded in an arena of its own. That arena is further
redundancy of its version: a recovery that is killed and starts again uses it.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from itertools import count
from pathlib import Path

import numpy as np
import torch

from reft.blocks import ALIGNMENT_BYTES, BlockKey, Section
from reft.load.inventory import Inventory, take_inventory
from reft.load.local import ArenaSet, matches, stored_bytes
from reft.load.parity import Accumulator, LostBlock
from reft.load.plan import BlockSource, Fetch, Rebuild, RecoveryPlan
from reft.protect.coded_blocks import unpack_checksums
from reft.store.arena import Arena, decoded_name
from reft.store.header import ArenaHeader, ArenaState, Entry, checksum
from reft.topology import Coordinate

logger = logging.getLogger(__name__)


class Decoder:
    """Takes the blocks that one coordinate's rebuild reads, in any order, and decodes.

    Args:
        rebuild: what to decode.
    """

    def __init__(self, rebuild: Rebuild) -> None:
        self._rebuild = rebuild
        self._sums = [Accumulator(lost) for lost in rebuild.blocks]
        self._uses: dict[BlockKey, list[Accumulator]] = defaultdict(list)
        for accumulator in self._sums:
            for key, _ in accumulator.lost.terms:
                self._uses[key].append(accumulator)
        self._checksums: dict[int, tuple[int, ...]] = {}
        self._lock = threading.Lock()

    def take(self, fetch: Fetch, data: torch.Tensor) -> None:
        """A verified block has arrived; the sink of a transfer."""
        with self._lock:
            if fetch.key.section is Section.CHECKSUMS:
                self._checksums[fetch.key.member] = unpack_checksums(data.numpy().data)
                return
            for accumulator in self._uses[fetch.key]:
                accumulator.add(fetch.key, data.numpy())

    def store(
        self, plan: RecoveryPlan, at: Coordinate, directory: Path, node: str, secret: bytes
    ) -> frozenset[BlockSource]:
        """Seal what was decoded in a new arena. Blocks with terms that never arrived are left out.

        Returns:
            Parities that cannot be used: what was decoded from them, with other verified blocks, is not what
            its owner copied. Planning again without them falls down the ladder (P5).

        Raises:
            OutOfMemoryError: there is no room.
        """
        decoded = [accumulator for accumulator in self._sums if accumulator.complete]
        done = [accumulator for accumulator in decoded if self._is_what_was_copied(accumulator)]
        wrong = {key for a in decoded if a not in done for key, _ in a.lost.terms}
        refused = {
            f.source for f in self._rebuild.fetches if f.key in wrong and f.key.section is Section.PARITY
        }
        if refused:
            logger.warning(
                "[node %s - step %d] %d blocks decoded from verified blocks are not what their owner copied: "
                "the parity is of other data. It is not used; please report this",
                *(node, plan.label.step, len(decoded) - len(done)),
            )
        if not done:
            return frozenset(refused)
        offsets, end = [], 0
        for accumulator in done:
            offsets.append(end)
            end += -(-accumulator.lost.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        with Arena.create(_new_path(directory, at), end, len(done), secret) as arena:
            arena.begin(self._header(plan, at, node))
            entries = []
            for offset, accumulator in zip(offsets, done, strict=True):
                lost = accumulator.lost
                arena.data[offset : offset + lost.nbytes] = accumulator.result().data
                entries.append(self._entry(lost, offset, self._checksum_of(lost)))
            arena.seal(entries)
        logger.warning(
            "[node %s - step %d] decoded %d lost blocks of %s from parity (%.1f MiB)",
            *(node, plan.label.step, len(done), f"pp{at.pp}.tp{at.tp}", end / 2**20),
        )
        return frozenset(refused)

    def _is_what_was_copied(self, accumulator: Accumulator) -> bool:
        return checksum(accumulator.result().data) == self._checksum_of(accumulator.lost)

    def _checksum_of(self, lost: LostBlock) -> int:
        """What the owner took when it copied the block; -1, which no checksum is, if it is not known."""
        known = self._checksums.get(lost.key.member, ())
        return known[lost.position] if lost.position < len(known) else -1

    def _entry(self, lost: LostBlock, offset: int, digest: int) -> Entry:
        image_bytes = self._rebuild.image_bytes
        return Entry(lost.key, lost.start_bytes, lost.nbytes, image_bytes, offset, digest, owner=False)

    def _header(self, plan: RecoveryPlan, at: Coordinate, node: str) -> ArenaHeader:
        return ArenaHeader(
            job_id=plan.job_id,
            node=node,
            degrees=plan.degrees,
            coordinate=at,
            label=plan.label,
            state=ArenaState.WRITING,
            layout=self._rebuild.layout,
        )


def _new_path(directory: Path, at: Coordinate) -> Path:
    """A file that no earlier attempt has written: its blocks may be among the sources."""
    return next(p for p in (directory / decoded_name(str(at), n) for n in count()) if not p.exists())


def rebuild_offline(
    plan: RecoveryPlan, arenas: ArenaSet, directory: Path, node: str, secret: bytes
) -> tuple[Inventory, frozenset[BlockSource]]:
    """Decode everything on this machine, where all arenas can be read.

    Args:
        plan: with rebuilds.
        arenas: of all nodes.
        directory: for the decoded arenas.
        node: name to plan with for what is in ``directory``.
        secret: the job's secret.

    Returns:
        The inventory of ``directory``, and the corrupt sources met: plan again without them.
    """
    bad: set[BlockSource] = set()
    for coordinate, rebuild in sorted(plan.rebuilds.items()):
        decoder = Decoder(rebuild)
        for fetch in rebuild.fetches:
            if (fetch.node, fetch.arena) not in arenas or not matches(fetch, arenas):
                bad.add(fetch.source)
                continue
            decoder.take(fetch, torch.from_numpy(np.frombuffer(stored_bytes(fetch, arenas), np.uint8).copy()))
        bad |= decoder.store(plan, coordinate, directory, node, secret)
    return take_inventory(directory, node, secret), frozenset(bad)
