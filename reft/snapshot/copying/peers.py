"""Whether what data-parallel peers must have alike is alike, and whose is not.

A device that computes wrong, or a bit that flips before the copy, is protected as faithfully as any other
state. Each member of a sharding group takes the checksum of the same bytes of its own replica with every
version, while training does not change them, and ring neighbours compare: what differs is not committed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch

from reft.memory.stream import HashingCopier, hashing_copier, ranges_of
from reft.snapshot.copying.engine import Encode, Piece
from reft.snapshot.plan import LiveImages

TURNS = 61
"""Versions after which every block was compared once by turns."""
_COLUMNS = 64  # sums of a block, so that what has moved within it is seen


class PeerCheck:
    """Checksums of the replicated section's blocks. ``by_turns``: of a part with every version."""

    def __init__(self, by_turns: bool, block_bytes: int) -> None:
        self._turns, self._block_bytes = TURNS if by_turns else 1, block_bytes
        self.again: frozenset[int] = frozenset()
        """Blocks that differed: compared with every version until they do not."""
        self.turn: int | None = None
        """Of the next version; None: its step, until the ranks have sealed one together."""
        self.blocks: Sequence[int] = ()  # of the newest version
        self.memory = torch.zeros(0, dtype=torch.int64)

    @property
    def sums(self) -> dict[int, int]:
        """By block, of the newest version; of a device once it is waited for."""
        return dict(zip(self.blocks, self.memory.tolist(), strict=False))

    def choose(self, images: LiveImages, step: int) -> int:
        """Choose the blocks of a version. Returns how many sums ``memory`` needs at most, at any step."""
        count = -(-images.replicated.nbytes // self._block_bytes)
        turn = step if self.turn is None else self.turn
        self.blocks = [b for b in range(count) if (b - turn) % self._turns == 0 or b in self.again]
        return count

    def sealed(self, step: int) -> None:
        """The ranks have voted on a version that all could copy: all of them go on to the next turn."""
        self.turn = (step if self.turn is None else self.turn) + 1

    def meet(self) -> None:
        """The ranks have come together again, and do not know what each has heard of the last vote."""
        self.turn, self.again = None, frozenset()

    def parts(self, images: LiveImages, nbytes: int) -> Iterator[Encode]:
        """Take the checksums: what is to be called, in host memory for so many bytes each; for a device it
        queues all on the current stream, and returns what is to be copied."""
        image, size = images.replicated, self._block_bytes
        live = [image.live(b * size, min(image.nbytes, (b + 1) * size)) for b in self.blocks]
        if live and image.device.type != "cpu":
            target = self.memory[: len(live)].view(torch.uint8)
            yield lambda: [(torch.stack([*map(_on_device, live)]).view(torch.uint8), target)]
            return
        hasher = hashing_copier()
        for place, views in enumerate(live):
            for view in views:
                for at in range(0, view.numel(), nbytes):
                    yield partial(_hash, hasher, view[at : at + nbytes])
            self.memory[place] = hasher.take() - 2**63

    def names(self, images: LiveImages, blocks: Sequence[int]) -> str:
        """Of the tensors in those blocks."""
        size, image = self._block_bytes, images.replicated
        return shortened(t.name for b in blocks for t in image.tensors_at(b * size, (b + 1) * size))


def shortened(names: Iterable[str]) -> str:
    """The first few."""
    found = [*dict.fromkeys(names)]
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def _hash(hasher: HashingCopier, view: torch.Tensor) -> Sequence[Piece]:
    hasher.copy(ranges_of([(0, view.data_ptr(), view.numel())]))
    return ()


def _on_device(views: Sequence[torch.Tensor]) -> torch.Tensor:
    """One number for those bytes: exact, whatever the order in which the device adds."""
    total = torch.zeros(_COLUMNS, dtype=torch.int64, device=views[0].device)
    for view in views:
        wide = view.data_ptr() % 4 == view.numel() % 4 == 0
        words = view.view(torch.int32) if wide else view
        whole = words.numel() // _COLUMNS * _COLUMNS
        total = total * 31 + words[:whole].view(-1, _COLUMNS).sum(0, dtype=torch.int64)
        total[: len(words) - whole] += words[whole:]
    return (total * torch.arange(1, 2 * _COLUMNS, 2, device=total.device)).sum()


def differing(sums: Mapping[int, Mapping[int, int]]) -> dict[int, tuple[int, ...]]:
    """Blocks that differ among the members of a group, with the members that are not of the majority: all of
    them where there is none. ``sums``: by member and block."""
    found = {}
    for block in next(iter(sums.values())):
        votes = Counter(of[block] for of in sums.values())
        most, count = votes.most_common(1)[0]
        if len(votes) > 1:
            clear = 2 * count > len(sums)
            found[block] = tuple(m for m, of in sums.items() if not clear or of[block] != most)
    return found
