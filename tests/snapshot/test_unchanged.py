"""Blocks that did not change are neither copied nor sent, and every version is one state all the same (P2, P5)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from reft.config import FaultConfig, FaultPoint
from reft.grid import Section, VersionId
from reft.memory.arena import Arena, scan
from reft.memory.header import ArenaState
from reft.snapshot.copier import Copier
from reft.snapshot.copy_engine import CpuCopyEngine
from reft.snapshot.plan import LiveImages
from reft.snapshot.worker import SnapshotRequest
from reft.state.catalogue import SectionImage
from tests.snapshot.ranks import ALONE, PAIR, SECRET, Rank, Results, group_of_one, host_blob

FAILS = (FaultPoint.DURING_COPY, FaultPoint.AFTER_SEAL)
BLOCK_BYTES = 65536  # of the workers that tests.snapshot.ranks makes


class Adapted(Rank):
    """Large tensors that change only where a test says so, and a small one that changes in every step. Writes go
    through ``.data``, so that torch does not count them."""

    def __init__(self, rank: int, root: Path, *args: Any, **options: Any) -> None:
        super().__init__(rank, root, *args, **options)
        self.base = torch.arange(4 * BLOCK_BYTES, dtype=torch.int32) + rank
        self.adapter = torch.zeros(100)
        self.both = torch.arange(4 * BLOCK_BYTES, dtype=torch.int32)

    def step(self, step: int) -> None:
        self.worker.fence()
        self.adapter.data.fill_(step)

    def snapshot(self, step: int, **options: Any) -> SnapshotRequest:
        images = LiveImages(
            SectionImage([("both", self.both), ("adapter", self.adapter)]),
            SectionImage([("base", self.base)]),
            "layout",
        )
        request = SnapshotRequest(VersionId(1, step), images, host_blob(self.rank, step), **options)
        self.worker.submit(request)
        return request

    def image(self, section: Section) -> bytes:
        tensors = [self.base] if section is Section.OWNED else [self.both, self.adapter]
        image = SectionImage([(str(i), t) for i, t in enumerate(tensors)])
        out = torch.empty(image.nbytes, dtype=torch.uint8)
        image.read_into(0, out)
        return bytes(out.numpy())

    def read(self, step: int, member: int, section: Section) -> bytes:
        """The bytes of a committed version that this rank stores of a member."""
        for _, arena in scan(self.job_dir, SECRET):
            assert isinstance(arena, Arena)
            with arena:
                header = arena.header()
                if header is None or header.label.step != step:
                    continue
                assert header.state is ArenaState.COMMITTED
                assert all(arena.verify(entry) for entry in header.entries)
                found = [
                    entry
                    for entry in header.entries
                    if (entry.key.section, entry.key.member) == (section, member)
                ]
                found.sort(key=lambda entry: entry.start_bytes)
                return b"".join(bytes(arena.read_block(entry)) for entry in found)
        raise AssertionError(f"version {step} is nowhere")

    def copied(self) -> int:
        return sum(self.stats.traffic.to_json()["to_host"].values())

    def sent(self) -> int:
        return self.stats.traffic.to_json()["sent"].get("owned", 0)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Adapted]:
    with group_of_one():
        job = Adapted(0, tmp_path, ALONE)
        yield job
        job.worker.close(10)


def test_what_did_not_change_is_not_copied_from_the_third_version_on(alone: Adapted) -> None:
    copied = []
    for step in range(1, 6):
        assert alone.take(step)
        copied.append(alone.copied())
        assert alone.read(step, 0, Section.OWNED) == alone.image(Section.OWNED)
        assert alone.read(step, 0, Section.REPLICATED) == alone.image(Section.REPLICATED)
    everything = alone.base.nbytes + alone.both.nbytes
    assert min(copied[:2]) > everything
    assert max(copied[2:]) < everything / 8


def test_p2_a_write_that_torch_does_not_count_is_in_the_version(alone: Adapted) -> None:
    """The teacher of a model that averages weights is frozen, and written through ``.data`` in every step."""
    for step in range(1, 8):
        alone.step(step)
        if step in (3, 4, 6):
            alone.base.data[BLOCK_BYTES // 8 :][step] = -step
            alone.both.data[-1] = -step
        assert alone.wait_for(alone.snapshot(step, required=True))
        assert alone.read(step, 0, Section.OWNED) == alone.image(Section.OWNED)
        assert alone.read(step, 0, Section.REPLICATED) == alone.image(Section.REPLICATED)


def test_p5_a_block_that_was_damaged_in_memory_is_written_again(
    alone: Adapted, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(1, 4):
        assert alone.take(step)
    layout = alone.worker.layout
    assert layout is not None
    placed = next(b for b in layout.mine.own if b.key.section is Section.OWNED)
    for arena in alone.arenas._arenas.values():
        arena.data[placed.arena_offset] ^= 1
    with mock.patch.object(alone.arenas._random, "choice", return_value=placed):
        for step in (4, 5):
            assert alone.take(step)
            assert alone.read(step, 0, Section.OWNED) == alone.image(Section.OWNED)
    assert caplog.text.count("was damaged in rank0-slot") == 2


@pytest.mark.parametrize("seed", [1, 2])
def test_p2_every_committed_version_is_the_state_of_its_step(tmp_path: Path, seed: int) -> None:
    """Parts of the tensors are written and taken back, and versions fail while they are copied or after the seal."""
    draw, steps = random.Random(seed), range(1, 50)
    failing = {step: draw.choice(FAILS) for step in steps if draw.random() < 0.3}
    faults = tuple(
        FaultConfig(point=point, step=step, action="raise") for step, point in failing.items()
    )
    with group_of_one():
        job = Adapted(0, tmp_path, ALONE, faults=faults)
        for step in steps:
            job.step(step)
            for part in draw.sample(range(4), draw.choice([0, 0, 1, 2])):
                for tensor in (job.base, job.both):
                    tensor.data[part * len(tensor) // 4] ^= 1 << 20
            assert job.wait_for(job.snapshot(step, required=True)) == (step not in failing)
            if step not in failing:
                for section in (Section.OWNED, Section.REPLICATED):
                    assert job.read(step, 0, section) == job.image(section)
        job.worker.close(10)


def partitions(rank: int, root: Path) -> dict[str, Any]:
    """Partitions of which one value changes on one rank: at step 5, whose version is given up after it was sent, back
    at step 6, and again at step 9."""
    faults = (FaultConfig(point=FaultPoint.AFTER_SEAL, step=5, dp=1, action="raise"),)
    me = Adapted(rank, root, PAIR, Copier(CpuCopyEngine(), 2**18), faults=faults)
    peer, seen = 1 - rank, {}
    owned = {0: me.base - rank, 1: me.base - rank + 1}
    for step in range(1, 12):
        me.step(step)
        if step in (5, 6, 9):
            owned[1].data[7] ^= 1 << 20
            if rank == 1:
                me.base.data[7] ^= 1 << 20
        committed = me.wait_for(me.snapshot(step, required=True))
        seen[step] = committed, me.sent()
        if committed:
            for member in (0, 1):
                expected = bytes(owned[member].numpy())
                assert me.read(step, member, Section.OWNED) == expected, (step, member)
    me.worker.close(10)
    return {"seen": seen, "bytes": me.base.nbytes, "peer": peer}


@pytest.mark.process
def test_p2_p4_a_peer_gets_what_has_changed(tmp_path: Path) -> None:
    found = Results(tmp_path, partitions).of(partitions)
    for rank, result in enumerate(found):
        seen = {int(step): tuple(value) for step, value in result["seen"].items()}
        assert [step for step, (committed, _) in seen.items() if not committed] == [5]
        sent = {step: nbytes for step, (committed, nbytes) in seen.items() if committed}
        changed = BLOCK_BYTES if rank == 1 else 0
        # At step 6 the bytes of step 5 are in the slot; the slot of step 10 has those of step 8.
        expected = dict.fromkeys(range(3, 12), 0) | {6: changed, 9: changed, 10: changed}
        expected |= {1: result["bytes"], 2: result["bytes"]}
        expected.pop(5)
        assert sent == expected
