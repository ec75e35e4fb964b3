"""A version that a job of another layout (PP x DP x TP) left in the memory of the nodes: finding it, and
bringing its bytes to the ranks that want them.

Rare, and so simpler than a recovery of the own layout (:mod:`reft.recover.recover`): every rank hears of all
arenas of the job and plans for the old layout alike. Every block that the plan names is compared with its
checksum where it lies before anything is written (P5), so that live state is never half of a version that
turns out not to be whole.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

import msgpack
import torch

from reft.errors import TransferError
from reft.faults import FaultPlan
from reft.grid import Coordinate, Section
from reft.naming import Label
from reft.recover.decide import offline_topology, plan_recovery
from reft.recover.inventory import ArenaRecord, Inventory, find_corrupt
from reft.recover.plan import BlockSource, Fetch, NotRecoverable, RecoveryPlan, SourceKind
from reft.recover.stages import Participant
from reft.recover.transfer import Sink, TransferStats, execute

Place = tuple[int, int]
"""A block of the plan: number of the old coordinate in (pp, dp, tp) order, and of its fetch."""


class OtherMemory:
    """Memory of this job in layouts with other stages or slices. Collective: all methods, on all ranks."""

    def __init__(self, me: Participant) -> None:
        self._me = me
        self._topology = me.topology
        self._bad: frozenset[BlockSource] = frozenset()
        self._inventories: list[Inventory] = []
        self._here = Inventory(self._me.node, ())
        self._plan: RecoveryPlan
        self._blocks: dict[tuple[Coordinate, Section], list[tuple[int, int]]] = {}
        self.moved: list[TransferStats] = []  # what this rank has brought

    def survey(self, beyond: Label | None = None) -> RecoveryPlan | NotRecoverable | None:
        """The newest whole version in another layout, as its job would recover it; every block was
        checked. Nothing is touched, but that blocks which only parity has are decoded and stored. Returns
        the plan of all its coordinates, the same on all ranks; None: there is no such memory."""
        self._look(beyond)
        while True:
            # Ends: every further round knows more corrupt sources, or finds fewer lost blocks.
            plan = self._planned()
            if not isinstance(plan, RecoveryPlan):
                return plan
            known = self._bad
            self._check(plan)
            if self._bad != known:
                continue
            if not plan.rebuilds:
                self._plan = plan
                return plan
            self._decode(plan)
            self._look(beyond)

    def bring_hosts(self, wanted: Iterable[Coordinate]) -> dict[Coordinate, bytes]:
        """The host images of these old coordinates, which every rank may name others of. After a survey."""
        sizes = {at: self._plan.image_bytes(at, Section.HOST) for at in sorted(wanted)}
        images = {at: bytearray(nbytes) for at, nbytes in sizes.items()}
        places = [p for at, nbytes in sizes.items() for p in self.places_of(at, Section.HOST, 0, nbytes)]

        def keep(fetch: Fetch, data: torch.Tensor) -> None:
            image = images[Coordinate(fetch.pp, fetch.key.member, fetch.tp)]
            image[fetch.start_bytes : fetch.start_bytes + fetch.nbytes] = data.numpy().tobytes()

        self._move(places, keep, None)
        return {at: bytes(image) for at, image in images.items()}

    def places_of(self, at: Coordinate, section: Section, start: int, nbytes: int) -> list[Place]:
        """The blocks that hold these bytes of an old coordinate's image, in its order."""
        if (at, section) not in self._blocks:
            fetches = enumerate(self._plan.fetches[at])
            found = [(f.start_bytes, n) for n, f in fetches if f.key.section is section and f.nbytes]
            self._blocks[at, section] = sorted(found)
        blocks = self._blocks[at, section]
        # They tile the image (reft.recover.sources).
        first = max(0, bisect_right(blocks, start, key=lambda b: b[0]) - 1)
        last = bisect_left(blocks, start + nbytes, key=lambda b: b[0])
        number = self._plan.degrees.coordinates().index(at)
        return [(number, n) for _, n in blocks[first:last]]

    def fetch_at(self, place: Place) -> Fetch:
        coordinate, number = place
        return self._plan.fetches[self._plan.degrees.coordinates()[coordinate]][number]

    def bring(self, places: Sequence[Place], sink: Sink) -> None:
        """Blocks of the version, each verified before the sink has it. After a survey."""
        self._move(places, sink, self._me.faults)

    # -- what there is ----------------------------------------------------------------------------

    def _look(self, beyond: Label | None) -> None:
        now = self._topology.degrees

        def is_wanted(record: ArenaRecord) -> bool:
            """Another data-parallel degree alone is taken up in :mod:`reft.recover.recover`."""
            header, was = record.header, record.header.degrees
            return (
                record.usable
                and header.job_id == self._me.job_id
                and (was.pp, was.tp) != (now.pp, now.tp)
                and header.coordinate in was.coordinates()
                and (beyond is None or header.label > beyond)
            )

        def mine() -> bytes:
            if not self._me.is_first_on_node:
                return b""
            found = self._me.inventory()
            return replace(found, arenas=tuple(filter(is_wanted, found.arenas))).pack()

        told = self._me.gather(mine, "taking inventory of another layout")
        self._inventories = [Inventory.unpack(body) for body in told if body]
        self._here = next(i for i in self._inventories if i.node == self._me.node)

    def _planned(self) -> RecoveryPlan | NotRecoverable | None:
        """Pure; the newest version of all layouts that is whole."""
        layouts = {r.header.degrees for i in self._inventories for r in i.arenas}
        plans: list[RecoveryPlan] = []
        refused: list[NotRecoverable] = []
        for degrees in sorted(layouts, key=lambda d: (d.pp, d.dp, d.tp)):
            of_layout = [
                replace(i, arenas=tuple(r for r in i.arenas if r.header.degrees == degrees))
                for i in self._inventories
            ]
            topology = offline_topology(of_layout, self._me.job_id)
            plan = plan_recovery(of_layout, topology, job_id=self._me.job_id, bad=self._bad)
            plans += [plan] if isinstance(plan, RecoveryPlan) else []
            refused += [plan] if isinstance(plan, NotRecoverable) else []
        if plans:
            return max(plans, key=lambda plan: plan.label)
        if not refused:
            return None
        return NotRecoverable(
            reasons=tuple(reason for plan in refused for reason in plan.reasons),
            notes=tuple(note for plan in refused for note in plan.notes),
            newest_committed=max((p.newest_committed for p in refused if p.newest_committed), default=None),
        )

    def _check(self, plan: RecoveryPlan) -> None:
        """Every node looks at what lies there (P5), its ranks at a part each."""
        ranks = self._topology.local_ranks(self._me.node)
        here = {f.source: f for f in plan.reads() if f.node == self._me.node}
        share = [here[source] for source in sorted(here)][ranks.index(self._me.control.rank) :: len(ranks)]

        def looked() -> frozenset[BlockSource]:
            with self._me.opened(self._here) as arenas:
                return find_corrupt(plan.label, share, arenas)

        self._bad |= self._me.gather_sources(looked, f"checking {plan.label}")

    def _decode(self, plan: RecoveryPlan) -> None:
        """What only parity has: some ranks decode it and store it on their nodes, as many at a time as there
        are ranks."""
        todo, world = sorted(plan.rebuilds), self._topology.world_size
        for first in range(0, len(todo), world):
            turn = dict(zip(self._topology.coordinates, todo[first : first + world], strict=False))
            self._decode_some(plan, turn)

    def _decode_some(self, plan: RecoveryPlan, turn: Mapping[Coordinate, Coordinate]) -> None:
        mine = self._me.at
        rebuilds = {at: plan.rebuilds[old] for at, old in turn.items()}
        fetches = {
            at: _seen_from(node, rebuilds[at].fetches if at in rebuilds else ())
            for at, node in zip(self._topology.coordinates, self._topology.nodes, strict=True)
        }
        own = replace(plan, rebuilds={turn[mine]: rebuilds[mine]} if mine in turn else {})
        decoder = self._me.decoder(own, turn.get(mine, mine))

        def reserve() -> bool:
            decoder.reserve()
            return False

        def take(fetch: Fetch, data: torch.Tensor) -> None:
            decoder.take(fetch, data.numpy(), stays=False)

        with closing(decoder):
            self._me.agree(reserve, f"decoding {plan.label}")
            self._transfer(replace(plan, fetches=fetches, rebuilds=rebuilds), take, None)
            self._bad |= self._me.gather_sources(decoder.store, f"decoding {plan.label}")

    # -- transfer -----------------------------------------------------------------------------------

    def _move(self, places: Sequence[Place], sink: Sink, faults: FaultPlan | None) -> None:
        told = self._me.gather(lambda: msgpack.packb(list(places)), "asking for blocks")
        fetches = {
            at: _seen_from(node, (self.fetch_at((c, i)) for c, i in msgpack.unpackb(body)))
            for at, node, body in zip(self._topology.coordinates, self._topology.nodes, told, strict=True)
        }
        self._transfer(replace(self._plan, fetches=fetches), sink, faults)

    def _transfer(self, plan: RecoveryPlan, sink: Sink, faults: FaultPlan | None) -> None:
        bad: frozenset[BlockSource] = frozenset()

        def move() -> bool:
            nonlocal bad
            with self._me.opened(self._here, wait=False) as arenas:
                stats, bad = execute(
                    *([plan], self._topology, self._me.control, arenas, sink),
                    window_bytes=self._me.window_bytes,
                    faults=faults,
                )
            self.moved.append(stats)
            return bool(bad)

        if self._me.agree(move, f"bringing {plan.label}"):
            found = sorted(self._me.gather_sources(lambda: bad, "telling of corrupt blocks"))
            raise TransferError(
                f"{len(found)} blocks of {plan.label} did not arrive as they were when their checksums were "
                f"compared, the first from {found[0].arena} on node {found[0].node}: memory or network of a "
                f"node is faulty, or another start writes there; start the job again, without that node"
            )


def _seen_from(node: str, fetches: Iterable[Fetch]) -> tuple[Fetch, ...]:
    """As a rank of ``node`` gets them: what lies there it reads itself."""
    return tuple(
        replace(f, kind=SourceKind.LOCAL)
        if f.node == node
        else replace(f, kind=SourceKind.PEER)
        if f.kind is SourceKind.LOCAL
        else f
        for f in fetches
    )
