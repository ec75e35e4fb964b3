"""A version of another layout in the memory of the nodes, tensor by tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from reft.blocks import BlockKey, Section
from reft.engine.relayout import Live, spoken_by
from reft.errors import LayoutError
from reft.grid import Coordinate, Degrees
from reft.recover.other_layout import OtherMemory, Place
from reft.recover.plan import BlockSource, Fetch, RecoveryPlan
from reft.recover.relayout import WEIGHT, Layout, Move
from reft.state.blob import DecodedBlob
from reft.state.catalogue import TensorSpec, end_to_end

_Block = tuple[int, int, BlockKey]
"""(pp, tp) of its sharding group, and what it is called in that."""


class _Stored(NamedTuple):
    """A tensor of a rank, and where it lies in an image of that."""

    section: Section
    start_bytes: int
    spec: TensorSpec


class _Range(NamedTuple):
    """Bytes [start, start + nbytes) of an image go to ``at`` in the bytes of a live tensor."""

    start: int
    nbytes: int
    target: torch.Tensor
    at: int


class MemorySource:
    """A :class:`~reft.engine.relayout.Source`. Collective: what ranks need of others' host state is brought
    at once.

    Args:
        memory: surveyed.
        plan: what the survey found.
        job_id: the job.
        at: this rank.
    """

    def __init__(self, memory: OtherMemory, plan: RecoveryPlan, job_id: str, at: Coordinate) -> None:
        self._memory = memory
        self._name = f"memory:{job_id}/{plan.label.step}"
        self.degrees: Degrees = plan.degrees
        self._hosts = memory.bring_hosts(spoken_by(plan.degrees, at))
        self._places: list[Place] = []
        self._ranges: dict[_Block, list[_Range]] = {}

    def __str__(self) -> str:
        return self._name

    def host_state(self, at: Coordinate) -> dict[str, Any]:
        """See there."""
        return DecodedBlob(self._hosts[at]).state

    def locate(self, old: Layout, moves: Sequence[Move], live: Live, module: Any) -> None:
        """See there."""
        stored = {group: self._stored(Coordinate(group[0], 0, group[1])) for group in old.held}
        ranges: dict[_Block, list[_Range]] = defaultdict(list)
        places: dict[BlockSource, Place] = {}
        for move in moves:
            at, target = move.source, live[move.target]
            found = _checked(move, stored[at.pp, at.tp].get(_name_in_image(move.tensor)), target)
            size = target.dtype.itemsize
            start = found.start_bytes + move.start * size
            here = _Range(start, move.numel * size, target.view(torch.uint8), move.at * size)
            for place in self._memory.places_of(at, found.section, start, here.nbytes):
                fetch = self._memory.fetch_at(place)
                places.setdefault(fetch.source, place)
                ranges[fetch.pp, fetch.tp, fetch.key].append(here)
        self._places, self._ranges = list(places.values()), dict(ranges)

    def carry_out(self) -> None:
        """See there.

        Raises:
            TransferError: a peer is gone, or its memory changed while it was read.
        """
        self._memory.bring(self._places, self._write)

    def _write(self, fetch: Fetch, data: torch.Tensor) -> None:
        """Several threads may bring blocks at once, which have no live byte in common."""
        for part in self._ranges[fetch.pp, fetch.tp, fetch.key]:
            begin = max(fetch.start_bytes, part.start)
            end = min(fetch.start_bytes + fetch.nbytes, part.start + part.nbytes)
            at = part.at + begin - part.start
            part.target[at : at + end - begin].copy_(
                data[begin - fetch.start_bytes : end - fetch.start_bytes]
            )

    def _stored(self, at: Coordinate) -> dict[str, _Stored]:
        """The same on all replicas."""
        manifest = DecodedBlob(self._hosts[at]).manifest
        found: dict[str, _Stored] = {}
        for section, specs in (
            (Section.REPLICATED, manifest.replicated),
            (Section.OWNED, manifest.owned),
        ):
            starts, _ = end_to_end(spec.nbytes for spec in specs)
            found |= {s.name: _Stored(section, start, s) for s, start in zip(specs, starts, strict=True)}
        return found


def _name_in_image(tensor: str) -> str:
    """``exp_avg.0.1`` of a plan is ``optimizer.0.1.exp_avg`` in an image."""
    kind, _, place = tensor.partition(".")
    return tensor if kind in (WEIGHT, "master") else f"optimizer.{place}.{kind}"


def _checked(move: Move, stored: _Stored | None, target: torch.Tensor) -> _Stored:
    """
    Raises:
        LayoutError: its bytes are not those of the live tensor.
    """
    if stored is None:
        raise LayoutError(
            f"the memory of {move.source} does not have {move.tensor} as a tensor of its own; start the "
            f"job in the layout that wrote it"
        )
    spec = stored.spec
    numel = prod(spec.shape)
    if not torch.empty_strided(spec.shape, spec.stride, device="meta").is_contiguous():
        raise LayoutError(
            f"{move.tensor} of {move.source} is not contiguous: start in the layout that wrote it"
        )
    if spec.torch_dtype != target.dtype or move.start + move.numel > numel:
        raise LayoutError(
            f"{move.tensor} of {move.source} has {numel} numbers of {spec.dtype}; expected {target.dtype}, "
            f"and {move.start + move.numel} of them: start with the precision and the model that wrote it"
        )
    return stored
