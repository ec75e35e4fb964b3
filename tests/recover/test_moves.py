"""Moves: every block crosses once, and what is decoded together arrives together (P9)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from reft.grid import Degrees
from reft.recover.decide import plan_recovery
from reft.recover.plan import RecoveryPlan, SourceKind, stripes_of
from reft.recover.transfer import make_moves, serving_ranks

from .fleet import JOB, NEW, Fleet, inventories, place, without

SHAPES = [
    (Degrees(1, 4, 1), "single", ("n1",)),
    (Degrees(2, 3, 2), "replica", ("n2",)),
    (Degrees(2, 2, 1), "single", ("n0", "n3")),
    (Degrees(1, 4, 1), "shared", ("n000",)),
]


def recovery(shape, block_bytes=128, scale=4):
    degrees, kind, lost = shape
    fleet = Fleet(place(degrees, kind), block_bytes=block_bytes, scale=scale)
    topology = without(fleet.topology, lost)
    plan = plan_recovery(inventories(fleet.records(NEW), lost), topology, job_id=JOB)
    assert isinstance(plan, RecoveryPlan)
    return plan, topology


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SHAPES), st.sampled_from((64, 128, 192, 1024)))
def test_every_fetch_crosses_once_from_a_rank_of_its_node(shape, block_bytes):
    plan, topology = recovery(shape, block_bytes)
    moves = make_moves(plan, topology)
    assert moves == make_moves(plan, topology)
    wanted = Counter(
        (topology.rank_of(c), f)
        for c, fetches in plan.fetches.items()
        for f in fetches
        if f.kind is not SourceKind.LOCAL
    )
    assert Counter((m.dst, m.fetch) for m in moves) == wanted
    servers = serving_ranks(plan, topology)
    for move in moves:
        assert topology.nodes[move.src] == move.fetch.node != topology.nodes[move.dst]
        assert move.src == servers[move.fetch.source]


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
        plan, fetches={c: plan.rebuilds[c].fetches if c in plan.rebuilds else () for c in plan.fetches}
    )
    moves = make_moves(plan, topology)
    for coordinate, rebuild in plan.rebuilds.items():
        coming = {f.key: f.nbytes for f in rebuild.fetches if f.kind is not SourceKind.LOCAL}
        stripes = [
            {key for b in stripe for key, _ in b.terms} & set(coming) for stripe in stripes_of(rebuild.blocks)
        ]
        arrived = set()
        most = 0
        for move in moves:
            if move.dst == topology.rank_of(coordinate):
                arrived.add(move.fetch.key)
                most = max(most, sum(coming[k] for keys in stripes if keys - arrived for k in keys & arrived))
        assert arrived >= set().union(*stripes)
        assert most <= window
