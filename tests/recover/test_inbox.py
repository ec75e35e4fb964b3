"""P9: what comes over the network waits at its sender until there is room for it, and never for ever."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.grid import BlockKey, Degrees, Section
from reft.recover.decide import plan_recovery
from reft.recover.plan import Fetch, SourceKind, stripes_of
from reft.recover.transfer import Inbox, Move, make_moves

from .fleet import JOB, NEW, Fleet, inventories, place, without

WINDOW_BYTES = 100


def move(number: int, src: int, nbytes: int) -> Move:
    key = BlockKey(Section.REPLICATED, src, number)
    return Move(src, 9, Fetch(key, 0, 0, 0, nbytes, 0, SourceKind.COPY, f"n{src}", "a", 0))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 130)), max_size=40),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_p9_blocks_arrive_in_any_order_within_the_window(blocks, in_rooms, random):
    moves = [move(number, src, nbytes) for number, (src, nbytes) in enumerate(blocks)]
    rooms = {m.fetch: torch.empty(m.fetch.nbytes, dtype=torch.uint8) for m in moves[::2]} if in_rooms else {}
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
