"""Decoding lost blocks and storing them, so that the rest of a recovery finds every block somewhere.

One member of the group decodes a lost block, from blocks that reach it verified, checks the result against
its owner's checksum (P5) and seals what it decoded in an arena of its own. That arena is further
redundancy of its version: a recovery that is killed and starts again uses it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import accumulate, count, pairwise
from pathlib import Path

import numpy as np

from reft.blocks import BlockKey, Section
from reft.grid import Coordinate
from reft.memory.arena import Arena
from reft.memory.arena_files import decoded_name
from reft.memory.header import ArenaHeader, ArenaState, Entry, checksum
from reft.protect.coded_blocks import unpack_checksums
from reft.recover.inventory import Inventory, take_inventory
from reft.recover.local import ArenaSet, matches, stored_bytes
from reft.recover.parity import LostBlock, stripes_of
from reft.recover.plan import BlockSource, Fetch, Rebuild, RecoveryPlan
from reft.recover.pool import Bytes, Pool
from reft.recover.stripe import Stripe

logger = logging.getLogger(__name__)

_NOTHING = Rebuild((), 0, "", ())


class Decoder:
    """Takes the blocks that one coordinate's rebuild reads, in any order, and decodes from them what was lost
    where it is to stay: there is no second copy of it (P9).

    Args:
        plan: names the version and what it needs decoded.
        at: decodes its part of it, which may be nothing.
        directory: for the arena.
        node: where that is.
        secret: the job's secret.
        kept_bytes: most memory for blocks from other nodes that wait until all that are read together are
            there. With less than a few stripes' worth decoding is slower.
    """

    def __init__(
        self,
        plan: RecoveryPlan,
        at: Coordinate,
        directory: Path,
        node: str,
        secret: bytes,
        *,
        kept_bytes: int = 0,
    ) -> None:
        self._plan = plan
        self._at = at
        self._directory = directory
        self._node = node
        self._secret = secret
        self._rebuild = plan.rebuilds.get(at, _NOTHING)
        self._arena: Arena | None = None
        self._pool = Pool(kept_bytes)
        self._stripes: list[tuple[int, Stripe]] = []
        self._uses: dict[BlockKey, Stripe] = {}
        self._stripe_of: dict[BlockKey, Stripe] = {}
        self._checksums: dict[int, tuple[int, ...]] = {}
        self._sealed = False
        self._lock = threading.Lock()

    def reserve(self) -> None:
        """Make the arena; before the first block is taken.

        Raises:
            OutOfMemoryError: there is no room.
        """
        blocks = self._rebuild.blocks
        if not blocks:
            return
        stripes = stripes_of(blocks)
        # Padded lengths are multiples of the alignment.
        offsets = list(accumulate((sum(b.padded_bytes for b in stripe) for stripe in stripes), initial=0))
        path = _new_path(self._directory, self._at)
        self._arena = Arena.create(path, offsets[-1], len(blocks), self._secret)
        self._arena.begin(self._header())
        memory = np.frombuffer(self._arena.data, np.uint8)
        for lost, (start, stop) in zip(stripes, pairwise(offsets), strict=True):
            stripe = Stripe(lost, memory[start:stop], self._pool)
            self._stripes.append((start, stripe))
            self._uses.update(dict.fromkeys(stripe.keys, stripe))
            self._stripe_of.update({block.key: stripe for block in lost})

    def room_for(self, fetch: Fetch) -> Bytes | None:
        """Where to receive a block, so that it need not be copied; None: anywhere."""
        stripe = self._uses.get(fetch.key)
        return None if stripe is None else stripe.room_for(fetch.key, fetch.nbytes)

    def take(self, fetch: Fetch, data: Bytes, *, stays: bool) -> None:
        """A verified block has arrived. Several threads may bring blocks at once.

        Args:
            fetch: which block.
            data: its bytes.
            stays: whether they may be read until :meth:`close`, as those received in their room do anyway; if
                not, they are copied, or used at once.
        """
        if fetch.key.section is Section.CHECKSUMS:
            with self._lock:
                self._checksums[fetch.key.member] = unpack_checksums(data.data)
        else:
            self._uses[fetch.key].add(fetch.key, data, stays=stays)

    def put(self, lost: LostBlock, data: Bytes) -> None:
        """Take a lost block that was decoded elsewhere, padded."""
        self._stripe_of[lost.key].put(lost, data)

    def store(self) -> frozenset[BlockSource]:
        """Seal what was decoded. Left out are blocks with terms that never arrived, and those whose owner's
        checksums did not: nothing can be said about them before another holder was asked.

        Returns:
            Parities that cannot be used: what was decoded from them, with other verified blocks, is not what
            its owner copied. Planning again without them falls down the ladder (P5).
        """
        done: list[Entry] = []
        wrong: list[LostBlock] = []
        for lost, offset, data in self._decoded():
            known = self._checksums.get(lost.key.member)
            if known is None:
                continue
            digest = checksum(data.data)
            # Beyond what the owner has told, no checksum is right.
            if lost.position < len(known) and digest == known[lost.position]:
                done.append(self._entry(lost, offset, digest))
            else:
                wrong.append(lost)
        refused = self._parities_of(wrong)
        if refused:
            logger.warning(
                "%d blocks of step %d decoded from verified blocks are not what their owner copied: the "
                "parity is of other data. It is not used; please report this",
                *(len(wrong), self._plan.label.step),
            )
        if done and self._arena is not None:
            self._arena.seal(done)
            self._sealed = True
            logger.warning(
                "decoded %d lost blocks of step %d of pp%d.tp%d from parity (%.1f MiB)",
                *(len(done), self._plan.label.step, self._at.pp, self._at.tp),
                sum(entry.nbytes for entry in done) / 2**20,
            )
        return refused

    def _decoded(self) -> Iterator[tuple[LostBlock, int, Bytes]]:
        """Blocks of which all terms arrived, where they lie in the arena, and their bytes."""
        for start, stripe in self._stripes:
            if stripe.complete:
                for at, (lost, data) in enumerate(zip(stripe.blocks, stripe.results(), strict=True)):
                    yield lost, start + at * lost.padded_bytes, data

    def _parities_of(self, blocks: Sequence[LostBlock]) -> frozenset[BlockSource]:
        keys = {key for lost in blocks for key in lost.parities}
        return frozenset(f.source for f in self._rebuild.fetches if f.key in keys)

    def close(self) -> None:
        """Let go of the arena, which stays if anything was sealed in it."""
        self._stripes.clear()
        self._uses.clear()
        self._stripe_of.clear()
        if self._arena is not None:
            self._arena.close()
            if not self._sealed:
                self._arena.path.unlink(missing_ok=True)

    def _entry(self, lost: LostBlock, offset: int, digest: int) -> Entry:
        image_bytes = self._rebuild.image_bytes
        return Entry(lost.key, lost.start_bytes, lost.nbytes, image_bytes, offset, digest, owner=False)

    def _header(self) -> ArenaHeader:
        # Further redundancy of the version, as the job that wrote it was laid out.
        written = self._plan.written_dp
        return ArenaHeader(
            job_id=self._plan.job_id,
            node=self._node,
            degrees=replace(self._plan.degrees, dp=written),
            coordinate=replace(self._at, dp=self._at.dp % written),
            label=self._plan.label,
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
        with closing(Decoder(plan, coordinate, directory, node, secret)) as decoder:
            decoder.reserve()
            for fetch in rebuild.fetches:
                if (fetch.node, fetch.arena) not in arenas or not matches(fetch, arenas):
                    bad.add(fetch.source)
                    continue
                decoder.take(fetch, np.frombuffer(stored_bytes(fetch, arenas), np.uint8), stays=True)
            bad |= decoder.store()
    return take_inventory(directory, node, secret), frozenset(bad)
