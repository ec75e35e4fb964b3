"""The element map: the source of each element of a rank's state, when a version is restored in
another layout (PP x DP x TP). Pure.

Elements are identified by names. A parameter has the same name in all layouts (DeepSpeed's
``PipelineModule`` numbers layers over all stages), and so have its master (the copy that the
optimizer updates) and its optimizer state. The tensor-parallel slices of a parameter are equal
parts along one dimension. If the parameter consists of several matrices that follow each other
along this dimension (a gate and its input; queries, keys and values), each slice holds an equal
part of each matrix. Partitions of ZeRO-1 and 2 are equal parts of a group's concatenated
parameters, those of ZeRO-3 are equal parts of each parameter; both are padded with zeros.

If only the number of replicas differs, stages and slices keep their tensors. Then a list of the
tensors in the images suffices (:class:`RankImages`), and it does not matter which parameters they
belong to. Offsets and counts are in elements. Tensors have the names that they have in the images.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import NamedTuple

import msgpack

from reft.errors import LayoutError
from reft.grid import Coordinate, Degrees, Resize
from reft.recover.inventory import listing
from reft.recover.plan import Group

# The model's own weights; the other tensors of a parameter belong to the optimizer
WEIGHT = "model"
MASTER = "master"
WHOLE = -1  # Value of `Parameter.split` if every tensor slice has the complete parameter


class Parameter(NamedTuple):
    """A parameter of the model, as one tensor-parallel slice holds it."""

    name: str  # Name in the model
    shape: tuple[int, ...]  # Shape of this rank's slice
    # Dimension along which tensor parallelism splits the tensor equally; `WHOLE` if it is not
    # split; None if unknown
    split: int | None
    # Lengths of consecutive matrices along the dimension ``split``; empty if the parameter is one
    # matrix
    blocks: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class RankContents:
    """Describes the state of the ranks with the same (pp, tp). The description is equal on all
    replicas.

    Attributes:
        parameters: the model's parameters.
        groups: names of the optimizer's parameters by group, in the optimizer's order.
        kinds: for each group, the kinds of tensors that the optimizer has for a parameter:
            ``master`` and the names of its state tensors. A tensor has the name
            ``KIND.GROUP.POSITION``; in a flat group, the only position is 0.
        flat: whether the parameters of a group are concatenated in one tensor.
        parted: for each group, the number of elements of a tensor in one replica's partition; empty
            if the groups are not partitioned.
    """

    parameters: tuple[Parameter, ...]
    groups: tuple[tuple[str, ...], ...]
    kinds: tuple[tuple[str, ...], ...]
    flat: bool
    parted: tuple[int, ...] = ()

    def encode(self) -> bytes:
        fields = [
            list(map(tuple, self.parameters)),
            self.groups,
            self.kinds,
            self.flat,
            self.parted,
        ]
        body: bytes = msgpack.packb(fields)
        return body

    @classmethod
    def decode(cls, body: bytes) -> RankContents:
        parameters, groups, kinds, flat, parted = msgpack.unpackb(body)
        return cls(
            # Versions of an earlier release lack ``blocks``.
            tuple(
                Parameter(n, tuple(shape), split, *map(tuple, more))
                for n, shape, split, *more in parameters
            ),
            tuple(map(tuple, groups)),
            tuple(map(tuple, kinds)),
            flat,
            tuple(parted),
        )

    def extents(self, dp: int) -> Iterator[_Extent]:
        """Yield the ranges of all elements of replica ``dp``."""
        sizes = {p.name: p.numel for p in self.parameters}
        for name, numel in sizes.items():
            yield _Extent(WEIGHT, name, 0, numel, f"{WEIGHT}.{name}", 0)
        for group, names in enumerate(self.groups):
            for kind in self.kinds[group]:
                if not self.flat:
                    for position, name in enumerate(names):
                        yield _Extent(
                            kind, name, 0, sizes[name], tensor_name(kind, group, position), 0
                        )
                    continue
                part = self.parted[group] if self.parted else sum(sizes[name] for name in names)
                low = dp * part if self.parted else 0
                begin = 0
                for name in names:
                    end = begin + sizes[name]
                    first, last = max(begin, low), min(end, low + part)
                    if first < last:
                        tensor, at = tensor_name(kind, group, 0), first - low
                        yield _Extent(kind, name, first - begin, last - first, tensor, at)
                    begin = end

    def paddings(self, dp: int) -> Iterator[Padding]:
        """Yield the padding at the end of the groups that lies in the partition of replica
        ``dp``."""
        sizes = {p.name: p.numel for p in self.parameters}
        for group, part in enumerate(self.parted):
            filled = min(part, max(0, sum(sizes[name] for name in self.groups[group]) - dp * part))
            if filled < part:
                for kind in self.kinds[group]:
                    yield Padding(tensor_name(kind, group, 0), filled, part - filled)


class Part(NamedTuple):
    """A replica's part of elements that are divided equally among all replicas and padded at the
    end: the elements of a parameter group at ZeRO-1 and 2, those of one parameter at ZeRO-3.

    Attributes:
        name: name of the group or parameter, equal at every data-parallel degree.
        size: number of elements of one part, with padding.
        numel: number of elements of all parts, without padding.
    """

    name: str
    size: int
    numel: int

    def filled(self, dp: int) -> tuple[int, int]:
        """Return the first element of the part of replica ``dp``, and the number of elements in it
        without padding."""
        first = min(dp * self.size, self.numel)
        return first, min(self.size, self.numel - first)


@dataclass(frozen=True)
class RankImages:
    """Describes the state of the ranks with the same (pp, tp) by the tensors in their images.

    Attributes:
        whole: number of elements of each tensor that is equal on all replicas.
        parts: for each partitioned tensor, the parts that it consists of, in order.
    """

    whole: Mapping[str, int]
    parts: Mapping[str, tuple[Part, ...]]

    def located(self) -> Iterator[tuple[Part, str, int]]:
        """Yield every part, with its tensor and its first element in that tensor, which are equal
        on all replicas."""
        for tensor, parts in self.parts.items():
            at = 0
            for part in parts:
                yield part, tensor, at
                at += part.size

    def paddings(self, dp: int) -> Iterator[Padding]:
        for part, tensor, at in self.located():
            _, filled = part.filled(dp)
            if filled < part.size:
                yield Padding(tensor, at + filled, part.size - filled)


@dataclass(frozen=True)
class RankLayout:
    """Describes the state of all ranks of a job."""

    degrees: Degrees  # Parallel degrees of the job
    held: Mapping[Group, RankContents]  # Contents of the ranks, by (pp, tp)

    def stages(self) -> dict[str, set[int]]:
        found: dict[str, set[int]] = defaultdict(set)
        for (pp, _), held in self.held.items():
            for part in held.parameters:
                found[part.name].add(pp)
        return found


def tensor_name(kind: str, group: int, position: int) -> str:
    """Return the name of a tensor in an image."""
    if kind == MASTER:
        return f"{MASTER}.{group}.{position}"
    return f"optimizer.{group}.{position}.{kind}"


class ElementMove(NamedTuple):
    """Elements to move from a rank of the old layout to a rank of the new layout.

    Attributes:
        source: the old rank.
        tensor: tensor of the old rank.
        start: first element in the old tensor.
        numel: number of elements.
        target: tensor of the new rank.
        at: first element in the target.
    """

    source: Coordinate
    tensor: str
    start: int
    numel: int
    target: str
    at: int


class Padding(NamedTuple):
    target: str
    at: int
    numel: int


class _Extent(NamedTuple):
    """Elements [start, start + numel) of a rank's slice of a parameter, which begin at element
    ``at`` of a tensor."""

    kind: str
    name: str
    start: int
    numel: int
    tensor: str
    at: int


def plan_layout(old: RankLayout, new: RankLayout, at: Coordinate) -> tuple[ElementMove, ...]:
    """Plan the sources of all elements of the new rank ``at``, except paddings.

    Every element is written once. If several old ranks have an element (replicas, stages with a
    tied parameter, slices with an unsplit parameter), the source is the rank with the nearest
    coordinate.

    Args:
        old: the layout of the version.
        new: the layout of this job.
        at: the new rank.

    Raises:
        LayoutError: the layouts do not match.
    """
    splits = _splits(old, new)
    _check_same(old, new, splits)
    index, held = _Index(old.held, old.degrees.dp), new.held[at.pp, at.tp]
    shapes = {p.name: p.shape for p in held.parameters}
    moves: list[ElementMove] = []
    for extent in held.extents(at.dp):
        was, now = index.parts[extent.name].shape, shapes[extent.name]
        for tp, start, count, skip in _slices(extent, was, now, splits[extent.name], at.tp):
            here = extent._replace(start=start, numel=count, at=extent.at + skip)
            moves += index.moves(here, at, tp % old.degrees.tp)
    return tuple(moves)


def plan_replica(
    old: RankImages, new: RankImages, resize: Resize, at: Coordinate
) -> tuple[ElementMove, ...]:
    """Do :func:`plan_layout` for one (pp, tp), if only the number of replicas differs.

    Raises:
        LayoutError: the tensors do not match.
    """
    stored = {part.name: (part, tensor, start) for part, tensor, start in old.located()}
    _check_whole(old, new)
    _check_parts({name: part for name, (part, _, _) in stored.items()}, new, resize)
    own = resize.host_from(at.dp)
    moves = [
        ElementMove(replace(at, dp=own), name, 0, numel, name, 0)
        for name, numel in new.whole.items()
        if numel
    ]
    for part, tensor, target in new.located():
        was, source, start = stored[part.name]
        first, numel = part.filled(at.dp)
        done = 0
        while done < numel:
            dp, inside = divmod(first + done, was.size)
            count = min(numel - done, was.size - inside)
            moves.append(
                ElementMove(
                    replace(at, dp=dp), source, start + inside, count, tensor, target + done
                )
            )
            done += count
    return tuple(moves)


def _check_whole(old: RankImages, new: RankImages) -> None:
    for name in old.whole.keys() | new.whole.keys():
        was, now = old.whole.get(name), new.whole.get(name)
        if was != now:
            raise LayoutError(
                f"{name} has {was} elements in the version and {now} in the running job; expected "
                f"it equal on all replicas: {_AS_IT_WAS}"
            )


def _check_parts(stored: Mapping[str, Part], new: RankImages, resize: Resize) -> None:
    running = {part.name: part for part, _, _ in new.located()}
    for name in stored.keys() | running.keys():
        was, now = (parts.get(name, Part(name, 0, 0)) for parts in (stored, running))
        if not now.numel == was.numel <= min(resize.old * was.size, resize.new * now.size):
            raise LayoutError(
                f"{name} has {was.size} elements on each of {resize.old} replicas in the version "
                f"and {now.size} on each of {resize.new} in the running job; expected parts of "
                f"{now.numel} elements: {_AS_IT_WAS}"
            )


_AS_IT_WAS = "start the job with the model and the optimizer that wrote the version"


def _slices(
    extent: _Extent, old: tuple[int, ...], new: tuple[int, ...], split: _Split, slice_at: int
) -> Iterator[tuple[int, int, int, int]]:
    """Locate the elements of an extent in the old slices.

    Args:
        extent: elements of the new slice.
        old: shape of an old slice.
        new: shape of a new slice.
        split: how the parameter is divided among slices.
        slice_at: index of the new slice.

    Yields:
        The old slice, the first element in the old slice, the number of elements, and their offset
        within the extent.
    """
    dimension, whole = split
    if dimension == WHOLE or old == new:
        yield slice_at, extent.start, extent.numel, 0
        return
    whole = whole or (1,)
    total, was, width = sum(whole), old[dimension], new[dimension]
    # Begin of each matrix within an old and a new slice, then the end of the last matrix
    old_begins = [at * was // total for at in accumulate(whole, initial=0)]
    new_begins = [at * width // total for at in accumulate(whole, initial=0)]
    inner = prod(new[dimension + 1 :])
    position, end = extent.start, extent.start + extent.numel
    while position < end:
        row, inside = divmod(position, inner)
        outer, column = divmod(row, width)
        n = bisect_right(new_begins, column) - 1
        part, old_part = new_begins[n + 1] - new_begins[n], old_begins[n + 1] - old_begins[n]
        tp, there = divmod(slice_at * part + column - new_begins[n], old_part)
        # Count up to the end of the matrix's part in this row of the new slice, or in that of the
        # old slice, whichever comes first
        count = min(
            end - position, min(new_begins[n + 1] - column, old_part - there) * inner - inside
        )
        yield (
            tp,
            (outer * was + old_begins[n] + there) * inner + inside,
            count,
            position - extent.start,
        )
        position += count


class _Index:
    def __init__(self, held: Mapping[Group, RankContents], replicas: int) -> None:
        self._held = held
        self._replicas = replicas
        self._stages: dict[str, list[int]] = defaultdict(list)
        self.parts: dict[str, Parameter] = {}
        self._found: dict[Group, dict[tuple[str, str], list[tuple[int, int, _Extent]]]] = {}
        for (pp, tp), of_group in sorted(held.items()):
            for part in of_group.parameters if tp == 0 else ():
                self._stages[part.name].append(pp)
                self.parts.setdefault(part.name, part)

    def _of_group(self, group: Group) -> dict[tuple[str, str], list[tuple[int, int, _Extent]]]:
        if group not in self._found:
            found = defaultdict(list)
            for dp in range(self._replicas):
                for extent in self._held[group].extents(dp):
                    found[extent.kind, extent.name].append((extent.start, dp, extent))
            self._found[group] = {key: sorted(extents) for key, extents in found.items()}
        return self._found[group]

    def moves(self, extent: _Extent, at: Coordinate, tp: int) -> Iterator[ElementMove]:
        """Yield the moves of the elements of ``extent`` from the old slice ``tp`` to the new rank
        ``at``."""
        _, _, start, numel, _, target = extent
        stages = self._stages[extent.name]
        pp = at.pp if at.pp in stages else stages[0]
        extents = self._of_group((pp, tp))[extent.kind, extent.name]
        end = start + numel
        while start < end:
            last = bisect_right(extents, start, key=lambda e: e[0]) - 1
            begin = extents[last][0]
            same = [e for e in extents[: last + 1] if e[0] == begin]
            _, dp, found = next((e for e in same if e[1] == at.dp % self._replicas), same[0])
            here = min(end, begin + found.numel) - start
            if here <= 0:
                raise LayoutError(
                    f"elements [{start}, {end}) of {extent.name} ({extent.kind}) are not in the "
                    "version: its partitions do not make up the whole; expected those of one job"
                )
            source = Coordinate(pp, dp, tp)
            yield ElementMove(
                source, found.tensor, found.at + start - begin, here, extent.tensor, target
            )
            start, target = start + here, target + here


# --- checks ---------------------------------------------------------------------------------------


_Split = tuple[int, tuple[int, ...]]
"""The dimension along which slices divide a parameter (or :data:`WHOLE`), and the total lengths of
consecutive matrices over all slices."""


def _splits(old: RankLayout, new: RankLayout) -> dict[str, _Split]:
    """Determine how each parameter is divided among slices.

    The result for a parameter is :data:`WHOLE` if it is not divided, or if both layouts have the
    same slices.
    """
    splits_of: dict[str, set[_Split]] = defaultdict(set)
    for layout in (old, new):
        for held in layout.held.values():
            for part in held.parameters:
                if part.split is not None:
                    splits_of[part.name].add(
                        (part.split, tuple(n * layout.degrees.tp for n in part.blocks))
                    )
                else:
                    splits_of.setdefault(part.name, set())
    if old.degrees.tp == new.degrees.tp:
        return dict.fromkeys(splits_of, (WHOLE, ()))
    if several := [name for name, splits in splits_of.items() if len(splits) > 1]:
        raise LayoutError(
            f"slices share different dimensions, or parts of them, of {listing(several)} in "
            f"{old.degrees} and {new.degrees}; give every parameter the same partition_dim and "
            "partition_blocks in both"
        )
    if unknown := [name for name, splits in splits_of.items() if not splits]:
        raise LayoutError(
            f"{old.degrees} cannot become {new.degrees}: it is not known how tensor slices share "
            f"{listing(unknown)}. Declare it where the model is built, as Megatron does: "
            "parameter.partition_dim = the dimension that the slices share equally, or -1 where "
            "each slice has the whole; and parameter.partition_blocks = the lengths in it of the "
            "matrices that the slice has one behind the other, (its length,) where there is one"
        )
    return {name: splits.pop() for name, splits in splits_of.items()}


def _check_same(old: RankLayout, new: RankLayout, splits: Mapping[str, _Split]) -> None:
    was, now = _whole(old, splits), _whole(new, splits)
    for here, there, where in ((was, now, "the version"), (now, was, "the running job")):
        if alone := sorted(here.keys() - there.keys()):
            raise LayoutError(
                f"{where} alone has {listing(alone)}: parameters are identified by their names in "
                f"the model, which have to be the same in both layouts ({old.degrees} and "
                f"{new.degrees}); number the layers over all stages, as "
                "deepspeed.pipe.PipelineModule does"
            )
    for name in was:
        (old_shape, old_group, old_kinds), (new_shape, new_group, new_kinds) = was[name], now[name]
        if old_shape != new_shape:
            raise LayoutError(
                f"{name} has the shape {list(old_shape)} in the version ({old.degrees}) and "
                f"{list(new_shape)} in the running job ({new.degrees}), slices put together; start "
                "the job with the model that wrote the version"
            )
        if (old_group, old_kinds) != (new_group, new_kinds):
            raise LayoutError(
                f"{name} is in the optimizer's group {old_group} with {listing(old_kinds)} in the "
                f"version, and in group {new_group} with {listing(new_kinds)} in the running job; "
                "start the job with the optimizer and the parameter groups that wrote the version"
            )


_Whole = tuple[tuple[int, ...], int | None, tuple[str, ...]]


def _whole(layout: RankLayout, splits: Mapping[str, _Split]) -> dict[str, _Whole]:
    """Return complete shape, group and kinds of tensors of every parameter."""
    found: dict[str, _Whole] = {}
    for (pp, tp), held in sorted(layout.held.items()):
        groups = {name: group for group, names in enumerate(held.groups) for name in names}
        for part in held.parameters:
            group = groups.get(part.name)
            kinds = () if group is None else tuple(sorted(held.kinds[group]))
            shape = _whole_shape(part.shape, splits[part.name][0], layout.degrees.tp)
            shown = (shape, group, kinds)
            if found.setdefault(part.name, shown) != shown:
                raise LayoutError(
                    f"{part.name} of stage {pp}, slice {tp}, is {shown} there and "
                    f"{found[part.name]} on another rank (shape, optimizer's group, state): all "
                    "slices and stages have to hold it in the same way"
                )
    return found


def _whole_shape(shape: tuple[int, ...], split: int, slices: int) -> tuple[int, ...]:
    if split == WHOLE:
        return shape
    if split >= len(shape):
        raise LayoutError(
            f"found partition_dim {split} of a parameter with the shape {list(shape)}"
        )
    return (*shape[:split], shape[split] * slices, *shape[split + 1 :])
