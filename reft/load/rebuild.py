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
from reft.errors import ArenaError
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

    def store(self, plan: RecoveryPlan, at: Coordinate, directory: Path, node: str, secret: bytes) -> int:
        """Seal what was decoded in a new arena. Blocks with terms that never arrived are left out.

        Returns:
            Blocks stored.

        Raises:
            ArenaError: a decoded block is not what its owner copied.
            OutOfMemoryError: there is no room.
        """
        done = [accumulator for accumulator in self._sums if accumulator.complete]
        if not done:
            return 0
        offsets, end = [], 0
        for accumulator in done:
            offsets.append(end)
            end += -(-accumulator.lost.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        with Arena.create(_new_path(directory, at), end, len(done), secret) as arena:
            arena.begin(self._header(plan, at, node))
            entries = []
            for offset, accumulator in zip(offsets, done, strict=True):
                lost, data = accumulator.lost, accumulator.result()
                arena.data[offset : offset + lost.nbytes] = data.data
                entries.append(self._entry(lost, offset, self._verified(lost, data.data)))
            arena.seal(entries)
        logger.warning(
            "[node %s - step %d] decoded %d lost blocks of %s from parity (%.1f MiB)",
            *(node, plan.label.step, len(done), f"pp{at.pp}.tp{at.tp}", end / 2**20),
        )
        return len(done)

    def _verified(self, lost: LostBlock, data: memoryview) -> int:
        known = self._checksums.get(lost.key.member, ())
        found = checksum(data)
        if lost.position >= len(known) or known[lost.position] != found:
            raise ArenaError(
                f"replicated block {lost.key.index} of member {lost.key.member} was decoded from verified "
                f"blocks, but is not what its owner copied: the parity is of other data. Restore an older "
                f"version or a persisted checkpoint, and report this"
            )
        return found

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
    plan: RecoveryPlan, arenas: ArenaSet, directory: Path, secret: bytes
) -> tuple[Inventory, frozenset[BlockSource]]:
    """Decode everything on this machine, where all arenas can be read.

    Args:
        plan: with rebuilds.
        arenas: of all nodes.
        directory: for the decoded arenas.
        secret: the job's secret.

    Returns:
        The inventory of ``directory``, and the corrupt sources met: plan again without them.
    """
    bad = set()
    for coordinate, rebuild in sorted(plan.rebuilds.items()):
        decoder = Decoder(rebuild)
        for fetch in rebuild.fetches:
            if (fetch.node, fetch.arena) not in arenas or not matches(fetch, arenas):
                bad.add(fetch.source)
                continue
            decoder.take(fetch, torch.from_numpy(np.frombuffer(stored_bytes(fetch, arenas), np.uint8).copy()))
        decoder.store(plan, coordinate, directory, "decoded", secret)
    return take_inventory(directory, "decoded", secret), frozenset(bad)
