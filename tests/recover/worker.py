"""One rank of the recovery tests: runs every scenario over gloo and writes down what it saw.

Run as ``python -m recover.worker DIR RANK``, or under mpiexec as ``python -m recover.worker DIR mpi``: then what the ranks
say and send goes over MPI. Each scenario is a job whose memory lies under DIR/<name>.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from reft.config import FaultConfig, FaultPoint
from reft.control.control import ControlGroup
from reft.errors import TransferError
from reft.faults import FaultPlan
from reft.grid import (
    STATE_SECTIONS,
    Coordinate,
    Degrees,
    Resize,
    Section,
    VersionId,
    only_replicas_differ,
)
from reft.memory.arena import Arena
from reft.memory.header import checksum
from reft.recover.decide import ImageRange, host_state_sources
from reft.recover.inventory import ArenaStore
from reft.recover.plan import NotRecoverable, count_bytes
from reft.recover.rebuild import ArenaLayout, StoreConfig
from reft.recover.recover import Participant, Recovery
from reft.relayout.element_map import ElementMove, Part, RankImages, plan_replica
from reft_mpi.mpi import load_mpi
from tests.control.mpi_job import refuse_pickling

from .fleet import (
    DEAD,
    JOB,
    MORE,
    NEW,
    NOT_OVER_MPI,
    OTHER_LAYOUTS,
    PADDING,
    RING,
    SCENARIOS,
    SECRET,
    WORLD_SIZE,
    arena_name,
)

IMAGES = Section.REPLICATED, Section.OWNED
OVER_MPI = sys.argv[2:] == ["mpi"]
TRANSPORT = {"transport": "mpi" if OVER_MPI else "sockets"}


class Rank:
    def __init__(self, root: Path, name: str, control: ControlGroup) -> None:
        self.control = control
        self.scenario = SCENARIOS[name]
        self.topology = self.scenario.placement
        rank = control.rank
        self.at = self.topology.coordinates[rank]
        self.node = self.topology.nodes[rank]
        self.job_dir = root / name / self.node
        self.written = self.scenario.fleet.topology.degrees
        self.images: dict[tuple[Coordinate, Section], np.ndarray] = {}
        self.calls = 0
        self.prepared = 0
        self.moves: Sequence[ElementMove] = ()

    def prepare(self, hosts: Mapping[Coordinate, bytes], was: Degrees) -> Sequence[ImageRange]:
        """Of other replicas this rank takes its part of the partitions; of other stages or slices the whole images
        of the old ranks whose host states it has, but for the first byte."""
        self.prepared += 1
        assert was == self.written
        assert set(hosts) == host_state_sources(was, self.topology.degrees, self.at)
        self.images = {
            (at, Section.HOST): np.frombuffer(host, np.uint8) for at, host in hosts.items()
        }
        if was == self.topology.degrees:
            for section in IMAGES:
                self.images[self.at, section] = np.zeros(
                    self.expected(self.at, section, NEW).size, np.uint8
                )
            return ()
        if only_replicas_differ(was, self.topology.degrees):
            resize = Resize(was.dp, self.topology.degrees.dp)
            self.moves = plan_replica(
                self.held(was), self.held(self.topology.degrees), resize, self.at
            )
        else:
            sizes = {
                (at, section): self.scenario.fleet.image_bytes(at, section)
                for at in hosts
                for section in IMAGES
            }
            self.moves = [
                ElementMove(at, s, 1, n - 1, f"{at} {s}", 1) for (at, s), n in sizes.items()
            ]
        for at, section in {(move.source, Section(move.tensor)) for move in self.moves}:
            to = self.target(at)
            self.images[to, section] = np.zeros(self.expected(to, section, NEW).size, np.uint8)
        return [
            ImageRange(move.source, Section(move.tensor), move.start, move.numel)
            for move in self.moves
        ]

    def target(self, at: Coordinate) -> Coordinate:
        return self.at if only_replicas_differ(self.written, self.topology.degrees) else at

    def held(self, degrees: Degrees) -> RankImages:
        fleet, at = self.scenario.fleet, replace(self.at, dp=0)
        part = fleet.image_bytes(at, Section.OWNED)
        length = part * self.written.dp - PADDING
        whole = {str(Section.REPLICATED): fleet.image_bytes(at, Section.REPLICATED)}
        owned = str(Section.OWNED)
        size = part if degrees == self.written else -(-length // degrees.dp)
        return RankImages(whole, {owned: (Part(owned, size, length),)})

    def expected(self, at: Coordinate, section: Section, label: VersionId) -> np.ndarray:
        """An image of a rank, of this layout where the replicas alone are others."""
        fleet, now = self.scenario.fleet, self.topology.degrees
        if not only_replicas_differ(self.written, now):
            return fleet.image(at, section, label)
        if section is not Section.OWNED:
            return fleet.image(replace(at, dp=at.dp % self.written.dp), section, label)
        old = [fleet.image(replace(at, dp=dp), section, label) for dp in range(self.written.dp)]
        [(_, part, length)] = self.held(now).parts[str(section)]
        whole = np.zeros(part * now.dp, np.uint8)
        whole[:length] = np.concatenate(old)[:length]
        return whole[at.dp * part :][:part]

    def copy(self, fetch, data: torch.Tensor) -> int:
        self.calls += 1
        assert fetch.key.section is not Section.HOST
        block, section = data.numpy(), fetch.key.section
        if self.written == self.topology.degrees:
            self.images[self.at, section][fetch.start_bytes : fetch.start_bytes + fetch.nbytes] = (
                block
            )
        for move in self.moves:
            of = move.source.pp, move.source.tp, move.tensor
            if of != (fetch.pp, fetch.tp, section) or (
                fetch.key.member != move.source.dp and section is Section.OWNED
            ):
                continue
            begin, end = (
                max(move.start, fetch.start_bytes),
                min(move.start + move.numel, fetch.start_bytes + fetch.nbytes),
            )
            if begin < end:
                target = self.images[self.target(move.source), section]
                target[move.at + begin - move.start : move.at + end - move.start] = block[
                    begin - fetch.start_bytes : end - fetch.start_bytes
                ]
        return checksum(block.data)

    def equal(self, label: VersionId) -> bool:
        skip = 0 if self.topology.degrees.pp == self.written.pp else 1
        wrong = [
            (at, section)
            for (at, section), image in self.images.items()
            if not np.array_equal(image[skip:], self.expected(at, section, label)[skip:])
        ]
        return not wrong and {section for _, section in self.images} == set(STATE_SECTIONS)

    def recovery(self, **options) -> Recovery:
        options.setdefault("any_layout", True)
        place, faults = ArenaStore(self.job_dir, self.node, SECRET), options.pop("faults", None)
        return Recovery(
            Participant(self.topology, self.control, JOB, place, faults, 4096), **options
        )

    def completing(self, scheme: str = "arc", slot: int = 0) -> StoreConfig:
        def blueprint(replicated_bytes: int, owned_bytes: tuple[int, ...]) -> ArenaLayout:
            sizes = self.scenario.fleet.sizes(self.at.pp, self.at.tp)
            assert (replicated_bytes, owned_bytes) == (sizes.replicated_bytes, sizes.owned_bytes)
            return self.scenario.fleet.blueprint(self.at)

        path = self.job_dir / arena_name(self.topology, self.at, slot)
        self.job_dir.mkdir(parents=True, exist_ok=True)
        return StoreConfig(scheme, None if path.exists() else path, blueprint)

    def stored(self) -> dict[str, object]:
        path = self.job_dir / arena_name(self.topology, self.at, 0)
        if not path.exists():
            return {"state": "none"}
        with Arena.open(path, SECRET) as arena:
            header = arena.header()
            wanted = self.scenario.fleet.entries(self.at, NEW, real=True)
            return {
                "state": str(header.state),
                "equal": set(header.entries) == set(wanted),
                "verified": all(arena.verify(entry) for entry in header.entries),
            }

    def recover(self, between=lambda: None, prepare=None, copy=None, **options):
        recovery = self.recovery(**options)
        recovery.survey()
        between()
        return recovery.restore(prepare or self.prepare, copy or self.copy)

    def report(self, outcome) -> dict[str, object]:
        if isinstance(outcome, NotRecoverable):
            return {"refused": str(outcome), "calls": self.calls, "prepared": self.prepared}
        label = outcome.label
        return {
            "label": [label.incarnation, label.step],
            "equal": self.equal(label),
            "written": str(outcome.plan.written),
            "bytes_from": dict(outcome.stats.bytes_from),
            "planned": count_bytes(outcome.plan.fetches[self.at]),
            "total": outcome.plan.bytes_from,
            "buffer_bytes": outcome.stats.buffer_bytes,
            "repaired": [str(r) for r in outcome.repaired],
            "flaws": [r.flaw.name for r in outcome.repaired],
            "rounds": outcome.rounds,
            "prepared": self.prepared,
            "text": str(outcome),
        }


def attempt(action) -> dict[str, object]:
    began = time.monotonic()
    try:
        action()
    except Exception as error:
        return {
            "error": type(error).__name__,
            "is_transfer_error": isinstance(error, TransferError),
            "message": str(error),
            "secs": time.monotonic() - began,
        }
    return {"error": None}


class FlipsOnTheWay(ControlGroup):
    flipped = False

    def stream(self, sends, receives, wake=None) -> None:
        for peer, (first, *others) in sends.items():
            if wake is not None and len(first) == RING.block_bytes and not self.flipped:
                self.flipped, damaged = True, bytearray(first)
                damaged[7] ^= 0x40
                sends = {**sends, peer: [memoryview(damaged), *others]}
        super().stream(sends, receives, wake)


class ForgesMessages(ControlGroup):
    def stream(self, sends, receives, wake=None) -> None:
        forged = {peer: bytearray(b"".join(parts)) for peer, parts in sends.items()}
        for message in forged.values():
            if len(message) > 8:  # not its length
                message[-1] ^= 0x40
        super().stream(
            {peer: [memoryview(message)] for peer, message in forged.items()}, receives, wake
        )


def run_scenario(root: Path, name: str, control: ControlGroup) -> dict[str, object]:
    me, rank = Rank(root, name, control), control.rank
    if name == "corrupt_on_the_way":
        me.control = (FlipsOnTheWay if me.node == "n1" else ControlGroup)(
            30.0, node=me.node, secret=SECRET, **TRANSPORT
        )
    if name == "arena_vanished":

        def vanish() -> None:
            if me.node == "n3":
                (me.job_dir / "rank0-slot0.arena").unlink()

        return me.report(me.recover(between=vanish))
    if "complet" in name or name == "another_scheme":
        return run_completion(root, name, control)
    faults = {
        "injected_raise": FaultConfig(
            point=FaultPoint.DURING_RECOVERY, step=NEW.step, dp=1, action="raise"
        ),
        "peer_killed": FaultConfig(
            point=FaultPoint.DURING_RECOVERY, step=NEW.step, dp=DEAD.dp, action="kill"
        ),
    }
    if name in faults:
        plan = FaultPlan([faults[name]], me.at)
        how = me.completing() if name == "peer_killed" else None
        return {**attempt(lambda: me.recover(faults=plan, completing=how)), "calls": me.calls}

    def fail(*_: object) -> None:
        raise ValueError("no room for this block")

    if name in ("copy_fails", "prepare_fails"):
        broken = {name.removesuffix("_fails"): fail} if rank == 1 else {}
        return attempt(lambda: me.recover(**broken))
    if name == "no_room_to_decode":
        with no_room_for_files() if rank == 1 else nullcontext():
            return attempt(me.recover)
    return me.report(me.recover())


def run_other_layout(root: Path, name: str, control: ControlGroup) -> dict[str, object]:
    me, again = Rank(root, name, control), Rank(root, name, control)
    refused = str(me.recovery(any_layout=False).survey())
    report = me.report(me.recover(completing=me.completing(slot=7)))  # no arena is made
    return {**report, "again": again.report(again.recover()), "refused": refused}


def run_completion(root: Path, name: str, control: ControlGroup) -> dict[str, object]:
    me, again = Rank(root, name, control), Rank(root, name, control)
    how = me.completing("arc:2" if name == "another_scheme" else "arc")
    with no_room_for_files() if name == "no_room_to_complete" and me.at == DEAD else nullcontext():
        report = me.report(me.recover(completing=how))
    stored = me.stored()
    return {**report, "stored": stored, "after": again.report(again.recover())}


@contextmanager
def no_room_for_files() -> Iterator[None]:
    """This process can make no file of more than a page: allocating one fails as where memory is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def greeting(name: str, rank: int) -> dict[str, object]:
    """What comes of messages where rank 1 does not authenticate its own, and of a gathering over MPI where it has
    another secret: sockets do not even connect."""
    kind = ForgesMessages if rank == 1 and name == "forged_message" else ControlGroup
    secret = SECRET[::-1] + b"x" if rank == 1 and name == "stranger" else SECRET
    control = kind(30.0, node=f"host{rank}", secret=secret, **TRANSPORT)
    if name == "stranger":
        found = attempt(lambda: control.gather_bytes(b"a table"))
    else:
        among = (0, 1) if rank < 2 else (2, 3)
        found = attempt(lambda: control.swap(dict.fromkeys(among, b"a table of blocks")))
        control.gather_bytes(b"")  # nobody leaves before all have theirs
    control.leave()
    return found


def main() -> None:
    root = Path(sys.argv[1])
    if OVER_MPI:
        refuse_pickling(load_mpi())
    rank = load_mpi().COMM_WORLD.rank if OVER_MPI else int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{root / 'rendezvous'}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=60),
    )
    results: dict[str, object] = {}
    control = ControlGroup(30.0, node=f"host{rank}", secret=SECRET, **TRANSPORT)
    if OVER_MPI:
        results["stranger"] = greeting("stranger", rank)
    for name in [*MORE, *SCENARIOS]:
        if OVER_MPI and name in NOT_OVER_MPI:
            continue
        if name == "forged_message":
            results[name] = greeting(name, rank)
        elif name in OTHER_LAYOUTS:
            results[name] = run_other_layout(root, name, control)
        else:
            results[name] = run_scenario(root, name, control)
        (root / f"result-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
