"""A DeepSpeed engine takes up a version that a job of another layout wrote: a checkpoint, or
arenas."""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from reft.control.control import ControlGroup
from reft.errors import LayoutError, ReftError
from reft.grid import Coordinate, Degrees, Resize, Section, Topology, only_replicas_differ
from reft.recover.decide import ImageRange
from reft.recover.plan import Fetch
from reft.relayout.element_map import (
    MASTER,
    WEIGHT,
    ElementMove,
    RankContents,
    RankImages,
    RankLayout,
    plan_layout,
    plan_replica,
)
from reft.relayout.layouts import HELD, LayoutChange, check_stages, describe, live_tensors
from reft.state.blob import DecodedBlob, capture_rng
from reft.state.catalogue import Manifest, TensorSpec, end_to_end
from reft.state.codec import decode, encode
from reft.storage.load import host_file, read_degrees, read_host_state

logger = logging.getLogger(__name__)


_T = TypeVar("_T")
Live = Mapping[str, torch.Tensor]  # what a plan names, flat


def other_layout(control: ControlGroup, topology: Topology, checkpoint: Path) -> Degrees | None:
    """The layout that the checkpoint was written in, if it is another one than this job's.
    Collective."""
    found = read_degrees(checkpoint) if control.rank == 0 else None
    mine = encode(None if found is None else [found.pp, found.dp, found.tp])
    told = decode(control.gather_bytes(mine)[0])
    was = None if told is None else Degrees(*told)
    if was is None or was == topology.degrees:
        return None
    # Rank 0 sees a part of the files where every node keeps those of its own ranks.
    at = topology.coordinates[control.rank]
    outside = at.pp >= was.pp or at.dp >= was.dp or at.tp >= was.tp
    has_own = outside and host_file(checkpoint, at).is_file()
    return None if any(control.gather_bytes(b"own" if has_own else b"")) else was


class Relayout:
    """Takes up one version. Collective: all methods, on all ranks."""

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
        """Give the engine's state the shape that it has in this job, and find its bytes. Returns
        the host state, as this rank has it now; data and client state are left to the caller."""
        source, now = self._source, self._topology.degrees
        if isinstance(source, ArenaSource) and only_replicas_differ(self._was, now):
            return on_all(self._control, lambda: self._prepare_replica(source))
        self.check_live_buffers()
        old, state = on_all(self._control, self._read)
        mine = on_all(self._control, lambda: self._describe(old))
        told = [RankContents.decode(body) for body in self._control.gather_bytes(mine.encode())]
        at = self._topology.coordinates
        new = RankLayout(now, {(c.pp, c.tp): h for c, h in zip(at, told, strict=True)})
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

    def _pad(self, held: RankContents | RankImages, live: Live) -> None:
        for zeros in held.paddings(self._at.dp):
            live[zeros.target][zeros.at : zeros.at + zeros.numel] = 0

    def _prepare_replica(self, source: ArenaSource) -> dict[str, Any]:
        """Stages and slices are as they were: what an image names is the same tensor, or a part of
        it."""
        was, now, at, adapter = self._was, self._topology.degrees, self._at, self._change.adapter
        resize = Resize(was.dp, now.dp)
        blob = source.blob(replace(at, dp=resize.host_from(at.dp)))
        lengths, stored = adapter.partitioned(), {spec.name: spec for spec in blob.manifest.owned}
        live = {spec.name: spec for spec in adapter.images()[1].specs}
        cut = [n for n, spec in stored.items() if spec.shape == stored[_find_master(n)].shape]
        # A part of a parameter group is as large as this job's master of the group.
        owned = stored | {
            n: replace(stored[n], shape=live[m].shape, stride=live[m].stride)
            for n in cut
            if (m := _find_master(n)) in live
        }
        manifest = Manifest(blob.manifest.replicated, tuple(owned.values()))
        images = adapter.prepare(manifest, blob.state["adapter"])

        def held(owned: Iterable[TensorSpec]) -> RankImages:
            sizes = {spec.name: prod(spec.shape) for spec in (*manifest.replicated, *owned)}
            parts = {n: (sizes.pop(n), lengths[int(n.split(".")[1])]) for n in cut}
            return RankImages(sizes, parts)

        new = held(manifest.owned)
        tensors = {
            spec.name: image.live(start, start + spec.nbytes)[0].view(spec.torch_dtype)
            for image in images
            for spec, start in zip(image.specs, image.offsets, strict=True)
            if spec.nbytes
        }
        source.locate(plan_replica(held(blob.manifest.owned), new, resize, at), tensors)
        self._pad(new, tensors)
        self._change.convert(blob.state, resize, is_new=resize.is_new(at.dp))
        return blob.state

    def _read(self) -> tuple[RankLayout, dict[str, Any]]:
        """Who held what, and the host state that this rank goes on with."""
        held = {}
        for pp, tp in product(range(self._was.pp), range(self._was.tp)):
            told = self._source.host_state(Coordinate(pp, 0, tp)).get(
                HELD, "an older reft wrote it"
            )
            if isinstance(told, str):
                raise LayoutError(
                    f"{self._source} can only be loaded in the layout {self._was}: {told}"
                )
            held[pp, tp] = RankContents.decode(told)
        # The first stage's: it reads the data.
        of = Coordinate(
            0, Resize(self._was.dp, 1).host_from(self._at.dp), self._at.tp % self._was.tp
        )
        state = self._source.host_state(of)
        state["buffers"] = self.buffers()
        self._change.convert(state, Resize(self._was.dp, self._topology.degrees.dp), is_new=True)
        state["rng"] = capture_rng()
        return RankLayout(self._was, held), state

    def buffers(self) -> dict[str, torch.Tensor]:
        """Those of this rank's module, from whichever stage had them."""
        wanted = {name for name, _ in self._change.engine.module.named_buffers()}
        found: dict[str, torch.Tensor] = {}
        for pp in range(self._was.pp):
            if not wanted - found.keys():
                break
            stage = Coordinate(pp, self._at.dp % self._was.dp, self._at.tp % self._was.tp)
            buffers = self._source.host_state(stage)["buffers"]
            mine = {name: value for name, value in buffers.items() if name in wanted}
            # Of the first replica, whose slices every rank may read.
            slices = [Coordinate(pp, 0, tp) for tp in range(self._was.tp)] if self._resliced else []
            told = [self._source.host_state(at)["buffers"] for at in slices]
            for other in told:
                self._check_alike(
                    compute_digests({name: told[0][name] for name in mine}), compute_digests(other)
                )
            found |= mine
        if wanted - found.keys():
            raise LayoutError(
                f"{self._source} lacks the buffers {sorted(wanted - found.keys())[:4]}"
            )
        return found

    @property
    def _resliced(self) -> bool:
        return self._was.tp != self._topology.degrees.tp

    def check_live_buffers(self) -> None:
        """What was made for one tensor slice is not what another number of slices has.
        Collective."""
        if not self._resliced:
            return
        mine = compute_digests(
            {name: b.detach().cpu() for name, b in self._change.engine.module.named_buffers()}
        )
        told = self._control.gather_bytes(encode(mine))
        at = self._topology.coordinates
        others = [
            decode(body)
            for c, body in zip(at, told, strict=True)
            if (c.pp, c.dp) == (self._at.pp, self._at.dp)
        ]

        def check() -> None:
            for other in others:
                self._check_alike(mine, other)

        on_all(self._control, check)

    def _check_alike(self, mine: dict[str, bytes], other: dict[str, bytes]) -> None:
        if unlike := [name for name, digest in mine.items() if other.get(name) != digest]:
            raise LayoutError(
                f"the buffers {unlike[:4]} are not equal on all tensor slices: which values "
                "another number "
                "of slices has is not known. Make them attributes instead of buffers where they "
                "follow from "
                f"the slice, or start with {self._was.tp} tensor slices"
            )

    def _describe(self, old: RankLayout) -> RankContents:
        """What this rank will hold: the optimizer has no state before its first step."""
        held = describe(self._change.engine, self._change.adapter)
        kinds = next(iter(old.held.values())).kinds
        if len(kinds) != len(held.groups):
            raise LayoutError(
                f"the optimizer had {len(kinds)} groups of parameters on a stage, and has "
                f"{len(held.groups)} "
                f"on {self._at}; expected the same groups on every stage of either layout"
            )
        return replace(held, kinds=kinds)


def _find_master(tensor: str) -> str:
    """``optimizer.0.0.exp_avg`` belongs to ``master.0.0``."""
    _, group, position, *_ = tensor.split(".")
    return f"{MASTER}.{group}.{position}"


def compute_digests(buffers: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """By which buffers of different ranks are compared."""
    return {
        name: hashlib.blake2b(encode(b), digest_size=16).digest() for name, b in buffers.items()
    }


def on_all(control: ControlGroup, act: Callable[[], _T]) -> _T:
    """Do it on all ranks; where it fails on one, raise everywhere (P6). Collective."""
    own: Exception | None = None
    try:
        result = act()
    except Exception as error:
        own = error
    told = control.gather_bytes(b"" if own is None else str(own).encode())
    if own is not None:
        raise (
            own if isinstance(own, ReftError) else LayoutError(f"{type(own).__name__}: {own}")
        ) from own
    if failed := [text.decode() for text in told if text]:
        raise LayoutError(f"on another rank: {failed[0]}")
    return result


# (pp, tp) of its sharding group; the member, -1 of the replicated one
_Image = tuple[int, int, Section, int]


class _StoredImage(NamedTuple):
    section: Section
    start_bytes: int
    spec: TensorSpec


class _Range(NamedTuple):
    """Bytes [start, start + nbytes) of an image go to ``at`` in the bytes of a live tensor."""

    start: int
    nbytes: int
    target: torch.Tensor
    at: int


class ArenaSource:
    """A version in arenas, of which the host states are here. ``pieces``: what was located of the
    images."""

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
        """Of a rank among those that :func:`~reft.recover.decide.host_state_sources` names, a new
        object in every call."""
        return self.blob(at).state

    def locate(
        self,
        moves: Sequence[ElementMove],
        live: Live,
        old: RankLayout | None = None,
        module: Any = None,
    ) -> None:
        """Find the bytes of these moves; nothing is written. ``old``: where elements are told by
        names."""
        stored = {(at.pp, at.tp): self._stored(at) for at in self._hosts}
        ranges: dict[_Image, list[_Range]] = defaultdict(list)
        for move in moves:
            at, target = move.source, live[move.target]
            found = stored[at.pp, at.tp].get(move.tensor)
            if found is None:
                raise LayoutError(
                    f"the memory of {at} does not have {move.tensor} as a tensor of its own; "
                    "start the job "
                    f"in the layout that wrote it"
                )
            spec = found.spec
            if (
                old is not None
                and not torch.empty_strided(spec.shape, spec.stride, device="meta").is_contiguous()
            ):
                raise LayoutError(
                    f"{move.tensor} of {at} is not contiguous: start in the layout that wrote it"
                )
            _check_numbers(move, spec.torch_dtype, prod(spec.shape), target)
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
        """Live bytes, and what of a block goes there, in its order."""
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

    def _stored(self, at: Coordinate) -> dict[str, _StoredImage]:
        """The same on all replicas."""
        manifest = self.blob(at).manifest
        found: dict[str, _StoredImage] = {}
        for section, specs in (
            (Section.REPLICATED, manifest.replicated),
            (Section.OWNED, manifest.owned),
        ):
            starts, _ = end_to_end(spec.nbytes for spec in specs)
            found |= {
                s.name: _StoredImage(section, start, s)
                for s, start in zip(specs, starts, strict=True)
            }
        return found


def _image(pp: int, tp: int, section: Section, member: int) -> _Image:
    return pp, tp, section, -1 if section is Section.REPLICATED else member


def _check_numbers(move: ElementMove, dtype: torch.dtype, numel: int, target: torch.Tensor) -> None:
    if dtype != target.dtype or move.start + move.numel > numel:
        raise LayoutError(
            f"{move.tensor} of {move.source} has {numel} numbers of {dtype}; expected "
            f"{target.dtype}, and "
            f"{move.start + move.numel} of them: start with the precision and the model that "
            "wrote it"
        )


def restore_checkpoint(
    control: ControlGroup,
    topology: Topology,
    change: LayoutChange,
    checkpoint: Path,
    was: Degrees,
    *,
    restore: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Write model, optimizer and counters of DeepSpeed's files into the engine. Collective.

    Args:
        checkpoint: the directory that DeepSpeed's files are in.
        was: the layout of the job that wrote them.
        restore: gives the host state to the engine, after its tensors have been written.

    Returns:
        The host state, as this rank has it now. Data position and client state are left to the
        caller.
    """
    source = CheckpointSource(checkpoint, was, control)
    state = Relayout(control, topology, change, source).prepare()
    source.carry_out()
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
    """Read what this rank restores besides DeepSpeed's files, which every replica has in full.

    A replica restores what its predecessor left. Where there was none, it restores another
    replica's state with the random states of a fresh start. Collective.
    """
    at, resize = topology.coordinates[control.rank], Resize(was.dp, topology.degrees.dp)
    source = CheckpointSource(checkpoint, was, control)
    state = on_all(control, lambda: source.host_state(replace(at, dp=resize.host_from(at.dp))))
    change.convert(state, resize, is_new=resize.is_new(at.dp))
    if control.rank == 0:
        logger.warning(
            "%s is resumed from %s. From here on the losses are those of a DP%d job",
            *(checkpoint, resize, resize.new),
        )
    return state


class CheckpointSource:
    """A version in DeepSpeed's files, which are opened one after the other, while they are read."""

    def __init__(self, checkpoint: Path, degrees: Degrees, control: ControlGroup) -> None:
        self._checkpoint = checkpoint
        self.degrees = degrees
        self._control = control
        self._located: tuple[CheckpointParts, Sequence[ElementMove], Live]

    def __str__(self) -> str:
        return str(self._checkpoint)

    def host_state(self, at: Coordinate) -> dict[str, Any]:
        state = read_host_state(self._checkpoint, at)
        if state is None:
            raise LayoutError(
                f"{self._checkpoint} has no host state of {at}; expected one of every rank"
            )
        return state

    def locate(
        self, moves: Sequence[ElementMove], live: Live, old: RankLayout, module: Any
    ) -> None:
        parts = CheckpointParts(self._checkpoint, self.degrees, old.held, _tied_layers(module))
        self._located = parts, sorted(moves, key=lambda m: (m.source, m.tensor)), live

    def carry_out(self) -> None:
        on_all(self._control, self._write)

    def _write(self) -> None:
        parts, moves, live = self._located
        for move in moves:
            stored, target = parts.tensor(move.source, move.tensor), live[move.target]
            _check_numbers(move, stored.dtype, stored.numel(), target)
            target[move.at : move.at + move.numel].copy_(
                stored[move.start : move.start + move.numel]
            )


def _tied_layers(module: Any) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for number, spec in enumerate(getattr(module, "_layer_specs", ())):
        key = getattr(spec, "key", None)
        if isinstance(key, str):
            found.setdefault(key, []).append(number)
    return found


class CheckpointParts:
    """Reads the tensors that a plan names. Keeps the files of one rank at a time. ``tied``: layers
    of the model that a tied module's weights may lie under, by its key."""

    def __init__(
        self,
        checkpoint: Path,
        degrees: Degrees,
        held: Mapping[tuple[int, int], RankContents],
        tied: Mapping[str, list[int]],
    ) -> None:
        self._checkpoint = checkpoint
        self._degrees = degrees
        self._held = held
        self._tied = tied
        self._at: Coordinate | None = None
        self._files: dict[str, Any] = {}

    def tensor(self, at: Coordinate, name: str) -> torch.Tensor:
        if at != self._at:
            self._at, self._files = at, {}
        kind, _, rest = name.partition(".")
        found = self._weight(at, rest) if kind == WEIGHT else self._of_optimizer(at, name)
        return found.detach().reshape(-1)

    def _load(self, name: str) -> Any:
        """The only file of that pattern; None where there is none."""
        if name not in self._files:
            found = sorted(self._checkpoint.glob(name))
            # Weights, and objects of DeepSpeed's own, as its load_checkpoint reads them.
            loaded = (
                torch.load(found[0], map_location="cpu", weights_only=False, mmap=True)
                if found
                else None
            )
            self._files[name] = loaded
        return self._files[name]

    def _model_parallel(self, at: Coordinate) -> int:
        return at.pp * self._degrees.tp + at.tp

    def _model_file(self, at: Coordinate) -> Any:
        return self._load(f"mp_rank_{self._model_parallel(at):02d}_model_states.pt") or {}

    def _weight(self, at: Coordinate, name: str) -> torch.Tensor:
        module = self._model_file(at).get("module") or {}
        if name in module:
            return self._is_tensor(module[name], at, name)
        head, _, inside = name.partition(".")
        layers = [int(head)] if head.isdigit() else []
        if head == "tied_modules":
            key, _, inside = inside.partition(".")
            layers = self._tied_layers(at.pp, key)
        for layer in layers:
            for file in (
                f"layer_{layer:02d}-model_{at.tp:02d}-model_states.pt",
                f"layer_{layer:02d}-model_states.pt",
            ):
                content = self._load(file) or {}
                if inside in content:
                    return self._is_tensor(content[inside], at, name)
        raise self._lacks(at, name)

    def _tied_layers(self, pp: int, key: str) -> list[int]:
        """Layers that a tied module lies under, the stage's own first: what of it is not tied
        differs.

        Stages have layers one after the other, but where each begins is told only by its other
        layers' names.
        """
        layers = sorted(self._tied.get(key, []))
        numbers: dict[int, set[int]] = {stage: set() for stage in range(self._degrees.pp)}
        holders = set()
        for (stage, _), held in self._held.items():
            heads = [part.name.split(".") for part in held.parameters]
            numbers[stage] |= {int(head[0]) for head in heads if head[0].isdigit()}
            if ["tied_modules", key] in (head[:2] for head in heads):
                holders.add(stage)
        own = numbers[pp]
        before = len([stage for stage in holders if stage < pp])
        after = len([stage for stage in holders if stage > pp])

        def other(layer: int) -> tuple[bool, bool]:
            reached = pp == 0 or any(n < layer for n in own)
            left = pp < self._degrees.pp - 1 and not any(n > layer for n in own)
            position = layers.index(layer)
            possible = (
                before <= position < len(layers) - after
                and all(n < layer for stage in range(pp) for n in numbers[stage])
                and all(
                    n > layer for stage in range(pp + 1, self._degrees.pp) for n in numbers[stage]
                )
            )
            return not (reached and not left), not possible

        return sorted(layers, key=other)

    def _of_optimizer(self, at: Coordinate, name: str) -> torch.Tensor:
        _, number, place, *key = name.split(".", 3)  # reft.relayout.element_map.tensor_name
        group, position, kind = int(number), int(place), "".join(key) or MASTER
        held = self._held[at.pp, at.tp]
        if held.parted:
            file = self._load(
                f"*zero_pp_rank_{at.dp}_mp_rank_{self._model_parallel(at):02d}_optim_states.pt"
            )
            wrapper = (file or {}).get("optimizer_state_dict") or {}
            self._check_names(at, wrapper, held)
            if kind == MASTER:
                return self._is_tensor(wrapper["single_partition_of_fp32_groups"][group], at, name)
            state, index = wrapper["base_optimizer_state"]["state"], group
        else:
            state = (self._model_file(at).get("optimizer") or {}).get("state") or {}
            index = sum(len(names) for names in held.groups[:group]) + position
        return self._is_tensor(state.get(index, {}).get(kind), at, name)

    def _check_names(self, at: Coordinate, wrapper: Mapping[str, Any], held: RankContents) -> None:
        """That the file is the one of these ranks: an order of ranks that reft does not know has
        others."""
        names = {name for group in wrapper.get("param_slice_mappings") or () for name in group}
        known = {name for group in held.groups for name in group}
        if not wrapper or not names <= known:
            raise self._lacks(at, "the partitions of its stage")

    def _is_tensor(self, value: Any, at: Coordinate, name: str) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise self._lacks(at, name)
        return value

    def _lacks(self, at: Coordinate, what: str) -> LayoutError:
        return LayoutError(
            f"{self._checkpoint} does not have {what} of {at} ({self._degrees}) where DeepSpeed's "
            "pipelines "
            f"put it; load it in the layout that wrote it"
        )
