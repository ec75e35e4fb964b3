"""Where the recovered bytes go: the host block first, then straight into the live tensors."""

from __future__ import annotations

import threading

import torch

from reft.blocks import Section
from reft.engine.session import Session
from reft.memory.header import checksum
from reft.memory.stream import HashingCopier, Range, copy_tensor, hashing_copier, ranges_of
from reft.recover.plan import Fetch
from reft.recover.reshape import Piece, Resize, Scatter
from reft.state.blob import DecodedBlob
from reft.state.catalogue import SectionImage


class Target:
    """The live state of one session."""

    def __init__(self, session: Session) -> None:
        self._adapter = session.state.adapter
        self._resizing = session.engine.resizing
        self._dp = session.coordinate.dp
        self._scatter: Scatter | None = None
        self._on_host = session.engine.device.type == "cpu"
        self._own = threading.local()
        self.blob: DecodedBlob

    def prepare(self, host: bytes, resize: Resize) -> tuple[Piece, ...]:
        """The host block of this coordinate is there: give the engine's state the shape it had, or has
        at this data-parallel degree."""
        self.blob = DecodedBlob(host)
        if resize.old == resize.new:
            self._images = self._adapter.prepare(self.blob.manifest, self.blob.state["adapter"])
            return ()
        assert self._resizing is not None  # else no such version is found
        self._images, pieces = self._resizing.prepare(self.blob, resize, self._dp)
        self._scatter = Scatter(pieces)
        return pieces

    def write(self, fetch: Fetch, data: torch.Tensor) -> int:
        """Copy a block into the live tensors and return its checksum; into host memory in one pass. Several
        threads may bring blocks at once."""
        image = self._images[0] if fetch.key.section is Section.REPLICATED else self._images[1]
        if self._scatter is not None and fetch.key.section is Section.OWNED:
            for at, nbytes, target in self._scatter.parts(fetch.key.member, fetch.start_bytes, fetch.nbytes):
                image.write_from(target, data[at : at + nbytes], copy_tensor)
            return checksum(data.numpy().data)
        if not self._on_host:
            image.write_from(fetch.start_bytes, data, copy_tensor)
            return checksum(data.numpy().data)
        if not hasattr(self._own, "hasher"):
            self._own.hasher = hashing_copier()
        return write_and_hash(image, fetch.start_bytes, data, self._own.hasher)


def write_and_hash(image: SectionImage, start: int, data: torch.Tensor, hasher: HashingCopier) -> int:
    """Copy ``data`` (1-D uint8, on the host as the image is) to ``image[start : start + len(data)]``.

    Returns:
        The checksum of all of ``data``, what pads the image's tensors included.
    """
    ranges: list[Range] = []
    base, at = data.data_ptr(), 0

    def note(target: torch.Tensor, source: torch.Tensor) -> None:
        nonlocal at
        begin = source.data_ptr() - base
        ranges.append((0, base + at, begin - at))
        ranges.append((target.data_ptr(), base + begin, source.numel()))
        at = begin + source.numel()

    image.write_from(start, data, note)
    ranges.append((0, base + at, data.numel() - at))
    hasher.copy(ranges_of(row for row in ranges if row[2]))
    return hasher.take()
