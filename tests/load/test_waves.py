"""Waves: every block crosses once, nobody holds more than the window (P9)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.errors import TransferError
from reft.load.decide import plan_recovery
from reft.load.parity import stripes_of
from reft.load.plan import RecoveryPlan, SourceKind
from reft.load.waves import make_waves, serving_ranks
from reft.topology import Degrees, Topology

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
@given(
    st.sampled_from(SHAPES),
    st.sampled_from((64, 128, 192, 1024)),
    st.integers(1, 4096),
)
def test_p9_every_fetch_once_and_bounded_bytes_per_rank_and_wave(shape, block_bytes, window_bytes):
    plan, topology = recovery(shape, block_bytes)
    waves = make_waves(plan, topology, window_bytes)
    assert waves == make_waves(plan, topology, window_bytes)
    moved = Counter((m.dst, m.fetch) for wave in waves for m in wave)
    wanted = Counter(
        (topology.rank_of(c), f)
        for c, fetches in plan.fetches.items()
        for f in fetches
        if f.kind is not SourceKind.LOCAL
    )
    assert moved == wanted
    servers = serving_ranks(plan, topology)
    for wave in waves:
        for end in ("src", "dst"):
            for rank in range(topology.world_size):
                sizes = [m.buffer_bytes for m in wave if getattr(m, end) == rank]
                assert len(sizes) <= 1 or sum(sizes) <= window_bytes
        for move in wave:
            assert topology.nodes[move.src] == move.fetch.node != topology.nodes[move.dst]
            assert move.src == servers[move.fetch.source]


def test_waves_are_few_and_every_rank_of_a_node_serves():
    plan, topology = recovery((Degrees(2, 3, 2), "replica", ("n2",)), scale=40)
    window_bytes = 4096
    waves = make_waves(plan, topology, window_bytes)
    loads = Counter()
    for wave in waves:
        for move in wave:
            loads["send", move.src] += move.buffer_bytes
            loads["receive", move.dst] += move.buffer_bytes
    # The busiest end of the network decides; the rotation wastes at most half of it.
    assert len(waves) <= 2 * (max(loads.values()) // window_bytes + 1)
    for node in set(topology.nodes) - {"new-n2"}:
        sent = [loads["send", rank] for rank in topology.local_ranks(node)]
        assert min(sent) > 0.7 * max(sent)


def test_a_source_on_a_node_without_ranks_is_a_clear_error():
    plan, topology = recovery(SHAPES[0])
    elsewhere = Topology(topology.degrees, topology.coordinates, tuple(f"x{n}" for n in topology.nodes))
    with pytest.raises(TransferError, match="where no rank runs"):
        make_waves(plan, elsewhere, 4096)


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
    waves = make_waves(plan, topology, window // 2)
    for coordinate, rebuild in plan.rebuilds.items():
        coming = {f.key: f.nbytes for f in rebuild.fetches if f.kind is not SourceKind.LOCAL}
        stripes = [
            {key for b in stripe for key, _ in b.terms} & set(coming) for stripe in stripes_of(rebuild.blocks)
        ]
        arrived = set()
        most = 0
        for wave in waves:
            arrived |= {m.fetch.key for m in wave if m.dst == topology.rank_of(coordinate)}
            most = max(most, sum(coming[k] for keys in stripes if keys - arrived for k in keys & arrived))
        assert arrived >= set().union(*stripes)
        assert most <= window
