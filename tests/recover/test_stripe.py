"""Blocks of a stripe arrive in any order, from several threads, with and without room to wait in."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from reft.grid import BlockKey
from reft.protect.backend import NumpyBackend, combine_ragged
from reft.protect.codes import BlockCode, Scheme, make_code
from reft.recover.plan import LostBlock, find_lost, stripes_of
from reft.recover.rebuild import Pool, Stripe

BLOCK_BYTES = 1024
NBYTES = 40_011
IMAGE = np.random.default_rng(3).integers(0, 256, NBYTES, dtype=np.uint8)


def after_losing(*lost: int) -> tuple[tuple[tuple[LostBlock, ...], ...], dict[BlockKey, np.ndarray]]:
    code = BlockCode(make_code(Scheme(0, 2), range(6)), NBYTES, BLOCK_BYTES)
    data = {b.key: IMAGE[b.start_bytes : b.start_bytes + b.nbytes] for m in range(6) for b in code.data(m)}
    left = {key: block for key, block in data.items() if key.member not in lost}
    for member in set(range(6)) - set(lost):
        for parity in code.parities(member):
            left[parity.key] = np.zeros(parity.nbytes, np.uint8)
            row = tuple(c for _, c in parity.terms)
            combine_ragged(NumpyBackend(), (row,), [data[k] for k, _ in parity.terms], [left[parity.key]])
    missing, why = find_lost(code, left)
    assert why is None
    return stripes_of(missing), left


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
