"""What holds of every place where arenas lie: the own node's memory, a peer's, a storage directory. Two ranks restore
from real files over real channels; there is one copy of everything, so that what is damaged cannot be replaced."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from reft.control.control import ControlGroup
from reft.grid import STATE_SECTIONS, Coordinate, Degrees, Section, Topology
from reft.memory.arena import Arena
from reft.memory.header import Entry, checksum
from reft.recover.inventory import ArenaStore
from reft.recover.plan import NotRecoverable
from reft.recover.recover import Participant, Recovery, RecoveryOutcome
from reft.storage.persist import arena_file
from reft.storage.persisted import STORAGE_KEY
from reft.storage.publish import BlockInFile, write_arena
from tests.control.ranks import Table, on_all

from .fleet import JOB, NEW, SECRET, Fleet, arena_name

DEGREES = Degrees(1, 2, 1)
RANKS = DEGREES.coordinates()
TOGETHER, APART = (Topology(DEGREES, RANKS, ("n0", node)) for node in ("n0", "n1"))
FLEET = Fleet(TOGETHER, copies=0, block_bytes=512)


@dataclass(frozen=True)
class Kind:
    """How rank 1 reaches the arenas of both."""

    topology: Topology
    secret: bytes = SECRET
    source: str = "local"  # where its bytes come from
    stored: bool = False

    def write(self, root: Path) -> list[Path]:
        """The arenas of the two ranks."""
        FLEET.write(root / "memory", NEW)
        paths = [root / "memory" / "n0" / arena_name(TOGETHER, at, 0) for at in RANKS]
        if not self.stored:
            return paths
        (root / "stored").mkdir()
        for at, path in zip(RANKS, paths, strict=True):
            with Arena.open(path, SECRET) as arena:
                header = arena.header()
                blocks = [BlockInFile(entry, arena.data, path.name) for entry in header.entries]
                write_arena(root / "stored" / arena_file(at), header, blocks)
        shutil.rmtree(root / "memory")
        return [root / "stored" / arena_file(at) for at in RANKS]

    def place(self, root: Path, node: str) -> ArenaStore:
        return ArenaStore(
            root / "stored" if self.stored else root / "memory" / node, node, self.secret
        )


KINDS = {
    "own node": Kind(TOGETHER),
    "peer": Kind(APART, source="peer"),
    "storage": Kind(TOGETHER, STORAGE_KEY, stored=True),
}


class Threaded(ControlGroup):
    def __init__(self, rank: int, store: Table, node: str) -> None:
        self.rank, self.world_size, self.timeout_secs = rank, len(RANKS), 60.0
        self._node, self._store, self._prefix, self._secret = node, store, "places", SECRET
        self._connects, self._open_transport, self._transport = iter(range(9)), None, None
        self.on_silence = lambda missing, secs: None
        self._connect(lambda: True)


class Rank:
    def __init__(self, kind: Kind, root: Path, rank: int, store: Table) -> None:
        self.at, node = RANKS[rank], kind.topology.nodes[rank]
        self.images: dict[Section, np.ndarray] = {}
        control = Threaded(rank, store, node)
        recovery = Recovery(Participant(kind.topology, control, JOB, kind.place(root, node)))
        recovery.survey()
        self.outcome = recovery.restore(self.prepare, self.copy)
        control.leave()

    def prepare(self, hosts: Mapping[Coordinate, bytes], was: Degrees) -> tuple[()]:
        assert (set(hosts), was) == ({self.at}, DEGREES)
        sizes = {section: FLEET.image_bytes(self.at, section) for section in STATE_SECTIONS}
        self.images = {section: np.zeros(nbytes, np.uint8) for section, nbytes in sizes.items()}
        self.images[Section.HOST] = np.frombuffer(hosts[self.at], np.uint8)
        return ()

    def copy(self, fetch, data: torch.Tensor) -> int:
        self.images[fetch.key.section][fetch.start_bytes :][: fetch.nbytes] = data.numpy()
        return checksum(data.numpy().data)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def restored(kind: Kind, root: Path) -> list[Rank]:
    store = Table()
    return on_all(lambda rank: Rank(kind, root, rank, store), len(RANKS))


def refused(kind: Kind, root: Path) -> str:
    first, second = (rank.outcome for rank in restored(kind, root))
    assert isinstance(first, NotRecoverable)
    assert str(first) == str(second)
    return str(first)


def test_every_byte_of_it_is_restored(kind: Kind, tmp_path: Path) -> None:
    kind.write(tmp_path)
    for rank in restored(kind, tmp_path):
        assert isinstance(rank.outcome, RecoveryOutcome)
        for section in STATE_SECTIONS:
            np.testing.assert_array_equal(rank.images[section], FLEET.image(rank.at, section, NEW))
        assert not rank.outcome.repaired
    moved = {source for source, nbytes in rank.outcome.stats.bytes_from.items() if nbytes}
    assert moved == {kind.source}


def entries_of(kind: Kind, path: Path) -> tuple[Entry, ...]:
    with Arena.open(path, kind.secret) as arena:
        return arena.header().entries


def test_p5_every_damaged_block_of_it_is_refused_by_name(kind: Kind, tmp_path: Path) -> None:
    for at, path in zip(RANKS, kind.write(tmp_path), strict=True):
        sound = path.read_bytes()
        with Arena.open(path, kind.secret) as arena:
            data = len(sound) - arena.data_bytes
        for entry in entries_of(kind, path):
            damaged = bytearray(sound)
            damaged[data + entry.arena_offset + entry.nbytes // 2] ^= 4
            path.write_bytes(damaged)
            said = refused(kind, tmp_path)
            assert (
                f"{at} {entry.key.section} block {entry.key.index}: every source is corrupt" in said
            )
        path.write_bytes(sound)


def test_p5_an_arena_that_is_gone_or_torn_is_missed_by_name(kind: Kind, tmp_path: Path) -> None:
    path = kind.write(tmp_path)[1]
    sound = path.read_bytes()
    path.write_bytes(sound[:-1])
    assert f"{path.name}: has {len(sound) - 1} bytes, expected {len(sound)}" in refused(
        kind, tmp_path
    )
    path.unlink()
    assert "pp0.dp1.tp0 is not stored on any node that is present" in refused(kind, tmp_path)


def test_p11_what_does_not_carry_its_key_is_not_read(kind: Kind, tmp_path: Path) -> None:
    kind.write(tmp_path)
    assert "does not match the job's secret" in refused(replace(kind, secret=b"x" * 32), tmp_path)
