"""Reading a version straight from arenas on this machine, without the job's processes.

For the offline tools (inspect, verify, persist): the directories of several nodes of a dead job are
planned over and read like a recovery, with the same verification, but without torch or a network.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from reft.errors import ArenaError, LayoutError
from reft.grid import Topology
from reft.memory.arena import Arena
from reft.memory.header import checksum
from reft.naming import Label
from reft.recover.decide import plan_recovery
from reft.recover.inventory import Inventory
from reft.recover.plan import BlockSource, Fetch, NotRecoverable, RecoveryPlan
from reft.recover.sift import LayoutSpec, listing

logger = logging.getLogger(__name__)

ArenaSet = Mapping[tuple[str, str], Arena]
"""Opened arenas by (node, file name)."""


def open_arenas(job_dir: Path, inventory: Inventory, secret: bytes | None) -> dict[tuple[str, str], Arena]:
    """Open the usable arenas of one job directory for reading; end with :func:`close_arenas`.

    One that has vanished since the inventory is left out: its blocks then count as corrupt, and the
    plan falls down the ladder.

    Args:
        job_dir: directory the inventory was taken from.
        inventory: what was found there.
        secret: the job's secret.
    """
    arenas: dict[tuple[str, str], Arena] = {}
    for record in inventory.arenas:
        try:
            if record.usable:
                arenas[record.node, record.path] = Arena.open(job_dir / record.path, secret)
        except (ArenaError, OSError) as error:
            logger.warning("node %s: arena %s cannot be opened: %s", record.node, record.path, error)
    return arenas


def close_arenas(arenas: ArenaSet) -> None:
    """Close all of them. Views that are still alive keep their mapping until they die."""
    for arena in arenas.values():
        arena.close()


def close_behind(arenas: ArenaSet) -> None:
    """:func:`close_arenas` on a thread of its own: to unmap what was read takes up to a fifth of the time
    that reading it took, and nobody has to wait for that."""
    threading.Thread(target=close_arenas, args=(arenas,), name="reft-unmap", daemon=True).start()


@contextmanager
def opened_arenas(
    job_dir: Path,
    inventories: Iterable[Inventory],
    secret: bytes | None,
    *,
    close: Callable[[ArenaSet], None] = close_arenas,
) -> Iterator[dict[tuple[str, str], Arena]]:
    """:func:`open_arenas` of several inventories of one directory, closed at the end."""
    arenas: dict[tuple[str, str], Arena] = {}
    try:
        for inventory in inventories:
            arenas.update(open_arenas(job_dir, inventory, secret))
        yield arenas
    finally:
        close(arenas)


def offline_topology(inventories: Sequence[Inventory], job_id: str) -> Topology:
    """A placement to plan with where no job runs: every coordinate on the node that holds its newest arena.

    Raises:
        LayoutError: if no whole version of the job is there to take the degrees from.
    """
    records = [r for i in inventories for r in i.arenas if r.usable and r.header.job_id == job_id]
    if not records:
        raise LayoutError(
            f"no sealed or committed arena of job {job_id!r} on {listing(i.node for i in inventories)}; name "
            f"the directories of the nodes that ran it"
        )
    records.sort(key=lambda r: (r.header.label, r.node, r.path))
    newest = records[-1]
    degrees = newest.header.degrees
    node_of = {r.header.coordinate: r.node for r in records if r.header.degrees == degrees}
    coordinates = degrees.coordinates()
    return Topology(degrees, coordinates, tuple(node_of.get(c, newest.node) for c in coordinates))


def plan_verified(
    inventories: Sequence[Inventory],
    topology: Topology,
    arenas: ArenaSet,
    *,
    job_id: str,
    layout: LayoutSpec = None,
    bad: frozenset[BlockSource] = frozenset(),
) -> tuple[RecoveryPlan | NotRecoverable, frozenset[BlockSource]]:
    """Plan over arenas that can all be read here, and replan until every source checks out.

    Args:
        bad: sources not to use from the start.

    Returns:
        The plan, every source of which was verified, and ``bad`` with the corrupt blocks met on the way.
    """
    while True:
        plan = plan_recovery(inventories, topology, job_id=job_id, layout=layout, bad=bad)
        if isinstance(plan, NotRecoverable):
            return plan, bad
        decoding = (f for rebuild in plan.rebuilds.values() for f in rebuild.fetches)
        restoring = (f for fetches in plan.fetches.values() for f in fetches)
        found = find_corrupt(plan.label, (*restoring, *decoding), arenas)
        if not found:
            return plan, bad
        bad |= found


def find_corrupt(label: Label, fetches: Iterable[Fetch], arenas: ArenaSet) -> frozenset[BlockSource]:
    """Sources of ``fetches`` whose bytes do not match their checksum now, or that cannot be read (P5).

    Args:
        label: version the arenas have to hold.
        fetches: blocks to check; one that several coordinates need is read once.
        arenas: the arenas of this node.
    """
    current: dict[tuple[str, str], bool] = {}
    bad: set[BlockSource] = set()
    for source, fetch in {fetch.source: fetch for fetch in fetches}.items():
        place = fetch.node, fetch.arena
        if place not in current:
            current[place] = place in arenas and _holds(arenas[place], label)
        if not current[place] or not matches(fetch, arenas):
            bad.add(source)
    for (node, arena), count in Counter((source.node, source.arena) for source in bad).items():
        logger.warning("node %s: %s: %d blocks of %s are corrupt or unreadable", node, arena, count, label)
    return frozenset(bad)


def _holds(arena: Arena, label: Label) -> bool:
    header = arena.header()
    return header is not None and header.label == label and header.state.whole


def stored_bytes(fetch: Fetch, arenas: ArenaSet) -> memoryview:
    """The source's bytes, unchecked: a view into the mapped arena, cut short by the arena's end."""
    return arenas[fetch.node, fetch.arena].data[fetch.arena_offset : fetch.arena_offset + fetch.nbytes]


def matches(fetch: Fetch, arenas: ArenaSet) -> bool:
    """Whether the source's bytes match the checksum taken when they were copied."""
    data = stored_bytes(fetch, arenas)
    return len(data) == fetch.nbytes and checksum(data) == fetch.checksum
