"""Stages of a recovery in which a rank breaks off (P6), and sources that were refused (P5)."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.errors import ArenaError, LayoutError
from reft.grid import BlockKey, Coordinate, Degrees, Section, Topology, VersionId
from reft.memory.header import ArenaState
from reft.protect.backend import NumpyBackend, combine_ragged
from reft.protect.codes import BlockCode, Scheme, make_code
from reft.protect.placement import place_group
from reft.recover import rebuild as complete
from reft.recover import transfer
from reft.recover.decide import judge, plan_recovery
from reft.recover.inventory import ArenaStore, stored_bytes
from reft.recover.plan import Fetch, LostBlock, RecoveryPlan, SourceKind, find_lost, find_stripes
from reft.recover.rebuild import ArenaRebuilder, Pool, StoreConfig, Stripe, plan_kept
from reft.recover.recover import BadSources, CorruptionKind, Participant
from reft.recover.transfer import BlockMove, BrokenOffError, Inbox, make_moves

from .fleet import JOB, NEW, OLD, SECRET, Fleet, arena_name, inventories, place, without

FLEET = Fleet(place(Degrees(1, 3, 1), "single"))


def execute(control: mock.MagicMock) -> Any:
    plan: Any = SimpleNamespace(label=VersionId(1, 7), fetches=mock.MagicMock())
    arenas = mock.MagicMock()
    arenas.items.side_effect = MemoryError("no room for buffers")
    return transfer.execute([plan], mock.MagicMock(), control, arenas, mock.MagicMock())


def test_p6_a_rank_whose_transfer_broke_off_does_not_wait_for_peers_that_wait_for_it() -> None:
    control = mock.MagicMock(rank=1)
    control.any_of.side_effect = control.gather_bytes.side_effect = AssertionError("it waits")
    ledger = BadSources(Participant(mock.MagicMock(), control, JOB, mock.MagicMock()))
    plans: Any = {(0, 0): SimpleNamespace(label=VersionId(1, 7))}
    with pytest.raises(BrokenOffError, match=r"rank 1: MemoryError: no room"):
        ledger.share(plans, {(0, 0): [0, 1]}, lambda: execute(control), CorruptionKind.IN_TRANSIT)


def planned(bad: frozenset[Any] = frozenset()) -> RecoveryPlan:
    plan = plan_recovery(inventories(FLEET.records(NEW)), FLEET.topology, job_id=JOB, bad=bad)
    assert isinstance(plan, RecoveryPlan)
    return plan


def test_p5_what_arrived_corrupt_earlier_and_is_not_used_any_more_is_let_be() -> None:
    """It may turn out corrupt where it is stored while a later plan, which does not use it, is carried out."""
    exchange: Any = SimpleNamespace(
        agree=lambda stage, doing: stage(), control=SimpleNamespace(swap=lambda bodies: {})
    )
    ledger, parts, plan = BadSources(exchange), {(0, 0): (0, 1, 2)}, planned()
    first, second, _ = FLEET.topology.coordinates
    fetch = plan.fetches[first][-1]
    refused = frozenset([fetch.source])
    assert ledger.share({(0, 0): plan}, parts, lambda: refused, CorruptionKind.OTHER_DATA)
    peer = next(f for f in plan.fetches[second] if f.node != fetch.node)
    assert ledger.share(
        {(0, 0): plan}, parts, lambda: frozenset([peer.source]), CorruptionKind.IN_TRANSIT
    )
    assert [f.source for f in ledger.in_transit(peer.node, NEW)] == [peer.source]
    assert ledger.in_transit(peer.node, OLD) == []
    assert ledger.share(
        {(0, 0): planned(ledger.bad)}, parts, lambda: refused, CorruptionKind.STORED
    )
    assert ledger.bad == refused | {peer.source}


BLOCK_BYTES = 1024
NBYTES = 40_011
IMAGE = np.random.default_rng(3).integers(0, 256, NBYTES, dtype=np.uint8)


def after_losing(
    *lost: int,
) -> tuple[tuple[tuple[LostBlock, ...], ...], dict[BlockKey, np.ndarray]]:
    code = BlockCode(make_code(Scheme(0, 2), range(6)), NBYTES, BLOCK_BYTES)
    data = {
        b.key: IMAGE[b.start_bytes : b.start_bytes + b.nbytes]
        for m in range(6)
        for b in code.data(m)
    }
    left = {key: block for key, block in data.items() if key.member not in lost}
    for member in set(range(6)) - set(lost):
        for parity in code.parities(member):
            left[parity.key] = np.zeros(parity.nbytes, np.uint8)
            row = tuple(c for _, c in parity.terms)
            combine_ragged(
                NumpyBackend(), (row,), [data[k] for k, _ in parity.terms], [left[parity.key]]
            )
    missing, why = find_lost(code, left)
    assert why is None
    return find_stripes(missing), left


STRIPES, LEFT = after_losing(1, 2)


def made(blocks: tuple[LostBlock, ...], pool: Pool) -> Stripe:
    return Stripe(blocks, np.full(sum(b.padded_bytes for b in blocks), 0x77, np.uint8), pool)


def check(stripe: Stripe) -> None:
    assert stripe.complete
    for lost, data in zip(stripe.blocks, stripe.results(), strict=True):
        assert np.array_equal(data, IMAGE[lost.start_bytes : lost.start_bytes + lost.nbytes])


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_order_and_any_room_give_the_same_bytes(data: st.DataObject) -> None:
    room_bytes = data.draw(st.sampled_from([0, BLOCK_BYTES, 3 * BLOCK_BYTES, 100 * BLOCK_BYTES]))
    pool = Pool(room_bytes)
    stripes = [made(blocks, pool) for blocks in STRIPES]
    arrivals = data.draw(st.permutations([(s, key) for s in stripes for key in sorted(s.keys)]))
    ways = data.draw(st.lists(st.sampled_from(["stays", "copied", "room"]), min_size=1, max_size=9))
    for at, (stripe, key) in enumerate(arrivals):
        way = ways[at % len(ways)]
        block = LEFT[key]
        if way == "room" and (room := stripe.room_for(key, len(block))) is not None:
            room[:] = block
            stripe.add(key, room, stays=False)
            continue
        passing = block.copy()
        stripe.add(key, block if way == "stays" else passing, stays=way == "stays")
        passing[:] = 0xEE  # a buffer that is used again
    for stripe in stripes:
        check(stripe)
    if room_bytes:
        assert pool.take(room_bytes) is not None, "everything was given back"


WINDOW_BYTES = 100


def move(number: int, src: int, nbytes: int) -> BlockMove:
    key = BlockKey(Section.REPLICATED, src, number)
    return BlockMove(src, 9, Fetch(key, 0, 0, 0, nbytes, 0, SourceKind.COPY, f"n{src}", "a", 0))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 130)), max_size=40),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_p9_blocks_arrive_in_any_order_within_the_window(blocks, in_rooms, random):
    moves = [move(number, src, nbytes) for number, (src, nbytes) in enumerate(blocks)]
    rooms = (
        {m.fetch: torch.empty(m.fetch.nbytes, dtype=torch.uint8) for m in moves[::2]}
        if in_rooms
        else {}
    )
    here, used, waiting = [], [], {}
    with closing(Inbox(moves, rooms.get, WINDOW_BYTES, lambda *block: here.append(block))) as inbox:
        streams = inbox.streams()
        while not all(stream.complete for stream in streams.values()) or here:
            for src, stream in streams.items():
                waiting.setdefault(src, []).extend(stream.room())
            held = [len(view) for views in waiting.values() for view in views]
            held += [data.numel() for _, _, data in here]
            assert len(held) == 1 or sum(held) <= WINDOW_BYTES
            ready = [src for src, views in waiting.items() if views]
            assert ready or here, "nothing can arrive, and nothing that is here would make room"
            if ready and (not here or random.random() < 0.6):
                src = random.choice(ready)
                waiting[src].pop(0)
                streams[src].filled(1)
                assert here[-1][1].key.member == src
            else:
                number, fetch, data = here.pop(random.randrange(len(here)))
                assert fetch not in rooms or data is rooms[fetch]
                inbox.used(number)
                used.append(number)
        assert sorted(used) == list(range(len(moves)))
        assert inbox.peak_bytes <= WINDOW_BYTES
        for src in streams:  # each peer's in the order in which it sends them
            assert streams[src].room() == []


def test_p9_what_is_decoded_together_arrives_together():
    """Blocks wait for the others of their stripe in memory: what waits at a time is less than a window."""
    block, window = 4096, 8 * 4096
    degrees = Degrees(1, 8, 1)
    fleet = Fleet(place(degrees, "single"), copies=0, parities=2, scale=6000, block_bytes=block)
    lost = ("n1", "n2")
    topology = without(fleet.topology, lost)
    records = [record for record in fleet.records(NEW) if record.node not in lost]
    plan = plan_recovery(inventories(records, lost, topology.nodes), topology, job_id=JOB)
    assert plan.rebuilds
    plan = replace(
        plan,
        fetches={c: plan.rebuilds[c].fetches if c in plan.rebuilds else () for c in plan.fetches},
    )
    moves = make_moves(plan, topology)
    for coordinate, rebuild in plan.rebuilds.items():
        coming = {f.key: f.nbytes for f in rebuild.fetches if f.kind is not SourceKind.LOCAL}
        stripes = [
            {key for b in stripe for key, _ in b.terms} & set(coming)
            for stripe in find_stripes(rebuild.blocks)
        ]
        arrived = set()
        most = 0
        for move in moves:
            if move.dst == topology.rank_of(coordinate):
                arrived.add(move.fetch.key)
                most = max(
                    most,
                    sum(coming[k] for keys in stripes if keys - arrived for k in keys & arrived),
                )
        assert arrived >= set().union(*stripes)
        assert most <= window


NEWCOMERS = Fleet(place(Degrees(1, 4, 1), "single"), scale=4, block_bytes=1024)
LOST, AT = "n2", Coordinate(0, 2, 0)
NODES = NEWCOMERS.topology.nodes
TOPOLOGY = without(NEWCOMERS.topology, [LOST])
NODE = TOPOLOGY.node_of(AT)


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    NEWCOMERS.write(tmp_path, OLD, NEW, lost=[LOST])
    (tmp_path / NODE).mkdir()
    return tmp_path


def found(memory: Path, gone: str | None = None):
    return [
        ArenaStore(memory / node, node, SECRET).inventory()
        for node in TOPOLOGY.nodes
        if node != gone
    ]


def planned_over(memory: Path) -> RecoveryPlan:
    inventories = found(memory)
    plan = plan_recovery(inventories, TOPOLOGY, job_id=JOB)
    assert isinstance(plan, RecoveryPlan)
    assert plan.label == NEW
    held = [r for i in inventories for r in i.arenas if r.usable and r.header.label == NEW]
    sources = judge((0, 0), held, {NEW: NEWCOMERS.topology.degrees})[NEW]
    return replace(plan, kept=plan_kept((0, 0), sources, held, TOPOLOGY))


def completion(memory: Path, plan: RecoveryPlan, path: Path) -> ArenaRebuilder:
    stored = next(r.header for i in found(memory) for r in i.arenas if r.header.label == NEW)
    how = StoreConfig("arc", path, lambda *_: NEWCOMERS.blueprint(AT))
    return ArenaRebuilder(plan, AT, ArenaStore(path.parent, NODE, SECRET), how, stored)


def fill(memory: Path, plan: RecoveryPlan, of: ArenaRebuilder, blocks: int | None = None) -> int:
    fetches = plan.with_kept().fetches[AT]
    for fetch in fetches[:blocks]:
        there = ArenaStore(memory / fetch.node, fetch.node, SECRET)
        with there.opened(there.inventory()) as arenas:
            data = torch.frombuffer(bytearray(stored_bytes(fetch, arenas)), dtype=torch.uint8)
        of.take(fetch, data)
    return len(fetches)


def left(path: Path, memory: Path) -> ArenaState | None:
    return next(
        (r.header.state for r in ArenaStore(memory / NODE, NODE, SECRET).inventory().arenas), None
    )


def test_p3_cut_off_after_any_block_the_newcomer_holds_nothing_that_is_read(memory: Path) -> None:
    plan, path = planned_over(memory), memory / NODE / arena_name(TOPOLOGY, AT, 0)
    every = len(plan.with_kept().fetches[AT])
    assert every > 8
    assert plan.kept[AT]
    assert {f.key.section for f in plan.kept[AT]} == {Section.OWNED, Section.HOST}
    for blocks in range(every + 1):
        with closing(completion(memory, plan, path)) as newcomer:
            newcomer.begin()
            fill(memory, plan, newcomer, blocks)
            if blocks < every:
                newcomer.seal()  # it lacks a block
        assert left(path, memory) is ArenaState.WRITING
        again = planned_over(memory)  # and the next attempt comes as far as this one
        assert all(f.node != NODE for fs in again.with_kept().fetches.values() for f in fs)
        assert again.with_kept().fetches == plan.with_kept().fetches


@pytest.mark.parametrize("committed", [True, False])
def test_p3_once_sealed_any_node_may_be_lost_next(memory: Path, committed: bool) -> None:
    """Sealed by all or committed: either is recovered from what is left, the newcomer's own arena included."""
    plan, path = planned_over(memory), memory / NODE / arena_name(TOPOLOGY, AT, 0)
    plan = replace(plan, committed=committed)
    with closing(completion(memory, plan, path)) as newcomer:
        newcomer.begin()
        fill(memory, plan, newcomer)
        newcomer.seal()
    assert left(path, memory) is (ArenaState.COMMITTED if committed else ArenaState.SEALED)
    assert path.stat().st_blocks * 512 >= path.stat().st_size, (
        "a later write may find no memory (P9)"
    )
    for gone in TOPOLOGY.nodes:
        after = plan_recovery(found(memory, gone), without(TOPOLOGY, [gone]), job_id=JOB)
        assert isinstance(after, RecoveryPlan), f"{gone}: {after}"
        assert after.label == NEW
    own = [f for f in planned_over(memory).fetches[AT] if f.key.section is not Section.REPLICATED]
    assert {fetch.node for fetch in own} == {NODE}


@pytest.mark.parametrize(
    "step", ["create", "begin", "write", "allocate", "seal", "commit", "blueprint"]
)
def test_p6_where_the_newcomer_fails_the_others_are_not_held_up(
    memory: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Blocks go on arriving; the version is found as before, or sealed already."""
    plan, path = planned_over(memory), memory / NODE / arena_name(TOPOLOGY, AT, 0)
    newcomer = completion(memory, plan, path)

    def fail(*_: object, **__: object) -> None:
        raise LayoutError("no") if step == "blueprint" else ArenaError("no room")

    if step == "blueprint":
        monkeypatch.setattr(NEWCOMERS.__class__, "shard_plan", fail)
    else:
        monkeypatch.setattr(complete.Arena, step, fail)
    with closing(newcomer):
        newcomer.begin()
        fill(memory, plan, newcomer)
        newcomer.seal()
    monkeypatch.undo()
    assert left(path, memory) in (
        (ArenaState.SEALED,) if step == "commit" else (None, ArenaState.WRITING)
    )
    assert planned_over(memory).label == NEW


def kept_by_newcomers(lost: int, moved_to: str) -> dict[Coordinate, set[int]]:
    records = [r for r in NEWCOMERS.records(NEW) if r.node != NODES[lost]]
    sources = judge((0, 0), records, {NEW: NEWCOMERS.topology.degrees})[NEW]
    kept = plan_kept((0, 0), sources, records, moved(lost, moved_to))
    return {at: {fetch.key.member for fetch in fetches} for at, fetches in kept.items()}


def moved(lost: int, to: str) -> Topology:
    nodes = tuple(to if dp == lost else node for dp, node in enumerate(NODES))
    return replace(NEWCOMERS.topology, nodes=nodes)


@pytest.mark.parametrize(("lost", "other"), [*permutations(range(4), 2)])
def test_p3_a_version_is_not_completed_where_its_survivors_keep_others_than_the_new_placement_says(
    lost: int, other: int
) -> None:
    """A member that moves to a peer's node may change the ring. What the survivors keep is then not what the
    tolerance is computed from."""
    before, now = place_group(NODES, 1, 0), place_group(moved(lost, NODES[other]).nodes, 1, 0)
    same = all(set(before.kept_by(m)) == set(now.kept_by(m)) for m in range(4) if m != lost)
    kept = kept_by_newcomers(lost, NODES[other])
    assert bool(kept) == same
