"""Every protection scheme of the replicated section as one kind of data: which combination lies where.

A sharding group of D members cuts its image into D shards and every shard into equal *sub-blocks*. A
member stores *pieces*: linear combinations over GF(2^8) of sub-blocks. A data block and a copy are
combinations of one; a parity is one of several. What a placement costs, what it survives and how lost
bytes come back all follow from that list, and nothing is assumed from a scheme's name (P4).

All schemes are one family with a copies and k parities per stripe (:class:`Scheme`), on a ring:

- position d holds shard d and, cut from its own replica, the shards d+1 .. d+a;
- stripe s takes one sub-block of every shard that has no copy at the places of its parities, and
  its parity r lies at position s+r.

ARC is (a, 0), AEC is (0, 1), Reed-Solomon is (0, k), co-designed ARC+AEC is (1, 1) (REFERENCE 1.4, 1.5, 1.7).
Every loss of a+k members recovers: a shard is lost only with a+1 neighbours, none of which holds a
parity of its stripes, so u unknown blocks of a stripe and p lost parities take at least u+a+p losses,
and any u of a stripe's parities determine u of its blocks (:mod:`reft.protect.rs`).
Putting ARC beside plain AEC lacks that and survives one loss only: ``naive``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from functools import cached_property
from typing import Any

from reft.errors import ConfigError
from reft.protect.rs import parity_rows

FIELD_SIZE = 256  # Elements of GF(2^8): most members of a stripe with more than one parity

_PART = re.compile(r"(?:(arc)(?::([1-9]\d?))?|(aec)|(rs):([1-9]\d?))")


@dataclass(frozen=True)
class Scheme:
    """A member of the family."""

    copies: int = 0  # further copies of every shard (ARC offsets 1..a)
    parities: int = 0  # parities of every stripe (1: AEC; more: Reed-Solomon)
    # stripes avoid the copies' places, so that the tolerance is the sum of both. False: both schemes are laid
    # side by side, as one would without thinking.
    designed: bool = True

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """Read ``none``, ``arc``, ``arc:K``, ``aec``, ``rs:K``, ``arc+aec``, ``arc:A+rs:K``,
        ``naive:...``."""
        designed = not text.startswith("naive:")
        parts = text.removeprefix("naive:").split("+")
        copies = parities = 0
        for part in parts if text != "none" else ():
            found = _PART.fullmatch(part)
            if not found or (found[1] and copies) or (found[1] is None and parities):
                raise ConfigError(
                    f"found protection {text!r}; expected none, arc, arc:K (K copies), aec (one parity), "
                    f"rs:K (K parities) or arc and a parity scheme joined with +, such as arc:2+rs:2"
                )
            if found[1]:
                copies = int(found[2] or 1)
            else:
                parities = int(found[5] or 1)
        return cls(copies, parities, designed)

    @property
    def gap(self) -> int:
        """Places of the ring, from a stripe's own on, whose shards take no part in the stripe."""
        return self.parities + (self.copies if self.designed and self.parities else 0)

    @property
    def least_members(self) -> int:
        """Smallest group that has room for the scheme."""
        return max(self.gap, self.copies) + 1 if self.parities or self.copies else 1

    def why_no_room(self, size: int) -> str | None:
        """Why a group of ``size`` members cannot be protected so; None if it can."""
        if size < self.least_members:
            return f"needs at least {self.least_members} data-parallel members, found {size}"
        if self.parities > 1 and size - self.gap + self.parities > FIELD_SIZE:
            return f"a stripe has more than {FIELD_SIZE} members; use smaller sharding groups"
        return None

    def check_room(self, size: int) -> None:
        """Refuse what a group of ``size`` members has no room for. Raises ConfigError."""
        if why := self.why_no_room(size):
            raise ConfigError(f"protection {self} is not possible here: {why}")

    @property
    def certain_losses(self) -> int:
        """Any loss of so many members is survived, in every group that has room: by the proof above."""
        return self.copies + self.parities if self.designed else max(self.copies, self.parities)

    def share(self, size: int) -> Fraction:
        """What a member stores, as a part of the image: a shard, its copies, its parities.

        (a+1)/D + k/(D(D-k)), and k/(D(D-a-k)) for the second term where the schemes are co-designed.
        """
        stored = Fraction(self.copies + 1, size)
        return stored + (Fraction(self.parities, size * (size - self.gap)) if self.parities else 0)

    def __str__(self) -> str:
        parts = []
        if self.copies:
            parts.append("arc" if self.copies == 1 else f"arc:{self.copies}")
        if self.parities:
            parts.append("aec" if self.parities == 1 else f"rs:{self.parities}")
        return ("" if self.designed else "naive:") + ("+".join(parts) or "none")


@dataclass(frozen=True, slots=True)
class Piece:
    """What one member stores of one stripe or shard: the sum of coefficient · sub-block."""

    index: int  # position in `Code.pieces`
    member: int  # who stores it (dp index)
    # (sub-block, coefficient) pairs; one pair with coefficient 1 is the sub-block itself
    terms: tuple[tuple[int, int], ...]

    @property
    def is_data(self) -> bool:
        return len(self.terms) == 1 and self.terms[0][1] == 1


@dataclass(frozen=True)
class Code:
    """A scheme laid over one sharding group."""

    scheme: Scheme
    ring: tuple[int, ...]  # members in ring order
    splits: int  # sub-blocks of a shard. Sub-block ``d * splits + j`` is the j-th of member d's shard.
    pieces: tuple[Piece, ...]  # everything stored, by member; a member's own data first

    @property
    def size(self) -> int:
        return len(self.ring)

    @property
    def sub_blocks(self) -> int:
        return self.size * self.splits

    def owner_of(self, sub_block: int) -> int:
        """Member to whose shard a sub-block belongs."""
        return sub_block // self.splits

    @cached_property
    def _by_member(self) -> dict[int, tuple[Piece, ...]]:
        found: dict[int, list[Piece]] = {member: [] for member in self.ring}
        for piece in self.pieces:
            found[piece.member].append(piece)
        return {member: tuple(pieces) for member, pieces in found.items()}

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """For every sub-block the pieces that are just it, the owner's own first."""
        found: list[list[int]] = [[] for _ in range(self.sub_blocks)]
        for piece in self.pieces:
            if piece.is_data:
                found[piece.terms[0][0]].append(piece.index)
        for block, pieces in enumerate(found):
            pieces.sort(key=lambda p: (self.pieces[p].member != self.owner_of(block), p))
        return tuple(map(tuple, found))

    @cached_property
    def links(self) -> tuple[tuple[int, ...], ...]:
        """For every sub-block the parities that it is part of."""
        found: list[list[int]] = [[] for _ in range(self.sub_blocks)]
        for piece in self.pieces:
            if not piece.is_data:
                for block, _ in piece.terms:
                    found[block].append(piece.index)
        return tuple(map(tuple, found))

    def pieces_of(self, member: int) -> tuple[Piece, ...]:
        """What a member stores."""
        return self._by_member[member]


def make_code(scheme: Scheme, ring: Sequence[int]) -> Code:
    """Lay a scheme over a sharding group, its members 0..D-1 in ring order (:func:`reft.grid.ring_order`).
    Pure and deterministic. Raises ConfigError where the group has no room for the scheme."""
    order, size = tuple(ring), len(ring)
    if sorted(order) != list(range(size)) or not order:
        raise ValueError(f"found ring {order}; expected every member 0..D-1 once")
    scheme.check_room(size)
    splits = size - scheme.gap if scheme.parities else 1
    stored: list[tuple[int, tuple[tuple[int, int], ...]]] = []
    for position, member in enumerate(order):
        kept = [order[(position + i) % size] for i in range(scheme.copies + 1)]
        stored += [(member, ((m * splits + j, 1),)) for m in kept for j in range(splits)]
        stored += [(member, terms) for terms in _parities(scheme, order, position)]
    stored.sort(key=lambda item: item[0])
    return Code(scheme, order, splits, tuple(Piece(i, m, terms) for i, (m, terms) in enumerate(stored)))


def _parities(scheme: Scheme, ring: Sequence[int], position: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """The parities at a position: number r of the stripe that begins r places before.

    A stripe's column j is the shard ``gap + j`` places after the stripe, and that shard's sub-block j.
    """
    size, splits = len(ring), len(ring) - scheme.gap
    for r, row in enumerate(parity_rows(scheme.parities, splits) if scheme.parities else ()):
        stripe = position - r
        members = [ring[(stripe + scheme.gap + j) % size] for j in range(splits)]
        yield tuple((m * splits + j, row[j]) for j, m in enumerate(members))


SCHEMES = ("none", "auto", "arc", "aec", "rs", "arc+aec", "arc+rs")
KEYS = ("scheme", "copies", "parities", "recompute")
_MOST = 99  # Copies or parities that the short form has digits for


def short_form(protection: Any) -> Any:
    """The short form of a protection that is a mapping; anything else as it is. ``protection``: ``scheme`` is
    one of :data:`SCHEMES`; ``copies`` of every shard (default 1) go with ``arc``, ``parities`` of every
    stripe with ``rs``; ``recompute``: whether ring peers recompute ZeRO partitions (``+aor``)."""
    if not isinstance(protection, Mapping):
        return protection
    mapping: Mapping[str, Any] = protection
    for key in mapping:
        if key not in KEYS:
            near = get_close_matches(str(key), KEYS, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"known keys: {', '.join(KEYS)}"
            raise ValueError(f'unknown key "{key}"; {hint}')
    scheme = mapping.get("scheme")
    if scheme not in SCHEMES:
        found = f'"scheme" is {scheme!r}' if "scheme" in mapping else '"scheme" is missing'
        known = ", ".join(SCHEMES)
        raise ValueError(f'{found}; write one of {known}, together with "copies" and "parities"')
    recompute = mapping.get("recompute", False)
    if not isinstance(recompute, bool):
        raise ValueError(f'"recompute" is {recompute!r}; write true or false')
    parts = [_part(part, mapping) for part in str(scheme).split("+")]
    for key, part in (("copies", "arc"), ("parities", "rs")):
        if key in mapping and part not in str(scheme).split("+"):
            raise ValueError(
                f'"{key}" belongs to a scheme with "{part}", found "{scheme}"; {_instead(key, scheme)}'
            )
    return "+".join(parts) + ("+aor" if recompute else "")


def _part(part: str, mapping: Mapping[str, Any]) -> str:
    if part == "arc":
        # Number and all, so that "copies" beside it is seen to contradict.
        return f"arc:{_count(mapping, 'copies', 1)}" if "copies" in mapping else part
    return f"rs:{_count(mapping, 'parities', None)}" if part == "rs" else part


def _count(mapping: Mapping[str, Any], key: str, default: int | None) -> int:
    count = mapping.get(key, default)
    if count is None:
        raise ValueError(f'"scheme": "{mapping["scheme"]}" needs "{key}": how many, for example "{key}": 2')
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MOST:
        raise ValueError(f'"{key}" is {count!r}; write a whole number from 1 to {_MOST}')
    return count


def _instead(key: str, scheme: Any) -> str:
    if scheme == "auto":
        return 'remove it, and write "tolerance" next to "protection": the node losses to survive'
    others = {("parities", "aec"): "rs", ("parities", "arc+aec"): "arc+rs", ("copies", "aec"): "arc+aec"}
    other = others.get((key, scheme), {"copies": "arc", "parities": "rs"}[key])
    return f'remove it, or write "scheme": "{other}"'
