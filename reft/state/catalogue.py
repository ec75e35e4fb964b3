"""Presents live tensors as one sequence of bytes: the image of a section (replicated or owned)
of a rank's state.

In a :class:`SectionImage` the memory of a list of tensors is laid end to end, each tensor at a
multiple of 64 bytes. Any byte range of the image can be copied out of, or into, the live
tensors. The image holds views, never copies, and never assigns a tensor's ``.data``: optimizers
keep views into flat buffers, which would then no longer share memory with the tensor.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Protocol

import torch

from reft.errors import LayoutError, UnsupportedStateError
from reft.grid import aligned
from reft.state import codec


@dataclass(frozen=True)
class TensorSpec:
    """Properties of a tensor that must be the same when it is copied and when it is restored."""

    name: str  # Name of the tensor, unique within the section
    dtype: str  # torch's name of the dtype without the module, such as ``bfloat16``
    shape: tuple[int, ...]  # Size of each dimension
    # Stride of each dimension in elements. Bytes are stored in memory order, so the strides
    # determine which element a byte belongs to
    stride: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name, dtype, tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def torch_dtype(self) -> torch.dtype:
        return codec.torch_dtype(self.dtype)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.torch_dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{list(self.shape)}"


_SECTIONS = ("replicated", "owned")


@dataclass(frozen=True)
class Manifest:
    """The list of tensors in both sections of one rank, in the order of the images."""

    replicated: tuple[TensorSpec, ...]
    owned: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, images: tuple[SectionImage, SectionImage]) -> Manifest:
        """Return the manifest of ``(replicated, owned)``."""
        return cls(images[0].specs, images[1].specs)

    def encode(self) -> bytes:
        """Return the manifest as bytes, for the host section."""
        return codec.encode(
            {
                name: [
                    [t.name, t.dtype, list(t.shape), list(t.stride)] for t in getattr(self, name)
                ]
                for name in _SECTIONS
            }
        )

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Manifest:
        fields = codec.decode(data)
        return cls(
            *(
                tuple(
                    TensorSpec(n, d, tuple(shape), tuple(stride))
                    for n, d, shape, stride in fields[name]
                )
                for name in _SECTIONS
            )
        )

    def check(self, images: tuple[SectionImage, SectionImage]) -> None:
        """Raise an error if images differ from this manifest in any tensor."""
        for section, image in zip(_SECTIONS, images, strict=True):
            _check_section(section, getattr(self, section), image.specs)


def _check_section(
    section: str, wanted: tuple[TensorSpec, ...], found: tuple[TensorSpec, ...]
) -> None:
    for w, f in zip(wanted, found, strict=False):
        if w != f:
            raise LayoutError(
                f"the {section} section of the snapshot has {w} (stride {w.stride}) where the "
                f"running job has {f} (stride {f.stride}); start the job with the model, optimizer "
                "and parallel degrees that took the snapshot"
            )
    if len(wanted) != len(found):
        extra = (wanted if len(wanted) > len(found) else found)[min(len(wanted), len(found))]
        raise LayoutError(
            f"the {section} section of the snapshot has {len(wanted)} tensors, the running job "
            f"{len(found)}; the first without a partner is {extra}"
        )


def end_to_end(sizes: Iterable[int]) -> tuple[tuple[int, ...], int]:
    """Return the offsets of tensors with the given sizes in an image, aligned like shards and
    blocks, and the size of the image."""
    offsets, end = [], 0
    for nbytes in sizes:
        offsets.append(end)
        end += aligned(nbytes)
    return tuple(offsets), end


class SectionImage:
    """The logical bytes of a section: live tensors laid end to end, each 64-byte aligned.

    Memory that appears twice (tied parameters, views of one storage) is stored once, under the
    name of the largest tensor or, of equally large ones, the first. The image may be used from a
    thread other than the training thread as long as the bytes themselves are not being written.

    Args:
        tensors: pairs of a unique name and a live tensor, in an order that is the same after
            every restart.

    Raises:
        UnsupportedStateError: a tensor does not fill its memory range exactly once (gaps,
            overlaps, expanded), is sparse, or partly overlaps another one.
    """

    def __init__(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        detached = [(name, t.detach()) for name, t in tensors]
        kept = _without_aliases(detached)
        # Watch aliases for writes as well: a view whose ``.data`` was assigned has a version
        # counter of its own.
        self._watched = [(name, t) for name, t in detached if not t.is_inference()]
        self.specs: tuple[TensorSpec, ...] = tuple(TensorSpec.of(name, t) for name, t in kept)
        # The memory of each tensor as 1-D uint8, in memory order.
        flat = (t.as_strided((t.numel(),), (1,), t.storage_offset()) for _, t in kept)
        self._views = [t.view(torch.uint8) for t in flat]
        self.offsets: tuple[int, ...]
        self.nbytes: int
        self.offsets, self.nbytes = end_to_end(view.numel() for view in self._views)
        self._index_parts()

    def _index_parts(self) -> None:
        # Leave out tensors of size zero, which have nothing to copy and may share an offset.
        parts = zip(self.offsets, self._views, self.specs, strict=True)
        self._parts = [part for part in parts if part[1].numel()]
        self._starts = [start for start, _, _ in self._parts]

    def write_counts(self) -> list[int]:
        """Return how often each tensor was written in place, as torch counts writes
        (``Tensor._version``). Torch does not count writes through ``.data`` and by other
        libraries."""
        return [t._version for _, t in self._watched]

    def written_since(self, counts: Sequence[int]) -> list[str]:
        """Return the names of the tensors that were written since :meth:`write_counts` returned
        ``counts``.
        """
        pairs = zip(self._watched, counts, strict=True)
        return [name for (name, t), count in pairs if t._version != count]

    def with_copies(
        self, names: Collection[str]
    ) -> tuple[SectionImage, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return the same image with copies in place of some tensors.

        Args:
            names: tensors to replace. The returned image no longer watches them for writes.

        Returns:
            The image, and for every replaced tensor ``(copy, live bytes)``, both 1-D uint8 on
            the tensor's device. The copies are uninitialised: the caller fills them before each
            version is taken.
        """
        addresses = {t.untyped_storage().data_ptr() for name, t in self._watched if name in names}
        image, pairs = copy.copy(self), []
        image._views = []
        for view in self._views:
            if view.untyped_storage().data_ptr() in addresses:
                pairs.append((torch.empty_like(view), view))
                image._views.append(pairs[-1][0])
            else:
                image._views.append(view)
        image._watched = [
            (name, t)
            for name, t in self._watched
            if t.untyped_storage().data_ptr() not in addresses
        ]
        image._index_parts()
        vars(image).pop("_addresses", None)
        return image, pairs

    @property
    def device(self) -> torch.device:
        """Device of the first tensor; the CPU for an empty section."""
        return self._views[0].device if self._views else torch.device("cpu")

    def live(self, start: int, stop: int) -> list[torch.Tensor]:
        """Return the live bytes of ``image[start : stop]`` without padding, as 1-D uint8 views."""
        return [v[max(0, start - o) : stop - o] for o, v, _ in self._overlapping(start, stop)]

    def tensors_at(self, start: int, stop: int) -> list[TensorSpec]:
        """Return the tensors that have bytes in ``image[start : stop]``, in order."""
        return [spec for _, _, spec in self._overlapping(start, stop)]

    def read_into(self, start: int, out: torch.Tensor) -> None:
        """Copy ``image[start : start + len(out)]`` into ``out`` (1-D uint8, contiguous). Padding
        becomes 0.

        Returns when the bytes have arrived. On a device, the copy runs on the calling thread's
        stream, without waiting for the training thread's stream. If that matters, use
        :meth:`pieces_into` and a copy engine.
        """
        for view, target in self.pieces_into(start, out):
            target.copy_(view)

    def pieces_into(self, start: int, out: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the copies to make so that ``out`` holds ``image[start : start + len(out)]``:
        pairs ``(live bytes, part of out)`` in image order, both 1-D uint8 views of equal size.
        Padding between the parts is set to 0 by this call."""
        position, stop = self._range(start, out)
        pieces = []
        for offset, view, _ in self._overlapping(start, stop):
            begin, end = max(start, offset), min(stop, offset + view.numel())
            out[position - start : begin - start].zero_()
            pieces.append((view[begin - offset : end - offset], out[begin - start : end - start]))
            position = end
        out[position - start :].zero_()
        return pieces

    def write_from(
        self,
        start: int,
        data: torch.Tensor,
        copy: Callable[[torch.Tensor, torch.Tensor], object] = torch.Tensor.copy_,
    ) -> None:
        """Copy ``data`` (1-D uint8) into the live tensors at ``image[start : start +
        len(data)]``. Each part is copied by ``copy(live bytes, part of data)``, with 1-D uint8
        views of equal size."""
        _, stop = self._range(start, data)
        for offset, view, _ in self._overlapping(start, stop):
            begin, end = max(start, offset), min(stop, offset + view.numel())
            copy(view[begin - offset : end - offset], data[begin - start : end - start])

    def locate(self, tensor: torch.Tensor) -> int | None:
        """Return the offset in bytes of a tensor's first element in the image; None if the
        tensor is not in the image or has no elements.

        The tensor must lie entirely within one tensor of the image. Its element at ``index`` is
        then at ``offset + itemsize * sum(index * stride)``.
        """
        extent = _extent_bytes(tensor)
        if not extent:
            return None
        address = tensor.data_ptr()
        starts, parts = self._addresses.get(str(tensor.device), ([], []))
        at = bisect_right(starts, address) - 1
        if at < 0:
            return None
        offset, view = parts[at]
        inside = address + extent <= starts[at] + view.numel()
        return offset + address - starts[at] if inside else None

    @cached_property
    def _addresses(self) -> dict[str, tuple[list[int], list[tuple[int, torch.Tensor]]]]:
        """For each device: the start addresses of the image's tensors in ascending order, and
        for each address the offset in the image and the tensor."""
        by_device: dict[str, tuple[list[int], list[tuple[int, torch.Tensor]]]] = {}
        for offset, view, _ in sorted(self._parts, key=lambda part: part[1].data_ptr()):
            starts, parts = by_device.setdefault(str(view.device), ([], []))
            starts.append(view.data_ptr())
            parts.append((offset, view))
        return by_device

    def _range(self, start: int, data: torch.Tensor) -> tuple[int, int]:
        if data.dtype != torch.uint8 or data.dim() != 1:
            raise ValueError(
                f"found a {data.dtype} tensor of {data.dim()} dimensions; expected 1-D uint8"
            )
        stop = start + data.numel()
        if start < 0 or stop > self.nbytes:
            raise ValueError(
                f"bytes [{start}, {stop}) are not within the image of {self.nbytes} bytes"
            )
        return start, stop

    def _overlapping(self, start: int, stop: int) -> list[tuple[int, torch.Tensor, TensorSpec]]:
        first = max(0, bisect_right(self._starts, start) - 1)
        last = bisect_right(self._starts, stop - 1) if stop > start else first
        return [
            part
            for part in self._parts[first:last]
            if part[0] < stop and part[0] + len(part[1]) > start
        ]


class Adapter(Protocol):
    """Interface to the model and optimizer of one rank, as images and host values. Every
    supported optimizer class has an implementation."""

    @property
    def steps_exactly(self) -> bool:
        """Whether a host can repeat a device's optimizer step bit for bit."""

    @property
    def written_by_steps(self) -> frozenset[str]:
        """Names of the tensors in the images that a step writes before its optimizer writes.
        They are copied aside when the step begins."""

    def images(self) -> tuple[SectionImage, SectionImage]:
        """Return the images of the live tensors as ``(replicated, owned)``. They must be built
        again when :meth:`signature` changes."""

    def expected_bytes(self) -> tuple[int, int]:
        """Return the sizes of ``(replicated, owned)`` in bytes, as they are once the optimizer
        has created its state in its first step."""

    def signature(self) -> Hashable:
        """Return a value that changes if and only if :meth:`images` would differ, because a
        tensor appeared, moved or grew."""

    def prepare(
        self, manifest: Manifest, host_state: dict[str, Any]
    ) -> tuple[SectionImage, SectionImage]:
        """Create in the optimizer the state entries that the version has, so that the images
        match its manifest. Return the images into which the bytes are to be written."""


def _without_aliases(tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors without those that lie within another tensor of the list, so that every
    byte is stored once."""
    seen: set[str] = set()
    for name, tensor in tensors:
        if name in seen:
            raise ValueError(
                f"the tensor name {name!r} appears twice; names must be unique in a section"
            )
        seen.add(name)
        check_dense(name, tensor)
    sized = [(i, t) for i, (_, t) in enumerate(tensors) if t.numel()]
    # Sort by address; of tensors that start at the same address, the longest comes first, then
    # the first in the list.
    sized.sort(key=lambda p: (str(p[1].device), p[1].data_ptr(), -_extent_bytes(p[1]), p[0]))
    dropped: set[int] = set()
    device, end, owner = None, 0, ""
    for i, tensor in sized:
        start, stop = tensor.data_ptr(), tensor.data_ptr() + _extent_bytes(tensor)
        if tensor.device == device and start < end:
            if stop > end:
                raise UnsupportedStateError(
                    f"the tensors {owner} and {tensors[i][0]} share a part of their memory; "
                    "expected them "
                    f"to be apart or one within the other: give one of them memory of its own"
                )
            dropped.add(i)
        else:
            device, end, owner = tensor.device, stop, tensors[i][0]
    return [t for i, t in enumerate(tensors) if i not in dropped]


def check_dense(name: str, tensor: torch.Tensor) -> None:
    if not codec.is_plain(tensor):
        raise UnsupportedStateError(
            f"{name} is a tensor of class {codec.class_path(tensor)}; expected a plain torch.Tensor"
        )
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_conj():
        raise UnsupportedStateError(
            f"{name} is a {tensor.dtype} tensor with layout {tensor.layout} on {tensor.device}; "
            "expected a dense tensor with memory of its own"
        )
    if not _is_dense(tensor):
        raise UnsupportedStateError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())}, which "
            "leave gaps in its memory or visit a byte twice; make it contiguous"
        )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill one range of memory, each byte exactly once (in any order
    of dimensions).
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return True
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the first to the last element; 0 for a tensor without
    elements.
    """
    if not tensor.numel():
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
