"""Reads a version that was written in another layout (other parallel degrees) from arenas, the
files in shared memory that hold versions."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from reft.errors import LayoutError
from reft.grid import Coordinate, Degrees, Section
from reft.recover.decide import ImageRange
from reft.recover.plan import Fetch
from reft.relayout.element_map import (
    ElementMove,
    RankLayout,
)
from reft.relayout.layouts import LiveTensors, check_numbers
from reft.state.blob import DecodedBlob
from reft.state.catalogue import TensorSpec, end_to_end

_Image = tuple[int, int, Section, int]
"""Identifies an image (the bytes of a section): pp and tp of the sharding group, the section, and
the member that owns it (-1 if the section is replicated)."""


class _StoredTensor(NamedTuple):
    """A tensor in a stored image; ``start_bytes`` is the tensor's offset."""

    section: Section
    start_bytes: int
    spec: TensorSpec


class _Range(NamedTuple):
    """Maps bytes [start, start + nbytes) of an image to offset ``at`` in a live tensor."""

    start: int
    nbytes: int
    target: torch.Tensor
    at: int


class ArenaSource:
    """Locates and reads the bytes of a version in arenas.

    Args:
        hosts: encoded host states of the ranks in
            :func:`~reft.recover.decide.host_state_sources`.
        degrees: parallel degrees of the job that wrote the version.
        name: origin of the version, for messages.

    Attributes:
        pieces: byte ranges of the images that :meth:`locate` has found to be needed.
    """

    def __init__(self, hosts: Mapping[Coordinate, bytes], degrees: Degrees, name: str) -> None:
        self._hosts = hosts
        self.degrees = degrees
        self._name = name
        self.pieces: list[ImageRange] = []
        self._ranges: dict[_Image, list[_Range]] = {}

    def __str__(self) -> str:
        return self._name

    def blob(self, at: Coordinate) -> DecodedBlob:
        return DecodedBlob(self._hosts[at])

    def host_state(self, at: Coordinate) -> dict[str, Any]:
        """Return the host state of a rank. Each call returns a new object."""
        return self.blob(at).state

    def locate(
        self,
        moves: Sequence[ElementMove],
        live: LiveTensors,
        old: RankLayout | None = None,
        module: Any = None,
    ) -> None:
        """Find the bytes of the given moves in the images. Writes nothing.

        Args:
            moves: elements to move, with their targets.
            live: this rank's tensors.
            old: layout of the version, if elements are matched by name; None if only the number of
                replicas differs.
            module: not used here; another source, DeepSpeed's files, needs it.

        Raises:
            LayoutError: a tensor is missing or does not fit.
        """
        stored = {(at.pp, at.tp): self._stored(at) for at in self._hosts}
        ranges: dict[_Image, list[_Range]] = defaultdict(list)
        for move in moves:
            at, target = move.source, live[move.target]
            found = stored[at.pp, at.tp].get(move.tensor)
            if found is None:
                raise LayoutError(
                    f"the memory of {at} does not have {move.tensor} as a tensor of its own; start "
                    "the job in the layout that wrote it"
                )
            spec = found.spec
            if (
                old is not None
                and not torch.empty_strided(spec.shape, spec.stride, device="meta").is_contiguous()
            ):
                raise LayoutError(
                    f"{move.tensor} of {at} is not contiguous: start in the layout that wrote it"
                )
            check_numbers(move, spec.torch_dtype, prod(spec.shape), target)
            size = target.dtype.itemsize
            start, nbytes = found.start_bytes + move.start * size, move.numel * size
            self.pieces.append(ImageRange(at, found.section, start, nbytes))
            here = _Range(start, nbytes, target.view(torch.uint8), move.at * size)
            ranges[_image(at.pp, at.tp, found.section, at.dp)].append(here)
        self._ranges = {
            image: sorted(of_image, key=lambda r: r.start) for image, of_image in ranges.items()
        }

    def parts(
        self, fetch: Fetch, data: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs (live bytes, bytes of a block to copy there), in the order of the block."""
        ranges = self._ranges.get(
            _image(fetch.pp, fetch.tp, fetch.key.section, fetch.key.member), []
        )
        first = max(0, bisect_right(ranges, fetch.start_bytes, key=lambda r: r.start) - 1)
        for part in ranges[first:]:
            begin = max(fetch.start_bytes, part.start)
            end = min(fetch.start_bytes + fetch.nbytes, part.start + part.nbytes)
            if part.start >= fetch.start_bytes + fetch.nbytes:
                break
            if begin < end:
                at = part.at + begin - part.start
                inside = data[begin - fetch.start_bytes : end - fetch.start_bytes]
                yield part.target[at : at + end - begin], inside

    def _stored(self, at: Coordinate) -> dict[str, _StoredTensor]:
        """Return the stored tensors by name. They are equal on all replicas."""
        manifest = self.blob(at).manifest
        found: dict[str, _StoredTensor] = {}
        for section, specs in (
            (Section.REPLICATED, manifest.replicated),
            (Section.OWNED, manifest.owned),
        ):
            starts, _ = end_to_end(spec.nbytes for spec in specs)
            found |= {
                s.name: _StoredTensor(section, start, s)
                for s, start in zip(specs, starts, strict=True)
            }
        return found


def _image(pp: int, tp: int, section: Section, member: int) -> _Image:
    return pp, tp, section, -1 if section is Section.REPLICATED else member
