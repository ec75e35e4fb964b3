"""What a placement survives, computed by rank from the real nodes (P4). Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations

from reft.protect.codes import Code
from reft.protect.decode import take_apart


def survives(code: Code, lost: Collection[int]) -> bool:
    """Whether the whole image can be computed without the ``lost`` members: a test of rank.

    Unknown sub-blocks that no parity links fall apart into independent systems; each needs as many
    independent parities as it has unknowns.
    """
    gone = set(lost)
    if len(gone) >= code.size:
        return False
    unknown = [
        block
        for member in gone
        for block in range(member * code.splits, (member + 1) * code.splits)
        if all(code.pieces[p].member in gone for p in code.holders[block])
    ]
    systems = take_apart(code, unknown, lambda p: code.pieces[p].member not in gone)
    return all(system.solvable for system in systems)


def fatal_loss(code: Code, nodes: Sequence[str] | None = None) -> tuple[str, ...]:
    """The first of the smallest sets of nodes whose loss cannot be recovered.

    Args:
        code: the placement.
        nodes: node of every member; members of one node are lost together. Default: a node each.

    Raises:
        ValueError: if there is not one node per member.
    """
    where = tuple(nodes) if nodes is not None else tuple(f"member{m}" for m in range(code.size))
    if len(where) != code.size:
        raise ValueError(f"found {len(where)} nodes for a group of {code.size}; expected one per member")
    distinct = sorted(set(where), key=where.index)
    # A code is equal under rotation of its ring. With a node each, only losses of ring[0] need a look.
    pinned = where[code.ring[0]] if len(distinct) == code.size else None
    for count in range(1, len(distinct)):
        for dead in combinations(distinct, count):
            if pinned not in (None, *dead):
                continue
            lost = [m for m in range(code.size) if where[m] in dead]
            if len(lost) > code.scheme.certain_losses and not survives(code, lost):
                return dead
    return tuple(distinct)


def tolerance(code: Code, nodes: Sequence[str] | None = None) -> int:
    """Largest t such that *every* loss of t nodes recovers; arguments as in :func:`fatal_loss`.

    A group never survives the loss of all its nodes.
    """
    return len(fatal_loss(code, nodes)) - 1
