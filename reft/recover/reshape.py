"""Taking up a version at another data-parallel degree: what every member of the new group takes, and where it
goes. Pure.

The replicated image is the same whatever the degree. An owned image holds flat tensors, of which every member
has an equal part: the old parts end to end, without the padding at their end, are cut anew, and padded with
zeros as DeepSpeed does it. Host state is that of one old member.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reft.errors import LayoutError
from reft.protect.blocks import Section
from reft.recover.sources import GroupSources, SourceBlock


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
