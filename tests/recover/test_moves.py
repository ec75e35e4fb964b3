"""Moves: what is decoded together arrives together (P9)."""

from __future__ import annotations

from dataclasses import replace

from reft.grid import Degrees
from reft.recover.decide import plan_recovery
from reft.recover.plan import SourceKind, stripes_of
from reft.recover.transfer import make_moves

from .fleet import JOB, NEW, Fleet, inventories, place, without


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
