"""Carrying recovery plans out on one rank: decoding what is lost, then host state, then everything else.

Every stage ends in an agreement of all ranks: a rank that fails in one is known to all before the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from reft.blocks import Section
from reft.control.control import ControlGroup
from reft.faults import FaultPlan
from reft.grid import Coordinate, Topology
from reft.recover.complete import Completion
from reft.recover.decide import Group
from reft.recover.ledger import Flaw, Ledger
from reft.recover.local import ArenaSet, find_corrupt
from reft.recover.plan import BlockSource, Fetch, RecoveryPlan, SourceKind
from reft.recover.rebuild import Decoder
from reft.recover.reshape import Piece, Resize
from reft.recover.sums import SumPlan, add_up
from reft.recover.transfer import Copy, Sink, TransferStats, execute

Prepare = Callable[[bytes, Resize], Sequence[Piece]]
"""Takes this coordinate's verified host image and gives the live state the shape it describes. Where the
version was written at another data-parallel degree, the host image is that of :meth:`Resize.host_from`, and
what is returned says which bytes of the partitions this coordinate needs."""


@dataclass
class Courier:
    """Carries plans out on one rank and adds up what it moved."""

    topology: Topology
    control: ControlGroup
    ledger: Ledger
    window_bytes: int
    arenas: ArenaSet = field(default_factory=dict)
    moved: list[TransferStats] = field(default_factory=list)
    plans: Mapping[Group, RecoveryPlan] = field(default_factory=dict)
    parts: Mapping[Group, tuple[int, ...]] = field(default_factory=dict)

    def take_up(
        self, plans: Mapping[Group, RecoveryPlan], parts: Mapping[Group, tuple[int, ...]], own: Group
    ) -> None:
        """What to carry out: the plans of the groups this rank takes part in, its own first."""
        self.plans, self.parts, self._plan = plans, parts, plans[own]

    @property
    def _at(self) -> Coordinate:
        return self.topology.coordinates[self.control.rank]

    @property
    def _node(self) -> str:
        return self.topology.nodes[self.control.rank]

    def rebuild(self, job_dir: Path, secret: bytes) -> None:
        """Collective: decode what no node holds, so that the next plan finds it. Corrupt sources go to
        the ledger; what they are part of is decoded in a later round, in another way."""
        part = {group: plan.to_decode() for group, plan in self.plans.items()}
        sums = self._sums()

        def reserve() -> frozenset[BlockSource]:
            # In a stage without messages: whoever fails here leaves no peer waiting for one.
            decoder.reserve()
            return frozenset()

        def move() -> frozenset[BlockSource]:
            # Of what is added up only the checksums are fetched.
            moved = [p.only(Section.CHECKSUMS) if group in sums else p for group, p in part.items()]
            return self._move(moved, take, room_for=room_for, counted=False)

        def add_up_all() -> frozenset[BlockSource]:
            bad: frozenset[BlockSource] = frozenset()
            # In one order everywhere: a rank may take part for several groups.
            for _, plan in sorted(sums.items()):
                if self.control.rank in plan.ranks:
                    bad |= self._add_up(plan, decoder)
            return bad

        def room_for(fetch: Fetch) -> torch.Tensor | None:
            room = decoder.room_for(fetch)
            return None if room is None else torch.from_numpy(room)

        def take(fetch: Fetch, data: torch.Tensor) -> None:
            decoder.take(fetch, data.numpy(), stays=fetch.kind is SourceKind.LOCAL)

        kept_bytes = self.window_bytes
        decoder = Decoder(self._plan, self._at, job_dir, self._node, secret, kept_bytes=kept_bytes)
        with closing(decoder):
            self._share(part, reserve, Flaw.STORED)
            if self._share(part, move, Flaw.IN_TRANSIT):
                return
            if self.control.adds_up and self._share(part, add_up_all, Flaw.STORED):
                return
            self._share(part, decoder.store, Flaw.OTHER_DATA)

    def _sums(self) -> dict[Group, SumPlan]:
        """What the groups of this rank leave to the fabric to decode; nothing over sockets."""
        if not self.control.adds_up:
            return {}
        plans = {group: SumPlan.of(plan, self.topology) for group, plan in self.plans.items()}
        return {group: plan for group, plan in plans.items() if plan is not None and plan.ranks}

    def _add_up(self, plan: SumPlan, decoder: Decoder) -> frozenset[BlockSource]:
        stats, bad = add_up(
            *(plan, self.control.rank),
            arenas=self.arenas,
            xor=self.control.xor,
            put=decoder.put,
            window_bytes=self.window_bytes,
        )
        self.moved.append(stats)
        return bad

    def _share(
        self, plans: Mapping[Group, RecoveryPlan], stage: Callable[[], frozenset[BlockSource]], flaw: Flaw
    ) -> bool:
        """:meth:`Ledger.share`; what arrived corrupt is looked at where it is stored, to tell why."""
        refused = self.ledger.share(plans, self.parts, stage, flaw)
        if refused and flaw is Flaw.IN_TRANSIT:
            label, suspects = self._plan.label, self.ledger.in_transit(self._node, self._plan.label)
            self.ledger.share(
                plans, self.parts, lambda: find_corrupt(label, suspects, self.arenas), Flaw.STORED
            )
        return refused

    def bring_host(
        self, prepare: Prepare, resize: Resize, completion: Completion | None
    ) -> Sequence[Piece] | None:
        """Collective: the host state of every coordinate. What ``prepare`` returned; None if a source turned
        out corrupt anywhere, which is then in the ledger.

        Every stage ends in an agreement: a rank that fails in one is known to all before the next.
        """
        plans = tuple(self.plans.values())
        pieces: Sequence[Piece] = ()
        nbytes = self._plan.image_bytes(self._at, Section.HOST)
        host = torch.empty(nbytes, dtype=torch.uint8)

        def begin() -> frozenset[BlockSource]:
            # In a stage without messages: whoever fails here leaves no peer waiting for one.
            if completion is not None:
                completion.begin()
            return frozenset()

        def move_host() -> frozenset[BlockSource]:
            def keep(fetch: Fetch, data: torch.Tensor) -> None:
                host[fetch.start_bytes : fetch.start_bytes + fetch.nbytes] = data
                if completion is not None:
                    completion.take(fetch, data)

            return self._move([plan.only(Section.HOST) for plan in plans], keep)

        def prepare_state() -> frozenset[BlockSource]:
            nonlocal pieces
            pieces = prepare(host.numpy().tobytes(), resize)
            return frozenset()

        stages = [move_host, prepare_state] if completion is None else [begin, move_host, prepare_state]
        return pieces if self._all_right(stages) else None

    def bring_state(self, copy: Copy, faults: FaultPlan | None, completion: Completion | None) -> bool:
        """Collective, after :meth:`bring_host`: everything else. False as there."""
        plans = tuple(self.plans.values())
        kept = tuple(plan.to_keep() for plan in plans)

        def take(fetch: Fetch, data: torch.Tensor) -> None:
            if completion is not None:
                completion.take(fetch, data)

        def move_state() -> frozenset[BlockSource]:
            only = [plan.only(Section.REPLICATED, Section.OWNED) for plan in plans]
            return self._move(only, take, copy=copy, faults=faults)

        def move_kept() -> frozenset[BlockSource]:
            return self._move(kept, take, counted=False)

        def seal() -> frozenset[BlockSource]:
            if completion is not None:
                completion.seal()
            return frozenset()

        return self._all_right([move_state] if completion is None else [move_state, move_kept, seal])

    def _all_right(self, stages: Iterable[Callable[[], frozenset[BlockSource]]]) -> bool:
        """Go through the stages up to the first in which some rank refused a source."""
        known = {group: plan.with_kept() for group, plan in self.plans.items()}
        return not any(self._share(known, stage, Flaw.IN_TRANSIT) for stage in stages)

    def _move(
        self,
        plans: Sequence[RecoveryPlan],
        sink: Sink,
        *,
        counted: bool = True,
        **options: Any,
    ) -> frozenset[BlockSource]:
        window_bytes = self.window_bytes
        result = execute(
            *(plans, self.topology, self.control, self.arenas, sink), window_bytes=window_bytes, **options
        )
        # What is read in order to decode does not restore anything yet: only its sending counts.
        self.moved.append(result.stats if counted else replace(result.stats, bytes_from={}))
        return result.bad

    def stats(self) -> TransferStats:
        """Everything moved so far: bytes add up, buffers are reused."""
        total: Counter[str] = Counter({str(kind): 0 for kind in SourceKind})
        for part in self.moved:
            total.update(part.bytes_from)
        return TransferStats(
            bytes_from=dict(total),
            sent_bytes=sum(part.sent_bytes for part in self.moved),
            buffer_bytes=max(part.buffer_bytes for part in self.moved),
            secs=sum(part.secs for part in self.moved),
        )
