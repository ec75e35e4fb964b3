"""P9: what comes over the network waits at its sender until there is room for it, and never for ever."""

from __future__ import annotations

from contextlib import closing

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.protect.blocks import BlockKey, Section
from reft.recover.plan import Fetch, SourceKind
from reft.recover.transfer import Inbox, Move

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
