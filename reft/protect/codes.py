"""Protection schemes of the replicated section, all represented as lists of linear combinations
of the group's data.

A sharding group of D members cuts its image (the bytes of the replicated section) into D shards and
every shard into equal *sub-blocks*. A member stores *pieces*: linear combinations over GF(2^8) of
sub-blocks. A data block or a copy is one sub-block, a parity combines several. The cost of a
placement, the losses that it survives and the decoding of lost bytes are all derived from the list
of pieces, never from a scheme's name (P4).

All schemes belong to one family with a copies and k parities per stripe (:class:`Scheme`), on a
ring:

- the member at position d stores shard d and the shards d+1 .. d+a, all copied from its own
  replica;
- stripe s (the data blocks that share parities) has its parity r at position s+r, and takes one
  sub-block of every shard that has no copy at any of these positions.

As pairs (a, k): ARC is (a, 0), AEC is (0, 1), Reed-Solomon is (0, k), and the REFT paper's
co-designed ARC+AEC is (1, 1). Every loss of a+k members is recoverable. Proof: a shard is lost only
if a+1 neighbouring members are lost, none of which holds a parity of the shard's stripes. So if u
blocks of a stripe are unknown and p of its parities are lost, at least u+a+p members are lost. Any
u of a stripe's parities determine u of its blocks (:mod:`reft.protect.rs`). A combination of ARC
and AEC whose stripes ignore where the copies are is called ``naive``; it survives only one loss for
certain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np

from reft.errors import ArenaError, ConfigError, UnrecoverableError
from reft.grid import BlockKey, Section, aligned
from reft.protect.rs import GRAIN_BYTES, Matrix, multiply, parity_rows, rank, reduce_rows

# Number of elements of GF(2^8), which limits the size of a stripe with several parities
FIELD_SIZE = 256

_PART = re.compile(r"(?:(arc)(?::([1-9]\d?))?|(aec)|(rs):([1-9]\d?))")


@dataclass(frozen=True)
class Scheme:
    """A protection scheme, given by its numbers of copies and parities; see the module
    docstring."""

    # Number a of additional copies of every shard; copy i is on the member i positions before
    # the owner on the ring (ARC)
    copies: int = 0
    parities: int = 0  # Number k of parities of every stripe (1: AEC; more: Reed-Solomon)
    # True if stripes avoid the positions of the copies, so that every loss of (copies + parities)
    # members is survived. False for the naive combination.
    designed: bool = True

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """Parse ``none``, ``arc``, ``arc:K``, ``aec``, ``rs:K``, ``arc+aec``, ``arc:A+rs:K`` or
        ``naive:...``.

        Raises:
            ConfigError: the text has none of these forms.
        """
        designed = not text.startswith("naive:")
        parts = text.removeprefix("naive:").split("+")
        copies = parities = 0
        for part in parts if text != "none" else ():
            found = _PART.fullmatch(part)
            if not found or (found[1] and copies) or (found[1] is None and parities):
                raise ConfigError(
                    f"found protection {text!r}; expected none, arc, arc:K (K copies), aec (one "
                    "parity), rs:K (K parities) or arc and a parity scheme joined with +, such as "
                    "arc:2+rs:2"
                )
            if found[1]:
                copies = int(found[2] or 1)
            else:
                parities = int(found[5] or 1)
        return cls(copies, parities, designed)

    @property
    def gap(self) -> int:
        """Number of consecutive ring positions, beginning with the position of a stripe, whose
        shards the stripe does not use."""
        return self.parities + (self.copies if self.designed and self.parities else 0)

    @property
    def least_members(self) -> int:
        """Number of members of the smallest group in which the scheme is possible."""
        return max(self.gap, self.copies) + 1 if self.parities or self.copies else 1

    def why_no_room(self, size: int) -> str | None:
        """Return the reason why the scheme is impossible in a group of ``size`` members; None if it
        is possible.
        """
        if size < self.least_members:
            return f"needs at least {self.least_members} data-parallel members, found {size}"
        if self.parities > 1 and size - self.gap + self.parities > FIELD_SIZE:
            return f"a stripe has more than {FIELD_SIZE} members; use smaller sharding groups"
        return None

    def check_room(self, size: int) -> None:
        """Check that the scheme is possible in a group of ``size`` members.

        Raises:
            ConfigError: the scheme is impossible.
        """
        if why := self.why_no_room(size):
            raise ConfigError(f"protection {self} is not possible here: {why}")

    @property
    def certain_losses(self) -> int:
        """Number of members such that any loss of that number is survived, by the proof in the
        module docstring."""
        return self.copies + self.parities if self.designed else max(self.copies, self.parities)

    def share(self, size: int) -> Fraction:
        """Return the fraction of the replicated section that a member stores: its shard, copies
        and parities.

        With a copies, k parities and D members it is (a+1)/D + k/(D(D-k)); in a co-designed scheme,
        the second term is k/(D(D-a-k)).
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
class CodeTerm:
    """A stored piece: the sum of coefficient · sub-block over ``terms``."""

    index: int  # Index in `Code.pieces`
    member: int  # Data-parallel index of the member that stores the piece
    # (sub-block, coefficient) pairs; one pair with coefficient 1 is the sub-block itself
    terms: tuple[tuple[int, int], ...]

    @property
    def is_data(self) -> bool:
        return len(self.terms) == 1 and self.terms[0][1] == 1


@dataclass(frozen=True)
class Code:
    """A scheme applied to one sharding group."""

    scheme: Scheme
    ring: tuple[int, ...]  # Members in ring order
    # Number of sub-blocks of a shard. Sub-block ``d * splits + j`` is the j-th of member d's
    # shard.
    splits: int
    # All stored pieces, sorted by member; a member's own data comes first
    pieces: tuple[CodeTerm, ...]

    @property
    def size(self) -> int:
        return len(self.ring)

    @property
    def sub_blocks(self) -> int:
        return self.size * self.splits

    def owner_of(self, sub_block: int) -> int:
        """Return the member to whose shard a sub-block belongs."""
        return sub_block // self.splits

    @cached_property
    def _by_member(self) -> dict[int, tuple[CodeTerm, ...]]:
        found: dict[int, list[CodeTerm]] = {member: [] for member in self.ring}
        for piece in self.pieces:
            found[piece.member].append(piece)
        return {member: tuple(pieces) for member, pieces in found.items()}

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """For every sub-block, the indices of the pieces that equal it, beginning with the owner's
        piece."""
        found: list[list[int]] = [[] for _ in range(self.sub_blocks)]
        for piece in self.pieces:
            if piece.is_data:
                found[piece.terms[0][0]].append(piece.index)
        for block, pieces in enumerate(found):
            pieces.sort(key=lambda p: (self.pieces[p].member != self.owner_of(block), p))
        return tuple(map(tuple, found))

    @cached_property
    def links(self) -> tuple[tuple[int, ...], ...]:
        """For every sub-block, the indices of the parity pieces that contain it."""
        found: list[list[int]] = [[] for _ in range(self.sub_blocks)]
        for piece in self.pieces:
            if not piece.is_data:
                for block, _ in piece.terms:
                    found[block].append(piece.index)
        return tuple(map(tuple, found))

    def pieces_of(self, member: int) -> tuple[CodeTerm, ...]:
        """Return the pieces that a member stores."""
        return self._by_member[member]


def make_code(scheme: Scheme, ring: Sequence[int]) -> Code:
    """Apply a scheme to a sharding group. Pure and deterministic.

    Args:
        scheme: the scheme.
        ring: members 0..D-1 in ring order (:func:`reft.grid.ring_order`).

    Raises:
        ConfigError: the group is too small for the scheme.
    """
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
    return Code(
        scheme, order, splits, tuple(CodeTerm(i, m, terms) for i, (m, terms) in enumerate(stored))
    )


def _parities(
    scheme: Scheme, ring: Sequence[int], position: int
) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the parities that a ring position stores. Position p stores parity r of the stripe that
    begins at p - r, for each r.

    A stripe that begins at position s has one column for each j: sub-block j of the shard at ring
    position s + gap + j.
    """
    size, splits = len(ring), len(ring) - scheme.gap
    for r, row in enumerate(parity_rows(scheme.parities, splits) if scheme.parities else ()):
        stripe = position - r
        members = [ring[(stripe + scheme.gap + j) % size] for j in range(splits)]
        yield tuple((m * splits + j, row[j]) for j, m in enumerate(members))


SCHEMES = ("none", "auto", "arc", "aec", "rs", "arc+aec", "arc+rs")
KEYS = ("scheme", "copies", "parities", "recompute")
_MOST = 99  # Largest number of copies or parities in the short form, which allows two digits


def short_form(protection: Any) -> Any:
    """Convert a protection that is written as a mapping to the short form, such as
    ``arc:2+aec``.

    Args:
        protection: a mapping with the following keys; anything but a mapping is returned
            unchanged. ``scheme``: one of :data:`SCHEMES`. ``copies``: copies of every shard,
            with ``arc``; default 1. ``parities``: parities of every stripe, with ``rs``.
            ``recompute``: whether ring peers recompute ZeRO partitions (``+aor``).

    Raises:
        ValueError: a key or value is invalid.
    """
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
    parts = str(scheme).split("+")
    for part, key in (("arc", "copies"), ("rs", "parities")):
        if part not in parts:
            if key in mapping:
                raise ValueError(
                    f'"{key}" belongs to a scheme with "{part}", found "{scheme}"; '
                    f"{_instead(key, scheme)}"
                )
        elif key in mapping:
            count = mapping[key]
            if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MOST:
                raise ValueError(f'"{key}" is {count!r}; write a whole number from 1 to {_MOST}')
            # Write the number even if it is 1
            parts[parts.index(part)] = f"{part}:{count}"
        elif part == "rs":
            raise ValueError(
                f'"scheme": "{scheme}" needs "{key}": how many, for example "{key}": 2'
            )
    return "+".join(parts) + ("+aor" if recompute else "")


def _instead(key: str, scheme: Any) -> str:
    if scheme == "auto":
        return 'remove it, and write "tolerance" next to "protection": the node losses to survive'
    others = {
        ("parities", "aec"): "rs",
        ("parities", "arc+aec"): "arc+rs",
        ("copies", "aec"): "arc+aec",
    }
    other = others.get((key, scheme), {"copies": "arc", "parities": "rs"}[key])
    return f'remove it, or write "scheme": "{other}"'


# -- decoding of lost sub-blocks, and the losses that are survived (P4) ----------------------------


_MOST_NAMED = 8


@dataclass(frozen=True)
class LinearSystem:
    """A system of linear equations: unknown sub-blocks, and the parities that contain them."""

    unknown: tuple[int, ...]  # Sub-blocks to solve for; the columns of ``matrix``
    # Indices of parity pieces; the rows of ``matrix``. Parities that are plain XOR come first, so
    # that decoding prefers them
    parities: tuple[int, ...]
    matrix: Matrix  # Coefficients, shape (parities, unknown), uint8

    def solve(self) -> dict[int, dict[int, int]]:
        """For each missing sub-block that can be reconstructed, return the parities to combine and
        the coefficient of each."""
        rows, columns = self.matrix.shape
        reduced, pivots = reduce_rows(
            np.hstack([self.matrix, np.eye(rows, dtype=np.uint8)]), columns
        )
        return {
            self.unknown[column]: {
                self.parities[i]: int(c) for i, c in enumerate(reduced[row, columns:]) if c
            }
            for row, column in enumerate(pivots)
            if np.count_nonzero(reduced[row, :columns]) == 1
        }


def take_apart(
    code: Code, unknown: Collection[int], usable: Callable[[int], bool]
) -> Iterator[LinearSystem]:
    """Split the equations for unknown sub-blocks into systems that can be solved independently.

    Args:
        code: the layout.
        unknown: sub-blocks without a usable copy; every other sub-block has one.
        usable: function that returns whether the piece with a given index is available.
    """
    leader = {block: block for block in unknown}

    def find(block: int) -> int:
        while leader[block] != block:
            leader[block] = leader[leader[block]]
            block = leader[block]
        return block

    equations = sorted({p for block in leader for p in code.links[block] if usable(p)})
    linked = {p: {b: c for b, c in code.pieces[p].terms if b in leader} for p in equations}
    for first, *others in map(tuple, linked.values()):
        for other in others:
            leader[find(other)] = find(first)
    columns: dict[int, list[int]] = {}
    for block in sorted(leader):
        columns.setdefault(find(block), []).append(block)
    rows: dict[int, list[int]] = {root: [] for root in columns}
    for p in equations:
        rows[find(next(iter(linked[p])))].append(p)
    for root, blocks in columns.items():
        # Plain XOR comes first, because the solver takes the first rows as pivots if it can.
        ordered = sorted(
            rows[root], key=lambda p: (any(c != 1 for _, c in code.pieces[p].terms), p)
        )
        matrix = np.array([[linked[p].get(b, 0) for b in blocks] for p in ordered], dtype=np.uint8)
        yield LinearSystem(tuple(blocks), tuple(ordered), matrix.reshape(len(ordered), len(blocks)))


def plan_decode(
    code: Code, *, bad: Collection[int], wanted: Collection[int]
) -> dict[int, tuple[tuple[int, int], ...]]:
    """Plan the decoding of sub-blocks. Copies are preferred to parities, and XOR to other
    combinations.

    Args:
        code: the layout.
        bad: indices of pieces that must not be used, because they are lost or corrupt.
        wanted: sub-blocks to decode.

    Returns:
        For every wanted sub-block, the (piece, coefficient) pairs whose sum gives the sub-block.

    Raises:
        UnrecoverableError: a sub-block cannot be decoded.
    """
    avoided = set(bad)
    source: dict[int, int] = {}  # For each available sub-block, the piece from which it is read
    for block, holders in enumerate(code.holders):
        first = next((p for p in holders if p not in avoided), None)
        if first is not None:
            source[block] = first
    unknown = [b for b in range(code.sub_blocks) if b not in source]
    parts = take_apart(code, unknown, lambda piece: piece not in avoided)
    solutions = {block: terms for part in parts for block, terms in part.solve().items()}
    missing = [b for b in wanted if b not in source and b not in solutions]
    if missing:
        named = ", ".join(f"B{b} of member {code.owner_of(b)}" for b in missing[:_MOST_NAMED])
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        raise UnrecoverableError(
            f"{code.scheme} over {code.size} members cannot recover {named}{more}: {len(avoided)} "
            "pieces are lost or unusable, more than this placement survives. Restore an older "
            "version or a persisted checkpoint"
        )
    found: dict[int, tuple[tuple[int, int], ...]] = {}
    for block in sorted(wanted):
        if block in source:
            found[block] = ((source[block], 1),)
            continue
        terms = dict(solutions[block])
        for parity, factor in solutions[block].items():
            for known, coefficient in code.pieces[parity].terms:
                if known in source:
                    piece = source[known]
                    terms[piece] = terms.get(piece, 0) ^ multiply(factor, coefficient)
        found[block] = tuple(sorted((p, c) for p, c in terms.items() if c))
    return found


def survives(code: Code, lost: Collection[int]) -> bool:
    """Return whether the image can be recovered without the ``lost`` members.

    The test computes the rank of each independent system of unknown sub-blocks.
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
    return all(len(s.parities) >= len(s.unknown) == rank(s.matrix) for s in systems)


def fatal_loss(
    code: Code,
    nodes: Sequence[str] | None = None,
    gone: Collection[int] = (),
    most: int | None = None,
) -> tuple[str, ...]:
    """Return a smallest set of nodes whose loss cannot be recovered. Of several such sets, it is
    the first one found.

    Args:
        code: the layout.
        nodes: node of each member; members of one node are lost together. None if every member
            has its own node.
        gone: members that are lost already.
        most: test only sets of fewer than this number of nodes; None for no limit.

    Returns:
        The names of the nodes; all remaining nodes if no tested set is fatal.
    """
    where = tuple(nodes) if nodes is not None else tuple(f"member{m}" for m in range(code.size))
    if len(where) != code.size:
        raise ValueError(
            f"found {len(where)} nodes for a group of {code.size}; expected one per member"
        )
    distinct = sorted({where[m] for m in range(code.size) if m not in gone}, key=where.index)
    # A code is symmetric under rotation of its ring. So if each member has its own node, it is
    # enough to test sets that contain ring[0].
    pinned = where[code.ring[0]] if len(distinct) == code.size else None
    for count in range(len(distinct) if most is None else min(most, len(distinct))):
        for dead in combinations(distinct, count):
            if pinned not in (None, *dead):
                continue
            lost = {*gone, *(m for m in range(code.size) if where[m] in dead)}
            if len(lost) > code.scheme.certain_losses and not survives(code, lost):
                return dead
    return tuple(distinct)


def tolerance(code: Code, nodes: Sequence[str] | None = None) -> int:
    """Return the largest t such that *every* loss of t nodes is recoverable; always less than
    the number of nodes.
    """
    return len(fatal_loss(code, nodes)) - 1


# -- a code applied to blocks, the units of storage and transfer -----------------------------------


@dataclass(frozen=True, slots=True)
class CodedBlock:
    """A block of a stored piece."""

    # Identity of the block; the member in the key of a parity block is the one that computes and
    # stores it
    key: BlockKey
    # Offset in bytes in the replicated image or, for a parity, in the member's parity image
    start_bytes: int
    nbytes: int  # Length in bytes; for a parity with padding, a multiple of 128
    # For a parity, the replicated blocks whose sum it is, with their coefficients; shorter blocks
    # count as zero-padded.
    terms: tuple[tuple[BlockKey, int], ...] = ()


@dataclass(frozen=True)
class BlockCode:
    """A code applied to blocks: which blocks of the replicated section and of parities a
    sharding group stores."""

    code: Code  # Pieces and their placement
    nbytes: int  # Size of the section in bytes, without padding
    block_bytes: int  # Largest size of a block in bytes, a multiple of 128

    @cached_property
    def sub_block_bytes(self) -> int:
        """Length of a sub-block in bytes, padded to a multiple of 128 (eight packets of 16-byte
        words, :mod:`reft.protect.rs`)."""
        return aligned(-(-self.nbytes // self.code.sub_blocks), GRAIN_BYTES)

    def range_of(self, sub_block: int) -> tuple[int, int]:
        """Return the byte range [start, stop) of a sub-block, without padding; empty beyond the
        end of the section."""
        start, stop = sub_block * self.sub_block_bytes, (sub_block + 1) * self.sub_block_bytes
        return min(start, self.nbytes), min(stop, self.nbytes)

    def piece_bytes(self, piece: CodeTerm) -> int:
        """Return the length of a stored piece: without padding for data, aligned for a parity."""
        longest = max(stop - start for start, stop in (self.range_of(b) for b, _ in piece.terms))
        return longest if piece.is_data else aligned(longest, GRAIN_BYTES)

    @cached_property
    def rows(self) -> int:
        """Number of blocks in a full sub-block."""
        return max(1, -(-self.sub_block_bytes // self.block_bytes))

    def data(self, member: int) -> tuple[CodedBlock, ...]:
        """Return the blocks of a member's shard, in order of their offsets."""
        splits = self.code.splits
        return tuple(
            CodedBlock(self.data_key(b, row), start, nbytes)
            for b in range(member * splits, (member + 1) * splits)
            for row, start, nbytes in self._cut(*self.range_of(b))
        )

    def stores_copy(self, member: int, key: BlockKey) -> bool:
        """Return whether a member stores a copy of a replicated block. A parity of a single
        block counts as a copy.
        """
        terms = ((self.place_of(key)[0], 1),)
        return any(piece.terms == terms for piece in self.code.pieces_of(member))

    def parities(self, member: int) -> tuple[CodedBlock, ...]:
        """Return the parity blocks that a member computes and stores."""
        return tuple(
            block for piece in self._parity_pieces(member) for block in self._parity_blocks(piece)
        )

    def data_key(self, sub_block: int, row: int) -> BlockKey:
        member, j = divmod(sub_block, self.code.splits)
        return BlockKey(Section.REPLICATED, member, j * self.rows + row)

    def place_of(self, key: BlockKey) -> tuple[int, int]:
        """Return the sub-block to which a replicated block belongs, and the block's row (index) in
        the sub-block."""
        j, row = divmod(key.index, self.rows)
        return key.member * self.code.splits + j, row

    def nbytes_of(self, piece: CodeTerm, row: int) -> int:
        """Return the length in bytes of a piece's block with index ``row``; 0 if the piece has no
        such block, which then counts as zeros.
        """
        return max(0, min(self.block_bytes, self.piece_bytes(piece) - row * self.block_bytes))

    def key_of(self, piece: CodeTerm, row: int) -> BlockKey | None:
        """Return the key of a stored piece's block with index ``row``; None if the piece has no
        such block."""
        if not self.nbytes_of(piece, row):
            return None
        if piece.is_data:
            return self.data_key(piece.terms[0][0], row)
        ordinal = self._parity_pieces(piece.member).index(piece)
        return BlockKey(Section.PARITY, piece.member, ordinal * self.rows + row)

    def _parity_pieces(self, member: int) -> list[CodeTerm]:
        return [piece for piece in self.code.pieces_of(member) if not piece.is_data]

    def _parity_blocks(self, piece: CodeTerm) -> Iterator[CodedBlock]:
        for row, start, nbytes in self._cut(0, self.piece_bytes(piece)):
            key = self.key_of(piece, row)
            assert key is not None
            lengths = {
                b: stop - first for b, _ in piece.terms for first, stop in [self.range_of(b)]
            }
            terms = tuple(
                (self.data_key(b, row), coefficient)
                for b, coefficient in piece.terms
                if lengths[b] > row * self.block_bytes
            )
            image_start = key.index // self.rows * self.sub_block_bytes
            yield CodedBlock(key, image_start + start, nbytes, terms)

    def _cut(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        for row, at in enumerate(range(start, stop, self.block_bytes)):
            yield row, at, min(self.block_bytes, stop - at)

    def describe(self) -> str:
        """Return the code as a line of text for :func:`parse_block_code`. The line does not contain
        the section's size."""
        ring = ",".join(map(str, self.code.ring))
        return f"{self.code.scheme};{ring};{self.block_bytes}"


def parse_block_code(text: str, nbytes: int) -> BlockCode:
    """Parse the output of :meth:`BlockCode.describe`.

    Args:
        text: the line.
        nbytes: size of the section.

    Raises:
        ArenaError: the line is invalid.
    """
    try:
        scheme, ring, block_bytes = text.split(";")
        code = make_code(Scheme.parse(scheme), [int(m) for m in ring.split(",")])
        return BlockCode(code, nbytes, int(block_bytes))
    except ValueError as error:
        raise ArenaError(
            f"found the erasure code {text!r}; expected 'SCHEME;RING;BLOCK_BYTES'"
        ) from error


def pack_checksums(checksums: Iterable[int]) -> bytes:
    """Return the content of a CHECKSUMS block: one little-endian uint64 for each replicated
    block."""
    return np.array([*checksums], "<u8").tobytes()


def unpack_checksums(data: bytes | memoryview) -> tuple[int, ...]:
    """Decode the output of :func:`pack_checksums`."""
    return tuple(np.frombuffer(data, "<u8").tolist())
