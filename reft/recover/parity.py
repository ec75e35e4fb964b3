"""Blocks that no node holds any more, and how they come back from parity (REFERENCE 1.5). Pure.

Each lost block is a combination of stored blocks of its stripe. What comes out is checked against the
checksum that its owner took when it was copied, which the owner's ring peers keep (P5).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from reft.blocks import BlockKey, Section
from reft.errors import UnrecoverableError
from reft.protect.coded_blocks import BlockCode
from reft.protect.decode import Combination, plan_decode


@dataclass(frozen=True)
class LostBlock:
    """A replicated block to be decoded.

    Attributes:
        key: identity.
        start_bytes: offset in the replicated image.
        nbytes: true length.
        padded_bytes: length at which its stripe was encoded.
        position: which of its owner's blocks it is: the index of its checksum.
        terms: stored blocks and their coefficients; shorter ones count as padded with zeros.
    """

    key: BlockKey
    start_bytes: int
    nbytes: int
    padded_bytes: int
    position: int
    terms: tuple[tuple[BlockKey, int], ...]

    @property
    def parities(self) -> frozenset[BlockKey]:
        """The parities among its terms."""
        return frozenset(key for key, _ in self.terms if key.section is Section.PARITY)


def stripes_of(blocks: Iterable[LostBlock]) -> tuple[tuple[LostBlock, ...], ...]:
    """Blocks that are decoded from the same parities together, in order of their first ones: they share
    nearly all of their terms."""
    stripes: list[list[LostBlock]] = []
    stripe_of: dict[BlockKey, list[LostBlock]] = {}
    for lost in blocks:
        stripe = next((stripe_of[key] for key in sorted(lost.parities) if key in stripe_of), None)
        if stripe is None:
            stripes.append(stripe := [])
        stripe.append(lost)
        stripe_of.update(dict.fromkeys(lost.parities, stripe))
    return tuple(map(tuple, stripes))


def find_lost(code: BlockCode, have: Collection[BlockKey]) -> tuple[tuple[LostBlock, ...], str | None]:
    """The replicated blocks of a group that are not among ``have``, with a way to decode each.

    Args:
        code: the group's code.
        have: stored blocks (replicated and parity) that can be read.

    Returns:
        The lost blocks, and None or why some of them cannot be decoded (there are then no blocks).
    """
    rows: dict[int, list[int]] = {}
    sizes = {}
    for member in range(code.code.size):
        for position, block in enumerate(code.data(member)):
            if block.key not in have:
                sub_block, row = code.place_of(block.key)
                rows.setdefault(row, []).append(sub_block)
                sizes[block.key] = (block.start_bytes, block.nbytes, position)
    lost: list[LostBlock] = []
    known: dict[tuple[frozenset[int], tuple[int, ...]], Mapping[int, Combination]] = {}
    for row, wanted in sorted(rows.items()):
        keys = {p.index: code.key_of(p, row) for p in code.code.pieces}
        bad = frozenset(index for index, key in keys.items() if key is not None and key not in have)
        case = bad, tuple(wanted)
        try:
            if case not in known:
                plan = plan_decode(code.code, bad=bad, wanted=wanted)
                known[case] = {c.sub_block: c for c in plan.combinations}
        except UnrecoverableError as error:
            return (), str(error)
        for sub_block in wanted:
            terms = known[case][sub_block].terms
            stored = tuple((key, coefficient) for p, coefficient in terms if (key := keys[p]) is not None)
            # The parities are the longest of their stripe.
            padded = max(code.nbytes_of(code.code.pieces[p], row) for p, _ in terms)
            key = code.data_key(sub_block, row)
            start, nbytes, position = sizes[key]
            lost.append(LostBlock(key, start, nbytes, padded, position, stored))
    return tuple(sorted(lost, key=lambda b: b.start_bytes)), None
