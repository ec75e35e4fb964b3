"""Restores into a DeepSpeed engine a version that was written by a job with another layout (other
parallel degrees)."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch

from reft.control.control import ControlGroup
from reft.errors import LayoutError, ReftError
from reft.grid import Coordinate, Degrees, Resize, Topology, only_replicas_differ
from reft.relayout.arenas import ArenaSource
from reft.relayout.checkpoint_files import CheckpointSource
from reft.relayout.element_map import (
    MASTER,
    ElementMove,
    Part,
    RankContents,
    RankImages,
    RankLayout,
    plan_layout,
    plan_replica,
)
from reft.relayout.layouts import (
    HELD,
    LayoutChange,
    LiveTensors,
    check_stages,
    describe,
    live_tensors,
)
from reft.state.adapters import IDLE, Partitions
from reft.state.blob import capture_rng
from reft.state.catalogue import Manifest
from reft.state.codec import decode, encode
from reft.state.idle import GRADIENT, MASTER_GRADIENT
from reft.storage.load import host_file, read_degrees

logger = logging.getLogger(__name__)


_T = TypeVar("_T")


def other_layout(control: ControlGroup, topology: Topology, checkpoint: Path) -> Degrees | None:
    """Return the parallel degrees with which a checkpoint was written; None if they are those of
    this job. Collective."""
    found = read_degrees(checkpoint) if control.rank == 0 else None
    message = encode(None if found is None else [found.pp, found.dp, found.tp])
    reply = decode(control.gather_bytes(message)[0])
    was = None if reply is None else Degrees(*reply)
    if was is None or was == topology.degrees:
        return None
    # If every node keeps only the files of its own ranks, rank 0 sees a part of the files. A rank
    # whose own file lies outside of the layout that rank 0 has seen detects this.
    at = topology.coordinates[control.rank]
    outside = at.pp >= was.pp or at.dp >= was.dp or at.tp >= was.tp
    has_own = outside and host_file(checkpoint, at).is_file()
    return None if any(control.gather_bytes(b"own" if has_own else b"")) else was


class Relayout:
    """Prepares an engine to receive a version of another layout. All methods are collective.

    Args:
        control: messages between the ranks.
        topology: placement of this job.
        change: adapts the version to the engine.
        source: the version.
    """

    def __init__(
        self,
        control: ControlGroup,
        topology: Topology,
        change: LayoutChange,
        source: ArenaSource | CheckpointSource,
    ) -> None:
        self._control = control
        self._at = topology.coordinates[control.rank]
        self._topology = topology
        self._change = change
        self._source = source
        self._was = source.degrees

    def prepare(self) -> dict[str, Any]:
        """Create the engine's state in the form that it has in this job, and locate the state's
        bytes in the version.

        Returns:
            The host state, as this rank has it now. Data position and client state are left to the
            caller.
        """
        source, now = self._source, self._topology.degrees
        if isinstance(source, ArenaSource) and only_replicas_differ(self._was, now):
            return on_all(self._control, lambda: self._prepare_replica(source))
        self.check_live_buffers()
        old, state = on_all(self._control, self._read)
        local = on_all(self._control, lambda: self._describe(old))
        replies = self._control.gather_bytes(local.encode())
        held = {
            (at.pp, at.tp): RankContents.decode(reply)
            for at, reply in zip(self._topology.coordinates, replies, strict=True)
        }
        new = RankLayout(now, held)
        on_all(self._control, lambda: check_stages(self._change.engine.module, old, new, self._at))
        moves = on_all(self._control, lambda: plan_layout(old, new, self._at))
        on_all(self._control, lambda: self._locate_named(old, new, moves, state))
        return state

    def _locate_named(
        self, old: RankLayout, new: RankLayout, moves: Sequence[ElementMove], state: dict[str, Any]
    ) -> None:
        adapter = self._change.adapter
        adapter.state_like_masters(state["adapter"])
        live = live_tensors(self._change.engine, adapter)
        self._source.locate(moves, live, old, self._change.engine.module)
        self._pad(new.held[self._at.pp, self._at.tp], live)

    def _pad(self, held: RankContents | RankImages, live: LiveTensors) -> None:
        for zeros in held.paddings(self._at.dp):
            live[zeros.target][zeros.at : zeros.at + zeros.numel] = 0

    def _prepare_replica(self, source: ArenaSource) -> dict[str, Any]:
        """Do :meth:`prepare` if only the number of replicas differs."""
        adapter, at = self._change.adapter, self._at
        resize = Resize(self._was.dp, self._topology.degrees.dp)
        blob = source.blob(replace(at, dp=resize.host_from(at.dp)))
        self._change.convert(blob.state, resize, is_new=resize.is_new(at.dp))
        state, manifest = blob.state["adapter"], blob.manifest
        if not state.get(IDLE):  # No gradients that DeepSpeed kept are restored
            gradients = (GRADIENT, MASTER_GRADIENT)
            owned = tuple(s for s in manifest.owned if not s.name.startswith(gradients))
            manifest = Manifest(manifest.replicated, owned)
        old = describe_images(manifest, adapter.partitioned(state), resize.old)
        images = adapter.prepare_resized(manifest, state)
        new = describe_images(Manifest.of(images), adapter.partitioned(state), resize.new)
        tensors = {
            spec.name: image.live(start, start + spec.nbytes)[0].view(spec.torch_dtype)
            for image in images
            for spec, start in zip(image.specs, image.offsets, strict=True)
            if spec.nbytes
        }
        source.locate(plan_replica(old, new, resize, at), tensors)
        self._pad(new, tensors)
        return blob.state

    def _read(self) -> tuple[RankLayout, dict[str, Any]]:
        """Return the layout of the old job, and the host state with which this rank continues."""
        held = {}
        for pp, tp in product(range(self._was.pp), range(self._was.tp)):
            state = self._source.host_state(Coordinate(pp, 0, tp))
            contents = state.get(HELD, "an older reft wrote it")
            if isinstance(contents, str):
                raise LayoutError(
                    f"{self._source} can only be loaded in the layout {self._was}: {contents}"
                )
            held[pp, tp] = RankContents.decode(contents)
        # The host state comes from the first stage, which reads the data.
        of = Coordinate(
            0, Resize(self._was.dp, 1).host_from(self._at.dp), self._at.tp % self._was.tp
        )
        state = self._source.host_state(of)
        state["buffers"] = self.buffers()
        self._change.convert(state, Resize(self._was.dp, self._topology.degrees.dp), is_new=True)
        state["rng"] = capture_rng()
        return RankLayout(self._was, held), state

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers of this rank's module. Each is taken from an old stage that had the
        buffer."""
        wanted = {name for name, _ in self._change.engine.module.named_buffers()}
        found: dict[str, torch.Tensor] = {}
        for pp in range(self._was.pp):
            if not wanted - found.keys():
                break
            stage = Coordinate(pp, self._at.dp % self._was.dp, self._at.tp % self._was.tp)
            buffers = self._source.host_state(stage)["buffers"]
            here = {name: value for name, value in buffers.items() if name in wanted}
            if self._resliced:
                self._check_slices(pp, here)
            found |= here
        if wanted - found.keys():
            raise LayoutError(
                f"{self._source} lacks the buffers {sorted(wanted - found.keys())[:4]}"
            )
        return found

    def _check_slices(self, pp: int, names: Iterable[str]) -> None:
        """Refuse buffers of a stage that differ between its tensor slices.

        Only the slices of the first replica are compared, because every rank has the host states of
        that replica.
        """
        slices = [Coordinate(pp, 0, tp) for tp in range(self._was.tp)]
        first, *others = (self._source.host_state(at)["buffers"] for at in slices)
        expected = compute_digests({name: first[name] for name in names})
        for buffers in others:
            self._check_equal(expected, compute_digests(buffers))

    @property
    def _resliced(self) -> bool:
        """Whether the number of tensor-parallel slices differs."""
        return self._was.tp != self._topology.degrees.tp

    def check_live_buffers(self) -> None:
        """Refuse buffers that differ between this job's tensor-parallel slices, because their
        content would depend on the number of slices. Collective."""
        if not self._resliced:
            return
        buffers = self._change.engine.module.named_buffers()
        local = compute_digests({name: buffer.detach().cpu() for name, buffer in buffers})
        replies = self._control.gather_bytes(encode(local))
        others = [
            decode(reply)
            for at, reply in zip(self._topology.coordinates, replies, strict=True)
            if (at.pp, at.dp) == (self._at.pp, self._at.dp)
        ]

        def check() -> None:
            for other in others:
                self._check_equal(local, other)

        on_all(self._control, check)

    def _check_equal(self, one: dict[str, bytes], other: dict[str, bytes]) -> None:
        if differing := [name for name, digest in one.items() if other.get(name) != digest]:
            raise LayoutError(
                f"the buffers {differing[:4]} are not equal on all tensor slices: which values "
                "another number of slices has is not known. Make them attributes instead of "
                f"buffers where they follow from the slice, or start with {self._was.tp} tensor "
                "slices"
            )

    def _describe(self, old: RankLayout) -> RankContents:
        """Describe the contents that this rank will have. The kinds of optimizer state are taken
        from the old job, because this job's optimizer has no state before its first step."""
        held = describe(self._change.engine, self._change.adapter)
        kinds = next(iter(old.held.values())).kinds
        if len(kinds) != len(held.groups):
            raise LayoutError(
                f"the optimizer had {len(kinds)} groups of parameters on a stage, and has "
                f"{len(held.groups)} on {self._at}; expected the same groups on every stage of "
                f"either layout"
            )
        return replace(held, kinds=kinds)


def describe_images(manifest: Manifest, partitions: Partitions, replicas: int) -> RankImages:
    """Describe the images of a rank by its manifest.

    Args:
        manifest: tensors of the images.
        partitions: the units of which the partitioned tensors hold parts.
        replicas: the data-parallel degree.
    """
    shapes = {spec.name: spec.shape for spec in (*manifest.replicated, *manifest.owned)}
    whole: dict[str, int] = {}
    parts: dict[str, tuple[Part, ...]] = {}
    for name, shape in shapes.items():
        kind, _, rest = name.partition(".")
        of = name
        if kind == "optimizer":
            group, position, kind = rest.split(".", 2)
            of = f"{MASTER}.{group}.{position}"
        # A state tensor whose shape differs from its master's is not partitioned: every replica has
        # all of it.
        if of not in partitions or shape != shapes[of]:
            whole[name] = prod(shape)
            continue
        held = partitions[of]
        sizes = [prod(shape)] if len(held) == 1 else [-(-n // replicas) for _, n in held]
        parts[name] = tuple(
            Part(f"{kind}.{of_part}", size, numel)
            for (of_part, numel), size in zip(held, sizes, strict=True)
        )
    return RankImages(whole, parts)


def compute_digests(buffers: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Return a digest of each buffer, to compare buffers of different ranks."""
    return {
        name: hashlib.blake2b(encode(b), digest_size=16).digest() for name, b in buffers.items()
    }


def on_all(control: ControlGroup, act: Callable[[], _T]) -> _T:
    """Run ``act`` on all ranks; if it fails on one rank, raise an error on all of them (P6).
    Collective."""
    own: Exception | None = None
    try:
        result = act()
    except Exception as error:
        own = error
    replies = control.gather_bytes(b"" if own is None else str(own).encode())
    if isinstance(own, ReftError):
        raise own
    if own is not None:
        raise LayoutError(f"{type(own).__name__}: {own}") from own
    if failed := [reply.decode() for reply in replies if reply]:
        raise LayoutError(f"on another rank: {failed[0]}")
    return result


def restore_checkpoint(
    control: ControlGroup,
    topology: Topology,
    change: LayoutChange,
    checkpoint: Path,
    was: Degrees,
    *,
    restore: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Restore model, optimizer and counters from DeepSpeed's checkpoint files into the engine.
    Collective.

    Args:
        control: messages between the ranks.
        topology: placement of this job.
        change: adapts the version to the engine.
        checkpoint: directory of DeepSpeed's files.
        was: layout of the job that wrote them.
        restore: function that restores the host state, called after the tensors were written.

    Returns:
        The host state, as this rank has it now. Data position and client state are left to the
        caller.
    """
    source = CheckpointSource(checkpoint, was)
    state = Relayout(control, topology, change, source).prepare()
    on_all(control, source.write)
    on_all(control, lambda: restore(state))
    if control.rank == 0:
        logger.warning(
            "%s was written by a job of %s and is resumed as one of %s, with the random states of "
            "a new start. From here on the losses are those of a job of %s",
            *(source, was, topology.degrees, topology.degrees),
        )
    return state


def read_replica_host_state(
    control: ControlGroup,
    topology: Topology,
    change: LayoutChange,
    checkpoint: Path,
    was: Degrees,
) -> dict[str, Any]:
    """Read the host state that this rank restores in addition to DeepSpeed's files. Collective.

    A replica restores the state of the old replica with the same index. If there was none, the
    replica restores another one's state, but keeps the random states of its own start.
    """
    at, resize = topology.coordinates[control.rank], Resize(was.dp, topology.degrees.dp)
    source = CheckpointSource(checkpoint, was)
    state = on_all(control, lambda: source.host_state(replace(at, dp=resize.host_from(at.dp))))
    change.convert(state, resize, is_new=resize.is_new(at.dp))
    if control.rank == 0:
        logger.warning(
            "%s is resumed from %s. From here on the losses are those of a DP%d job",
            *(checkpoint, resize, resize.new),
        )
    return state
