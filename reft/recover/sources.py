"""Which stored blocks of one sharding group can serve one version, and whether they cover its images.

Pure. The cover is checked to the byte: sorted by offset, the blocks of an image must tile
[0, image_bytes) without a gap or an overlap.

At another data-parallel degree the replicated image is the same. An owned image holds flat tensors, of which
every member has an equal part: the old parts end to end, without the padding at their end, are cut anew, and
padded with zeros as DeepSpeed does it. Host state is that of one old member.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from reft.errors import LayoutError
from reft.grid import BlockKey, Coordinate, Section, Topology
from reft.memory.header import Entry
from reft.protect.codes import parse_block_code
from reft.recover.inventory import ArenaRecord
from reft.recover.plan import Fetch, LostBlock, Rebuild, SourceKind, find_lost, stripes_of


def choose_decoders(
    members: Sequence[Coordinate], sources: GroupSources, topology: Topology, layout: str
) -> dict[Coordinate, Rebuild]:
    """Give the lost blocks of every stripe, decoded from the same others, to a member whose node holds a
    parity of it; of those to the one that decodes the fewest bytes so far."""
    work: dict[Coordinate, list[LostBlock]] = {c: [] for c in members}
    choices = []
    for stripe in stripes_of(sources.lost):
        parities = {node for b in stripe for key in b.parities for node in sources.stored[key].nodes}
        near = [c for c in members if topology.node_of(c) in parities] or list(members)
        choices.append((near, stripe))
    # Those with the fewest choices first, so that the others even out the load.
    for near, stripe in sorted(choices, key=lambda choice: len(choice[0])):
        chosen = min(near, key=lambda c: (sum(b.nbytes for b in work[c]), c))
        work[chosen] += stripe
    ends = [b.start_bytes + b.nbytes for b in sources.images[_REPLICATED]]
    image_bytes = max(ends + [b.start_bytes + b.nbytes for b in sources.lost], default=0)
    rebuilds = {}
    for at, blocks in work.items():
        keys = dict.fromkeys(BlockKey(Section.CHECKSUMS, b.key.member, 0) for b in blocks)
        keys.update(dict.fromkeys(key for b in blocks for key, _ in b.terms))
        fetches = []
        for key in keys:
            kind, nodes = _best_source(sources.stored[key], topology.node_of(at))
            fetches.append(_fetch(sources.stored[key], at, kind, nodes[0]))
        if blocks:
            rebuilds[at] = Rebuild(tuple(blocks), image_bytes, layout, tuple(fetches))
    return rebuilds


def _best_source(block: SourceBlock, node: str) -> tuple[SourceKind, tuple[str, ...]]:
    """The highest level that has the block for a coordinate on ``node``, and the nodes to choose from.

    Later kinds go below COPY; only they need more than one node per block."""
    if node in block.nodes:
        return SourceKind.LOCAL, (node,)
    if block.owner_nodes:
        return SourceKind.PEER, block.owner_nodes
    return SourceKind.COPY, tuple(sorted(block.nodes))


def plan_fetches(
    needs: Mapping[Coordinate, Sequence[SourceBlock]], topology: Topology
) -> dict[Coordinate, tuple[Fetch, ...]]:
    """Pick one source per needed block; of equal ones the node that serves the fewest bytes so far.

    Blocks with the fewest choices are settled first, so that those with a choice even out the load."""
    chosen: dict[Coordinate, list[Fetch | None]] = {}
    open_choices: list[tuple[int, Coordinate, int, SourceBlock, SourceKind, tuple[str, ...]]] = []
    load: Counter[str] = Counter()
    # What one member fetches, most others fetch from the same place: each fetch is made once.
    made: dict[tuple[int, SourceKind, str], Fetch] = {}

    def fetch_of(block: SourceBlock, coordinate: Coordinate, kind: SourceKind, node: str) -> Fetch:
        case = id(block), kind, node
        if case not in made:
            made[case] = _fetch(block, coordinate, kind, node)
        return made[case]

    for coordinate, blocks in needs.items():
        node = topology.node_of(coordinate)
        slots: list[Fetch | None] = [None] * len(blocks)
        chosen[coordinate] = slots
        for at, block in enumerate(blocks):
            kind, nodes = _best_source(block, node)
            if len(nodes) > 1:
                open_choices.append((len(nodes), coordinate, at, block, kind, nodes))
                continue
            slots[at] = fetch_of(block, coordinate, kind, nodes[0])
            if kind is not SourceKind.LOCAL:
                load[nodes[0]] += block.nbytes
    for _, coordinate, at, block, kind, nodes in sorted(open_choices, key=lambda choice: choice[:3]):
        best = min(nodes, key=lambda node: (load[node], node))
        load[best] += block.nbytes
        chosen[coordinate][at] = fetch_of(block, coordinate, kind, best)
    return {c: tuple(f for f in slots if f is not None) for c, slots in chosen.items()}


def _fetch(block: SourceBlock, coordinate: Coordinate, kind: SourceKind, node: str) -> Fetch:
    arena, arena_offset = block.nodes[node]
    return Fetch(
        key=block.key,
        pp=coordinate.pp,
        tp=coordinate.tp,
        start_bytes=block.start_bytes,
        nbytes=block.nbytes,
        checksum=block.checksum,
        kind=kind,
        node=node,
        arena=arena,
        arena_offset=arena_offset,
    )


Image = tuple[Section, int]
"""A section's image within the group: the member is -1 for the replicated one, which all share."""

_REPLICATED: Image = (Section.REPLICATED, -1)

Variant = tuple[int, int, int]
"""What must be equal for two entries to be the same bytes: start, length, checksum."""


@dataclass(frozen=True)
class SourceBlock:
    """A needed block and where equal bytes of it are stored."""

    key: BlockKey
    start_bytes: int
    nbytes: int
    checksum: int
    # per node the arena and the offset in it; the owner's own arena where there is a choice
    nodes: Mapping[str, tuple[str, int]]
    owner_nodes: tuple[str, ...]  # nodes that hold the owner's own block, sorted


@dataclass(frozen=True)
class GroupSources:
    """Usable sources of one sharding group for one version; whole if ``gaps`` is empty."""

    # sources of every image; the replicated one lacks the ``lost`` blocks
    images: Mapping[Image, tuple[SourceBlock, ...]]
    gaps: tuple[str, ...]  # why an image is not whole, and cannot be made whole, in words
    divergences: tuple[str, ...]  # copies that differ, in words
    lost: tuple[LostBlock, ...] = ()  # replicated blocks to be decoded first
    # sources by key, of what decoding reads: replicated, parity and checksum blocks
    stored: Mapping[BlockKey, SourceBlock] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Stored:
    node: str
    arena: str
    entry: Entry

    @property
    def variant(self) -> Variant:
        return self.entry.start_bytes, self.entry.nbytes, self.entry.checksum

    def __str__(self) -> str:
        return f"{self.arena} on node {self.node}"


def collect_group(
    pp: int, tp: int, records: Sequence[ArenaRecord], size: int, bad: frozenset[tuple[str, str, BlockKey]]
) -> GroupSources:
    """Sources of the sharding group (pp, tp) among arenas of one version. ``records``: SEALED or COMMITTED
    arenas of the group's members, all of one label."""
    layouts = sorted({record.header.layout for record in records}) or [""]
    found = [
        _collect_layout(pp, tp, [r for r in records if r.header.layout == layout], size, bad)
        for layout in layouts
    ]
    return min(found, key=lambda group: len(group.gaps))


def _collect_layout(
    pp: int, tp: int, records: Sequence[ArenaRecord], size: int, bad: frozenset[tuple[str, str, BlockKey]]
) -> GroupSources:
    stored = _by_image(records, size)
    # Host state is never empty, and whoever holds a member's host state holds all its blocks. So a
    # member without host entries is lost, and an image without entries is one of zero bytes.
    lost = [member for member in range(size) if (Section.HOST, member) not in stored]
    gaps = [f"{Coordinate(pp, m, tp)} is not stored on any node that is present" for m in lost]
    images: dict[Image, tuple[SourceBlock, ...]] = {}
    divergences: list[str] = []
    own = [(section, member) for section in (Section.OWNED, Section.HOST) for member in range(size)]
    decoded: tuple[LostBlock, ...] = ()
    read: Mapping[BlockKey, SourceBlock] = {}
    for image in (_REPLICATED, *own):
        section, member = image
        blocks, unusable, diverged = _usable_blocks(stored.get(image, {}), bad)
        images[image] = blocks
        divergences += [f"pp{pp}.tp{tp} {what}" for what in diverged]
        why = None
        if image == _REPLICATED:
            decoded, read, why = _decoding(records, stored, blocks, bad)
            if decoded:
                continue
        gaps += [f"{Coordinate(pp, key.member, tp)} {what}" for key, what in unusable]
        hole = _find_hole(blocks, stored.get(image, {}))
        explained = unusable or (member in lost if member >= 0 else bool(lost))
        if hole and not explained:
            where = Coordinate(pp, member, tp) if member >= 0 else f"pp{pp}.tp{tp}"
            gaps.append(f"{where} {section} image: {hole}{f' ({why})' if why else ''}")
    return GroupSources(images, tuple(gaps), tuple(divergences), decoded, read)


def _decoding(
    records: Sequence[ArenaRecord],
    stored: Mapping[Image, Mapping[BlockKey, Sequence[_Stored]]],
    replicated: Sequence[SourceBlock],
    bad: frozenset[tuple[str, str, BlockKey]],
) -> tuple[tuple[LostBlock, ...], Mapping[BlockKey, SourceBlock], str | None]:
    """The replicated blocks that are stored nowhere, where the group has a code; what they are decoded from;
    or why they cannot be."""
    coding = next((r.header.coding for r in records if r.header.coding), "")
    sizes = [s.entry.image_bytes for keys in stored.get(_REPLICATED, {}).values() for s in keys]
    if not coding or not sizes:
        return (), {}, None
    code = parse_block_code(coding, sizes[0])
    usable = {block.key: block for block in replicated}
    for section in (Section.PARITY, Section.CHECKSUMS):
        for member in range(code.code.size):
            blocks, _, _ = _usable_blocks(stored.get((section, member), {}), bad)
            usable.update({block.key: block for block in blocks})
    lost, failure = find_lost(code, usable)
    unknown = {b.key.member for b in lost if BlockKey(Section.CHECKSUMS, b.key.member, 0) not in usable}
    if unknown:
        return (), {}, f"no rank holds the checksums of members {sorted(unknown)}"
    return lost, usable, failure


def _by_image(records: Iterable[ArenaRecord], size: int) -> dict[Image, dict[BlockKey, list[_Stored]]]:
    images: dict[Image, dict[BlockKey, list[_Stored]]] = {}
    for record in sorted(records, key=lambda r: (r.node, r.path)):
        for entry in record.header.entries:
            key = entry.key
            if key.member >= size:
                continue
            image = (key.section, -1 if key.section is Section.REPLICATED else key.member)
            keys = images.setdefault(image, {})
            keys.setdefault(key, []).append(_Stored(record.node, record.path, entry))
    return images


def _usable_blocks(
    keys: Mapping[BlockKey, Sequence[_Stored]], bad: frozenset[tuple[str, str, BlockKey]]
) -> tuple[tuple[SourceBlock, ...], list[tuple[BlockKey, str]], list[str]]:
    """Blocks of one image that have a good source, keys that have none, and diverged copies."""
    blocks: list[SourceBlock] = []
    unusable: list[tuple[BlockKey, str]] = []
    diverged: list[str] = []
    for key, sources in keys.items():
        good = [s for s in sources if (s.node, s.arena, key) not in bad] if bad else sources
        if not good:
            places = ", ".join(str(s) for s in sources)
            unusable.append((key, f"{key.section} block {key.index}: every source is corrupt ({places})"))
            continue
        variant = _prevailing(good)
        equal = [s for s in good if s.variant == variant]
        if len(equal) < len(good):
            diverged.append(_describe_divergence(key, equal, good))
        blocks.append(_source_block(key, equal))
    return tuple(sorted((b for b in blocks if b.nbytes), key=lambda b: b.start_bytes)), unusable, diverged


def _prevailing(sources: Sequence[_Stored]) -> Variant:
    """The bytes to restore everywhere if copies differ: the owner's, else the most frequent."""
    first = sources[0].variant
    if all(s.variant == first for s in sources):
        return first
    votes: dict[Variant, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for source in sources:
        owners, copies = votes[source.variant]
        votes[source.variant] = (owners + source.entry.owner, copies + 1)
    return max(votes, key=lambda variant: (votes[variant], variant))


def _describe_divergence(key: BlockKey, equal: Sequence[_Stored], good: Sequence[_Stored]) -> str:
    others = ", ".join(str(s) for s in good if s not in equal)
    return (
        f"{key.section} block {key.index} of member {key.member}: the bytes in {others} differ from those "
        f"in {equal[0]} although they carry the same version; the latter are restored everywhere"
    )


def _source_block(key: BlockKey, sources: Sequence[_Stored]) -> SourceBlock:
    nodes: dict[str, tuple[str, int]] = {}
    owners: list[str] = []
    for source in sources:
        is_owner = source.entry.owner
        if source.node not in nodes or (is_owner and source.node not in owners):
            nodes[source.node] = (source.arena, source.entry.arena_offset)
        if is_owner and source.node not in owners:
            owners.append(source.node)
    entry = sources[0].entry
    place = entry.start_bytes, entry.nbytes, entry.checksum
    return SourceBlock(key, *place, nodes, tuple(sorted(owners)))


def _find_hole(blocks: Sequence[SourceBlock], stored: Mapping[BlockKey, Sequence[_Stored]]) -> str | None:
    """The first place where the blocks do not tile the image exactly, in words."""
    sizes = {s.entry.image_bytes for sources in stored.values() for s in sources}
    if len(sizes) > 1:
        return f"arenas disagree about its size ({', '.join(map(str, sorted(sizes)))} bytes)"
    image_bytes = next(iter(sizes), 0)
    at = 0
    for block in blocks:
        if block.start_bytes > at:
            return f"bytes [{at}, {block.start_bytes}) of {image_bytes} are in no arena that is present"
        if block.start_bytes < at:
            return f"blocks overlap at byte {block.start_bytes} of {image_bytes}"
        at += block.nbytes
    if at < image_bytes:
        return f"bytes [{at}, {image_bytes}) of {image_bytes} are in no arena that is present"
    if at > image_bytes:
        return f"blocks reach byte {at}, beyond its end at {image_bytes}"
    return None


# -- taking up a version at another data-parallel degree: what every member takes, and where it goes


class Piece(NamedTuple):
    """Bytes that one member of the old group owned, and where they go."""

    member: int  # dp index of the owner
    start_bytes: int  # offset in its owned image
    nbytes: int
    target_bytes: int  # offset in the new owner's image


Wanted = Mapping[int, Sequence[Piece]]  # what the members of a new group take of the partitions, by dp index

NOTHING_WANTED: Wanted = {}


@dataclass(frozen=True)
class Resize:
    old: int
    new: int

    def host_from(self, dp: int) -> int:
        """The old member whose host state the new member ``dp`` takes up: its own where there was one, else
        another one's, for what is equal on all."""
        return dp % self.old

    def is_new(self, dp: int) -> bool:
        """Whether there was no such member before: what is a rank's own is not in the version."""
        return dp >= self.old

    def __str__(self) -> str:
        return f"DP{self.old} to DP{self.new}"


@dataclass(frozen=True)
class OwnedTensor:
    """One tensor of the owned images, in the old ones and in the new ones."""

    name: str  # for messages
    itemsize: int  # bytes of an element
    old_start: int  # offset in every old image, in bytes
    old_numel: int  # elements that each old member has
    new_start: int  # offset in every new image, in bytes
    new_numel: int  # elements that each new member has
    # elements of the whole without padding, of which the members have consecutive parts; None: it is equal on
    # all members, and not cut
    length: int | None

    def check(self, resize: Resize) -> None:
        if self.length is None:
            fits = self.old_numel == self.new_numel
        else:
            fits = self.length <= min(resize.old * self.old_numel, resize.new * self.new_numel)
        if not fits:
            whole = "equal on all members" if self.length is None else f"parts of {self.length} elements"
            raise LayoutError(
                f"{self.name} has {self.old_numel} elements on each of {resize.old} members in memory and "
                f"{self.new_numel} on each of {resize.new} in the running job; expected {whole}: start the "
                f"job with the model and the optimizer that wrote the memory"
            )


def cut(tensors: Sequence[OwnedTensor], resize: Resize, dp: int) -> tuple[Piece, ...]:
    """Where every byte of the new member ``dp`` comes from, but for padding (:func:`padding`)."""
    return tuple(piece for tensor in tensors for piece in _pieces(tensor, resize, dp))


def _pieces(tensor: OwnedTensor, resize: Resize, dp: int) -> Iterator[Piece]:
    tensor.check(resize)
    size, old = tensor.itemsize, tensor.old_numel
    if tensor.length is None:
        if old:
            yield Piece(resize.host_from(dp), tensor.old_start, old * size, tensor.new_start)
        return
    begin, at = dp * tensor.new_numel, dp * tensor.new_numel
    end = min(begin + tensor.new_numel, tensor.length)
    while at < end:
        member, inside = divmod(at, old)
        count = min(end - at, old - inside)
        yield Piece(
            member, tensor.old_start + inside * size, count * size, tensor.new_start + (at - begin) * size
        )
        at += count


def padding(tensors: Sequence[OwnedTensor], dp: int) -> tuple[tuple[int, int], ...]:
    """``(offset, length)`` in bytes of what is zero in the new image of member ``dp``: behind the end of the
    whole. What lies between the tensors of an image is nobody's."""
    found = []
    for tensor in tensors:
        if tensor.length is not None:
            filled = max(0, min(tensor.new_numel, tensor.length - dp * tensor.new_numel))
            if filled < tensor.new_numel:
                start = tensor.new_start + filled * tensor.itemsize
                found.append((start, (tensor.new_numel - filled) * tensor.itemsize))
    return tuple(found)


def needed_by(
    sources: GroupSources, resize: Resize, dp: int, pieces: Sequence[Piece]
) -> tuple[SourceBlock, ...]:
    """Blocks that the new member ``dp`` fetches: replicated image, owned blocks, host image of one member.
    ``pieces``: what it takes of the old partitions; not looked at where the degree has not changed."""
    images = sources.images
    owned = images[Section.OWNED, dp] if resize.old == resize.new else _blocks_of(sources, pieces)
    return images[Section.REPLICATED, -1] + owned + images[Section.HOST, resize.host_from(dp)]


def _blocks_of(sources: GroupSources, pieces: Sequence[Piece]) -> tuple[SourceBlock, ...]:
    """The owned blocks that hold the pieces, each once, by member and offset."""
    found: dict[int, set[int]] = {}
    for piece in pieces:
        blocks = sources.images.get((Section.OWNED, piece.member), ())
        stop = piece.start_bytes + piece.nbytes
        held = [b for b in blocks if b.start_bytes < stop and piece.start_bytes < b.start_bytes + b.nbytes]
        # The blocks of an image tile it (reft.recover.sources).
        if (
            not held
            or held[0].start_bytes > piece.start_bytes
            or held[-1].start_bytes + held[-1].nbytes < stop
        ):
            raise LayoutError(
                f"bytes [{piece.start_bytes}, {stop}) of member {piece.member}'s partition are wanted, which "
                f"the version does not have: the members' partitions are not of one size"
            )
        found.setdefault(piece.member, set()).update(b.start_bytes for b in held)
    return tuple(
        block
        for member in sorted(found)
        for block in sources.images[Section.OWNED, member]
        if block.start_bytes in found[member]
    )


class Scatter:
    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._of_member: dict[int, list[Piece]] = {}
        for piece in pieces:
            self._of_member.setdefault(piece.member, []).append(piece)

    def parts(self, member: int, start: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """What of a stored block is taken. Yields ``(offset in the block, length, offset in the new image)``,
        in bytes."""
        for piece in self._of_member.get(member, ()):
            begin = max(start, piece.start_bytes)
            end = min(start + nbytes, piece.start_bytes + piece.nbytes)
            if begin < end:
                yield begin - start, end - begin, piece.target_bytes + begin - piece.start_bytes
