"""What a copier brings to an arena, and the checksums it takes on the way, are those of the live bytes (P5)."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.config import FaultPoint
from reft.device import Vendor
from reft.grid import Section, VersionId
from reft.memory.arena import Arena
from reft.memory.header import checksum
from reft.pacing.gate import HostGate, StreamGate
from reft.pacing.staging import StagingArea
from reft.protect.backend import TorchBackend, _tried
from reft.protect.placement import place_group
from reft.snapshot import copier as copier_module
from reft.snapshot.arenas import ArenaWriter
from reft.snapshot.copier import Copier
from reft.snapshot.copy_engine import CopyTicket, CpuCopyEngine
from reft.snapshot.device_engine import DeviceCopyEngine, copy_engine_for
from reft.snapshot.gate import Gate, Permit
from reft.snapshot.plan import GroupLayout, LiveImages, PlacedBlock, SectionSizes, make_shard_plan
from reft.state.catalogue import SectionImage
from reft.verify.peers import PeerCheck
from tests.device.simulated import Simulated
from tests.protect.backends import case_or_skip
from tests.snapshot.conftest import WAIT_SECS, parity_of, random_bytes


class OneByOne(HostGate):
    def __init__(self) -> None:
        super().__init__()
        self.open(0, 1, None)


def at_the_fence() -> HostGate:
    gate = HostGate()
    gate.expedite()
    return gate


def beside_computation() -> HostGate:
    gate = HostGate()
    gate.share(1.0)
    return gate


class Closing(HostGate):
    """Copies run beside computation, and training waits for each at once."""

    def admit(self) -> Permit:
        permit = super().admit()
        permit.until.value = 1
        return permit

    def release(self, permit: Permit, secs: float) -> None:
        permit.until.value = 0
        super().release(permit, secs)

    @classmethod
    def made(cls) -> Closing:
        gate = cls()
        gate.share(1.0)
        return gate


GATES = {
    "open": Gate,
    "fence": at_the_fence,
    "window": OneByOne,
    "beside": beside_computation,
    "closing": Closing.made,
}


@contextmanager
def filling_of(
    folder: Path, tensors: list[torch.Tensor], *, copies: int, parities: int, block_bytes: int
) -> Iterator[tuple[ArenaWriter, LiveImages]]:
    half = len(tensors) // 2
    replicated, owned = (
        SectionImage([(str(i), t) for i, t in enumerate(part)])
        for part in (tensors[:half], tensors[half:])
    )
    placement = place_group(["a", "b", "c", "d"], copies, parities)
    plan = make_shard_plan(
        SectionSizes(replicated.nbytes, (owned.nbytes,) * 4, (64,) * 4), placement, block_bytes
    )
    layout = GroupLayout(plan, 0, "layout")
    path = folder / "x.arena"
    path.unlink(missing_ok=True)
    with Arena.create(path, layout.mine.data_bytes, len(layout.mine.blocks), b"s" * 32) as arena:
        data = torch.frombuffer(arena.data, dtype=torch.uint8).fill_(0xEE)
        writer = ArenaWriter(0, arena, layout, VersionId(0, 1), data)
        yield writer, LiveImages(replicated, owned, "signature")


def expected_bytes(images: LiveImages, section: Section, begin: int, nbytes: int) -> torch.Tensor:
    out = torch.empty(nbytes, dtype=torch.uint8)
    image = images.replicated if section is Section.REPLICATED else images.owned
    image.read_into(begin, out)
    return out


def check(writer: ArenaWriter, images: LiveImages) -> None:
    """Nothing is left to be hashed but the host block, which the worker writes."""
    facts = {b.key: b for b in writer.local_blocks if b.key.section is not Section.HOST}
    for placed in facts.values():
        raw = writer.tensor(placed)
        if placed.key.section in (Section.REPLICATED, Section.OWNED):
            block = placed.block
            assert torch.equal(
                raw, expected_bytes(images, placed.key.section, block.start_bytes, block.nbytes)
            )
        assert writer.checksums.get(placed) == checksum(raw.numpy())
    for key, expected in parity_of(
        writer.layout.plan, writer.layout.mine, images.replicated
    ).items():
        np.testing.assert_array_equal(writer.tensor(facts[key]).numpy(), expected)


def copy_all(copier: Copier, writer: ArenaWriter, images: LiveImages, gate: Gate) -> list[int]:
    copier.begin()
    records = copier.copy(images, writer, gate, reach=lambda point: None, on_released=lambda: None)
    copier.fence()
    return [record.nbytes for record in records]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.one_of(st.integers(0, 200), st.integers(0, 60_000)), min_size=2, max_size=12),
    scheme=st.sampled_from([(0, 0), (1, 0), (2, 0), (0, 1), (0, 2), (1, 1)]),
    cut=st.tuples(st.sampled_from([4096, 16_384]), st.sampled_from([4096, 6_400, 65_536])),
    gate=st.sampled_from(sorted(GATES)),
)
def test_p5_what_is_copied_is_hashed_on_the_way_whatever_the_gate(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    scheme: tuple[int, int],
    cut: tuple[int, int],
    gate: str,
) -> None:
    block_bytes, chunk_bytes = cut
    tensors = [random_bytes(n, i) for i, n in enumerate(sizes)]
    folder = tmp_path_factory.mktemp("arena")
    with filling_of(
        folder, tensors, copies=scheme[0], parities=scheme[1], block_bytes=block_bytes
    ) as made:
        writer, images = made
        copier = Copier(CpuCopyEngine(), chunk_bytes)
        for _ in range(2):  # the second version finds the chunks cut
            for tensor in tensors:
                tensor.add_(1)
            copied = copy_all(copier, writer, images, GATES[gate]())
            check(writer, images)
        local = [b for b in writer.local_blocks if b.key.section is not Section.HOST]
        assert sum(copied) == sum(b.block.nbytes for b in local)
        most = {"window": chunk_bytes, "closing": chunk_bytes}.get(gate, block_bytes)
        assert max(copied, default=0) <= most, (
            "beside computation a call copies a block, or until training waits"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "cupy"])
def test_p5_parities_are_encoded_on_a_device_by_what_is_there(
    tmp_path: Path, at_hand: Vendor, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    tensors = [random_bytes(n, n).to(at_hand.type) for n in (50_000, 3001, 7000, 60_000)]
    made = case_or_skip("cupy").make() if backend == "cupy" else TorchBackend()
    monkeypatch.setitem(_tried, tensors[0].device, made)
    with filling_of(tmp_path, tensors, copies=1, parities=2, block_bytes=16_384) as (
        writer,
        images,
    ):
        copier = Copier(copy_engine_for(at_hand.type), 4096)
        assert copier.engine.register(writer.arena.data)
        for _ in range(2):  # the second version finds the chunks cut
            writer.checksums.clear()
            for tensor in tensors:
                tensor.add_(1)
            copy_all(copier, writer, images, Gate())
            copier.engine.synchronize()
            writer.hash_rest()
            check(writer, images)
        copier.close()
        copier.engine.close()


def test_p2_what_was_staged_is_hashed_as_it_was_then(
    tmp_path: Path, sim: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its sources there are other bytes by the time it is drained."""
    monkeypatch.setattr(DeviceCopyEngine, "least_chunk_bytes", 0)
    tensors = [random_bytes(50_000, 1).to("sim"), random_bytes(50_000, 2).to("sim")]
    with filling_of(tmp_path, tensors, copies=1, parities=1, block_bytes=16_384) as (
        writer,
        images,
    ):
        engine = copy_engine_for("sim")
        engine.register(writer.arena.data)
        area, gate = StagingArea(engine), StreamGate()
        assert area.reserve(30_000)
        gate.expedite()
        copier = Copier(engine, 4096, area)
        copier.begin()
        copier.copy(
            images,
            writer,
            gate,
            reach=lambda point: None,
            on_released=lambda: None,
            may_stage=lambda: True,
        )
        copier.fence()
        assert copier.staged
        before = [t.clone() for t in tensors]
        for tensor in tensors:
            tensor.fill_(7)
        copier.drain(writer, Gate())
        for tensor, bytes_before in zip(tensors, before, strict=True):
            tensor.copy_(bytes_before)
        sim.synchronize()
        writer.hash_rest()
        check(writer, images)
        copier.close()


def test_memory_that_is_registered_shares_no_page_with_anything_else(
    tmp_path: Path, sim: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver refuses a copy to memory that is registered in part: a tensor of the heap on the same page."""
    tensors = [random_bytes(50_000, 1).to("sim")]
    with filling_of(tmp_path, tensors, copies=0, parities=0, block_bytes=16_384) as (
        writer,
        images,
    ):
        engine, begins = copy_engine_for("sim"), list[int]()
        copier = Copier(engine, 4096)
        copier.features = [PeerCheck(by_turns=False, block_bytes=16_384)]
        monkeypatch.setattr(engine, "register", lambda memory: begins.append(memory.data_ptr()))
        copy_all(copier, writer, images, Gate())
        assert begins
        assert all(begin % mmap.PAGESIZE == 0 for begin in begins)
        copier.close()


def test_blocks_are_hashed_by_several_threads_while_others_arrive(
    tmp_path: Path, sim: Simulated
) -> None:
    tensors = [random_bytes(300_000, 1).to("sim"), random_bytes(50_000, 2).to("sim")]
    with filling_of(tmp_path, tensors, copies=0, parities=0, block_bytes=16_384) as (
        writer,
        images,
    ):
        engine = copy_engine_for("sim")
        engine.register(writer.arena.data)
        copier = Copier(engine, 4096, hashers=3)
        together, threads = threading.Barrier(3), set[int]()
        hash_block = ArenaWriter.hash

        def hash_together(self: ArenaWriter, placed: PlacedBlock) -> None:
            here = threading.current_thread()
            if here.name == "reft-hash" and here.ident not in threads:
                threads.add(threading.get_ident())
                together.wait(WAIT_SECS)  # all three are at work
            hash_block(self, placed)

        with (
            mock.patch.object(copier_module, "_BATCH_BYTES", 16_384),
            mock.patch.object(ArenaWriter, "hash", hash_together),
        ):
            copy_all(copier, writer, images, Gate())
            writer.hash_rest()
        check(writer, images)
        assert len(threads) == 3
        copier.close()


def test_p6_a_device_that_fails_while_blocks_arrive_fails_the_version(
    tmp_path: Path, sim: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filling_of(
        tmp_path, [random_bytes(50_000, 1).to("sim")], copies=0, parities=0, block_bytes=16_384
    ) as (
        writer,
        images,
    ):
        copier = Copier(copy_engine_for("sim"), 4096)

        def fail(ticket: CopyTicket) -> None:
            raise RuntimeError("the device failed")

        monkeypatch.setattr(copier.engine, "wait", fail)
        copy_all(copier, writer, images, Gate())
        with pytest.raises(RuntimeError, match="the device failed"):
            writer.hash_rest()
        copier.close()


def test_faults_are_reached_in_the_middle_whatever_the_gate_lets_through(tmp_path: Path) -> None:
    tensors = [random_bytes(50_000, 1), random_bytes(50_000, 2)]
    with filling_of(tmp_path, tensors, copies=0, parities=1, block_bytes=2**20) as (
        writer,
        images,
    ):
        copier = Copier(CpuCopyEngine(), 4096)
        reached: dict[FaultPoint, int] = {}
        copier.begin()

        def reach(point: FaultPoint) -> None:
            reached[point] = sum(writer.traffic.to_host.values())

        copier.copy(images, writer, at_the_fence(), reach=reach, on_released=lambda: None)
        total = sum(writer.traffic.to_host.values())
        assert set(reached) == {
            FaultPoint.DURING_COPY,
            FaultPoint.BEFORE_PARITY,
            FaultPoint.DURING_PARITY,
        }
        assert 0 < reached[FaultPoint.DURING_COPY] < reached[FaultPoint.BEFORE_PARITY]
        assert reached[FaultPoint.BEFORE_PARITY] < reached[FaultPoint.DURING_PARITY] < total


def test_p1_training_may_still_resize_what_was_copied(tmp_path: Path) -> None:
    """Torch refuses that for a storage that NumPy has seen."""
    tensors = [random_bytes(n, n) for n in (5000, 3001, 7000)]
    with filling_of(tmp_path, tensors, copies=1, parities=1, block_bytes=2**12) as (
        writer,
        images,
    ):
        copy_all(Copier(CpuCopyEngine(), 1024), writer, images, Gate())
        check(writer, images)
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


class Windows(StreamGate):
    permits = 0

    def admit(self) -> Permit:
        self.permits += 1
        return super().admit()


@pytest.mark.parametrize(("tensors", "windows"), [(2, 0), (2, 16), (512, 0), (512, 16)])
def test_p1_a_device_is_called_for_each_permit_and_each_contiguous_piece(
    tmp_path: Path, sim: Simulated, monkeypatch: pytest.MonkeyPatch, tensors: int, windows: int
) -> None:
    """However small chunks are: 256 of data here, as in a GiB."""
    monkeypatch.setattr(DeviceCopyEngine, "least_chunk_bytes", 0)
    monkeypatch.setattr(
        Copier, "_read_again", lambda *_: None
    )  # one block of a version, here all of it
    total, chunk, most = 2**20, 2**12, 2**15
    monkeypatch.setattr("reft.snapshot.copier._BATCH_BYTES", most)
    # The storages of tensors do not touch each other: each is a piece of its own.
    live = [random_bytes(total // tensors, n).to("sim") for n in range(tensors)]
    with filling_of(tmp_path, live, copies=1, parities=0, block_bytes=total) as (writer, images):
        engine = copy_engine_for("sim")
        engine.register(writer.arena.data)
        gate, copier = Windows(), Copier(engine, chunk)
        wanted = sum(
            b.block.nbytes for b in writer.local_blocks if b.key.section is not Section.HOST
        )
        copier.begin()
        gate.enter()
        for number in range(windows):
            gate.open(number, wanted // windows, engine.stamp())
        gate.expedite()
        sim.settings.recorded = sim.settings.waits = sim.settings.transfers = 0
        records = copier.copy(
            images, writer, gate, reach=lambda point: None, on_released=lambda: None
        )
        recorded, waits, transfers = (
            sim.settings.recorded,
            sim.settings.waits,
            sim.settings.transfers,
        )
        copier.fence()
        copier.close()
    assert sum(record.nbytes for record in records) == wanted
    at_once = gate.permits + wanted // most + 1  # the fault point in the middle splits one
    assert recorded <= at_once + 1, "an event for what is copied at once, one that tells the time"
    assert waits <= gate.permits + 1, "a mark of each window, and the state's own"
    assert transfers <= tensors + len(writer.local_blocks) + at_once
