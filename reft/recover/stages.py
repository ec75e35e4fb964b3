"""Which sources a recovery refused, and what took their place: known to all who restore from them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import msgpack

from reft.control.control import ControlGroup
from reft.errors import PeerLostError, ReftError, TransferError
from reft.faults import FaultPlan
from reft.grid import BlockKey, Coordinate, Section, Topology
from reft.memory.arena import Arena
from reft.naming import Label
from reft.recover.inventory import Group, Inventory, opened_arenas, take_inventory
from reft.recover.plan import BlockSource, Fetch, RecoveryPlan, SourceKind, describe_block
from reft.recover.rebuild import Decoder

DEFAULT_WINDOW_BYTES = 64 * 2**20


class BrokenOffError(ReftError, RuntimeError):
    """This rank cannot go on, and has left the control plane: its peers hear of it at once."""


@dataclass(frozen=True)
class Participant:
    """A rank that takes part in a recovery, and how it goes through stages with the others. Made on all ranks
    with equal arguments, but for the directory."""

    topology: Topology
    control: ControlGroup
    job_id: str
    job_dir: Path  # the job's memory on this node
    secret: bytes
    faults: FaultPlan | None = None
    window_bytes: int = DEFAULT_WINDOW_BYTES  # receive buffers; room for blocks that wait to be decoded
    # whether ``job_dir`` is a version on storage, which all nodes see: each then reads a part of its files
    stored: bool = False

    @property
    def at(self) -> Coordinate:
        return self.topology.coordinates[self.control.rank]

    @property
    def node(self) -> str:
        return self.topology.nodes[self.control.rank]

    @property
    def is_first_on_node(self) -> bool:
        return self.topology.local_ranks(self.node)[0] == self.control.rank

    def inventory(self) -> Inventory:
        is_wanted = self._is_read_here if self.stored else lambda path: True
        return take_inventory(self.job_dir, self.node, self.secret, is_wanted)

    def _is_read_here(self, path: Path) -> bool:
        """Own arenas are read by the node that needs them most; those of another layout are dealt out."""
        homes = {str(c): n for c, n in zip(self.topology.coordinates, self.topology.nodes, strict=True)}
        nodes = sorted(set(self.topology.nodes))
        return homes.get(path.stem, nodes[zlib.crc32(path.stem.encode()) % len(nodes)]) == self.node

    def opened(
        self, inventory: Inventory, *, wait: bool = True
    ) -> AbstractContextManager[dict[tuple[str, str], Arena]]:
        return opened_arenas(self.job_dir, inventory, self.secret, wait=wait)

    def decoder(self, plan: RecoveryPlan, at: Coordinate) -> Decoder:
        return Decoder(plan, at, self.job_dir, self.node, self.secret, kept_bytes=self.window_bytes)

    def gather(self, stage: Callable[[], bytes], doing: str) -> list[bytes]:
        """Run ``stage`` on every rank; what it returned on each, in rank order, on all. Collective.
        ``doing``: what for, for the error message."""
        mine, failure = b"", None
        try:
            mine = stage()
        except Exception as error:
            failure = error
        bodies = self._tell_all(mine, failure, doing)
        if failure is not None:
            raise failure
        return bodies

    def gather_sources(
        self, stage: Callable[[], Iterable[BlockSource]], doing: str
    ) -> frozenset[BlockSource]:
        """The sources that ``stage`` returned on any rank. Collective."""
        told = self.gather(lambda: pack_sources(stage()), doing)
        return frozenset[BlockSource]().union(*map(unpack_sources, told))

    def agree(self, stage: Callable[[], bool], doing: str) -> bool:
        """Run ``stage`` on every rank; whether it said yes on any. Collective, and a few bytes where all
        is well."""
        said, failure = False, None
        try:
            said = stage()
        except (PeerLostError, BrokenOffError):
            raise
        except Exception as error:
            failure = error
        failed, any_said = self.control.any_of(failure is not None, said)
        if failed:
            self._tell_all(b"", failure, doing)
        if failure is not None:
            raise failure
        return any_said

    def _tell_all(self, mine: bytes, failure: Exception | None, doing: str) -> list[bytes]:
        errors: list[str] = []
        bodies: list[bytes] = []
        told = self.control.gather_bytes(msgpack.packb([None if failure is None else repr(failure), mine]))
        for rank, message in enumerate(told):
            error, body = msgpack.unpackb(message)
            bodies.append(body)
            if error is not None:
                where = f"{self.topology.coordinates[rank]}, node {self.topology.nodes[rank]}"
                errors.append(f"rank {rank} ({where}) failed with {error}")
        if errors and failure is None:
            raise TransferError(f"{doing} did not succeed on every rank: {'; '.join(errors)}")
        return bodies


Stage = Callable[[], frozenset[BlockSource] | None]  # does this rank's part; the sources that it refuses


class Flaw(StrEnum):
    """What is wrong with a stored block: its bytes, those that arrived, or, of a parity whose bytes are in
    order, the data it was computed from."""

    STORED = "corrupt or unreadable in"
    IN_TRANSIT = "corrupt on the way from"
    OTHER_DATA = "computed from other data than the version's, in"


@dataclass(frozen=True)
class Repair:
    """One stored block that could not be used, and what took its place."""

    label: Label  # version it belonged to
    fetch: Fetch
    flaw: Flaw
    replaced_by: str = ""  # where the restored bytes came from, in words

    def __str__(self) -> str:
        fetch = self.fetch
        block = describe_block(fetch.pp, fetch.tp, fetch.key)
        return (
            f"{block}, {self.label}: {fetch.nbytes} bytes {self.flaw} {fetch.arena} on node {fetch.node}; "
            f"restored from {self.replaced_by}"
        )


class Ledger:
    """The sources refused so far; of one sharding group the same on all ranks that take part in it."""

    def __init__(self, me: Participant) -> None:
        self._me = me
        self._findings: dict[BlockSource, Repair] = {}

    @property
    def bad(self) -> frozenset[BlockSource]:
        return frozenset(self._findings)

    def in_transit(self, node: str, label: Label) -> list[Fetch]:
        """What of a version arrived corrupt from this node: its bytes may be in order there."""
        found = [f for f in self._findings.values() if f.flaw is Flaw.IN_TRANSIT and f.label == label]
        return [f.fetch for f in found if f.fetch.node == node]

    def share(
        self,
        plans: Mapping[Group, RecoveryPlan],
        parts: Mapping[Group, Iterable[int]],
        stage: Stage,
        flaw: Flaw,
    ) -> bool:
        """Run ``stage`` on every rank and enter the sources it refused on any. Collective on all ranks: an
        error of one reaches all, what one refused those that take part in its sharding group.

        Args:
            parts: the ranks that take part in each of these groups.

        Returns:
            Whether any rank refused a source.

        Raises:
            TransferError: if a peer is gone, or its stage failed.
            BrokenOffError: this rank's own stage failed so that the peers cannot be told.
            Exception: what this rank's own stage raised, after the peers were told.
        """
        found: frozenset[BlockSource] = frozenset()

        def refuses() -> bool:
            nonlocal found
            found = stage() or frozenset()
            return bool(found)

        label = next(iter(plans.values())).label
        if not self._me.agree(refuses, f"the recovery of {label}"):
            return False
        fetches = {
            group: {f.source: f for at in plan.fetches.values() for f in at} for group, plan in plans.items()
        }
        bodies: dict[int, set[BlockSource]] = {}
        for group, of_group in fetches.items():
            for peer in parts[group]:
                bodies.setdefault(peer, set()).update(found & of_group.keys())
        told = self._me.control.swap({peer: pack_sources(sorted(s)) for peer, s in bodies.items()})
        sources = found.union(*map(unpack_sources, told.values()))
        known = {source: fetch for of_group in fetches.values() for source, fetch in of_group.items()}
        for source in sorted(sources & known.keys()):
            fetch = known[source]
            here = flaw is Flaw.IN_TRANSIT and fetch.kind is SourceKind.LOCAL
            self._findings[source] = Repair(label, fetch, Flaw.STORED if here else flaw)
        return True

    def repairs(self, plan: RecoveryPlan) -> tuple[Repair, ...]:
        """Every source refused in the plan's sharding group, and what ``plan``, which was carried out, used
        instead."""
        groups = {(at.pp, at.tp) for at in plan.fetches}
        used: dict[tuple[int, int, BlockKey], set[str]] = {}
        for fetches in plan.fetches.values():
            for f in fetches:
                used.setdefault((f.pp, f.tp, f.key), set()).add(f"{f.arena} on node {f.node}")
        repairs = []
        for finding in self._findings.values():
            fetch = finding.fetch
            if (fetch.pp, fetch.tp) not in groups:
                continue
            # What was only read to decode something else has no place of its own in the plan.
            places = sorted(used.get((fetch.pp, fetch.tp, fetch.key), ()))
            instead = ", ".join(places) or "other blocks of its stripe"
            if finding.label != plan.label:
                instead = f"an older version, {plan.label}, because no other source is left"
            repairs.append(replace(finding, replaced_by=instead))
        return tuple(repairs)


def pack_sources(sources: Iterable[BlockSource]) -> bytes:
    rows = [[s.node, s.arena, str(s.key.section), s.key.member, s.key.index] for s in sources]
    body: bytes = msgpack.packb(rows)
    return body


def unpack_sources(body: bytes) -> frozenset[BlockSource]:
    """Inverse of :func:`pack_sources`; of nothing it is nothing."""
    return frozenset(
        BlockSource(node, arena, BlockKey(Section(section), member, index))
        for node, arena, section, member, index in (msgpack.unpackb(body) if body else ())
    )
